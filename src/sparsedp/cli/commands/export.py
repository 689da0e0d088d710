"""Copies what may leave of a run: the weights, the privacy statement, and what was public before training."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sparsedp.cli.config.load import add_set_argument
from sparsedp.cli.config.trust import add_code_argument, add_trust_argument
from sparsedp.cli.files import require_space
from sparsedp.cli.model_files import FORMATS
from sparsedp.cli.model_release import writer_of
from sparsedp.cli.result import FAILED
from sparsedp.cli.runfolder import RELEASED, RunFolder, copy_release
from sparsedp.errors import ConfigError, SparseDPError

EPILOG = """examples:
  sparsedp export runs/mine                  into mine-release, in the current directory
  sparsedp export runs/mine --to for-them
  sparsedp export runs/mine --format onnx     the model as an ONNX file, in place of the weights

The folder RUN/private stays: metrics, checkpoints and counts are computed from private data without noise.
The formats torchscript and onnx need the run's data, because the model is made for them; docs/serving.md has an example.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the folder of a finished run")
    parser.add_argument(
        "--to", metavar="DIR", type=Path, help="the folder to write, new or empty (<name of RUN>-release)"
    )
    parser.add_argument(
        "--without-guarantee",
        action="store_true",
        help="copy it although the statement promises nothing: epsilon is infinite, or the noise was seeded",
    )
    parser.add_argument(
        "--format",
        choices=("weights", *FORMATS),
        default="weights",
        help="what of the model leaves: its weights, or one file that answers without sparsedp (weights)",
    )
    add_set_argument(parser, "for a file to serve from: change where the data are, as in --set data.path=new.csv")
    add_code_argument(parser)
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    target: Path = args.to or Path(f"{args.run_dir.absolute().name}-release")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty. Name another folder with --to.")
    if args.format == "weights" and (args.overrides or args.code or args.trust):
        raise ConfigError(
            "--set, --code and --trust are for --format torchscript and onnx. The weights are only copied."
        )
    with RunFolder.open(args.run_dir) as folder:
        if not folder.is_released or not folder.weights.is_file():
            raise SparseDPError(
                f"{folder.path} is not finished: there is no statement for its model yet. Go on with it first: "
                f"sparsedp train --resume {folder.path}"
            )
        if not args.without_guarantee:
            _require_guarantee(folder)
        result = folder.read_result() or {}
        if result.get("diverged"):
            why = str(result.get("evaluation")).removeprefix(FAILED).rstrip(".")
            print(f"sparsedp: warning: training has diverged, and this model is of no use: {why}.", file=sys.stderr)
        not_copied = sorted(path.name for path in folder.release.iterdir() if path.name not in RELEASED)
        require_space(target, sum(path.stat().st_size for path in folder.release.iterdir()), "the release")
        if args.format == "weights":
            names = copy_release(folder, target)
        else:
            names = copy_release(folder, target, ["model.pt"], writer_of(args, folder))
    print((target / "statement.txt").read_text().partition("\n")[0])
    print(f"Copied to {target}: {', '.join(names)}")
    if not_copied:
        print(f"Not copied, because no run writes it: {', '.join(not_copied)}")
    return 0


def _require_guarantee(folder: RunFolder) -> None:
    config, _ = folder.load_config()
    if config.training.seed is not None:
        why = "its noise was seeded (training.seed), and whoever knows the seed can take the noise away"
    elif json.loads((folder.release / "statement.json").read_text())["epsilon"] == "infinity":
        why = "its epsilon is infinite"
    else:
        return
    raise SparseDPError(
        f"{folder.path} has no privacy guarantee: {why}. If it may leave all the same, give --without-guarantee"
    )
