"""`python -m benchmarks bound`: counts against those made by hand, bounds, and that all rows and fields come out."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.command import main, make_parser
from benchmarks.speed import rates, work
from benchmarks.speed.bound import measure as bound
from benchmarks.speed.bound import options
from benchmarks.speed.bound.page import difference_lines, page
from benchmarks.speed.bound.plots import write_plots
from benchmarks.speed.ghost import unit_losses
from benchmarks.speed.rates import Rates
from benchmarks.speed.step.measure import pctr
from benchmarks.speed.steps import Workload, plain_step
from benchmarks.speed.tied import measure as tied
from benchmarks.speed.timing import Stopwatch, Timing
from benchmarks.speed.tuned import tuned_step
from benchmarks.speed.work import Counting, Product, Work, count, plain_stages, private_stages
from torch import Tensor, nn

from sparsedp.mechanisms import DPSGD, EANA, AdaFEST, LazyDP
from sparsedp.models import DLRM
from sparsedp.nn import sequence_loss

# ------------------------------------------------------------------ counting by hand


class Small(nn.Module):
    """Data through a layer, beside a lookup; then two layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=sparse)
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(8, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.last(self.second(torch.cat([self.table(ids), self.first(x)], 1)))


def loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return module(*batch).square().sum(1).mean()


IDS = torch.tensor([1, 1, 2, 7])
SMALL = Workload("small", Small, (torch.rand(4, 3), IDS), loss)
FORWARD, INPUTS = 2 * 4 * (3 * 4 + 8 * 5 + 5 * 2), 2 * 4 * (8 * 5 + 5 * 2)  # data have no gradient
DENSE = 3 * 4 + 4 + 8 * 5 + 5 + 5 * 2 + 2


def test_flops_of_a_small_model() -> None:
    stages = count(SMALL).stages
    assert {name: own.flops for name, own in stages.items()} == {
        "forward": FORWARD, "backward": INPUTS, "collect": 0, "norms": 0, "sums": FORWARD
    }  # fmt: skip
    plain = plain_stages(SMALL, count(SMALL).readings)
    assert {name: own.flops for name, own in plain.items()} == {
        "forward": FORWARD, "backward": INPUTS + FORWARD, "update": 0
    }  # fmt: skip
    assert stages["forward"].products[Product(1, 4, 8, 5)] == 1


def test_bytes_of_a_small_model() -> None:
    counted = count(SMALL)
    assert counted.readings == {"table.weight": work.Reading(rows=3, width=4, ids=4, outputs=4)}
    assert counted.touched == 3 and sum(counted.sizes.values()) == DENSE + 40
    forward, norms, sums = (counted.stages[name] for name in ("forward", "norms", "sums"))
    assert forward.gathered == {4: 3} and forward.streamed == 4 * 4 * 4 and forward.bytes == 4 * (12 + 16)
    # Inputs and output gradients of three layers, once although biases have them, too; and those of the lookups.
    activations = 4 * (3 + 4) + 4 * (8 + 5) + 4 * (5 + 2) + 4 * 4
    assert norms.streamed == norms.bytes == 4 * activations
    # The lookups' gradients are read, three rows are read and written; biases' gradients are read.
    assert sums.streamed == 4 * (4 * 4 + 2 * 3 * 4 + 4 * (4 + 5 + 2))


def test_updates_of_a_plain_step() -> None:
    readings = count(SMALL).readings
    sparse = plain_stages(SMALL, readings)["update"]
    assert sparse.scattered == {4: 3} and sparse.streamed == 3 * 4 * DENSE + 4 * 16
    dense = plain_stages(Workload("small", lambda sparse: Small(False), SMALL.batch, loss), readings)
    assert dense["update"] == Work(streamed=3 * 4 * (DENSE + 40))
    assert dense["backward"].streamed == 4 * (16 + 40)  # the table's gradient


def test_stages_of_private_steps() -> None:
    counted = count(SMALL)
    eana = private_stages(counted, EANA(), {"table.weight": 3})
    assert eana["noise"].normals == DENSE + 12 and eana["selection"] == Work(streamed=4 * 8)
    assert eana["update"] == Work(scattered=Counter({4: 3}), streamed=3 * 4 * DENSE + 4 * 12)
    assert "settling" not in eana and eana["forward"] == counted.stages["forward"]
    adafest = private_stages(counted, AdaFEST(), {"table.weight": 5})
    assert adafest["noise"].normals == DENSE + 20 and adafest["selection"].normals == 3
    lazy = private_stages(counted, LazyDP(), {"table.weight": 3})
    assert lazy["noise"].normals == DENSE and lazy["settling"] == Work(scattered=Counter({4: 3}), normals=12)
    eager = private_stages(counted, DPSGD(), {"table.weight": 10})
    assert eager["noise"].normals == DENSE + 40 and eager["update"] == Work(streamed=12 * (DENSE + 40))
    assert "selection" not in eager and "settling" not in eager


def test_bags_and_interactions() -> None:
    """Three ids in a bag give one vector; products of all pairs of vectors are counted forth and back."""
    sizes, units, dim = [6, 5], 4, 7
    ids = torch.tensor([[[0, 1, 1], [4, 4, 4]]] * units)
    x = torch.rand(units, 13)
    make = lambda sparse: DLRM(sizes, dim=dim, bottom=(9,), top=(8,), pooling=3, sparse=sparse)  # noqa: E731
    counted = count(Workload("dlrm", make, (x, ids, torch.ones(units))))
    assert counted.readings["tables.0.weight"] == work.Reading(rows=2, width=dim, ids=12, outputs=4)
    assert counted.readings["tables.1.weight"] == work.Reading(rows=1, width=dim, ids=12, outputs=4)
    layers = 13 * 9 + 9 * dim + (dim + 3) * 8 + 8
    pairs = 3 * 3 * dim
    assert counted.stages["forward"].flops == 2 * units * (layers + pairs)
    assert counted.stages["backward"].flops == 2 * units * (layers - 13 * 9 + 2 * pairs)
    assert counted.stages["sums"].flops == 2 * units * (layers - 8)  # a unit's gradient of the last layer is no product


def test_attention_and_softmax() -> None:
    setting = tied.Setting(items=200, length=6, batch=5)
    b, l, d, v = 5, 6, tied.DIM, 201
    batch = tied.draw_batch(setting)
    plain = Workload(
        "tied", lambda sparse: tied.make_model(setting), batch, lambda m, x: unit_losses(m(x[0]), x[1]).mean()
    )
    private = Workload("tied", plain.make, batch, lambda m, x: sequence_loss(m(x[0]), x[1]))
    forward = 2 * b * l * (tied.BLOCKS * (12 * d * d + 2 * l * d) + d * v)
    counted = count(private)
    assert counted.stages["forward"].flops == forward
    both = b * l * (v + tied.BLOCKS * l)  # exponentials of logits and of attention
    assert counted.stages["forward"].exponentials == both
    stages = plain_stages(plain, counted.readings)
    assert stages["forward"].flops == forward and stages["backward"].flops == 2 * forward
    assert stages["forward"].exponentials == both and stages["backward"].exponentials == b * l * v
    # In pairs of positions: 4 d^2-layers and 2 of d x 4d in each block, the table's logits, and logits against lookups.
    pairs = 2 * b * l * l * (tied.BLOCKS * (4 * 2 * d + 2 * 5 * d) + d + v + d)
    assert counted.stages["norms"].flops == pairs
    assert counted.stages["backward"].flops + counted.stages["sums"].flops == 2 * forward


def test_unit_gradients_that_are_written_out() -> None:
    """A small matrix at many positions: its products come when uses are collected, and sums read them."""
    x = torch.rand(3, 50, 4)
    counted = count(Workload("layer", lambda sparse: nn.Linear(4, 5), (x,), lambda m, x: m(*x).square().mean()))
    product = 2 * 3 * 50 * 4 * 5
    assert counted.stages["collect"].flops == counted.stages["forward"].flops == product
    assert counted.stages["sums"].flops == 0 and counted.stages["sums"].streamed == 4 * 3 * (4 * 5 + 5)


def test_counting_sees_all_forms() -> None:
    a, b, c = torch.rand(2, 3), torch.rand(3, 4), torch.zeros(2, 4)
    with Counting() as seen:
        a @ b
        torch.mm(a, b, out=c)
        c.addmm_(a, b)
        b.mT @ a.mT  # the same shape, transposed
        torch.einsum("bij,bjk->bik", a.expand(5, 2, 3), b.expand(5, 3, 4))
        F.softmax(c, 1)
        torch.softmax(c, 1, out=c)
        c.exp_()
    assert seen.products == {Product(1, 2, 3, 4): 4, Product(5, 2, 3, 4): 1}
    assert seen.work.flops == 2 * 24 * 9 and seen.exponentials == 3 * 8


def test_works_add_up() -> None:
    one = Work(Counter({Product(1, 2, 3, 4): 1}), Counter({8: 2}), Counter({8: 1}), 100, 5, 6)
    both = one + one
    assert both.flops == 2 * 48 and both.bytes == 2 * (100 + 4 * 8 * 2 + 2 * 4 * 8) and both.normals == 10
    assert both.exponentials == 12 and one.products[Product(1, 2, 3, 4)] == 1


# ------------------------------------------------------------------ rates and bounds


class Fixed(Rates):
    """A machine of which all is known."""

    def __init__(self) -> None:
        super().__init__(0.0, (1000,), 4096)

    def product(self, product: Product) -> float:
        return 2.0 * product.batch

    def stream(self, size: int) -> float:
        return 10.0

    def gather(self, width: int) -> float:
        return 4.0 * width

    def scatter(self, width: int) -> float:
        return 2.0 * width

    def normals(self) -> float:
        return 5.0

    def exponentials(self) -> float:
        return 7.0


def test_the_longer_of_computing_and_moving() -> None:
    machine = Fixed()
    mixed = Work(Counter({Product(3, 1, 2, 2): 2}), Counter({4: 6}), Counter({4: 3}), 50, 10, 21)
    assert machine.compute(mixed) == pytest.approx(2 * 24 / 6 + 10 / 5 + 21 / 7)
    assert machine.move(mixed) == pytest.approx(50 / 10 + 6 * 4 * 4 / 16 + 3 * 2 * 4 * 4 / 8)
    works = {"forward": mixed, "noise": Work(normals=20, streamed=10)}
    step = Timing(100.0, 110.0, 1.0)
    forward, collect, noise, rest = bound.bound_stages(
        works, {"forward": 46, "collect": 2.0, "noise": 12.0}, step, machine
    )
    assert forward["bound"] == pytest.approx(23) and forward["over_bound"] == pytest.approx(2)
    assert noise["bound"] == 4 and noise["compute"] == 4 and noise["move"] == 1 and noise["over_bound"] == 3
    assert collect["bound"] == 0 and collect["over_bound"] is None and collect["best"] == 2
    assert rest["stage"] == "the rest" and rest["best"] == 40


def test_rates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_NUMBERS", 1000)
    machine = Rates(0.0, (1 << 12, 1 << 16), 1 << 16)
    asked = [
        lambda: machine.product(Product(1, 4, 5, 6)), lambda: machine.product(Product(3, 4, 5, 6)), machine.normals,
        machine.exponentials, lambda: machine.gather(5), lambda: machine.scatter(5), lambda: machine.stream(100),
    ]  # fmt: skip
    first = [ask() for ask in asked]
    assert all(rate > 0 for rate in first)
    monkeypatch.setattr(machine, "_best", lambda *args: pytest.fail("measured again"))
    assert [ask() for ask in asked] == first
    assert machine.gather(8) == machine.gather(7)  # rounded up to a power of two
    assert machine.stream(10) == max(machine.copy(1 << 12), machine.read(1 << 12))
    assert machine.compute(Work()) == machine.move(Work()) == 0


def test_streams_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Rates(0.0, (300, 100), 4096)
    monkeypatch.setattr(machine, "copy", float)
    monkeypatch.setattr(machine, "read", lambda size: 1.0)
    assert [machine.stream(size) for size in (1, 100, 101, 300, 5000)] == [100, 100, 300, 300, 300]


def test_rates_of_rows_change_the_table_in_place() -> None:
    machine = Rates(0.0, (1 << 12,), 1 << 14)
    machine.scatter(4)
    assert machine._memory is not None and bool((machine._memory == 1).all())  # zeros were added
    assert machine._table(3).shape == (1365, 3) and machine._rows(machine._table(4)) == 512


# ------------------------------------------------------------------ the benchmark

TINY = bound.Sizes(batch=16, scale=0.002, gigabytes=0.0005, labels=200, items=30, length=6, sequences=4)


def machine_for_tests() -> Rates:
    found = Fixed()
    found._found = {("copy", 1000): 1e9, ("read", 1000): 1e9}
    return found


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPerf's networks take longer than everything that is tested here, which need not be warm."""
    monkeypatch.setattr(bound, "WARMUP", 0)
    monkeypatch.setattr(bound.lazydp, "DLRM", functools.partial(DLRM, bottom=(8,), top=(8,)))


def test_where_a_private_step_takes_longer() -> None:
    def row(variant: str, best: float, **stages: float) -> dict[str, Any]:
        found = [{"stage": stage, "best": seconds} for stage, seconds in stages.items()]
        return {"variant": variant, "best": best, "stages": [*found, {"stage": "the rest", "best": 0.001}]}

    rows = [
        row("plain", 0.031, forward=0.01, backward=0.015, update=0.005),
        row("eana", 0.036, forward=0.012, backward=0.006, sums=0.008, norms=0.003, noise=0.002, update=0.004),
    ]
    head, lines = difference_lines(rows)
    assert head == ["", "EANA"] and lines == [
        ["forward", "2.0"], ["backward and sums, less backward", "-1.0"], ["noise and update, less update", "1.0"],
        ["the rest", "0.0"], ["norms", "3.0"], ["all", "5.0"],
    ]  # fmt: skip


@pytest.mark.slow
def test_all_rows_and_fields(narrow: None, tmp_path: Path) -> None:
    result = bound.bench_bound(TINY, repeats=1, rates=machine_for_tests())
    by_workload: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_workload.setdefault(row["workload"], []).append(row)
    assert list(by_workload) == list(bound.SUBJECTS) and result["sizes"] == asdict(TINY)
    for name, rows in by_workload.items():
        private = ["dpsgd"] if name in ("tied", "tied_softmax") else ["adafest", "lazydp", "eana"]
        tuned = ["tuned"] if name in ("pctr", "dlrm") else []
        assert [row["variant"] for row in rows] == ["plain", *tuned, *private]
        assert all((row["ratio_to_tuned"] is not None) == bool(tuned) for row in rows)
        plain = rows[0]
        assert [stage["stage"] for stage in plain["stages"]] == ["forward", "backward", "update", "the rest"]
        for row in rows:
            stages = {stage["stage"]: stage for stage in row["stages"]}
            assert row["bound"] == pytest.approx(sum(stage["bound"] for stage in row["stages"])) and row["bound"] > 0
            assert row["bound_to_plain"] == pytest.approx(row["bound"] / plain["bound"])
            assert row["over_bound"]["best"] == pytest.approx(row["best"] / row["bound"])
            assert all(stage["best"] is not None for stage in row["stages"])  # nothing counted that is not timed
            assert ("settling" in stages) == (row["variant"] == "lazydp")
            if name != "tied_softmax" and row["variant"] in private:  # it does some of the work in other stages
                forth_and_back = sum(stages[key]["flops"] for key in ("forward", "backward", "collect", "sums"))
                wanted = sum(stage["flops"] for stage in plain["stages"])
                # Last layers of one output are summed without a product.
                assert 0.9 * wanted <= forth_and_back <= wanted
    lazy, eana = by_workload["dlrm"][3:]
    settled = next(stage for stage in lazy["stages"] if stage["stage"] == "settling")
    assert settled["normals"] == 128 * lazy["rows_touched"] and settled["bytes"] == 8 * settled["normals"]
    drawn = [next(stage["normals"] for stage in row["stages"] if stage["stage"] == "noise") for row in (lazy, eana)]
    assert drawn[1] - drawn[0] == settled["normals"]  # the same numbers, drawn elsewhere
    text = page(json.loads(json.dumps(result)), ["bound_dlrm.png", "growth_dim.png"])
    assert text.startswith("# ") and "\n## DLRM" in text and "LazyDP: settling" in text
    assert "![bound dlrm](bound_dlrm.png)" in text and "growth_dim" not in text
    assert write_plots(result, tmp_path) == [f"bound_{name}.png" for name in bound.SUBJECTS]


def test_the_tuned_step_is_the_plain_one() -> None:
    """Rows that several units share are moved once, by their sum."""
    work = pctr(50, 1e-5)
    made: list[nn.Module] = []

    def make(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        made.append(work.make(sparse))
        return made[-1]

    seeded = replace(work, make=make)
    plain, tuned = plain_step(seeded), tuned_step(seeded, Stopwatch())
    before = {name: weight.clone() for name, weight in made[0].state_dict().items()}
    for _ in range(3):
        plain()
        tuned()
    for name, weight in made[0].state_dict().items():
        torch.testing.assert_close(made[1].state_dict()[name], weight)
        assert not torch.equal(before[name], weight)


def test_the_command_knows_all_names() -> None:
    for name in bound.SUBJECTS:
        assert make_parser().parse_args(["bound", f"--workload={name}"]).workload == [name]
    assert set(options.FULL) == set(options.QUICK) == set(options._HELP)
    assert set(asdict(bound.Sizes())) | {"repeats"} == set(options.FULL)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options, "_QUICK_RATES", (0.0, (1 << 16,), 1 << 20))
    monkeypatch.setattr(rates, "_NUMBERS", 1000)
    argv = ["bound", "--quick", "--items=20", "--length=4", "--sequences=3", "--repeats=1"]
    argv += ["--workload=tied_candidates", f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "LazyDP: settling" in shown.out and "normal numbers" in shown.out and "pCTR" not in shown.out
    assert "candidates" in shown.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["variant"] for row in found["rows"]] == ["plain", "adafest", "lazydp", "eana"]
    assert found["rates"]["normals"] > 0 and found["rates"]["gather"].keys() == {"64"}
    assert all(product["flops_per_second"] > 0 for product in found["rates"]["products"])
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["bound_tied_candidates.png"]
    for wrong in ("--batch=0", "--scale=0", "--workload=mlp"):
        with pytest.raises(SystemExit):
            main(["bound", wrong])
