"""`python -m benchmarks language` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.language.measure import VARIANTS
from benchmarks.speed.markdown import images, markdown_table, megabytes, milliseconds, number, stage_lines, times

_MODELS = {"minilm": "MiniLM-L6", "mpnet": "MPNet-base"}
_WAYS = {"lora": "LoRA and word embeddings", "full": "in full"}


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    rows, tables, causal = result["rows"], result["tables"], result["causal"]
    size = next(iter(result["sizes"].values()))
    pieces = [
        "# Language models",
        f"Encoders of the sizes of MiniLM-L6 and MPNet-base with random weights and their own dropout, batch {size['batch']} x "
        f"{size['length']} tokens, trained in full or by LoRA (r = 8, queries and values) with their word embeddings. Plain is "
        "PyTorch with SGD and sparse gradients of the word embeddings. Memory is the peak beyond the model, in a process of its "
        "own.",
        _table(rows, "model", lambda row: f"{_MODELS[row['model']]}, {_WAYS[row['way']]}"),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        for way in _WAYS:
            mine = [row for row in rows if row["model"] == model and row["way"] == way and row["stages"]]
            if mine:
                pieces += [f"{_MODELS[model]}, {_WAYS[way]}:", stage_lines(mine, VARIANTS)]
    if result["left_out"]:
        gone = (
            f"- {_MODELS[row['model']]}, {_WAYS[row['way']]}, {VARIANTS[row['variant']]}: {row['why']}"
            for row in result["left_out"]
        )
        pieces += ["What did not run:", "\n".join(gone)]
    words = tables[0]
    pieces += [
        "## A table alone",
        f"The mean of the rows of {words['length']} words and a class, dim {words['width']}, batch {words['batch']}: what the "
        "table takes of a step, over the rows of the vocabulary. The words of a batch are the same.",
        _table(tables, "rows", lambda row: f"{row['rows']:,}", fewest=True),
    ]
    one = causal[0]
    pieces += [
        "## A causal model with a large vocabulary",
        f"Gemma 3's layers (one block, width {one['width']}), {one['rows']:,} rows, LoRA and trained words, batch "
        f"{one['batch']} x {one['length']} tokens. The words have rows of their own beside the head's, which are frozen, but for "
        "the last line, where one table is trained for both: every row has a gradient then. All but the first line have "
        "`softmax_over_table`, which takes the softmax in blocks.",
        _table(causal, "rows", lambda row: f"{row['rows']:,}"),
        images(plots, "language_"),
    ]
    return "\n\n".join(piece for piece in pieces if piece)


def _table(rows: Sequence[Mapping[str, Any]], title: str, where: Any, fewest: bool = False) -> str:
    head = [title, "variant", "time, ms", "/ plain", "memory, MB", "/ plain"]
    lines = []
    for row in rows:
        line = [
            where(row), VARIANTS[row["variant"]], milliseconds(row), times(row["ratio_to_plain"]), megabytes(row),
            number(row["memory_ratio"]) if "memory_ratio" in row else "-",
        ]  # fmt: skip
        lines.append([*line, times(row["ratio_to_fewest"])] if fewest else line)
    return markdown_table([*head, "/ fewest rows"] if fewest else head, lines)
