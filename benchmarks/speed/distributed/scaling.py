"""A model of a step on more hosts than there are here, of constants that are measured here. It is a model, and says so.

Each host has one rank with the same part of a batch (weak scaling), and the tables grow with the hosts. Then a rank does the
same work as alone, and besides it sends:

    seconds(N) = fixed + per_row rows + latency rounds(N) + bytes(N) / bandwidth

fixed and per_row are fitted to steps of one process on two sizes of batches; latency and bandwidth are those of an all-to-all
between two processes on loopback. An all-to-all or all-gather has N - 1 rounds, an all-reduce or reduce-scatter, in a ring,
2 (N - 1). What is divided by owners, ids, rows and gradients, and what a ring adds up, is counted on two ranks and grows by
(N - 1) / N. Sums of a row-wise table's rows are sent for the examples of all ranks, and grow by N - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOSTS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = {"all_to_all": 1, "all_gather": 1, "all_reduce": 2, "reduce_scatter": 2}


@dataclass(frozen=True)
class Constants:
    latency: float  # seconds of a round
    bandwidth: float  # bytes a second


def constants_of(messages: Mapping[str, Mapping[str, float]]) -> Constants:
    """Of the best times of all-to-alls between two ranks, by bytes of each rank, half of which stay where they are."""
    times = {int(size): timing["best"] for size, timing in messages.items()}
    least, most = min(times), max(times)
    return Constants(times[least], (most - least) / 2 / max(times[most] - times[least], 1e-9))


def work_of(one: Mapping[str, Any], double: Mapping[str, Any]) -> tuple[float, float]:
    """(fixed, per_row): of steps of one process on a batch, and on one that is twice as large."""
    rows, touched = double["rows_touched"] - one["rows_touched"], one["rows_touched"]
    per_row = max(0.0, (double["best"] - one["best"]) / rows) if rows > 0 else 0.0
    per_row = min(per_row, one["best"] / touched)  # nothing takes less than no time
    return one["best"] - per_row * touched, per_row


def seconds(
    hosts: int, row: Mapping[str, Any], alone: Mapping[str, Any], work: tuple[float, float], constants: Constants,
    dense_bytes: int,
) -> float:  # fmt: skip
    """`row` is what was measured on two ranks, and `alone` on one."""
    fixed, per_row = work
    rounds = (hosts - 1) * sum(_ROUNDS.get(kind, 1) * count for kind, count in row["messages"].items())
    sent = wire_bytes(hosts, row, dense_bytes)
    return fixed + per_row * alone["rows_touched"] + constants.latency * rounds + sent / constants.bandwidth


def wire_bytes(hosts: int, row: Mapping[str, Any], dense_bytes: int) -> float:
    """That a rank sends in a step. `dense_bytes` are those of the dense parameters."""
    counted, total = row["bytes"], row["bytes"]["step"]
    growing = 0.0
    if row["setting"]["sharding"] == "row_wise":
        growing = counted.get("forward", 0.0)
        if row["variant"] == "plain":  # its gradients come back the way of the sums, beside DistributedDataParallel's
            growing += max(0.0, counted.get("backward", 0.0) - dense_bytes)
    return growing * (hosts - 1) + (total - growing) * 2 * (hosts - 1) / hosts
