"""Says what a run will cost in noise, time, memory and rows before it starts."""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sparsedp.cli.assemble import (
    Data,
    Prepared,
    forward,
    limit_threads,
    load_data,
    make_loss,
    make_model,
    optimizer_state_share,
    prepare,
    with_collate,
)
from sparsedp.cli.config import Config
from sparsedp.cli.load import add_config_arguments, explain_config, load_config
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.runfolder import plain
from sparsedp.errors import ConfigError, UnsupportedError, one_line
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import Look, find_threshold, predict, with_threshold
from sparsedp.tables import find_tables

# Steps that are measured after those that warm up; after some seconds fewer will do.
_WARM_UP, _MEASURED, _FEWEST, _SECONDS = 2, 12, 3, 20.0
_TABLES_SHOWN = 5

EPILOG = """examples:
  sparsedp plan demo
  sparsedp plan demo --set privacy.target_epsilon=1 --set training.batch_size=8192
  sparsedp plan my.yaml --no-measure --json
  sparsedp plan demo --set 'privacy.mechanism={name: adafest}' --reduction 100
  sparsedp plan my.yaml --counts frequencies.npz

Rows touched, selected and falsely selected are predicted from a look at the training data, without noise, or from
public counts: a .npz, .pt or .json file that holds, for each table's name, how many units touch each row, and
under the name units how many units were counted. To measure the time of a step, a few real private steps are taken on
a model that is then thrown away. Times are of this machine, as busy as it is now; the memory is an estimate.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument("--no-measure", action="store_true", help="do not take steps to measure their time")
    parser.add_argument(
        "--counts", metavar="FILE", type=Path, help="predict from these public counts, not from the data"
    )
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument(
        "--gradient-size", metavar="X", type=_positive, help="find AdaFEST's threshold for X coordinates a step"
    )
    wish.add_argument(
        "--reduction", metavar="X", type=_positive, help="the same, for a gradient X times smaller than a dense one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number; got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, args.trust)
    if args.show_config:
        print(explain_config(config), end="")
        return 0
    report = plan_report(
        config,
        measure=not args.no_measure,
        counts=args.counts,
        gradient_size=args.gradient_size,
        reduction=args.reduction,
    )
    if args.json:
        print(json.dumps(plain(report), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_summary(report))
        console.print(_tables(report))
        if closing := _closing(report):
            console.print(closing)
    return 0


def plan_report(
    config: Config,
    *,
    measure: bool = True,
    counts: Path | None = None,
    gradient_size: float | None = None,
    reduction: float | None = None,
) -> dict[str, Any]:
    """All that can be said about a run beforehand. Reads the data; the model is made, and thrown away.

    Rows are predicted from public `counts`, or else from the data. A wish for a `gradient_size`, or for a `reduction`
    against the dense one, is answered with the mechanism's threshold.
    """
    mechanism = config.make_mechanism()
    if not (gradient_size is None and reduction is None) and mechanism.threshold_setting is None:
        raise ConfigError(
            f"--gradient-size and --reduction look for AdaFEST's threshold; privacy.mechanism is {mechanism.name!r}"
        )
    given = None if counts is None else _read_counts(counts)
    limit_threads(config)
    data = with_collate(config, load_data(config))
    model = make_model(config, data.training)
    activations = _activation_bytes(model, config, data)
    state = optimizer_state_share(config)
    parts = prepare(config, data, model)
    plan, steps = parts.engine.plan, parts.steps
    tables = find_tables(model)
    sizes = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dense_size = sum(p.numel() for name, p in sizes.items() if name in tables)
    quarters = sorted({max(1, steps * k // 4) for k in (1, 2, 3, 4)})
    report: dict[str, Any] = {
        "unit": plan.unit,
        "dataset_size": plan.dataset_size,
        "examples": len(data.training),
        "held_out": 0 if data.held_out is None else len(data.held_out),
        "mechanism": plan.mechanism.to_dict(),
        "sample_rate": plan.sample_rate,
        "stream": None if plan.stream is None else plan.stream.to_dict(),
        "expected_batch_size": plan.batch_size,
        "expected_examples": parts.loader.expected_examples,
        "max_examples_per_user": plan.max_examples_per_user,
        "epochs": config.training.epochs,
        "steps": steps,
        "noise_multiplier": plan.noise_multiplier,
        "max_grad_norm": plan.clipping.max_norm,
        "target_epsilon": plan.target_epsilon,
        "delta": parts.delta,
        "epsilon": plan.epsilon(steps, parts.delta),
        "epsilon_after": {str(at): plan.epsilon(at, parts.delta) for at in quarters},
        "parameters": sum(p.numel() for p in model.parameters()),
        "tables": [
            {"name": name, "rows": p.shape[0], "dim": p[0].numel(), "bytes": _bytes(p)}
            for name, p in model.named_parameters()
            if name in tables
        ],
        "dense_gradient_size": dense_size,
    }
    if dense_size:
        look = parts.engine.look() if given is None else _look_at(counts, parts, *given)
        try:
            report["predicted"] = predict(plan, look).to_dict()
        except UnsupportedError as error:  # a mechanism of the user's own
            report["not_predicted"] = str(error)
        if reduction is not None:
            gradient_size = dense_size / reduction
        if gradient_size is not None:
            report["suggested"] = _suggested(plan, look, gradient_size)
    elif not (given is None and gradient_size is None and reduction is None):
        raise ConfigError("--counts, --gradient-size and --reduction are about tables; this run trains none")
    # The model is this function's own, so that the steps that are measured spend nobody's budget.
    if measure:
        report["measured"] = _measured(parts)
    trained = sum(map(_bytes, sizes.values()))
    table_bytes = sum(table["bytes"] for table in report["tables"])
    other_bytes = sum(map(_bytes, model.parameters())) - table_bytes
    itemsize = next(iter(sizes.values())).element_size()
    changed = report["predicted"]["gradient_size"] if "predicted" in report else dense_size
    most = config.training.max_physical_batch
    memory = {
        "tables": table_bytes,
        "other_parameters": other_bytes,
        "gradients": round(sum(p.numel() for p in sizes.values()) - dense_size + changed) * itemsize,
        "optimizer_state": round(trained * state),
        "activations": round(activations * min(parts.loader.expected_examples, most or math.inf)),
    }
    report["memory_bytes"] = {**memory, "total": sum(memory.values())}
    return report


def _measured(parts: Prepared) -> dict[str, Any]:
    """What some steps took and did, without the first ones, which make buffers and compile."""
    started = time.monotonic()
    parts.engine.prepare()
    preparation = time.monotonic() - started
    taken: list[Step] = []
    clock = [time.process_time()]
    for step in steps_of_epoch(parts):
        taken.append(step)
        clock.append(time.process_time())
        enough = len(taken) >= _WARM_UP + _FEWEST and time.monotonic() - started - preparation > _SECONDS
        if enough or len(taken) == _WARM_UP + _MEASURED:
            break
    taken = taken[_WARM_UP:] or taken[-1:]
    reports = [step.report for step in taken]
    seconds = [step.seconds for step in taken]
    busy = [after - before for before, after in pairwise(clock[-len(taken) - 1 :])]
    return {
        "steps": len(taken),
        "seconds_per_step": median(seconds),
        "fastest_seconds_per_step": min(seconds),
        "processor_seconds_per_step": median(busy),  # of all threads: hardly changes with what else the machine does
        "preparation_seconds": preparation,
        "training_seconds": preparation + median(seconds) * parts.steps,
        "rows_touched": mean(report.rows_touched for report in reports),
        "rows_selected": mean(sum(table.rows_selected for table in report.tables.values()) for report in reports),
        "rows_false": mean(sum(table.rows_false for table in report.tables.values()) for report in reports),
        "gradient_size": mean(report.gradient_size for report in reports),
    }


def _read_counts(path: Path) -> tuple[dict[str, Any], float]:
    """The counts of each table in the file, and the number of units that were counted."""
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found = dict(arrays)
        elif path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".json":
            found = json.loads(path.read_text())
        else:
            raise ConfigError(f"--counts {path}: expected a .npz, .pt or .json file")
    except (OSError, ConfigError):
        raise
    except Exception as error:  # each reader has errors of its own
        raise ConfigError(f"--counts {path} cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict) or "units" not in found:
        raise ConfigError(
            f"--counts {path}: expected, beside each table's counts, the number of counted units as 'units'"
        )
    return {name: values for name, values in found.items() if name != "units"}, float(found["units"])


def _look_at(path: Path | None, parts: Prepared, counts: dict[str, Any], units: float) -> Look:
    try:
        return parts.engine.look(counts, units)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--counts {path}: {error}") from error


def _suggested(plan: PrivacyPlan, look: Look, gradient_size: float) -> dict[str, Any]:
    """The mechanism's threshold for the wished gradient size, and what it is predicted to do."""
    threshold = find_threshold(plan, look, gradient_size)
    return {
        "wanted_gradient_size": gradient_size,
        "setting": plan.mechanism.threshold_setting,
        "threshold": threshold,
        "predicted": predict(with_threshold(plan, threshold), look).to_dict(),
    }


def _activation_bytes(model: nn.Module, config: Config, data: Data) -> float:
    """What forward keeps of an example; twice, as capture keeps the output gradients beside it."""
    count = min(8, len(data.training))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(model, make_loss(config), data.examples(count))
    return 2 * sum(kept.values()) / count


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _stream(stream: dict[str, Any]) -> str:
    sizes, how = stream["sizes"], "parallel" if stream["composition"] == "parallel" else "sequence"
    return (
        f"{len(sizes)} spans of {stream['span']} period(s), composed in {how}; {min(sizes):,} to {max(sizes):,} examples "
        "each, and the sampling rate is that of the smallest"
    )


def _summary(report: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    memory, mechanism = report["memory_bytes"], dict(report["mechanism"])
    rows = [
        *_who(report),
        ("steps", f"{report['steps']:,} in {report['epochs']} epoch(s)"),
        ("batch", f"{_batch(report)} expected, sampling rate {report['sample_rate']:.4g}"),
        *(() if report["stream"] is None else [("stream", _stream(report["stream"]))]),
        ("mechanism", ", ".join([mechanism.pop("name"), *(f"{k}={v}" for k, v in mechanism.items())])),
        ("noise multiplier", f"{report['noise_multiplier']:.4g}, clipping norm {report['max_grad_norm']:g}"),
        ("epsilon", f"{report['epsilon']:.4g} at delta {report['delta']:g}"),
        *((f"  after {int(at):,} steps", f"{value:.4g}") for at, value in report["epsilon_after"].items()),
        ("parameters", f"{report['parameters']:,}"),
        ("dense gradient", f"{report['dense_gradient_size']:,} coordinates of the tables a step"),
    ]
    if "predicted" in report:
        predicted = report["predicted"]
        rows += [
            ("rows touched", f"{_number(predicted['rows_touched'])} a step, predicted from {predicted['source']}"),
            ("rows selected", _selected(predicted)),
            ("gradient", _gradient(predicted)),
            *(("", note) for note in predicted["notes"]),
        ]
    if "not_predicted" in report:
        rows.append(("rows", report["not_predicted"]))
    if "suggested" in report:
        suggested = report["suggested"]
        rows += [
            (
                "threshold",
                f"{suggested['threshold']:g} is the least for {suggested['wanted_gradient_size']:,.0f} coordinates",
            ),
            ("", f"{_selected(suggested['predicted'])}; {_gradient(suggested['predicted'])}"),
            ("", f"--set privacy.mechanism.{suggested['setting']}={suggested['threshold']:g}"),
        ]
    if "measured" in report:
        measured = report["measured"]
        step, fastest, busy = (1000 * measured[f"{kind}seconds_per_step"] for kind in ("", "fastest_", "processor_"))
        whole = measured["training_seconds"]
        rows += [
            (
                f"in {measured['steps']} steps",
                f"{_number(measured['rows_touched'])} rows touched, {_number(measured['rows_selected'])} selected, "
                f"{_number(measured['rows_false'])} of them false; {_number(measured['gradient_size'])} coordinates",
            ),
            (
                "time",
                f"{step:,.0f} ms a step (fastest {fastest:,.0f}; {busy:,.0f} of processor time), {whole:,.0f} s in all, "
                "without evaluation",
            ),
        ]
    else:
        rows.append(("time", "not predicted: no steps were measured"))
    rows.append(("memory", f"about {_megabytes(memory['total'])}, beside Python and the data:"))
    rows += [(f"  {name.replace('_', ' ')}", _megabytes(size)) for name, size in memory.items() if name != "total"]
    for row in rows:
        table.add_row(*row)
    return table


def _who(report: dict[str, Any]) -> list[tuple[str, str]]:
    examples = ("examples", f"{report['examples']:,}, and {report['held_out']:,} held out")
    return [examples] if report["unit"] == "example" else [("users", f"{report['dataset_size']:,}"), examples]


def _batch(report: dict[str, Any]) -> str:
    if report["unit"] == "example":
        return f"{report['expected_batch_size']:,}"
    most = report["max_examples_per_user"]
    each = "" if most is None else f", at most {most:,} of a user's"
    return f"{report['expected_batch_size']:,} users with {_number(report['expected_examples'])} examples{each}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _selected(predicted: dict[str, Any]) -> str:
    return (
        f"{_number(predicted['rows_selected'])} a step, {_number(predicted['rows_false'])} of them false; the others are "
        f"{predicted['kept_rows']:.1%} of the touched rows and have {predicted['kept_touches']:.1%} of all touches"
    )


def _gradient(predicted: dict[str, Any]) -> str:
    return f"{_number(predicted['gradient_size'])} coordinates a step, {predicted['reduction']:,.1f} times fewer than dense"


def _tables(report: dict[str, Any]) -> Table:
    largest = sorted(report["tables"], key=lambda entry: -entry["bytes"])
    predicted = report.get("predicted", {"tables": {}})["tables"]
    columns = ("rows_touched", "rows_selected", "rows_false")
    headings = ("touched", "selected", "false") if predicted else ()
    table = Table("table", "rows x dim", "size", *headings, box=SIMPLE_HEAD, pad_edge=False)

    def expected(entries: list[dict[str, Any]]) -> list[str]:
        known = [predicted[entry["name"]] for entry in entries if entry["name"] in predicted]
        return [_number(sum(one[column] for one in known)) if known else "" for column in columns[: len(headings)]]

    for entry in largest[:_TABLES_SHOWN]:
        shape = f"{entry['rows']:,} x {entry['dim']}"
        table.add_row(entry["name"], shape, _megabytes(entry["bytes"]), *expected([entry]))
    if rest := largest[_TABLES_SHOWN:]:
        rows, size = sum(entry["rows"] for entry in rest), sum(entry["bytes"] for entry in rest)
        table.add_row(f"{len(rest)} more", f"{rows:,} rows", _megabytes(size), *expected(rest))
    return table


def _closing(report: dict[str, Any]) -> str | None:
    private = "measured" in report or report.get("predicted", {}).get("private", False)
    return (
        "Rows and coordinates are counted on private data without noise: for you, not for release." if private else None
    )
