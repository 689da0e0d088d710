"""Writes a report on one or several runs as one HTML file, or a model card."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.cli.files import locked, write_text
from sparsedp.cli.progress import every_few_seconds, make_reporter
from sparsedp.errors import ConfigError, one_line
from sparsedp.report.model_card import model_card
from sparsedp.report.page import render
from sparsedp.report.run_record import RunRecord, is_folder_of_run, read_run

EPILOG = """examples:
  sparsedp report runs/mine                        runs/mine/private/report.html: everything, for you
  sparsedp report runs/mine --public               runs/mine/release/report.html: what may leave, for anybody
  sparsedp report runs/a runs/b                    runs/a/private/comparison.html: side by side
  sparsedp report runs/sweep/*                     the runs of a sweep; what is no run there is left out
  sparsedp report runs/mine --markdown             runs/mine/release/README.md: a model card without private figures
  sparsedp report runs/mine --markdown --private   runs/mine/private/model_card.md: the same with the exact metrics
  sparsedp plan my.yaml --json > plan.json; sparsedp report runs/mine --plan plan.json

The file needs no network and no other file. Losses, metrics and counts are computed on private data without noise, and no
epsilon covers them. A page shows them unless you give --public, and so lies in the private part; a model card is there to be
published, and leaves them out unless you give --private. Runs that are interrupted, damaged or old are shown as far as they
can be read. --public also takes the folder that `sparsedp export` wrote.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("run_dirs", metavar="RUN", type=Path, nargs="+", help="the folder of a run")
    parser.add_argument(
        "--markdown", action="store_true", help="a model card for the Hugging Face Hub in place of a page"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--public", action="store_true", help="of the part that may leave alone (for --markdown: the default)"
    )
    kind.add_argument(
        "--private", action="store_true", help="with losses, metrics and counts (for a page: the default)"
    )
    parser.add_argument(
        "--plan", metavar="FILE", type=Path, help="what `sparsedp plan --json` predicted, to compare with"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file to write")
    parser.add_argument("--quiet", action="store_true", help="print the name of the file only")


def run(args: argparse.Namespace) -> int:
    public = args.public or (args.markdown and not args.private)
    folders: list[Path] = args.run_dirs
    others = [folder for folder in folders if folder.exists() and not is_folder_of_run(folder)]
    if 0 < len(others) < len(folders):  # runs/* has the cache of the data, too
        print(f"sparsedp: left out, for no folder of a run: {', '.join(map(str, others))}", file=sys.stderr)
        folders = [folder for folder in folders if folder not in others]
    if len(folders) > 1 and (args.markdown or args.plan is not None):
        raise ConfigError(f"{'--markdown' if args.markdown else '--plan'} is about one run; got {len(folders)}")
    if public and args.plan is not None:
        raise ConfigError("--plan holds predictions from private data: leave out --public")
    out = args.out or _default_out(folders, args.markdown, public)
    predictions = {} if args.plan is None else _read_predictions(args.plan)
    reporter = make_reporter(Console(stderr=True, highlight=False), args.quiet)
    tell = every_few_seconds(lambda rows: reporter.say(f"Reading metrics: {rows:,} rows so far"))
    records = [read_run(folder, public, tell) for folder in folders]
    _refuse_leak(records, out)
    for record in records:
        if args.private and not record.private:
            raise ConfigError(f"{record.path} has no private part: leave out --private")
    text = model_card(records[0]) if args.markdown else render(records, predictions)
    with ExitStack() as held:
        if (release := _release_of(out)) is not None and (release.parent / "private").is_dir():
            held.enter_context(locked(release.parent / "private"))  # or an export could take half of it along
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    print(out)
    return 0


def _default_out(folders: list[Path], markdown: bool, public: bool) -> Path:
    first = folders[0]
    if len(folders) > 1:
        if public:
            raise ConfigError(
                "A public page on several runs belongs to none of their folders: name the file with --out"
            )
        if not (first / "private").is_dir():
            raise ConfigError(f"{first} has no private part to write into: name the file with --out")
        return first / "private" / "comparison.html"
    if public:
        release = first / "release" if (first / "release").is_dir() else first  # first: what `sparsedp export` wrote
        return release / ("README.md" if markdown else "report.html")
    if not (first / "private").is_dir():
        return first / ("README.md" if markdown else "report.html")  # as far as there is nothing private to show
    return first / "private" / ("model_card.md" if markdown else "report.html")


def _release_of(out: Path) -> Path | None:
    """The part for release of a run that the file lies in."""
    place = out.absolute().parent.resolve()
    return next((folder for folder in (place, *place.parents) if folder.name == "release"), None)


def _refuse_leak(records: list[RunRecord], out: Path) -> None:
    if any(record.private for record in records) and _release_of(out) is not None:
        raise ConfigError(
            f"{out} lies in a folder for release, and the report would show private figures: give --public"
        )


def _read_predictions(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"--plan {path} is no JSON: {one_line(error)}") from error
    if not isinstance(values, dict) or "noise_multiplier" not in values:
        raise ConfigError(f"--plan {path}: expected what `sparsedp plan CONFIG --json` prints")
    return values
