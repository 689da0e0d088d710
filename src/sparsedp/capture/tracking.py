"""Where the units are: follows the unit axis of every tensor that is computed from a batch.

Clipping needs to know which part of an activation belongs to which unit. A model may transpose, flatten or stack its
activations, so the position of the units is followed through the forward pass instead of being guessed from sizes (a
sequence as long as the batch is large would fool a guess). Only operations that are listed here keep an axis: anything
else makes it unknown, and a parameter that meets an activation with unknown units is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.inputs import advice
from sparsedp.errors import UnitsMixedError


class UnitAxis(NamedTuple):
    """Units lie along dimension `dim`: index i of it belongs to unit (i // inner) mod units."""

    dim: int
    inner: int = 1

    def shifted(self, by: int) -> UnitAxis:
        return UnitAxis(self.dim + by, self.inner)

    def fits(self, shape: Sequence[int], units: int) -> bool:
        if not 0 <= self.dim < len(shape):
            return False
        block = units * self.inner
        return shape[self.dim] == 0 if block == 0 else shape[self.dim] > 0 and shape[self.dim] % block == 0


@dataclass(frozen=True)
class UnitData:
    """A tensor that depends on the batch. `axis` is None where the position of the units is not known."""

    axis: UnitAxis | None


@dataclass(frozen=True)
class Mixed:
    """A tensor in which the units of a batch were reduced to one value, such as a batch mean."""

    operation: str


@dataclass(frozen=True)
class WholeBatch(Mixed):
    """An input of forward() without an axis of units, by its name, or what was made of it: all units may decide it.

    Bags with offsets may be made of such inputs: flat ids, weights and offsets say themselves whose an id is, as long as each
    value is made of the one in its place alone (`in_order`).
    """

    in_order: bool = True


Info = UnitData | Mixed


def unit_first(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """The tensor with its units on axis 0: (units, ...). Other positions keep their order."""
    shape = tensor.shape
    if axis.inner == 1 and shape[axis.dim] == units:
        return tensor.movedim(axis.dim, 0) if axis.dim else tensor
    outer = shape[axis.dim] // (units * axis.inner) if units else 0
    split = tensor.reshape(*shape[: axis.dim], outer, units, axis.inner, *shape[axis.dim + 1 :])
    return split.movedim(axis.dim + 1, 0)


class Call(NamedTuple):
    """One operation on activations."""

    name: str
    args: tuple
    kwargs: dict
    out: Tensor
    units: int
    data: int = 1  # how many of the operands depend on the batch

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def numbers(self, position: int, *names: str) -> list[int]:
        """Sizes or dimensions, given as view(2, 3), view((2, 3)) or by name."""
        value = self.argument(position, *names)
        if isinstance(value, (tuple, list, torch.Size)):
            return list(value)
        rest = [v for v in self.args[position:] if isinstance(v, int)]
        return rest if rest else ([] if value is None else [value])


# A rule gives the axis in the result for one operand and its axis: None if it is lost, Mixed if units are combined.
Rule = Callable[[Call, Tensor, UnitAxis], "UnitAxis | Mixed | None"]
_RULES: dict[str, Rule] = {}
# Operations whose operands all carry units: each is followed, and they must agree.
_JOINT: set[str] = set()


def _rule(*names: str, joint: bool = False) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        if joint:
            _JOINT.update(names)
        return rule

    return register


def is_followed(name: str) -> bool:
    """Whether there is a rule for an operation."""
    return plain_name(name) in _RULES


def plain_name(name: str) -> str:
    """The name without the underscore of in-place operations."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def follow(
    name: str,
    args: tuple,
    kwargs: dict,
    operands: list[tuple[Tensor, Info]],
    out: Tensor,
    units: int,
    where: Callable[[], str],
) -> Info:
    """What is known of `out`, the result of an operation on `operands`; raises if it mixes units for certain."""
    call = Call(plain_name(name), args, kwargs, out, units, len(operands))
    if len(operands) == 1 and (simple := _follow_alone(call, *operands[0])) is not None:
        return simple
    mixed = [info for _, info in operands if isinstance(info, Mixed)]
    if mixed:
        whole = [info for info in mixed if isinstance(info, WholeBatch)]
        return _follow_mixed(call, operands, (whole or mixed)[0], where)
    placed = [
        (tensor, info.axis)
        for tensor, info in operands
        if isinstance(info, UnitData) and info.axis is not None and info.axis.fits(tensor.shape, units)
    ]
    rule = _RULES.get(call.name)
    if rule is None and len(operands) > 1 and out.requires_grad and units > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} joins several activations in a way that is not followed, so it may mix units. "
            "Write it with matmul, einsum or elementwise operations."
        )
    if not placed or rule is None:
        return UnitData(None)
    joint = call.name in _JOINT
    if len(placed) < len(operands) and joint and units > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} combines units with a tensor in which their position is not known, so it may give "
            "one unit a part of another. Keep the batch on an axis of its own, and do not permute or select along it."
        )
    if not joint and (len(operands) > 1 or operands[0][0] is not _first(args, kwargs)):
        return UnitData(None)
    if call.name in _LOSSES and units > 1 and len({_place_in_loss(call, *pair) for pair in placed}) > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} compares predictions and targets whose units are in different places. Give both the "
            "same order."
        )
    found = {rule(call, tensor, axis) for tensor, axis in placed}
    lost = None in found
    combinations = sorted((axis for axis in found if isinstance(axis, Mixed)), key=_is_linear)
    combined = combinations[0] if combinations else None  # one that is not linear, if there is any
    axes = {axis for axis in found if isinstance(axis, UnitAxis) and axis.fits(out.shape, units)}
    if combined is not None:
        if out.requires_grad and combined.operation not in _LINEAR_REDUCTIONS and units > 1:
            raise UnitsMixedError(
                f"Operation '{name}'{where()} combines the units of the batch, so one unit's loss depends on the others and "
                "clipping bounds nothing. Use per-unit statistics (LayerNorm instead of BatchNorm), and batch_first=True "
                "where the batch comes first."
            )
        return combined
    if len(axes) > 1 and units > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} compares every unit of the batch with every other one (in-batch negatives?), so "
            "one unit's loss depends on the others and clipping bounds nothing. Draw negatives from a public distribution "
            "instead."
        )
    return UnitData(axes.pop() if axes and not lost else None)


def _follow_alone(call: Call, tensor: Tensor, info: Info) -> UnitData | None:
    """What `follow` finds for the only operand, where that is soon said: units in a known place that do not mix."""
    rule = _RULES.get(call.name)
    if rule is None or not isinstance(info, UnitData) or info.axis is None:
        return None
    if call.name not in _JOINT and tensor is not _first(call.args, call.kwargs):
        return None
    axis = rule(call, tensor, info.axis)
    if not isinstance(axis, UnitAxis):
        return None
    return UnitData(axis if axis.fits(call.out.shape, call.units) else None)


# What may be done with a value that was summed over the batch: it must stay linear in the units' parts.
_LINEAR_REDUCTIONS = {"sum", "mean"}
_LINEAR_ON_MIXED = {"add", "radd", "sub", "rsub", "neg", "sum", "mean", "stack", "cat", "clone", "detach", "to", "float",
                    "double", "squeeze", "unsqueeze", "reshape", "view", "flatten", "getitem", "expand"}  # fmt: skip


def _is_linear(mixed: Mixed) -> bool:
    return mixed.operation in _LINEAR_REDUCTIONS


_DIVISION = {"div", "truediv", "divide", "true_divide"}


def _follow_mixed(call: Call, operands: list[tuple[Tensor, Info]], mixed: Mixed, where: Callable[[], str]) -> Info:
    if isinstance(mixed, WholeBatch):
        if _is_bag_of_each(call, operands):
            return UnitData(UnitAxis(0))
        meets = any(isinstance(info, UnitData) for _, info in operands) or call.out.requires_grad
        if call.units > 1 and meets:
            raise UnitsMixedError(
                f"Operation '{call.name}'{where()} lets the units of the batch meet the input '{mixed.operation}', which has no "
                f"axis of units, so that all of them may decide it. {advice(mixed.operation)}"
            )
        return WholeBatch(mixed.operation, _keeps_order(call, operands))
    if call.units > 1 and any(isinstance(info, UnitData) for _, info in operands):
        raise UnitsMixedError(
            f"Operation '{call.name}'{where()} combines each unit with '{mixed.operation}' over the whole batch, so one unit's "
            "loss depends on the others and clipping bounds nothing. Use per-unit statistics (LayerNorm instead of "
            "BatchNorm), or reduce over the batch only in the loss."
        )
    alone = len(operands) == 1
    scaled = alone and (
        call.name in ("mul", "rmul", "multiply") or (call.name in _DIVISION and operands[0][0] is call.args[0])
    )
    linear = call.name in _LINEAR_ON_MIXED or scaled
    if call.out.requires_grad and not linear and call.units > 1:
        raise UnitsMixedError(
            f"Operation '{call.name}'{where()} acts on a sum or mean over the whole batch. The loss must be a mean or sum over "
            "units of something that each unit decides alone, divided by constants only."
        )
    return mixed


# What leaves the values of bags, which lie end to end, in their order.
_IN_ORDER = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "getitem", "narrow", "split", "chunk", "tensor_split",
             "split_with_sizes", "unbind", "select"}  # fmt: skip


def _keeps_order(call: Call, operands: list[tuple[Tensor, Info]]) -> bool:
    """Whether each value of the result is made of the values in the same place of flat inputs, and of constants."""
    if not all(isinstance(info, WholeBatch) and info.in_order for _, info in operands):
        return False
    if call.name in POINTWISE:
        return all(tensor.shape == call.out.shape for tensor, _ in operands)
    index = call.args[1] if call.name == "getitem" else ()
    return call.name in _IN_ORDER and not any(map(_is_advanced, index if isinstance(index, tuple) else (index,)))


def _first(args: tuple, kwargs: dict) -> Any:
    if args:
        return args[0][0] if isinstance(args[0], (tuple, list)) and args[0] else args[0]
    return kwargs.get("input")


# ---------------------------------------------------------------------- elementwise


def _pointwise_names() -> set[str]:
    """What torch itself tags as pointwise, the operators, and layers that act on each element."""
    names = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads):
            names.add(plain_name(name.strip("_") if name.startswith("__") else name))
    names -= {"max", "min"}  # reductions as well: these have their own rule
    operators = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
    names |= {prefix + name for name in operators for prefix in ("", "r", "i")}
    return names | {
        "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "bool", "float", "double", "half", "long", "int",
        "type", "to", "cpu", "clone", "detach", "contiguous", "requires_grad", "dropout", "alpha_dropout", "feature_dropout",
        "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "softsign", "logsigmoid", "tanhshrink", "hardswish",
        "rrelu", "multiply", "subtract", "divide", "floor_divide", "negative", "absolute", "fix", "masked_fill", "nan_to_num",
        "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "bernoulli", "copysign", "greater",
        "less", "greater_equal", "less_equal", "not_equal", "type_as", "copy", "zero", "fill", "randint_like", "uniform",
        "normal", "exponential", "geometric", "cauchy", "log_normal", "random", "poisson", "binomial", "_standard_gamma",
        "native_dropout", "broadcast_tensors", "threshold", "_threshold", "bfloat16", "resolve_conj", "resolve_neg", "rdiv",
        "arccos", "arcsin", "arctan", "arctan2", "arccosh", "arcsinh", "arctanh",
    }  # fmt: skip


def _aligned(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """Broadcasting aligns dimensions from the right."""
    moved = axis.shifted(call.out.ndim - source.ndim)
    return moved if moved.dim >= 0 and call.out.shape[moved.dim] == source.shape[axis.dim] else None


POINTWISE = frozenset(_pointwise_names())
for _name in POINTWISE:
    _RULES[_name] = _aligned
    _JOINT.add(_name)


# ---------------------------------------------------------------------- reductions and what acts along a dimension

# Position of the dimension among the arguments, and its default: "all" reduces everything.
_REDUCTIONS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        ("sum", "mean", "std", "var", "amax", "amin", "prod", "logsumexp", "any", "all", "nanmean", "nansum", "std_mean",
         "var_mean", "argmax", "argmin", "count_nonzero", "max", "min", "median", "nanmedian", "aminmax"), (1, "all"),
    ),
    **dict.fromkeys(("norm", "vector_norm", "quantile", "nanquantile"), (2, "all")),
    "kthvalue": (2, -1),
    "mode": (1, -1),
}  # fmt: skip
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), (1, None)
    ),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, -1)),
    "topk": (2, -1),
    "normalize": (2, 1),
    "gumbel_softmax": (4, -1),
    "diff": (2, -1),
}
_ALONG |= dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"), (2, -1))
_ALONG |= dict.fromkeys(("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"), (2, (-2, -1)))
_ALONG |= dict.fromkeys(("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"), (2, "all"))
_SHUFFLING: dict[str, tuple[int, Any]] = {
    "flip": (1, None),
    "roll": (2, None),
    "rot90": (2, (0, 1)),
    "fft_fftshift": (1, "all"),
    "fft_ifftshift": (1, "all"),
}


def _dims(call: Call, position: int, default: Any, ndim: int) -> set[int] | None:
    """The dimensions that an operation acts along; None if that cannot be told."""
    value = call.argument(position, "dim", "axis", "dims", default=default)
    if call.name == "flip" and len(call.args) > 2:
        value = list(call.args[1:])
    if value is None or (isinstance(value, (tuple, list)) and not value):
        value = default
    if value == "all":
        return set(range(ndim))
    if isinstance(value, int) and not isinstance(value, bool):
        return {value % max(ndim, 1)}
    if isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value):
        return {v % max(ndim, 1) for v in value}
    return None


@_rule(*_REDUCTIONS, joint=True)
def _reduction(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if call.name in ("max", "min") and isinstance(call.argument(1, "other"), Tensor):
        return _aligned(call, source, axis)
    dims = _dims(call, *_REDUCTIONS[call.name], source.ndim)
    if dims is None:
        return None
    if axis.dim in dims:
        return Mixed(call.name)
    if call.name in ("quantile", "nanquantile") and torch.as_tensor(call.argument(1, "q")).ndim:
        return None  # several quantiles come first, on a dimension of their own
    return axis if call.out.ndim == source.ndim else axis.shifted(-sum(1 for d in dims if d < axis.dim))


@_rule(*_ALONG)
def _along(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    dims = _dims(call, *_ALONG[call.name], source.ndim)
    if dims is None:
        return None
    return Mixed(call.name) if axis.dim in dims else axis


@_rule(*_SHUFFLING)
def _shuffling(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    dims = _dims(call, *_SHUFFLING[call.name], source.ndim)
    return Mixed(call.name) if dims is None or axis.dim in dims else axis


@_rule("fliplr", "flipud")
def _flip_fixed(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return Mixed(call.name) if axis.dim == (1 if call.name == "fliplr" else 0) else axis


@_rule("prelu")
def _prelu(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    """Elementwise, where the slopes are constant."""
    return axis


# Operations on the matrices in the last two dimensions, each by itself.
_ON_MATRICES = ("inverse", "det", "logdet", "slogdet", "cholesky", "cholesky_inverse", "qr", "svd", "pinverse", "matrix_exp",
                "matrix_power", "linalg_inv", "linalg_inv_ex", "linalg_det", "linalg_slogdet", "linalg_cholesky",
                "linalg_cholesky_ex", "linalg_qr", "linalg_svd", "linalg_svdvals", "linalg_eigh", "linalg_eigvalsh",
                "linalg_pinv", "linalg_matrix_power", "linalg_matrix_exp", "linalg_cond")  # fmt: skip


@_rule(*_ON_MATRICES)
def _on_matrices(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return axis if axis.dim < source.ndim - 2 else Mixed(call.name)


@_rule("layer_norm", "rms_norm")
def _trailing_norm(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    shape = call.argument(1, "normalized_shape")
    count = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    return axis if axis.dim < source.ndim - count else Mixed(call.name)


@_rule("cosine_similarity", "pairwise_distance", joint=True)
def _compare(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    default = 1 if call.name == "cosine_similarity" else -1
    ndim = max(value.ndim for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))
    dim = (call.argument(2, "dim", default=default) if call.name == "cosine_similarity" else -1) % ndim
    moved = axis.shifted(ndim - source.ndim)
    if moved.dim == dim:
        return Mixed(call.name)
    return moved if call.out.ndim == ndim else moved.shifted(-1 if dim < moved.dim else 0)


_LOSSES = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
           "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "soft_margin_loss"}  # fmt: skip
_OF_CLASSES = ("cross_entropy", "nll_loss")


def _place_in_loss(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    """Where the units are in what a loss compares: dimensions are aligned from the right, with classes from the left."""
    return axis if call.name in _OF_CLASSES else axis.shifted(-source.ndim)


@_rule(*_LOSSES, joint=True)
def _loss(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if call.name in _OF_CLASSES:
        scores = call.argument(0, "input")
        if source.ndim == scores.ndim and axis.dim == min(1, scores.ndim - 1):
            return Mixed("a softmax over units")
    reduction = call.kwargs.get("reduction", "mean")
    if reduction != "none":
        return Mixed("mean" if _counts_everything(call) else "a mean over valid positions")
    if call.name not in _OF_CLASSES:
        return _aligned(call, source, axis)
    return axis if axis == UnitAxis(0) and call.out.ndim and call.out.shape[0] == source.shape[0] else None


@_rule("table_softmax_loss", joint=True)
def _table_softmax_loss(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    fits = axis == UnitAxis(0) and source.shape[0] == call.units and source is not call.argument(1, "weight")
    return axis if fits else Mixed(call.name)  # rows of the batch as a table: in-batch negatives


@_rule("sequence_loss", joint=True)
def _sequence_loss(call: Call, source: Tensor, axis: UnitAxis) -> Mixed:
    return Mixed("mean" if axis == UnitAxis(0) else "a mean over valid positions")


def _counts_everything(call: Call) -> bool:
    """Whether a loss divides by a number that no unit's data decides."""
    if call.name not in _OF_CLASSES or call.kwargs.get("reduction", "mean") != "mean":
        return True
    target = call.argument(1, "target")
    ignored = call.kwargs.get("ignore_index", -100)
    return not (target.dtype == torch.int64 and bool((target == ignored).any())) and call.kwargs.get("weight") is None


# ---------------------------------------------------------------------- products


@_rule("matmul", "mm", "bmm", "mv", "rmatmul", joint=True)
def _product(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    left = call.argument(0, "input")
    right = call.argument(1, "other", "mat2", "vec", "tensor")
    if call.name == "rmatmul":
        left, right = right, left
    is_left, is_right = source is left, source is right
    if is_left and is_right:
        return Mixed(call.name)
    if left.ndim == 1 or right.ndim == 1:
        if is_left and left.ndim > 1 and axis.dim < left.ndim - 1:
            return axis
        return Mixed(call.name)
    if axis.dim == (source.ndim - 1 if is_left else source.ndim - 2):
        return Mixed(call.name)
    return axis.shifted(call.out.ndim - source.ndim)


@_rule("linear")
def _linear(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return axis if axis.dim < source.ndim - 1 else Mixed("linear")


@_rule("einsum", joint=True)
def _einsum(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    equation = call.args[0]
    operands = list(call.args[1]) if isinstance(call.args[1], (tuple, list)) else list(call.args[1:])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    # The same tensor may stand in several places, with its units under several letters.
    letters = {term[axis.dim] for term, operand in zip(inputs.split(","), operands) if operand is source}
    if len(letters) != 1:
        return Mixed("einsum")
    letter = letters.pop()
    return UnitAxis(output.index(letter), axis.inner) if letter in output else Mixed("einsum")


@_rule("scaled_dot_product_attention", joint=True)
def _attention(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    is_mask = source is call.argument(3, "attn_mask")
    if axis.dim >= source.ndim - 2 and not is_mask:
        return Mixed(call.name)
    return axis.shifted(call.out.ndim - source.ndim)


@_rule("cdist", joint=True)
def _cdist(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return axis.shifted(call.out.ndim - source.ndim) if axis.dim < source.ndim - 2 else Mixed("cdist")


# ---------------------------------------------------------------------- layers that keep the batch in front

_SPATIAL = {
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("conv", "conv_transpose")},
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")},
    **{f"fractional_max_pool{n}d{kind}": n for n in (2, 3) for kind in ("", "_with_indices")},
    **{f"{kind}max_pool{n}d_with_indices": n for n in (1, 2, 3) for kind in ("", "adaptive_")},
    "lp_pool1d": 1, "lp_pool2d": 2, "pixel_shuffle": 2, "pixel_unshuffle": 2,
}  # fmt: skip


@_rule(*_SPATIAL)
def _spatial(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    dims = _SPATIAL[call.name]
    if "pool" in call.name:  # each channel by itself
        return axis if axis.dim < source.ndim - dims else None
    return axis if axis.dim == 0 and source.ndim == dims + 2 else None


@_rule("unfold")
def _unfold(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    """`F.unfold`, of images, or `Tensor.unfold`, along a dimension."""
    if "dilation" in call.kwargs:
        return axis if axis.dim == 0 and source.ndim == 4 else None
    dim = call.argument(1, "dimension") % source.ndim
    return Mixed(call.name) if dim == axis.dim else axis


@_rule("fold")
def _fold(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis.dim == 0 and source.ndim == 3 else None


@_rule("grid_sample", "affine_grid", joint=True)
def _sampled_images(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis == UnitAxis(0) else None


@_rule("group_norm", "instance_norm", "batch_norm", "interpolate", "upsample", "local_response_norm", "channel_shuffle")
def _batch_first(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis.dim == 0 and source.ndim >= 2 else None


@_rule("pad", "constant_pad_nd")
def _pad(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    padded = len(call.argument(1, "pad")) // 2
    return axis if axis.dim < source.ndim - padded else None


@_rule("multinomial", "_sample_dirichlet")
def _rows_of_weights(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    """Draws by the weights in each row."""
    return axis if axis.dim < source.ndim - 1 else Mixed(call.name)


@_rule("tril", "triu")
def _triangle(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis.dim < source.ndim - 2 else None


def _is_bag_of_each(call: Call, operands: list[tuple[Tensor, Info]]) -> bool:
    """Whether it is an embedding_bag of a constant table with offsets that give each unit its bag."""
    if call.name != "embedding_bag" or call.argument(2, "offsets") is None or call.out.shape[0] != call.units:
        return False
    return all(tensor is not call.argument(1, "weight") for tensor, _ in operands)


@_rule("embedding_bag")
def _bag(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis == UnitAxis(0) and source.ndim == 2 else None


@_rule("embedding", "one_hot", joint=True)
def _appends(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    if call.name == "one_hot" and call.argument(1, "num_classes", default=-1) == -1:
        return Mixed("as many classes as the largest id of the batch needs")
    if call.name == "embedding" and (call.data > 1 or source is call.argument(1, "weight")):
        return Mixed("looking up activations")  # of other units, by their number
    return axis  # one more dimension, at the end


# ---------------------------------------------------------------------- shape


@_rule("transpose", "swapaxes", "swapdims")
def _transpose(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    one = call.argument(1, "dim0", "axis0") % source.ndim
    other = call.argument(2, "dim1", "axis1") % source.ndim
    return UnitAxis({one: other, other: one}.get(axis.dim, axis.dim), axis.inner)


@_rule("T", "t", "H")
def _reverse(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    return UnitAxis(source.ndim - 1 - axis.dim, axis.inner)


@_rule("mT", "mH", "adjoint")
def _last_two(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    n = source.ndim
    return UnitAxis({n - 1: n - 2, n - 2: n - 1}.get(axis.dim, axis.dim), axis.inner)


@_rule("permute")
def _permute(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    dims = [d % source.ndim for d in call.numbers(1, "dims")]
    return UnitAxis(dims.index(axis.dim), axis.inner)


@_rule("movedim", "moveaxis")
def _movedim(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    # Moves a tensor whose strides number its dimensions alongside: they say where each went.
    probe = torch.empty(1).as_strided([1] * source.ndim, list(range(source.ndim)))
    where = [call.argument(1, "source"), call.argument(2, "destination")]
    return UnitAxis(torch.movedim(probe, *where).stride().index(axis.dim), axis.inner)


@_rule("unsqueeze")
def _unsqueeze(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    dim = call.argument(1, "dim", "axis") % call.out.ndim
    return axis.shifted(1 if dim <= axis.dim else 0)


@_rule("atleast_1d", "atleast_2d", "atleast_3d")
def _at_least(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    return axis.shifted(1 if source.ndim == 1 and call.out.ndim > 1 else 0)


@_rule("diag_embed")
def _diag_embed(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """The last dimension becomes the diagonal of the last two, unless others are named."""
    return axis if len(call.args) + len(call.kwargs) == 1 and axis.dim < source.ndim - 1 else None


@_rule("view_as_complex", "view_as_real")
def _complex_parts(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if call.name == "view_as_real" or axis.dim < source.ndim - 1 else None


@_rule("squeeze")
def _squeeze(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    named = call.numbers(1, "dim", "axis")
    dims = {d % max(source.ndim, 1) for d in named} if named else set(range(source.ndim))
    gone = {d for d in dims if source.shape[d] == 1}
    if axis.dim in gone:  # a batch of one, whose axis was squeezed away
        return None
    return axis.shifted(-sum(1 for d in gone if d < axis.dim))


@_rule("reshape", "view", "flatten", "unflatten", "ravel", "view_as", "reshape_as", "_unsafe_view")
def _reshape(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """Row-major order is kept, so the number of elements behind a step of one unit is, too."""
    out = call.out
    if source is not call.argument(0, "input") or out.dtype != source.dtype:
        return None
    if source.shape == out.shape:
        return axis
    if out.numel() == 0:
        return UnitAxis(0) if out.ndim and out.shape[0] == 0 else None
    behind = axis.inner * math.prod(source.shape[axis.dim + 1 :])
    count = source.shape[axis.dim] // axis.inner
    before = source.numel() // (behind * count)
    tail = out.numel()
    for dim, size in enumerate(out.shape):
        head, tail = out.numel() // tail, tail // size
        reaches = size * tail >= behind * min(count, 2)  # the step from one unit to the next lies in this dimension
        if tail <= behind and behind % tail == 0 and before % head == 0 and reaches:
            return UnitAxis(dim, behind // tail)
    return None


@_rule("stack", joint=True)
def _stack(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    dim = call.argument(1, "dim", "axis", default=0) % call.out.ndim
    return axis.shifted(1 if dim <= axis.dim else 0)


@_rule("cat", "concat", "concatenate", joint=True)
def _cat(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    pieces = call.argument(0, "tensors")
    dim = call.argument(1, "dim", "axis", default=0) % source.ndim
    if dim != axis.dim:
        return axis
    # Along the units: whole batches one after another.
    whole = axis.inner == 1 and all(piece.shape[dim] % max(call.units, 1) == 0 for piece in pieces)
    return axis if whole and call.data == len(pieces) else None


@_rule("expand", "broadcast_to", "repeat", "tile", "expand_as")
def _expand(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    return axis.shifted(call.out.ndim - source.ndim)


@_rule("repeat_interleave")
def _repeat_interleave(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    return UnitAxis(axis.dim, axis.inner * repeats) if dim % source.ndim == axis.dim else axis


@_rule("select", "unbind")
def _select(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    dim = call.argument(1, "dim", default=0) % source.ndim
    return None if dim == axis.dim else axis.shifted(-1 if dim < axis.dim else 0)


@_rule("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _parts(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    dim = call.argument(2, "dim", "axis", default=0) % source.ndim
    if dim != axis.dim:
        return axis
    # Whole batches, one after another: all parts begin where a batch does if they are equally long.
    block = call.units * axis.inner
    equal = isinstance(call.argument(1, "chunks", "split_size_or_sections", "split_size", "sections"), int)
    return axis if equal and block and call.out.shape[dim] == block and source.shape[dim] % block == 0 else None


@_rule("narrow")
def _narrow(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else None


@_rule("index_select", joint=True)
def _index_select(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if call.data > 1:
        return Mixed("indexing with ids of the batch")
    if source is not call.args[0]:
        return None
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else Mixed(call.name)


@_rule("gather", "take_along_dim", joint=True)
def _gather(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    dim = call.argument(1, "dim") if call.name == "gather" else call.argument(2, "dim")
    return axis if isinstance(dim, int) and dim % source.ndim != axis.dim else Mixed(call.name)


@_rule("scatter", "scatter_add", "scatter_reduce", joint=True)
def _scatter(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    """Along every other dimension, an element stays where its index is."""
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else Mixed(call.name)


@_rule("index_add", "index_copy", "index_fill", "index_reduce", joint=True)
def _index_along(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if source is call.argument(2, "index"):
        return Mixed("indexing with ids of the batch")
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else None


# In place: what keeps the shape and is followed as if it made a new tensor, and what changes the shape alone.
SAME_SHAPE_IN_PLACE = POINTWISE | {
    "cumsum", "cumprod", "tril", "triu", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
    "index_reduce",
}  # fmt: skip
SHAPE_IN_PLACE = frozenset({"transpose", "swapaxes", "swapdims", "t", "squeeze", "unsqueeze"})


@_rule("getitem", joint=True)
def _getitem(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    index = call.args[1]
    if source is not call.args[0]:
        # An index that comes from the batch: fine as a mask, or beside an index that counts the units.
        if source.dtype == torch.bool:
            return None
        if call.data == 1 and index is source:  # rows of a constant table
            return axis
        first = index[0] if isinstance(index, tuple) else index
        fits = (
            axis == UnitAxis(0) and _counts_units(call) and source.ndim == first.ndim
        )  # fewer would lie further right
        return axis if fits else Mixed("indexing with ids of the batch")
    items = list(index) if isinstance(index, tuple) else [index]
    if any(map(_is_advanced, items)):
        if axis != UnitAxis(0):
            return None
        return axis if _counts_units(call) or _leaves_first_alone(items, source.ndim) else None
    return _basic_getitem(call, source, axis, items)


def _is_advanced(item: Any) -> bool:
    """Whether an index is made of numbers or of a mask: a tensor, a list, an array, a tuple within a tuple."""
    is_number = isinstance(item, Integral) and not isinstance(item, bool)
    return not (item is None or item is Ellipsis or isinstance(item, slice) or is_number)


def _leaves_first_alone(items: list, ndim: int) -> bool:
    """x[:, i, j] and x[..., i]: advanced indices side by side, behind the first dimension, stay where they are."""
    advanced = [n for n, item in enumerate(items) if _is_advanced(item)]
    side_by_side = advanced[-1] - advanced[0] == len(advanced) - 1
    first = items[0]
    whole = isinstance(first, slice) and first == slice(None)
    taken = sum(_dimensions_taken(item) for item in items)
    return side_by_side and (whole or (first is Ellipsis and taken < ndim))


def _dimensions_taken(item: Any) -> int:
    """How many dimensions an index stands for: a mask for as many as it has, any other for one."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = _is_advanced(item) and torch.as_tensor(item).dtype == torch.bool
    return torch.as_tensor(item).ndim if is_mask else 1


def _counts_units(call: Call) -> bool:
    """x[torch.arange(B), ...]: every unit takes from itself."""
    index = call.args[1]
    first = index[0] if isinstance(index, tuple) else index
    if not isinstance(first, Tensor) or first.dtype == torch.bool or first.ndim == 0:
        return False
    if first.shape[0] != call.units or call.args[0].shape[0] != call.units:
        return False
    others = index[1:] if isinstance(index, tuple) else ()
    if any(_is_advanced(item) and torch.as_tensor(item).ndim > first.ndim for item in others):
        return False  # which puts another dimension before the units
    flat = first.reshape(first.shape[0], -1)
    return bool((flat == torch.arange(first.shape[0], device=first.device)[:, None]).all())


def _basic_getitem(call: Call, source: Tensor, axis: UnitAxis, items: list) -> UnitAxis | None:
    """Integers, slices, None and Ellipsis."""
    taken = sum(1 for item in items if item is not None and item is not Ellipsis)
    dim = out_dim = 0
    for item in items if Ellipsis in items else [*items, Ellipsis]:
        if item is None:
            out_dim += 1
        elif item is Ellipsis:
            span = source.ndim - taken
            if dim <= axis.dim < dim + span:
                return UnitAxis(out_dim + axis.dim - dim, axis.inner)
            dim, out_dim = dim + span, out_dim + span
        elif isinstance(item, slice):
            if dim == axis.dim:
                start, stop, step = item.indices(source.shape[dim])
                block = max(call.units * axis.inner, 1)
                whole = step == 1 and start % block == 0 and (stop - start) % block == 0
                return UnitAxis(out_dim, axis.inner) if whole else None
            dim, out_dim = dim + 1, out_dim + 1
        else:  # an integer takes its dimension away
            if dim == axis.dim:
                return None
            dim += 1
    return None


def written_axis(target: Tensor, index: Any, value_axis: UnitAxis, value: Tensor, units: int) -> UnitAxis | None:
    """The unit axis of a constant `target` after target[index] = value: where reading it back finds the value's units."""
    part = target[index]
    wanted = value_axis.shifted(part.ndim - value.ndim)
    call = Call("getitem", (target, index), {}, part, units)
    found = [
        UnitAxis(dim)
        for dim, size in enumerate(target.shape)
        if size == units and _getitem(call, target, UnitAxis(dim)) == wanted
    ]
    return found[0] if len(found) == 1 else None
