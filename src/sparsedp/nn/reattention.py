"""Re-attention (DPFormer, section 5): attention that allows for the noise in its keys.

Keys of rare items carry more noise, and exp() turns noise into attention: for a key with Gaussian error the expected score
is exp(Var[logit] / 2) times what it would be without (eq. 5.2). Here are the effective errors of parameters (eq. 5.3), rules
that carry means and variances through layers (eq. 5.5 to 5.7), and the correction, which is subtracted from the logits before
the softmax, so that scores still sum to one. Everything is differentiable torch, but meant to run under `no_grad`.

One variance per position stands for all of its dimensions, as in the paper. Sampling shows that a variance per dimension
would tell no more: what it leaves out is how dimensions vary together (see `logit_variance`, and docs/sequences.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Moments:
    """Independent Gaussians: mean [..., dim], and a variance [..., 1] that all dimensions share."""

    mean: Tensor
    variance: Tensor

    def __add__(self, other: Moments) -> Moments:
        """A residual sum, its parts taken as independent."""
        return Moments(self.mean + other.mean, self.variance + other.variance)


# ---------------------------------------------------------------------- where errors come from


def effective_error(
    noise_multiplier: float, batch_size: float, frequencies: Tensor | None = None, floor: float = 1.0
) -> Tensor:
    """sigma_dp / (B p_i), a standard deviation (eq. 5.3, claim 5.4); without `frequencies` p = 1 (claim 5.3).

    p_i is the probability that a unit's sequence contains item i. B p_i, the units in a batch that train the row, is kept
    between `floor` and B: an estimate with noise may be zero, negative or above 1.
    """
    if not 0 <= noise_multiplier < math.inf or not 0 < batch_size < math.inf:
        raise ValueError(f"{noise_multiplier=} must be at least 0 and {batch_size=} positive, both finite")
    if not 0 < floor <= batch_size:
        raise ValueError(
            f"floor, the least number of units that count as training a row, must be in (0, B], not {floor}"
        )
    if frequencies is None:
        return torch.tensor(noise_multiplier / batch_size)
    if not torch.isfinite(frequencies).all():
        raise ValueError("frequencies must be finite numbers; unseen items have frequency 0")
    return noise_multiplier / (batch_size * frequencies.detach()).clamp(floor, batch_size)


# ---------------------------------------------------------------------- how they spread


def linear(x: Moments, layer: nn.Linear, error: Tensor, groups: int = 1) -> Moments:
    """x W^T + b, with errors of standard deviation `error` in W and b."""
    return Moments(layer(x.mean), linear_variance(x, layer, error, groups))


def linear_variance(x: Moments, layer: nn.Linear, error: Tensor, groups: int = 1) -> Tensor:
    """Equation 5.5, summed over the inputs: for an input with variance v,

        v (mean_j |W_j|^2 + in error^2) + error^2 (|mean|^2 + 1)

    The mean is over all outputs j, or over each of `groups` blocks of them (heads): [..., groups].
    """
    rows = layer.weight.square().sum(1).unflatten(0, (groups, -1)).mean(1)
    return x.variance * rows + own_variance(x, layer, error)


def own_variance(x: Moments, layer: nn.Linear, error: Tensor) -> Tensor:
    """The part of `linear_variance` that the error of the layer's own weight and bias makes."""
    inputs = x.mean.shape[-1]
    biased = 0 if layer.bias is None else 1
    return error.square() * (x.mean.square().sum(-1, keepdim=True) + inputs * x.variance + biased)


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E and Var of Z = max(X, 0), elementwise, X ~ N(c, d) (appendix D.2). With g = c / sqrt(d):

        E[Z] = c Phi(g) + sqrt(d) phi(g);   E[Z^2] = (c^2 + d) Phi(g) + c sqrt(d) phi(g);   Var[Z] = E[Z^2] - E[Z]^2

    Equation 5.6 as printed subtracts c^2 instead of E[Z]^2, which gives d / 2 at c = 0 where the paper's own Table 3 has
    0.3408 d. Var[Z] / d is evaluated as Phi + g^2 Phi (1 - Phi) + g phi (1 - 2 Phi) - phi^2: the same, but nothing
    cancels where g is large.
    """
    deviation = variance.sqrt()
    # Beyond 12 standard deviations Z is X or 0 to rounding; the bound also covers a variance of 0.
    g = (mean / deviation.clamp_min(torch.finfo(mean.dtype).tiny)).clamp(-12, 12)
    cdf, pdf = _cdf(g), _pdf(g)
    share = cdf * (1 + g.square() * (1 - cdf)) + pdf * (g * (1 - 2 * cdf) - pdf)
    return mean * cdf + deviation * pdf, variance * share.clamp_min(0)


def gelu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E and Var of Z = X Phi(X), elementwise, X ~ N(m, v): exact, by Stein's lemma E[X f(X)] = m E[f] + v E[f'].

        E[Z]   = m E[Phi] + v E[phi]
        E[Z^2] = (m^2 + v) E[Phi^2] + 2 v (m E[Phi phi] + E[X Phi phi])

    with, for t = m / sqrt(1 + v):  E[Phi] = Phi(t), E[phi] = phi(t) / sqrt(1 + v), E[Phi^2] = Phi(t) - 2 T(t, 1 / sqrt(1 + 2v))
    (T is Owen's), and phi times a Gaussian is a Gaussian again. In float64, because E[Z^2] and E[Z]^2 nearly cancel.
    The paper takes ReLU's variance instead (remark D.3), which is 36 % too large for narrow Gaussians around 0.
    """
    m, v = mean.double(), variance.double()
    wide = (1 + v).sqrt()
    t, u = m / wide, m / ((1 + v) * (1 + 2 * v)).sqrt()
    phi = _pdf(t) / wide
    first = m * _cdf(t) + v * phi
    both = _cdf(t) - 2 * _owens_t(t, (1 + 2 * v).rsqrt())
    product = phi * _cdf(u)
    moment = phi * (m / (1 + v) * _cdf(u) + v / ((1 + v) * (1 + 2 * v)).sqrt() * _pdf(u))
    second = (m.square() + v) * both + 2 * v * (m * product + moment)
    return first.to(mean.dtype), (second - first.square()).clamp_min(0).to(mean.dtype)


def activate(x: Moments, moments: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Moments:
    """An activation, `relu_moments` or `gelu_moments`, and the mean of its variances over the dimensions."""
    mean, variance = moments(x.mean, x.variance)
    return Moments(mean, variance.mean(-1, keepdim=True))


def layer_norm(x: Moments, layer: nn.LayerNorm, error: Tensor) -> Moments:
    """A layer norm with errors of standard deviation `error` in its scale and shift. Ours: the paper has no rule for it.

    The squared length of the input is on average that of its mean plus that of its error, so with s^2 the variance of
    the mean's entries and v' = v (1 - 1/dim), what centring leaves of v: mean = centred / sqrt(s^2 + v' + eps), and
    variance = v' / (s^2 + v' + eps). It is never above 1, however large the error of a tail item.
    """
    left = x.variance * (1 - 1 / x.mean.shape[-1])
    centred = x.mean - x.mean.mean(-1, keepdim=True)
    size = centred.square().mean(-1, keepdim=True) + left + layer.eps
    normal, share = centred / size.sqrt(), left / size
    layer_variance = error.square() * (normal.square().mean(-1, keepdim=True) + share + 1)
    return Moments(normal * layer.weight + layer.bias, share * layer.weight.square().mean() + layer_variance)


def attend(weights: Tensor, values: Moments, logits: Tensor) -> Moments:
    """A weighted average o_i = sum_j w_ij x_j over positions, for weights [..., L, L] whose logits vary by `logits`:

        variance = sum_j w_ij^2 (v_j + Var[logit_ij] |x_j - o_i|^2 / dim)

    to first order in the logits. Ours: the paper does not say. The second term is the larger one where an item without
    much error of its own attends to items that have.
    """
    mean = weights @ values.mean
    sizes, mine = values.mean.square().sum(-1, keepdim=True), mean.square().sum(-1, keepdim=True)
    apart = (sizes.mT - 2 * mean @ values.mean.mT + mine).clamp_min(0) / mean.shape[-1]
    return Moments(mean, (weights.square() * (values.variance.mT + logits * apart)).sum(-1, keepdim=True))


# ---------------------------------------------------------------------- what they do to attention


def logit_variance(query: Tensor, key_variance: Tensor) -> Tensor:
    """C sigma_j^2 with C = |q_i|^2 / d (eq. 5.2 and the logits' 1 / sqrt(d)): the variance of q_i . k_j / sqrt(d).

    `query` [..., L, d], `key_variance` [..., L, 1]; [..., L, L]. Exact where the errors of a key's dimensions are
    independent of each other.
    """
    return query.square().mean(-1, keepdim=True) * key_variance.mT


def projected_logit_variance(query: Tensor, weight: Tensor, inputs: Tensor, weight_variance: Tensor) -> Tensor:
    """(|W^T q_i|^2 v_j + |q_i|^2 o_j) / d: for keys k_j = W x_j whose inputs have independent errors. Ours.

    W mixes the inputs' errors into all dimensions of a key, which then vary together. `weight` [..., d, dim], `inputs` v
    [..., L, 1] the inputs' variance, `weight_variance` o [..., L, 1] what W's own error adds (`own_variance`).
    """
    through = (query @ weight).square().sum(-1, keepdim=True) / query.shape[-1]
    return through * inputs.mT + logit_variance(query, weight_variance)


def correction(variance: Tensor, cap: Tensor | float) -> Tensor:
    """What to subtract from logits with `variance`: variance / 2, at most `cap`.

    Each score then changes by a factor between exp(-cap) and exp(cap), so no row of keys can vanish.
    """
    return (variance / 2).clamp(max=cap)


# ---------------------------------------------------------------------- the Gaussian


def _cdf(x: Tensor) -> Tensor:
    return torch.erfc(x / -math.sqrt(2)) / 2


def _pdf(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


_NODES, _WEIGHTS = ((values + shift) / 2 for values, shift in zip(np.polynomial.legendre.leggauss(10), (1.0, 0.0)))


def _owens_t(h: Tensor, a: Tensor) -> Tensor:
    """T(h, a) = 1 / (2 pi) integral from 0 to a of exp(-h^2 (1 + x^2) / 2) / (1 + x^2), for 0 <= a <= 1."""
    total = torch.zeros_like(h * a)
    for node, weight in zip(_NODES, _WEIGHTS):
        spread = 1 + (a * float(node)).square()
        total = total + float(weight) * torch.exp(-h.square() * spread / 2) / spread
    return a * total / (2 * math.pi)
