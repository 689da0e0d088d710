"""Evaluates the model of a run on what was held out, again or where that failed at its end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import add_set_argument
from sparsedp.cli.config.trust import add_code_argument, add_trust_argument
from sparsedp.cli.evaluation import evaluate
from sparsedp.cli.prepare import limit_threads, with_collate
from sparsedp.cli.progress import Reporter, evaluation_progress, make_reporter
from sparsedp.cli.result import metric_lines
from sparsedp.cli.resume import resumed_config
from sparsedp.cli.run import load_with_progress
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.cli.trained import read_weights, trained_model
from sparsedp.errors import SparseDPError

# What an evaluation may do differently: other data, for instance mended ones, and how they go through the model.
MAY_CHANGE = {"data", "training.batch_size", "training.max_physical_batch", "training.threads"}

EPILOG = """examples:
  sparsedp evaluate runs/mine                                      the held-out data of the run
  sparsedp evaluate runs/mine --set data.options.held_out=new.csv  other data, with the same vocabularies
  sparsedp evaluate runs/mine --code my.yaml                       a run with code of your own, beside my.yaml

Of a run that is not finished, the checkpoint is evaluated. The metrics are computed on private data without noise: they are
added to private/metrics.jsonl and, for a finished run on its own data, to private/result.json.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the folder of a run")
    add_set_argument(parser, "change a key of the data, as in --set data.held_out=0.2, or training.max_physical_batch")
    add_code_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the metrics only")


def run(args: argparse.Namespace) -> int:
    config = resumed_config(args.run_dir, None, args.overrides, args.trust, args.code, MAY_CHANGE)
    console = Console(stderr=args.json, highlight=False)
    with RunFolder.open(args.run_dir) as folder:
        data_of_run = folder.load_config()[0].data == config.data
        step, metrics, planted = evaluate_run(config, folder, make_reporter(console, args.quiet), data_of_run)
        statement = _statement(folder)
    if args.json:
        print(json.dumps(plain({"run": str(args.run_dir), "step": step, **metrics}), indent=2))
        return 0
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    privacy = "the run is not finished: this is its checkpoint" if statement is None else statement
    for line in (*metric_lines(metrics, planted), ("after step", f"{step:,}"), ("privacy", privacy)):
        table.add_row(*line)
    console.print(table)
    return 0


def evaluate_run(
    config: Config, folder: RunFolder, reporter: Reporter, data_of_run: bool = True
) -> tuple[int, dict[str, Any], float | None]:
    """(step, metrics, AUC of the model that drew the data) of the run's model, written down in its folder."""
    step, weights = read_weights(folder)
    limit_threads(config)
    data = with_collate(config, load_with_progress(config, reporter))
    if data.held_out is None:
        raise SparseDPError(f"{folder.path} holds nothing out, so that there is nothing to evaluate on.")
    model = trained_model(config, folder, data, weights)
    progress = evaluation_progress(reporter, len(data.held_out))
    metrics = evaluate(config, model, config.make_loss(), data, progress)
    other_data = {} if data_of_run else {"data": config.to_dict()["data"]}
    folder.log({"kind": "evaluate", "step": step, **metrics, **other_data})
    planted = getattr(data.held_out, "planted_auc", None)
    result = folder.read_result()
    if result is not None and data_of_run:
        planted_auc = {} if planted is None else {"planted_auc": planted}
        folder.write_result({**result, "evaluation": "done", **metrics, **planted_auc})
    return step, metrics, planted


def _statement(folder: RunFolder) -> str | None:
    """The first line of the run's privacy statement; None if it was not released."""
    path = folder.release / "statement.txt"
    return path.read_text().partition("\n")[0].removeprefix("Privacy statement: ") if folder.is_released else None
