"""`python -m benchmarks dual` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.dual.measure import VARIANTS, Setting
from benchmarks.speed.markdown import images, markdown_table, megabytes, milliseconds, stage_lines, times


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    rows = sorted(result["rows"], key=lambda row: (row["setting"]["batch"], row["setting"]["items"]))
    lines = []
    for row in rows:
        setting = Setting(**row["setting"])
        lines.append(
            [
                f"{setting.items:,}", f"{setting.batch:,}", VARIANTS[row["variant"]], milliseconds(row),
                f"{row['steps_per_second']:.3g}", times(row["ratio_to_sgd"]), times(row["ratio_to_eana"]),
                times(row.get("dpsgd_over_this")),
                megabytes(row, setting.table_bytes),
            ]
        )  # fmt: skip
    head = (
        "items", "batch", "", "step", "steps/s, best", "/ SGD", "/ EANA", "DP-SGD / this",
        "memory beyond the tables, MB (share)",
    )  # fmt: skip
    pieces = [
        "# The dual encoder and EANA",
        f"Bags of {result['length']} items against the next one, two tables of dim {result['dim']}, softmax over the target and "
        f"{result['negatives']} uniform negatives of each unit's own (the EANA paper's Table 3); a new batch for every step, "
        "drawn before it.",
    ]
    if lines:
        pieces.append(markdown_table(head, lines))
    base = [row for row in rows if row["base"]]
    if base:
        pieces += [f"Where the time goes, {Setting(**result['base'])}:", stage_lines(base, VARIANTS)]
    pieces += [
        f"Left out at {Setting(**gone['setting'])}, {gone['reason']}: {', '.join(VARIANTS[v] for v in gone['variants'])}."
        for gone in result["left_out"]
    ]
    pieces += [
        "EANA has no guarantee: which rows carry noise tells which were looked up. LazyDP and AdaFEST have one. At the paper's "
        "small batch a private step mostly pays for its operations one by one.",
        images(plots, "dual_"),
    ]
    return "\n\n".join(piece for piece in pieces if piece)
