"""`python -m benchmarks lazydp` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.lazydp.measure import QUANTITIES, VARIANTS, Setting
from benchmarks.speed.markdown import (
    images,
    markdown_table,
    megabytes,
    memory_along,
    milliseconds,
    ratios_along,
    stage_lines,
    times,
)


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    base = [row for row in result["rows"] if row["base"]]
    tables = Setting(**result["base"]).table_bytes
    lines = [
        [
            VARIANTS[row["variant"]], milliseconds(row), times(row["ratio_to_sgd"]), times(row.get("ratio_to_eana")),
            megabytes(row, tables),
        ]
        for row in base
    ]  # fmt: skip
    pieces = ["# DLRM and LazyDP", f"MLPerf's shape, {Setting(**result['base'])}; a new batch for every step."]
    if base:
        pieces += [
            markdown_table(("", "step", "/ SGD", "/ EANA", "memory beyond the tables, MB (share)"), lines),
            stage_lines(base, VARIANTS),
        ]
        settled = [row["settle"] for row in base if "settle" in row]
        pieces += [f"Settling all tables at the end of training: {milliseconds(timing)} ms." for timing in settled]
    pieces += [
        table
        for key, quantity in QUANTITIES.items()
        for table in (
            ratios_along(result["rows"], key, quantity, VARIANTS, "sgd", "ratio_to_sgd"),
            memory_along(result["rows"], key, VARIANTS),
        )
    ]
    by_variants: dict[str, list[str]] = {}
    for gone in result["left_out"]:
        names = f"{gone['reason']}: {', '.join(VARIANTS[variant] for variant in gone['variants'])}"
        by_variants.setdefault(names, []).append(str(Setting(**gone["setting"])))
    pieces += [f"Left out at {'; '.join(settings)}: {names}." for names, settings in by_variants.items()]
    pieces += [
        "Memory beyond the tables is what the layers and a batch take, and a gradient of the tables' size where one is held. "
        "(B) and (R) are the forms of DP-SGD from before fast norms.",
        images(plots, "lazydp_"),
    ]
    return "\n\n".join(piece for piece in pieces if piece)
