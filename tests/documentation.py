"""The code of the documentation, to be run as it stands there."""

from __future__ import annotations

import functools
import re
import sys
import types
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"


@functools.cache
def code_of(page: str) -> dict[str, Any]:
    """What the Python code of a page defines, run from its first block to its last, once in a process."""
    module = types.ModuleType("docs_" + page.removesuffix(".md"))
    sys.modules[module.__name__] = module
    text = (DOCS / page).read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines_before = "\n" * text.count("\n", 0, block.start(1))  # so that errors name the line of the page
        exec(compile(lines_before + block[1], str(DOCS / page), "exec", dont_inherit=True), module.__dict__)
    return module.__dict__
