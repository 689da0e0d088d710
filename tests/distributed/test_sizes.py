"""What `sparsedp plan --nproc` predicts of messages is what a real run sends."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torchrec")
from launch import launch

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's count of a socket's bytes"),
]
# Which of the predicted numbers are in which messages.
PURPOSES = {
    ("forward", "alltoall_base", "int64"): ("ids", "settling"),
    ("forward", "lookups", "float32"): ("lookups",),
    ("step", "alltoall_base", "int64"): ("rows",),
    ("step", "alltoall_base", "float64"): ("counts",),
    ("step", "alltoall_base", "uint8"): ("mask",),
    ("step", "alltoall_base", "float32"): ("clipped_rows", "picks"),
    ("step", "allreduce", "float32"): ("dense",),
}


def by_message(sent: dict[tuple[str, str, str], float]) -> dict[tuple[str, str, str], float]:
    """The counted bytes, those of results of lookups together however they came."""
    found: dict[tuple[str, str, str], float] = {}
    for (phase, kind, dtype), size in sent.items():
        kind = "lookups" if phase == "forward" and dtype == "float32" else kind
        found[phase, kind, dtype] = found.get((phase, kind, dtype), 0) + size
    return found


@pytest.mark.parametrize(
    ("ranks", "mechanism", "sharding", "pooled"),
    [
        (2, "adafest", "row_wise", True),
        (2, "adafest", "table_wise", True),
        (2, "adafest", "column_wise", True),
        (2, "dpsgd", "data_parallel", True),
        (2, "lazydp", "row_wise", False),
        (2, "eana", "table_wise", False),
        (2, "adafest", "chosen", True),
        (3, "fest, counted", "row_wise", True),
        (3, "lazydp", "table_row_wise", True),
        (3, "exponential", "table_wise", True),
    ],
)
def test_bytes_are_those_that_are_sent(ranks: int, mechanism: str, sharding: str, pooled: bool) -> None:
    results: list[dict[str, Any]] = [
        ended.value for ended in launch(ranks, "sent_and_predicted", mechanism, sharding, pooled)
    ]
    # Popular rows are the first ones, and so on the first rank: of divided rows it is the ranks' mean that is predicted.
    groups = [results] if sharding in ("row_wise", "table_row_wise", "chosen") else [[result] for result in results]
    for group in groups:

        def mean(numbers: Any) -> float:
            return sum(numbers) / len(group)

        for message, purposes in PURPOSES.items():
            if mechanism == "exponential" and "picks" in purposes:
                continue  # of which some are gathered, below in the total
            predicted = mean(sum(one["predicted"][purpose] for purpose in purposes) for one in group)
            counted = mean(by_message(one["sent"]).get(message, 0.0) for one in group)
            assert counted == pytest.approx(predicted, rel=0.04, abs=120), (message, [one["sent"] for one in group])
        predicted = mean(sum(one["predicted"].values()) for one in group)
        assert mean(one["left"] for one in group) == pytest.approx(predicted, rel=0.04)
