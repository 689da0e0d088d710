"""LazyDP: the same model as eager DP-SGD, for every setting of SGD, and no way to get unsettled weights out."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsedp
from sparsedp.grid import grid_of, round_to
from sparsedp.noise import WAITING, GaussianNoise, row_normals, zero_others
from sparsedp.tables.lazy import STEP, LazyOwner
from sparsedp.tables.pending import Coefficients, PendingSteps
from support import Clicks, clicks, loader_of, make_private, train

ROWS, UNITS, STEPS, LONG = 40, 120, 60, 250


class Model(nn.Module):
    """A table with one id, one with bags, one shared by two features and rarely read, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, 3)
        self.bag = nn.EmbeddingBag(ROWS, 2, mode="sum")
        self.shared = nn.Embedding(2 * ROWS, 2, padding_idx=0)
        self.out = nn.Linear(9, 1)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits or, with a target, the loss with a penalty on a table."""
        parts = [self.one(ids[:, 0]), self.bag(ids), self.shared(ids[:, 1]), self.shared(ids[:, 2])]
        logits = self.out(torch.cat(parts, 1)).squeeze(1)
        if target is None:
            return logits
        return binary_cross_entropy_with_logits(logits, target) + 0.05 * self.shared.weight.norm() ** 2


def data(skew: float = 4) -> tuple[Tensor, Tensor]:
    """Skewed ids, so that some rows wait long and some are in every batch, and some are never read."""
    random = torch.Generator().manual_seed(1)
    ids = (torch.rand(UNITS, 4, generator=random) ** skew * (ROWS - 2)).long()
    return ids, torch.rand(UNITS, generator=random).round()


TABLES = ("bag.weight", "one.weight", "shared.weight")


class EagerNoise(GaussianNoise):
    """DP-SGD's noise, on tables that which LazyDP's rows wait for."""

    def __init__(self, key: Any, names: list[str], module: nn.Module) -> None:
        super().__init__(key)
        self._tables = {names.index(name): module.get_parameter(name) for name in TABLES}

    def add(self, tensors: Any, std: float, step: int) -> None:
        super().add({at: sums for at, sums in tensors.items() if at not in self._tables}, std, step)
        for at, table in self._tables.items():
            if at in tensors:
                zero_others(tensors[at])
                if std > 0:
                    key = self.key.child(WAITING).child(STEP, at, step)
                    noise = row_normals(key, torch.arange(len(table)), table)
                    tensors[at].values.copy_(round_to(std * noise + tensors[at].values, grid_of(std)))


class Run:
    """A seeded run of some steps; `each(run, step)` is called before every one."""

    def __init__(
        self,
        mechanism: sparsedp.Mechanism,
        each: Callable[[Run, int], None] | None = None,
        noise: float = 0.8,
        seed: int = 3,
        batch_size: int = 6,
        skew: float = 4,
        penalised: bool = False,
        dense_first: bool | None = None,
        **sgd: Any,
    ) -> None:
        torch.manual_seed(5)
        self.penalised = penalised
        self.module = Model().double()
        self.each = each
        self.sizes: list[int] = []  # of the batches
        inner: Any = torch.optim.SGD(self.module.parameters(), **{"lr": 0.5, **sgd})
        if dense_first is not None:  # Adam has the dense parameters
            tables = torch.optim.SGD(sparsedp.table_parameters(self.module), **{"lr": 0.5, **sgd})
            dense = torch.optim.Adam(sparsedp.dense_parameters(self.module), lr=0.01)
            inner = [dense, tables] if dense_first else [tables, dense]
        self.engine = sparsedp.PrivacyEngine(seed=seed)
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.module, optimizer=inner, data_loader=loader_of(*data(skew), batch_size=batch_size),
            noise_multiplier=noise, max_grad_norm=0.7, mechanism=mechanism,
        )  # fmt: skip
        if isinstance(mechanism, sparsedp.DPSGD):
            names = [name for name, _ in self.module.named_parameters()]
            self.optimizer.noise = EagerNoise(self.optimizer.noise.key, names, self.module)

    def train(self, steps: int = STEPS) -> Run:
        while self.engine.ledger.steps < steps:
            for ids, target in self.loader:
                if self.each is not None:
                    self.each(self, self.engine.ledger.steps)
                self.sizes.append(self.loader.current.units)
                self.optimizer.zero_grad()
                if self.penalised:
                    self.module(ids, target.double()).backward()
                elif self.sizes[-1]:
                    binary_cross_entropy_with_logits(self.module(ids), target.double()).backward()
                self.optimizer.step()
                if self.engine.ledger.steps == steps:
                    break
        return self

    def state(self) -> dict[str, Tensor]:
        weights = {name: value.clone() for name, value in self.module.state_dict().items()}
        moments = self.optimizer.state_dict()["state"]
        for index, state in moments.items():
            if state.get("momentum_buffer") is not None:
                weights[f"momentum {index}"] = state["momentum_buffer"].clone()
        return weights


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            torch.Tensor(one[name]), torch.Tensor(other[name]), rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}: {m}"
        )


def schedule(run: Run, step: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5 / (1 + step % 7)


def by_hand(run: Run, step: int) -> None:
    if step == 20:
        run.optimizer.param_groups[0]["lr"] = 0.05
    if step == 40:
        run.optimizer.param_groups[0].update(weight_decay=0.1, momentum=0.5)
    if step == 50:
        run.optimizer.param_groups[0].update(momentum=0.0)


def freezes(run: Run, step: int) -> None:
    run.module.one.weight.requires_grad_(not 10 <= step < 25)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": {"each": schedule},
    "decay": {"weight_decay": 0.3},
    "momentum": {"momentum": 0.9, "lr": 0.05},  # with more, rounding errors grow from step to step
    "everything": {"momentum": 0.8, "weight_decay": 0.2, "nesterov": True, "each": schedule},
    "maximize": {"maximize": True, "momentum": 0.5, "weight_decay": 0.1},
    "by hand": {"each": by_hand},
    "freezes": {"each": freezes, "momentum": 0.7, "weight_decay": 0.1},
    "no noise": {"noise": 0.0, "momentum": 0.6, "weight_decay": 0.2},
}


@pytest.mark.parametrize("steps", [STEPS, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_lazy_replays_eager(name: str, steps: int) -> None:
    """With empty batches, and with ids that repeat in a bag and in a batch."""
    eager = Run(sparsedp.DPSGD(), batch_size=2, **SETTINGS[name]).train(steps)
    lazy = Run(sparsedp.LazyDP(aggregate=False), batch_size=2, **SETTINGS[name]).train(steps)
    assert 0 in lazy.sizes and 1 in lazy.sizes
    assert sum(lazy.engine.pending().values()) > 0
    assert_same(lazy.state(), eager.state())
    assert sum(lazy.engine.pending().values()) == 0
    assert lazy.engine.get_epsilon(1e-5) == eager.engine.get_epsilon(1e-5)


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("name", ["plain", "decay", "everything"])
def test_lazy_replays_eager_beside_another_optimizer(name: str, dense_first: bool) -> None:
    """Momentum, decay and rate are those of the tables' own SGD; Adam moves the rest."""
    options = {**SETTINGS[name], "batch_size": 2, "dense_first": dense_first}
    eager = Run(sparsedp.DPSGD(), **options).train(30)
    lazy = Run(sparsedp.LazyDP(aggregate=False), **options).train(30)
    assert sum(lazy.engine.pending().values()) > 0
    assert_same(lazy.state(), eager.state())
    adams = [value["exp_avg"] for value in lazy.optimizer.state.values() if "exp_avg" in value]
    assert len(adams) == 2 and all(float(value.abs().sum()) > 0 for value in adams)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss has a term")
@pytest.mark.parametrize("name", ["plain", "everything", "no noise"])
def test_a_penalty_on_a_table_replays_eager(name: str) -> None:
    """A term of the loss without units moves all rows in every step, beside the noise that they wait for."""
    runs = [
        Run(mechanism, batch_size=2, penalised=penalised, **SETTINGS[name]).train(20)
        for mechanism, penalised in (
            (sparsedp.DPSGD(), True),
            (sparsedp.LazyDP(aggregate=False), True),
            (sparsedp.DPSGD(), False),
        )
    ]
    assert 0 in runs[0].sizes and 1 in runs[0].sizes
    eager, lazy, without = (run.state() for run in runs)
    # LazyDP rounds a sum with its noise and the term to the grid, DP-SGD adds the term to what is rounded.
    rounding = 1e-11 if name == "no noise" else 2e-3
    for weight in eager:
        torch.testing.assert_close(torch.Tensor(lazy[weight]), torch.Tensor(eager[weight]), rtol=1e-9, atol=rounding)
    assert float((without["shared.weight"] - eager["shared.weight"]).abs().max()) > 100 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("skew", [1, 12])
def test_replay_whatever_is_read(skew: float) -> None:
    """All rows alike, or nearly always the same few."""
    settings = {**SETTINGS["everything"], "skew": skew}
    lazy, eager = Run(sparsedp.LazyDP(aggregate=False), **settings), Run(sparsedp.DPSGD(), **settings)
    assert_same(lazy.train(LONG).state(), eager.train(LONG).state())


def test_parameter_groups() -> None:
    def make(mechanism: sparsedp.Mechanism) -> dict[str, Tensor]:
        def each(run: Run, step: int) -> None:
            if len(run.optimizer.param_groups) == 1:
                raise AssertionError
            run.optimizer.param_groups[1]["lr"] = 0.3 / (1 + step)

        run = Run.__new__(Run)
        run.penalised = False
        torch.manual_seed(5)
        run.module, run.each, run.sizes = Model().double(), each, []
        groups = [
            {"params": [run.module.one.weight, *run.module.out.parameters()], "lr": 0.2, "momentum": 0.5},
            {"params": [run.module.bag.weight, run.module.shared.weight], "weight_decay": 0.1},
        ]
        run.engine = sparsedp.PrivacyEngine(seed=3)
        _, run.optimizer, run.loader = run.engine.make_private(
            module=run.module, optimizer=torch.optim.SGD(groups, lr=0.1), data_loader=loader_of(*data(), batch_size=6),
            noise_multiplier=0.8, max_grad_norm=0.7, mechanism=mechanism,
        )  # fmt: skip
        if isinstance(mechanism, sparsedp.DPSGD):
            names = [name for name, _ in run.module.named_parameters()]
            run.optimizer.noise = EagerNoise(run.optimizer.noise.key, names, run.module)
        return run.train().state()

    assert_same(make(sparsedp.LazyDP(aggregate=False)), make(sparsedp.DPSGD()))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_reading_in_between_changes_nothing(name: str) -> None:
    """Evaluation, a state_dict, printing: all settle, and the replay is the same."""

    def curious(run: Run, step: int) -> None:
        if each is not None:
            each(run, step)
        if step % 9 == 4:
            run.module.eval()
            with torch.no_grad():
                run.module(data()[0][:10])
            run.module.train()
        if step % 13 == 6:
            str(run.module.one.weight)
        if step % 17 == 8:
            run.module.state_dict()

    settings = dict(SETTINGS[name])
    each = settings.pop("each", None)
    eager = Run(sparsedp.DPSGD(), each=each, **settings).train()
    assert_same(Run(sparsedp.LazyDP(aggregate=False), each=curious, **settings).train().state(), eager.state())


def test_resume(tmp_path: Any) -> None:
    settings = SETTINGS["everything"]
    whole = Run(sparsedp.LazyDP(aggregate=False), **settings).train()
    first = Run(sparsedp.LazyDP(aggregate=False), **settings).train(23)
    first.engine.save_checkpoint(tmp_path / "c.pt")
    first.train(31)  # lost
    again = Run(sparsedp.LazyDP(aggregate=False), **settings)
    again.engine.load_checkpoint(tmp_path / "c.pt")
    assert_same(again.train().state(), whole.state())


@pytest.mark.slow
def test_resume_after_a_kill(tmp_path: Any) -> None:
    """A process that is killed in the middle of a step leaves a settled checkpoint, from which the run goes on."""
    path = tmp_path / "c.pt"
    script = (
        "import os, signal, test_lazydp as t\n"
        "import sparsedp\n"
        "run = t.Run(sparsedp.LazyDP(aggregate=False), **t.SETTINGS['everything']).train(25)\n"
        f"run.engine.save_checkpoint({str(path)!r})\n"
        "run.train(33)\n"
        "run.module.out.forward = lambda x: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run.train()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", script]
    killed = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    settings = SETTINGS["everything"]
    again = Run(sparsedp.LazyDP(aggregate=False), **settings)
    again.engine.load_checkpoint(path)
    assert again.engine.ledger.steps == 25 and sum(again.engine.pending().values()) == 0
    assert_same(again.state(), Run(sparsedp.DPSGD(), **settings).train(25).state())
    assert_same(again.train().state(), Run(sparsedp.DPSGD(), **settings).train().state())


# ---------------------------------------------------------------------- the arithmetic of waiting


@pytest.mark.parametrize("name", ["plain", "decay", "momentum", "everything", "maximize"])
def test_pace_against_stepping(name: str) -> None:
    """Phi and C against torch.optim.SGD itself, step by step, and against the sum over impulses."""
    settings = {key: value for key, value in SETTINGS[name].items() if key not in ("each", "lr")}
    pace, coefficients = PendingSteps(window=64), []
    parameter = nn.Parameter(torch.zeros(30, dtype=torch.float64))
    random = np.random.default_rng(0)
    noise = random.standard_normal((40, 30))
    optimizer = torch.optim.SGD([parameter], lr=0.3, **settings)
    for step in range(40):
        lr = 0.3 / (1 + step % 5)
        optimizer.param_groups[0]["lr"] = lr
        one = Coefficients.of(
            lr, settings.get("momentum", 0.0), settings.get("weight_decay", 0.0), settings.get("nesterov", False),
            settings.get("maximize", False),
        )  # fmt: skip
        coefficients.append(one)
        pace.advance(one)
        parameter.grad = torch.from_numpy(noise[step])
        optimizer.step()
    later = [pace.transition(np.array([step + 1]))[:, 0] for step in range(39)] + [np.array([1.0, 0.0, 0.0, 1.0])]
    impulses = np.array([phi.reshape(2, 2) @ (one.gw, one.gv) for phi, one in zip(later, coefficients)])  # (40, 2)
    np.testing.assert_allclose(impulses[:, 0] @ noise, parameter.detach().numpy(), rtol=1e-10, atol=1e-12)
    for since in (0, 7, 39):
        ww, vw, vv = pace.deviation(np.array([since]))[:, 0]
        pending = impulses[since:]
        np.testing.assert_allclose(ww**2, (pending[:, 0] ** 2).sum(), rtol=1e-10)
        if pace.has_momentum:
            np.testing.assert_allclose(ww * vw, (pending[:, 0] * pending[:, 1]).sum(), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(vw**2 + vv**2, (pending[:, 1] ** 2).sum(), rtol=1e-9)


def test_a_full_window_settles_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingSteps.__init__, "__defaults__", (7,))
    eager = Run(sparsedp.DPSGD(), **SETTINGS["everything"]).train()
    assert_same(Run(sparsedp.LazyDP(aggregate=False), **SETTINGS["everything"]).train().state(), eager.state())


# ---------------------------------------------------------------------- aggregated noise


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_aggregated_noise_of_a_row_that_is_never_read(name: str) -> None:
    """Exactly the variance (and, with momentum, the covariance) of all steps."""
    settings = dict(SETTINGS[name])
    weights, moments = [], []
    for seed in range(150):
        torch.manual_seed(0)
        module = Model().double()
        nn.init.zeros_(module.shared.weight)
        inner = torch.optim.SGD(
            module.parameters(), **{"lr": 0.5, **{k: v for k, v in settings.items() if k != "each"}}
        )
        engine = sparsedp.PrivacyEngine(seed=seed)
        _, optimizer, loader = engine.make_private(
            module=module, optimizer=inner, data_loader=loader_of(*data(), batch_size=6), noise_multiplier=0.8,
            max_grad_norm=0.7, mechanism=sparsedp.LazyDP(),
        )  # fmt: skip
        for step, (ids, target) in enumerate(loader):
            if step == 6:
                break
            optimizer.param_groups[0]["lr"] = 0.5 / (1 + step)
            optimizer.zero_grad()
            if len(ids):
                binary_cross_entropy_with_logits(module(ids), target.double()).backward()
            optimizer.step()
        weights.append(torch.Tensor(module.shared.weight.detach()[ROWS:]).flatten())
        if settings.get("momentum"):
            moments.append(optimizer.state_dict()["state"][2]["momentum_buffer"][ROWS:].flatten())
    pace = PendingSteps()
    for step in range(6):
        pace.advance(
            Coefficients.of(
                0.5 / (1 + step),
                settings.get("momentum", 0.0),
                settings.get("weight_decay", 0.0),
                settings.get("nesterov", False),
                False,
            )
        )
    ww, vw, vv = 0.8 * 0.7 / 6 * pace.deviation(np.array([0]))[:, 0]
    from scipy import stats

    drawn = torch.cat(weights).numpy()
    assert stats.kstest(drawn / ww, "norm").pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(drawn / ww * wrong, "norm").pvalue < 1e-6
    if moments:
        rest = (torch.cat(moments).numpy() - vw * drawn / ww) / vv
        assert stats.kstest(rest, "norm").pvalue > 1e-4
        assert abs(np.corrcoef(rest, drawn)[0, 1]) < 5 / len(rest) ** 0.5


# ---------------------------------------------------------------------- ways out


def leaks(value: Any, settled: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        plain = torch.as_tensor(value, dtype=torch.float64).detach()
        return not torch.equal(plain.reshape(-1), settled.reshape(-1))


WAYS: dict[str, Callable[[Run], Any]] = {
    "state_dict": lambda run: run.module.state_dict()["one.weight"],
    "deepcopy": lambda run: copy.deepcopy(run.module).one.weight,
    "deepcopy of a parameter": lambda run: copy.deepcopy(run.module.one.weight),
    "pickle": lambda run: pickle.loads(pickle.dumps(run.module)).one.weight,
    "torch.save of the module": lambda run: saved(run.module).one.weight,
    "torch.save of the state": lambda run: saved(run.module.state_dict(), weights_only=True)["one.weight"],
    "torch.save of the parameter": lambda run: saved(run.module.one.weight),
    "to": lambda run: run.module.to(torch.float64).one.weight,
    "cpu": lambda run: run.module.one.weight.cpu(),
    "data": lambda run: run.module.one.weight.data,
    "detach": lambda run: run.module.one.weight.detach(),
    "clone": lambda run: run.module.one.weight.clone(),
    "numpy": lambda run: run.module.one.weight.detach().numpy(),
    "tolist": lambda run: run.module.one.weight.tolist(),
    "arithmetic": lambda run: run.module.one.weight * 1,
    "slices": lambda run: run.module.one.weight[:],
    "transposed": lambda run: run.module.one.weight.T.T,
    "parameters()": lambda run: torch.cat([p.flatten() for n, p in run.module.named_parameters() if n == "one.weight"]),
    "parameters_to_vector": lambda run: nn.utils.parameters_to_vector([run.module.one.weight]),
    "as_subclass": lambda run: run.module.one.weight.as_subclass(Tensor),
    "embedding in eval": lambda run: run.module.eval().one(torch.arange(ROWS)),
    "F.embedding": lambda run: nn.functional.embedding(torch.arange(ROWS), run.module.one.weight),
    "index_select": lambda run: run.module.one.weight.index_select(0, torch.arange(ROWS)),
    "buffer protocol": lambda run: np.asarray(run.module.one.weight.detach()),
    "storage": lambda run: torch.tensor(run.module.one.weight.untyped_storage().tolist(), dtype=torch.uint8).view(
        torch.float64
    ),
    "functional_call": lambda run: torch.func.functional_call(run.module.one, {}, torch.arange(ROWS)),
    "copy.copy": lambda run: copy.copy(run.module.one.weight),
    "engine.settle": lambda run: (run.engine.settle(), run.module.one.weight)[1],
    "close": lambda run: (run.engine.close(), run.module.one.weight)[1],
}


def saved(value: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("name", WAYS)
def test_no_way_out_unsettled(name: str) -> None:
    reference = Run(sparsedp.LazyDP(), momentum=0.5).train(12)
    reference.engine.settle()
    with torch._C.DisableTorchFunctionSubclass():
        settled = reference.module.one.weight.detach().clone()
    run = Run(sparsedp.LazyDP(), momentum=0.5).train(12)
    with torch._C.DisableTorchFunctionSubclass():
        assert leaks(run.module.one.weight.detach(), settled)  # there is something to leak
    assert not leaks(WAYS[name](run), settled)


@pytest.mark.parametrize("name", ["state_dict", "data", "detach", "slices", "transposed", "as_subclass", "copy.copy"])
def test_what_was_taken_before_is_settled_when_it_is_read(name: str) -> None:
    """best = model.state_dict() shares memory with the weights: read after more steps, it must have their noise."""
    reference = Run(sparsedp.LazyDP(), momentum=0.5).train(4)
    WAYS[name](reference)
    reference.train(12)
    reference.engine.settle()
    with torch._C.DisableTorchFunctionSubclass():
        settled = reference.module.one.weight.detach().clone()
    run = Run(sparsedp.LazyDP(), momentum=0.5).train(4)
    taken = WAYS[name](run)
    run.train(12)
    assert not leaks(taken.clone(), settled)


def test_ordinary_objects_come_out() -> None:
    run = Run(sparsedp.LazyDP()).train(5)
    copied, loaded = copy.deepcopy(run.module), saved(run.module)
    for module in (copied, loaded):
        assert type(module.one.weight) is nn.Parameter and module.one.weight.requires_grad
    run.engine.close()
    assert type(run.module.one.weight) is nn.Parameter
    assert type(run.module.state_dict()["one.weight"]) is Tensor


def test_loading_weights_takes_pending_noise_away() -> None:
    run = Run(sparsedp.LazyDP()).train(5)
    weights = {name: torch.ones_like(value) for name, value in copy.deepcopy(run.module.state_dict()).items()}
    run.module.load_state_dict(weights)
    assert run.engine.pending()["one.weight"] == 0
    assert (run.module.one.weight == 1).all()


# ---------------------------------------------------------------------- refusals and words


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "AdamW", "RMSprop"])
def test_other_optimizers_are_refused(kind: str) -> None:
    module = Model()
    with pytest.raises(sparsedp.UnsupportedError, match=kind):
        sparsedp.PrivacyEngine().make_private(
            module=module, optimizer=getattr(torch.optim, kind)(module.parameters(), lr=0.1),
            data_loader=loader_of(*data(), batch_size=6), noise_multiplier=1.0, max_grad_norm=1.0,
            mechanism=sparsedp.LazyDP(),
        )  # fmt: skip


def test_dampening_is_refused() -> None:
    with pytest.raises(sparsedp.UnsupportedError, match="dampening"):
        Run(sparsedp.LazyDP(), momentum=0.5, dampening=0.1)


def test_statement_and_report() -> None:
    run = Run(sparsedp.LazyDP()).train(5)
    assert "settled" in str(run.engine.statement(1e-5))
    assert run.optimizer.last_step is not None
    assert run.optimizer.last_step.tables["one.weight"].rows_selected == ROWS


@pytest.mark.parametrize("aggregate", [False, True])
def test_deterministic_check_with_ones(aggregate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of ones, plain SGD: a row that is never read moves by lr * std a step or, in one draw, by its deviation."""

    def ones(key: Any, rows: Tensor, like: Tensor) -> Tensor:
        return torch.ones(len(rows), *like.shape[1:], dtype=like.dtype)

    def add_ones(
        key: Any, table: Tensor, rows: Tensor, std: np.ndarray, grid: float, factor: None, numbers: None
    ) -> None:
        table[rows] += torch.from_numpy(std)[:, None]

    monkeypatch.setattr("sparsedp.tables.lazy.row_normals", ones)
    monkeypatch.setattr("sparsedp.tables.lazy.add_row_normals", add_ones)
    run = Run(sparsedp.LazyDP(aggregate=aggregate), lr=0.25)
    with torch._C.DisableTorchFunctionSubclass():
        before = run.module.shared.weight.detach().clone()
    run.train(20)
    moved = torch.Tensor(run.module.shared.weight.detach())[ROWS:] - before[ROWS:]
    std = 0.8 * 0.7 / 6
    expected = 20**0.5 * std if aggregate else -20 * round_to(np.array(std), grid_of(std))  # steps are rounded each
    torch.testing.assert_close(moved, torch.full_like(moved, 0.25 * float(expected)))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_interrupted_settling_is_noticed(kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    run = Run(sparsedp.LazyDP()).train(8)
    run.engine.save_checkpoint(tmp_path / "c.pt")
    run.train(12)

    def interrupt(*_: Any) -> Tensor:
        raise kind

    with monkeypatch.context() as patch, pytest.raises(kind):
        patch.setattr("sparsedp.tables.lazy.add_row_normals", interrupt)
        run.engine.settle()
    for way in ("state_dict", "data", "embedding in eval"):
        with pytest.raises(sparsedp.SparseDPError, match="interrupted"):
            WAYS[way](run)
    run.module.train()
    run.engine.load_checkpoint(tmp_path / "c.pt")
    run.train(10)
    run.engine.settle()


def test_interrupted_update_is_owed_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(sparsedp.LazyDP()).train(8)
    run.engine.settle()
    monkeypatch.setattr(run.optimizer.inner, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run.train(9)
    assert run.engine.ledger.steps == 9
    assert run.engine.pending()["one.weight"] == ROWS


def test_momentum_is_guarded() -> None:
    """The user's own SGD object holds the buffers: read through it, or through an earlier state_dict, they are settled."""

    def buffers(run: Run) -> list[Tensor]:
        return [state["momentum_buffer"] for state in run.optimizer.inner.state.values() if "momentum_buffer" in state]

    for take in (
        buffers,
        lambda run: [s["momentum_buffer"] for s in run.optimizer.inner.state_dict()["state"].values()],
    ):
        reference, run = (Run(sparsedp.LazyDP(), momentum=0.5).train(4) for _ in range(2))
        for one in (reference, run):
            one.engine.settle()
        reference_buffers, early = take(reference), take(run)
        for one in (reference, run):
            one.train(12)
        reference.engine.settle()
        assert sum(run.engine.pending().values()) > 0
        for mine, settled in zip(early, reference_buffers):
            assert torch.equal(mine.clone(), settled.clone())


def test_hooks_of_the_step_see_settled_weights() -> None:
    seen: list[Tensor] = []
    run = Run(sparsedp.LazyDP()).train(3)
    run.optimizer.register_step_post_hook(lambda *_: seen.append(run.module.state_dict()["one.weight"].clone()))
    run.train(6)
    assert run.engine.pending()["one.weight"] == 0
    assert torch.equal(seen[-1], run.module.one.weight.clone())


def test_a_failed_load_leaves_broken_tables_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    run = Run(sparsedp.LazyDP()).train(4)
    run.engine.save_checkpoint(tmp_path / "c.pt")
    run.train(8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sparsedp.tables.lazy.add_row_normals", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        run.engine.settle()
    with monkeypatch.context() as patch, pytest.raises(sparsedp.CheckpointError):
        patch.setattr(
            run.loader,
            "load_state_dict",
            lambda state: (_ for _ in ()).throw(ValueError("no")) if patch.undo() is None else None,
        )
        run.engine.load_checkpoint(tmp_path / "c.pt")
    for way in ("state_dict", "embedding in eval"):
        with pytest.raises(sparsedp.SparseDPError, match="interrupted"):
            WAYS[way](run)


def test_loading_an_optimizer_state_settles_first() -> None:
    run = Run(sparsedp.LazyDP(), momentum=0.5).train(4)
    state = copy.deepcopy(run.optimizer.state_dict())
    run.train(8)
    run.optimizer.load_state_dict(state)
    assert sum(run.engine.pending().values()) == 0


def test_a_forked_process_may_not_settle() -> None:
    run = Run(sparsedp.LazyDP()).train(4)
    assert isinstance(run.optimizer.owner, LazyOwner)
    run.optimizer.owner._process += 1
    with pytest.raises(sparsedp.SparseDPError, match="forked"):
        run.module.state_dict()


def test_settling_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows on all cores give what one thread gives, and so do the rows of a lookup and of a step."""
    monkeypatch.setattr("sparsedp.tables.lazy._SHARED", 1)

    def settled(chunk: int, worthwhile: int, threads: int) -> dict[str, Tensor]:
        monkeypatch.setattr("sparsedp.tables.lazy._CHUNK", chunk)
        monkeypatch.setattr("sparsedp.kernels.threads._WORTHWHILE", worthwhile)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return Run(sparsedp.LazyDP(), **SETTINGS["everything"]).train(15).state()
        finally:
            torch.set_num_threads(before)

    assert_same(settled(7, 1, 3), settled(1 << 21, 1 << 16, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule", "everything"])
def test_aggregated_training_has_the_law_of_eager(name: str) -> None:
    """Weights and momentum of rows that are read often, sometimes and never, over many seeds, and their joint law."""
    from scipy import stats

    def drawn(mechanism: sparsedp.Mechanism, seeds: range) -> np.ndarray:
        found = []
        for seed in seeds:
            state = Run(mechanism, seed=seed, **SETTINGS[name]).train(10).state()
            picked = [state["one.weight"][row, 0] for row in (0, 3, 20, ROWS - 1)]
            picked += [value[row, 0] for key, value in state.items() if key == "momentum 0" for row in (0, 3, ROWS - 1)]
            found.append([float(value) for value in picked])
        return np.array(found)

    eager, lazy = drawn(sparsedp.DPSGD(), range(250)), drawn(sparsedp.LazyDP(), range(1000, 1250))
    for column in range(eager.shape[1]):
        assert stats.ks_2samp(eager[:, column], lazy[:, column]).pvalue > 1e-4
        centre = lazy[:, column].mean()
        assert stats.ks_2samp(eager[:, column], centre + 2 * (lazy[:, column] - centre)).pvalue < 0.01
    difference = np.corrcoef(eager.T) - np.corrcoef(lazy.T)
    assert np.abs(difference).max() < 5 / 250**0.5


COMPILERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "compile": lambda module, ids: torch.compile(module, backend="eager")(ids),
    "compile a part": lambda module, ids: torch.compile(module.out, backend="eager")(torch.rand(len(ids), 9).double()),
    "export": lambda module, ids: torch.export.export(module, (ids,)),
    "trace": lambda module, ids: torch.jit.trace(module, (ids,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is
@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP()], ids=lambda mechanism: mechanism.name)
@pytest.mark.parametrize("name", COMPILERS)
def test_compilers_wait_until_the_engine_is_closed(name: str, mechanism: sparsedp.Mechanism) -> None:
    """They would take a module's unsettled weights along, and hide its operations."""
    run = Run(mechanism).train(4)
    ids = data()[0][:5]
    with torch.no_grad():
        with pytest.raises(sparsedp.UnsupportedError, match=r"engine\.close"):
            COMPILERS[name](run.module, ids)
        run.module(ids)
    run.train(6)  # nothing is left half entered
    run.engine.close()
    with torch.no_grad():
        COMPILERS[name](run.module, ids)


@pytest.mark.parametrize("ids", ["vmap", "meta"])
def test_ids_without_memory_leave_the_run_as_it_is(ids: str) -> None:
    engine, module, optimizer, loader = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=8), mechanism=sparsedp.LazyDP()
    )
    train(module, optimizer, loader)
    places = torch.arange(6)
    with pytest.raises((RuntimeError, NotImplementedError)), torch.no_grad():
        if ids == "vmap":
            torch.vmap(lambda own: F.embedding(own, module.table.weight))(places)
        else:
            F.embedding(places.to("meta"), module.table.weight)
    assert module.state_dict()["table.weight"].isfinite().all()
