"""`python -m benchmarks growth`: fits, what is varied, and that all rows and fields come out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.command import main, make_parser
from benchmarks.speed.growth import measure as growth
from benchmarks.speed.growth import options
from benchmarks.speed.growth.page import page
from benchmarks.speed.growth.plots import write_plots
from benchmarks.speed.steps import private_run
from benchmarks.speed.tied import measure as tied
from benchmarks.speed.timing import Stopwatch
from scipy.stats import linregress

TINY = growth.Click(batch=8, tables=2, rows=40, dim=4)
TINY_SEQUENCE = tied.Setting(items=20, length=4, batch=3)
PLENTY = 1 << 40

# ------------------------------------------------------------------ fits


@pytest.mark.parametrize("exponent", [-0.3, 0.0, 0.7, 1.0, 2.0])
def test_fits_recover_exponents(exponent: float) -> None:
    x = [10, 30, 100, 300, 1000]
    for fit in (growth.fit_power, growth.fit_top):
        found = fit(x, [0.02 * value**exponent for value in x])
        assert found is not None and found.exponent == pytest.approx(exponent, abs=1e-12)
        assert found.error == pytest.approx(0, abs=1e-9) and found.last == 1000


def test_the_error_is_that_of_least_squares() -> None:
    generator = np.random.default_rng(0)
    x = np.array([1.0, 2, 4, 8, 16, 32])
    y = 3 * x**0.6 * np.exp(generator.normal(0, 0.1, len(x)))
    wanted = linregress(np.log(x), np.log(y))
    found = growth.fit_power(x.tolist(), y.tolist())
    assert found is not None and found.points == 6
    assert found.exponent == pytest.approx(wanted.slope) and found.error == pytest.approx(wanted.stderr)
    assert abs(found.exponent - 0.6) < 4 * wanted.stderr


def test_the_top_half_shows_what_fixed_costs_hide() -> None:
    x = [1, 2, 4, 8, 16]
    y = [4.0 + value for value in x]
    whole, top = growth.fit_power(x, y), growth.fit_top(x, y)
    assert whole is not None and top is not None
    assert (top.first, top.points) == (4, 3)  # from the geometric middle on
    assert whole.exponent < top.exponent < 1
    two = growth.fit_top([1, 2, 4, 8], [1, 2, 4, 8])
    assert two is not None and two.error is None and two.points == 2 and two.exponent == pytest.approx(1)


def test_no_fit_without_two_values() -> None:
    assert growth.fit_power([5], [1.0]) is None and growth.fit_power([5, 5], [1.0, 2.0]) is None
    assert growth.fit_top([1, 10], [1.0, 2.0]) is None


def test_exponents_of_rows() -> None:
    rows = [
        {"model": "click", "quantity": "rows", "variant": variant, "value": x, "best": 0.1 * x**power}
        for variant, power in (("dpsgd", 1.0), ("eana", 0.0))
        for x in (10, 100, 1000)
    ]
    rows.append({"model": "click", "quantity": "dim", "variant": "eana", "value": 8, "best": 1.0})
    found = growth.find_exponents(rows)
    assert [(fit["quantity"], fit["variant"]) for fit in found] == [("rows", "dpsgd"), ("rows", "eana")]
    assert [fit["exponent"] for fit in found] == pytest.approx([1, 0])
    assert [fit["top"]["exponent"] for fit in found] == pytest.approx([1, 0])
    assert found[0]["first"] == 10 and found[0]["last"] == 1000 and found[0]["top"]["first"] == 100


# ------------------------------------------------------------------ what is varied


@pytest.mark.parametrize("defaults", [options.FULL, options.QUICK])
def test_ranges_are_wide(defaults: dict[str, int]) -> None:
    bases: dict[str, Any] = {
        "click": growth.Click(*(defaults[key] for key in ("batch", "tables", "rows", "dim"))),
        "sequence": tied.Setting(defaults["items"], defaults["length"], defaults["sequences"]),
    }
    for model, kind in growth.MODELS.items():
        for name, quantity in kind.quantities.items():
            settings = list(quantity.values(bases[model]))
            values = [getattr(setting, name) for setting in settings]
            assert bases[model] in settings and values == sorted(set(values)) and len(values) >= 4
            assert max(values) >= (100 if name == "rows" else 8) * min(values)
            assert all(replace(setting, **{name: values[0]}) == settings[0] for setting in settings)  # nothing else


def test_small_values_come_once() -> None:
    values = growth.MODELS["click"].quantities["tables"].values(replace(TINY, tables=1))
    assert [setting.tables for setting in values] == [1, 2, 4]


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = growth.Click(rows=1000), growth.Click(rows=100_000)

    def fit(available: int) -> dict[growth.Click, list[str]]:
        monkeypatch.setattr(growth, "available_memory", lambda: available)
        return growth.that_fit([large, small])

    everything, room = list(growth.VARIANTS), 50_000_000  # for activations
    assert fit(PLENTY) == {large: everything, small: everything}
    some = fit(2 * small.table_bytes + large.table_bytes + room)
    assert list(some) == [large, small] and some[small] == everything
    assert some[large] == [name for name in everything if name != "dpsgd"]
    assert fit(2 * small.table_bytes + room) == {large: [], small: everything}
    assert fit(0) == {large: [], small: []}
    assert growth.sequences_that_fit([TINY_SEQUENCE])[TINY_SEQUENCE] == []
    monkeypatch.setattr(growth, "available_memory", lambda: PLENTY)
    assert growth.sequences_that_fit([TINY_SEQUENCE])[TINY_SEQUENCE] == list(growth.SEQUENCE_VARIANTS)


def test_variants_share_the_tables_memory() -> None:
    work = growth.workload(TINY)
    one, other = work.make(True), work.make(False)
    assert [table.weight.shape for table in one.tables] == [(40, 4)] * 2
    assert all(a.weight.data_ptr() == b.weight.data_ptr() for a, b in zip(one.tables, other.tables))
    assert all(table.sparse for table in one.tables)


def test_adafest_selects_about_as_many_rows_as_are_touched() -> None:
    setting = growth.Click(batch=64, tables=4, rows=5000, dim=4)
    work = growth.workload(setting)
    run = private_run(work, Stopwatch(), growth._mechanism("adafest", work, setting), sparse=True)
    run.step()
    report = run.optimizer.last_step
    assert report is not None
    false = sum(table.rows_false for table in report.tables.values())
    assert 0.5 * report.rows_touched < false < 2 * report.rows_touched


def test_another_batch_for_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(growth, "plain_step", lambda work: lambda: seen.append(work.batch[1]))
    steps = growth.click_steps(TINY, ["plain"])
    for _ in range(2):
        steps.renew()
        steps.run["plain"]()
    assert seen[0].shape == (8, 2) and not torch.equal(*seen)


# ------------------------------------------------------------------ the benchmark


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory; and what is timed here need not be warm."""
    monkeypatch.setattr(growth, "available_memory", lambda: PLENTY)
    monkeypatch.setattr(growth, "WARMUP", 0)


@pytest.mark.slow
def test_all_rows_and_fields(plenty: None, tmp_path: Path) -> None:
    result = growth.bench_growth(TINY, TINY_SEQUENCE, vary=["rows", "length"], repeats=1, slow_repeats=1, memory=False)
    rows = [row for row in result["rows"] if row["quantity"] == "rows"]
    assert [(row["value"], row["variant"]) for row in rows] == [
        (value, name) for value in (4, 12, 40, 120, 400) for name in growth.VARIANTS
    ]
    lengths = [row for row in result["rows"] if row["quantity"] == "length"]
    assert [row["value"] for row in lengths if row["variant"] == "plain"] == [1, 2, 4, 8, 16]
    for row in result["rows"]:
        assert 0 < row["best"] <= row["median"] and row["spread"] >= 0 and row["repeats"] == 1
        assert row["setting"][row["quantity"]] == row["value"] and row["ratio_to_plain"]["best"] > 0
    assert len(result["exponents"]) == 5 + 4 and result["left_out"] == []
    assert result["click"] == asdict(TINY) and result["benchmark"] == "growth"
    for row in rows:
        row["memory"] = 8 * row["value"] * 10**6
    text = page(json.loads(json.dumps(result)), ["growth_rows.png", "tied_items.png"])
    assert text.startswith("# ") and "![growth rows](growth_rows.png)" in text and "tied_items" not in text
    assert "| rows of a table | 4 to 400 |" in text and "| DP-SGD | 32.0 | 96.0 | 320.0 | 960.0 | 3,200.0 |" in text
    assert write_plots(result, tmp_path) == ["growth_rows.png", "growth_length.png", "growth_memory.png"]


def test_a_section_without_some_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "available_memory", lambda: 2_000_000)
    large = replace(TINY, rows=200_000)
    result = growth.bench_growth(large, TINY_SEQUENCE, vary=["rows"], repeats=1, memory=False)
    assert {name for gone in result["left_out"] for name in gone["variants"]} >= {"dpsgd"}
    text = page(result, [])
    assert "for want of memory" in text and "Tied Transformer" not in text


@pytest.mark.slow
def test_memory_of_every_row(plenty: None) -> None:
    """A gradient of the tables' size for DP-SGD, and next to nothing for EANA."""
    base = growth.Click(batch=8, rows=100_000, tables=2)
    result = growth.bench_growth(base, TINY_SEQUENCE, vary=["tables", "length"], repeats=1)
    assert all(row["memory"] >= 0 for row in result["rows"])
    for row in result["rows"]:
        if row["quantity"] == "tables" and row["value"] > 1 and row["variant"] in ("dpsgd", "eana"):
            share = row["memory"] / growth.Click(**row["setting"]).table_bytes
            assert 0.9 < share < 1.6 if row["variant"] == "dpsgd" else share < 0.2


def test_the_command_knows_all_names() -> None:
    for name in growth.VARIED:
        assert make_parser().parse_args(["growth", f"--vary={name}"]).vary == [name]
    assert set(options.FULL) == set(options.QUICK) == set(options._HELP)


def test_the_command(plenty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "growth",
        "--quick",
        "--batch=8",
        "--tables=2",
        "--rows=40",
        "--dim=4",
        "--repeats=1",
        "--vary=batch",
    ]
    argv += [f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "Click model, around batch 8, 2 tables of 40 rows, dim 4" in shown.out and "units in a batch" in shown.out
    assert "Click model, units in a batch: 2, 4, 8, 16, 32" in shown.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["variant"] for row in found["rows"]} == set(growth.VARIANTS)
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["growth_batch.png"]
    for wrong in ("--rows=0", "--vary=skew", "--repeats=many"):
        with pytest.raises(SystemExit):
            main(["growth", wrong])
