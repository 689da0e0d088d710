"""`python -m benchmarks memory`: that it sees memory, what it refuses, and that all phases come out."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.command import main, make_parser
from benchmarks.speed import watch
from benchmarks.speed.machine import total_memory
from benchmarks.speed.memory import measure as memory
from benchmarks.speed.memory import options
from benchmarks.speed.memory.page import page
from benchmarks.speed.memory.plots import write_plots

from sparsedp.errors import SparseDPError

MEGABYTE = 1 << 20
TINY = 0.004  # GB
ALL = ["built", "private", "steps", "evaluated", "settled", "written", "loaded", "saved"]


# ------------------------------------------------------------------ watching


@contextmanager
def pages_in_use(size: int) -> Iterator[None]:
    """Memory of its own: an array could take over pages that the process has already."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
        yield


def test_the_watch_sees_what_is_gone_again() -> None:
    with watch.Watch() as seen:

        def saw_what_was_there_for(seconds: float) -> bool:
            base = watch.memory_now()
            with pages_in_use(64 * MEGABYTE):
                time.sleep(seconds)
            return seen.peak() - base > 60 * MEGABYTE

        assert any(map(saw_what_was_there_for, (0.05, 0.5, 5, 30)))  # the first, unless the machine is busy
        seen.peak()
        base = watch.memory_now()
        assert abs(seen.peak() - base) < 30 * MEGABYTE
        with pages_in_use(64 * MEGABYTE):
            assert watch.memory_now() - base > 60 * MEGABYTE


def test_mapped_files_are_not_anonymous(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.ones(16 * MEGABYTE), path)
    forgotten = watch.forget_most_pages()
    with watch.Watch() as seen:
        before, resident = seen.peak(), watch.memory_now(b"VmRSS")
        loaded = torch.load(path, mmap=True)
        assert float(loaded.sum()) == 16 * MEGABYTE
        assert seen.peak() - before < 30 * MEGABYTE
        if forgotten:
            assert watch.memory_now(b"VmHWM") - resident > 60 * MEGABYTE


def test_fields_of_the_status() -> None:
    status = b"Name:\tx\nVmHWM:\t  2048 kB\nRssAnon:\t 12 kB\nRssFile:\t 1 kB\n"
    assert watch.memory_of(status, b"RssAnon") == 12 * 1024
    assert watch.memory_of(status, b"VmHWM") == 2048 * 1024


def test_without_proc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "can_watch", lambda: False)
    with pytest.raises(SparseDPError, match="use Linux"):
        memory.bench_memory(gigabytes=TINY)


# ------------------------------------------------------------------ what there has to be


def test_what_is_lacking_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.memory_lacking(10**9, 3 * 10**9) is None
    assert memory.memory_lacking(12 * 10**9, 13 * 10**9) == "13.0 GB of memory are available and 14.2 GB are needed"
    assert memory.disk_problem(tmp_path, 1000) is None
    said = memory.disk_problem(tmp_path, 10**15)
    assert said is not None and "1100000.0 GB are needed: choose another with --folder" in said
    monkeypatch.setattr(memory, "file_system", lambda folder, mounts: "tmpfs")
    said = memory.disk_problem(tmp_path, 1000)
    assert said is not None and "is kept in memory (tmpfs)" in said


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    inside = tmp_path / "a b" / "c"
    inside.mkdir(parents=True)
    mounts = f"disk / ext4 rw 0 0\nx {str(tmp_path / 'a b').replace(' ', chr(92) + '040')} tmpfs rw 0 0\n"
    assert memory.file_system(inside, mounts) == "tmpfs"
    assert memory.file_system(tmp_path, mounts) == "ext4"


# ------------------------------------------------------------------ running


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in this process: what it takes is then not to be relied on, and nothing has to be loaded again."""

    def run(module: str, setting: Any, variant: str) -> Any:
        assert module == memory.__name__
        return json.loads(json.dumps(memory._measure(setting, variant)))

    monkeypatch.setattr(memory, "in_own_process", run)


def quiet(run: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> str:
    assert run() == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_all_phases_of_all_variants(here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, plots, result = tmp_path / "files", tmp_path / "plots", tmp_path / "memory.json"
    files.mkdir()
    command = ["memory", f"--gigabytes={TINY}", "--batch=64", f"--folder={files}", f"--json={result}"]
    said = quiet(lambda: main([*command, f"--plots={plots}"]), capsys)
    found = json.loads(result.read_text())
    assert found["benchmark"] == "memory" and found["left_out"] == []
    assert found["table_bytes"] == found["table_rows"] * 64 * 4 == pytest.approx(TINY * 1e9, rel=1e-3)
    phases = {name: [row["phase"] for row in found["rows"] if row["variant"] == name] for name in memory.VARIANTS}
    assert phases == {
        "lazydp": ALL,
        "adafest": [phase for phase in ALL if phase != "settled"],
        "eana": ["built", "private", "steps", "evaluated"],
        "plain": ["built", "steps", "evaluated"],
    }
    for row in found["rows"]:
        assert row["seconds"] > 0 and row["peak_bytes"] >= row["bytes"]
        assert row["peak_share"] == row["peak_bytes"] / found["table_bytes"]
        assert ("megabytes_per_second" in row) == (row["phase"] in memory.ON_DISK)
        if row["phase"] in memory.ON_DISK:
            assert row["file_bytes"] > found["table_bytes"]
            assert row["megabytes_per_second"] == pytest.approx(row["file_bytes"] / 1e6 / row["seconds"])
    assert list(files.iterdir()) == []
    for word in ("LazyDP", "AdaFEST", "EANA", "PyTorch", "checkpoint loaded"):
        assert word in said
    text = page(found, [path.name for path in plots.iterdir()])
    assert text.startswith("# ") and "![memory peaks](memory_peaks.png)" in text
    assert f"{100 * found['rows'][0]['peak_share']:.1f} %" in text and "Skipped" not in text


@pytest.mark.slow
def test_in_a_process_of_its_own_nothing_of_the_tables_size_is_made(tmp_path: Path) -> None:
    """Loosely, since the table is small; how little it is, the benchmark says."""
    found = memory.bench_memory(gigabytes=0.1, variants=["lazydp"], folder=tmp_path)
    assert [row["phase"] for row in found["rows"]] == ALL
    assert max(row["peak_share"] for row in found["rows"]) < 0.5
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_skipped_and_reported(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "disk_problem", lambda folder, table: "the disk is full")
    command = ["memory", f"--gigabytes={TINY}", "--batch=64", "--variant=adafest", "--variant=plain"]
    said = quiet(lambda: main([*command, f"--json={tmp_path / 'r.json'}"]), capsys)
    found = json.loads((tmp_path / "r.json").read_text())
    skipped = [row for row in found["rows"] if "skipped" in row]
    assert skipped == [{"variant": "adafest", "phase": p, "skipped": "the disk is full"} for p in memory.ON_DISK]
    assert "Skipped: the disk is full." in said
    assert "Skipped: the disk is full." in page(found, []) and "checkpoint" not in page(found, []).split("Anonymous")[0]
    assert write_plots(found, tmp_path) == ["memory_peaks.png"]

    monkeypatch.setattr(memory, "available_memory", lambda: 5)
    said = quiet(lambda: main([*command, f"--json={tmp_path / 'r.json'}"]), capsys)
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["rows"] == [] and [gone["variant"] for gone in found["left_out"]] == ["adafest", "plain"]
    assert "Left out: AdaFEST, 0.0 GB of memory are available" in " ".join(said.split())
    assert "Left out: PyTorch" in page(found, [])
    assert write_plots(found, tmp_path) == []


def test_files_are_removed_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: str, setting: Any, variant: str) -> Any:
        (Path(setting.folder) / "checkpoint.pt").write_bytes(b"x")
        raise SparseDPError("killed")

    monkeypatch.setattr(memory, "in_own_process", failing)
    with pytest.raises(SparseDPError, match="killed"):
        memory.bench_memory(gigabytes=TINY, variants=["lazydp"], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in memory.VARIANTS:
        assert make_parser().parse_args(["memory", f"--variant={name}"]).variant == [name]
    assert options.FULL["batch"] == memory.BATCH
    asked: list[dict[str, Any]] = []

    def bench(**chosen: Any) -> dict[str, Any]:
        asked.append(chosen)
        raise SparseDPError("enough")

    monkeypatch.setattr(options, "bench_memory", bench)
    assert main(["memory"]) != 0 and main(["memory", "--quick"]) != 0
    assert asked[0]["gigabytes"] == total_memory() / 2e9 and asked[0]["variants"] == tuple(memory.VARIANTS)
    assert asked[1]["gigabytes"] == 0.2 and asked[1]["variants"] == ("lazydp", "adafest")
    assert main(["memory", f"--folder={tmp_path / 'none'}"]) != 0 and len(asked) == 2
