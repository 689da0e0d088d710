"""`sparsedp bench lazydp` as a section of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsedp.bench.lazydp import QUANTITIES, STAGES, VARIANTS, Setting
from sparsedp.report.speed.tables import images, markdown_table, milliseconds, times
from sparsedp.report.speed.varied import ratios_along, stage_lines


def section(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    base = [row for row in result["rows"] if row["base"]]
    memory = {row["variant"]: row["share_of_tables"] for row in result["memory"]}
    lines = [
        [
            VARIANTS[row["variant"]], milliseconds(row), times(row["ratio_to_sgd"]), times(row.get("ratio_to_eana")),
            f"{100 * memory[row['variant']]:.0f} %" if row["variant"] in memory else "-",
        ]
        for row in base
    ]  # fmt: skip
    pieces = ["## DLRM and LazyDP", f"MLPerf's shape, {Setting(**result['base'])}; a new batch for every step."]
    if base:
        pieces += [
            markdown_table(("", "step", "/ SGD", "/ EANA", "memory beyond the tables, share"), lines),
            stage_lines(base, VARIANTS, STAGES),
        ]
        settled = [row["settle"] for row in base if "settle" in row]
        pieces += [f"Settling all tables at the end of training: {milliseconds(timing)} ms." for timing in settled]
    pieces += [
        ratios_along(result["rows"], key, quantity, VARIANTS, "sgd", "ratio_to_sgd")
        for key, quantity in QUANTITIES.items()
    ]
    pieces += [
        f"Left out at {Setting(**gone['setting'])}, {gone['reason']}: {', '.join(VARIANTS[v] for v in gone['variants'])}."
        for gone in result["left_out"]
    ]
    pieces += [
        "Memory beyond the tables is what the layers and a batch take, and a gradient of the tables' size where one is held. "
        "(B) and (R) are the forms of DP-SGD from before fast norms.",
        images(plots, "lazydp_"),
    ]
    return "\n\n".join(piece for piece in pieces if piece)
