"""What can be said about a run before it starts: noise, time, memory and rows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.prepare import Prepared, forward, limit_threads, load_data, make_model, prepare, with_collate
from sparsedp.errors import ConfigError, UnsupportedError, one_line
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import TouchStatistics, find_threshold, predict, with_threshold
from sparsedp.tables import find_tables

# Steps that are measured after those that warm up; after some seconds fewer will do.
_WARM_UP, _MEASURED, _FEWEST, _SECONDS = 2, 12, 3, 20.0


def plan_report(
    config: Config,
    *,
    measure: bool = True,
    counts: Path | None = None,
    gradient_size: float | None = None,
    reduction: float | None = None,
) -> dict[str, Any]:
    """All that can be said about a run beforehand. Reads the data; the model is made, and thrown away.

    Rows are predicted from public `counts`, or else from the data. With a `gradient_size`, or a `reduction`
    against the dense one, the report suggests the mechanism's threshold for it.
    """
    mechanism = config.make_mechanism()
    if not (gradient_size is None and reduction is None) and mechanism.threshold_setting is None:
        raise ConfigError(
            f"--gradient-size and --reduction look for AdaFEST's threshold; privacy.mechanism is {mechanism.name!r}"
        )
    public_counts = None if counts is None else _read_counts(counts)
    limit_threads(config)
    data = with_collate(config, load_data(config))
    model = make_model(config, data.training)
    activations = _activation_bytes(model, config, data)
    state = config.optimizer.state_share()
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
        if public_counts is None:
            statistics = parts.engine.touch_statistics()
        else:
            statistics = _public_statistics(counts, parts, *public_counts)
        try:
            report["predicted"] = predict(plan, statistics).to_dict()
        except UnsupportedError as error:  # a mechanism of the user's own
            report["not_predicted"] = str(error)
        if reduction is not None:
            gradient_size = dense_size / reduction
        if gradient_size is not None:
            report["suggested"] = _suggested(plan, statistics, gradient_size)
    elif not (public_counts is None and gradient_size is None and reduction is None):
        raise ConfigError("--counts, --gradient-size and --reduction are about tables; this run trains none")
    # The model is thrown away, so that the steps that are measured spend nobody's budget.
    if measure:
        report["measured"] = _measured(parts)
    trained = sum(map(_bytes, sizes.values()))
    table_bytes = sum(table["bytes"] for table in report["tables"])
    other_bytes = sum(map(_bytes, model.parameters())) - table_bytes
    itemsize = next(iter(sizes.values())).element_size()
    changed = report["predicted"]["gradient_size"] if "predicted" in report else dense_size
    max_batch = config.training.max_physical_batch
    memory = {
        "tables": table_bytes,
        "other_parameters": other_bytes,
        "gradients": round(sum(p.numel() for p in sizes.values()) - dense_size + changed) * itemsize,
        "optimizer_state": round(trained * state),
        "activations": round(activations * min(parts.loader.expected_examples, max_batch or math.inf)),
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
    if path.suffix not in _COUNT_READERS:
        raise ConfigError(f"--counts {path}: expected a .npz, .pt or .json file")
    try:
        content = _COUNT_READERS[path.suffix](path)
    except OSError:
        raise
    except Exception as error:  # each reader has errors of its own
        raise ConfigError(f"--counts {path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict) or "units" not in content:
        raise ConfigError(
            f"--counts {path}: expected, beside each table's counts, the number of counted units as 'units'"
        )
    return {name: values for name, values in content.items() if name != "units"}, float(content["units"])


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


_COUNT_READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _read_npz,
    ".pt": lambda path: torch.load(path, map_location="cpu", weights_only=True),
    ".json": lambda path: json.loads(path.read_text()),
}


def _public_statistics(path: Path | None, parts: Prepared, counts: dict[str, Any], units: float) -> TouchStatistics:
    try:
        return parts.engine.touch_statistics(counts, units)
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
