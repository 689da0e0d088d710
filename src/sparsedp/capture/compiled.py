"""Parts that `torch.compile` compiled: in a watched forward pass they run as the code that they were compiled from.

Compiled code does not show its operations, and units that it mixes would not be seen. As ordinary code it is followed like any
other. A module that is compiled as a whole is refused: its hooks would be compiled along.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch


class WithoutCompilation:
    """A context in which whatever torch.compile compiled runs uncompiled."""

    def __init__(self) -> None:
        self._entered: list[Any] = []  # several where private modules call one another; None where there is no compiler

    def __enter__(self) -> None:
        # Before the compiler is loaded nothing is compiled, and to load it takes seconds.
        is_loaded = "torch._dynamo" in sys.modules
        self._entered.append(torch.compiler.set_stance("force_eager") if is_loaded else None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stance = self._entered.pop()
        if stance is not None:
            stance.__exit__(kind, error, traceback)
