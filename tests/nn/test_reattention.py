"""Re-attention: every rule of error propagation against sampling, the correction, its bounds, and the model's use of it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from sparsedp.errors import SparseDPError
from sparsedp.models import DPFormer
from sparsedp.models.dpformer import _Noise
from sparsedp.nn.reattention import (
    Moments,
    attend,
    correction,
    effective_error,
    gelu_moments,
    layer_norm,
    linear,
    logit_variance,
    projected_logit_variance,
    relu_moments,
)
from support import Apply

ACTIVATIONS = {"relu": (relu_moments, nn.functional.relu), "gelu": (gelu_moments, nn.functional.gelu)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------- effective errors


def test_effective_errors_are_those_of_the_paper() -> None:
    assert effective_error(2.0, 500).item() == pytest.approx(2 / 500)  # claim 5.3
    found = effective_error(2.0, 500, torch.tensor([1.0, 0.5, 0.01]))  # claim 5.4
    torch.testing.assert_close(found, torch.tensor([2 / 500, 2 / 250, 2 / 5]))
    assert effective_error(0.0, 500, torch.zeros(2)).tolist() == [0, 0]


def test_effective_errors_of_tail_items_are_bounded() -> None:
    """Noisy estimates of frequencies may be zero, negative or above 1."""
    found = effective_error(2.0, 500, torch.tensor([1e-9, 0.0, -0.3, 7.0]))
    torch.testing.assert_close(found, torch.tensor([2.0, 2.0, 2.0, 2 / 500]))
    assert effective_error(2.0, 500, torch.zeros(1), floor=4.0).item() == pytest.approx(0.5)
    for noise, batch, frequency, floor in (
        (-1.0, 10, 0.1, 1.0), (math.inf, 10, 0.1, 1.0), (1.0, 0, 0.1, 1.0), (1.0, 10, math.nan, 1.0), (1.0, 10, 0.1, 0.0),
        (1.0, 10, 0.1, 11.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            effective_error(noise, batch, torch.tensor([frequency]), floor)


# ---------------------------------------------------------------------- activations


@pytest.mark.parametrize(
    "deviation, of_relu, of_gelu", [(0.01, 3.40e-5, 2.49e-5), (0.1, 0.0034, 0.0025), (1.0, 0.3408, 0.3467)]
)
def test_the_papers_table_3(deviation: float, of_relu: float, of_gelu: float) -> None:
    """Its N(0, s) has s for a standard deviation: 3.40e-5 is 0.3408 * 0.01^2. Its last GELU column is a sample's."""
    zero, variance = torch.zeros(1), torch.tensor([deviation**2])
    assert relu_moments(zero, variance)[1].item() == pytest.approx(of_relu, rel=0.003)
    assert gelu_moments(zero, variance)[1].item() == pytest.approx(of_gelu, rel=0.02)
    drawn = deviation * normal(1_000_000)
    for moments, function in ACTIVATIONS.values():
        assert moments(zero, variance)[1].item() == pytest.approx(function(drawn).var().item(), rel=0.01)


def test_equation_5_6_as_printed_is_wrong() -> None:
    """It subtracts c^2, not the square of E[Z]: half of the variance at c = 0, and less than nothing below."""

    def printed(c: float, d: float) -> float:
        g = c / math.sqrt(d)
        return stats.norm.cdf(g) * (c * c + d) + c * math.sqrt(d) * stats.norm.pdf(g) - c * c

    assert printed(0.0, 1.0) == pytest.approx(0.5)
    assert printed(-1.0, 1.0) < 0
    right = relu_moments(torch.zeros(1), torch.ones(1))[1].item()
    assert right == pytest.approx(0.5 - 1 / (2 * math.pi), rel=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_moments_by_numerical_integration(name: str) -> None:
    moments, function = ACTIVATIONS[name]
    mean = torch.tensor([-20.0, -3.0, -0.7, 0.0, 0.4, 2.5, 20.0], dtype=torch.float64)[:, None]
    deviation = torch.tensor([1e-3, 0.05, 0.5, 1.0, 3.0, 30.0], dtype=torch.float64)[None]
    grid = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    weights = torch.exp(-grid.square() / 2)
    weights /= weights.sum()
    values = function(mean[..., None] + deviation[..., None] * grid)
    wanted = (values * weights).sum(-1)
    spread = ((values - wanted[..., None]).square() * weights).sum(-1)
    found = moments(mean, deviation.square())
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[1], spread, rtol=1e-4, atol=1e-7)
    single = moments(mean.float(), deviation.square().float())
    torch.testing.assert_close(single[1].double(), spread, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_variance_in_none_out(name: str) -> None:
    moments, function = ACTIVATIONS[name]
    mean = torch.tensor([-4.0, -0.1, 0.0, 0.3, 50.0])
    found = moments(mean, torch.zeros(5))
    torch.testing.assert_close(found[0], function(mean), rtol=0, atol=1e-6)
    assert found[1].abs().max() < 1e-9


def test_relus_variance_for_gelu_is_too_large_for_narrow_gaussians() -> None:
    """Remark D.3's approximation: 36 % off around 0, good for wide ones."""
    narrow, wide = torch.tensor([1e-4]), torch.tensor([100.0])
    zero = torch.zeros(1)
    assert (relu_moments(zero, narrow)[1] / gelu_moments(zero, narrow)[1]).item() == pytest.approx(1.363, rel=0.01)
    assert (relu_moments(zero, wide)[1] / gelu_moments(zero, wide)[1]).item() == pytest.approx(1, rel=0.02)


# ---------------------------------------------------------------------- layers


def sampled(function: nn.Module, x: Moments, error: float, draws: int = 3000) -> tuple[Tensor, Tensor]:
    """Mean, and variance per dimension, of a module's output over errors in its input and in all of its parameters."""
    torch.manual_seed(1)
    parameters = dict(function.named_parameters())
    outputs = []
    for _ in range(draws // 100):
        drawn = {n: p.detach() + error * torch.randn(100, *p.shape, dtype=p.dtype) for n, p in parameters.items()}
        inputs = x.mean + x.variance.sqrt() * torch.randn(100, *x.mean.shape, dtype=torch.float64)
        with torch.no_grad():
            outputs.append(torch.func.vmap(lambda p, i: torch.func.functional_call(function, p, (i,)))(drawn, inputs))
    found = torch.cat(outputs)
    return found.mean(0), found.var(0)


@pytest.mark.parametrize("error", [0.0, 0.05, 0.5])
def test_linear_by_sampling(error: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 30).double()
    x = Moments(normal(4, 12), torch.tensor([0.0, 0.01, 0.5, 4.0], dtype=torch.float64)[:, None])
    found = linear(x, layer, torch.tensor(error, dtype=torch.float64))
    mean, variance = sampled(layer, x, error)
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=0.3)
    torch.testing.assert_close(found.variance, variance.mean(-1, keepdim=True), rtol=0.05, atol=1e-12)
    blocks = linear(x, layer, torch.tensor(error, dtype=torch.float64), groups=3).variance
    torch.testing.assert_close(blocks, variance.unflatten(-1, (3, 10)).mean(-1), rtol=0.05, atol=1e-12)


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_layer_norm_by_sampling(error: float) -> None:
    """From errors far below the signal to errors that drown it."""
    layer = nn.LayerNorm(64).double()
    with torch.no_grad():
        layer.weight += 0.3 * normal(64, seed=5)
        layer.bias += 0.3 * normal(64, seed=6)
    x = Moments(2 + 0.7 * normal(6, 64), 10.0 ** torch.arange(-4, 2, dtype=torch.float64)[:, None])
    found = layer_norm(x, layer, torch.tensor(error, dtype=torch.float64))
    mean, variance = sampled(layer, x, error, 2000)
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=0.15)
    torch.testing.assert_close(found.variance, variance.mean(-1, keepdim=True), rtol=0.06, atol=1e-12)
    huge = layer_norm(Moments(x.mean, torch.full_like(x.variance, 1e30)), nn.LayerNorm(64).double(), torch.zeros(()))
    assert huge.variance.min() > 0.9 and huge.variance.max() <= 1


@pytest.mark.parametrize("vary", [0.0, 0.3])
def test_weighted_averages_by_sampling(vary: float) -> None:
    logits, spread = normal(5, 7), vary * normal(5, 7, seed=4).square()
    values = Moments(normal(7, 20, seed=1), 0.2 * normal(7, 1, seed=2).square())
    found = attend(logits.softmax(-1), values, spread)
    weights = (logits + spread.sqrt() * normal(4000, 5, 7, seed=5)).softmax(-1)
    drawn = weights @ (values.mean + values.variance.sqrt() * normal(4000, 7, 20, seed=3))
    torch.testing.assert_close(found.mean, drawn.mean(0), rtol=0, atol=0.15)
    torch.testing.assert_close(found.variance, drawn.var(0).mean(-1, keepdim=True), rtol=0.25 if vary else 0.03, atol=0)
    if vary:  # without the weights' part it would be far off
        fixed = attend(logits.softmax(-1), values, torch.zeros_like(spread)).variance
        assert (fixed / drawn.var(0).mean(-1, keepdim=True)).min() < 0.6


# ---------------------------------------------------------------------- the correction


@pytest.mark.parametrize("deviation", [0.3, 0.6, 1.0])
def test_expected_attention_is_what_it_would_be_without_noise(deviation: float) -> None:
    """Equation 5.2 over Gaussian keys of one item that deserves little attention, among two hundred."""
    d, keys, draws = 16, 200, 20_000
    query, key = normal(1, d, seed=1), 0.3 * normal(keys, d, seed=2)
    query *= 1.2 * math.sqrt(d) / query.norm()
    variance = torch.zeros(keys, 1, dtype=torch.float64)
    variance[7] = deviation**2
    logits = (query @ key.mT / math.sqrt(d)).repeat(draws, 1)
    without = logits.softmax(-1)[0, 7].item()
    logits[:, 7:8] += deviation * normal(draws, d, seed=3) @ query.mT / math.sqrt(d)
    distracted = logits.softmax(-1)[:, 7].mean().item()
    inflation = math.exp(1.44 * deviation**2 / 2)  # C sigma^2 / 2 with C = |q|^2 / d = 1.44
    assert distracted == pytest.approx(inflation * without, rel=0.07)
    corrected = (logits - correction(logit_variance(query, variance), 10.0)).softmax(-1)
    assert corrected[:, 7].mean().item() == pytest.approx(without, rel=0.05)
    torch.testing.assert_close(corrected.sum(-1), torch.ones(draws, dtype=torch.float64))


@pytest.mark.parametrize("trained", [False, True])
def test_the_variance_of_a_logit_needs_how_a_keys_dimensions_vary_together(trained: bool) -> None:
    """A variance per dimension of the key is no better than one for all; |W^T q|^2 is exact."""
    d, draws = 24, 20_000
    query = normal(9, d, seed=1)
    weight = normal(d, d, seed=2) / math.sqrt(d)
    if trained:  # queries and keys agree on a few directions
        weight += 1.5 * query.mT @ normal(9, d, seed=3) / d
    inputs, own = normal(6, 1, seed=4).square(), 0.02 * normal(6, 1, seed=5).square()
    keys = (inputs.sqrt() * normal(draws, 6, d, seed=6)) @ weight.mT + own.sqrt() * normal(draws, 6, d, seed=7)
    wanted = (query @ keys.mT / math.sqrt(d)).var(0)

    def distance(found: Tensor) -> float:
        return ((found - wanted).abs().mean() / wanted.mean()).item()

    one_for_all = distance(logit_variance(query, keys.var(0).mean(-1, keepdim=True)))
    per_dimension = distance(query.square() @ keys.var(0).mT / d)
    assert per_dimension == pytest.approx(one_for_all, rel=0.2)
    assert one_for_all > 0.4 if trained else one_for_all < 0.3
    assert distance(projected_logit_variance(query, weight, inputs, own)) < 0.03


def test_the_correction_is_capped() -> None:
    variance = torch.tensor([0.0, 1.0, 5.0, math.inf])
    assert correction(variance, 2.0).tolist() == [0, 0.5, 2, 2]


# ---------------------------------------------------------------------- the model


LENGTH, ITEMS = 8, 40


def model(**options: object) -> DPFormer:
    torch.manual_seed(0)
    return DPFormer(ITEMS, LENGTH, dim=16, dropout=0.0, **options).double()  # type: ignore[arg-type]


def frequencies() -> Tensor:
    """Zipf: from one in two units down to one in eighty."""
    return torch.cat([torch.zeros(1), 0.5 / torch.arange(1, ITEMS + 1)])


def history(units: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(1, ITEMS + 1, (units, LENGTH), generator=torch.Generator().manual_seed(seed))


VARIANTS = [{}, {"heads": 4}, {"activation": "gelu"}, {"projected": True, "heads": 2}]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_without_errors_the_model_is_that_without_reattention(options: dict) -> None:
    plain = model(**{key: value for key, value in options.items() if key != "projected"})
    other = model(reattention=True, **options)
    other.load_state_dict(plain.state_dict(), strict=False)
    other.track_errors(noise_multiplier=0.0, batch_size=100, frequencies=frequencies())
    torch.testing.assert_close(other(history()), plain(history()), rtol=1e-12, atol=1e-12)
    other.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies())
    assert (other(history()) - plain(history())).abs().max() > 1e-3
    other.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies(), scale=0.0)
    torch.testing.assert_close(other(history()), plain(history()), rtol=1e-12, atol=1e-12)


def attention(found: DPFormer, ids: Tensor | None = None) -> Tensor:
    """The first block's attention."""
    ids = history() if ids is None else ids
    embedded = (found.embed(ids) + found.positions).detach()
    block, noise = found.blocks[0], found._noise(ids, embedded, found.future)[0]
    query, key = (block._split(layer(block.norm1(embedded))) for layer in (block.query, block.key))
    return block._weights(query, key, found.future, noise).detach()


@pytest.mark.parametrize("projected", [False, True])
def test_tail_items_get_less_attention(projected: bool) -> None:
    found = model(reattention=True, projected=projected)
    ids = torch.tensor([[1, 2, 1, ITEMS, 2, 1, 2, 1]])
    found.track_errors(noise_multiplier=0.0, batch_size=100, frequencies=frequencies())
    before = attention(found, ids)[0, 0, -1]
    found.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies())
    after = attention(found, ids)[0, 0, -1]
    assert after[3] < 0.9 * before[3] and after[0] > before[0]
    assert after.sum() == pytest.approx(1)


@pytest.mark.parametrize("options", [{}, {"heads": 4, "activation": "gelu"}, {"projected": True}], ids=str)
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05])
def test_a_block_by_sampling(options: dict, noise: float) -> None:
    """Means and variances of a whole block over errors of items and of all its parameters.

    That the parts of a residual sum are independent, and that queries have no errors, is an approximation: so is the test.
    The inputs have variance 1.
    """
    found = model(reattention=True, **options)
    with torch.no_grad():
        found.item_table.weight *= found.dim**0.5
    found.track_errors(noise_multiplier=noise, batch_size=10, frequencies=frequencies(), floor=0.1)
    ids, block, error = history(6), found.blocks[0], found.weight_error
    x = Moments(found.embed(ids).detach(), 16 * found.item_error[ids].square()[..., None])
    known = _Noise(layer_norm(x, block.norm1, error), error, found.cap)
    guess = block.propagate(x, known, found.future)
    whole = Apply(lambda m, drawn: m.block(drawn, found.future, known), block=block)
    mean, variance = sampled(whole, x, error.item(), 500)
    wanted = variance.mean(-1, keepdim=True)
    ratio = guess.variance / wanted
    assert 0.8 < ratio.median() < 1.25 and ratio.quantile(0.1) > 0.6 and ratio.min() > 0.45 and ratio.max() < 1.7
    assert np.corrcoef(guess.variance.log().flatten(), wanted.log().flatten())[0, 1] > 0.97
    assert (guess.mean - mean).square().mean() < 0.1 * mean.var()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_outputs_stay_finite_for_items_that_nobody_has(options: dict) -> None:
    found = model(reattention=True, **options).float()
    unseen = torch.zeros(ITEMS + 1)
    unseen[3:6] = torch.tensor([-0.2, 1e-30, 3.0])
    for noise, scale in ((1.0, 1.0), (1e3, 1e3)):
        found.track_errors(noise_multiplier=noise, batch_size=100, frequencies=unseen, scale=scale)
        assert torch.isfinite(found.item_error).all()
        logits = found(history())
        assert torch.isfinite(logits).all()
        logits.logsumexp(-1).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in found.parameters() if p.grad is not None)


def test_the_cap_bounds_what_a_row_of_keys_can_lose() -> None:
    """Whatever the errors, a score changes by at most the factor exp(cap), so no row of keys vanishes."""
    torch.manual_seed(0)
    logits, cap = 3 * torch.randn(20, 8, 8), math.log(8)
    variance = 10.0 ** torch.randint(-3, 30, (20, 8, 8))
    variance[0] = math.inf  # all keys of a row
    before = logits.softmax(-1)
    after = (logits - correction(variance, cap)).softmax(-1)
    torch.testing.assert_close(after.sum(-1), torch.ones(20, 8))
    assert (after >= before / 8 * (1 - 1e-5)).all() and (after <= before * 8 * (1 + 1e-5)).all()
    torch.testing.assert_close(after[0], before[0])
    found = model(reattention=True)
    with torch.no_grad():
        found.blocks[0].query.weight *= 4

    def ratios(seen: Tensor, cap: float) -> Tensor:
        found.track_errors(noise_multiplier=0.0, batch_size=100, frequencies=seen)
        without = attention(found)
        found.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=seen, cap=cap)
        return (attention(found) / without).nan_to_num(1.0)  # 0 / 0 for what lies ahead

    capped, free = ratios(frequencies(), 0.5), ratios(frequencies(), 100.0)
    assert capped.min() >= math.exp(-0.5) * (1 - 1e-6) and capped.max() <= math.exp(0.5) * (1 + 1e-6)
    assert free.min() < 0.9 * capped.min()
    # Where all keys are at the cap, it cancels.
    with torch.no_grad():
        found.blocks[0].query.weight *= 100
    unseen = ratios(torch.zeros(ITEMS + 1), 0.5)
    torch.testing.assert_close(unseen, torch.ones_like(unseen))


def test_gradients_do_not_flow_through_the_correction() -> None:
    found = model(reattention=True)
    found.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies())
    block = found.blocks[0]
    query = normal(5, 1, LENGTH, 16).requires_grad_()
    noise = found._noise(history(), found.embed(history()), found.future)[0]
    variance = block._logit_variance(query, noise)
    assert variance.min() > 0 and not variance.requires_grad


def test_training_before_errors_are_known_is_refused() -> None:
    found = model(reattention=True)
    with pytest.raises(SparseDPError, match=r"track_errors\(noise_multiplier"):
        found(history())
    with pytest.raises(ValueError, match="reattention=True"):
        model().track_errors(noise_multiplier=1.0, batch_size=10, frequencies=frequencies())
    with pytest.raises(ValueError, match="reattention=True"):
        model(projected=True)
    for wrong in (
        {"frequencies": torch.zeros(ITEMS)}, {"position_frequencies": torch.zeros(3)}, {"scale": -1.0}, {"cap": math.inf},
        {"noise_multiplier": math.nan}, {"batch_size": 0}, {"floor": 0.0},
    ):  # fmt: skip
        given = {"noise_multiplier": 1.0, "batch_size": 10, "frequencies": frequencies(), **wrong}
        with pytest.raises(ValueError, match="must"):
            found.track_errors(**given)  # type: ignore[arg-type]
    with pytest.raises(SparseDPError):  # a refused call leaves it as it was
        found(history())


def test_state_dict_round_trip() -> None:
    found, other = model(reattention=True), model(reattention=True)
    with pytest.raises(SparseDPError):
        other.load_state_dict(found.state_dict())
        other(history())
    found.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies(), cap=1.5,
                       position_frequencies=torch.linspace(1, 0, LENGTH))  # fmt: skip
    before = {name: value.clone() for name, value in found.state_dict().items()}
    wanted = found(history())
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())
    other.load_state_dict(found.state_dict())
    assert torch.equal(other(history()), wanted)
    assert torch.equal(copy.deepcopy(found)(history()), wanted)
    assert not {name for name, _ in found.named_parameters()} & {"item_error", "position_error", "weight_error", "cap"}


def test_rare_positions_have_larger_errors() -> None:
    found = model(reattention=True)
    found.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies())
    assert torch.equal(found.position_error, found.weight_error.expand(LENGTH))
    found.track_errors(
        noise_multiplier=1.0,
        batch_size=100,
        frequencies=frequencies(),
        position_frequencies=torch.linspace(1, 0, LENGTH),
    )
    assert found.position_error[0] == pytest.approx(0.01) and found.position_error[-1] == 1.0


def test_an_items_variance_counts_dim_times() -> None:
    """sqrt(dim) item + position: the item's variance counts dim times."""
    found = model(reattention=True)
    found.track_errors(noise_multiplier=1.0, batch_size=100, frequencies=frequencies())
    ids = history()
    noise = found._noise(ids, found.embed(ids).detach(), found.future)[0]
    x = Moments(found.embed(ids), (16 * found.item_error[ids].square() + 0.01**2)[..., None])
    wanted = layer_norm(x, found.blocks[0].norm1, torch.tensor(0.01, dtype=torch.float64))
    torch.testing.assert_close(noise.inputs.variance, wanted.variance)
