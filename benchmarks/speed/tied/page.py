"""`python -m benchmarks tied` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import (
    images,
    markdown_table,
    memory_along,
    milliseconds,
    ratios_along,
    stage_lines,
    times,
)
from benchmarks.speed.tied.measure import QUANTITIES, VARIANTS, Setting


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    base = [row for row in result["rows"] if row["base"]]
    largest_batches = {row["variant"]: row for row in result["largest"]}
    lines = []
    for row in base:
        fitted = largest_batches.get(row["variant"])
        each = "-" if fitted is None else f"{fitted['bytes_each'] / 1e6:.1f}"
        largest = "-" if fitted is None or fitted["largest_batch"] is None else f"{fitted['largest_batch']:,}"
        lines.append(
            [
                VARIANTS[row["variant"]],
                milliseconds(row),
                times(row["ratio_to_plain"]),
                times(row.get("ratio_to_chunked")),
                each,
                largest,
            ]
        )
    head = (
        "",
        "step",
        "/ PyTorch",
        "/ PyTorch, table_softmax_loss",
        "MB per unit",
        f"largest batch in {result['gigabytes']:g} GB",
    )
    pieces = [
        "# Tied sequence models",
        f"A causal Transformer, dim {result['dim']}, {result['blocks']} blocks, whose input and output table are one: "
        f"{Setting(**result['base'])}; {result['negatives']} negatives where candidates are scored.",
    ]
    if base:
        pieces += [markdown_table(head, lines), stage_lines(base, VARIANTS)]
    pieces += [
        table
        for key, quantity in QUANTITIES.items()
        for table in (
            ratios_along(result["rows"], key, quantity, VARIANTS, "plain", "ratio_to_plain"),
            memory_along(result["rows"], key, VARIANTS),
        )
    ]
    pieces += [
        "The largest batch is a linear fit to peak memory, each in a process of its own (the DPFormer paper's figure 3). Ghost "
        "clipping forms a matrix of vocabulary x vocabulary for a unit's output, as the paper describes it. For small steps the "
        "capture of some hundred operations is what counts.",
        images(plots, "tied_"),
    ]
    return "\n\n".join(piece for piece in pieces if piece)
