"""`python -m benchmarks compare`: two packages in turns, each in a process of its own, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.command import main
from benchmarks.compare import measure, options
from benchmarks.compare.measure import Worker, bench_compare, checked_out, spread
from benchmarks.compare.problem import VARIANTS, Problem
from benchmarks.compare.worker import answer, make_steps
from benchmarks.speed.processes import ROOT

from sparsedp.errors import SparseDPError

TINY = {
    "step": Problem("step", VARIANTS["step"], batch=8, scale=0.0001),
    "vocabulary": Problem("vocabulary", VARIANTS["vocabulary"], batch=8, rows=2000),
    "tied": Problem("tied", VARIANTS["tied"], batch=4, rows=50, length=5),
}


def worktrees() -> str:
    return subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "mechanism",
    ["plain", pytest.param("eana", marks=pytest.mark.slow)],  # whose loops are compiled in the new folder
)
def test_this_tree_against_its_own_commit(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []

    @contextmanager
    def watched(revision: str) -> Iterator[tuple[Path, str]]:
        with checked_out(revision) as (folder, commit):
            folders.append(folder)
            yield folder, commit

    monkeypatch.setattr(measure, "checked_out", watched)
    path = tmp_path / "result.json"
    sizes = ["--batch=8", "--rows=2000", "--repeats=2", f"--json={path}"]
    assert main(["compare", "--base=HEAD", "--part=vocabulary", f"--mechanism={mechanism}", *sizes]) == 0
    result = json.loads(path.read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert head.startswith(result["base"])
    assert [row["variant"] for row in result["rows"]] == list(dict.fromkeys(["plain", mechanism]))
    for row in result["rows"]:
        assert row["ratio_of_best"] == row["this"]["best"] / row["base"]["best"] > 0
        assert row["processor"]["this"] > 0 < row["processor"]["base"]
        for ratio in (row["ratio"], row["processor_ratio"]):
            assert 0 < ratio["lower"] <= ratio["median"] <= ratio["upper"]
    assert mechanism in capsys.readouterr().out
    assert len(folders) == 1 and not folders[0].exists() and str(folders[0]) not in worktrees()


@pytest.mark.parametrize("part", TINY)
def test_every_variant_takes_steps(part: str) -> None:
    steps = make_steps(TINY[part])
    assert tuple(steps) == VARIANTS[part]
    for name in steps:
        taken = answer(steps, f"{name} 2\n")
        assert len(taken["seconds"]) == 2 and taken["processor"] >= 0


def test_packages_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is first changes from turn to turn, and both take as many steps in a turn."""
    taken = []

    class Watched(Worker):
        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None: ...

        def require_package(self) -> None: ...

        def take(self, variant: str, count: int) -> dict[str, object]:
            taken.append((self._package == ROOT / "src", count))
            return {"seconds": [0.004] * count, "processor": 0.004 * count}

    monkeypatch.setattr(measure, "Worker", Watched)
    result = bench_compare(Problem("vocabulary", ("plain",), batch=1, rows=1), "HEAD", repeats=4)
    turns = taken[-8:]
    assert [is_this for is_this, _ in turns] == [True, False, False, True, True, False, False, True]
    assert {count for _, count in turns} == {5}
    assert result["rows"][0]["ratio"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}


def test_the_checkout_goes_also_after_an_error() -> None:
    with pytest.raises(KeyError), checked_out("HEAD") as (folder, _):
        assert (folder / "src" / "sparsedp").is_dir() and str(folder) in worktrees()
        raise KeyError
    assert not folder.exists() and str(folder) not in worktrees()


def test_what_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SparseDPError, match="failed"), checked_out("no-such-revision"):
        pass
    assert main(["compare", "--base=HEAD", "--part=tied", "--mechanism=eana"]) == 2
    assert "tied has no variant 'eana'" in "".join(capsys.readouterr())
    with (
        Worker(Problem("vocabulary", ("no-such-variant",), batch=2, rows=10), ROOT / "src") as worker,
        pytest.raises(SparseDPError, match="no-such-variant"),
    ):
        worker.require_package()


def test_a_process_with_another_package_is_refused(tmp_path: Path) -> None:
    with Worker(TINY["vocabulary"], ROOT / "src") as worker:
        worker._package = tmp_path
        with pytest.raises(SparseDPError, match="was to use the package"):
            worker.require_package()


def test_spread() -> None:
    assert spread([1.0, 2.0, 3.0]) == {"lower": 1.5, "median": 2.0, "upper": 2.5}
    assert spread([1.5]) == {"lower": 1.5, "median": 1.5, "upper": 1.5}
    few = spread([0.5, 3.0])  # within what was measured, however few they are
    assert 0.5 <= few["lower"] < few["upper"] <= 3.0


def test_the_checkout_goes_also_after_a_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders, before = [], signal.getsignal(signal.SIGTERM)

    def ended(problem: Problem, base: str, **_: object) -> None:
        with checked_out(base) as (folder, _):
            folders.append(folder)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(options, "bench_compare", ended)
    with pytest.raises(SystemExit):
        main(["compare", "--base=HEAD", f"--json={tmp_path / 'result.json'}"])
    assert len(folders) == 1 and not folders[0].exists() and str(folders[0]) not in worktrees()
    assert signal.getsignal(signal.SIGTERM) == before
