"""`python -m benchmarks distributed` as a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.distributed.scaling import HOSTS
from benchmarks.speed.distributed.setting import MODELS, SHARDINGS, VARIANTS, WAYS, Setting
from benchmarks.speed.markdown import images, markdown_table, milliseconds, number, stage_lines, times

Rows = Sequence[Mapping[str, Any]]


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in result["libraries"].items())
    pieces = [
        "# Tables in several processes, against TorchRec",
        f"{result['ranks']} processes with a thread each, gloo on loopback ({libraries}). TorchRec trains as its users do: SGD "
        "fused into the tables' backward pass, DistributedDataParallel for the dense part. Each private step is on the same "
        "batches, with sparse mechanisms set to change about as many rows as a batch touches. DP-SGD has tables of a tenth of "
        "the size, beside TorchRec on those. Processor time is that of the rank that used most; another program that takes the "
        "processor disturbs it less.",
    ]
    for setting in dict.fromkeys(Setting(**row["setting"]) for row in result["rows"]):
        pieces += _setting(setting, [row for row in result["rows"] if Setting(**row["setting"]) == setting])
    if result["rows"]:
        pieces += [_SENT, _why(result["rows"])]
    if result["scaling"] is not None:
        pieces += _scaling(result["scaling"])
    if result["lookups"]:
        pieces += _lookups(result["lookups"])
    if result.get("apart"):  # a result of before has none
        pieces += ["## Tables divided one by one", _APART]
        pieces.append("\n".join(f"- {Setting(**row['setting'])}: {said_apart(row)}" for row in result["apart"]))
    if result["large"] is not None:
        pieces += _large(result["large"])
    pieces.append(images(plots, "distributed_"))
    return "\n\n".join(piece for piece in pieces if piece)


_SENT = """Bytes are those that the first rank wrote into its sockets, as the system counts them for each socket: TorchRec's
messages, DistributedDataParallel's and ours, with gloo's headers and its ways of adding up. A private step does not send back
a gradient for each example, as TorchRec's backward pass does, but one clipped sum for each row, and the row's number. AdaFEST
sends a number for each touched row (the counts) and a byte back (the mask), and then sums of selected rows alone. gloo adds up
row-wise tables' rows as an all-reduce, so that TorchRec's own forward pass sends most there, with privacy and without."""

_TIME, _BYTES = 1.25, 1.1  # of TorchRec's: the budget
_SHARE = 0.1  # of what a step takes longer: parts that are less are not named
# What of a private step stands beside what of TorchRec's, whose backward pass sends its gradients and moves the tables.
_PARTS = {
    "forward": (("forward", "settling"), ("forward",)),
    "backward, clipping, sums and their messages": (
        ("backward", "collect", "norms", "sums", "ranks", "update"), ("backward", "update"),
    ),
    "selection": (("selection",), ()),
    "noise": (("noise",), ()),
}  # fmt: skip
_BETWEEN = "the rest of the step"


def _why(rows: Rows) -> str:
    """Of each setting in which a step takes longer than the budget: which parts of the slowest one do."""
    settings = dict.fromkeys(Setting(**row["setting"]) for row in rows)
    lines = [line for setting in settings if (line := _beyond(setting, rows)) is not None]
    sent = [
        f"{VARIANTS[row['variant']]} ({Setting(**row['setting'])}: {number(row['bytes_ratio_to_plain'])})"
        for row in rows
        if row["variant"] != "plain" and (row["bytes_ratio_to_plain"] or 0) > _BYTES
    ]
    pieces = [f"No private step takes more than {_TIME} times as long."]
    if lines:
        head = (
            f"Private steps that take more than {_TIME} times as long, and where the slowest of each has its time beyond "
            "TorchRec's. The rest of a step is agreement of the ranks, ledger and report, and that steps and stages were best at "
            "different times:"
        )
        pieces = [head, "\n".join(lines)]
    pieces.append(f"More than {_BYTES} times as much is sent by {', '.join(sent) or 'none'}.")
    return "\n\n".join(pieces)


def _beyond(setting: Setting, rows: Rows) -> str | None:
    mine = [row for row in rows if Setting(**row["setting"]) == setting]
    plain = next(row for row in mine if row["variant"] == "plain")
    slow = [row for row in mine if row["variant"] != "plain" and row["ratio_to_plain"]["best"] > _TIME]
    if not slow:
        return None
    slowest = max(slow, key=lambda row: row["ratio_to_plain"]["best"])
    more = {name: _of_stages(slowest, stages) - _of_stages(plain, others) for name, (stages, others) in _PARTS.items()}
    more[_BETWEEN] = _rest(slowest) - _rest(plain)
    least = _SHARE * (slowest["best"] - plain["best"])
    named = sorted((name for name in more if more[name] > least), key=lambda name: -more[name])
    return (
        f"- {setting}: {', '.join(VARIANTS[row['variant']] for row in slow)}. "
        f"{VARIANTS[slowest['variant']]}, {number(slowest['ratio_to_plain']['best'])} times TorchRec's "
        f"{number(1e3 * plain['best'])} ms: {', '.join(f'{name} +{1e3 * more[name]:.1f} ms' for name in named)}."
    )


def _of_stages(row: Mapping[str, Any], names: Sequence[str]) -> float:
    return sum(row["stages"].get(name, 0.0) for name in names)


def _rest(row: Mapping[str, Any]) -> float:
    return float(row["best"]) - sum(row["stages"].values())


def _setting(setting: Setting, rows: Rows) -> list[str]:
    names = {row["variant"]: VARIANTS[row["variant"]] for row in rows}
    table = markdown_table(
        ("", "ms", "/ TorchRec", "processor time / TorchRec", "kB sent", "/ TorchRec", "messages"),
        (
            [
                names[row["variant"]], milliseconds(row), times(row["ratio_to_plain"]),
                times(row["processor_ratio_to_plain"]), number(row["bytes"]["step"] / 1e3),
                "-" if row["bytes_ratio_to_plain"] is None else number(row["bytes_ratio_to_plain"]),
                str(sum(row["messages"].values())),
            ]
            for row in rows
        ),
    )  # fmt: skip
    return [f"## {setting}", table, stage_lines(rows, names)]


def _scaling(scaling: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in scaling["rows"]:
        setting, model = Setting(**row["setting"]), []
        if "model" in row:
            model = [
                *(number(1e3 * row["model"][str(hosts)]) for hosts in HOSTS[1:]),
                number(row["model"]["2"] / row["measured"]["2"]), number(row["model_bytes"][str(HOSTS[-1])] / 1e6),
            ]  # fmt: skip
        lines.append([
            f"{MODELS[setting.model]}, {SHARDINGS[setting.sharding]}", VARIANTS[row["variant"]],
            *(number(1e3 * row["measured"][ranks]) for ranks in ("1", "2")), *model,
        ])  # fmt: skip
    measured = (
        "Each rank has the same part of a batch, and the tables grow with the ranks. 1 and 2 processes are measured, on cores "
        "that share a memory."
    )
    if not all("model" in row for row in scaling["rows"]):
        quick = (
            f"{measured} These are small sizes and few repeats: the model of more hosts is fitted to a full run alone."
        )
        return ["## Weak scaling", quick, markdown_table(("ms", "", "measured: 1", "2"), lines)]
    errors = [row["model"]["2"] / row["measured"]["2"] for row in scaling["rows"]]
    error = f" On 2, it says {number(min(errors))} to {number(max(errors))} times what was measured." if errors else ""
    head = (
        "ms", "", "measured: 1", "2", f"model: {HOSTS[1]}", *map(str, HOSTS[2:]), "model / measured, on 2",
        f"MB sent at {HOSTS[-1]}",
    )  # fmt: skip
    return [
        "## Weak scaling",
        f"{measured} More hosts are **a model, not a measurement**: {_MODEL} Its constants were measured here: "
        f"{1e6 * scaling['latency']:.0f} µs for a round, {scaling['bandwidth'] / 1e9:.2f} GB a second, on loopback; a network "
        f"between hosts has others.{error}",
        markdown_table(head, lines),
        "Sums of a row-wise table's rows are sent for the examples of all ranks, as partial sums of each: TorchRec's rows-wise "
        "bytes grow with the hosts. A private step has that in its forward pass alone.",
    ]


_MODEL = (
    "a step's time alone, fitted as `fixed + per_row × rows` on two sizes of batches, plus `latency × rounds(N) + bytes(N) / "
    "bandwidth`, where an all-to-all has N - 1 rounds and an all-reduce 2 (N - 1), and the bytes of 2 ranks grow by (N - 1) / N "
    "or, for row-wise sums, by N - 1."
)


def _lookups(rows: Rows) -> list[str]:
    lines = [
        [f"{row['model']}, {row['tables']} tables", number(1e3 * row["step"]["median"]),
         *(f"{1e3 * row['ways'][way]['median']:.2f} ({100 * row['ways'][way]['share_of_step']:.1f} %)" for way in WAYS)]
        for row in rows
    ]  # fmt: skip
    return [
        "## Many tables in one process",
        f"One id a feature, batch {rows[0]['batch']}, one thread: processor time of EANA's whole step, and of the lookups alone, "
        "in several ways; medians, and the share of the step. A batched lookup is not built in for one process: the difference "
        "to PyTorch's lookups one by one is what it could save.",
        markdown_table(("ms", "private step", *WAYS.values()), lines),
    ]


_APART = """`shard_tables` gives each table of `nn.Embedding` and `nn.EmbeddingBag` messages of its own where it is looked up;
a collection asks for all of its tables at once. What comes after the backward pass goes in the same messages for all tables,
either way. EANA's step:"""


def said_apart(row: Mapping[str, Any]) -> str:
    one, other = row["collection"], row["apart"]
    return (
        f"{number(1e3 * other['best'])} ms and {other['messages']} messages with {len(Setting(**row['setting']).table_sizes)} "
        f"tables divided one by one, {number(1e3 * one['best'])} ms and {one['messages']} in a collection "
        f"({other['best'] / one['best']:.1f} times as long)."
    )


def _large(large: Mapping[str, Any]) -> list[str]:
    setting = Setting(**large["setting"])
    head = f"## A table of {number(large['table_bytes'] / 1e9)} GB, divided among two processes"
    if large["left_out"] is not None:
        return [head, f"Left out: {large['left_out']}."]
    lines = []
    for row in large["rows"]:
        peaks = [rank["peak_bytes"] / 1e9 for rank in row["ranks"]]
        seconds = row["ranks"][0]["seconds"]
        lines.append([
            VARIANTS[row["variant"]], str(len(seconds)), number(1e3 * statistics.median(seconds)),
            *(f"{peak:.2f}" for peak in peaks), f"{sum(peaks):.2f}",
        ])  # fmt: skip
    return [
        head,
        f'{setting}: {setting.table_sizes[0]:,} rows of dim {setting.dim}, made on the device "meta" and filled shard by shard. '
        "The most resident memory of each rank, from before the model was made:",
        markdown_table(("", "steps", "ms, median", "GB: rank 0", "rank 1", "both"), lines),
    ]
