"""What each random operation of torch draws, from the numbers that a key decides instead of torch's generator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import special
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.errors import UnsupportedError

if TYPE_CHECKING:
    from sparsedp.capture.randomness import Draws


class Replaced(TorchDispatchMode):
    """Within it the operations that torch is made of draw from `draws`; those that it cannot replace are refused."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        """Runs one that torch tags as random and that has no law here: by its parts, or as it is if it draws nothing."""
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
_Law = Callable[["Draws", dict[str, Any]], Any]
_LAWS: dict[Any, _Law] = {}


def _law(*names: str) -> Callable[[_Law], _Law]:
    def register(law: _Law) -> _Law:
        for name in names:
            _LAWS[getattr(torch.ops.aten, name)] = law
        return law

    return register


def mantissa_bits(dtype: torch.dtype) -> int:
    """Bits of a float's mantissa: integers up to 2^bits are exact."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def drawn_dtype(dtype: torch.dtype) -> torch.dtype:
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
        parts = draws.standard_normal((*target.shape, 2), drawn_dtype(target.dtype)).mul_(math.sqrt(0.5))
        values = torch.view_as_complex(parts)
    else:
        values = draws.standard_normal(target.shape, drawn_dtype(target.dtype))
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
    values = draws.standard_normal(target.shape, drawn_dtype(target.dtype))
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
        most = 1 << mantissa_bits(target.dtype) if floating else 1 if target.dtype == torch.bool else _largest(target)
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
    least = np.ceil(invert(u, *parameters))
    below = np.maximum(least - 1, 0)  # in case that the inverse was a little too large
    return torch.from_numpy(np.asarray(np.where(cumulate(below, *parameters) >= u, below, least))).to(device, dtype)


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
