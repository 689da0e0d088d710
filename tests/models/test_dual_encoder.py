"""The dual encoder: the paper's shape, exact capture of both towers, units that do not mix, and training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from neighbours import largest_influence
from sparsedp import DPSGD, EANA, AdaFEST, LazyDP
from sparsedp.capture import RowSparse
from sparsedp.clipping import Clipping
from sparsedp.errors import UnitsMixedError
from sparsedp.models import DualEncoder
from sparsedp.nn import CandidateSampler, candidate_loss, sequence_loss
from support import Apply, assert_exact, loader_of, make_private

ITEMS, LENGTH, DIM, UNITS = 12, 4, 5, 7

VARIANTS: dict[str, dict[str, Any]] = {
    "one hidden layer": {"hidden": (6,)},
    "two hidden layers": {"hidden": (6, 3)},
    "none": {"hidden": ()},
    "tied": {"hidden": (6,), "tied": True},
}
all_variants = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, **options: Any) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder(ITEMS, DIM, **VARIANTS[variant], **options)


def batch(units: int = UNITS) -> tuple[Tensor, Tensor]:
    """Histories with padding anywhere, one of padding alone and one of a single repeated item; targets."""
    generator = torch.Generator().manual_seed(3)
    history = torch.randint(ITEMS + 1, (units, LENGTH), generator=generator)
    history[:1], history[1:2] = 0, 2
    return history, 1 + torch.randint(ITEMS, (units,), generator=generator)


def candidates_of(target: Tensor, count: int = 6) -> tuple[Tensor, Tensor]:
    """Candidates and log Q: with more negatives than half of the items, some repeat and some are the target."""
    popularity = torch.arange(ITEMS, 0, -1).float()
    sample = CandidateSampler(ITEMS, count, popularity, generator=torch.Generator().manual_seed(1))
    drawn = sample(target - 1)
    return drawn + 1, sample.log_expected(drawn)


def sum_of_losses(scores: Tensor) -> Tensor:
    return len(scores) * candidate_loss(scores)


# ---------------------------------------------------------------------- the contract


def test_the_papers_architecture() -> None:
    model = DualEncoder(27_278)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tables = {"context_table.weight": (27_279, 128), "label_table.weight": (27_279, 128)}
    layers = {"network.0.weight": (128, 128), "network.2.weight": (128, 128)}
    assert shapes == tables | layers | {"network.0.bias": (128,), "network.2.bias": (128,)}
    assert not model.context_table.weight[0].any() and not model.label_table.weight[0].any()
    tied = DualEncoder(10, tied=True)
    assert tied.label_table.weight is tied.context_table.weight and "label_table.weight" not in dict(
        tied.named_parameters()
    )


@all_variants
def test_scores_by_hand(variant: str) -> None:
    model = build(variant)
    history, target = batch()
    for unit in range(UNITS):
        rows = [model.context_table.weight[i] for i in history[unit] if i != 0]
        hidden = math.sqrt(DIM) * torch.stack(rows).mean(0) if rows else torch.zeros(DIM)
        for layer in model.network:
            hidden = hidden.clamp_min(0) if isinstance(layer, nn.ReLU) else layer.weight @ hidden + layer.bias
        wanted = model.label_table.weight @ hidden
        torch.testing.assert_close(model(history[unit : unit + 1])[0], wanted)
    scores = model(history)
    candidates, expected = candidates_of(target)
    hits = candidates[:, 1:] == target[:, None]
    assert hits.any()
    for given in (None, expected):
        wanted = scores.gather(1, candidates) - (0 if given is None else given)
        wanted[:, 1:][hits] = -math.inf
        torch.testing.assert_close(model(history, candidates, given), wanted)
    every = F.cross_entropy(scores[:, 1:], target - 1, reduction="none")
    torch.testing.assert_close(model(history, target=target), every)
    torch.testing.assert_close(sequence_loss(scores, target), every.mean())
    last = model.score_next(history)
    assert (last[:, 0] == -math.inf).all() and torch.equal(last[:, 1:], scores[:, 1:])


@pytest.mark.parametrize("units", [0, 1, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_batches(units: int, sparse: bool) -> None:
    model = build("one hidden layer", sparse=sparse)
    history, target = batch(units)
    candidates, _ = candidates_of(target)
    scores = model(history, candidates)
    assert scores.shape == (units, 7) and model(history).shape == (units, ITEMS + 1)
    assert model(history, target=target).shape == (units,)
    scores.sum().backward()
    for table in (model.context_table, model.label_table):
        assert table.weight.grad is not None and table.weight.grad.is_sparse == sparse


def test_what_is_refused() -> None:
    for wrong in ({"items": 0}, {"items": 3, "dim": 0}, {"items": 3, "hidden": (4, 0)}):
        with pytest.raises(ValueError, match="at least 1"):
            DualEncoder(**wrong)  # type: ignore[arg-type]
    model = build("tied")
    history, target = batch()
    candidates, expected = candidates_of(target)
    with pytest.raises(ValueError, match="not both"):
        model(history, candidates, target=target)
    with pytest.raises(ValueError, match="there are none"):
        model(history, log_expected=expected)
    with pytest.raises(ValueError, match=r"\[B, L\], not \(7,\)"):
        model(target)


# ---------------------------------------------------------------------- the guarantee


@all_variants
@pytest.mark.parametrize("corrected", [False, True])
def test_norms_and_sums_with_candidates_are_exact(variant: str, corrected: bool) -> None:
    """Against one unit at a time in float64; the gradients of the tables have the looked-up rows only."""
    model = build(variant)
    history, target = batch()
    candidates, expected = candidates_of(target)
    inputs = (history, candidates, expected) if corrected else (history, candidates)
    found = assert_exact(model, *inputs, loss=sum_of_losses)
    tables = {"context_table.weight"} if model.tied else {"context_table.weight", "label_table.weight"}
    assert tables < set(found.uses)
    for name in tables:
        parameter = model.get_parameter(name)
        total = found.uses[name].weighted_sum(torch.ones(UNITS, dtype=torch.float64), parameter.shape)
        assert isinstance(total, RowSparse) and 0 not in total.rows.tolist()


@all_variants
def test_norms_and_sums_with_the_full_softmax_are_exact(variant: str) -> None:
    model = build(variant)
    history, target = batch()
    by_target = Apply(lambda m, h, t: m.model(h, target=t), model=model)
    assert_exact(by_target, history, target, loss=lambda losses: losses.sum())
    by_scores = Apply(lambda m, h, t: len(h) * sequence_loss(m.model(h), t), model=model)
    assert_exact(by_scores, history, target, loss=lambda loss: loss)


@all_variants
def test_check_passes(variant: str) -> None:
    history, target = batch()
    candidates, expected = candidates_of(target)
    model = build(variant)
    report = sparsedp.check(model, lambda scores, _: candidate_loss(scores), (history, candidates, expected, target))
    assert report.largest_difference < 1e-9
    assert sparsedp.check(model, sequence_loss, (history, target)).largest_difference < 1e-9


def test_in_batch_negatives_are_caught() -> None:
    """The paper's softmax, if the other units' labels are the negatives: units mix."""

    def in_batch(module: Any, history: Tensor, target: Tensor) -> Tensor:
        return module.model.encode(history) @ module.model.label_table(target).mT

    history, target = batch()
    module = Apply(in_batch, model=build("one hidden layer"))
    with pytest.raises(UnitsMixedError):
        sparsedp.check(
            module, lambda scores, _: F.cross_entropy(scores, torch.arange(len(scores))), (history, target, target)
        )


@all_variants
def test_neighbour_replay(variant: str) -> None:
    history, target = batch()
    inputs = [history, candidates_of(target)[0]]
    for size in (1.0, 1e3):
        worst = largest_influence(build(variant), inputs, Clipping(0.5), lambda s, size=size: size * sum_of_losses(s))
        assert worst <= 0.5 * (1 + 1e-4)
    assert worst > 0.45


# ---------------------------------------------------------------------- training


def pairs(count: int, items: int) -> tuple[Tensor, Tensor]:
    """Histories of one item and padding, each followed by the next item of a circle."""
    first = 1 + torch.randint(items, (count,), generator=torch.Generator().manual_seed(0))
    return torch.stack([first, torch.zeros_like(first)], 1), first % items + 1


def train(run: Any, sample: CandidateSampler, epochs: int = 1) -> None:
    _, module, optimizer, loader = run
    for _ in range(epochs):
        for history, target in loader:
            optimizer.zero_grad()
            candidate_loss(module(history, sample(target - 1) + 1)).backward()
            optimizer.step()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mechanism", [DPSGD(), LazyDP(), EANA(), AdaFEST(threshold=3.0)], ids=repr)
@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
def test_every_mechanism_trains_both_towers(mechanism: Any, tied: bool) -> None:
    torch.manual_seed(0)
    model = DualEncoder(40, DIM, (6,), tied=tied)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = make_private(model, loader_of(*pairs(200, 40), batch_size=50), mechanism=mechanism)
    train(run, CandidateSampler(40, 3))
    run[0].settle()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all() and not torch.equal(parameter, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [LazyDP(), AdaFEST(threshold=4.0)], ids=["LazyDP", "AdaFEST"])
def test_private_training_learns(mechanism: Any) -> None:
    items = 40
    torch.manual_seed(0)
    model = DualEncoder(items, 16, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    run = make_private(
        model, loader_of(*pairs(8000, items), batch_size=800), noise_multiplier=0.6, mechanism=mechanism,
        optimizer=optimizer,
    )  # fmt: skip
    train(run, CandidateSampler(items, 10), epochs=20)
    run[0].settle()
    every = torch.arange(1, items + 1)
    right = (model.score_next(every[:, None]).argmax(1) == every % items + 1).float().mean()
    assert right > 0.5
