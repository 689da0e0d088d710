"""`python -m benchmarks vocabulary`: all sizes and variants in turns, each with its own row, and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from benchmarks.speed.timing import Timing, interleaved
from benchmarks.speed.vocabulary import measure as vocabulary
from benchmarks.speed.vocabulary.page import page

SIZES = [2000, 5000]
VARIANTS = ["plain", "dpsgd", "adafest", "fest", "eana", "exponential"]


def test_all_sizes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow moment of the machine meets small and large tables alike."""
    calls = []

    def watched(variants: Mapping[str, Callable[[], None]], repeats: int, warmup: int) -> dict[str, Timing]:
        calls.append(list(variants))
        return interleaved(variants, repeats, warmup=warmup)

    monkeypatch.setattr(vocabulary, "interleaved", watched)
    result = vocabulary.bench_vocabulary(SIZES, repeats=1, memory=False)
    assert calls == [[f"{name} {size}" for size in SIZES for name in VARIANTS]]
    assert [(row["rows"], row["variant"]) for row in result["rows"]] == [(s, name) for s in SIZES for name in VARIANTS]
    for row in result["rows"]:
        assert ("noise" in row["stages"]) == (row["variant"] != "plain") and "memory" not in row
        own = {other["variant"]: other["best"] for other in result["rows"] if other["rows"] == row["rows"]}
        assert row["ratio_to_plain"]["best"] == row["best"] / own["plain"]
        assert row["dpsgd_over_this"]["best"] == own["dpsgd"] / row["best"]
    assert "| 5,000 |" in page(result, [])
