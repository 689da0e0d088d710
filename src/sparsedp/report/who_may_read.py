"""Who may read which file of a run's folder, and why."""

from __future__ import annotations

from typing import Literal

Reader = Literal["anybody", "those with access to the data"]

FILES: dict[str, tuple[str, str]] = {
    "release/model.pt": ("the weights", "what the statement is about; all noise is in them"),
    "release/statement.json": ("the privacy statement", "made of the plan and of counts of steps, not of data"),
    "release/statement.txt": ("the same as text", "as statement.json"),
    "release/plan.json": ("what was fixed before training", "chosen before training; the data set's size is taken as public"),
    "release/config.yaml": ("the configuration without places of data and seeds", "chosen before training"),
    "release/environment.json": ("versions, and the day", "known before training"),
    "release/frequencies.pt": ("how often rows are used", "released once with noise, and paid for"),
    "release/report.html": ("a report for anybody", "made of the files beside it alone"),
    "release/README.md": ("a model card", "made of the files beside it, unless it says otherwise"),
    "private/config.yaml": ("the whole configuration", "says where the data are, and seeds"),
    "private/code.json": ("your own code's files and digests", "about your machine"),
    "private/provenance.json": ("machine, sessions, digests of the data", "a digest confirms a guess"),
    "private/canaries.json": ("an audit's canaries", "the key that they were drawn from"),
    "private/bound.json": ("an audit's bound on epsilon", "losses without noise"),
    "private/bound.png": ("the same as a picture", "losses without noise"),
    "private/secret_sharer.json": ("an audit's exposures", "losses without noise"),
    "private/secret_sharer.png": ("the same as a picture", "losses without noise"),
    "private/metrics.jsonl": ("losses, metrics and counts of each step", "computed on private data without noise"),
    "private/checkpoint.pt": ("what to resume from", "the position in the data, and state that is not settled"),
    "private/totals.json": ("sums over all steps", "computed on private data without noise"),
    "private/result.json": ("the closing table", "computed on private data without noise"),
    "private/predictions.json": ("what `sparsedp plan --json` predicted", "rows are counted on private data without noise"),
    "private/error.txt": ("why a run failed", "may quote data"),
    "private/report.html": ("the report with private figures", "computed on private data without noise"),
    "private/comparison.html": ("a report on several runs", "computed on private data without noise"),
    "private/model_card.md": ("a model card with exact metrics", "computed on private data without noise"),
    "private/README.txt": ("says that this part is private", "says nothing else"),
}  # fmt: skip


def readers(file: str) -> Reader:
    return "anybody" if file.startswith("release/") else "those with access to the data"


def about(file: str) -> tuple[str, str]:
    """What a file is, and why it may leave or may not."""
    unknown = (
        "no run writes it: look before you let it out" if file.startswith("release/") else "private like all beside it"
    )
    return FILES.get(file, ("", unknown))
