"""The file to serve from in a release: the run's model, made again for its data, with the released weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sparsedp.cli.files import write_text
from sparsedp.cli.model_files import FORMATS, write_model_file
from sparsedp.cli.prepare import limit_threads
from sparsedp.cli.progress import make_reporter
from sparsedp.cli.resume import resumed_config
from sparsedp.cli.run import load_with_progress
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.trained import read_weights, trained_model

MAY_CHANGE = {"data", "training.threads"}


def writer_of(args: argparse.Namespace, folder: RunFolder) -> Callable[[Path], None]:
    """What writes the model in the format `args.format` into a folder, and serving.json, which says how it is asked."""
    file = FORMATS[args.format]()  # before the data are read: it may be that a package is missing
    config = resumed_config(args.run_dir, None, args.overrides, args.trust, args.code, MAY_CHANGE)
    limit_threads(config)
    data = load_with_progress(config, make_reporter(Console(stderr=True, highlight=False), quiet=False))
    model = trained_model(config, folder, data, read_weights(folder)[1])

    def write(target: Path) -> None:
        question = write_model_file(file, model, data, target / file.name)
        about = {"file": file.name, "format": args.format, **question.to_dict()}
        write_text(target / "serving.json", json.dumps(about, indent=2) + "\n")

    return write
