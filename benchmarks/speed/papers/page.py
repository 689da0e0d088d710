"""What the papers published, beside what all parts together measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.speed import markdown
from benchmarks.speed.dual import measure as dual
from benchmarks.speed.lazydp import measure as lazydp
from benchmarks.speed.papers.published import COMPARISONS, PAPERS, Comparison, Published, Results, Value
from benchmarks.speed.tied import measure as tied

# The part in which our counterparts are, and the paper's setting.
_SETTINGS = {
    "DP-AdaFEST": ("vocabulary", "an embedding layer in TensorFlow, dim 64, batch 1,024."),
    "LazyDP": (
        "lazydp",
        "MLPerf's DLRM with 96 GB of tables on a server's Xeon E5-2698v4, its networks on a V100, batch 2,048.",
    ),
    "EANA": (
        "dual",
        "a dual encoder over MovieLens 20M, batch 64, dim 128, and a larger one over industry data, on workers and parameter "
        "servers.",
    ),
    "DPFormer": ("tied", "a Transformer of dim 64 over MovieLens and Amazon data on a V100 with 16 GB."),
}


def page(results: Results) -> str:
    """A table for each paper, from the results of all parts by name."""
    pieces = [
        "# The papers' tables",
        "Ratios of times, as published and as measured here. A range is over the settings that the line names; a dash was not "
        "measured.",
    ]
    for paper in PAPERS:
        part, setting = _SETTINGS[paper]
        lines = [_line(comparison, results) for comparison in COMPARISONS if comparison.published.paper == paper]
        pieces += [
            f"## {paper}",
            f"The paper: {setting} Ours: {_setting(part, results.get(part))}.",
            markdown.markdown_table(("what", "paper", "ours", "what differs"), lines),
        ]
    return "\n\n".join(pieces)


def _line(comparison: Comparison, results: Results) -> list[str]:
    number = comparison.published
    return [
        f"{number.what} ({number.figure})",
        published(number),
        ours(comparison.ours(results), number),
        comparison.differs,
    ]


def published(number: Published) -> str:
    value = number.value if isinstance(number.value, str) else _shown(number.value)
    return f"{number.bound} {value}{number.unit}".strip()


def ours(value: Value | None, number: Published) -> str:
    return "-" if value is None else f"{_shown(value)}{number.unit}"


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_shown, value))
    return markdown.number(value)


def _setting(part: str, result: Mapping[str, Any] | None) -> str:
    """The setting of our counterparts."""
    if result is None:
        return f"`python -m benchmarks {part}` was not run"
    if part == "vocabulary":
        at = f"dim {result['dim']}, batch {result['batch']:,}"
    elif part == "lazydp":
        sizes = [row["setting"]["gigabytes"] for row in result["rows"]]
        varied = f"; tables of {min(sizes):g} to {max(sizes):g} GB" if len(set(sizes)) > 1 else ""
        at = f"{lazydp.Setting(**result['base'])}{varied}"
    else:
        at = str({"dual": dual, "tied": tied}[part].Setting(**result["base"]))
    return f"`python -m benchmarks {part}` on {result['machine']['threads']} threads of a CPU, {at}"
