"""One plain file of divided tables, which no process ever has as a whole; and what tables of torch's own modules ask for."""

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
