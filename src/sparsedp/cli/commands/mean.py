"""Releases the mean of the rows of a sparse matrix with noise, and says what may be promised about it."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import scipy.sparse

from sparsedp.cli.files import write_file
from sparsedp.cli.runfolder import plain
from sparsedp.convex import PrivateMean, private_mean
from sparsedp.convex.mean import Method, Solver
from sparsedp.convex.release import Calibration, Neighbours
from sparsedp.errors import ConfigError, DataError

_SHOWN = 10  # coordinates
EPILOG = """examples:
  sparsedp mean rows.npz --epsilon 1 --delta 1e-6 --bound 1 --sparsity 40 --to mean.npy
  sparsedp mean rows.npz --epsilon 1 --delta 0 --bound 1 --sparsity 40 --neighbours replace_one --json

FILE is what scipy.sparse.save_npz or numpy.save wrote. What goes to standard output may be released; how many rows were clipped
goes to standard error, and may not.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", metavar="FILE", type=Path, help="the rows: a .npz of scipy.sparse, or a .npy")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, required=True, help="0 for a pure guarantee, with Laplace noise")
    parser.add_argument("--bound", type=float, required=True, help="the l2 norm L that rows are scaled down to")
    parser.add_argument(
        "--sparsity", type=float, required=True, help="s: rows are scaled down to an l1 norm of L sqrt(s), too"
    )
    parser.add_argument("--method", choices=get_args(Method), default="auto", help="default: the smallest error bound")
    parser.add_argument(
        "--neighbours", choices=get_args(Neighbours), default="add_remove", help="what one unit is (add_remove)"
    )
    parser.add_argument(
        "--rows", type=int, help="what the sum is divided by, where that is public (add_remove: the rows with noise)"
    )
    parser.add_argument("--calibration", choices=get_args(Calibration), default="analytic", help="of Gaussian noise")
    parser.add_argument("--measurements", type=int, help="of l1_recovery")
    parser.add_argument("--solver", choices=get_args(Solver), help="of l1_recovery")
    parser.add_argument("--to", metavar="MEAN.npy", type=Path, help="write the mean there")
    parser.add_argument("--json", action="store_true", help="print JSON; with the mean, unless it is written with --to")


def run(args: argparse.Namespace) -> int:
    if args.to is not None and args.to.suffix != ".npy":
        raise ConfigError(f"--to {args.to}: the mean is written as a .npy file")
    if args.to is not None and not args.to.absolute().parent.is_dir():
        raise ConfigError(f"--to {args.to}: the folder {args.to.parent} does not exist")
    answer = private_mean(
        load_rows(args.file),
        epsilon=args.epsilon,
        delta=args.delta,
        bound=args.bound,
        sparsity=args.sparsity,
        method=args.method,
        neighbours=args.neighbours,
        rows=args.rows,
        calibration=args.calibration,
        measurements=args.measurements,
        solver=args.solver,
    )
    if args.to is not None:
        write_file(args.to, lambda file: np.save(file, answer.mean, allow_pickle=False))
    print(f"sparsedp: private, not to be released: {answer.clipped_rows} rows were clipped", file=sys.stderr)
    if args.json:
        print(json.dumps(plain(_released(answer, args.to)), indent=2))
    else:
        _show(answer, args.to)
    return 0


def load_rows(path: Path) -> Any:
    """The matrix in a file of scipy.sparse or numpy. Pickled objects are not read: they could run code."""
    with open(path, "rb") as file:
        try:
            if zipfile.is_zipfile(file):
                file.seek(0)
                return scipy.sparse.load_npz(file)
            file.seek(0)
            return np.load(file, allow_pickle=False)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} is neither a sparse matrix that scipy.sparse.save_npz wrote, nor an array of numbers of numpy.save "
                "(.npy, not the .npz of numpy.savez)"
            ) from error


def _released(answer: PrivateMean, to: Path | None) -> dict[str, Any]:
    """What may leave: all of it is computed from what has noise."""
    recovery = None
    if answer.recovery is not None:
        recovery = {key: value for key, value in asdict(answer.recovery).items() if key != "clipped_measurements"}
    released = {
        "method": answer.method,
        "noise": answer.noise,
        "reason": answer.reason,
        "rows": answer.rows,
        "columns": len(answer.mean),
        "error_bound": answer.error_bound,
        "bounds": answer.bounds,
        "recovery": recovery,
        "statement": answer.statement.to_dict(),
    }
    return {**released, "mean": answer.mean.tolist()} if to is None else {**released, "file": str(to)}


def _show(answer: PrivateMean, to: Path | None) -> None:
    print(f"method       {answer.method}, {answer.noise} noise: {answer.reason}")
    print(f"mean         of {answer.rows} rows, {len(answer.mean)} columns, l2 norm {np.linalg.norm(answer.mean):.6g}")
    print(f"error        at most {answer.error_bound:.4g} (root mean square of its l2 norm, over the noise)")
    if answer.recovery is not None:
        r = answer.recovery
        ended = "finished" if r.finished else "NOT finished"
        cut = "; cut to zero, its norm was above twice the bound" if r.cut else ""
        print(f"recovery     {r.measurements} measurements; {r.solver} {ended}, gap {r.gap:.2g}{cut}")
    largest = np.argsort(-np.abs(answer.mean), kind="stable")[:_SHOWN]
    print("largest      " + ", ".join(f"{at}: {answer.mean[at]:.4g}" for at in largest))
    if to is not None:
        print(f"written to   {to}")
    print(answer.statement)
