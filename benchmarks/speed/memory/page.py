"""Memory: a table that takes half of the machine's, from the model to its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import images, markdown_table
from benchmarks.speed.memory.measure import PHASES, VARIANTS


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    """`result` is what `python -m benchmarks memory` measured."""
    rows = result["rows"]
    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    row_of = {(row["variant"], row["phase"]): row for row in rows if "skipped" not in row}
    phases = [phase for phase in PHASES if any((name, phase) in row_of for name in names)]
    memory = result["machine"]["memory_bytes"]
    parts = [
        "# Memory: a table and nothing of its size beside it",
        f"`python -m benchmarks memory`: one table of {result['table_rows']:,} rows, dim {result['dim']}, "
        f"{result['table_bytes'] / 1e9:.2f} GB of a machine's {memory / 1e9:.1f} GB; batch {result['batch']}. The most anonymous "
        "memory beyond the table in each phase, as a share of the table.",
        markdown_table(
            ("phase", *(VARIANTS[name] for name in names)),
            [[PHASES[phase], *(_share(row_of.get((name, phase))) for name in names)] for phase in phases],
        ),
        "Seconds of each phase, and the speed of reading and writing.",
        markdown_table(
            ("phase", *(VARIANTS[name] for name in names)),
            [[PHASES[phase], *(_time(row_of.get((name, phase))) for name in names)] for phase in phases],
        ),
        "Anonymous memory is what a process allocates; pages of mapped files are not counted, the system takes them back when it "
        "needs them. A phase runs once, in a process of its own for each variant. Writing ends when the disk has the file. "
        "Loading reads a file twice, once to check it and once to copy it, partly from the system's cache. Files of EANA and of "
        "plain PyTorch are not written.",
    ]
    parts += [f"Skipped: {reason}." for reason in dict.fromkeys(row["skipped"] for row in rows if "skipped" in row)]
    parts += [f"Left out: {VARIANTS[gone['variant']]}, {gone['reason']}." for gone in result["left_out"]]
    if shown := images(plots, "memory_"):
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


def _share(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{100 * row['peak_share']:.1f} %"


def _time(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    speed = row.get("megabytes_per_second")
    return f"{row['seconds']:.2f}" + ("" if speed is None else f" ({speed:.0f} MB/s)")
