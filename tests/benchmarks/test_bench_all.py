"""`sparsedp bench all`: parts in processes of their own, one file of results, and the page that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsedp.cli import benchall
from sparsedp.cli.bench import PARTS
from sparsedp.cli.main import main
from sparsedp.report.speed import budget
from sparsedp.report.speed.page import SECTIONS, page

MACHINE = {"threads": 2, "python": "3.11", "torch": "2.13", "sparsedp": "0"}


def timing(best: float) -> dict[str, float]:
    return {"best": best, "median": 1.1 * best, "spread": 0.1 * best}


def step_result(ratio: float = 1.5) -> dict[str, Any]:
    row = {
        "model": "pctr", "batch": 8, "mechanism": "adafest", "plain": timing(0.1), "private": timing(0.1 * ratio),
        "ratio": {"best": ratio, "median": ratio}, "plain_stages": {"forward": 0.04}, "stages": {"forward": 0.05, "norms": 0.01},
    }  # fmt: skip
    return {"benchmark": "step", "scale": 0.1, "machine": MACHINE, "rows": [row]}


def with_origin(result: dict[str, Any]) -> dict[str, Any]:
    return {"command": "sparsedp bench step", "seconds": 3.0, "commit": None, "day": "2030-01-02", **result}


def test_every_part_has_its_section() -> None:
    assert set(SECTIONS) == set(PARTS)


def test_a_real_part_ends_on_the_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["bench", "all", "--quick", "--part=noise", f"--folder={folder}"]) == 0
    found = json.loads((folder / "results.json").read_text())
    assert list(found) == ["noise"] and found["noise"]["command"] == "sparsedp bench noise --quick"
    text = (folder / "README.md").read_text()
    assert text.startswith("# How fast is it") and "## Noise" in text
    fastest = min(row["nanoseconds_each"] for row in found["noise"]["rows"])
    assert f"| {fastest:.2f} |" in text
    assert "ChaCha8" in text and "1/1" in capfd.readouterr().out


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parts that measure nothing: what each of them returns, None for one that fails."""
    results: dict[str, Any] = {}
    monkeypatch.setattr(benchall, "_run_part", lambda part, quick, folder: results[part])
    return results


def test_a_part_that_fails_stops_no_other(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake |= {"step": step_result(), "noise": None}
    argv = ["bench", "all", f"--folder={tmp_path}", "--part=noise", "--part=step"]
    assert main(argv) == 1
    assert list(json.loads((tmp_path / "results.json").read_text())) == ["step"]
    assert "failed: noise" in capsys.readouterr().out


def test_a_part_alone_keeps_the_others(fake: dict[str, Any], tmp_path: Path) -> None:
    fake |= {"step": step_result(1.5), "noise": {"benchmark": "noise", "machine": MACHINE, "rows": []}}
    assert main(["bench", "all", f"--folder={tmp_path}", "--part=noise", "--part=step"]) == 0
    fake["step"] = step_result(1.25)
    assert main(["bench", "all", f"--folder={tmp_path}", "--part=step"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found) == {"noise", "step"}
    assert found["step"]["rows"][0]["ratio"]["best"] == 1.25


def test_the_page_again_without_a_run(fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "all", f"--folder={tmp_path}", "--page-only"]
    assert main(argv) == 2 and "There is no results.json" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("{")
    assert main(argv) == 2 and "is not JSON" in capsys.readouterr().err
    (tmp_path / "results.json").write_text(json.dumps({"step": with_origin(step_result())}))
    assert main(argv) == 0
    assert "## A step against plain PyTorch" in (tmp_path / "README.md").read_text()


def test_the_budget_says_what_is_met() -> None:
    met, missed = budget.section({"step": step_result(0.98)}), budget.section({"step": step_result(1.5)})
    assert "| 0.98 | yes |" in met and "| 1.5 | no |" in missed
    assert budget.section({}) == ""
    assert "not meant" in budget.section({"step": {"command": "sparsedp bench step --quick", **step_result()}})
    assert "not meant" not in met


def test_at_least_is_not_at_most() -> None:
    rows = [{"rows": 10, "variant": "adafest", "best": 1.0, "dpsgd_over_this": {"best": 400.0}}]
    assert "| at least 300 | 400 | yes |" in budget.section({"vocabulary": {"rows": rows}})
    rows[0]["dpsgd_over_this"] = {"best": 200.0}
    assert "| at least 300 | 200 | no |" in budget.section({"vocabulary": {"rows": rows}})


def test_pictures_are_shown_where_they_belong() -> None:
    text = page({"step": with_origin(step_result())}, ["step_pctr.png", "tied_items.png"])
    assert "](step_pctr.png)" in text and "tied_items" not in text
