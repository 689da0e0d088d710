"""The engine from outside: the loop, empty batches, micro-batches, optimizers, epsilon and the statement."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

import sparsedp
from sparsedp import SparseDPError, UnsupportedError
from sparsedp.capture import Capture, Captured
from sparsedp.capture.uses import ParameterUses
from sparsedp.gradient import NoisyGradient
from support import Clicks, clicks, loader_of, make_private, one_by_one, train


def bce(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(out, y)


def test_objects_stay_what_they_were() -> None:
    module = Clicks()
    names = list(module.state_dict())
    engine, same, optimizer, loader = make_private(module, loader_of(*clicks(64), batch_size=8))
    assert same is module and list(same.state_dict()) == names
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size == 8
    train(module, optimizer, loader)
    assert engine.ledger.steps == len(loader) == 8


def test_a_step_is_the_clipped_sum_over_the_expected_batch() -> None:
    """Traps 5 and 6: without noise, a step is lr / expected batch size times the clipped sum of the realised batch."""
    lr, clip, expected = 0.3, 0.4, 16
    torch.manual_seed(3)
    module = Clicks().double()
    ids, x, y = clicks(64)
    data = loader_of(ids, x.double(), y.double(), batch_size=expected)
    engine, module, optimizer, loader = make_private(
        module,
        data,
        optimizer=torch.optim.SGD(module.parameters(), lr=lr),
        noise_multiplier=0.0,
        max_grad_norm=clip,
    )
    sizes = set()
    for i, v, t in loader:
        before = copy.deepcopy(module)
        plain = Clicks().double()
        plain.load_state_dict(before.state_dict())
        bce(module(i, v), t).backward()
        optimizer.step()
        sizes.add(len(i))
        units = one_by_one(_WithLoss(plain), [i, v, t], lambda out: out.sum())
        for name, parameter in module.named_parameters():
            total = torch.zeros_like(parameter)
            for unit in units:
                norm = torch.stack([g.square().sum() for g in unit.values()]).sum().sqrt()
                total += unit["model." + name] * min(1.0, clip / float(norm))
            wanted = before.get_parameter(name) - lr * total / expected
            torch.testing.assert_close(parameter, wanted.detach(), rtol=1e-7, atol=1e-10, check_dtype=True)
        optimizer.zero_grad()
    assert len(sizes) > 1


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, i: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.model(i, v), t, reduction="none")


def test_mean_and_sum_losses_agree() -> None:
    """loss_reduction says how the loss was reduced; per-unit gradients and clipping are the same either way."""
    results = []
    for reduction, lr in (("mean", 0.1), ("sum", 0.1 / 8)):
        torch.manual_seed(0)
        module = Clicks().double()
        ids, x, y = clicks(64)
        engine, module, optimizer, loader = make_private(
            module, loader_of(ids, x.double(), y.double(), batch_size=8),
            optimizer=torch.optim.SGD(module.parameters(), lr=lr), loss_reduction=reduction,
        )  # fmt: skip
        for i, v, t in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(i, v), t, reduction=reduction).backward()
            optimizer.step()
        results.append(module.state_dict())
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name])


def test_empty_batches_step_and_cost() -> None:
    """Trap 7: an empty Poisson batch still adds noise and still costs budget."""
    torch.manual_seed(0)
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(40), batch_size=1), seed=5)
    sizes, moved = [], []

    def each() -> None:
        sizes.append(loader.current.units)
        now = module.table.weight.detach().clone()
        moved.append(not torch.equal(now, last[0]))
        last[0] = now

    last = [module.table.weight.detach().clone()]
    train(module, optimizer, loader, epochs=2, each=each)
    assert 0 in sizes and 1 in sizes and max(sizes) > 1
    assert all(moved) and engine.ledger.steps == 80


def test_empty_batch_may_be_stepped_without_backward() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(40), batch_size=1), seed=5)
    for ids, x, y in loader:
        optimizer.zero_grad()
        if loader.current.units:
            bce(module(ids, x), y).backward()
        optimizer.step()
    assert engine.ledger.steps == 40


@pytest.mark.parametrize("poisson", [True, False])
def test_micro_batches_give_the_same_model(poisson: bool) -> None:
    results = []
    for limit in (None, 5, 1):
        torch.manual_seed(0)
        module = Clicks().double()
        ids, x, y = clicks(60)
        engine, module, optimizer, loader = make_private(
            module,
            loader_of(ids, x.double(), y.double(), batch_size=12),
            max_physical_batch=limit,
            poisson_sampling=poisson,
        )
        largest = 0
        for i, v, t in loader:
            largest = max(largest, len(i))
            optimizer.zero_grad()
            bce(module(i, v), t).backward()
            optimizer.step()
        assert limit is None or largest <= limit
        assert engine.ledger.steps == 5
        results.append(copy.deepcopy(module.state_dict()))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_schedulers_and_groups(name: str) -> None:
    module = Clicks()
    groups = [
        {"params": [module.table.weight]},
        {"params": [*module.hidden.parameters(), *module.out.parameters()], "lr": 0.02},
    ]
    inner = OPTIMIZERS[name](groups)
    engine, module, optimizer, loader = make_private(module, loader_of(*clicks(64), batch_size=8), optimizer=inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        train(module, optimizer, loader)
        scheduler.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.02 / 4)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state.keys() == inner.state_dict().keys()
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


def test_private_training_learns() -> None:
    torch.manual_seed(0)
    ids, x, y = clicks(4000)
    module = Clicks()
    engine, module, optimizer, loader = make_private(
        module, loader_of(ids, x, y, batch_size=200), optimizer=torch.optim.Adam(module.parameters(), lr=0.02)
    )
    train(module, optimizer, loader, epochs=3)
    with torch.no_grad():
        accuracy = ((module(ids, x) > 0) == (y > 0.5)).float().mean()
    assert accuracy > 0.85


# ---------------------------------------------------------------------- epsilon, plan and statement


def test_epsilon_follows_the_ledger() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    assert engine.get_epsilon(1e-5) == 0.0
    train(module, optimizer, loader)
    spent = engine.get_epsilon(1e-5)
    wanted = sparsedp.accounting.get_epsilon(noise_multiplier=1.0, sample_rate=8 / 64, steps=8, delta=1e-5)
    assert spent == pytest.approx(wanted)
    train(module, optimizer, loader)
    assert engine.get_epsilon(1e-5) > spent


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_target_epsilon_is_met_and_not_exceeded(accountant: str) -> None:
    module = Clicks()
    engine = sparsedp.PrivacyEngine(accountant=accountant)  # type: ignore[arg-type]
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(200), batch_size=10), target_epsilon=2.0, target_delta=1e-4, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    train(module, optimizer, loader, epochs=2)
    assert 1.95 < engine.get_epsilon() <= 2.0
    with pytest.raises(SparseDPError, match="budget"):
        train(module, optimizer, loader)
    assert engine.get_epsilon() <= 2.0


def test_statement() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8), seed=None)
    train(module, optimizer, loader)
    statement = engine.statement(1e-5)
    text = str(statement)
    for word in (
        "one example",
        "adding or removing",
        "epsilon = ",
        "delta = 1e-05",
        "dpsgd",
        "Poisson",
        "64",
        "public",
    ):
        assert word in text
    assert "do not release" not in text and "NOT happen" not in text
    assert json.loads(statement.to_json())["steps"] == 8
    assert statement.holds and statement.epsilon == engine.get_epsilon(1e-5)


def test_statement_says_what_weakens_it() -> None:
    """Trap 8, seeds, and no noise."""
    engine, *_ = make_private(Clicks(), loader_of(*clicks(64), batch_size=8), poisson_sampling=False, seed=1)
    assert "did NOT happen" in str(engine.statement(1e-5)) and "do not release" in str(engine.statement(1e-5))
    engine, module, optimizer, loader = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=8), noise_multiplier=0.0, seed=None
    )
    train(module, optimizer, loader)
    statement = engine.statement(1e-5)
    assert engine.get_epsilon(1e-5) == math.inf and not statement.holds
    assert "NO differential privacy" in str(statement)
    assert json.loads(statement.to_json())["epsilon"] == "infinity"
    engine.add_note("The vocabulary was counted on private data.")
    assert "vocabulary was counted" in str(engine.statement(1e-5))
    engine.describe_unit("An example is a click.")
    assert "An example is a click." in engine.statement(1e-5).assumptions


def test_statement_says_whether_the_loss_was_checked() -> None:
    engine, module, *_ = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    assert "no check is on record" in str(engine.statement(1e-5))
    engine.add_check(sparsedp.check(module, nn.functional.binary_cross_entropy_with_logits, clicks(8), units=3))
    text = str(engine.statement(1e-5))
    assert "sparsedp.check found it so, on 3 of them" in text and "no check" not in text


def test_a_target_for_a_mechanism_without_a_guarantee() -> None:
    """Its epsilon is infinite with any noise: refused by name, with what to do instead."""
    module = Clicks()
    with pytest.raises(UnsupportedError, match=r"'eana' has no \(epsilon, delta\) guarantee.*noise_multiplier=\.\.\."):
        sparsedp.PrivacyEngine().make_private_with_epsilon(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader_of(*clicks(64), batch_size=8), target_epsilon=2.0, target_delta=1e-4, epochs=1,
            max_grad_norm=1.0, mechanism=sparsedp.EANA(),
        )  # fmt: skip


def test_plan_round_trip() -> None:
    engine, *_ = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    plan = sparsedp.PrivacyPlan.from_dict(json.loads(json.dumps(engine.plan.to_dict())))
    assert plan == engine.plan and plan.hash == engine.plan.hash


def test_nothing_before_make_private() -> None:
    engine = sparsedp.PrivacyEngine()
    with pytest.raises(SparseDPError, match="make_private"):
        engine.statement(1e-5)
    with pytest.raises(ValueError, match="accountant"):
        sparsedp.PrivacyEngine(accountant="moments")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.settle(),
        lambda engine: engine.pending(),
        lambda engine: engine.prepare(),
        lambda engine: engine.release_frequencies(),
        lambda engine: engine.touch_statistics(),
        lambda engine: engine.save_checkpoint("run.pt"),
        lambda engine: engine.load_checkpoint("run.pt"),
    ],
)
def test_what_needs_a_private_module_says_so(ask: Any) -> None:
    """Whoever settles too early is not told about saving and loading."""
    with pytest.raises(
        SparseDPError, match=r"^No module is private yet: call make_private or make_private_with_epsilon"
    ):
        ask(sparsedp.PrivacyEngine())


# ---------------------------------------------------------------------- reports, copies, memory


def test_last_step_reports() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    assert optimizer.last_step is None
    for ids, x, y in loader:
        optimizer.zero_grad()
        bce(module(ids, x), y).backward()
        optimizer.step()
        report = optimizer.last_step
        table = report.tables["table.weight"]
        assert report.units == len(ids) and table.rows_touched == len(ids.unique())
        assert table.rows_selected == 50 and report.gradient_size == report.dense_size == 300
        assert 0 <= report.clipped_share <= 1


def test_copies_and_pickles_are_plain_modules() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    ids, x, _ = next(iter(loader))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(ids, x).sum().backward()
        assert other.table.weight.grad is not None  # an ordinary module again, not tied to the engine
    assert module.table.weight.grad is None


def test_evaluation_between_steps_is_free() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    ids, x, _ = clicks(30)

    def evaluate() -> None:
        module.eval()
        module(ids, x)  # without no_grad, as people do
        with torch.no_grad():
            module(ids, x)
        module.train()

    train(module, optimizer, loader, each=evaluate)
    assert engine.ledger.steps == 8


def test_freezing_and_unfreezing() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    module.table.weight.requires_grad_(False)
    before = module.table.weight.detach().clone()
    train(module, optimizer, loader)
    assert torch.equal(module.table.weight, before)
    module.table.weight.requires_grad_(True)
    train(module, optimizer, loader)
    assert not torch.equal(module.table.weight, before)


@pytest.mark.slow
def test_memory_stays_flat_without_the_garbage_collector() -> None:
    """A use that held on to the graph would make a cycle that only the collector frees."""
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(400), batch_size=4))
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            train(module, optimizer, loader)
            counts.append(sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects()))
    finally:
        gc.enable()
    assert engine.ledger.steps == 1000
    assert counts[-1] <= counts[1] + 2  # a leak would add a tensor a step, a hundred in each of these


def test_interrupted_forward_leaves_nothing_behind() -> None:
    class Flaky(Clicks):
        fail: type[BaseException] | None = None

        def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            if self.fail is not None:
                raise self.fail
            return super().forward(ids, features)

    engine, module, optimizer, loader = make_private(Flaky(), loader_of(*clicks(64), batch_size=8))
    for ids, x, y in loader:
        for kind in (ValueError, KeyboardInterrupt):
            module.fail = kind
            with pytest.raises(kind):
                module(ids, x)
        module.fail = None
        optimizer.zero_grad()
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()  # an operation outside: no mode is left active
        assert weight.grad is not None
        bce(module(ids, x), y).backward()
        optimizer.step()
    assert engine.ledger.steps == 8


class KeepsGradients(torch.optim.SGD):
    """Its state holds the gradient of the step before, not a copy of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.sub_(parameter.grad, alpha=0.1)
            self.state[parameter]["before"] = parameter.grad


@pytest.mark.parametrize(("rows", "width", "is_kept"), [(300, 2048, True), (5000, 2048, True), (2100, 4096, False)])
def test_the_memory_of_a_large_matrixs_gradient_is_given_back(rows: int, width: int, is_kept: bool) -> None:
    """The peak of memory is in the next forward pass.

    A table's is used again, as making it anew takes longer than its noise: if it is small, or if tables are most of the model.
    """
    module = nn.Sequential(
        nn.EmbeddingBag(rows, 256), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)
    )
    data = loader_of(torch.randint(rows, (32, 4)), torch.rand(32).round(), batch_size=8)
    _, module, optimizer, loader = make_private(module, data)

    for ids, target in loader:
        optimizer.zero_grad()
        bce(module(ids), target).backward()
        optimizer.step()
        assert all(parameter.grad is None for parameter in module.parameters())
        kept = optimizer.private_step._buffers
        assert "1.weight" not in kept
        assert ("0.weight" in kept) == is_kept


def test_uses_are_dropped_as_they_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the loop still has its loss, and with it the graph; a large matrix's gradient gets memory at its sum."""
    module = nn.Sequential(
        nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1), nn.Flatten(0)
    )
    data = loader_of(torch.randn(32, 16), torch.rand(32).round(), batch_size=8)
    _, module, optimizer, loader = make_private(module, data)
    inputs: list[StorageWeakRef] = []  # and gradients of the large matrix's outputs
    summed: list[str] = []
    add, add_weighted_sum = NoisyGradient.add, ParameterUses.add_weighted_sum

    def adding(gradient: NoisyGradient, captured: Captured, *rest: Any) -> None:
        names = {id(uses): name for name, uses in captured.uses.items()}
        (use,) = captured.uses["2.weight"].linears
        inputs[:] = [StorageWeakRef(tensor.untyped_storage()) for tensor in (use.inputs, use.grad)]
        del use

        def summing(uses: ParameterUses, *args: Any) -> None:
            summed.append(names[id(uses)])
            assert summed[-1] not in captured.uses
            assert ("2.weight" in gradient.values) == ("2.weight" in summed)
            if summed[-1] == "0.weight":
                assert all(storage.expired() for storage in inputs)
            add_weighted_sum(uses, *args)

        monkeypatch.setattr(ParameterUses, "add_weighted_sum", summing)
        add(gradient, captured, *rest)

    monkeypatch.setattr(NoisyGradient, "add", adding)
    ids, target = next(iter(loader))
    loss = bce(module(ids), target)
    loss.backward()
    optimizer.step()
    assert set(summed) == {name for name, _ in module.named_parameters()}
    assert summed.index("4.weight") < summed.index("2.weight") < summed.index("0.weight")
    assert loss.grad_fn is not None


def test_a_graph_has_one_step() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    loss = module(torch.randn(5, 4)).sum()
    loss.backward(retain_graph=True)
    assert capture.collect() is not None
    loss.backward()
    with pytest.raises(SparseDPError, match="an earlier step\\(\\) took already"):
        capture.collect()


@pytest.mark.parametrize("kind", ["own optimizer", "hook", "hook of all optimizers"])
def test_gradients_that_somebody_keeps_stay_as_they_are(kind: str) -> None:
    """Their memory must not be used for the sums of later batches, which have no noise yet."""
    module, kept = Clicks(), {}  # type: nn.Module, dict[Any, torch.Tensor]

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kept.update({p: p.grad for group in optimizer.param_groups for p in group["params"]})

    optimizer = (KeepsGradients if kind == "own optimizer" else torch.optim.SGD)(module.parameters(), lr=0.1)
    handle = None
    if kind == "hook":
        optimizer.register_step_post_hook(keep)
    elif kind != "own optimizer":
        handle = register_optimizer_step_post_hook(keep)
    try:
        _, module, private, loader = make_private(
            module, loader_of(*clicks(64), batch_size=16), optimizer=optimizer, max_physical_batch=4
        )
        before: dict[Any, torch.Tensor] = {}
        for ids, features, target in loader:
            private.zero_grad()
            bce(module(ids, features), target).backward()
            last = loader.current.last
            private.step()
            if last:
                if kind == "own optimizer":
                    kept.update({p: own["before"] for p, own in private.state.items()})
                before = {p: gradient.clone() for p, gradient in kept.items()}
            assert all(torch.equal(kept[p], gradient) for p, gradient in before.items())
        assert before
    finally:
        if handle is not None:
            handle.remove()
