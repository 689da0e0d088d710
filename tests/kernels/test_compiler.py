"""Loops are compiled also where nothing can be kept, and somebody who waits for that is told."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest
from numba.core import caching

from sparsedp.kernels import compiler
from sparsedp.kernels.compiler import compile_loop


@pytest.fixture(autouse=True)
def _nothing_was_said_yet() -> None:
    compiler._is_compiling.cache_clear()


def doubled(number: int) -> int:
    return 2 * number


def tripled(number: int) -> int:
    return 3 * number


def test_without_a_folder_to_write_to_loops_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])  # as for a user without a home
    monkeypatch.setattr(doubled, "__module__", "sparsedp.kernels.doubles")
    monkeypatch.setattr(tripled, "__module__", "sparsedp.kernels.doubles")
    with caplog.at_level(logging.INFO, "sparsedp"):
        assert compile_loop()(doubled)(4) == 8
        assert compile_loop(fastmath=True)(tripled)(4) == 12
    assert sum("NUMBA_CACHE_DIR" in message for message in caplog.messages) == 1


def test_other_refusals_of_numba_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(caching.FunctionCache, "__init__", refuse)
    with pytest.raises(RuntimeError, match="something else"):
        compile_loop()(doubled)


def test_compiling_is_announced_once_and_only_for_loops_of_this_package(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # empty: nothing is kept there yet
    # A loop that is read again looks for its module.
    monkeypatch.setitem(sys.modules, "sparsedp.kernels.doubles", ModuleType("sparsedp.kernels.doubles"))
    with caplog.at_level(logging.INFO, "sparsedp"):
        compile_loop()(doubled)(4)
        assert not caplog.messages
        monkeypatch.setattr(doubled, "__module__", "sparsedp.kernels.doubles")
        monkeypatch.setattr(tripled, "__module__", "sparsedp.kernels.doubles")
        for function in (doubled, tripled):
            compile_loop()(function)(4.0)
        assert len(caplog.messages) == 1 and "first time" in caplog.messages[0]
        compiler._is_compiling.cache_clear()
        gc.collect()  # what Numba would find in memory
        compile_loop()(doubled)(4.0)  # is read again
    assert len(caplog.messages) == 1
