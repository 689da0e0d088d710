"""Paths in a configuration, made absolute so that a run can be resumed from another directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sparsedp.cli.config.schema import SchemaError


def absolute(path: str) -> str:
    """An absolute path, with ~ filled in."""
    return str(Path(path).expanduser().absolute())


def absolute_with_variables(path: str, key: str) -> str:
    """An absolute path, with ~ and environment variables filled in. `key` is named if a variable is missing."""
    filled = os.path.expandvars(path)
    if missing := re.search(r"\$\{?(\w+)", filled):
        raise SchemaError(
            key, f"{path}: there is no environment variable {missing[1]}. Set it, or name the file: --set {key}=FILE"
        )
    return absolute(filled)
