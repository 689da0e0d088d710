"""`sparsedp bench all`: every part in a process of its own, one file of results, and the page "How fast is it"."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.errors import SparseDPError

RESULTS = "results.json"
_COMMAND = "import sys; from sparsedp.cli.main import main; sys.exit(main(sys.argv[1:]))"


def add_arguments(parser: argparse.ArgumentParser, parts: Collection[str]) -> None:
    parser.description = (
        "Run the parts of the benchmark one after another, each in a process of its own. The folder gets results.json, the "
        "plots, and README.md, the page made of them. A part that ran before and is not run now stays as it was."
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench"), metavar="FOLDER", help="where it goes (default: %(default)s)"
    )
    parser.add_argument(
        "--part", choices=tuple(parts), action="append", help="run this part only (default: all); may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="under five minutes: small sizes, to see that all works")
    parser.add_argument("--page-only", action="store_true", help="make the page from results.json again, run nothing")
    parser.set_defaults(parts=tuple(parts))


def run(args: argparse.Namespace, console: Console) -> int:
    """Runs, merges and writes. A part that fails does not stop the others; the exit code tells of it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SparseDPError("bench all needs matplotlib for its plots: pip install 'sparsedp[plot]'") from error
    folder: Path = args.folder
    found = _load(folder / RESULTS)
    if args.page_only:
        if not found:
            raise SparseDPError(f"There is no {RESULTS} in {folder}: run `sparsedp bench all --folder {folder}` first.")
        return _finish(folder, found, [], console)
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    parts = [part for part in args.parts if part in (args.part or args.parts)]
    for number, part in enumerate(parts, 1):
        console.rule(f"{number}/{len(parts)}  sparsedp bench {part}{' --quick' if args.quick else ''}")
        start = time.perf_counter()
        result = _run_part(part, args.quick, folder)
        seconds = time.perf_counter() - start
        if result is None:
            console.print(f"{part} failed after {seconds:.0f} s; what it had before stays")
            failed.append(part)
            continue
        command = f"sparsedp bench {part}{' --quick' if args.quick else ''}"
        found[part] = {"command": command, "seconds": seconds, "commit": commit(), "day": _today(), **result}
        _save(folder / RESULTS, found)  # after each part: an interruption loses one at most
    return _finish(folder, found, failed, console)


def _run_part(part: str, quick: bool, folder: Path) -> dict[str, Any] | None:
    """What the part's command measures; None if it fails. Its own output goes where ours does."""
    with tempfile.TemporaryDirectory() as temporary:
        plots, result = Path(temporary), Path(temporary) / f"{part}.json"
        command = [sys.executable, "-c", _COMMAND, "bench", part, f"--json={result}", f"--plots={plots}"]
        done = subprocess.run([*command, *(["--quick"] if quick else [])])
        if done.returncode or not result.is_file():
            return None
        for old in folder.glob(f"{part}_*.png"):
            old.unlink()
        for plot in plots.glob(f"{part}_*.png"):
            (folder / plot.name).write_bytes(plot.read_bytes())
        loaded: dict[str, Any] = json.loads(result.read_text())
        return loaded


def _finish(folder: Path, found: dict[str, Any], failed: list[str], console: Console) -> int:
    from sparsedp.report.speed.page import page

    plots = sorted(path.name for path in folder.glob("*.png"))
    (folder / "README.md").write_text(page(found, plots))
    console.print(
        f"{folder / RESULTS} and {folder / 'README.md'} are written, of {', '.join(found) or 'no parts'}", markup=False
    )
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise SparseDPError(f"{path} is not JSON ({error}). Move it away, or name another --folder.") from error
    return found


def _save(path: Path, found: dict[str, Any]) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(beside, path)


def commit() -> str | None:
    """The commit that the package's files are at, with "+" if they were changed; None outside of a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "."], cwd=here.parent, capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else None


def _today() -> str:
    return time.strftime("%Y-%m-%d")
