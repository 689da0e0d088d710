"""What rules may ask of a capture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from sparsedp.capture.expressions import Expression, Placed
from sparsedp.capture.units import Rows, UnitAxis
from sparsedp.errors import UnsupportedError


class KeptTensor(Protocol):
    """A tensor that a use needs after backward."""

    def get(self) -> Tensor:
        """The tensor; raises if it was changed in place meanwhile."""


class CaptureForRules(Protocol):
    """The forward pass that runs now, as rules for the use of parameters see it."""

    @property
    def units(self) -> int:
        """How many places the unit axis has: one for each example."""

    @property
    def forward_only(self) -> bool:
        """Whether it is known that no backward pass follows, as where rows are counted."""

    def is_data(self, tensor: Any) -> bool:
        """Whether it is a tensor that depends on the batch."""

    def expression(self, tensor: Any) -> Expression | None:
        """What is known of a tensor that depends on private parameters alone; None for any other."""

    def axis(self, tensor: Tensor, operation: str, names: str) -> UnitAxis:
        """The unit axis of an activation that meets the parameters `names`, or an error."""

    def known_axis(self, tensor: Tensor) -> UnitAxis | None:
        """The unit axis of a tensor; None where it has none, or it is not known."""

    def rows(self, tensor: Any) -> Rows | None:
        """The rows of a tensor that have owners instead of a unit axis; None where it has none."""

    def is_end_to_end(self, tensor: Tensor) -> bool:
        """Whether it is an input whose values lie end to end, as those of bags with offsets do."""

    def place_parts(self, tensor: Tensor) -> None:
        """Notes what is known of the parts of a nested tensor, which it hands out unseen."""

    def keep(self, tensor: Tensor, operation: str, names: str) -> KeptTensor:
        """For what a rule needs after backward: before it calls `record`."""

    def record(self, out: Tensor, finish: Callable[[Tensor], Placed], axis: UnitAxis | None) -> Tensor:
        """Returns `out` such that its gradient, when it arrives, is kept with `finish`."""

    def place(self, out: Tensor, axis: UnitAxis | None) -> Tensor:
        """Notes where the units are in a tensor that a rule made, and returns it."""

    def place_rows(self, out: Tensor, rows: Rows) -> Tensor:
        """Notes whose the rows of a tensor are that a rule made, and returns it."""

    def resumed(self) -> AbstractContextManager[Any]:
        """For a rule that is itself written with captured operations."""

    def refuse(self, operation: str, names: str, reason: str, instead: str) -> UnsupportedError:
        """The error that says why an operation cannot use the parameters `names`, and what to do."""
