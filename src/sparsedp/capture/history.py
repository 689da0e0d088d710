"""Tensors that were made or changed with gradients off: only a custom function can give them a history afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsedp._torch import without_functions
from sparsedp.errors import UnsupportedError


class HiddenHistory:
    """Finds custom functions that were applied unseen; `where` says for messages where in the module."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        # What was made or changed since gradients were last on, and what it came from then.
        self.hidden: list[tuple[weakref.ref[Tensor], Any]] = []

    def add(self, tensor: Tensor, node: Any = None) -> None:
        """A tensor was made or changed with gradients off; `node` is its history now."""
        self.hidden.append((weakref.ref(tensor), node))

    def require_unchanged(self) -> None:
        """What is computed with gradients off gets no history. If it has a new one, it is that of a custom function."""
        hidden, self.hidden = self.hidden, []
        for reference, before in hidden:
            tensor = reference()
            with without_functions():
                now = None if tensor is None else tensor.grad_fn
            function = getattr(type(now), "_forward_cls", None)
            if function is not None and now is not before:
                raise UnsupportedError(
                    f"torch.autograd.Function '{function.__name__}'{self._where()} was applied in a way that capture does not "
                    "see, so it cannot be tried. Call its apply() in forward()."
                )

    def clear(self) -> None:
        """Forgets them: the custom function that gives them a history was seen."""
        self.hidden.clear()
