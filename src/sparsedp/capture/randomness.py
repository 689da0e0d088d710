"""The random numbers of a forward pass: drawn from a secret key, whatever torch's own generator was seeded with.

Masks of dropout and the like go by position in the batch, so that one unit more moves everybody's behind it. Under a seed
that is known, the sum of clipped gradients then moves by much more than one unit's bound. Drawn from a stream cipher under
a secret key, and anew in every pass, they are as good as independent of everything (docs/guarantee.md derives why that is
enough).

An operation that may draw runs under a `TorchDispatchMode`, which sees the operations that torch makes of it, and draws
those that torch tags as random from the key instead. torch's own generator, and one that the module passes, stay as they
are. What draws in another way is found afterwards: it moved a global generator (`GlobalGenerators`), and is refused.
"""

from __future__ import annotations

import ctypes
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937
from scipy import special
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.capture.tracking import UnitAxis
from sparsedp.errors import SparseDPError, UnsupportedError
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
        """On [0, 1), with as many bits as the mantissa of `dtype` has."""
        computed, bits = _computed(dtype), _mantissa(dtype)

        def fill(out: np.ndarray, key: np.ndarray, first: int) -> None:
            normals.fill_uniform(out, key, first)

        drawn = self._drawn(("uniform",), shape, computed, computed.itemsize // 4, fill)
        return drawn if dtype == computed else drawn.mul_(2.0**bits).floor_().mul_(2.0**-bits).to(dtype)

    def words(self, shape: Sequence[int]) -> Tensor:
        """All integers of 64 bits, int64."""

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
        """From `low` to `high` - 1, int64."""
        if high - low >= 1 << 63:
            return self.words(shape)  # all that there are
        return (self.words(shape) & ((1 << 63) - 1)).remainder_(high - low).add_(low)

    def exponential(self, shape: Sequence[int]) -> Tensor:
        """With mean 1, positive, float64."""
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
        """Told where units are in the numbers that are drawn next, as far as that is known."""


def _direct_dropout(draws: Draws, args: tuple, kwargs: dict) -> Tensor | None:
    """F.dropout or torch.dropout in its usual form, whose mask is drawn and scaled at once; None for any other."""
    bound = {**dict(zip(("input", "p", "training", "inplace"), args)), **kwargs}
    source, p = bound.pop("input", None), bound.pop("p", 0.5)
    training, inplace = bound.pop("training", bound.pop("train", True)), bound.pop("inplace", False)
    if bound or not isinstance(source, Tensor) or not training or not isinstance(p, (int, float)) or not 0 < p < 1:
        return None
    if type(source) is not Tensor or source.device.type != "cpu" or source.dtype not in (torch.float32, torch.float64):
        return None
    if (
        source.layout != torch.strided
        or not source.is_contiguous()
        or torch._C._functorch.is_functorch_wrapped_tensor(source)
    ):
        return None
    mask = draws.mask(source.shape, 1 - p, 1 / (1 - p), source.dtype)
    return source.mul_(mask) if inplace else source * mask


class RepeatedDraws(Draws):
    """For `sparsedp.check`: a unit alone gets the numbers that it had among the others.

    `together` begins a pass over the whole batch, `alone` one over a single unit. The n-th numbers that the batch draws
    have the units on one of their axes, found by comparing shapes, or are shared by all units.
    """

    def __init__(self) -> None:
        super().__init__(RandomKey.from_seed(0))  # these protect nothing: a check gives the same result every time
        self._drawn_together: list[tuple[tuple, Tensor, UnitAxis | None]] = []
        self._units, self._unit, self._number = 0, None, 0  # type: int, int | None, int
        self._axis: UnitAxis | None = None

    def together(self, units: int) -> None:
        super().begin(TRAINING)
        self._drawn_together, self._units, self._unit = [], units, None

    def alone(self, unit: int) -> None:
        self._unit, self._number = unit, 0

    def finish(self) -> None:
        """After a pass over one unit: it must have drawn as often as the batch did."""
        if self._unit is not None and self._number != len(self._drawn_together):
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
        if self._unit is None:
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
        return self._part(self._unpadded(values, axis, shape), axis, shape).reshape(shape).clone()

    def _unpadded(self, values: Tensor, axis: UnitAxis | None, shape: tuple[int, ...]) -> Tensor:
        """A batch is padded to its longest example: a shorter one that is collated alone has its first positions."""
        units = 0 if axis is None or axis.dim >= values.ndim else axis.dim
        others = [d for d in range(values.ndim) if d != units]
        if values.ndim == len(shape) and values.shape[units] == self._units * shape[units]:
            for d in others:
                values = values.narrow(d, 0, min(shape[d], values.shape[d]))
        return values

    def _part(self, values: Tensor, axis: UnitAxis | None, shape: tuple[int, ...]) -> Tensor:
        """What belongs to the unit in numbers that were drawn for the whole batch; `shape` is what it draws alone."""
        different = [d for d, (size, other) in enumerate(zip(values.shape, shape)) if size != other]
        if values.ndim == len(shape) and len(different) == 1:
            dim = different[0]
        elif values.numel() == self._units * math.prod(shape) and values.ndim and values.shape[0] % self._units == 0:
            dim = 0  # (batch * heads, ...) on the one side, (batch, heads, ...) on the other
        else:
            dim = -1
        if dim < 0 or values.numel() != self._units * math.prod(shape):
            raise self._not_alike(f"of shape {tuple(values.shape)} for a batch and of shape {shape} for one unit")
        inner = values.shape[dim] // self._units  # units come first if they share a dimension with positions, ...
        if axis is not None and axis.dim == dim and axis.fits(values.shape, self._units):
            inner = axis.inner  # ... unless something else is known
        split = values.unflatten(dim, (-1, self._units, inner)) if inner else values
        return split.select(dim + 1, self._unit or 0) if inner else split

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
    """Names without the underscore of in-place forms."""
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
    """Attention without dropout: the operations that are too slow to look into where nothing is to be found."""
    if name == "scaled_dot_product_attention":
        return not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if name == "multi_head_attention_forward":
        return not (kwargs.get("training", True) and kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0))
    return False


# ---------------------------------------------------------------------- what they draw


class Replaced(TorchDispatchMode):
    """Within it the operations that torch is made of draw from `draws`; those that it cannot replace are refused."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        law = _LAWS.get(func.overloadpacket)
        if law is None:
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **kwargs)
            return self._random(func, args, kwargs)
        a = _bound(func, args, kwargs)
        if "names" in a or "out0" in a:
            raise _refusal(func, "this form of it is not known")
        out = a.pop("out", None)
        if out is not None:
            a["dtype"] = out.dtype
        drawn = law(self._draws, a)
        if drawn is None:
            return func(*args, **kwargs)  # it draws nothing
        return drawn if out is None else out.resize_(drawn.shape).copy_(drawn)

    def _random(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One that torch tags as random and that has no law here."""
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        a = _bound(func, args, kwargs)
        rate = next((a[name] for name in ("dropout_p", "dropout", "p") if name in a), None)
        if rate == 0:
            return func(*args, **kwargs)
        raise _refusal(func, "it draws inside of one fused kernel")


def _refusal(func: Any, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"Operation '{func}' draws random numbers that cannot be drawn from the engine's secret key: {reason}. Masks under a "
        "seed that others know void the guarantee. Write it with F.dropout, torch.rand, torch.bernoulli or the like; for "
        "attention on a GPU, train within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


@functools.cache
def _arguments(func: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in func._schema.arguments)


def _bound(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """An operation's arguments by name, with defaults."""
    arguments = _arguments(func)
    return {**dict(arguments), **dict(zip((name for name, _ in arguments), args)), **kwargs}


# A law gives the result of an operation on these arguments, drawn anew; None if the operation draws nothing.
_Law = Callable[[Draws, dict[str, Any]], Any]
_LAWS: dict[Any, _Law] = {}


def _law(*names: str) -> Callable[[_Law], _Law]:
    def register(law: _Law) -> _Law:
        for name in names:
            _LAWS[getattr(torch.ops.aten, name)] = law
        return law

    return register


def _mantissa(dtype: torch.dtype) -> int:
    """Bits of a float's mantissa: integers up to 2^bits are exact."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _computed(dtype: torch.dtype) -> torch.dtype:
    """What numbers for a tensor of this type are drawn in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _made(a: dict[str, Any], dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that a function such as rand or rand_like makes, with nothing in it yet."""
    options = {name: a[name] for name in ("layout", "device", "pin_memory") if a.get(name) is not None}
    given = a.get("dtype")
    dtype = given if isinstance(given, torch.dtype) else dtype  # a default is a number, of a type that `dtype` names
    if a.get("self") is not None:
        return torch.empty_like(a["self"], dtype=dtype, memory_format=a.get("memory_format"), **options)
    return torch.empty(a["size"] if "size" in a else [a["n"]], dtype=dtype, **options)


def _fits(condition: bool | Tensor, what: str) -> None:
    if not bool(condition):
        raise RuntimeError(f"random numbers: {what}")


def _fill_uniform(draws: Draws, target: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    if target.is_complex():
        _fill_uniform(draws, torch.view_as_real(target))
        return target
    return target.copy_(draws.uniform(target.shape, target.dtype).mul_(high - low).add_(low))


def _fill_normal(draws: Draws, target: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    """`mean` and `std` are numbers or tensors that broadcast; a complex number's parts have half the variance each."""
    if target.is_complex():
        parts = draws.standard_normal((*target.shape, 2), _computed(target.dtype)).mul_(math.sqrt(0.5))
        values = torch.view_as_complex(parts)
    else:
        values = draws.standard_normal(target.shape, _computed(target.dtype))
    return target.copy_(values.to(target.device) * std + mean)


@_law("bernoulli_")
def _bernoulli_(draws: Draws, a: dict[str, Any]) -> Tensor:
    target, p = a["self"], a["p"]
    return target.copy_(_tossed(draws, target, p))


@_law("bernoulli")
def _bernoulli(draws: Draws, a: dict[str, Any]) -> Tensor:
    source = a["self"]
    return torch.empty_like(source).copy_(_tossed(draws, source, a.get("p", source)))


def _tossed(draws: Draws, like: Tensor, p: Any) -> Tensor:
    """1 with probability `p`, a number or a tensor, else 0."""
    if not isinstance(p, Tensor):
        _fits(0 <= p <= 1, f"p must be a probability, not {p}")
        return draws.mask(like.shape, float(p), 1.0, torch.float32)
    inside = (p >= 0) & (p <= 1)
    _fits(inside.all(), "p must be between 0 and 1")
    return draws.uniform(like.shape, torch.float64).to(like.device) < p


@_law("native_dropout")
def _native_dropout(draws: Draws, a: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    source, p = a["input"], a["p"]
    if a["train"] is False or p == 0:
        return None
    mask = _tossed(draws, source, 1 - p).to(source.device, torch.bool)
    return source * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


@_law("uniform_")
def _uniform(draws: Draws, a: dict[str, Any]) -> Tensor:
    low, high = a["from"], a["to"]
    _fits(low <= high, f"uniform_ expects from <= to, not {low} and {high}")
    return _fill_uniform(draws, a["self"], low, high)


@_law("rand", "rand_like")
def _rand(draws: Draws, a: dict[str, Any]) -> Tensor:
    return _fill_uniform(draws, _made(a))


@_law("randn", "randn_like")
def _randn(draws: Draws, a: dict[str, Any]) -> Tensor:
    return _fill_normal(draws, _made(a))


@_law("normal_")
def _normal_(draws: Draws, a: dict[str, Any]) -> Tensor:
    _fits(a["std"] >= 0, f"normal_ expects a standard deviation that is not negative, not {a['std']}")
    return _fill_normal(draws, a["self"], a["mean"], a["std"])


@_law("normal")
def _normal(draws: Draws, a: dict[str, Any]) -> Tensor:
    mean, std = a["mean"], a["std"]
    _fits((std >= 0).all() if isinstance(std, Tensor) else std >= 0, "normal expects no negative standard deviation")
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if tensors:
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))
        return _fill_normal(draws, tensors[0].new_empty(shape), mean, std)
    return _fill_normal(draws, _made(a), mean, std)


@_law("log_normal_")
def _log_normal(draws: Draws, a: dict[str, Any]) -> Tensor:
    _fits(a["std"] > 0, f"log_normal_ expects a positive standard deviation, not {a['std']}")
    target = a["self"]
    values = draws.standard_normal(target.shape, _computed(target.dtype))
    return target.copy_(values.mul_(a["std"]).add_(a["mean"]).exp_())


@_law("exponential_")
def _exponential(draws: Draws, a: dict[str, Any]) -> Tensor:
    _fits(a["lambd"] > 0, f"exponential_ expects a positive lambd, not {a['lambd']}")
    target = a["self"]
    smallest = torch.finfo(target.dtype).tiny
    return target.copy_(draws.exponential(target.shape).div_(a["lambd"]).clamp_min_(smallest))


@_law("geometric_")
def _geometric(draws: Draws, a: dict[str, Any]) -> Tensor:
    p, target = a["p"], a["self"]
    _fits(0 < p <= 1, f"geometric_ expects 0 < p <= 1, not {p}")
    trials = draws.exponential(target.shape) / (-math.log1p(-p) if p < 1 else math.inf)
    return target.copy_(trials.ceil_().clamp_min_(1))


@_law("cauchy_")
def _cauchy(draws: Draws, a: dict[str, Any]) -> Tensor:
    _fits(a["sigma"] > 0, f"cauchy_ expects a positive sigma, not {a['sigma']}")
    angle = draws.inner(a["self"].shape).sub_(0.5).mul_(math.pi)
    return a["self"].copy_(angle.tan_().mul_(a["sigma"]).add_(a["median"]))


@_law("randint", "randint_like")
def _randint(draws: Draws, a: dict[str, Any]) -> Tensor:
    low, high = int(a.get("low", 0)), int(a["high"])
    _fits(low < high, f"randint expects low < high, not {low} and {high}")
    out = _made(a, None if "self" in a else torch.int64)
    return out.copy_(draws.integers(out.shape, low, high))


@_law("random_")
def _random(draws: Draws, a: dict[str, Any]) -> Tensor:
    target = a["self"]
    low, high = a.get("from", 0), a.get("to")
    if high is None:
        floating = target.is_floating_point()
        most = 1 << _mantissa(target.dtype) if floating else 1 if target.dtype == torch.bool else _largest(target)
        high = most + 1
    _fits(low < high, f"random_ expects from < to, not {low} and {high}")
    return target.copy_(draws.integers(target.shape, low, high))


def _largest(tensor: Tensor) -> int:
    return torch.iinfo(tensor.dtype).max


@_law("randperm")
def _randperm(draws: Draws, a: dict[str, Any]) -> Tensor:
    return _made(a, torch.int64).copy_(draws.words((a["n"],)).argsort())


@_law("multinomial")
def _multinomial(draws: Draws, a: dict[str, Any]) -> Tensor:
    weights, count, replacement = a["self"], a["num_samples"], a["replacement"]
    _fits(weights.ndim in (1, 2) and weights.is_floating_point(), "multinomial expects weights of 1 or 2 dimensions")
    weights = weights.double()
    fine = torch.isfinite(weights).all() & (weights >= 0).all() & (weights.sum(-1) > 0).all()
    _fits(fine, "multinomial expects finite weights, not negative, some of them positive")
    _fits(count > 0, f"multinomial expects a positive number of samples, not {count}")
    if not replacement:
        enough = count <= weights.shape[-1] and bool(((weights > 0).sum(-1) >= count).all())
        _fits(enough, "multinomial without replacement expects as many positive weights as samples")
        # A race: the first of exponential clocks that run as fast as their weights (Efraimidis and Spirakis 2006).
        return (weights / draws.exponential(weights.shape).to(weights.device)).topk(count, dim=-1).indices
    sums = weights.cumsum(-1)
    last = (sums < sums[..., -1:]).sum(-1, keepdim=True)  # the last with a positive weight
    at = draws.uniform((*weights.shape[:-1], count), torch.float64).to(weights.device) * sums[..., -1:]
    return torch.searchsorted(sums, at, right=True).minimum(last)


def _by_distribution(draws: Draws, dtype: torch.dtype, invert: Callable, cumulate: Callable, *values: Tensor) -> Tensor:
    """A law on 0, 1, ...: the least k with cumulate(k, *values) >= u, for u uniform on (0, 1)."""
    device, shape = values[0].device, torch.broadcast_shapes(*(value.shape for value in values))
    parameters = [value.detach().cpu().double().numpy() for value in values]
    u = draws.inner(shape).numpy()
    found = np.ceil(invert(u, *parameters))
    below = np.maximum(found - 1, 0)  # in case that the inverse was a little too large
    return torch.from_numpy(np.asarray(np.where(cumulate(below, *parameters) >= u, below, found))).to(device, dtype)


@_law("poisson")
def _poisson(draws: Draws, a: dict[str, Any]) -> Tensor:
    rate = a["self"]
    _fits((rate >= 0).all(), "poisson expects rates that are not negative")
    drawn = _by_distribution(draws, rate.dtype, special.pdtrik, special.pdtr, rate.clamp_min(1e-300))
    return torch.where(rate > 0, drawn, torch.zeros_like(rate))


@_law("binomial")
def _binomial(draws: Draws, a: dict[str, Any]) -> Tensor:
    count, prob = torch.broadcast_tensors(a["count"], a["prob"])
    _fits((count >= 0).all() & (prob >= 0).all() & (prob <= 1).all(), "binomial expects counts and probabilities")
    inside = (count > 0) & (prob > 0) & (prob < 1)
    safe = torch.where(inside, count, 1), torch.where(inside, prob, 0.5)
    drawn = _by_distribution(draws, count.dtype, special.bdtrik, _binomial_distribution, *safe)
    return torch.where(inside, drawn, torch.where(prob == 1, count, torch.zeros_like(count)))


def _binomial_distribution(k: np.ndarray, count: np.ndarray, prob: np.ndarray) -> np.ndarray:
    return special.bdtr(k, count.astype(np.int64), prob)


@_law("_standard_gamma")
def _standard_gamma(draws: Draws, a: dict[str, Any]) -> Tensor:
    shape = a["self"]
    drawn = special.gammaincinv(shape.detach().cpu().double().numpy(), draws.inner(shape.shape).numpy())
    return torch.from_numpy(np.asarray(drawn)).to(shape).clamp_min_(torch.finfo(shape.dtype).tiny)


@_law("_sample_dirichlet")
def _dirichlet(draws: Draws, a: dict[str, Any]) -> Tensor:
    gammas = _standard_gamma(draws, {"self": a["self"].double()})
    return (gammas / gammas.sum(-1, keepdim=True)).to(a["self"])


@_law("rrelu_with_noise")
def _rrelu(draws: Draws, a: dict[str, Any]) -> Tensor | None:
    return a["self"] * _slopes(draws, a) if a["training"] else None


@_law("rrelu_with_noise_")
def _rrelu_(draws: Draws, a: dict[str, Any]) -> Tensor | None:
    return a["self"].mul_(_slopes(draws, a)) if a["training"] else None


def _slopes(draws: Draws, a: dict[str, Any]) -> Tensor:
    """Fills `noise`, which the backward pass multiplies by: random slopes where rrelu's input is not positive, else 1."""
    slopes = torch.empty_like(a["self"])
    _fill_uniform(draws, slopes, a["lower"], a["upper"])
    return a["noise"].copy_(torch.where(a["self"] > 0, torch.ones_like(slopes), slopes))


# ---------------------------------------------------------------------- what draws in another way


class GlobalGenerators:
    """Where the generators stand that everybody shares: torch's on each device, numpy's and Python's.

    numpy and Python take 20 to 100 microseconds to tell the whole state of theirs. Both are Mersenne Twisters, whose place
    in its 624 words, and first word, tell as much: these are read where they lie in memory.
    """

    def __init__(self) -> None:
        self._numpy: Any = None
        self._watch: list[Any] = []
        self._python = _python_words()

    def places(self) -> dict[str, Any]:
        """By the generator's name; different from an earlier answer if it was used, or seeded, in between."""
        found: dict[str, Any] = {"torch": torch.default_generator.get_state().numpy().tobytes()}
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._numpy:  # the first time, or np.random.set_bit_generator put another in its place
            self._numpy, self._watch = generator, _numpy_words(generator)
        found["numpy"] = tuple(bytes(words) for words in self._watch) if self._watch else repr(generator.state)
        found["Python"] = bytes(self._python) if self._python is not None else random.getstate()
        if torch.cuda.is_initialized():
            found["CUDA"] = tuple((g.initial_seed(), g.get_offset()) for g in torch.cuda.default_generators)
        return found


def _numpy_words(generator: Any) -> list[Any]:
    """The first word of numpy's Mersenne Twister and its place; none for another generator."""
    if not isinstance(generator, MT19937):
        return []
    address = generator.ctypes.state_address  # of uint32 key[624] and int pos
    return [(ctypes.c_char * 4).from_address(address), (ctypes.c_char * 4).from_address(address + 4 * 624)]


def _python_words() -> Any:
    """The place of Python's Mersenne Twister and its first word: they lie behind the head of its object.

    None where they do not, as another one shows whose words are known.
    """
    trial = random.Random(1)
    random.Random.random(trial)
    words = trial.getstate()[1]
    expected = np.array([words[-1], words[0]], np.uint32).tobytes()
    if bytes(_behind_head(trial)) != expected:
        return None
    return _behind_head(getattr(random, "_inst"))  # noqa: B009


def _behind_head(value: Any) -> Any:
    return (ctypes.c_char * 8).from_address(id(value) + object.__basicsize__)


def refuse_moved(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises if a generator that everybody shares was used in a forward pass."""
    moved = [name for name, place in after.items() if before.get(name, place) != place]
    if moved:
        raise UnsupportedError(
            f"The forward pass drew from {moved[0]}'s global generator, or seeded it. Random numbers under a seed that others "
            "may know void the guarantee: they go by position in the batch, so that one unit more changes everybody's. Draw "
            "them inside of forward() with operations such as F.dropout, torch.rand, torch.bernoulli, torch.randint or "
            "torch.multinomial, whose numbers then come from the engine's secret key."
        )
