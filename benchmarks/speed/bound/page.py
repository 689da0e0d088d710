"""The result of `python -m benchmarks bound` as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.speed.bound.measure import VARIANTS
from benchmarks.speed.markdown import images, markdown_table, megabytes, milliseconds, number, times

STAGE_HEAD = (
    "stage", "must move, MB", "must compute, MFLOP", "normals, exponentials, millions", "bound, ms", "measured, ms",
    "measured / bound",
)  # fmt: skip
STEP_HEAD = (
    "step", "bound", "measured", "measured / bound", "bound / PyTorch's bound", "measured / PyTorch's",
    "measured / with our table updates", "memory beyond the model, MB",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    rows = result["rows"]
    parts = [
        "# What a step has to take",
        "A lower bound for every stage of a step: what it has to compute and what it has to move, each at the best rate that "
        "this machine reaches at just that, and of both times the longer one. Matrix products are timed alone, at the shapes "
        "that the model really multiplies; their operands are not counted again as bytes. Counts come from watching one batch. "
        "The column of bounds is private over plain if both ran at their bounds, with these algorithms, on this machine; "
        "a plain step that is further from its own bound leaves room for a smaller measured ratio.",
        "The last column of times is against the best step without privacy on our own code: layers by autograd, tables by our "
        "compiled loops.",
        markdown_table(STEP_HEAD, step_lines(rows)),
        "Not in the bounds: activation functions, copies, gradients that are written to memory on the way, sorting, and what "
        "Python and torch spend on each operation. What stays in the processor's cache from one stage to the next can beat its "
        "bound. `table_softmax_loss` measures norms, and the gradient of the hidden states, in its forward pass, and computes "
        'the logits again for the sums. "The rest" is the best step less the best of its stages: what lies between them, and '
        "the machine's disturbances.",
    ]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        parts.append(f"## {mine[0]['title']}")
        parts.append(f"{mine[0]['setting']}; a batch touches {mine[0]['rows_touched']:,} rows.")
        parts.append(markdown_table(STAGE_HEAD, stage_lines(mine)))
        parts.append("What a private step takes longer than PyTorch's, ms, where it takes it:")
        parts.append(markdown_table(*difference_lines(mine)))
    parts += ["## The machine, at best", markdown_table(("what", "in a second"), rate_lines(result["rates"]))]
    if shown := images(plots, "bound_"):
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


def step_lines(rows: Rows) -> list[list[str]]:
    return [
        [
            f"{row['title']}, {VARIANTS[row['variant']]}",
            number(1e3 * row["bound"]),
            milliseconds(row),
            times(row["over_bound"]),
            number(row["bound_to_plain"]),
            times(row["ratio_to_plain"]),
            times(row["ratio_to_tuned"]),
            megabytes(row),
        ]
        for row in rows
    ]


def stage_lines(rows: Rows) -> list[list[str]]:
    """All variants of one workload, stage by stage."""
    lines = []
    for row in rows:
        for stage in row["stages"]:
            drawn = stage["normals"] + stage["exponentials"]
            counts = [stage["bytes"] / 1e6, stage["flops"] / 1e6, drawn / 1e6, 1e3 * stage["bound"]]
            best, over = stage["best"], stage["over_bound"]
            lines.append(
                [
                    f"{VARIANTS[row['variant']]}: {stage['stage']}",
                    *(number(value) if value else "-" for value in counts),
                    "-" if best is None else number(1e3 * best),
                    "-" if over is None else number(over),
                ]
            )
    return lines


# The stages of a private step, as those of a plain one that they stand for; what is left is privacy's own.
_COUNTERPARTS = {
    "forward": ("forward",),
    "backward": ("backward", "sums"),
    "update": ("noise", "update"),
    "the rest": ("the rest",),
}
_OWN = ("settling", "collect", "selection", "norms")


def difference_lines(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table, of the variants of one workload: their best stages less those of the plain step."""
    plain, *others = ({stage["stage"]: stage["best"] or 0.0 for stage in row["stages"]} for row in rows)
    lines = []
    for stage, counterparts in _COUNTERPARTS.items():
        more = [1e3 * (sum(other.get(part, 0.0) for part in counterparts) - plain.get(stage, 0.0)) for other in others]
        label = stage if counterparts == (stage,) else f"{' and '.join(counterparts)}, less {stage}"
        lines.append([label, *(f"{value:.1f}" for value in more)])
    for stage in _OWN:
        if any(stage in other for other in others):
            lines.append([stage, *(f"{1e3 * other[stage]:.1f}" if stage in other else "-" for other in others)])
    lines.append(["all", *(f"{1e3 * (row['best'] - rows[0]['best']):.1f}" for row in rows[1:])])
    return ["", *(VARIANTS[row["variant"]] for row in rows[1:])], lines


def rate_lines(rates: Mapping[str, Any]) -> list[list[str]]:
    lines = [
        [f"{what} {int(size) / 2**20:g} MB", f"{rate / 1e9:.1f} GB"]
        for what, key in (("reading", "read"), ("copying, read and written together,", "copy"))
        for size, rate in _ascending(rates[key])
    ]
    place = f"anywhere in {rates['table_bytes'] / 2**20:g} MB"
    lines += [
        [f"reading rows of {w} floats, {place}", f"{rate / 1e9:.2f} GB"] for w, rate in _ascending(rates["gather"])
    ]
    lines += [
        [f"changing rows of {w} floats, {place}", f"{rate / 1e9:.2f} GB"] for w, rate in _ascending(rates["scatter"])
    ]
    lines.append(["normal numbers", f"{rates['normals'] / 1e6:.0f} million"])
    lines.append(["exponentials", f"{rates['exponentials'] / 1e6:.0f} million"])
    products = sorted(rates["products"], key=_flops)
    if products:
        by_rate = sorted(products, key=lambda product: product["flops_per_second"])
        for what, product in (("largest", products[-1]), ("fastest", by_rate[-1]), ("slowest", by_rate[0])):
            shape = f"{product['m']} x {product['k']} x {product['n']}"
            shape = f"{product['batch']} of {shape}" if product["batch"] > 1 else shape
            lines.append(
                [
                    f"{what} of {len(products)} matrix products, {shape}",
                    f"{product['flops_per_second'] / 1e9:.1f} GFLOP",
                ]
            )
    return lines


def _flops(product: Mapping[str, Any]) -> int:
    return int(product["batch"] * product["m"] * product["k"] * product["n"])


def _ascending(rates: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return sorted(rates.items(), key=lambda pair: int(pair[0]))
