"""Says what a run will cost in noise, time, memory and rows before it starts."""

from __future__ import annotations

import argparse
import json
from typing import Any

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
    make_optimizer,
    prepare,
)
from sparsedp.cli.config import Config
from sparsedp.cli.load import add_config_arguments, load_config
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.runfolder import plain
from sparsedp.refusals import find_tables

MEASURED_STEPS = 3
_TABLES_SHOWN = 5

EPILOG = """examples:
  sparsedp plan demo
  sparsedp plan demo --set privacy.target_epsilon=1 --set training.batch_size=8192
  sparsedp plan my.yaml --no-measure --json

To measure the time of a step, a few real private steps are taken on a model that is then thrown away. Times
are of this machine, as busy as it is now; the memory is an estimate.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument("--no-measure", action="store_true", help="do not take steps to measure their time")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    report = plan_report(load_config(args.config, args.overrides), measure=not args.no_measure)
    if args.json:
        print(json.dumps(plain(report), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_summary(report))
        console.print(_tables(report))
    return 0


def plan_report(config: Config, *, measure: bool = True) -> dict[str, Any]:
    """All that can be said about a run beforehand. Reads the data; the model is made, and thrown away."""
    limit_threads(config)
    data = load_data(config)
    model = make_model(config, data.training)
    activations = _activation_bytes(model, config, data)
    state = _optimizer_state_share(config)
    parts = prepare(config, data, model)
    # The model is this function's own, so that the steps that are measured spend nobody's budget.
    measured = _measured(parts) if measure else []
    plan, steps = parts.engine.plan, parts.steps
    tables = find_tables(model)
    sizes = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dense_size = sum(p.numel() for name, p in sizes.items() if name in tables)
    quarters = sorted({max(1, steps * k // 4) for k in (1, 2, 3, 4)})
    report: dict[str, Any] = {
        "dataset_size": plan.dataset_size,
        "held_out": 0 if data.held_out is None else len(data.held_out),
        "mechanism": plan.mechanism.to_dict(),
        "sample_rate": plan.sample_rate,
        "expected_batch_size": plan.batch_size,
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
    gradient_size = dense_size
    if measured:
        gradient_size = round(sum(step.report.gradient_size for step in measured) / len(measured))
        seconds = sum(step.seconds for step in measured) / len(measured)
        report["measured"] = {
            "steps": len(measured),
            "seconds_per_step": seconds,
            "training_seconds": seconds * steps,
            "rows_touched_per_step": sum(step.report.rows_touched for step in measured) / len(measured),
            "gradient_size_per_step": gradient_size,
        }
    trained = sum(map(_bytes, sizes.values()))
    table_bytes = sum(table["bytes"] for table in report["tables"])
    other_bytes = sum(map(_bytes, model.parameters())) - table_bytes
    itemsize = next(iter(sizes.values())).element_size()
    memory = {
        "tables": table_bytes,
        "other_parameters": other_bytes,
        "gradients": (sum(p.numel() for p in sizes.values()) - dense_size + gradient_size) * itemsize,
        "optimizer_state": round(trained * state),
        "activations": activations,
    }
    report["memory_bytes"] = {**memory, "total": sum(memory.values())}
    return report


def _measured(parts: Prepared) -> list[Step]:
    """A few steps, without the first: it makes buffers and compiles."""
    taken: list[Step] = []
    for step in steps_of_epoch(parts):
        taken.append(step)
        if len(taken) == min(MEASURED_STEPS + 1, parts.steps):
            break
    return taken[1:] or taken


def _activation_bytes(model: nn.Module, config: Config, data: Data) -> int:
    """What forward keeps of a physical batch; twice, as capture keeps the output gradients beside it."""
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
    batch = min(config.training.batch_size, config.training.max_physical_batch or config.training.batch_size)
    return round(2 * sum(kept.values()) / count * batch)


def _optimizer_state_share(config: Config) -> float:
    """Bytes of optimizer state per byte of parameter, seen at a small parameter of its own."""
    probe = nn.Linear(32, 32, bias=False)
    optimizer = make_optimizer(config, probe)
    probe.weight.grad = torch.zeros_like(probe.weight)
    optimizer.step()
    tensors = [value for value in optimizer.state[probe.weight].values() if isinstance(value, Tensor)]
    return sum(_bytes(tensor) for tensor in tensors if tensor.dim()) / _bytes(probe.weight)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _summary(report: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    memory, mechanism = report["memory_bytes"], dict(report["mechanism"])
    rows = [
        ("examples", f"{report['dataset_size']:,}, and {report['held_out']:,} held out"),
        ("steps", f"{report['steps']:,} in {report['epochs']} epoch(s)"),
        ("batch", f"{report['expected_batch_size']:,} expected, sampling rate {report['sample_rate']:.4g}"),
        ("mechanism", ", ".join([mechanism.pop("name"), *(f"{k}={v}" for k, v in mechanism.items())])),
        ("noise multiplier", f"{report['noise_multiplier']:.4g}, clipping norm {report['max_grad_norm']:g}"),
        ("epsilon", f"{report['epsilon']:.4g} at delta {report['delta']:g}"),
        *((f"  after {int(at):,} steps", f"{value:.4g}") for at, value in report["epsilon_after"].items()),
        ("parameters", f"{report['parameters']:,}"),
        ("dense gradient", f"{report['dense_gradient_size']:,} coordinates of the tables a step"),
    ]
    if "measured" in report:
        measured = report["measured"]
        size, touched = measured["gradient_size_per_step"], measured["rows_touched_per_step"]
        step, whole = 1000 * measured["seconds_per_step"], measured["training_seconds"]
        rows += [
            ("gradient", f"{size:,} coordinates a step; {touched:,.0f} rows touched"),
            ("time", f"{step:,.0f} ms a step, {whole:,.0f} s in all, without evaluation"),
        ]
    rows.append(("memory", f"about {_megabytes(memory['total'])}, beside Python and the data:"))
    rows += [(f"  {name.replace('_', ' ')}", _megabytes(size)) for name, size in memory.items() if name != "total"]
    for row in rows:
        table.add_row(*row)
    return table


def _tables(report: dict[str, Any]) -> Table:
    largest = sorted(report["tables"], key=lambda entry: -entry["bytes"])
    table = Table("table", "rows x dim", "size", box=SIMPLE_HEAD, pad_edge=False)
    for entry in largest[:_TABLES_SHOWN]:
        table.add_row(entry["name"], f"{entry['rows']:,} x {entry['dim']}", _megabytes(entry["bytes"]))
    if rest := largest[_TABLES_SHOWN:]:
        rows = sum(entry["rows"] for entry in rest)
        table.add_row(f"{len(rest)} more", f"{rows:,} rows", _megabytes(sum(entry["bytes"] for entry in rest)))
    return table
