"""`python -m benchmarks dual`: batches, variants that are what they are called, all rows and fields, and the page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.command import main
from benchmarks.speed.dual import measure as dual
from benchmarks.speed.dual import options
from benchmarks.speed.dual.page import page
from benchmarks.speed.steps import private_run
from benchmarks.speed.timing import Stopwatch, Timing
from scipy import stats

TINY = dual.Setting(items=200, batch=8)
STAGES = {"forward", "settling", "backward", "collect", "norms", "sums", "selection", "noise", "update"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Two vocabularies, two batch sizes."""
    return dual.bench_dual([100, 200], [4, 8], repeats=2, memory=False)


# ------------------------------------------------------------------ batches


def test_batches() -> None:
    torch.manual_seed(0)
    setting = dual.Setting(items=50, batch=4000)
    history, candidates, target = dual.draw_batch(setting)
    assert history.shape == (4000, 20) and candidates.shape == (4000, 64) and target.shape == (4000,)
    assert torch.equal(candidates[:, 0], target)
    for ids in (history, candidates):
        assert int(ids.min()) == 1 and int(ids.max()) == 50
    share = (history == 1).double().mean()
    assert float(share) == pytest.approx(math.log(2) / math.log(51), abs=0.01)
    negatives = torch.bincount(candidates[:, 1:].flatten(), minlength=51)[1:]
    assert stats.chisquare(negatives.numpy()).pvalue > 1e-6
    assert len(torch.unique(candidates[:, 1:], dim=0)) == 4000  # each unit has its own
    assert dual.touched_by((history, candidates, target)) == 100


def test_variants_share_the_tables_memory() -> None:
    work = dual.workload(TINY)
    one, other = work.make(True), work.make(False)
    for name in ("context_table", "label_table"):
        tables = [getattr(model, name) for model in (one, other)]
        assert tables[0].weight.data_ptr() == tables[1].weight.data_ptr()
        assert tables[0].weight.shape == (201, 128) and tables[0].num_embeddings == 201
        assert tables[0].sparse and not tables[1].sparse and not tables[0].weight[0].any()
    assert TINY.table_bytes == sum(4 * getattr(one, name).weight.numel() for name in ("context_table", "label_table"))


# ------------------------------------------------------------------ variants


@pytest.mark.parametrize("name", list(dual.VARIANTS))
def test_variants_are_what_they_are_called(name: str) -> None:
    """By the rows that a step changes: those that are looked up, or all."""
    work = dual.workload(TINY)
    tables = [work.make(True).context_table.weight, work.make(True).label_table.weight]  # type: ignore[union-attr]
    variant = dual.make_variant(name, work, TINY)
    before = [table.detach().clone() for table in tables]
    variant.step()
    looked_up = [torch.unique(work.batch[0]).tolist(), torch.unique(work.batch[1]).tolist()]
    for table, old, ids in zip(tables, before, looked_up):
        changed = (table != old).any(1).nonzero().flatten().tolist()
        if name in ("sgd", "eana", "lazydp"):
            assert changed == ids
        else:
            assert changed == list(range(201)) if name == "dpsgd" else changed != ids
    plain = {"forward", "backward", "update"}
    assert set(variant.watch.stages) >= plain and set(variant.watch.stages) <= STAGES
    assert ("settling" in variant.watch.stages) == (name == "lazydp")
    assert name != "sgd" or set(variant.watch.stages) == plain
    if variant.settle is not None:
        assert name == "lazydp"
        variant.settle()
        assert all((table != old).any(1).all() for table, old in zip(tables, before))


def test_lazydp_has_something_to_settle_in_its_first_step() -> None:
    work = dual.workload(TINY)
    table = work.make(True).label_table.weight  # type: ignore[union-attr]
    before = table.detach().clone()
    variant = dual.make_variant("lazydp", work, TINY)
    assert torch.equal(table, before) and variant.settle is not None
    variant.settle()
    assert (table != before).any(1).all()
    assert variant.watch.stages == {}  # the step that it waits is not measured


def test_adafest_selects_about_as_many_rows_as_are_touched() -> None:
    setting = dual.Setting(items=20_000, batch=16)
    work = dual.workload(setting)
    run = private_run(work, Stopwatch(), dual._mechanism("adafest", work, setting), sparse=True)
    run.step()
    report = run.optimizer.last_step
    false = sum(table.rows_false for table in report.tables.values())
    assert 0.5 * report.rows_touched < false < 2 * report.rows_touched


# ------------------------------------------------------------------ the benchmark


def test_all_rows_and_fields(result: dict[str, Any]) -> None:
    settings = [(200, 4), (100, 4), (100, 8)]
    found = [(row["setting"]["items"], row["setting"]["batch"], row["variant"]) for row in result["rows"]]
    assert found == [(*setting, name) for setting in settings for name in dual.VARIANTS]
    assert result["base"] == {"items": 200, "batch": 4} and result["left_out"] == []
    assert (result["dim"], result["length"], result["negatives"]) == (128, 20, 63)
    for row in result["rows"]:
        same = {other["variant"]: other["best"] for other in result["rows"] if other["setting"] == row["setting"]}
        assert 0 < row["best"] <= row["median"] and row["spread"] >= 0 and row["repeats"] == 2
        assert row["steps_per_second"] == pytest.approx(1 / row["best"])
        assert row["ratio_to_sgd"]["best"] == pytest.approx(row["best"] / same["sgd"])
        assert row["ratio_to_eana"]["best"] == pytest.approx(row["best"] / same["eana"])
        assert row["dpsgd_over_this"]["best"] == pytest.approx(same["dpsgd"] / row["best"])
        assert row["base"] == (row["setting"] == result["base"]) and row["rows_touched"] <= 400
        assert (
            row["varied"]
            == {(200, 4): ["items"], (100, 4): ["items", "batch"], (100, 8): ["batch"]}[
                row["setting"]["items"], row["setting"]["batch"]
            ]
        )
    json.dumps(result)


def test_only_slow_steps_have_fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[dict[str, int]] = []

    def count(variants: Any, repeats: dict[str, int], *rest: Any) -> dict[str, Timing]:
        counted.append(repeats)
        return dict.fromkeys(variants, Timing(1.0, 1.0, 0.0))

    monkeypatch.setattr(dual, "interleaved", count)
    dual._measure(TINY, list(dual.VARIANTS), 20, 3)
    monkeypatch.setattr(dual, "_SLOW_BYTES", 1.0)
    dual._measure(TINY, list(dual.VARIANTS), 20, 3)
    dual._measure(TINY, list(dual.VARIANTS), 2, 3)
    assert [counts["dpsgd"] for counts in counted] == [20, 3, 2]
    assert [counts["eana"] for counts in counted] == [20, 20, 2]


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    big = dual.Setting(items=10**7)
    working = 64 * 64 * 84 * 128
    for memory, wanted in (
        (2 * big.table_bytes + working, list(dual.VARIANTS)),
        (2 * big.table_bytes + working - 1, ["sgd", "eana", "lazydp", "adafest"]),
        (big.table_bytes, []),
    ):
        monkeypatch.setattr(dual, "available_memory", lambda memory=memory: memory)
        assert dual.that_fit(big) == wanted
    monkeypatch.setattr(dual, "available_memory", lambda: 0)
    said: list[str] = []
    found = dual.bench_dual([100], [4], say=said.append)
    assert found["rows"] == [] and found["left_out"][0]["variants"] == list(dual.VARIANTS)
    assert "does not fit" in said[0] and "Left out at 100 items" in page(found, [])


@pytest.mark.slow
def test_memory_of_every_row() -> None:
    result = dual.bench_dual([20_000, 40_000], [8], repeats=1)
    assert len(result["rows"]) == 10
    for row in result["rows"]:
        share = row["memory"] / dual.Setting(**row["setting"]).table_bytes
        assert 0.9 < share < 1.6 if row["variant"] == "dpsgd" else share < 0.5  # a gradient of the tables' size


# ------------------------------------------------------------------ the command and the page


def test_the_papers_settings_are_the_defaults() -> None:
    from benchmarks.speed.papers.published import EANA_TABLE_3

    assert options.FULL["items"] == tuple(speeds.items for speeds in EANA_TABLE_3)
    assert options.FULL["batch"][0] == 64 and dual.NEGATIVES == 63


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["dual", "--quick", "--items=60", "--items=90", "--batch=4", "--repeats=1"]
    argv += [f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "90 items, batch 4" in shown.out and "steps/s" in shown.out and "settling" in shown.out
    assert "1/2" in shown.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["setting"]["items"] for row in found["rows"] if row["variant"] == "sgd"] == [90, 60]
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert "dual_speed.png" in plots and plots <= {"dual_speed.png", "dual_stages.png"}
    text = page(found, [*plots, "tied_stages.png"])
    assert text.startswith("# ") and "![dual speed](dual_speed.png)" in text and "tied" not in text


def test_the_command_refuses_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dual", f"--json={tmp_path / 'nowhere' / 'out.json'}"]) == 2
    assert "nowhere" in capsys.readouterr().err
    for wrong in ("--items=0", "--batch=none", "--repeats=-1", "--slow-repeats=0"):
        with pytest.raises(SystemExit):
            main(["dual", wrong])


def test_the_section_has_the_results_numbers(result: dict[str, Any]) -> None:
    result = json.loads(json.dumps(result))
    row = next(row for row in result["rows"] if row["base"] and row["variant"] == "lazydp")
    row |= {"best": 0.0123, "median": 0.0234, "spread": 0.0011, "steps_per_second": 1 / 0.0123}
    row["ratio_to_sgd"], row["dpsgd_over_this"] = {"best": 1.11, "median": 1.22}, {"best": 77.7, "median": 66.6}
    row["memory"] = round(0.021 * dual.Setting(200).table_bytes)
    lines = page(result, []).splitlines()
    (line,) = [line for line in lines if line.startswith("| 200 | 4 | LazyDP")]
    assert "| 12.3 (23.4 ± 1.1) | 81.3 | 1.11 (1.22) |" in line
    assert "| 77.7 (66.6) | 0.0 (2.1 %) |" in line
    firsts = [line.split(" | ")[:3] for line in lines if line.startswith(("| 1", "| 2"))]
    assert [(a, b) for a, b, _ in firsts] == [("| 100", "4")] * 5 + [("| 200", "4")] * 5 + [("| 100", "8")] * 5


def test_the_section_without_dpsgd(result: dict[str, Any]) -> None:
    rows = [
        {k: v for k, v in row.items() if k != "dpsgd_over_this"} for row in result["rows"] if row["variant"] != "dpsgd"
    ]
    gone = {"setting": asdict(TINY), "variants": ["dpsgd"], "reason": "not enough memory"}
    text = page({**result, "rows": rows, "left_out": [gone]}, [])
    assert "| DP-SGD |" not in text and "Left out at 200 items, batch 8, not enough memory: DP-SGD." in text
    assert next(line for line in text.splitlines() if line.startswith("| 200 | 4 | EANA")).endswith("| - | - |")


def test_plots_of_nothing(tmp_path: Path, result: dict[str, Any]) -> None:
    from benchmarks.speed.dual.plots import write_plots

    assert write_plots({**result, "rows": []}, tmp_path) == []
    even = [{**row, "ratio_to_sgd": {"best": 1.0, "median": 1.0}} for row in result["rows"]]
    assert write_plots({**result, "rows": even}, tmp_path) == ["dual_speed.png", "dual_stages.png"]
