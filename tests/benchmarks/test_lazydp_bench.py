"""`python -m benchmarks lazydp`: access patterns, the baselines' clipped sums, and that all rows and fields come out."""

from __future__ import annotations

import functools
import itertools
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.command import main, make_parser
from benchmarks.speed.access import HOT_ROWS, SKEWS, draw_ids
from benchmarks.speed.baselines import add_materialised, add_reweighted, dense_step
from benchmarks.speed.lazydp import measure as lazydp
from benchmarks.speed.lazydp import options
from benchmarks.speed.lazydp.page import page
from benchmarks.speed.timing import Stopwatch, interleaved
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from cases import dlrm_batch, small_dlrm
from sparsedp.clipping import Clipping
from sparsedp.errors import UnsupportedError
from sparsedp.models import DLRM
from sparsedp.sampling import BatchInfo
from support import one_by_one

# ------------------------------------------------------------------ access patterns


def test_ids_have_the_right_shape_and_range() -> None:
    assert draw_ids([3, 50], 7).shape == (7, 2)
    assert draw_ids([3, 50], 7, pooling=4).shape == (7, 2, 4)
    assert draw_ids([3, 50], 0).shape == (0, 2)
    for skew in SKEWS:
        ids = draw_ids([1, 3, 50], 400, pooling=5, skew=skew)
        assert ids.dtype == torch.int64 and int(ids.min()) == 0
        assert ids.flatten(0, 1).shape == (1200, 5)
        assert [int(ids[:, t].max()) for t in range(3)] == [0, 2, 49]
    with pytest.raises(ValueError, match="skew must be one of"):
        draw_ids([3], 2, skew="extreme")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pooling must be at least 1"):
        draw_ids([3], 2, pooling=0)


@pytest.mark.parametrize("skew", list(HOT_ROWS))
def test_ninety_per_cent_of_the_lookups_go_to_the_hot_rows(skew: Any) -> None:
    rows, draws = 1000, 200_000
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(draw_ids([rows], draws, skew=skew, generator=generator).flatten(), minlength=rows).double()
    hot = round(rows * HOT_ROWS[skew])
    assert float(counts[:hot].sum() / draws) == pytest.approx(0.9, abs=0.005)
    # Evenly: chi-squared within each part, five standard deviations.
    for part in (counts[:hot], counts[hot:]):
        expected = part.mean()
        excess = ((part - expected) ** 2 / expected).sum() - (len(part) - 1)
        assert abs(float(excess)) < 5 * (2 * len(part)) ** 0.5


def test_uniform_ids_are_even() -> None:
    counts = torch.bincount(draw_ids([100], 100_000).flatten(), minlength=100)
    assert int(counts.min()) > 800 and int(counts.max()) < 1200


# ------------------------------------------------------------------ baselines


def ours(model: nn.Module, inputs: tuple[Tensor, ...], clip: float) -> dict[str, Tensor]:
    """The clipped mean by the library itself: what a step without noise and with learning rate 1 moves."""
    *x, y = inputs
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = sparsedp.PrivacyEngine(seed=0)
    loader: Any = DataLoader(TensorDataset(torch.zeros(100, 1)), batch_size=len(y))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=loader, noise_multiplier=0.0,
        max_grad_norm=clip,
    )  # fmt: skip
    loader.current = BatchInfo(len(y), len(y), True, True, 0)
    binary_cross_entropy_with_logits(model(*x), y).backward()
    optimizer.step()
    assert 0 < optimizer.last_step.clipped_share < 1
    engine.close()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return moved


@pytest.mark.parametrize("add", [add_materialised, add_reweighted])
@pytest.mark.parametrize("pooling", [1, 4])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("units_at_once", [3, 100])
def test_baselines_form_our_clipped_sum(add: Any, pooling: int, sparse: bool, units_at_once: int) -> None:
    torch.manual_seed(1)
    model = small_dlrm(pooling, sparse).double()
    x, ids, y = dlrm_batch(12, pooling)
    inputs = (x.double(), ids, y.double())
    losses = lambda output: binary_cross_entropy_with_logits(output, output.new_ones(output.shape))  # noqa: E731
    norms = [
        sum(float(g.square().sum()) for g in unit.values()) ** 0.5 for unit in one_by_one(model, inputs[:2], losses)
    ]
    clip = sorted(norms)[6]
    wanted = ours(model, inputs, clip)
    start = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters()}  # what is there already stays
    out = {name: value.clone() for name, value in start.items()}
    dense = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    add(
        model,
        lambda: binary_cross_entropy_with_logits(model(*inputs[:2]), inputs[2], reduction="none"),
        Clipping(clip),
        out,
        12.0,
        room=torch.empty(units_at_once * dense, dtype=torch.float64),
    )
    for name, value in wanted.items():
        torch.testing.assert_close(out[name] - start[name], value, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("form", ["B", "R"])
def test_a_baselines_step_adds_noise_to_every_row(form: Any) -> None:
    torch.manual_seed(0)
    model = small_dlrm(sparse=True)
    x, ids, y = dlrm_batch(8)
    buffers = {name: torch.empty_like(p, requires_grad=False) for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = Stopwatch()
    step = dense_step(
        model,
        lambda: binary_cross_entropy_with_logits(model(x, ids), y, reduction="none"),
        form,
        units=8, buffers=buffers, watch=watch, lr=1.0, noise_multiplier=800.0,
    )  # fmt: skip
    step()
    moved = torch.cat([(before[name] - p.detach()).flatten() for name, p in model.named_parameters()])
    assert float(moved.abs().min()) > 0
    assert float(moved.std()) == pytest.approx(100, rel=0.2)  # 800 * clip 1 / 8 units; the clipped sum is below 1
    extra = {"unit gradients", "sums"} if form == "B" else {"second backward"}
    assert set(watch.stages) == {"noise", "forward", "backward", "norms", "update"} | extra


def test_baselines_refuse_what_they_would_get_wrong() -> None:
    def run(model: nn.Module, x: Tensor) -> None:
        out = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        add_materialised(model, lambda: model(x).flatten(1).sum(1), Clipping(1.0), out)

    layer = nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match="'0' is called twice"):
        run(nn.Sequential(layer, layer), torch.ones(2, 3))
    with pytest.raises(UnsupportedError, match="several positions"):
        run(nn.Sequential(layer), torch.ones(2, 4, 3))
    with pytest.raises(UnsupportedError, match="LayerNorm"):
        run(nn.Sequential(nn.LayerNorm(3)), torch.ones(2, 3))
    with pytest.raises(UnsupportedError, match="without padding"):
        run(nn.Sequential(nn.Embedding(4, 3, padding_idx=0)), torch.ones(2, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="mode 'sum'"):
        run(nn.Sequential(nn.EmbeddingBag(4, 3)), torch.ones(2, 2, dtype=torch.int64))


# ------------------------------------------------------------------ timing


def test_slow_variants_sit_turns_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # every run takes one: longer than a turn
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    order: list[str] = []
    batches: list[int] = []
    timings = interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"}, {"a": 6, "b": 2}, 2, lambda: batches.append(1)
    )
    assert order == [*"aab", *"aaab", *"aaab"]  # two turns to warm up, and one
    assert len(batches) == len(order) and set(timings) == {"a", "b"}


def test_short_steps_follow_one_another() -> None:
    order: list[str] = []
    interleaved({name: lambda name=name: order.append(name) for name in "ab"}, repeats=2, warmup=0)
    assert "".join(order) == "aaaaabbbbb" * 2


def test_a_stage_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 5.0, 6.0, 8.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watch("outer"):  # 0 to 9
        with watch("inner"):  # 1 to 5
            pass
        with watch("inner"):  # 6 to 8
            pass
    watch.lap()
    assert watch.stages == {"outer": 3.0, "inner": 6.0}


# ------------------------------------------------------------------ the benchmark

TINY = lazydp.Setting(gigabytes=0.0005, batch=32)


@pytest.fixture(autouse=True)
def narrow_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPerf's networks take longer than everything that is tested here."""
    monkeypatch.setattr(lazydp, "DLRM", functools.partial(DLRM, bottom=(8,), top=(8,)))


@pytest.mark.slow
def test_all_rows_and_fields() -> None:
    result = lazydp.bench_lazydp(TINY, vary=["skew"], repeats=1, slow_repeats=1, memory=False)
    skews = [row["setting"]["skew"] for row in result["rows"] if row["variant"] == "sgd"]
    assert skews == ["uniform", "low", "medium", "high"]
    slow = ["dpsgd_b", "dpsgd_r", "lazydp_unaggregated"]  # not measured everywhere
    elsewhere = [name for name in lazydp.VARIANTS if name not in slow]
    assert [row["variant"] for row in result["rows"]] == list(lazydp.VARIANTS) + 3 * elsewhere
    assert result["base"] == asdict(TINY) and not any("memory" in row for row in result["rows"])
    assert [gone["variants"] for gone in result["left_out"]] == [slow] * 3
    for row in result["rows"]:
        assert 0 < row["best"] <= row["median"] and row["spread"] >= 0 and row["repeats"] == 1
        assert row["varied"] == ["skew"] and row["base"] == (row["setting"]["skew"] == "uniform")
        assert row["ratio_to_sgd"]["best"] > 0 and row["dpsgd_f_over_this"]["best"] > 0
        assert {"forward", "backward", "update"} <= set(row["stages"])
        assert 26 <= row["rows_touched"] <= 32 * 26 and row["table_rows"] == sum(TINY.table_sizes)
        assert ("settle" in row) == (row["variant"] == "lazydp")
        assert row["variant"] != "sgd" or row["ratio_to_sgd"] == {"best": 1.0, "median": 1.0}
    json.dumps(result)


def test_settings_along_the_quantities() -> None:
    base = lazydp.Setting(gigabytes=4.0, batch=2048)
    values = {name: list(quantity.values(base)) for name, quantity in lazydp.QUANTITIES.items()}
    assert [s.batch for s in values["batch"]] == [1024, 2048, 4096]
    assert [s.gigabytes for s in values["gigabytes"]] == pytest.approx([0.4, 1.2, 4])
    assert [s.pooling for s in values["pooling"]] == [1, 10, 30]
    assert [s.skew for s in values["skew"]] == list(SKEWS)
    assert all(base in settings for settings in values.values())
    assert base.table_bytes == pytest.approx(4e9, rel=1e-3)


def test_variants_share_the_tables_memory() -> None:
    work = lazydp.workload(TINY)
    one, other = work.make(True), work.make(False)
    assert [t.num_embeddings for t in one.tables] == TINY.table_sizes
    assert all(a.weight.data_ptr() == b.weight.data_ptr() for a, b in zip(one.tables, other.tables))
    assert all(table.sparse for table in one.tables)


def test_noise_waits_as_long_as_in_a_long_run() -> None:
    """Simulated: the steps that a touched row's noise has waited, once every row was touched several times."""
    rows, touched, steps = 400, 20, 400
    generator = torch.Generator().manual_seed(0)
    last, waits = torch.zeros(rows), []
    for step in range(1, steps):
        ids = torch.randperm(rows, generator=generator)[:touched]
        waits.append(float((step - last[ids]).mean()))
        last[ids] = step
    wanted = lazydp.waiting_steps([rows, 3], [touched, 3], rounds=5)
    assert wanted == 20 and sum(waits[200:]) / 199 == pytest.approx(wanted, rel=0.1)
    assert lazydp.waiting_steps([100, 300], [10, 10], rounds=5) == 20  # all noise that is added is settled
    assert lazydp.waiting_steps([50], [10], rounds=5) == 0


def test_lazydp_starts_with_waiting_rows() -> None:
    work = lazydp.workload(TINY)
    watch = Stopwatch()
    run = lazydp.private_run(work, watch, sparsedp.LazyDP(), sparse=True)
    run.wait(3)
    assert run.engine.ledger.steps == 3 and sum(run.engine.pending().values()) == sum(TINY.table_sizes)
    assert watch.stages == {}  # these steps are not measured
    run.step()
    assert {"settling", "forward", "noise", "update"} <= set(watch.stages)
    assert all(value > 0 for value in watch.stages.values())
    report = run.engine._optimizer.last_step  # type: ignore[union-attr]
    assert report.units == 32 and report.mean_norm > 0


def test_settling_is_a_stage_like_the_others() -> None:
    """Of a lookup, within the forward pass, once for each table; and of all rows at the end."""
    work = lazydp.workload(TINY)
    run = lazydp.private_run(work, Stopwatch(), sparsedp.LazyDP(), sparse=True)
    run.step()
    entered: list[str] = []

    def stage(name: str) -> AbstractContextManager[None]:
        entered.append(name)
        return nullcontext()

    run.optimizer.stage = stage
    run.step()
    assert entered[:27] == [*["settling"] * 26, "collect"]
    assert {"collect", "selection", "noise", "norms", "sums", "update"} <= set(entered)
    entered.clear()
    run.engine.settle()
    assert entered == ["settling"]


def test_adafest_selects_about_as_many_rows_as_are_touched() -> None:
    setting = lazydp.Setting(gigabytes=0.02, batch=64)
    work = lazydp.workload(setting)
    mechanism = lazydp._mechanism("adafest", work, setting)
    run = lazydp.private_run(work, Stopwatch(), mechanism, sparse=True)
    run.step()
    report = run.engine._optimizer.last_step  # type: ignore[union-attr]
    false = sum(table.rows_false for table in report.tables.values())
    assert 0.5 * report.rows_touched < false < 2 * report.rows_touched


def test_what_does_not_fit_is_left_out() -> None:
    names, setting = list(lazydp.VARIANTS), lazydp.Setting(gigabytes=10.0)
    tables, working = setting.table_bytes, 2 * lazydp.MATERIALISED
    assert lazydp._that_fit(names, setting, working + 3 * tables) == names
    two = lazydp._that_fit(names, setting, working + 2 * tables)
    assert "dpsgd_f" in two and "dpsgd_b" not in two and "dpsgd_r" not in two
    assert "dpsgd_r" in lazydp._that_fit(["sgd", "dpsgd_r"], setting, working + 2 * tables)
    one = lazydp._that_fit(names, setting, working + tables)
    assert "dpsgd_f" not in one and "lazydp" in one
    assert lazydp._that_fit(names, setting, tables) == []


def test_left_out_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazydp, "available_memory", lambda: 0)
    said: list[str] = []
    found = lazydp.bench_lazydp(TINY, vary=[], say=said.append)
    assert found["rows"] == [] and found["left_out"][0]["variants"] == list(lazydp.VARIANTS)
    assert "does not fit" in said[0]


@pytest.mark.slow
def test_memory_of_every_row() -> None:
    base = lazydp.Setting(gigabytes=0.05, batch=8)
    result = lazydp.bench_lazydp(base, vary=["batch"], variants=["dpsgd_f", "lazydp"], repeats=1, slow_repeats=1)
    share = {(row["setting"]["batch"], row["variant"]): row["memory"] / base.table_bytes for row in result["rows"]}
    assert set(share) == {(batch, name) for batch in (4, 8, 16) for name in ("sgd", "dpsgd_f", "lazydp")}
    for (_, name), own in share.items():  # a gradient of the tables' size, and the model's working memory
        assert 0.9 < own < 3 if name == "dpsgd_f" else own < 2
    text = page(result, [])
    assert text.count("peak memory beyond the tables, MB") == 1 and "memory beyond the tables, MB (share)" in text


def test_the_command_knows_all_names() -> None:
    assert ["sgd", *options.COMPARED] == list(lazydp.VARIANTS)
    for name in lazydp.QUANTITIES:
        assert make_parser().parse_args(["lazydp", f"--vary={name}"]).vary == [name]
    for name in options.COMPARED:
        assert make_parser().parse_args(["lazydp", f"--variant={name}"]).variant == [name]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["lazydp", "--quick", "--gigabytes=0.0005", "--batch=32", "--repeats=1", "--vary=batch"]
    argv += ["--variant=lazydp", "--variant=eana", f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "Batch size" in shown.out and "LazyDP / EANA" in shown.out and "DP-SGD" not in shown.out
    assert "1/3" in shown.err  # progress does not end up in the output
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["variant"] for row in found["rows"]} == {"sgd", "lazydp", "eana"}
    assert [row["setting"]["batch"] for row in found["rows"] if row["variant"] == "sgd"] == [32, 16, 64]
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert plots == {"lazydp_batch.png", "lazydp_stages.png", "lazydp_eana.png"}


def test_the_command_refuses_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lazydp", f"--json={tmp_path / 'nowhere' / 'out.json'}"]) == 2
    assert "nowhere" in capsys.readouterr().err
    for wrong in ("--gigabytes=0", "--gigabytes=many", "--batch=0", "--repeats=-1", "--vary=dim", "--variant=adam"):
        with pytest.raises(SystemExit):
            main(["lazydp", wrong])
