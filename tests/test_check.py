"""sparsedp.check finds what breaks the guarantee and names it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import SparseDPError, UnitsMixedError
from support import Apply, Clicks, clicks, loader_of, make_private


def bce(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(out, y)


def test_accepts_a_sound_model_and_leaves_it_alone() -> None:
    module = Clicks()
    before = copy.deepcopy(module.state_dict())
    report = sparsedp.check(module, bce, clicks(8))
    assert report.units == 4 and report.parameters == 5 and report.largest_difference < 1e-9
    assert "exact" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())


def test_works_after_make_private() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    sparsedp.check(module, bce, clicks(8))
    assert engine.ledger.steps == 0


def lm(length: int = 5) -> nn.Module:
    model = Apply(lambda m, i: m.drop(m.e(i)) @ m.e.weight.T, e=nn.Embedding(10, 4), drop=nn.Dropout(0.5))
    return model.train()


def test_token_mean_with_ignore_index() -> None:
    """Trap 18: the divisor counts everybody's valid tokens."""
    ids = torch.randint(10, (6, 5))
    target = ids.clone()
    for unit in range(6):
        target[unit, : unit % 4] = -100
    with pytest.raises(UnitsMixedError, match="valid tokens"):
        sparsedp.check(lm(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), (ids, target))

    def per_unit(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(out.mT, y, reduction="none")
        return (losses.sum(1) / (y >= 0).sum(1)).mean()

    sparsedp.check(lm(), per_unit, (ids, target))


def test_in_batch_negatives_in_the_loss() -> None:
    module = nn.Linear(4, 3)
    loss = lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out)))  # noqa: E731
    with pytest.raises(UnitsMixedError, match=r"'weight'.*in-batch negatives"):
        sparsedp.check(module, loss, (torch.randn(6, 4), torch.zeros(6)))


def test_batch_statistics_in_the_loss() -> None:
    module = nn.Linear(4, 3)
    loss = lambda out, y: ((out - out.mean(0)) ** 2).mean()  # noqa: E731
    with pytest.raises(UnitsMixedError, match="batch statistics"):
        sparsedp.check(module, loss, (torch.randn(6, 4), torch.zeros(6)))


def test_what_a_loop_mixes_before_it_calls_the_model_is_found_in_a_module_that_does_the_same() -> None:
    batch = (torch.randn(6, 4), torch.zeros(6, 3))
    for mix in (lambda x: x - x.mean(0), lambda x: x.roll(1, 0)):
        loop = Apply(lambda m, x, mix=mix: m.model(mix(x)), model=nn.Linear(4, 3))
        with pytest.raises((UnitsMixedError, sparsedp.UnsupportedError), match=r"over the whole batch|by 'roll'"):
            sparsedp.check(loop, F.mse_loss, batch)


def test_a_forward_pass_that_depends_on_the_number_of_units() -> None:
    batch = (torch.randn(6, 4), torch.ones(6, 3))
    for factor in (lambda n: 1 / n, lambda n: -1.0 if n > 5 else 1.0):
        module = Apply(lambda m, x, factor=factor: m.a(x) * factor(len(x)), a=nn.Linear(4, 3))
        with pytest.raises(UnitsMixedError, match="Units mix"):
            sparsedp.check(module, F.mse_loss, batch)


def test_batch_norm_module() -> None:
    with pytest.raises(sparsedp.UnsupportedError, match="BatchNorm1d"):
        sparsedp.check(
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
            lambda o, y: o.mean(),
            (torch.randn(6, 4), torch.zeros(6)),
        )


def test_wrong_reduction() -> None:
    with pytest.raises(UnitsMixedError, match="loss_reduction='sum'"):
        sparsedp.check(Clicks(), lambda o, y: F.binary_cross_entropy_with_logits(o, y, reduction="sum"), clicks(8))
    sparsedp.check(
        Clicks(),
        lambda o, y: F.binary_cross_entropy_with_logits(o, y, reduction="sum"),
        clicks(8),
        loss_reduction="sum",
    )
    with pytest.raises(UnitsMixedError, match="loss_reduction='mean'"):
        sparsedp.check(Clicks(), bce, clicks(8), loss_reduction="sum")


def test_loss_that_is_no_number() -> None:
    with pytest.raises(SparseDPError, match="one number"):
        sparsedp.check(Clicks(), lambda o, y: F.binary_cross_entropy_with_logits(o, y, reduction="none"), clicks(8))


def test_weights_in_the_loss() -> None:
    """A penalty on the weights of the module that the loss refers to, not of the copy that is checked."""
    module = Clicks()
    with pytest.raises(SparseDPError, match=r"hidden\.weight.*weight_decay"):
        sparsedp.check(module, lambda o, y: bce(o, y) + module.hidden.weight.square().sum(), clicks(8))


def test_dict_batches() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l = nn.Embedding(10, 4), nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return self.l(self.e(ids)).squeeze(-1)

    batch = {"ids": torch.randint(10, (6,)), "label": torch.ones(6)}
    sparsedp.check(Takes(), lambda out, batch: bce(out, batch["label"]), batch)


def test_ragged_batches_need_take() -> None:
    bag = nn.EmbeddingBag(10, 4)
    lengths = [2, 3, 1, 4]
    values, offsets = torch.randint(10, (10,)), torch.tensor([0, 2, 5, 6])
    batch = (values, offsets, torch.ones(4))

    def take(batch: tuple, indices: list[int]) -> tuple:
        values, offsets, y = batch
        parts = [values[offsets[i] : offsets[i] + lengths[i]] for i in indices]
        starts = torch.tensor([0, *[len(p) for p in parts[:-1]]]).cumsum(0)
        return torch.cat(parts), starts, y[indices]

    loss = lambda out, y: (out.sum(1) * y).mean()  # noqa: E731
    with pytest.raises(SparseDPError, match="take="):
        sparsedp.check(bag, loss, batch)
    assert sparsedp.check(bag, loss, batch, take=take).units == 4


def test_needs_two_units() -> None:
    with pytest.raises(SparseDPError, match="at least 2"):
        sparsedp.check(Clicks(), bce, clicks(1))


# ------------------------------------------------------------------ what is not a number


def _masked_mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """0 / 0 for a unit without a valid position."""
    valid = (y > 0).double()
    return ((out * valid).sum(1) / valid.sum(1)).mean()


NOT_FINITE = {  # loss(out, y), the unit at fault is the one whose y is 0
    "loss is NaN": lambda out, y: (out.mean(1) * (y[:, 0] / y[:, 0])).mean(),
    "loss is infinite": lambda out, y: (out.mean(1).square() - y[:, 0].log()).mean(),
    "mean over nothing": _masked_mean,
    "gradient is NaN": lambda out, y: (out * y).square().sum(1).sqrt().mean(),
    "gradient is infinite": lambda out, y: (out.mean(1) * y[:, 0]).abs().sqrt().mean(),
    "gradient of what was left out": lambda out, y: torch.where(y > 0, out / y, out).mean(),
}


@pytest.mark.parametrize("case", NOT_FINITE)
@pytest.mark.parametrize("unit", [0, 3, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_not_finite_fails(case: str, unit: int, reduction: str) -> None:
    """Every comparison with NaN is false, and must not read as "no difference". Unit 7 is not one of those looked at alone."""
    y = torch.ones(8, 3)
    y[unit] = 0
    scale = 8 if reduction == "sum" else 1
    with pytest.raises(sparsedp.NonFiniteGradientError, match=r"NaN|nan|inf"):
        sparsedp.check(
            nn.Linear(4, 3),
            lambda out, y: scale * NOT_FINITE[case](out, y),
            (torch.randn(8, 4), y),
            loss_reduction=reduction,
        )


def test_nan_is_named_with_its_parameter_and_module() -> None:
    class Roots(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * (x > 0)).sqrt()  # infinite slope at 0, times 0

    model = nn.Sequential(nn.Linear(4, 3), Roots())
    with pytest.raises(sparsedp.NonFiniteGradientError, match=r"parameter '0\.weight' is NaN or infinite"):
        sparsedp.check(model, lambda out, y: out.mean(), (torch.randn(8, 4), torch.zeros(8)))

    class Logs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(-x.square())

    model = nn.Sequential(nn.Linear(4, 3), Logs())
    with pytest.raises(sparsedp.NonFiniteGradientError, match="loss of 8 units together is nan"):
        sparsedp.check(model, lambda out, y: out.mean(), (torch.randn(8, 4), torch.zeros(8)))
    # NaN that is left out of the loss, and of all gradients, is named by the module that makes it.
    kept = Apply(lambda m, x: (m.logs(x.detach()), m.layer(x))[1], logs=Logs(), layer=nn.Linear(4, 3))
    with pytest.raises(sparsedp.NonFiniteGradientError, match="unit 0 alone: The output of module 'logs' has NaN"):
        sparsedp.check(kept, lambda out, y: out.mean(), (torch.randn(8, 4), torch.zeros(8)))


def test_infinite_masks_pass() -> None:
    """-inf before a softmax is how positions are left out."""
    model = Apply(
        lambda m, x: m.l(x).masked_fill(torch.tensor([False, True, False]), -math.inf).softmax(-1), l=nn.Linear(4, 3)
    )
    sparsedp.check(model, lambda out, y: out[:, 0].mean(), (torch.randn(8, 4), torch.zeros(8)))


class WritesFloat(nn.Module):
    """Goes through float32 by itself, so that it does not run in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids).float()
        return self.out(hidden)[:, 0]


@pytest.mark.parametrize("mixed", [0.1, 0.005])
def test_a_model_that_does_not_run_in_float64_is_checked_in_float32(mixed: float) -> None:
    batch = (torch.arange(6), torch.randn(6))
    report = sparsedp.check(WritesFloat(), nn.functional.mse_loss, batch)
    assert report.dtype == torch.float32 and "in float32" in str(report)
    assert 0 < report.largest_difference < 1e-5

    def mixing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - mixed * output.mean()) - target).square().mean()

    with pytest.raises(UnitsMixedError):
        sparsedp.check(WritesFloat(), mixing, batch)
    with pytest.raises(UnitsMixedError, match="loss_reduction='sum'"):
        sparsedp.check(WritesFloat(), lambda output, target: (output - target).square().sum(), batch)


def test_numbers_that_forward_makes_are_float64_as_well() -> None:
    class MakesZeros(WritesFloat):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = torch.cat([self.table(ids)[:, :2], torch.zeros(len(ids), 2)], 1)
            return self.out(hidden)[:, 0] + torch.zeros(len(ids), 4) @ torch.ones(4)

    before = torch.get_default_dtype()
    report = sparsedp.check(MakesZeros(), nn.functional.mse_loss, (torch.arange(6), torch.randn(6)))
    assert report.dtype == torch.float64 and "float32" not in str(report)
    assert torch.get_default_dtype() == before


def test_other_errors_are_the_models_own() -> None:
    class Fails(WritesFloat):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).view(7, -1)[:, 0]

    with pytest.raises(RuntimeError, match="shape"):
        sparsedp.check(Fails(), nn.functional.mse_loss, (torch.arange(6), torch.randn(6)))


def test_functions_in_a_module_refer_to_the_copy() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.to_logits = lambda hidden, *, scale=0.5: scale * hidden @ self.table.weight.T

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.to_logits(self.table(ids).tanh())

    module = Tied()
    report = sparsedp.check(module, F.cross_entropy, (torch.arange(6), torch.arange(6)))
    assert report.parameters == 1 and module.table.weight.grad is None


# ------------------------------------------------------------------ models that do not run on a batch of one


class Squeezed(nn.Module):
    """Logits of several classes, from which squeeze() takes the batch, too, if that is one."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.table, self.out, self.mixes = nn.Embedding(9, 4), nn.Linear(4, 3), mixes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)[:, None, :].squeeze()
        out = torch.einsum("bd,cd->bc", h, self.out.weight) + self.out.bias
        return out * ids.float().mean().item() if self.mixes else out


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([1, 5, 5, 7, 2]), torch.tensor([0, 2, 1, 1, 0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_models_that_do_not_run_on_one_unit_are_checked_on_two_copies(reduction: str) -> None:
    loss = nn.CrossEntropyLoss(reduction=reduction)
    with pytest.warns(sparsedp.SparseDPWarning, match="does not run on a batch of one unit"):
        report = sparsedp.check(Squeezed(), loss, _batch(), loss_reduction=reduction)
    assert report.largest_difference < 1e-9
    loader = DataLoader(TensorDataset(*_batch()), batch_size=3)
    with pytest.warns(sparsedp.SparseDPWarning, match="does not run on a batch of one unit"):
        sparsedp.check(Squeezed(), loss, data_loader=loader, loss_reduction=reduction)


@pytest.mark.filterwarnings("ignore")
def test_two_copies_show_units_that_mix() -> None:
    with pytest.raises(UnitsMixedError):
        sparsedp.check(Squeezed(mixes=True), nn.CrossEntropyLoss(), _batch())


def test_the_error_of_a_model_that_does_not_run_at_all_is_its_own() -> None:
    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(target) < 3:
            raise KeyError("too few")
        return nn.functional.cross_entropy(out, target)

    with pytest.raises(RuntimeError, match="einsum"):  # that of one unit, not that of two
        sparsedp.check(Squeezed(), loss, _batch())


def test_a_model_that_is_finite_in_float32_alone() -> None:
    """What a step, which runs in float32, would do is what counts."""

    def forward(m, x):  # type: ignore[no-untyped-def]
        broken = math.nan if x.dtype == torch.float64 else 0.0
        return m.l(x) * (1 + broken)

    batch = (torch.randn(4, 3), torch.randn(4))
    module = Apply(forward, l=nn.Linear(3, 1))
    report = sparsedp.check(module, lambda out, y: (out[:, 0] - y).square().mean(), batch)
    assert report.dtype == torch.float32 and report.units == 4
