"""Tables of torch's own modules: one plain file of them, which no process ever has as a whole; their messages; what they ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
from launch import launch

pytestmark = pytest.mark.distributed


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_the_file_is_written_without_a_whole_table_in_memory(tmp_path: Path) -> None:
    for ended in launch(2, "memory_of_export", str(tmp_path / "model.pt"), 1_000_000, 64):
        found = ended.value
        assert found["names"] and found["distance"] == 0
        assert found["grown"] < found["table"] / 3, found


def test_a_weight_that_is_used_as_a_whole_is_refused_by_name() -> None:
    for ended in launch(2, "whole_weight"):
        assert "country.weight" in ended.value and "whole" in ended.value, ended.value


@pytest.mark.parametrize("mechanism", ["adafest", "lazydp"])
def test_tables_share_their_messages_after_the_lookups(mechanism: str) -> None:
    """Each asks for its rows by itself; what is said of rows, and their sums, go in one message for all tables."""
    one, six = (launch(2, "messages_of_divided", tables, mechanism)[0].value for tables in (1, 6))
    assert one["step"] == six["step"] > 0
    assert six["forward"] == 6 * one["forward"] > 0
