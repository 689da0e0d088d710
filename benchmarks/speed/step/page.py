"""`python -m benchmarks step` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import images, markdown_table, megabytes, milliseconds, times
from benchmarks.speed.names import NAMES
from benchmarks.speed.stages import stages_of

MODEL_NAMES = {"mlp": "MLP", "pctr": "pCTR"}


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    rows = result["rows"]
    names = [f"{MODEL_NAMES[row['model']]}, {NAMES[row['mechanism']]}" for row in rows]
    table = markdown_table(
        ("model, mechanism", "plain", "private", "private / plain", "memory, MB: plain", "private"),
        (
            [
                name,
                milliseconds(row["plain"]),
                milliseconds(row["private"]),
                times(row["ratio"]),
                megabytes({"memory": row["plain_memory"]} if "plain_memory" in row else {}),
                megabytes(row),
            ]
            for name, row in zip(names, rows)
        ),
    )
    stages = markdown_table(
        ("stage, best, ms", *names),
        (
            [stage, *(f"{1e3 * row['stages'][stage]:.1f}" if stage in row["stages"] else "-" for row in rows)]
            for stage in stages_of(rows)
        ),
    )
    return f"""# A step against plain PyTorch

Batch {rows[0]["batch"]}; plain is `nn.Embedding(sparse=True)` with `SGD` and autograd. The MLP has
no tables; pCTR has Criteo's vocabularies, times {result["scale"]:g}. Memory is the peak beyond the model.

{table}

{stages}

Forward, backward (to activations only) and sums (the weight gradients) are what a plain step consists of. A private
step reads all activations and gradients once more for its norms, finds the distinct rows, and draws noise.

{images(plots, "step_")}"""
