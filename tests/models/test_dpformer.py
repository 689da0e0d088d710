"""The sequence models: their contract, causality, exact capture, and training with every kind of mechanism."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from neighbours import largest_influence
from sparsedp import DPSGD, AdaFEST, LazyDP
from sparsedp.capture import RowSparse
from sparsedp.clipping import Clipping
from sparsedp.models import DPFormer, RecurrentRecommender, SequenceModel
from sparsedp.nn import CandidateSampler, candidate_loss, sequence_loss
from support import assert_exact, loader_of, make_private

ITEMS, LENGTH, DIM = 30, 7, 8

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "heads": {"heads": 4, "blocks": 3},
    "gelu": {"activation": "gelu"},
    "reattention": {"reattention": True},
    "reattention, untied, heads": {"reattention": True, "tied": False, "heads": 2},
    "reattention, projected, gelu": {"reattention": True, "projected": True, "heads": 2, "activation": "gelu"},
    "gru": {"cell": "gru"},
    "lstm": {"cell": "lstm"},
    "lstm, untied": {"cell": "lstm", "tied": False},
}
all_variants = pytest.mark.parametrize("variant", VARIANTS)


def build(
    variant: str, items: int = ITEMS, length: int = LENGTH, dim: int = DIM, dropout: float = 0.0
) -> SequenceModel:
    torch.manual_seed(0)
    options = VARIANTS[variant]
    if "cell" in options:
        return RecurrentRecommender(items, length, dim=dim, dropout=dropout, **options)
    model = DPFormer(items, length, dim, dropout=dropout, **options)
    if model.reattention:
        frequencies = torch.cat([torch.zeros(1), 0.5 / torch.arange(1, items + 1)])
        model.track_errors(noise_multiplier=1.0, batch_size=20, frequencies=frequencies)
    return model


def sequences(units: int, items: int = ITEMS, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Histories and targets of all lengths, popular items more often, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, items + 1)
    drawn = 1 + torch.multinomial(weights.expand(units, -1), length + 1, replacement=True, generator=generator)
    counts = 1 + torch.randint(length, (units, 1), generator=generator)
    whole = drawn * (torch.arange(length + 1) <= counts)
    target = whole[:, 1:]
    return whole[:, :-1] * (target != 0), target


def unit_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Each unit's own mean cross-entropy, [B]."""
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    valid = (target != 0).to(each.dtype)
    return (each * valid).sum(1) / valid.sum(1).clamp_min(1)


# ---------------------------------------------------------------------- the contract


@all_variants
def test_shapes(variant: str) -> None:
    model = build(variant)
    for units in (0, 1, 3):
        history, target = sequences(units)
        assert model.encode(history).shape == (units, LENGTH, DIM)
        assert model(history).shape == (units, LENGTH, ITEMS + 1)
        candidates = CandidateSampler(ITEMS + 1, 4)(target)
        assert model(history, candidates).shape == (units, LENGTH, 5)
        assert model.score_next(history).shape == (units, ITEMS + 1)
    assert model(sequences(2)[0][:, :3]).shape == (2, 3, ITEMS + 1)
    with pytest.raises(ValueError, match=r"L from 1 to 7"):
        model(torch.ones(2, LENGTH + 1, dtype=torch.long))
    with pytest.raises(ValueError, match="not both"):
        model(history, candidates, target)


@all_variants
def test_future_items_do_not_change_earlier_states(variant: str) -> None:
    model = build(variant).double()
    history = torch.randint(1, ITEMS + 1, (4, LENGTH))
    before = model.encode(history)
    for position in range(1, LENGTH):
        changed = history.clone()
        changed[:, position:] = torch.randint(0, ITEMS + 1, changed[:, position:].shape)
        after = model.encode(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=1e-12, atol=1e-12)
    assert (after[:, -1] - before[:, -1]).abs().max() > 1e-3


@all_variants
def test_earlier_items_count(variant: str) -> None:
    model = build(variant)
    history = torch.randint(1, ITEMS, (4, LENGTH))
    changed = history.clone()
    changed[:, 0] += 1
    gap = (model.encode(history) - model.encode(changed)).abs().amax(-1)
    assert (gap[:, -1] > 1e-6).all()


@all_variants
def test_the_next_score_is_that_of_the_last_item(variant: str) -> None:
    model = build(variant).eval()
    history, _ = sequences(6)
    history[5] = 0  # an empty history
    scores, logits = model.score_next(history), model(history)
    assert not scores.requires_grad and scores[:, 0].tolist() == [-math.inf] * 6
    for unit in range(6):
        last = max(int((history[unit] != 0).sum()) - 1, 0)
        torch.testing.assert_close(scores[unit, 1:], logits[unit, last, 1:])
        short = model.score_next(history[unit : unit + 1, : last + 1])
        torch.testing.assert_close(short, scores[unit : unit + 1])


@all_variants
def test_candidates_have_the_scores_of_all_items(variant: str) -> None:
    model = build(variant)
    history, target = sequences(5)
    candidates = torch.cat([target[..., None], (target[..., None] + torch.arange(1, 5)) % (ITEMS + 1)], -1)
    wanted = model(history).gather(-1, candidates)
    wanted = torch.where(candidates == 0, 0.0, wanted)  # padding's row is zero
    torch.testing.assert_close(model(history, candidates), wanted, rtol=1e-4, atol=1e-5)


def test_tables_and_initialisation() -> None:
    model = DPFormer(2000, 20)
    assert [name for name, _ in model.named_parameters() if "table" in name] == ["item_table.weight"]
    assert "future" not in model.state_dict() and not model.item_table.weight[0].any()
    history = torch.randint(1, 2001, (50, 20))
    assert model.embed(history).std().item() == pytest.approx(64**-0.5, rel=0.05)
    # No item stands out at the start, the position's own neither: the loss is near log(items).
    logits = model(history)[..., 1:]
    assert 0.7 * 64**-0.5 < logits.std().item() < 1.5 * 64**-0.5
    assert logits.gather(-1, history[..., None] - 1).mean().item() < 1
    recurrent = RecurrentRecommender(2000, 20)
    assert recurrent.embed(history).std().item() == pytest.approx(1, rel=0.05)
    untied = DPFormer(2000, 20, tied=False)
    assert [name for name, _ in untied.named_parameters() if "table" in name] == [
        "item_table.weight",
        "output_table.weight",
    ]
    assert sparsedp.refusals.find_tables(untied) == {"item_table.weight", "output_table.weight"}
    for wrong in ({"heads": 3}, {"blocks": 0}, {"dropout": 1.0}, {"activation": "tanh"}, {"dim": 0}):
        with pytest.raises(ValueError, match=r"must be|divide"):
            DPFormer(10, 5, **wrong)
    with pytest.raises(ValueError, match="gru, lstm"):
        RecurrentRecommender(10, 5, "rnn")


@all_variants
def test_dropout_acts_in_training_only(variant: str) -> None:
    model = build(variant, dropout=0.5)
    history, _ = sequences(4)
    assert not torch.equal(model(history), model(history))
    model.eval()
    assert torch.equal(model(history), model(history))


# ---------------------------------------------------------------------- the guarantee


@all_variants
def test_check_passes(variant: str) -> None:
    """Captured gradients are exact and units do not mix, in both ways of scoring, with dropout switched on."""
    model = build(variant, dropout=0.2)
    history, target = sequences(6)
    report = sparsedp.check(model, lambda logits, y: unit_losses(logits, y).mean(), (history, target))
    assert report.parameters == sum(1 for _ in model.parameters()) and report.largest_difference < 1e-9
    candidates = CandidateSampler(ITEMS + 1, 4)(target)
    loss = lambda scores, y: candidate_loss(scores, y != 0)  # noqa: E731
    assert sparsedp.check(model, loss, (history, candidates, target)).largest_difference < 1e-9


class WithTarget(nn.Module):
    """Hands the target on to the loss."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, history: Tensor, target: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.model(history, candidates), target


class OwnLoss(WithTarget):
    """The losses that the model computes itself."""

    def forward(self, history: Tensor, target: Tensor, candidates: Tensor | None = None) -> Any:
        return self.model(history, target=target)


@all_variants
def test_the_models_own_loss(variant: str) -> None:
    """It equals that of the logits, is exact under capture, and keeps units apart."""
    history, target = sequences(6)
    target[2] = 0  # a unit without any target
    model = build(variant, dropout=0.2).double().eval()
    losses = model(history, target=target)
    logits = model(history)
    masked = torch.cat([torch.full_like(logits[..., :1], -math.inf), logits[..., 1:]], -1)
    wanted = [F.cross_entropy(masked[n][target[n] != 0], target[n][target[n] != 0]) for n in (0, 1, 3, 4, 5)]
    torch.testing.assert_close(losses[[0, 1, 3, 4, 5]], torch.stack(wanted))
    assert losses[2] == 0
    torch.testing.assert_close(sequence_loss(logits, target), losses.mean())
    assert_exact(OwnLoss(model), history, target, loss=lambda found: found.sum())
    report = sparsedp.check(OwnLoss(model), lambda found, _: found.mean(), (history, target, target))
    assert report.largest_difference < 1e-9


@all_variants
def test_norms_and_sums_are_exact(variant: str) -> None:
    """Against one unit at a time in float64, repeated items and units of every length included."""
    history, target = sequences(6)
    assert (history[:, 0] == history[:, 1]).any()  # an item twice in a history

    def full(found: tuple[Tensor, Tensor]) -> Tensor:
        return unit_losses(*found).sum()

    def sampled(found: tuple[Tensor, Tensor]) -> Tensor:
        return len(found[1]) * candidate_loss(found[0], found[1] != 0)

    assert_exact(WithTarget(build(variant)), history, target, loss=full)
    candidates = CandidateSampler(ITEMS + 1, 4)(target)
    found = assert_exact(WithTarget(build(variant)), history, target, candidates, loss=sampled)
    for name in found.uses:
        if "table" in name:
            rows = found.uses[name].weighted_sum(torch.ones(6, dtype=torch.float64), torch.Size((ITEMS + 1, DIM)))
            assert isinstance(rows, RowSparse)


@pytest.mark.parametrize("variant", ["tied", "reattention", "gru"])
@pytest.mark.parametrize("style", ["flat", "automatic"])
def test_neighbour_replay(variant: str, style: str) -> None:
    """One unit more or less moves the clipped sum by at most the clip bound, with large gradients, too."""
    module, inputs = WithTarget(build(variant)), list(sequences(5))
    for size in (1.0, 1e3):
        loss = lambda found, size=size: size * unit_losses(*found).sum()  # noqa: E731
        worst = largest_influence(module, inputs, Clipping(0.5, style), loss)  # type: ignore[arg-type]
        assert worst <= 0.5 * (1 + 1e-4)
    assert worst > 0.45


# ---------------------------------------------------------------------- with mechanisms

MECHANISMS = {
    "dpsgd": lambda: DPSGD(),
    "lazydp": lambda: LazyDP(),
    "adafest": lambda: AdaFEST(threshold=6.0, noise_ratio=2.0),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("variant", ["tied", "untied", "reattention", "reattention, projected, gelu", "gru", "lstm"])
def test_training_with_candidates(variant: str, mechanism: str) -> None:
    """Steps run and change the model; what sparse mechanisms do to a table follows the rows that units look up."""
    rows = 5001
    model = build(variant, items=rows - 1, length=5, dropout=0.2)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    sample = CandidateSampler(rows, 3)
    engine, model, optimizer, loader = make_private(
        model, loader_of(*sequences(48, rows - 1, 5), batch_size=16), mechanism=MECHANISMS[mechanism]()
    )
    for history, target in loader:
        optimizer.zero_grad()
        candidate_loss(model(history, sample(target)), target != 0).backward()
        optimizer.step()
        for name, table in optimizer.last_step.tables.items():
            assert table.rows == rows and "table" in name
            assert table.rows_touched <= optimizer.last_step.units * 5 * 5 < rows / 5
            assert mechanism != "adafest" or table.rows_selected < rows / 50
    after = dict(model.state_dict())
    assert all(torch.isfinite(value).all() for value in after.values())
    for name, value in before.items():
        changed = (after[name] != value).any(-1).float().mean().item()
        assert changed > 0
        if "table" in name:
            assert changed < 0.05 if mechanism == "adafest" else changed == 1.0
    assert engine.get_epsilon(delta=1e-5) > 0


def test_adafest_selects_popular_items_of_the_tied_table() -> None:
    rows = 20_001
    model = build("reattention", items=rows - 1, length=5)
    sample = CandidateSampler(rows, 3, shared=True)
    engine, model, optimizer, loader = make_private(
        model, loader_of(*sequences(600, rows - 1, 5), batch_size=300), mechanism=AdaFEST(threshold=10.0, noise_ratio=2.0),
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1),
    )  # fmt: skip
    inner, selected = optimizer.inner.step, []

    def watched() -> None:
        grad = model.item_table.weight.grad
        assert grad.is_sparse
        selected.append(grad.coalesce().indices()[0].tolist())
        inner()

    optimizer.inner.step = watched
    for history, target in loader:
        optimizer.zero_grad()
        candidate_loss(model(history, sample(target)), target != 0).backward()
        optimizer.step()
    assert len(selected) == 2 and all({1, 2} <= set(found) and len(found) < rows / 100 for found in selected)
    assert set(optimizer.last_step.tables) == {"item_table.weight"}  # positions are no table


@pytest.mark.parametrize("variant", ["tied", "reattention", "lstm"])
@pytest.mark.parametrize("mechanism", ["dpsgd", "lazydp"])
def test_training_with_the_full_softmax(variant: str, mechanism: str) -> None:
    """Noise off: the loss falls, so gradients point the right way. `score_next` reads what was trained."""
    model = build(variant)
    engine, model, optimizer, loader = make_private(
        model, loader_of(*sequences(60), batch_size=30), mechanism=MECHANISMS[mechanism](), noise_multiplier=0.0,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
    )  # fmt: skip
    lazy = pytest.warns(sparsedp.SparseDPWarning, match="used whole")
    losses = []
    with lazy if mechanism == "lazydp" else nullcontext():
        for _ in range(6):
            for history, target in loader:
                optimizer.zero_grad()
                loss = model(history, target=target).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    model.eval()
    history, _ = sequences(4, seed=1)
    torch.testing.assert_close(model.score_next(history)[:, 1:], model_scores(model, history))


def model_scores(model: nn.Module, history: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(history)
    last = (history != 0).sum(1) - 1
    return logits[torch.arange(len(history)), last, 1:]


def test_errors_can_be_set_once_the_noise_is_known() -> None:
    """make_private_with_epsilon decides the noise; track_errors comes after it."""
    model = DPFormer(ITEMS, LENGTH, DIM, reattention=True)
    engine = sparsedp.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader_of(*sequences(60), batch_size=20), target_epsilon=8.0, target_delta=1e-5, epochs=1,
        max_grad_norm=1.0,
    )  # fmt: skip
    with pytest.raises(sparsedp.SparseDPError, match="track_errors"):
        model(sequences(2)[0])
    model.track_errors(
        noise_multiplier=engine.plan.noise_multiplier, batch_size=20, frequencies=torch.full((ITEMS + 1,), 0.1)
    )
    for history, target in loader:
        optimizer.zero_grad()
        unit_losses(model(history), target).mean().backward()
        optimizer.step()
    assert engine.get_epsilon(delta=1e-5) <= 8.0


def test_a_checkpoint_knows_the_errors(tmp_path: Any) -> None:
    def run(model: nn.Module) -> Any:
        return make_private(model, loader_of(*sequences(40), batch_size=20))

    engine, model, optimizer, loader = run(build("reattention"))
    for history, target in loader:
        optimizer.zero_grad()
        model(history, target=target).mean().backward()
        optimizer.step()
    engine.save_checkpoint(tmp_path / "checkpoint")
    other, fresh, *_ = run(DPFormer(ITEMS, LENGTH, DIM, dropout=0.0, reattention=True))
    other.load_checkpoint(tmp_path / "checkpoint")
    history, _ = sequences(3)
    assert torch.equal(fresh.score_next(history), model.score_next(history))
