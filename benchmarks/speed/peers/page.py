"""Peers: SparseDP beside other libraries on the same problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import images, markdown_table, milliseconds, times
from benchmarks.speed.peers.bounds import TITLES


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    """`result` is what `python -m benchmarks peers` measured."""
    titles = {peer["variant"]: peer["title"] for peer in result["peers"]}
    here = [peer for peer in result["peers"] if "absent" not in peer]
    parts = [
        "# Beside other libraries",
        f"`python -m benchmarks peers`: {setting(result)}",
        markdown_table(
            ("rows", "peer", "a step, ms", "examples/s", "/ PyTorch", "/ AdaFEST", "memory beyond the table"),
            [
                cells
                for size in dict.fromkeys(row["rows"] for row in [*result["rows"], *result["left_out"]])
                for cells in _lines(result, size, titles)
            ],
        ),
        "Every peer runs in processes of its own, which take turns. The time of a step is without loading data. Memory is the "
        "most that was resident in the timed steps, less the table and what the process had after its imports and a tiny run. "
        "Libraries that write every example's gradient out do it for a part of the batch at a time. LazyDP's noise that rows "
        "still wait for at the end is not part of a step; EANA guarantees nothing.",
        f"Epsilon is what the library itself reports for {result['problem']['steps']:,} steps, with its own default accountant. "
        "The cases are tiny models, without noise: what one unit adds to the clipped sum must not be longer than C, and the sum "
        "must be the exact one.",
        markdown_table(
            ("peer", "versions", "epsilon", *TITLES.values()),
            [
                [
                    peer["title"],
                    ", ".join(f"{name} {version}" for name, version in peer["versions"].items()),
                    epsilon(peer),
                    *(verdict(peer.get("bounds", {}).get(kind)) for kind in TITLES),
                ]
                for peer in here
            ],
        ),
    ]
    remarks = [f"- {peer['title']}: absent: {peer['absent']}" for peer in result["peers"] if "absent" in peer]
    remarks += [
        f"- {peer['title']}, {TITLES[kind]}: refused: {bound['reason']}"
        for peer in here
        for kind, bound in peer.get("bounds", {}).items()
        if bound["outcome"] == "refused"
    ]
    if remarks:
        parts.append("\n".join(remarks))
    if shown := images(plots, "peers_"):
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


def setting(result: Mapping[str, Any]) -> str:
    """The problem that all peers are given, in one sentence."""
    problem = result["problem"]
    return (
        f"one table of dim {problem['dim']}, {problem['ids']} ids for each example, whose rows side by side go through layers of "
        f"{problem['hidden']} and 1; batch {problem['batch']}, SGD, clipping at {problem['clip']:g}, noise multiplier "
        f"{problem['noise_multiplier']:g}, delta {problem['delta']:g}, {problem['examples']:,} examples; "
        f"{result['machine']['threads']} threads, at most {result['limit_seconds']:g} s for a step and "
        f"{result['limit_bytes'] / 1e9:.1f} GB for a process."
    )


def epsilon(peer: Mapping[str, Any]) -> str:
    """The epsilon and what computed it; a dash without privacy. JSON has null for infinity."""
    if "epsilon" not in peer:
        return "-"
    return "infinite" if peer["epsilon"] is None else f"{peer['epsilon']:.3f} ({peer['accountant']})"


def verdict(bound: Mapping[str, Any] | None) -> str:
    if bound is None:
        return "-"
    return f"exceeds {bound['part']:.2f}x" if bound["outcome"] == "exceeds" else str(bound["outcome"])


def _lines(result: Mapping[str, Any], size: int, titles: Mapping[str, str]) -> list[list[str]]:
    lines = [
        [
            f"{size:,}",
            titles[row["variant"]],
            milliseconds(row),
            f"{row['examples_per_second']:,.0f}",
            times(row.get("ratio_to_plain")),
            times(row.get("ratio_to_adafest")),
            _memory(**row["extra_memory"]),
        ]
        for row in result["rows"]
        if row["rows"] == size
    ]
    gone = [skipped for skipped in result["left_out"] if skipped["rows"] == size]
    return lines + [[f"{size:,}", titles[skipped["variant"]], skipped["reason"], *["-"] * 4] for skipped in gone]


def _memory(bytes: int, share_of_table: float) -> str:
    """The share, where the table is not small beside a batch."""
    share = f" ({100 * share_of_table:.1f} %)" if share_of_table < 10 else ""
    return f"{bytes / 1e6:.0f} MB{share}"
