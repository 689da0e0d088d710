"""Runs a tutorial, a Python script in cells, and prints its cells with what they gave as JSON: python docs/run_tutorial.py FILE

The format is jupytext's "percent": `# %%` begins a cell of code, `# %% [markdown]` one of text, whose lines are comments, and a
cell of lines that begin with `# !` holds commands of a shell. Whatever fails ends it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

_CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)


def cells_of(source: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell: markdown, code or shell. What stands before the first one is left out."""
    _, *parts = _CELL.split(source)
    cells = []
    for title, text in zip(parts[::2], parts[1::2]):
        lines = text.strip("\n").splitlines()
        if "[markdown]" in title:
            cells.append(("markdown", "\n".join(re.sub(r"^# ?", "", line) for line in lines)))
        elif lines and all(line.startswith("# !") for line in lines):
            cells.append(("shell", "\n".join(line[3:] for line in lines)))
        else:
            cells.append(("code", "\n".join(lines)))
    return cells


def output_of(kind: str, text: str, names: dict[str, Any]) -> str:
    """What a cell prints, with its warnings; behind it the value of its last line, if that is an expression."""
    if kind == "shell":
        done = subprocess.run(text, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{text}\nended with exit code {done.returncode}:\n{done.stdout}")
        return done.stdout
    printed = io.StringIO()
    body = ast.parse(text)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exec(compile(body, "<cell>", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if value is not None:
            print(value)
    told = [f"{warning.category.__name__}: {warning.message}\n" for warning in caught]
    return "".join(told) + printed.getvalue()


def run(source: str) -> list[dict[str, str]]:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for kind, text in cells_of(source):
        output = "" if kind == "markdown" else output_of(kind, text, names)
        cells.append({"kind": kind, "text": text, "output": output})
    return cells


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.stdout)
