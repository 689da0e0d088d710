"""`python -m benchmarks all`: every part in a process of its own, one file of results, and the pages made of it.

`python -m benchmarks page` makes the pages again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.speed.pages import RESULTS, write_pages
from benchmarks.speed.parts import PARTS
from benchmarks.speed.processes import ROOT, run_module
from sparsedp.errors import SparseDPError

DOCS = ROOT / "docs" / "speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the parts of the benchmark one after another, each in a process of its own. The folder gets results.json, plots, "
        "README.md with the budget, and a page for each part. A part that ran before and is not run now stays as it was."
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench"), metavar="FOLDER", help="where it goes (default: %(default)s)"
    )
    parser.add_argument(
        "--part", choices=tuple(PARTS), action="append", help="run this part only (default: all); may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="under five minutes: small sizes, to see that all works")


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make plots and pages from the results.json of a folder. Nothing is measured."
    parser.add_argument(
        "--folder", type=Path, default=DOCS, metavar="FOLDER", help="where results.json is (default: docs/speed)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs, merges and writes. A part that fails does not stop the others; the exit code tells of it."""
    _require_matplotlib()
    console = Console()
    folder: Path = args.folder
    results = _load(folder / RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    parts = [part for part in PARTS if part in (args.part or PARTS)]
    for number, part in enumerate(parts, 1):
        command = f"python -m benchmarks {part}{' --quick' if args.quick else ''}"
        console.rule(f"{number}/{len(parts)}  {command}")
        start = time.perf_counter()
        result = _run_part(part, args.quick)
        seconds = time.perf_counter() - start
        if result is None:
            console.print(f"{part} failed after {seconds:.0f} s; what it had before stays")
            failed.append(part)
            continue
        results[part] = {"command": command, "seconds": seconds, "commit": commit(), "day": _today(), **result}
        _save(folder / RESULTS, results)  # after each part: an interruption loses one at most
    _finish(folder, results, console)
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run_page(args: argparse.Namespace) -> int:
    _require_matplotlib()
    results = _load(args.folder / RESULTS)
    if not results:
        command = f"python -m benchmarks all --folder {args.folder}"
        raise SparseDPError(f"There is no {RESULTS} in {args.folder}: run `{command}` first.")
    _finish(args.folder, results, Console())
    return 0


def _require_matplotlib() -> None:
    """Raises now, rather than after a long run, if the plots could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SparseDPError("The pages need matplotlib for their plots: pip install 'sparsedp[plot]'") from error


def _run_part(part: str, quick: bool) -> dict[str, Any] | None:
    """What the part's command measures; None if it fails. Its own output goes where ours does."""
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / f"{part}.json"
        done = run_module("benchmarks", part, f"--json={result}", *(["--quick"] if quick else []))
        if done.returncode or not result.is_file():
            return None
        loaded: dict[str, Any] = json.loads(result.read_text())
        return loaded


def _finish(folder: Path, results: dict[str, Any], console: Console) -> None:
    write_pages(folder, results)
    written = f"{folder / RESULTS} and {folder / 'README.md'} are written, of {', '.join(results) or 'no parts'}"
    console.print(written, markup=False)


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        results: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise SparseDPError(f"{path} is not JSON ({error}). Move it away, or name another --folder.") from error
    return results


def _save(path: Path, results: dict[str, Any]) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(beside, path)


def commit() -> str | None:
    """The commit that the code is at, with "+" if it was changed; None outside of a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        status = ["git", "status", "--porcelain", "src", "benchmarks"]
        changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else None


def _today() -> str:
    return time.strftime("%Y-%m-%d")
