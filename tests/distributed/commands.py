"""`sparsedp` commands in processes that are forked from a warm one; those that `--nproc` starts, too."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from warm import KEPT, Forked, warm

from sparsedp.cli.main import main

SECONDS = 300
_next = itertools.count()


class ForkedCommand(Forked):
    """What `sparsedp.cli.launch` takes for a process of its own: `[python, -m, sparsedp, ...]`, with a pipe to its input."""

    def __init__(
        self, folder: Path, command: Sequence[str], env: dict[str, str], stdin: int | None = None,
        start_new_session: bool = True,
    ) -> None:  # fmt: skip
        assert command[1:3] == ["-m", "sparsedp"]
        number = next(_next)
        read = os.devnull
        if stdin is not None:
            read = str(folder / f"input-{number}")
            os.mkfifo(read)
            self._held = os.open(read, os.O_RDWR)
        files = (read, str(folder / "output"), str(folder / "errors"))
        super().__init__(warm(number % KEPT), files, env, "sparsedp.cli.main.main", list(command[3:]))

    def wait(self, seconds: float = SECONDS) -> int:
        return super().wait(seconds)


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """How `sparsedp` with these arguments ended, and what it and the processes that it started printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, output, errors = 0, io.StringIO(), io.StringIO()
        if "--nproc" in arguments:  # what it does itself is little
            with _forked_ranks(folder, environment), redirect_stdout(output), redirect_stderr(errors):
                code = main(arguments)
        else:
            code = ForkedCommand(folder, ["", "-m", "sparsedp", *arguments], environment).wait()
        said = [folder / "output", folder / "errors"]
        texts = [file.read_text(errors="replace") if file.exists() else "" for file in said]
        return subprocess.CompletedProcess(arguments, code, output.getvalue() + texts[0], errors.getvalue() + texts[1])


@contextmanager
def _forked_ranks(folder: Path, environment: dict[str, str]) -> Any:
    def popen(command: Sequence[str], **options: Any) -> ForkedCommand:
        return ForkedCommand(folder, command, **options)

    processes = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)
    path = list(sys.path)
    with mock.patch.dict(os.environ, environment, clear=True), mock.patch("sparsedp.cli.launch.subprocess", processes):
        try:
            yield
        finally:  # of code beside the configuration, which other tests have by the same name
            sys.path[:] = path
            for name in _made_here(Path.cwd()):
                del sys.modules[name]


def _made_here(folder: Path) -> list[str]:
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [name for name, file in files.items() if file and Path(file).parent == folder]
