"""What is known of tensors in a forward pass.

A tensor is computed from the batch (`UnitData`, `Mixed`), from private parameters alone (`Derived`), an input that has no
axis of units (`SHARED`), or a constant. One that capture did not see being made is none of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp._torch import is_functorch_tensor, without_subclasses
from sparsedp.capture.combining import combined_by
from sparsedp.capture.expressions import Expression, TableRows
from sparsedp.capture.forward_pass import ForwardPass
from sparsedp.capture.inputs import advice
from sparsedp.capture.ops.ragged import parts_of_nested
from sparsedp.capture.units import Mixed, Rows, UnitAxis, UnitData, WholeBatch, placed_rows
from sparsedp.errors import UnsupportedError


@dataclass(frozen=True)
class Derived:
    """A tensor computed from parameters alone."""

    parameters: tuple[tuple[str, Tensor], ...]
    ids: Tensor | None
    drawn: bool  # whether numbers from the key have a part in it
    alike: frozenset[int] = frozenset()  # of what is drawn: dimensions along which slices differ by the draws alone
    rows: tuple[TableRows, ...] = ()  # of tables of which it depends on these alone


class Shared:
    """An input that does not have the units on axis 0, where none is refused: as good as constant, but not for ids."""


@dataclass(frozen=True)
class Constant:
    """A tensor that no unit decides, as far as operations are seen. One that is `drawn` has numbers from the key.

    `alike`: each of its numbers was drawn by itself, by the same law, wherever it stands. `even`: otherwise, where units could be
    whose parts are drawn by one law, each by itself, or are the same. `law` tells how it was drawn, where that is known.
    """

    drawn: bool = False
    alike: bool = False
    even: frozenset[UnitAxis] = frozenset()
    law: int | None = field(default=None, compare=False)


SHARED = Shared()
CONSTANT, DRAWN_ALIKE = Constant(), Constant(drawn=True, alike=True)
EARLIER = Mixed("data of an earlier batch")  # until forward() is given it again, as in an evaluation after every step


class KnownTensors:
    """What is known of each tensor, until it dies, and of the private `parameters`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], current: ForwardPass) -> None:
        self.private = {
            id(parameter): Expression(parameter, ((name, parameter),)) for name, parameter in parameters.items()
        }
        # By identity: tensors compare element by element. The operations of a forward pass read it without a call.
        self.entries: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._current = current

    def require_plain_parameters(self) -> None:
        """Raises if a trained parameter is none any more that make_private would have accepted, whenever that came about.

        Gradients are put together in the order of a parameter's memory, and given to it in that of its indices.
        """
        for expression in self.private.values():
            name, parameter = expression.parameters[0]
            is_plain = parameter.is_contiguous() and parameter.dtype in (torch.float32, torch.float64)
            if is_plain or not parameter.requires_grad:
                continue
            what = parameter.dtype if parameter.is_contiguous() else "not contiguous"
            raise UnsupportedError(
                f"Parameter '{name}' is {what} since module.to(...) or the like, after make_private. Train contiguous parameters "
                "in float32 or float64: parameter.data = parameter.data.float().contiguous(). Nothing was written."
            )

    def get(self, tensor: Tensor) -> Any:
        entry = self.entries.get(id(tensor))
        return None if entry is None else entry[1]

    def __getitem__(self, tensor: Tensor) -> Any:
        return self.entries[id(tensor)][1]

    def __setitem__(self, tensor: Tensor, info: Any) -> None:
        entries, key = self.entries, id(tensor)

        def forget(dead: weakref.ref) -> None:
            if key in entries and entries[key][0] is dead:
                del entries[key]

        entries[key] = (weakref.ref(tensor, forget), info)

    def forget(self, tensor: Tensor) -> None:
        self.entries.pop(id(tensor), None)

    def tensors(self) -> list[Tensor]:
        return [tensor for reference, _ in list(self.entries.values()) if (tensor := reference()) is not None]

    def place(self, out: Tensor, axis: UnitAxis | None) -> Tensor:
        """Notes where the units are in a tensor that a rule made, and returns it."""
        self[out] = UnitData(axis)
        return out

    def place_rows(self, out: Tensor, rows: Rows) -> Tensor:
        """Notes whose the rows of a tensor are that a rule made, and returns it."""
        self[out] = placed_rows(rows.dim, rows.owners)
        return out

    def place_parts(self, tensor: Tensor) -> None:
        """Notes what is known of the parts of a nested tensor, which it hands out unseen."""
        for part, info in parts_of_nested(tensor, self[tensor]):
            self[part] = info

    def expression(self, tensor: Any) -> Expression | None:
        """What is known of a tensor that depends on private parameters alone; None for any other."""
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return None
        parameter = self.private.get(id(tensor))
        if parameter is not None:
            return parameter
        info = self.get(tensor)
        if isinstance(info, Derived):
            return Expression(tensor, info.parameters, info.ids, info.drawn, info.alike, info.rows)
        return None

    def info(self, tensor: Tensor) -> Any:
        """What is known of a tensor; None for a constant, and for one that capture did not see."""
        info = self.get(tensor)
        return None if isinstance(info, Constant) else info

    def is_data(self, tensor: Any) -> bool:
        """Whether it is a tensor that depends on the batch."""
        return isinstance(tensor, Tensor) and isinstance(self.get(tensor), (UnitData, Mixed))

    def is_end_to_end(self, tensor: Tensor) -> bool:
        """Whether it is an input whose values lie end to end, as those of bags with offsets do."""
        info = self.get(tensor)
        return isinstance(info, WholeBatch) and info.in_order

    def known_axis(self, tensor: Tensor) -> UnitAxis | None:
        """The unit axis of a tensor; None where it has none, or it is not known."""
        info = self.get(tensor)
        if not isinstance(info, UnitData) or info.axis is None or not info.axis.fits(tensor.shape, self._current.units):
            return None
        return info.axis

    def rows(self, tensor: Any) -> Rows | None:
        """The rows of a tensor that have owners instead of a unit axis; None where it has none."""
        info = self.get(tensor) if isinstance(tensor, Tensor) else None
        return info.rows if isinstance(info, UnitData) else None

    def axis(self, tensor: Tensor, operation: str, names: str) -> UnitAxis:
        """The unit axis of an activation that meets the parameters `names`, or an error."""
        axis = self.known_axis(tensor)
        if axis is not None:
            return axis
        current, info = self._current, self.get(tensor)
        if isinstance(info, WholeBatch):
            raise UnsupportedError(
                f"Operation '{operation}' on parameter {names}{current.where()}: its input is '{info.operation}', or made of it, "
                "which does not have the units on axis 0, so that all of them may decide it. Ids of bags may lie end to end "
                f"only in nn.EmbeddingBag with offsets. {advice(info.operation)}"
            )
        if isinstance(info, Mixed):
            raise current.refuse(
                operation, names, f"its input was {combined_by(info.operation)}",
                "keep each unit in its place, and compute losses and statistics of a batch outside of the module, after the last "
                "parameter",
            )  # fmt: skip
        raise current.refuse(
            operation, names,
            f"the position of the {current.counted()} in its input of shape {tuple(tensor.shape)} is not known",
            "keep the batch on an axis of its own, first if possible, and index it only as a whole",
        )  # fmt: skip


def memory_of(tensor: Tensor) -> int:
    """What tensors have in common that are views of one another; -1 for a sparse one, and inside of torch.func's transforms."""
    with without_subclasses():
        if tensor.layout != torch.strided or is_functorch_tensor(tensor):
            return -1
        return tensor.untyped_storage().data_ptr()
