"""`python -m benchmarks vocabulary` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import images, markdown_table, megabytes, milliseconds, number
from benchmarks.speed.names import NAMES


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    rows = {(row["rows"], row["variant"]): row for row in result["rows"]}
    sizes = list(dict.fromkeys(size for size, _ in rows))
    variants = list(dict.fromkeys(variant for _, variant in rows))
    names = [NAMES[variant] for variant in variants]
    time = markdown_table(
        ("rows", *names, "DP-SGD / AdaFEST"),
        (
            [
                f"{size:,}", *(milliseconds(rows[size, variant]) for variant in variants),
                number(rows[size, "adafest"]["dpsgd_over_this"]["best"]),
            ]
            for size in sizes
        ),
    )  # fmt: skip
    pieces = [
        "# One table of more and more rows",
        f"Dim {result['dim']}, batch {result['batch']}, one id per unit (the DP-AdaFEST paper's Table 4).",
        time,
    ]
    if any("memory" in row for row in result["rows"]):
        shares = (
            [f"{size:,}", *(megabytes(rows[size, v], 4 * result["dim"] * size) for v in variants)] for size in sizes
        )
        pieces += [
            "Peak memory beyond the table, in MB and as a share of it, each in a process of its own:",
            markdown_table(("rows", *names), shares),
        ]
    pieces += [
        "FEST's memory is its one-off selection, which ranks all rows. Against a plain step of a millisecond, a private one pays "
        "for its operations one by one.",
        images(plots, "vocabulary_"),
    ]
    return "\n\n".join(pieces)
