"""Neighbour replay: by how much leaving one unit of a batch out moves the clipped sum, for a user's own model and loss.

The sum over units of clipped gradients moves by at most C if every unit's gradient depends on that unit alone. Here a batch
is run as a whole and without each unit in turn, with the same random numbers for the units that stay, and no noise:

    ratio_u = |S(D) - S(D without u)| / C        S(D) = sum over units of min(1, C / |g_i(D)|) g_i(D)

`sparsedp.check` proves that gradients are exact; this shows what a unit can do, also where it does it through others: by what
the loop does before it calls the model, or by the number of units. For AdaFEST the map of contributions is replayed as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.capture import RowSpace, RowSparse, join_digests
from sparsedp.check import TOLERANCES, Trial, count_units, default_dtype, is_of_dtypes, len_of, take_units
from sparsedp.clipping import Clipping
from sparsedp.contribution import contribution_map
from sparsedp.errors import NonFiniteGradientError, SparseDPError, UnitsMixedError
from sparsedp.progress import Progress, no_progress
from sparsedp.sampling import BatchInfo
from sparsedp.tables import find_tables


@dataclass(frozen=True)
class UnitReplay:
    """What one unit moved, when it was left out."""

    unit: int | str  # its place in the batch, or the user
    ratio: float  # the distance of the two sums over C
    parameters: dict[str, float]  # the same for each parameter alone; the ratio is the root of their squares' sum
    map_ratio: float | None = None  # the distance of the two maps of contributions over C1

    @property
    def worst_parameter(self) -> str:
        return max(self.parameters, key=self.parameters.__getitem__)


@dataclass(frozen=True)
class Replay:
    """What each unit moved."""

    units: tuple[UnitReplay, ...]
    max_grad_norm: float
    map_clip: float | None
    unit: str  # "example" or "user"
    batch: int  # units of the batch that they were left out of
    dtype: torch.dtype
    clipped: int = field(default=0)  # units of the whole batch whose gradients were longer than C

    @property
    def worst(self) -> UnitReplay:
        return max(self.units, key=lambda replayed: replayed.ratio)

    @property
    def worst_of_map(self) -> UnitReplay | None:
        mapped = [replayed for replayed in self.units if replayed.map_ratio is not None]
        return max(mapped, key=lambda replayed: replayed.map_ratio or 0.0) if mapped else None

    @property
    def ratio(self) -> float:
        """The largest of the units' ratios."""
        return self.worst.ratio

    @property
    def holds(self) -> bool:
        """Whether no unit moved the sum by more than C, nor the map by more than C1, but for rounding."""
        limit = 1 + TOLERANCES[self.dtype]
        mapped = self.worst_of_map
        return self.ratio <= limit and (mapped is None or (mapped.map_ratio or 0.0) <= limit)

    def to_dict(self) -> dict[str, Any]:
        mapped = self.worst_of_map
        return {
            "holds": self.holds, "ratio": self.ratio, "unit": self.worst.unit, "parameter": self.worst.worst_parameter,
            "map_ratio": None if mapped is None else mapped.map_ratio, "max_grad_norm": self.max_grad_norm,
            "map_clip": self.map_clip, "units_are": self.unit, "batch": self.batch, "clipped": self.clipped,
            "dtype": str(self.dtype).removeprefix("torch."), "sentence": str(self),
            "units": [
                {
                    "unit": replayed.unit, "ratio": replayed.ratio, "parameter": replayed.worst_parameter,
                    "parameters": replayed.parameters, "map_ratio": replayed.map_ratio,
                }
                for replayed in self.units
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        worst, mapped = self.worst, self.worst_of_map
        name = worst.worst_parameter
        most = f"'{name}' by {worst.parameters[name]:.4g} C"
        limit = 1 + TOLERANCES[self.dtype]
        if worst.ratio <= limit:
            text = (
                f"None of {len(self.units)} {self.unit}s moves the clipped sum by more than {worst.ratio:.4g} C ({self.unit} "
                f"{worst.unit}, {most}): on this batch of {self.batch}, of which {self.clipped} were clipped, the bound holds."
            )
        else:
            text = (
                f"Leaving out {self.unit} {worst.unit} moves the clipped sum by {worst.ratio:.4g} C ({most}), in a batch of "
                f"{self.batch}: it changes the gradients of others. Noise for C does not cover that. sparsedp.check and "
                "sparsedp.explain help to find where units meet: in the loss, in the loop before the model, in len(x)."
            )
        if mapped is not None:
            text += f" The map of contributions moves by at most {mapped.map_ratio:.4g} C1 ({self.unit} {mapped.unit})."
        if self.dtype != torch.float64:
            text += " The model does not run in float64, so this was in float32."
        return text


def replay(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Any,
    *,
    max_grad_norm: float,
    loop: Callable[[nn.Module, Any], Tensor] | None = None,
    users: Sequence[Any] | Tensor | None = None,
    map_clip: float | None = None,
    units: int | None = None,
    loss_reduction: str = "mean",
    take: Callable[[Any, list[int]], Any] | None = None,
    replace_recurrent: bool = False,
    progress: Progress = no_progress,
) -> Replay:
    """Leaves out each unit of `batch` in turn, at most `units` of them, and compares the sums of clipped gradients.

    `batch` and `loss_fn` are as in `sparsedp.check`; or give `loop(module, batch)`, which returns the loss as your training loop
    computes it, with all that it does before it calls the module, and None as the loss. `users` says whose each example is:
    units are then users. With `map_clip`, AdaFEST's map of contributions is replayed, whose bound C1 is `map_clip`.
    `take`, `loss_reduction` and `replace_recurrent` are as in `sparsedp.check`. The module itself is left as it is.
    """
    if (loss_fn is None) == (loop is None):
        raise SparseDPError("Give replay either a loss function or a loop that returns the loss.")
    for name, value in (("max_grad_norm", max_grad_norm), ("map_clip", map_clip)):
        if value is not None and not 0 < value < math.inf:
            raise SparseDPError(f"{name} must be positive and finite, not {value}.")
    if units is not None and units < 1:
        raise SparseDPError(f"At least one unit has to be left out, not {units}.")
    examples = count_units(batch) if take is None else len_of(batch)
    if examples < 1:
        raise SparseDPError("The batch has no units that could be left out.")
    owners, labels = _owners(users, examples)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    tables = sorted(find_tables(module) & trained)
    if map_clip is not None and not tables:
        raise SparseDPError("The module has no table, so there is no map of contributions: leave map_clip out.")
    request = _Request(
        batch, take or take_units, owners, labels, Clipping(max_grad_norm), map_clip, tables, units or len(labels), progress
    )  # fmt: skip
    trial = None
    try:
        with default_dtype(torch.float64):
            trial = Trial(module, loss_fn, loss_reduction, replace_recurrent, torch.float64, loop)
            return _replay(trial, request)
    except NonFiniteGradientError:
        pass  # as in `sparsedp.check`
    except SparseDPError:
        if trial is None or all(parameter.dtype == torch.float64 for parameter in trial.parameters.values()):
            raise
    except RuntimeError as error:
        if not is_of_dtypes(error):
            raise
    return _replay(Trial(module, loss_fn, loss_reduction, replace_recurrent, torch.float32, loop), request)


@dataclass(frozen=True)
class _Request:
    batch: Any
    take: Callable[[Any, list[int]], Any]
    owners: Tensor  # int64 (examples,): the unit of each example
    labels: list[int | str]  # of the units
    clipping: Clipping
    map_clip: float | None
    tables: list[str]  # whose rows the map has
    units: int
    progress: Progress

    @property
    def by_user(self) -> bool:
        return len(self.labels) > 0 and isinstance(self.labels[0], str)


def _owners(users: Sequence[Any] | Tensor | None, examples: int) -> tuple[Tensor, list[int | str]]:
    """The unit of each example, and what the units are called: their places, or the users' names."""
    if users is None:
        return torch.arange(examples), list(range(examples))
    names = [str(user) for user in (users.tolist() if isinstance(users, Tensor) else users)]
    if len(names) != examples:
        raise SparseDPError(
            f"users must have one entry for each of the {examples} examples of the batch, not {len(names)}."
        )
    labels = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(labels)}
    return torch.tensor([places[name] for name in names]), list(labels)


@dataclass(frozen=True)
class _Sums:
    """The clipped sums of one batch, its map, and how many of its units were clipped."""

    parameters: dict[str, tuple[Tensor, Tensor]]  # rows, distinct, and their values
    map: tuple[Tensor, Tensor]  # likewise, of all tables end to end
    clipped: int
    digests: Any  # of the terms of the loss that no unit has a part in


def _replay(trial: Trial, request: _Request) -> Replay:
    batch, count = trial.converted(request.batch), len(request.labels)
    chosen = range(min(request.units, count))
    trial.draws.together(len(request.owners))
    whole = _sums(trial, batch, request, torch.arange(len(request.owners)))
    replayed = []
    with request.progress("leaving units out", len(chosen)) as advance:
        for unit in chosen:
            kept = (request.owners != unit).nonzero().flatten()
            if not len(kept):  # an empty batch
                rest = _Sums({}, (whole.map[0][:0], whole.map[1][:0]), 0, whole.digests)
            else:
                trial.draws.chosen(kept.tolist())
                rest = _sums(trial, request.take(batch, kept.tolist()), request, kept)
            replayed.append(_compared(request, unit, whole, rest))
            advance(1)
    return Replay(
        tuple(replayed), request.clipping.max_norm, request.map_clip, "user" if request.by_user else "example", count,
        trial.dtype, whole.clipped,
    )  # fmt: skip


def _sums(trial: Trial, batch: Any, request: _Request, kept: Tensor) -> _Sums:
    """One pass over the examples `kept` of the batch."""
    units, owners = torch.unique(request.owners[kept], return_inverse=True)
    info = BatchInfo(len(units), len(units), True, True, 0, owners=owners if request.by_user else None)
    captured = trial.capture(batch, info)
    scale = float(captured.examples) if trial.reduction == "mean" else 1.0
    squares = [captured.squared_norms(uses).double() for uses in captured.uses.values()]
    norms = torch.stack(squares).sum(0).sqrt() * scale
    if not norms.isfinite().all():
        raise NonFiniteGradientError("The gradient of some unit is NaN or infinite: a private step would be refused.")
    factors = captured.each(request.clipping.factors(norms) * scale).to(trial.dtype)
    parameters = {
        name: _as_rows(uses.weighted_sum(factors, trial.parameters[name].shape)) for name, uses in captured.uses.items()
    }
    contributions = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64)
    if request.map_clip is not None:
        space = RowSpace.of({name: trial.parameters[name] for name in request.tables})
        contributions = contribution_map([captured], space, request.map_clip)
    return _Sums(
        parameters, contributions, int((norms > request.clipping.max_norm).sum()), join_digests(captured.terms)
    )


def _compared(request: _Request, unit: int, whole: _Sums, rest: _Sums) -> UnitReplay:
    if rest.digests != whole.digests:
        raise UnitsMixedError(
            "The loss has terms that depend on parameters alone (penalties), and they change when a unit is left out. Nothing "
            "clips such a term: it must not depend on the batch, nor on how many units that has."
        )
    norm = request.clipping.max_norm
    distances = {
        name: _norm_of_difference(value, rest.parameters.get(name)) / norm for name, value in whole.parameters.items()
    }
    for name in rest.parameters.keys() - whole.parameters.keys():
        distances[name] = _norm_of_difference(rest.parameters[name], None) / norm
    map_ratio = None
    if request.map_clip is not None:
        map_ratio = _norm_of_difference(whole.map, rest.map) / request.map_clip
    ratio = math.sqrt(sum(distance**2 for distance in distances.values()))
    return UnitReplay(request.labels[unit], ratio, distances, map_ratio)


def _as_rows(total: Tensor | RowSparse) -> tuple[Tensor, Tensor]:
    if isinstance(total, RowSparse):
        return total.rows, total.values
    values = total.reshape(len(total) if total.ndim else 1, -1)
    return torch.arange(len(values)), values


def _norm_of_difference(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor] | None) -> float:
    """Of two tensors that are given by some of their rows; None: of one alone."""
    if other is None:
        return float(one[1].double().norm())
    rows, places = torch.unique(torch.cat([one[0], other[0]]), return_inverse=True)
    values = torch.cat([one[1], -other[1]]).double()
    return float(torch.zeros(len(rows), *values.shape[1:], dtype=torch.float64).index_add_(0, places, values).norm())
