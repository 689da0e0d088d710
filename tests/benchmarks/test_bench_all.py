"""`python -m benchmarks all`: parts in processes of their own, one file of results, and the pages that are made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.command import main, make_parser
from benchmarks.speed import all_parts, budget
from benchmarks.speed.pages import FIGURES, pages
from benchmarks.speed.parts import PARTS, options_of, page_of, plots_of
from benchmarks.speed.processes import ROOT

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
    return {"command": "python -m benchmarks step", "seconds": 3.0, "commit": None, "day": "2030-01-02", **result}


def test_every_part_has_its_files() -> None:
    folder = ROOT / "benchmarks" / "speed"
    assert {path.parent.name for path in folder.glob("*/measure.py")} == set(PARTS)
    for part in PARTS:
        assert {path.stem for path in (folder / part).glob("*.py")} >= {"measure", "options", "page", "plots"}
        assert callable(options_of(part).measure) and callable(options_of(part).show)
        assert callable(page_of(part).page) and callable(plots_of(part).write_plots)


@pytest.mark.parametrize("part", [*PARTS, "all", "page", "compare"])
def test_help(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([part, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: python -m benchmarks {part}" in out
    wanted = {
        "all": ("--quick", "--folder", "--part"),
        "page": ("--folder",),
        "compare": ("--base", "--part", "--mechanism", "--quick", "--json"),
    }
    assert all(option in out for option in wanted.get(part, ("--quick", "--json", "--plots")))


def test_help_names_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in (*PARTS, "all", "page", "compare"))
    for argv in ([], ["speed"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
    assert make_parser().parse_args(["all"]).folder == Path("runs/bench")


@pytest.mark.slow
def test_a_real_part_ends_on_the_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["all", "--quick", "--part=noise", f"--folder={folder}"]) == 0
    found = json.loads((folder / "results.json").read_text())
    assert list(found) == ["noise"] and found["noise"]["command"] == "python -m benchmarks noise --quick"
    assert (folder / "README.md").read_text().startswith("# How fast is it")
    text = (folder / "noise.md").read_text()
    assert text.startswith("# Noise\n") and (folder / "noise_sources.png").is_file()
    fastest = min(row["nanoseconds_each"] for row in found["noise"]["rows"])
    assert f"| {fastest:.2f} |" in text
    assert "ChaCha8" in text and "1/1" in capfd.readouterr().out


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parts that measure nothing: what each of them returns, None for one that fails."""
    results: dict[str, Any] = {}
    monkeypatch.setattr(all_parts, "_run_part", lambda part, quick: results[part])
    return results


def test_a_part_that_fails_stops_no_other(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake |= {"step": step_result(), "noise": None}
    argv = ["all", f"--folder={tmp_path}", "--part=noise", "--part=step"]
    assert main(argv) == 1
    assert list(json.loads((tmp_path / "results.json").read_text())) == ["step"]
    assert "failed: noise" in capsys.readouterr().out


def test_a_part_alone_keeps_the_others(fake: dict[str, Any], tmp_path: Path) -> None:
    fake |= {"step": step_result(1.5), "noise": {"benchmark": "noise", "machine": MACHINE, "rows": []}}
    assert main(["all", f"--folder={tmp_path}", "--part=noise", "--part=step"]) == 0
    fake["step"] = step_result(1.25)
    assert main(["all", f"--folder={tmp_path}", "--part=step"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found) == {"noise", "step"}
    assert found["step"]["rows"][0]["ratio"]["best"] == 1.25


def test_the_page_again_without_a_run(fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["page", f"--folder={tmp_path}"]
    assert main(argv) == 2 and "There is no results.json" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("{")
    assert main(argv) == 2 and "is not JSON" in capsys.readouterr().err
    (tmp_path / "results.json").write_text(json.dumps({"step": with_origin(step_result())}))
    assert main(argv) == 0
    assert "# A step against plain PyTorch" in (tmp_path / "step.md").read_text()
    front = (tmp_path / "README.md").read_text()
    assert "[step](step.md)" in front and "tied.md" not in front and "![" not in front
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md", "budget.md", "papers.md", "results.json", "step.md", "step_pctr.png"
    }  # fmt: skip


def test_the_budget_says_what_is_met() -> None:
    for text in (budget.section, budget.page):
        met, missed = text({"step": step_result(0.98)}), text({"step": step_result(1.5)})
        assert "| 0.98 | yes |" in met and "| 1.5 | no |" in missed
        assert text({}) == ""
        assert "not meant" in text({"step": {"command": "python -m benchmarks step --quick", **step_result()}})
        assert "not meant" not in met
    assert "What is not met" in budget.page({"step": step_result(1.5)})
    assert "What is not met" not in budget.page({"step": step_result(0.98)})


def test_a_line_of_the_budget_is_over_all_of_its_places() -> None:
    result = step_result(0.98)
    result["rows"].append({**result["rows"][0], "mechanism": "eana", "ratio": {"best": 1.08, "median": 1.1}})
    assert "| at most 1.05 | 0.98 to 1.08 | 1 of 2 |" in budget.section({"step": result})
    assert budget.page({"step": result}).count("| at most 1.05 |") == 2


def test_at_least_is_not_at_most() -> None:
    for text in (budget.section, budget.page):
        rows = [{"rows": 10, "variant": "adafest", "best": 1.0, "dpsgd_over_this": {"best": 400.0}}]
        assert "| at least 400 | 400 | yes |" in text({"vocabulary": {"rows": rows}})
        rows[0]["dpsgd_over_this"] = {"best": 200.0}
        assert "| at least 400 | 200 | no |" in text({"vocabulary": {"rows": rows}})


def test_pictures_are_shown_where_they_belong() -> None:
    found = pages({"step": with_origin(step_result())}, ["step_pctr.png", "tied_items.png", *FIGURES])
    assert "](step_pctr.png)" in found["step.md"] and "tied_items" not in "".join(found.values())
    assert all(f"]({name})" in found["README.md"] and f"]({name})" not in found["step.md"] for name in FIGURES)


# ------------------------------------------------------------------ the committed pages

DOCS = ROOT / "docs" / "speed"


def committed() -> dict[str, str]:
    return {path.name: path.read_text() for path in DOCS.glob("*.md")}


def test_the_committed_pages_are_what_the_results_give() -> None:
    results = json.loads((DOCS / "results.json").read_text())
    assert set(results) == set(PARTS)
    assert pages(results, [path.name for path in DOCS.glob("*.png")]) == committed()


def test_the_front_page_is_one_screen() -> None:
    front = committed()["README.md"]
    assert len(front.splitlines()) <= 40 and all(f"]({name})" in front for name in FIGURES) and len(FIGURES) == 3
    assert front.count("| at ") == len(budget.LINES)


def test_links_of_the_committed_pages_lead_somewhere() -> None:
    linked = {name for text in committed().values() for name in re.findall(r"\]\(([^)#]+)\)", text)}
    assert {name for name in linked if not (DOCS / name).is_file()} == set()
    assert linked >= {path.name for path in DOCS.iterdir()}
