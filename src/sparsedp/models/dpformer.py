"""DPFormer (Ding et al. 2023): a causal Transformer over item sequences, with re-attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.errors import SparseDPError
from sparsedp.models.sequence import SequenceModel
from sparsedp.nn.reattention import (
    Moments,
    activate,
    attend,
    correction,
    effective_error,
    gelu_moments,
    layer_norm,
    linear,
    linear_variance,
    logit_variance,
    own_variance,
    projected_logit_variance,
    relu_moments,
)

if TYPE_CHECKING:
    from sparsedp.engine import PrivacyEngine

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
_MOMENTS = {"relu": relu_moments, "gelu": gelu_moments}


class DPFormer(SequenceModel):
    """The encoder of appendix E.2: learned positions, `blocks` Transformer blocks, a layer norm.

    Layer norms stand before attention and feed-forward network (pre-norm), where the original Transformer has them
    behind. Such models train without a long warm-up, at learning rates that noise forces on them; and what enters
    attention is normalised, which bounds the error of tail items there.

    Rows start as N(0, 1/dim^2). Hidden states are normalised, so scores start with variance 1/dim. With rows of norm 1, a
    tied model starts by scoring each position's own item at about sqrt(dim): privacy is then spent on unlearning that.

    With `reattention`, attention allows for the noise in its keys: call `track_errors` before the first forward pass.
    `projected` then takes the variance of a logit from how the key layer mixes its inputs' errors instead of the paper's
    C sigma^2 (see `sparsedp.nn.reattention.projected_logit_variance`).
    """

    item_error: Tensor
    position_error: Tensor
    weight_error: Tensor
    cap: Tensor
    future: Tensor

    def __init__(
        self,
        items: int,
        length: int,
        dim: int = 64,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        tied: bool = True,
        reattention: bool = False,
        projected: bool = False,
        activation: str = "relu",
    ) -> None:
        if min(dim, blocks, heads) < 1 or dim % heads:
            raise ValueError(f"{dim=}, {blocks=} and {heads=} must be at least 1, and heads divide dim")
        super().__init__(items, length, dim, tied, dropout, deviation=1 / dim)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, not {activation!r}")
        if projected and not reattention:
            raise ValueError("projected=True is a form of re-attention: it needs reattention=True")
        self.reattention = reattention
        # A dense parameter and not a table: every unit uses these rows, and no mechanism should select among them.
        self.positions = nn.Parameter(torch.empty(length, dim))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, projected, activation) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)
        if reattention:
            self.register_buffer("item_error", torch.full((items + 1,), math.nan))
            self.register_buffer("position_error", torch.full((length,), math.nan))
            self.register_buffer("weight_error", torch.tensor(math.nan))
            self.register_buffer("cap", torch.tensor(math.nan))
            self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]
        self._tracks = False

    def track_errors(
        self,
        *,
        noise_multiplier: float,
        batch_size: float,
        frequencies: Tensor,
        position_frequencies: Tensor | None = None,
        scale: float = 1.0,
        floor: float = 1.0,
        cap: float | None = None,
    ) -> None:
        """Fixes the effective errors that re-attention corrects for, until the next call. They are in the state_dict.

        `frequencies` [items + 1]: the probability p_i that a unit's sequence contains item i; entry 0 is not looked at.
        `position_frequencies` [length]: that it reaches a position, by default 1. Both must be public or estimated with
        differential privacy. `noise_multiplier` and `batch_size` are those of training, the latter the expected one.

        Standard deviations are scale * sigma / B for weights and scale * sigma / (B p_i) for rows (eq. 5.3): what one step's
        noise is to one step's signal. The paper's scale is 1; docs/sequences.md says what others mean. B p_i counts as at
        least `floor`, and a logit is corrected by at most `cap`, by default log(length).
        """
        if not self.reattention:
            raise ValueError("track_errors is for a model with reattention=True")
        cap = math.log(self.length) if cap is None else cap
        if not 0 <= scale < math.inf or not 0 <= cap < math.inf:
            raise ValueError(f"{scale=} and {cap=} must be at least 0 and finite")
        for name, given, wanted in (
            ("frequencies", frequencies, self.items + 1), ("position_frequencies", position_frequencies, self.length),
        ):  # fmt: skip
            if given is not None and given.shape != (wanted,):
                raise ValueError(f"{name} must have shape ({wanted},), not {tuple(given.shape)}")
        of_weights = scale * effective_error(noise_multiplier, batch_size)
        of_items = scale * effective_error(noise_multiplier, batch_size, frequencies, floor)
        of_items[0] = 0.0
        of_positions = of_weights
        if position_frequencies is not None:
            of_positions = scale * effective_error(noise_multiplier, batch_size, position_frequencies, floor)
        self.item_error.copy_(of_items)
        self.position_error.copy_(of_positions)
        self.weight_error.copy_(of_weights)
        self.cap.fill_(cap)
        self._tracks = True

    def estimate_errors(self, engine: PrivacyEngine, **bounds: Any) -> None:
        """`track_errors` by the engine's plan, with frequencies that the engine releases and charges to its ledger.

        The engine must have been given this model and `frequencies=FrequencyRelease(...)`. `bounds` are the other
        arguments of `track_errors`.
        """
        plan = engine.plan
        if not self._tracks:  # counting lookups takes a forward pass
            self.track_errors(noise_multiplier=0.0, batch_size=plan.batch_size, frequencies=torch.ones(self.items + 1))
        name = next(name for name, parameter in self.named_parameters() if parameter is self.item_table.weight)
        self.track_errors(
            noise_multiplier=plan.mechanism.gradient_noise(plan.noise_multiplier),
            batch_size=plan.batch_size,
            frequencies=engine.release_frequencies()[name],
            **bounds,
        )

    def encode(self, history: Tensor) -> Tensor:
        embedded = self.embed(history) + self.positions[: history.shape[1]]
        x = F.dropout(embedded, self.dropout, self.training)
        future = self.future[: history.shape[1], : history.shape[1]]
        for block, noise in zip(self.blocks, self._noise(history, embedded.detach(), future)):
            x = block(x, future, noise)
        return self.norm(x)

    @torch.no_grad()
    def _noise(self, history: Tensor, embedded: Tensor, future: Tensor) -> list[_Noise | None]:
        """What each block has to know of the errors at its keys: a pass of means and variances, without dropout.

        The means are those of the model as it is: its noisy parameters are the only estimate of theirs (section 5.2.2).
        """
        if not self.reattention:
            return [None] * len(self.blocks)
        if not self._tracks:
            raise SparseDPError(
                "DPFormer(reattention=True) does not know the noise yet. Call model.track_errors(noise_multiplier=..., "
                "batch_size=..., frequencies=...) before the first forward pass, or load a state_dict from after it."
            )
        variance = self.dim * self.item_error[history].square() + self.position_error[: history.shape[1]].square()
        x = Moments(embedded, variance[..., None])
        noises: list[_Noise | None] = []
        for block in self.blocks:
            assert isinstance(block, Block)
            noise = _Noise(layer_norm(x, block.norm1, self.weight_error), self.weight_error, self.cap)
            noises.append(noise)
            if len(noises) < len(self.blocks):
                x = block.propagate(x, noise, future)
        return noises


def _after_load(model: DPFormer, keys: Any) -> None:
    model._tracks = not bool(model.weight_error.isnan())


@dataclass(frozen=True)
class _Noise:
    """The normalised input of a block's attention with its errors, the error of weights, and the largest correction."""

    inputs: Moments
    error: Tensor
    cap: Tensor


class Block(nn.Module):
    """Self-attention and a feed-forward network of width 4 dim, each behind a layer norm and beside a residual path.

    Out of plain operations: fused attention would not take the correction, and hides its parameters' uses from capture.
    """

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, projected: bool = False, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.projected = heads, dropout, projected
        self._activation, self._moments = _ACTIVATIONS[activation], _MOMENTS[activation]
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        for layer in (self.query, self.key, self.value, self.out, self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, future: Tensor, noise: _Noise | None = None) -> Tensor:
        """x [B, L, dim]; `future` [L, L] is true where a key comes after its query, or any mask [B, 1 or heads, 1 or L, L]."""
        a = self.norm1(x)
        query, key, value = (self._split(layer(a)) for layer in (self.query, self.key, self.value))
        weights = self._drop(self._weights(query, key, future, noise))
        x = x + self._drop(self.out((weights @ value).transpose(1, 2).flatten(2)))
        return x + self._drop(self.down(self._drop(self._activation(self.up(self.norm2(x))))))

    @torch.no_grad()
    def propagate(self, x: Moments, noise: _Noise, future: Tensor) -> Moments:
        """The means and variances of `forward`, without dropout, over errors in x and in the parameters."""
        a, error = noise.inputs, noise.error
        query, key = self._split(self.query(a.mean)), self._split(self.key(a.mean))
        value = linear(a, self.value, error, groups=self.heads)
        weights = self._weights(query, key, future, noise)
        values = Moments(self._split(value.mean), value.variance.mT[..., None])
        attended = attend(weights, values, self._logit_variance(query, noise))
        joined = Moments(attended.mean.transpose(1, 2).flatten(2), attended.variance.mean(1))
        x = x + linear(joined, self.out, error)
        inner = activate(linear(layer_norm(x, self.norm2, error), self.up, error), self._moments)
        return x + linear(inner, self.down, error)

    def _weights(self, query: Tensor, key: Tensor, future: Tensor, noise: _Noise | None) -> Tensor:
        """Attention [B, heads, L, L] of queries and keys [B, heads, L, dim / heads]."""
        logits = query @ key.mT / math.sqrt(query.shape[-1])
        if noise is not None:
            logits = logits - correction(self._logit_variance(query.detach(), noise), noise.cap)
        return logits.masked_fill(future, -math.inf).softmax(-1)

    @torch.no_grad()
    def _logit_variance(self, query: Tensor, noise: _Noise) -> Tensor:
        """The variance [B, heads, L, L] that errors of the keys make in the logits."""
        if self.projected:
            weight = self.key.weight.unflatten(0, (self.heads, -1))
            weight_variance = own_variance(noise.inputs, self.key, noise.error)
            return projected_logit_variance(query, weight, noise.inputs.variance[:, None], weight_variance[:, None])
        of_keys = linear_variance(noise.inputs, self.key, noise.error, groups=self.heads)
        return logit_variance(query, of_keys.mT[..., None])

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
