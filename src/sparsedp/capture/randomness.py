"""The random numbers of a forward pass: drawn from a secret key, whatever torch's own generator was seeded with.

Masks of dropout and the like go by position in the batch, so that one unit more moves everybody's behind it. Under a seed
that is known, the sum of clipped gradients then moves by much more than one unit's bound. Drawn from a stream cipher under
a secret key, and anew in every pass, they are as good as independent of everything (docs/guarantee.md derives why that is
enough).

An operation that may draw runs under a `TorchDispatchMode`, which sees the operations that torch makes of it, and draws
those that torch tags as random from the key instead. torch's own generator, and one that the module passes, stay as they
are (`laws.py`). What draws in another way is found afterwards: it moved a global generator (`global_generators.py`), and is
refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedp._torch import is_functorch_tensor
from sparsedp.capture.laws import Replaced, drawn_dtype, mantissa_bits
from sparsedp.capture.units import UnitAxis
from sparsedp.errors import SparseDPError
from sparsedp.kernels import cipher, normals
from sparsedp.kernels.threads import on_all_cores
from sparsedp.noise import CHUNK, RandomKey

# Kinds of forward passes; each has its own sequence of draws. A run that is resumed repeats its training passes, and not
# what was counted before, or evaluated with dropout.
TRAINING, WITHOUT_GRADIENT, COUNTING = 0, 1, 2
# Draws begin at multiples of this many words of the stream: what the cipher makes at a time.
_GROUP = 16 * cipher.LANES


class Draws:
    """Random numbers that the key, the step, the forward pass in that step and the place in that pass alone decide."""

    def __init__(self, key: RandomKey, step: Callable[[], int] = lambda: 0) -> None:
        self._key, self._step = key, step
        self._at = -1  # the step that `_passes` are of
        self._passes = [0, 0, 0]
        self._path: tuple[int, ...] = ()
        self._stream: np.ndarray | None = None
        self._used = 0  # words of it

    def begin(self, kind: int) -> None:
        """Before a forward pass."""
        step = self._step()
        if step != self._at:
            self._at, self._passes = step, [0, 0, 0]
        self._path, self._stream, self._used = (step, kind, self._passes[kind]), None, 0
        self._passes[kind] += 1

    # ------------------------------------------------------------------ laws that all others are made of

    def mask(self, shape: Sequence[int], chance: float, value: float, dtype: torch.dtype) -> Tensor:
        """`value` with probability `chance`, else 0; float32 or float64."""

        def fill(out: np.ndarray, key: np.ndarray, first: int) -> None:
            normals.fill_mask(out, chance, value, key, first)

        return self._drawn(("mask", chance), shape, dtype, 1, fill)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uniform on [0, 1), with as many bits as the mantissa of `dtype` has."""
        computed, bits = drawn_dtype(dtype), mantissa_bits(dtype)

        def fill(out: np.ndarray, key: np.ndarray, first: int) -> None:
            normals.fill_uniform(out, key, first)

        drawn = self._drawn(("uniform",), shape, computed, computed.itemsize // 4, fill)
        return drawn if dtype == computed else drawn.mul_(2.0**bits).floor_().mul_(2.0**-bits).to(dtype)

    def words(self, shape: Sequence[int]) -> Tensor:
        """Uniform over all integers of 64 bits, int64."""

        def fill(out: np.ndarray, key: np.ndarray, first: int) -> None:
            cipher.fill_words(out.view(np.uint32), key, first)

        return self._drawn(("words",), shape, torch.int64, 2, fill)

    def standard_normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """N(0, 1), float32 or float64."""
        words = 2 if dtype == torch.float64 else 1

        def fill(out: np.ndarray, key: np.ndarray, first: int) -> None:
            normals.fill_normal(out, 1.0, key, first // words)

        return self._drawn(("normal",), shape, dtype, words, fill)

    def _drawn(
        self, law: tuple, shape: Sequence[int], dtype: torch.dtype, words: int, fill: Callable[..., None]
    ) -> Tensor:
        """fill(out, key, first) draws part of a vector, whose elements take so many `words` each; `law` names it."""
        out = torch.empty(tuple(shape), dtype=dtype)
        if self._stream is None:
            self._stream = self._key.stream(*self._path)
        flat, key, start = out.view(-1).numpy(), self._stream, self._used
        self._used += -(-len(flat) * words // _GROUP) * _GROUP
        if len(flat) <= CHUNK:
            fill(flat, key, start)
        else:
            parts = range(0, len(flat), CHUNK)
            on_all_cores(lambda at: fill(flat[at : at + CHUNK], key, start + at * words), parts)
        return out

    # ------------------------------------------------------------------ laws made of these

    def inner(self, shape: Sequence[int]) -> Tensor:
        """Uniform on (0, 1) without its ends, float64."""
        return self.uniform(shape, torch.float64).add_(2.0**-54).clamp_max_(1 - 2.0**-53)

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Uniform from `low` to `high` - 1, int64."""
        if high - low >= 1 << 63:
            return self.words(shape)  # all that there are
        return (self.words(shape) & ((1 << 63) - 1)).remainder_(high - low).add_(low)

    def exponential(self, shape: Sequence[int]) -> Tensor:
        """Exponential with mean 1, positive, float64."""
        return self.inner(shape).log_().neg_()

    # ------------------------------------------------------------------ operations

    def replacing(self, name: str, func: Callable, axis: UnitAxis | None) -> Callable:
        """`func` with its random numbers from here. `axis`: where the units of its first activation are."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._expect(axis)
            try:
                if name == "dropout" and (direct := _direct_dropout(self, args, kwargs)) is not None:
                    return direct
                with Replaced(self):
                    return func(*args, **kwargs)
            finally:
                self._expect(None)

        return run

    def _expect(self, axis: UnitAxis | None) -> None:
        """Called with where the units are in the numbers that are drawn next; None if that is not known."""


def _direct_dropout(draws: Draws, args: tuple, kwargs: dict) -> Tensor | None:
    """F.dropout or torch.dropout in its usual form, whose mask is drawn and scaled at once; None for any other."""
    bound = {**dict(zip(("input", "p", "training", "inplace"), args)), **kwargs}
    source, p = bound.pop("input", None), bound.pop("p", 0.5)
    training, inplace = bound.pop("training", bound.pop("train", True)), bound.pop("inplace", False)
    if bound or not isinstance(source, Tensor) or not training or not isinstance(p, (int, float)) or not 0 < p < 1:
        return None
    if type(source) is not Tensor or source.device.type != "cpu" or source.dtype not in (torch.float32, torch.float64):
        return None
    if source.layout != torch.strided or not source.is_contiguous() or is_functorch_tensor(source):
        return None
    mask = draws.mask(source.shape, 1 - p, 1 / (1 - p), source.dtype)
    return source.mul_(mask) if inplace else source * mask


class RepeatedDraws(Draws):
    """For `sparsedp.check` and replays: some units get the numbers that they had among all.

    `together` begins a pass over the whole batch, `alone` one over a single unit, `chosen` one over some of them. The n-th
    numbers that the batch draws have the units on one of their axes, found by comparing shapes, or are shared by all units.
    """

    def __init__(self) -> None:
        super().__init__(RandomKey.from_seed(0))  # these protect nothing: a check gives the same result every time
        self._drawn_together: list[tuple[tuple, Tensor, UnitAxis | None]] = []
        self._units, self._chosen, self._number = 0, None, 0  # type: int, list[int] | None, int
        self._axis: UnitAxis | None = None

    def together(self, units: int) -> None:
        super().begin(TRAINING)
        self._drawn_together, self._units, self._chosen = [], units, None

    def alone(self, unit: int) -> None:
        self.chosen([unit])

    def chosen(self, units: list[int]) -> None:
        self._chosen, self._number = units, 0

    @property
    def has_drawn(self) -> bool:
        """Whether the pass over the batch drew any numbers."""
        return bool(self._drawn_together)

    def finish(self) -> None:
        """After a pass over some units: it must have drawn as often as the batch did."""
        if self._chosen is not None and self._number != len(self._drawn_together):
            raise self._not_alike(
                f"{len(self._drawn_together)} times for a batch and {self._number} times for one unit"
            )

    def begin(self, kind: int) -> None:
        """A pass over the batch may call the module several times: its draws are counted through."""

    def mask(self, shape: Sequence[int], chance: float, value: float, dtype: torch.dtype) -> Tensor:
        return super().mask(shape, chance, 1.0, torch.float64).to(dtype) * value

    def _expect(self, axis: UnitAxis | None) -> None:
        self._axis = axis

    def _drawn(
        self, law: tuple, shape: Sequence[int], dtype: torch.dtype, words: int, fill: Callable[..., None]
    ) -> Tensor:
        shape, law = tuple(shape), (*law, dtype)
        if self._chosen is None:
            out = super()._drawn(law, shape, dtype, words, fill)
            self._drawn_together.append((law, out.clone(), self._axis))
            return out
        number, self._number = self._number, self._number + 1
        if number >= len(self._drawn_together):
            raise self._not_alike(f"{len(self._drawn_together)} times for a batch, and more often for one unit")
        before, values, axis = self._drawn_together[number]
        if before != law:
            raise self._not_alike("of other laws for a batch than for one unit")
        if values.shape == shape:
            return values.clone()  # shared by all units
        values = self._unpadded(values, axis, shape)
        return self._part(values, axis, shape, self._chosen).reshape(shape).clone()

    def _unpadded(self, values: Tensor, axis: UnitAxis | None, shape: tuple[int, ...]) -> Tensor:
        """A batch is padded to its longest example: a shorter one that is collated alone has its first positions."""
        units = 0 if axis is None or axis.dim >= values.ndim else axis.dim
        others = [d for d in range(values.ndim) if d != units]
        many = len(self._chosen or ())
        if values.ndim == len(shape) and values.shape[units] * many == self._units * shape[units]:
            for d in others:
                values = values.narrow(d, 0, min(shape[d], values.shape[d]))
        return values

    def _part(self, values: Tensor, axis: UnitAxis | None, shape: tuple[int, ...], chosen: list[int]) -> Tensor:
        """What belongs to the chosen units in numbers that were drawn for the whole batch; `shape` is what they draw."""
        fits = values.numel() * len(chosen) == self._units * math.prod(shape)
        different = [d for d, (size, other) in enumerate(zip(values.shape, shape)) if size != other]
        if values.ndim == len(shape) and len(different) == 1:
            dim = different[0]
        elif fits and values.ndim and values.shape[0] % self._units == 0:
            dim = 0  # (batch * heads, ...) on the one side, (batch, heads, ...) on the other
        else:
            dim = -1
        if dim < 0 or not fits:
            raise self._not_alike(f"of shape {tuple(values.shape)} for a batch and of shape {shape} for one unit")
        inner = values.shape[dim] // self._units  # units come first if they share a dimension with positions, ...
        if axis is not None and axis.dim == dim and axis.fits(values.shape, self._units):
            inner = axis.inner  # ... unless something else is known
        split = values.unflatten(dim, (-1, self._units, inner)) if inner else values
        return split.index_select(dim + 1, torch.tensor(chosen)) if inner else split

    def _not_alike(self, how: str) -> SparseDPError:
        return SparseDPError(
            f"The model or its loss draws random numbers {how}, so it cannot be told which of them belong to which unit, and "
            "one unit alone cannot be compared with itself among others. Draw numbers in tensors that have the batch on an "
            "axis of its own, or that do not depend on the batch."
        )


# ---------------------------------------------------------------------- which operations may draw

# Operations of torch that draw, or are made of some that do, beside those that torch tags.
_COMPOSITE = {
    "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout", "alpha_dropout", "native_dropout",
    "rrelu", "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices", "scaled_dot_product_attention", "multi_head_attention_forward", "random",
    "binomial", "_sample_dirichlet", "_standard_gamma", "lstm", "gru", "rnn_tanh", "rnn_relu",
    "svd_lowrank", "pca_lowrank", "lobpcg", "kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform",
    "trunc_normal", "orthogonal", "sparse",
}  # fmt: skip


@functools.cache
def _drawing_names() -> frozenset[str]:
    """The names of operations that may draw, without the underscore of in-place forms."""
    tagged = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads):
            tagged.add(name)
    return frozenset(name.removesuffix("_") for name in tagged | _COMPOSITE)


@functools.lru_cache(maxsize=1024)
def may_draw(name: str) -> bool:
    """Whether an operation of this name may draw random numbers. torch.ops' names have their overload behind a dot."""
    return name.partition(".")[0].removesuffix("_") in _drawing_names()


def draws_nothing(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether it is attention without dropout, which draws nothing and would be slow to watch for draws."""
    if name == "scaled_dot_product_attention":
        return not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if name == "multi_head_attention_forward":
        return not (kwargs.get("training", True) and kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0))
    return False
