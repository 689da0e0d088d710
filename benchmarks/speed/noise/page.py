"""`python -m benchmarks noise` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import images, markdown_table, milliseconds


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    lines = (
        [f"{row['size']:,}", row["variant"], str(row["threads"]), milliseconds(row), f"{row['nanoseconds_each']:.2f}"]
        for row in result["rows"]
    )
    table = markdown_table(("numbers", "source", "threads", "time", "ns each, best"), lines)
    return f"""# Noise

ChaCha8 and Box-Muller, compiled for vector instructions, against `torch.normal_` (which draws on one thread), in float32; and
settling all rows of a LazyDP table of dim 64 with it, in place.

{table}

{images(plots, "noise_")}"""
