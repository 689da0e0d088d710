"""Terms of the loss that depend on parameters alone: exact beside clipped units, and refused where a unit decides anything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import SparseDPError

EXPECTED = 4
DRAWN = ([0, 3, 4, 8, 11], [1, 7], [5], [])

Penalty = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Returns the loss of a batch: `join(errors, penalty)` of the error of each example and a penalty."""

    def __init__(
        self,
        penalty: Callable[..., Any],
        join: Callable[[Tensor, Any], Tensor] = lambda errors, penalty: errors.mean() + penalty,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(7, 3)
        self.hidden = nn.Linear(3, 5)
        self.out = nn.Linear(5, 1)
        self.penalty, self.join = penalty, join

    def errors(self, ids: Tensor, target: Tensor) -> Tensor:
        return (self.out(self.hidden(self.table(ids)).tanh())[:, 0] - target).square()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.join(self.errors(ids, target), self.penalty(self, ids))


def norm(model: Model, ids: Tensor) -> Tensor:
    return 0.3 * model.hidden.weight.norm(2)


def several(model: Model, ids: Tensor) -> Tensor:
    total = 0.1 * model.hidden.weight.norm(2)
    for parameter in model.out.parameters():
        total += parameter.square().sum()
    return total - 0.2 * F.normalize(model.hidden.weight).exp().mean()


def of_table(model: Model, ids: Tensor) -> Tensor:
    return 0.3 * model.table.weight.norm(2) + 0.1 * model.out.weight.abs().sum()


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randint(0, 7, (12,)), torch.randn(12))


def private(
    model: Model, drawn: Any = DRAWN, engine: sparsedp.PrivacyEngine | None = None, **settings: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """The private module, optimizer and batch of each step."""
    engine = engine or sparsedp.PrivacyEngine(seed=1)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, **settings}
    samples = iter(drawn)
    with mock.patch("sparsedp.sampling.draws.poisson_indices", lambda *_: np.array(next(samples, []), dtype=np.int64)):
        module, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data(), batch_size=EXPECTED), **settings,
        )  # fmt: skip
        steps = 0
        while steps < len(drawn):
            for batch in loader:
                yield module, optimizer, batch
                steps += loader.current.last
                if steps == len(drawn):
                    break
    engine.close()


def train(model: Model, drawn: Any = DRAWN, **settings: Any) -> None:
    for module, optimizer, batch in private(model, drawn, **settings):
        optimizer.zero_grad()
        module(*batch).backward()
        optimizer.step()


def reference(model: Model, penalty: Callable[[Model], Tensor], drawn: Any, reduction: str) -> Model:
    """Each example alone, clipped, in float64, and the penalty beside them."""
    model = copy.deepcopy(model).double()
    ids, target = data().tensors
    for sample in drawn:
        named = dict(model.named_parameters())
        total = [torch.zeros_like(p) for p in named.values()]
        for index in sample:
            loss = model.errors(ids[index : index + 1], target[index : index + 1].double()).sum()
            grads = torch.autograd.grad(loss, list(named.values()))
            size = float(torch.cat([grad.flatten() for grad in grads]).norm())
            divisor = EXPECTED if reduction == "mean" else 1
            total = [t + grad * min(1.0, 0.5 / size) / divisor for t, grad in zip(total, grads)]
        extra = torch.autograd.grad(penalty(model), list(named.values()), allow_unused=True)
        with torch.no_grad():
            for parameter, grad, more in zip(named.values(), total, extra):
                parameter -= grad + (0.0 if more is None else more)
    return model


def assert_same(model: Model, wanted: Model) -> None:
    for name, parameter in wanted.named_parameters():
        found = dict(model.named_parameters())[name]
        torch.testing.assert_close(found.double(), parameter, rtol=2e-5, atol=2e-6, msg=lambda m: f"{name}: {m}")


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize("penalty", [norm, several, of_table])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("physical", [None, 2])
def test_a_penalty_joins_the_clipped_units(penalty: Penalty, reduction: str, physical: int | None) -> None:
    model = Model(penalty, lambda e, p: (e.mean() if reduction == "mean" else e.sum()) + p)
    wanted = reference(model, lambda m: penalty(m, None), DRAWN, reduction)
    train(model, loss_reduction=reduction, max_physical_batch=physical)
    assert_same(model, wanted)


JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "first": (lambda e, p: p + e.mean(), 1.0),
    "subtracted": (lambda e, p: e.mean() - p, -1.0),
    "from a penalty": (lambda e, p: p - (-e).mean(), 1.0),
    "in place": (lambda e, p: e.mean().add_(p), 1.0),
    "of a shape": (lambda e, p: (e.mean(0, keepdim=True) + p[None]).squeeze(), 1.0),
    "before other terms": (lambda e, p: e.mean() / 2 + p + e.sum() / (2 * 5) * 0 + (e / 2).mean(), 1.0),
}


@pytest.mark.parametrize("form", JOINED)
def test_forms_of_addition(form: str) -> None:
    join, sign = JOINED[form]
    model = Model(norm, join)
    wanted = reference(model, lambda m: sign * norm(m, None), DRAWN, "mean")
    train(model)
    assert_same(model, wanted)


@pytest.mark.parametrize(
    "mechanism", [sparsedp.LazyDP(), sparsedp.AdaFEST(threshold=1e-12, noise_ratio=1.0, map_clip=1.0)]
)
def test_row_sparse_mechanisms_take_penalties_on_dense_parameters(mechanism: sparsedp.Mechanism) -> None:
    model = Model(several)
    wanted = reference(model, lambda m: several(m, None), DRAWN, "mean")
    train(model, mechanism=mechanism)
    assert_same(model, wanted)


def test_a_penalty_that_is_changed_in_place_afterwards_is_as_it_was() -> None:
    def join(errors: Tensor, penalty: Tensor) -> Tensor:
        loss = errors.mean() + penalty
        penalty -= penalty.detach() * 0 + penalty
        return loss

    model = Model(norm, join)
    wanted = reference(model, lambda m: norm(m, None), DRAWN, "mean")
    train(model)
    assert_same(model, wanted)


def test_check_agrees() -> None:
    ids, target = data().tensors
    batch = {"ids": ids, "target": target}
    sparsedp.check(Model(several), lambda loss, batch: loss, batch)
    with pytest.raises(SparseDPError):
        sparsedp.check(Model(lambda m, i: len(i) * norm(m, i)), lambda loss, batch: loss, batch)


# ---------------------------------------------------------------------- nothing of the data


def _noisy(model: Model, drawn: Any) -> dict[str, Tensor]:
    """Without the penalty's part: how far a seeded step with noise moves the weights."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, drawn, noise_multiplier=1.0)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("drawn", [[0, 3, 4], [0, 3, 4, 5], [], [7]])
def test_neighbours_have_the_same_penalty_beside_the_same_noise(drawn: list[int]) -> None:
    with_penalty = _noisy(Model(several), [drawn])
    without = _noisy(Model(lambda m, i: 0.0), [drawn])
    model = Model(several)
    extra = torch.autograd.grad(several(model, None), list(model.parameters()), allow_unused=True)
    for (name, moved), grad in zip(with_penalty.items(), extra):
        part = torch.zeros_like(moved) if grad is None else grad
        torch.testing.assert_close(moved - without[name], part, rtol=1e-4, atol=1e-5)


REFUSED: dict[str, Callable[[], Model]] = {
    "rows that the batch picks": lambda: Model(lambda m, i: m.table.weight[i.unique()].norm()),
    "times a batch statistic": lambda: Model(lambda m, i: norm(m, i) * i.float().mean()),
    "joined to a product": lambda: Model(norm, lambda e, p: e.mean() * p),
    "scaled by the error": lambda: Model(norm, lambda e, p: e.mean() + p * e.mean().detach()),
    "a square of the loss": lambda: Model(norm, lambda e, p: (e.mean() + p) ** 2),
    "a root of a batch of one": lambda: Model(norm, lambda e, p: (e.mean() + p).sqrt()),
    "an item": lambda: Model(lambda m, i: norm(m, i) * i.sum().item()),
    "a list": lambda: Model(lambda m, i: norm(m, i) * i.tolist()[0]),
    "if the batch has an id": lambda: Model(lambda m, i: norm(m, i) * (1e6 if (i == 3).any() else 1.0)),
    "if the batch is as it is": lambda: Model(lambda m, i: norm(m, i) * (1e6 if torch.equal(i, i.sort()[0]) else 1.0)),
    "random numbers": lambda: Model(lambda m, i: (m.hidden.weight * torch.rand(5, 3)).sum()),
    "each unit": lambda: Model(norm, lambda e, p: (e + p).mean() + e.mean() * p),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("drawn", [[0, 3, 4], [5]])
def test_what_units_decide_is_refused(case: str, drawn: list[int]) -> None:
    model = REFUSED[case]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparseDPError):
        train(model, [drawn])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_looked_up_rows_of_several_units_are_refused() -> None:
    """Of one unit alone they are its own, and clipped."""
    with pytest.raises(SparseDPError):
        train(Model(lambda m, i: m.table(i).norm()), [[0, 3, 4]])


CHANGING: dict[str, Callable[[], Model]] = {
    "the number of examples": lambda: Model(lambda m, i: len(i) * norm(m, i)),
    "its inverse": lambda: Model(lambda m, i: norm(m, i) / len(i)),
    "a power": lambda: Model(lambda m, i: m.hidden.weight.square().sum() ** len(i)),
    "in a tensor": lambda: Model(lambda m, i: norm(m, i) * torch.tensor(float(len(i)))),
    "a part": lambda: Model(lambda m, i: m.hidden.weight[: len(i)].norm()),
    "there or not": lambda: Model(lambda m, i: norm(m, i) if len(i) > 1 else 0.0),
    "another parameter": lambda: Model(lambda m, i: m.hidden.weight.norm() if len(i) > 1 else m.out.weight.norm()),
    "another sign": lambda: Model(norm, lambda e, p: e.mean() + p if len(e) > 1 else e.mean() - p),
}


@pytest.mark.parametrize("case", CHANGING)
@pytest.mark.parametrize("physical", [None, 2])
def test_a_term_that_changes_with_the_number_of_examples_is_refused(case: str, physical: int | None) -> None:
    with pytest.raises(SparseDPError, match="not the same as in the first step"):
        train(CHANGING[case](), [[0, 3, 4, 8], [5]], max_physical_batch=physical)


SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a constant": lambda loss, target: 2 * loss,
    "a statistic of the batch": lambda loss, target: loss * target.mean(),
    "the number of examples": lambda loss, target: loss * len(target),
    "a square": lambda loss, target: loss.square(),
    "twice": lambda loss, target: loss + loss,
}


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("drawn", [[0, 3, 4], [5, 6]])
def test_the_loop_may_not_scale_it(case: str, drawn: list[int]) -> None:
    model = Model(norm)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparseDPError, match="factor 1"):
        for module, optimizer, batch in private(model, [drawn]):
            SCALED[case](module(*batch), batch[1]).backward()
            optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_backward_passes_are_refused() -> None:
    with pytest.raises(SparseDPError, match="factor 1"):
        for module, optimizer, batch in private(Model(norm)):
            loss = module(*batch)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()


def test_zero_grad_forgets_it() -> None:
    model = Model(norm)
    wanted = reference(model, lambda m: norm(m, None), DRAWN, "mean")
    for module, optimizer, batch in private(model):
        module(*batch).backward()
        optimizer.zero_grad()
        module(*batch).backward()
        optimizer.step()
    assert_same(model, wanted)


ROW_SPARSE: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "lazydp": sparsedp.LazyDP,
    "lazydp by step": lambda: sparsedp.LazyDP(aggregate=False),
    "eana": sparsedp.EANA,
    "adafest": lambda: sparsedp.AdaFEST(threshold=1e-12, noise_ratio=1.0, map_clip=1.0),
    "fest": lambda: sparsedp.FEST(k=7, counts={"table.weight": torch.ones(7)}),
}


def squares_of_table(model: Model, ids: Tensor) -> Tensor:
    return 0.2 * model.table.weight.norm(2) ** 2 + 0.1 * model.table.weight.exp().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("penalty", [of_table, squares_of_table])
@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("mechanism", ROW_SPARSE)
def test_a_penalty_on_a_table_is_exact(mechanism: str, penalty: Penalty, physical: int | None) -> None:
    model = Model(penalty)
    wanted = reference(model, lambda m: penalty(m, None), DRAWN, "mean")
    train(model, mechanism=ROW_SPARSE[mechanism](), max_physical_batch=physical)
    assert_same(model, wanted)


@pytest.mark.parametrize("mechanism", ROW_SPARSE)
def test_a_penalty_on_a_table_is_warned_of_once(mechanism: str) -> None:
    with pytest.warns(sparsedp.SparseDPWarning, match=r"'table\.weight' alone.*all 7 rows.*weight_decay") as warned:
        train(Model(of_table), mechanism=ROW_SPARSE[mechanism]())
    assert sum("alone (a penalty?)" in str(warning.message) for warning in warned) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", ROW_SPARSE)
def test_neighbours_differ_by_the_clip_bound_beside_a_penalty_on_a_table(mechanism: str) -> None:
    """One step on D and on D and one unit more, without noise: the penalty's part is the same in both."""
    after = []
    for drawn in ([[0, 3, 4]], [[0, 3, 4, 8]]):
        model = Model(squares_of_table)
        train(model, drawn, mechanism=ROW_SPARSE[mechanism]())
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    moved = float((after[0] - after[1]).norm())
    assert 0 < moved <= 0.5 / EXPECTED * (1 + 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", ["lazydp", "lazydp by step", "adafest"])
def test_a_run_with_a_penalty_on_a_table_is_resumed(mechanism: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        model, engine = Model(squares_of_table), sparsedp.PrivacyEngine(seed=1)
        return engine, *engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mechanism=ROW_SPARSE[mechanism](),
            data_loader=DataLoader(data(), batch_size=EXPECTED), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip

    def epoch(run: tuple[Any, ...]) -> None:
        _, module, optimizer, loader = run
        for batch in loader:
            optimizer.zero_grad()
            module(*batch).backward()
            optimizer.step()

    straight, first, second = start(), start(), start()
    epoch(straight)
    epoch(first)
    straight[0].settle()
    first[0].save_checkpoint(tmp_path / "run")
    second[0].load_checkpoint(tmp_path / "run")
    epoch(straight)
    epoch(second)
    for run in (straight, second):
        run[0].close()
    assert_same(second[1], straight[1].double())


def test_a_penalty_in_the_loop_is_still_refused() -> None:
    with pytest.raises(SparseDPError, match="weight_decay"):
        for module, _, batch in private(Model(lambda m, i: 0.0)):
            (module(*batch) + module.hidden.weight.norm()).backward()


def test_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        model, engine = Model(several), sparsedp.PrivacyEngine(seed=1)
        loader = DataLoader(data(), batch_size=EXPECTED)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return engine, *engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    def epochs(run: tuple[Any, ...], count: int) -> None:
        _, module, optimizer, loader = run
        for _ in range(count):
            for batch in loader:
                optimizer.zero_grad()
                module(*batch).backward()
                optimizer.step()

    straight, first, second = start(), start(), start()
    epochs(straight, 4)
    epochs(first, 2)
    first[0].save_checkpoint(tmp_path / "c.pt")
    second[0].load_checkpoint(tmp_path / "c.pt")
    epochs(second, 2)
    for name, value in straight[1].state_dict().items():
        assert torch.equal(second[1].state_dict()[name], value), name
