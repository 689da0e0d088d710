"""What can be said about a run before it starts: noise, time, memory and rows."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp import concerns
from sparsedp.cli.adapters import table_adapters
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.counts import read_public_counts
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.prepare import Prepared, forward, limit_threads, load_data, make_model, prepare, with_collate
from sparsedp.cli.sharding_report import Processes, sharding_report
from sparsedp.distributed.on_disk import large_tensors_without_values
from sparsedp.errors import ConfigError, UnsupportedError
from sparsedp.mechanisms import PublicCounts
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import TouchStatistics, find_auto_threshold, find_threshold, predict, with_threshold
from sparsedp.progress import Progress, no_progress
from sparsedp.step_report import StepReport
from sparsedp.tables import find_tables

# Steps that are measured after those that warm up; after some seconds one of each will do.
_WARM_UP, _MEASURED, _SECONDS = 2, 12, 20.0


def plan_report(
    config: Config,
    *,
    measure: bool | None = None,
    counts: Path | None = None,
    gradient_size: float | None = None,
    reduction: float | None = None,
    progress: Progress = no_progress,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """All that can be said about a run beforehand. Reads the data; the model is made, and thrown away.

    Steps are measured, unless it is about several `processes`: in this one the tables may have no room. Where none are, large
    weights have no values, and take no memory.
    Rows are predicted from public `counts`, or else from the data. With a `gradient_size`, or a `reduction`
    against the dense one, the report suggests the mechanism's threshold for it. `progress` is told what is being done.
    With `processes` it says how the tables could be divided among them.
    """
    measure = processes is None if measure is None else measure
    mechanism = config.make_mechanism()
    if not (gradient_size is None and reduction is None) and mechanism.threshold_setting is None:
        raise ConfigError(
            f"--gradient-size and --reduction look for AdaFEST's threshold; privacy.mechanism is {mechanism.name!r}"
        )
    public_counts = None if counts is None else read_public_counts(counts, "--counts")
    limit_threads(config)
    data = with_collate(config, load_with_tasks(config, progress))
    made = nullcontext if measure else large_tensors_without_values
    with progress("making the model", 0), made():
        model = make_model(config, data.training)
    activations = _activation_bytes(model, config, data)
    with concerns.without_warnings(), made():
        parts = prepare(config, data, model, progress)
    plan, steps = parts.engine.plan, parts.steps
    tables = find_tables(model)
    sizes = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dense_size = sum(p.numel() for name, p in sizes.items() if name in tables)
    adapters = table_adapters(model)
    # A run that may stop early has the epsilon of its whole plan, whenever it does.
    quarters = sorted({max(1, steps * k // 4) for k in (1, 2, 3, 4)} if plan.validation is None else {steps})
    report: dict[str, Any] = {
        "unit": plan.unit,
        "dataset_size": plan.dataset_size,
        "examples": len(data.training),
        "held_out": 0 if data.held_out is None else len(data.held_out),
        "mechanism": plan.mechanism.to_dict(),
        "sample_rate": plan.sample_rate,
        "stream": None if plan.stream is None else plan.stream.to_dict(),
        "expected_batch_size": parts.loader.expected_units,
        "expected_examples": parts.loader.expected_examples,
        "max_examples_per_user": plan.max_examples_per_user,
        "epochs": config.training.epochs,
        "steps": steps,
        "noise_multiplier": plan.noise_multiplier,
        "max_grad_norm": plan.clipping.max_norm,
        "target_epsilon": plan.target_epsilon,
        "delta": parts.delta,
        "epsilon": plan.epsilon(steps, parts.delta),
        "validation": plan.to_dict().get("validation"),
        "epsilon_after": {str(at): plan.epsilon(at, parts.delta) for at in quarters},
        "parameters": sum(p.numel() for p in model.parameters()),
        "tables": [
            {"name": name, "rows": p.shape[0], "dim": p[0].numel(), "bytes": _bytes(p)}
            for name, p in model.named_parameters()
            if name in tables
        ],
        "dense_gradient_size": dense_size + adapters.dense_size,
        "adapter_gradient_size": adapters.gradient_size,
        "concerns": concerns.of_plan(plan),
    }
    if dense_size:
        if public_counts is None:
            statistics = parts.engine.touch_statistics()
        else:
            statistics = _public_statistics(counts, parts, public_counts)
        with progress("predicting rows", 0):
            try:
                if plan.mechanism.looks_at == "release":
                    plan = find_auto_threshold(plan, statistics)  # about what the release will give
                predicted = predict(plan, statistics)
                report["predicted"] = predicted.to_dict()
                report["concerns"] += concerns.of_prediction(plan, predicted, statistics)
            except UnsupportedError as error:  # a mechanism of the user's own
                report["not_predicted"] = str(error)
        if reduction is not None:
            gradient_size = dense_size / reduction
        if gradient_size is not None:
            with progress("looking for the threshold", 0):
                report["suggested"] = _suggested(plan, statistics, gradient_size)
        if processes is not None:
            with progress("placing tables", 0):
                report["several_processes"] = sharding_report(processes, config, parts, statistics, activations)
    elif not (public_counts is None and gradient_size is None and reduction is None and processes is None):
        raise ConfigError("--counts, --gradient-size, --reduction and --nproc are about tables; this run trains none")
    report["mechanism"] = plan.mechanism.to_dict()
    # The model is thrown away, so that the steps that are measured spend nobody's budget.
    if measure:
        with concerns.without_warnings():
            report["measured"], steps_taken = measured(parts, progress)
        report["concerns"] += concerns.of_first_steps(plan, steps_taken) if steps_taken else []
    trained, trained_tables = (sum(_bytes(p) for n, p in sizes.items() if n in of) for of in (sizes, tables))
    table_bytes = sum(table["bytes"] for table in report["tables"])
    other_bytes = sum(map(_bytes, model.parameters())) - table_bytes
    itemsize = next(iter(sizes.values())).element_size()
    changed = report["predicted"]["gradient_size"] if "predicted" in report else dense_size
    max_batch = config.training.max_physical_batch
    memory = {
        "tables": table_bytes,
        "other_parameters": other_bytes,
        "gradients": round(sum(p.numel() for p in sizes.values()) - dense_size + changed) * itemsize,
        "optimizer_state": round(
            trained_tables * config.optimizer.table_state_share()
            + (trained - trained_tables) * config.optimizer.state_share()
        ),
        "activations": round(activations * min(parts.loader.expected_examples, max_batch or math.inf)),
    }
    report["memory_bytes"] = {**memory, "total": sum(memory.values())}
    return report


def load_with_tasks(config: Config, progress: Progress) -> Data:
    """The data; `progress` is told of the rows that were read."""
    read = 0
    with progress("reading the data", 0) as advance:

        def rows_read(rows: int) -> None:
            nonlocal read
            advance(rows - read)
            read = rows

        return load_data(config, rows_read)


def measured(
    parts: Prepared, progress: Progress = no_progress, of: str = ""
) -> tuple[dict[str, Any], list[StepReport]]:
    """What some steps took and did, without the first ones, which make buffers and compile; and their reports.

    There is no report of a step without units.
    """
    started = time.monotonic()
    parts.engine.prepare()
    preparation = time.monotonic() - started
    taken: list[Step] = []
    clock = [time.process_time()]
    title = f"taking steps {f'with {of} ' if of else ''}to measure their time"
    with progress(title, _WARM_UP + _MEASURED) as advance:
        for step in steps_of_epoch(parts):
            taken.append(step)
            clock.append(time.process_time())
            advance(1)
            enough = len(taken) > 1 and time.monotonic() - started - preparation > _SECONDS
            if enough or len(taken) == _WARM_UP + _MEASURED:
                break
    taken = taken[_WARM_UP:] or taken[-1:]
    reports = [step.report for step in taken]
    seconds = [step.seconds for step in taken]
    busy = [after - before for before, after in pairwise(clock[-len(taken) - 1 :])]
    numbers = {
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
    return numbers, [report for report in reports if report.units]


def _public_statistics(path: Path | None, parts: Prepared, public: PublicCounts) -> TouchStatistics:
    try:
        return parts.engine.touch_statistics(public.counts, public.units)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--counts {path}: {error}") from error


def _suggested(plan: PrivacyPlan, statistics: TouchStatistics, gradient_size: float) -> dict[str, Any]:
    """The mechanism's threshold for a gradient size, and what it is predicted to do."""
    threshold = find_threshold(plan, statistics, gradient_size)
    return {
        "wanted_gradient_size": gradient_size,
        "setting": plan.mechanism.threshold_setting,
        "threshold": threshold,
        "predicted": predict(with_threshold(plan, threshold), statistics).to_dict(),
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
        forward(model, config.make_loss(), data.examples(count))
    return 2 * sum(kept.values()) / count


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
