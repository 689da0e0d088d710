"""Proves a model and its loss fit for private training, on some examples, in float64 where the model can.

For some units of the batch, three gradients are compared: (a) the one that ordinary autograd gives for the unit alone,
(b) the captured one for the unit alone, (c) the captured one for the unit among the others. If (a) and (b)
differ, capture is wrong; if (b) and (c) differ, units mix. Where a data loader is given, the unit alone and the unit among the
others are collated anew, so that what the collate function makes of a whole batch is seen, too.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsedp.capture import (
    Capture,
    Captured,
    RepeatedDraws,
    Replaced,
    RowSparse,
    change_jagged,
    is_jagged,
    jagged_units,
    join_digests,
    take_of_jagged,
)  # fmt: skip
from sparsedp.capture.compiled import WithoutCompilation
from sparsedp.capture.precision import LOW_PRECISION
from sparsedp.clipping import Clipping
from sparsedp.counting import arguments_of
from sparsedp.errors import (
    NonFiniteGradientError,
    SparseDPError,
    SparseDPWarning,
    UnitsMixedError,
    UnsupportedError,
    refuse_labels,
)  # fmt: skip
from sparsedp.fused import replace_fused
from sparsedp.refusals import refuse_module
from sparsedp.sampling import BatchInfo, PrivateLoader, collate_anew
from sparsedp.tables import sharded_parts

# Of a unit's gradient. In float32 rounding is some 1e-7 in each operation and grows with the depth of a model and with the root
# of the number of terms of a sum: 1e-3 is above that, and below what batch statistics or a divisor of the batch change.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_COLLATED = 16  # examples of a data loader that are looked at together, if its batches are not smaller
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class CheckReport:
    """What was compared, in which type of numbers, and the largest relative difference that was found."""

    units: int
    parameters: int
    largest_difference: float
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        text = (
            f"Checked {self.parameters} parameters on {self.units} units: captured gradients are exact, "
            "units do not mix, "
            f"clipping holds (largest relative difference {self.largest_difference:.1e})."
        )
        if self.dtype == torch.float64:
            return text
        return (
            f"{text} The model does not run in float64, so this was in float32, where differences up to "
            f"{TOLERANCES[self.dtype]:.0e} pass for rounding."
        )


def check(
    module: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any = None,
    *,
    units: int = 4,
    loss_reduction: str = "mean",
    take: Callable[[Any, list[int]], Any] | None = None,
    data_loader: DataLoader | None = None,
    replace_recurrent: bool = False,
) -> CheckReport:
    """Raises, naming the parameter and the likely cause, if `module` and `loss_fn` do not keep units apart.

    `batch` is what the loader yields: (inputs..., target), for loss_fn(module(*inputs), target), a dict, for
    loss_fn(module(**batch), batch), or an object of a dataclass, for loss_fn(module(batch), batch). At most `units` of its
    units are looked at, each alone and among the others, with the same random numbers, such as dropout's masks.
    `take(batch, indices)` picks units out of a batch that is not made of tensors with the units on axis 0. The module itself is
    left as it is.

    With a `data_loader`, the user's own or the private one, batches are made of examples of its data set by its collate
    function, anew for each unit alone. That also finds what the collate function makes of a whole batch: the length of its
    longest example, or a number to divide by, which is refused by its name. `batch` may then be left out.

    `replace_recurrent` is as in `make_private`.
    """
    if batch is None and data_loader is None:
        raise SparseDPError("There is nothing to check on: give check a batch, or data_loader=.")
    if batch is None and take is not None:
        raise SparseDPError("take picks units out of a batch: without a batch leave it out.")
    comparisons: list[_Comparison] = []
    if batch is not None:
        choose = take or take_units
        total = count_units(batch) if take is None else len_of(batch)
        comparisons.append((batch, total, lambda whole, unit, copies: choose(whole, [unit] * copies)))
    if data_loader is not None:
        count = max(2, min(_COLLATED, data_loader.batch_size or _COLLATED))
        batch, total, copies_of = collate_anew(data_loader, count, examined=isinstance(data_loader, PrivateLoader))
        comparisons.append((batch, total, lambda _, unit, copies: copies_of(unit, copies)))
    trial = None
    try:
        with default_dtype(torch.float64):
            trial = Trial(module, loss_fn, loss_reduction, replace_recurrent, torch.float64)
            return _compare_all(trial, comparisons, units)
    except NonFiniteGradientError:
        pass  # masks with float32's smallest number, say, do not mask in float64: float32 tells whether a step would end there
    except SparseDPError:
        if trial is None or all(parameter.dtype == torch.float64 for parameter in trial.parameters.values()):
            raise  # else the model itself made float32 of some parameters, by module.float() in forward()
    except RuntimeError as error:
        if not is_of_dtypes(error):
            raise
    # Often the model makes float32 numbers itself, by float() or out of numpy's, and these meet float64 ones.
    return _compare_all(Trial(module, loss_fn, loss_reduction, replace_recurrent, torch.float32), comparisons, units)


def memory_of_check(module: nn.Module) -> int:
    """The bytes that `check` takes beside a module, about: a copy, and of what is trained three gradients, in float64."""
    trained = [p.numel() for p in module.parameters() if p.requires_grad]
    return 8 * (sum(p.numel() for p in module.parameters()) + 2 * sum(trained) + max(trained, default=0))


def is_of_dtypes(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and bool(re.search(r"dtype|scalar type|data type|Double", str(error)))


# What gives so many copies of a unit of a batch, as a batch.
_Take = Callable[[Any, int, int], Any]
# A batch, its number of units, and what gives a unit of it alone.
_Comparison = tuple[Any, int, _Take]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For numbers that a model makes in forward, by torch.zeros and the like."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _compare_all(trial: Trial, comparisons: list[_Comparison], units: int) -> CheckReport:
    reports = [_compare(trial, trial.converted(batch), total, units, take) for batch, total, take in comparisons]
    return CheckReport(
        max(report.units for report in reports), len(trial.parameters),
        max(report.largest_difference for report in reports), trial.dtype,
    )  # fmt: skip


def _compare(trial: Trial, batch: Any, total: int, units: int, take: _Take) -> CheckReport:
    """Compares some units of a batch of `total` units with what `take(batch, unit, 1)` gives for each alone."""
    if total < 2:
        raise SparseDPError(f"A batch of at least 2 units is needed to see whether units mix; this one has {total}.")
    looked_at = list(range(min(units, total)))
    trial.draws.together(total)
    together = trial.captured(batch, total)
    norms = together.norms()
    largest = 0.0
    for index in looked_at:
        largest = max(largest, _compare_unit(trial, batch, total, index, take, together, float(norms[index])))
    return CheckReport(len(looked_at), len(trial.parameters), largest, trial.dtype)


def _compare_unit(
    trial: Trial, batch: Any, total: int, index: int, take: _Take, together: _Observed, norm_among: float
) -> float:
    """The largest difference that was found for a unit. At most three gradients of the size of the module are held at a time."""
    largest, tolerance = 0.0, TOLERANCES[trial.dtype]
    reference, captured_alone, copies = _alone(trial, batch, index, take)
    if captured_alone.digests != together.digests:
        raise UnitsMixedError(
            "The loss has terms that depend on parameters alone (penalties), and they are not the same for one unit and for "
            f"{total}. Nothing clips such a term: it must not depend on the batch, nor on how many units that has."
        )
    for name in captured_alone.public.keys() & reference.keys():
        reference[name] = reference[name] - captured_alone.public[name]
    if trial.reduction == "sum" and copies > 1:
        reference = {name: value / copies for name, value in reference.items()}
    size = max(float(value.norm()) for value in reference.values()) or 1.0
    by_capture = captured_alone.gradient(0)
    gaps = {name: _gap(by_capture.get(name), wanted, size) for name, wanted in reference.items()}
    del by_capture
    among = together.gradient(index)
    for name, wanted in reference.items():
        gap = gaps[name]
        if not gap <= tolerance:  # also if it is not a number
            raise _differing(name, gap, trial.is_random(trial.converted(take(batch, index, copies)), index))
        shift = _gap(among.get(name), wanted, size)
        if not shift <= tolerance:
            raise UnitsMixedError(_mixing_message(name, shift, among, reference, trial.reduction, total))
        largest = max(largest, gap, shift)
    norm = torch.stack([value.square().sum() for value in among.values()]).sum().sqrt()
    factor = Clipping(1.0).factors(torch.tensor([norm_among], dtype=torch.float64))[0]
    if not float(norm * factor) <= 1 + tolerance:
        raise SparseDPError(f"Unit {index} exceeds the clip bound after clipping: {float(norm * factor):.6f} > 1.")
    return largest


def _differing(name: str, gap: float, is_random: bool) -> SparseDPError:
    """The error for a captured gradient that is not the one of ordinary autograd."""
    if is_random:
        return SparseDPError(
            f"The gradient of parameter '{name}' for the same unit alone is not the same twice: the model or its loss draws "
            "random numbers where they are not seen (numpy's, Python's, or a generator of its own?), or keeps something from "
            "pass to pass. Draw them with torch operations such as torch.rand or F.dropout, without a generator: in a private "
            "step they then come from the engine's secret key."
        )
    return SparseDPError(
        f"The captured gradient of parameter '{name}' differs from the true one by {gap:.1e} of its size. "
        "Please report this model."
    )


def _alone(trial: Trial, batch: Any, unit: int, take: _Take) -> tuple[Gradients, _Observed, int]:
    """The gradients of a unit alone by ordinary autograd, what was captured of it, and of how many copies both are.

    Some models do not run on a batch of one unit, by a squeeze() without a dimension, say. They run on two copies of it: if
    units do not mix, the loss of these is the unit's own loss, or twice that.
    """
    trial.draws.alone(unit)
    try:
        alone = trial.converted(take(batch, unit, 1))
        reference = trial.ordinary(alone, unit)
        trial.draws.alone(unit)
        return reference, trial.captured(alone, 1), 1
    except SparseDPError:
        raise
    except Exception as error:
        if is_of_dtypes(error) or trial.draws.has_drawn:
            raise
        try:
            trial.draws.together(2)
            pair = trial.converted(take(batch, unit, 2))
            result = trial.ordinary(pair, unit), trial.captured(pair, 2), 2
        except SparseDPError:
            raise
        except Exception:
            raise error from None  # it does not run on two either
        warnings.warn(
            f"The module or its loss does not run on a batch of one unit ({type(error).__name__}: {error}), so two copies of "
            "each were compared. Poisson sampling draws such batches now and then, and training would end there. Often it is "
            "a squeeze() that takes the axis of the batch, too: squeeze(-1) does not.",
            SparseDPWarning,
            stacklevel=6,
        )
        return result


def _mixing_message(name: str, shift: float, among: Gradients, alone: Gradients, reduction: str, units: int) -> str:
    """Names the likely cause: a common factor on all gradients means a divisor, anything else a dependence."""
    start = (
        f"Units mix: the gradient of parameter '{name}' for one unit changes by {shift:.1e} of its size when the other "
        "units of the batch change. "
    )
    mine = torch.cat([value.flatten() for value in alone.values()])
    theirs = torch.cat(
        [among[key].flatten() if key in among else torch.zeros_like(alone[key]).flatten() for key in alone]
    )
    ratio = float(theirs @ mine / (mine @ mine)) if float(mine.norm()) else 0.0
    proportional = float((theirs - ratio * mine).norm()) <= 1e-5 * float(theirs.norm())
    if not proportional:
        return start + (
            "Likely cause: batch statistics (BatchNorm, subtracting a batch mean), in-batch negatives, sorting and sampling "
            "across the batch, or padding to the longest example that is not masked. Make each unit's loss a function of that "
            "unit alone."
        )
    if abs(ratio - units) < 1e-5 * units or abs(ratio * units - 1) < 1e-5:
        wanted = "sum" if reduction == "mean" else "mean"
        return (
            f"The loss looks like a {wanted} over units, not a {reduction}: gradients change by the factor {ratio:.6g} with "
            f"the number of units. Pass loss_reduction='{wanted}' to check and to make_private, or use a {reduction}."
        )
    return start + (
        f"All gradients change by the factor {ratio:.6g}. Likely cause: the loss divides by something that the whole batch "
        "decides, such as the number of valid tokens (ignore_index with mean reduction), a sum of weights, or the length of "
        "the longest example, to which others are padded. Average over each unit's own tokens first, then over units; or "
        "divide by a constant."
    )


class _Observed:
    """The captured uses of a batch, in the scale of one unit's own loss."""

    def __init__(self, captured: Captured, scale: float, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._captured, self._scale, self._shapes, self._dtype = captured, scale, shapes, dtype
        self.digests = join_digests(captured.terms)
        self.public: Gradients = {}  # of the terms of the loss that depend on parameters alone
        for term in captured.terms:
            for name, value in term.gradients().items():
                self.public[name] = self.public.get(name, 0.0) + value.double()

    def norms(self) -> Tensor:
        squares = {name: uses.squared_norms(self._captured.units) for name, uses in self._captured.uses.items()}
        for name, own in squares.items():
            if not own.isfinite().all():
                unit = int((~own.isfinite()).nonzero()[0])
                raise _not_finite(
                    [f"The gradient of parameter '{name}' is NaN or infinite for unit {unit} of the batch"]
                )
        return torch.stack(list(squares.values())).double().sum(0).sqrt() * self._scale

    def gradient(self, unit: int) -> Gradients:
        factors = torch.zeros(self._captured.units, dtype=self._dtype)
        factors[unit] = self._scale
        gradients = {}
        for name, uses in self._captured.uses.items():
            total = uses.weighted_sum(factors, self._shapes[name])
            if isinstance(total, RowSparse):
                total = torch.zeros(self._shapes[name], dtype=self._dtype).index_add_(0, total.rows, total.values)
            gradients[name] = total.double()
        return gradients


class Trial:
    """Runs a copy of the module, of type `dtype`, on batches, captured or not."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        loss_reduction: str,
        replace_recurrent: bool,
        dtype: torch.dtype,
        loop: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> None:
        """`loop(module, batch)` gives the loss in place of `loss_fn` of the module's output."""
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
        if not replace_recurrent:
            refuse_module(module)
        self._original = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.dtype = dtype
        self._module = copied_module(module).cpu()._apply(lambda tensor: _converted(tensor, dtype))
        if replace_recurrent:
            replace_fused(self._module)
            refuse_module(self._module)
        self._loss_fn, self._loop, self.reduction = loss_fn, loop, loss_reduction
        self.draws = RepeatedDraws()
        self.parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        for parameter in self.parameters.values():
            parameter.grad = None

    def converted(self, batch: Any) -> Any:
        """A batch with its floating-point numbers in the type of the module's."""
        return map_tensors(batch, lambda t: _converted(t.detach().cpu(), self.dtype))

    def _loss(self, batch: Any, captured: bool) -> Tensor:
        loss = self._loss_of_output(batch, captured) if self._loop is None else self._loss_of_loop(batch, self._loop)
        self.draws.finish()
        if loss.dim() != 0:
            raise SparseDPError(
                f"The loss has shape {tuple(loss.shape)}. It must be one number, the mean or the sum over units."
            )
        return loss

    def _loss_of_loop(self, batch: Any, loop: Callable[[nn.Module, Any], Tensor]) -> Tensor:
        with Replaced(self.draws), WithoutCompilation():
            return loop(self._module, batch)

    def _loss_of_output(self, batch: Any, captured: bool) -> Tensor:
        args, kwargs, target = arguments_of(batch)
        # Capture itself replaces what forward draws, and runs compiled parts uncompiled.
        with nullcontext() if captured else Replaced(self.draws), WithoutCompilation():
            out = self._module(*args, **kwargs)
        assert self._loss_fn is not None
        with Replaced(self.draws):
            try:
                return self._loss_fn(out, target)
            except RuntimeError as error:
                refuse_labels(target, error)
                raise

    def captured(self, batch: Any, units: int) -> _Observed:
        shapes = {name: p.shape for name, p in self.parameters.items()}
        uses = self.capture(batch, BatchInfo(units, units, True, True, 0))
        return _Observed(uses, float(units) if self.reduction == "mean" else 1.0, shapes, self.dtype)

    def capture(self, batch: Any, batch_info: BatchInfo) -> Captured:
        """The uses of parameters in one pass there and back."""
        capture = Capture(self._module, self.parameters, lambda: batch_info, self.draws)
        capture.attach()
        try:
            loss = self._loss(batch, captured=True)
            if not loss.isfinite():
                raise _not_finite([f"The loss of {batch_info.units} units together is {loss.item()}"])
            loss.backward()
            captured = capture.collect()
        finally:
            capture.detach()
        if captured is None:
            raise SparseDPError("The loss does not depend on any trained parameter of the module.")
        return captured

    def ordinary(self, batch: Any, unit: int) -> Gradients:
        """The gradients of a batch that holds `unit` alone, by ordinary autograd; raises if something is NaN or infinite."""
        values = list(self.parameters.values())
        with self._watch_outputs() as broken:
            loss = self._loss(batch, captured=False)
        outside = torch.autograd.grad(loss, list(self._original.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(self._original, outside):
            if gradient is not None:
                raise SparseDPError(
                    f"The loss uses parameter '{name}' itself, outside of the module's forward (a penalty?), where it cannot be "
                    "captured. Use weight_decay for penalties, or move the use into forward()."
                )
        grads = torch.autograd.grad(loss, values, allow_unused=True)
        gradients = {
            name: (torch.zeros_like(p) if grad is None else (grad.to_dense() if grad.is_sparse else grad)).double()
            for (name, p), grad in zip(self.parameters.items(), grads)
        }
        wrong = [f"The output of module '{broken[0]}' has NaN"] if broken else []
        wrong += [] if loss.isfinite() else [f"The loss is {loss.item()}"]
        wrong += [
            f"The gradient of parameter '{n}' is NaN or infinite"
            for n, g in gradients.items()
            if not g.isfinite().all()
        ]
        if wrong:
            raise _not_finite([f"For unit {unit} alone: {wrong[0]}", *wrong[1:]])
        return gradients

    def is_random(self, batch: Any, unit: int) -> bool:
        """Whether ordinary autograd gives other gradients for the same unit in another pass."""
        self.draws.alone(unit)
        first = self.ordinary(batch, unit)
        self.draws.alone(unit)
        second = self.ordinary(batch, unit)
        size = max(float(value.norm()) for value in first.values()) or 1.0
        return any(_gap(second[name], value, size) > TOLERANCES[self.dtype] for name, value in first.items())

    @contextmanager
    def _watch_outputs(self) -> Iterator[list[str]]:
        """Collects the names of modules whose output has NaN, in the order in which they end. Infinity may be a mask."""
        broken: list[str] = []

        def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def note_nan(module: nn.Module, args: Any, output: Any) -> None:
                def note(tensor: Tensor) -> Tensor:
                    if tensor.is_floating_point() and tensor.isnan().any():
                        broken.append(name or type(module).__name__)
                    return tensor

                map_tensors(output, note)

            return note_nan

        handles = [module.register_forward_hook(watch(name)) for name, module in self._module.named_modules()]
        try:
            yield broken
        finally:
            for handle in handles:
                handle.remove()


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the module or batch as the check has it. One in low precision stays: a step would see it as well."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype not in LOW_PRECISION else tensor


def copied_module(module: nn.Module) -> nn.Module:
    """A copy of a module. Functions that it keeps, such as `lambda h: h @ self.table.weight.T`, refer to the copy's parts."""
    if parts := sharded_parts(module):
        raise UnsupportedError(
            f"Module '{parts[0]}' ({type(module.get_submodule(parts[0])).__name__}) has its rows in several processes, and "
            "cannot be copied, as is done to try a model out. Check it before sharding: before shard, DistributedModelParallel "
            "or shard_tables, in one process, with smaller tables if need be."
        )
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, FunctionType) and value.__closure__:
                cells = [cell.cell_contents for cell in value.__closure__]
                if any(id(content) in memo for content in cells):
                    closure = tuple(CellType(memo.get(id(content), content)) for content in cells)
                    part.__dict__[name] = FunctionType(
                        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
                    )
                    part.__dict__[name].__kwdefaults__ = value.__kwdefaults__
    return copied


def _not_finite(wrong: list[str]) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"{'. '.join(wrong)}. A private step on it would be refused. Look for log(0), 0 / 0 (a mean over no valid position), "
        "sqrt at 0, a softmax over a row that is masked as a whole, and for NaN in the data."
    )


def _gap(observed: Tensor | None, wanted: Tensor, size: float) -> float:
    """How far two gradients are apart, relative to the size of the unit's gradient."""
    observed = torch.zeros_like(wanted) if observed is None else observed
    return float((observed.reshape(wanted.shape) - wanted).norm()) / size


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], of_jagged: Callable[[Any], Any] | None = None) -> Any:
    """A batch of changed tensors. Of jagged ones values and weights are changed, or `of_jagged` says what they become."""
    if isinstance(value, Tensor):
        return change(value)
    if is_jagged(value):
        return change_jagged(value, change) if of_jagged is None else of_jagged(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change, of_jagged) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        made = copy.copy(value)  # such as transformers' BatchEncoding, whose entries are attributes, too
        for key, item in items.items():
            made[key] = item
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change, of_jagged) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change, of_jagged) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed: Any = copy.copy(value)
        for each in fields(value):
            object.__setattr__(changed, each.name, map_tensors(getattr(value, each.name), change, of_jagged))
        return changed
    return value


def _sizes(batch: Any, of_jagged: Callable[[Any], Any] | None = None) -> list[int]:
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim():
            sizes.append(tensor.shape[0])
        return tensor

    map_tensors(batch, note, of_jagged or (lambda jagged: sizes.append(jagged_units(jagged))))
    return sizes


def len_of(batch: Any) -> int:
    """The number of units of a batch that only the caller can take apart: that of its last tensor, the target."""
    sizes = _sizes(batch, lambda jagged: jagged)
    return sizes[-1] if sizes else 0


def count_units(batch: Any) -> int:
    sizes = _sizes(batch)
    if len(set(sizes)) > 1:
        raise SparseDPError(
            f"The batch has tensors of {sorted(set(sizes))} rows, so its units cannot be told apart. "
            "Pass take=..., a function of the batch and a list of unit indices that returns the smaller batch."
        )
    return sizes[0] if sizes else 0


def take_units(batch: Any, indices: list[int]) -> Any:
    return map_tensors(batch, lambda t: t[indices] if t.dim() else t, lambda jagged: take_of_jagged(jagged, indices))
