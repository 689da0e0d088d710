"""`python -m benchmarks tied`: the baselines' clipped sums, and that all rows and fields come out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.command import main, make_parser
from benchmarks.speed.ghost import add_ghost, add_unit_gradients, dense_step, ghost_squares, unit_losses
from benchmarks.speed.peaks import Peak
from benchmarks.speed.tied import measure as tied
from benchmarks.speed.tied import options
from benchmarks.speed.timing import Stopwatch
from torch import Tensor, nn

from sparsedp.clipping import Clipping
from support import capture_uses, one_by_one

LIGHT = ("plain", "plain_chunked", "softmax")
TINY = tied.Setting(items=30, length=6, batch=5)
STAGES = {
    "candidates", "forward", "settling", "backward", "collect", "selection", "noise", "unit gradients", "norms", "sums", "update"
}  # fmt: skip


def clipped_sum(model: nn.Module, batch: tuple[Tensor, Tensor], clip: float) -> dict[str, Tensor]:
    """One unit at a time."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for unit in range(len(batch[0])):
        one = [tensor[unit : unit + 1] for tensor in batch]
        (gradients,) = one_by_one(model, one[:1], lambda logits, one=one: unit_losses(logits, one[1]).sum())
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        for name, g in gradients.items():
            total[name] += g * float(clip / norm.clamp_min(clip))
    return total


# ------------------------------------------------------------------ baselines


@pytest.mark.parametrize("form", ["per-example", "ghost"])
@pytest.mark.parametrize("most", [1, 1 << 20])
def test_baselines_form_the_clipped_sum(form: str, most: int) -> None:
    torch.manual_seed(0)
    model = tied.make_model(TINY, tied=form != "ghost").double()
    batch = tied.draw_batch(tied.Setting(items=30, length=6, batch=5, filled=0.7))
    wanted = clipped_sum(model, batch, 0.8)
    out = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters()}  # what is there already stays
    add = add_ghost if form == "ghost" else add_unit_gradients
    add(model, batch, Clipping(0.8), out, most)
    for name, value in wanted.items():
        torch.testing.assert_close(out[name].detach() - 0.5, value, rtol=1e-8, atol=1e-11)
    assert all(p.grad is None for p in model.parameters())


def test_ghost_norms_of_the_output_table() -> None:
    torch.manual_seed(0)
    model = tied.make_model(TINY, tied=False).double()
    history, target = tied.draw_batch(TINY)
    uses = capture_uses(model, [history], lambda logits: unit_losses(logits, target).sum()).uses["output_table.weight"]
    torch.testing.assert_close(ghost_squares(uses, tied.DIM, 1), uses.squared_norms(5), rtol=1e-9, atol=0)


def test_a_baselines_step_adds_noise_to_every_row() -> None:
    torch.manual_seed(0)
    model = tied.make_model(TINY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = Stopwatch()
    batch = tied.draw_batch(TINY)
    dense_step(model, add_unit_gradients, lambda: batch, watch, 1 << 20, lr=1.0, noise_multiplier=500.0)()
    moved = torch.cat([(before[name] - p.detach()).flatten() for name, p in model.named_parameters()])
    assert float(moved.abs().min()) > 0
    assert float(moved.std()) == pytest.approx(100, rel=0.05)  # 500 * clip 1 / 5 units; the clipped sum is below 1
    assert set(watch.stages) == {"noise", "unit gradients", "update"}


# ------------------------------------------------------------------ the benchmark


def test_batches() -> None:
    history, target = tied.draw_batch(tied.Setting(items=50, length=40, batch=200, filled=0.75))
    assert history.shape == target.shape == (200, 40)
    assert int(history.max()) <= 50 and int(target.max()) <= 50
    lengths = (history != 0).sum(1)
    assert int(lengths.min()) >= 20 and float(lengths.double().mean() / 40) == pytest.approx(0.75, abs=0.03)
    assert torch.equal(history != 0, torch.arange(40) < lengths[:, None]) and torch.equal(history != 0, target != 0)
    assert torch.equal(history[:, 1:][target[:, 1:] != 0], target[:, :-1][target[:, 1:] != 0])
    full, _ = tied.draw_batch(TINY)
    assert int(full.min()) >= 1


def test_all_rows_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied, "QUANTITIES", {"length": tied.Quantity("Length", lambda s: [s, tied.Setting(30, 3, 5)])})
    result = tied.bench_tied(TINY, vary=["length"], repeats=1, slow_repeats=1, memory=False)
    elsewhere = [name for name in tied.VARIANTS if name not in tied.SLOW]
    assert [row["variant"] for row in result["rows"]] == [*tied.VARIANTS, *elsewhere]
    assert result["base"] == asdict(TINY) and result["largest"] == []
    assert [gone["variants"] for gone in result["left_out"]] == [["per_example", "ghost"]]
    for row in result["rows"]:
        assert 0 < row["best"] <= row["median"] and row["spread"] >= 0 and row["repeats"] == 1
        assert row["varied"] == ["length"] and row["base"] == (row["setting"]["length"] == 6)
        assert row["ratio_to_plain"]["best"] > 0 and row["ratio_to_chunked"]["best"] > 0
        assert "update" in row["stages"] and set(row["stages"]) <= STAGES
        assert row["variant"] != "plain" or row["ratio_to_plain"] == {"best": 1.0, "median": 1.0}
    json.dumps(result)


def test_settings_along_the_quantities() -> None:
    base = tied.Setting()
    values = {name: list(quantity.values(base)) for name, quantity in tied.QUANTITIES.items()}
    assert [s.items for s in values["items"]] == [1000, 3400, 10_000, 30_000]
    assert [s.length for s in values["length"]] == [20, 50, 100, 200]
    assert [s.filled for s in values["filled"]] == [0.5, 1.0]
    assert all(base in settings for settings in values.values())


def test_variants_are_what_they_are_called() -> None:
    batch = tied.draw_batch(TINY)
    for name, stages in {
        "plain": {"forward", "backward", "update"},
        "plain_chunked": {"forward", "backward", "update"},
        "logits": {"forward", "backward", "collect", "noise", "norms", "sums", "update"},
        "softmax": {"forward", "backward", "collect", "noise", "norms", "sums", "update"},
        "ghost": {"forward", "backward", "noise", "norms", "sums", "update"},
    }.items():
        variant = tied.make_variant(name, TINY, lambda: batch)
        variant.step()
        assert set(variant.watch.stages) == stages
    for name in ("adafest", "lazydp"):
        variant = tied.make_variant(name, TINY, lambda: batch)
        variant.step()
        assert {"candidates", "selection", "norms", "sums"} <= set(variant.watch.stages)
        assert ("settling" in variant.watch.stages) == (name == "lazydp")


def test_what_takes_too_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    big = tied.Setting(items=30_000, length=200, batch=64)
    assert tied._working("ghost", big) == float("inf")
    assert tied._working("plain", big) == 6 * 4 * 64 * 200 * 30_000
    monkeypatch.setattr(tied, "available_memory", lambda: 0)
    said: list[str] = []
    found = tied.bench_tied(TINY, vary=[], say=said.append)
    assert found["rows"] == [] and found["left_out"][0]["variants"] == list(tied.VARIANTS)
    assert "does not fit" in said[0]


def test_the_largest_batch_is_where_the_line_reaches_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tied.fit_line([1, 2, 4], [7, 9, 13]) == (pytest.approx(2), pytest.approx(5))
    each = {"softmax": 10**7, "ghost": 0}

    def answer(runs: Any, args: tuple[tied.Setting, list[str], int], small: tuple) -> dict[str, Peak]:
        return {name: Peak(3 * 10**8 + each[name] * args[0].batch, 0) for name in args[1]}

    monkeypatch.setattr(tied, "peaks", answer)
    softmax, ghost = tied.largest_batches(TINY, ["softmax", "ghost"], 1.0)
    assert softmax["batches"] == [16, 32, 64] and softmax["bytes_each"] == pytest.approx(1e7)
    assert softmax["largest_batch"] in (69, 70)
    assert ghost["batches"] == [2, 4, 6] and ghost["largest_batch"] is None


@pytest.mark.slow
def test_memory_in_a_process_of_its_own() -> None:
    """Without privacy, several tensors of the logits' size are kept; with table_softmax_loss none is, private or not."""
    found = tied.largest_batches(tied.Setting(items=20_000, length=50), LIGHT, 16.0)
    each = {own["variant"]: own["bytes_each"] for own in found}
    logits = 4 * 50 * 20_000
    assert each["plain"] > 1.5 * logits
    assert each["plain_chunked"] < logits / 4 and each["softmax"] < 0.6 * logits  # activations, whatever the vocabulary


def test_the_command_knows_all_names() -> None:
    assert ["plain", *options.COMPARED] == list(tied.VARIANTS)
    for name in tied.QUANTITIES:
        assert make_parser().parse_args(["tied", f"--vary={name}"]).vary == [name]
    for name in options.COMPARED:
        assert make_parser().parse_args(["tied", f"--variant={name}"]).variant == [name]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tied", "--quick", "--items=40", "--length=5", "--batch=4", "--repeats=1", "--vary=filled"]
    argv += ["--variant=softmax", "--variant=ghost", f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "table_softmax_loss" in shown.out and "Positions that are not padding" in shown.out
    assert "AdaFEST" not in shown.out and "1/2" in shown.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["variant"] for row in found["rows"]} == {"plain", "softmax", "ghost"}
    assert [row["setting"]["filled"] for row in found["rows"] if row["variant"] == "plain"] == [1.0, 0.5]
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert plots <= {"tied_filled.png", "tied_stages.png"} and "tied_filled.png" in plots


def test_plots_of_everything(tmp_path: Path) -> None:
    from benchmarks.speed.tied.plots import write_plots

    result = tied.bench_tied(TINY, vary=[], variants=["softmax"], repeats=1, memory=False)
    for row in result["rows"]:
        row["varied"], row["ratio_to_plain"] = ["items", "length"], {"best": 1.0, "median": 1.0}
    result["largest"] = [{"variant": "plain", "largest_batch": 10}, {"variant": "ghost", "largest_batch": None}]
    assert write_plots(result, tmp_path) == [
        "tied_items.png", "tied_length.png", "tied_stages.png", "tied_batch.png"
    ]  # fmt: skip


def test_the_command_refuses_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tied", f"--json={tmp_path / 'nowhere' / 'out.json'}"]) == 2
    assert "nowhere" in capsys.readouterr().err
    for wrong in ("--items=0", "--batch=0", "--repeats=-1", "--vary=dim", "--variant=adam", "--gigabytes=0"):
        with pytest.raises(SystemExit):
            main(["tied", wrong])
