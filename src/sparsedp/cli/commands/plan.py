"""Says what a run will cost in noise, time, memory and rows before it starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsedp.cli.arguments import positive_number
from sparsedp.cli.compare import add_compare_arguments, run_compare
from sparsedp.cli.config.load import add_config_arguments, explain_config, load_config
from sparsedp.cli.memory import naming_what_has_no_room
from sparsedp.cli.plan_report import plan_report
from sparsedp.cli.runfolder import plain
from sparsedp.cli.sharding_report import Processes, add_processes_arguments, exit_code, print_sharding
from sparsedp.cli.tasks import shown_tasks
from sparsedp.errors import ConfigError

_TABLES_SHOWN = 5
_SMALLER = "Plan with --no-measure, which makes large weights without values, or on a machine with more memory."

EPILOG = """examples:
  sparsedp plan demo
  sparsedp plan demo --set privacy.target_epsilon=1 --set training.batch_size=8192
  sparsedp plan my.yaml --no-measure --json
  sparsedp plan demo --set 'privacy.mechanism={name: adafest}' --reduction 100
  sparsedp plan my.yaml --counts frequencies.npz
  sparsedp plan my.yaml --nproc 64 --hosts 8 --memory 256GB
  sparsedp plan demo --compare --look-at-data
  sparsedp plan demo --compare --release frequencies.pt

Rows touched, selected and falsely selected are predicted from a look at the training data, without noise, or from
public counts: a .npz, .pt or .json file that holds, for each table's name, how many units touch each row, and
under the name units how many units were counted. To measure the time of a step, a few real private steps are taken on
a model that is then thrown away; with --nproc only if --measure says so, as whole tables then have to fit into memory.
Times are of this machine, as busy as it is now; the memory is an estimate.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        help="take some steps to measure their time (the default without --nproc)",
    )
    parser.add_argument(
        "--counts", metavar="FILE", type=Path, help="predict from these public counts, not from the data"
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--gradient-size", metavar="X", type=positive_number, help="find AdaFEST's threshold for X coordinates a step"
    )
    goal.add_argument(
        "--reduction",
        metavar="X",
        type=positive_number,
        help="the same, for a gradient X times smaller than a dense one",
    )
    add_processes_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="show the plan only, not what is being done")
    add_compare_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, args.trust)
    if args.show_config:
        print(explain_config(config), end="")
        return 0
    processes = Processes.of(args)
    if args.compare and processes is not None:
        raise ConfigError("--compare is about one process; leave --nproc, --hosts and --memory out")
    if args.compare:
        return run_compare(config, args)
    if args.look_at_data or args.release is not None:
        raise ConfigError("--look-at-data and --release are for --compare")
    with shown_tasks(args.quiet) as progress, naming_what_has_no_room("sparsedp plan", _SMALLER):
        report = plan_report(
            config,
            measure=args.measure,
            counts=args.counts,
            gradient_size=args.gradient_size,
            reduction=args.reduction,
            progress=progress,
            processes=processes,
        )
    if args.json:
        print(json.dumps(plain(report), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_summary(report))
        console.print(_tables(report))
        if processes is not None:
            print_sharding(console, report)
        for concern in report["concerns"]:
            console.print(f"warning: {concern}", markup=False)
        if closing := _closing(report):
            console.print(closing)
    return exit_code(report)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _stream(stream: dict[str, Any], unit: str) -> str:
    sizes, how = stream["sizes"], "parallel" if stream["composition"] == "parallel" else "sequence"
    spans = f"{len(stream['steps'])} spans of {stream['span']} period(s), composed in {how}; "
    if stream.get("sample_rate") is not None:
        return f"{spans}each with this rate, in {stream['steps'][0]:,} steps, whatever its size"
    return f"{spans}{min(sizes):,} to {max(sizes):,} {unit}s each, and the sampling rate is that of the smallest"


def _validation(validation: dict[str, Any] | str, unit: str) -> str:
    if isinstance(validation, str):
        return "by half of the held-out data, taken as public; the epsilon is that of the whole plan"
    return (
        f"at most {validation['looks']:,} looks at {validation['units']:,} private {unit}s, noise {validation['std']:g} on each "
        "mean; the epsilon is that of training and all looks"
    )


def _summary(report: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    memory, mechanism = report["memory_bytes"], dict(report["mechanism"])
    rows = [
        *_units(report),
        ("steps", f"{report['steps']:,} in {report['epochs']} epoch(s)"),
        ("batch", f"{_batch(report)} expected, sampling rate {report['sample_rate']:.4g}"),
        *(() if report["stream"] is None else [("stream", _stream(report["stream"], report["unit"]))]),
        ("mechanism", ", ".join([mechanism.pop("name"), *(f"{k}={v}" for k, v in mechanism.items())])),
        ("noise multiplier", f"{report['noise_multiplier']:.4g}, clipping norm {report['max_grad_norm']:g}"),
        ("epsilon", f"{report['epsilon']:.4g} at delta {report['delta']:g}"),
        *((f"  after {int(at):,} steps", f"{value:.4g}") for at, value in report["epsilon_after"].items()),
        *(
            ()
            if report["validation"] is None
            else [("early stopping", _validation(report["validation"], report["unit"]))]
        ),
        ("parameters", f"{report['parameters']:,}"),
        ("dense gradient", f"{report['dense_gradient_size']:,} coordinates of the tables a step"),
    ]
    if report["adapter_gradient_size"]:
        rows.append(("adapters of tables", f"{report['adapter_gradient_size']:,} coordinates a step"))
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
        total = measured["training_seconds"]
        rows += [
            (
                f"in {measured['steps']} steps",
                f"{_number(measured['rows_touched'])} rows touched, {_number(measured['rows_selected'])} selected, "
                f"{_number(measured['rows_false'])} of them false; {_number(measured['gradient_size'])} coordinates",
            ),
            (
                "time",
                f"{step:,.0f} ms a step (fastest {fastest:,.0f}; {busy:,.0f} of processor time), {total:,.0f} s in all, "
                "without evaluation",
            ),
        ]
    elif "several_processes" in report:
        rows.append(
            ("time", "not measured: that takes steps in this one process, with whole tables in memory (--measure)")
        )
    else:
        rows.append(("time", "not predicted: no steps were measured"))
    rows.append(("memory", f"about {_megabytes(memory['total'])}, beside Python and the data:"))
    rows += [(f"  {name.replace('_', ' ')}", _megabytes(size)) for name, size in memory.items() if name != "total"]
    for row in rows:
        table.add_row(*row)
    return table


def _units(report: dict[str, Any]) -> list[tuple[str, str]]:
    examples = ("examples", f"{report['examples']:,}, and {report['held_out']:,} held out")
    return [examples] if report["unit"] == "example" else [("users", f"{report['dataset_size']:,}"), examples]


def _batch(report: dict[str, Any]) -> str:
    if report["unit"] == "example":
        return _number(report["expected_batch_size"])
    most = report["max_examples_per_user"]
    each = "" if most is None else f", at most {most:,} of a user's"
    return f"{_number(report['expected_batch_size'])} users with {_number(report['expected_examples'])} examples{each}"


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
        rows = [predicted[entry["name"]] for entry in entries if entry["name"] in predicted]
        return [_number(sum(row[column] for row in rows)) if rows else "" for column in columns[: len(headings)]]

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
