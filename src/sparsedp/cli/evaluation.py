"""How good a model is on what was held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from sparsedp.capture.ids import refuse_ids
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.config.losses import SEQUENCE_LOSSES, Loss
from sparsedp.cli.prepare import forward
from sparsedp.cli.validation import halves
from sparsedp.data import HeldOutItems, auc, brier_score, calibration_error, calibration_ratio, class_scores, log_loss
from sparsedp.data.ranking import Scorer, popularity_scorer, rank_held_out
from sparsedp.errors import ConfigError, DataError, DivergedError, SparseDPError, one_line
from sparsedp.sampling.periods import Every, period_name

ExamplesDone = Callable[[int], None]  # called after each batch with how many examples it has
TOP = 10  # the k of NDCG@k and HIT@k


# What a mean cross-entropy cannot reach unless training has diverged: guessing costs the logarithm of what there is to guess
# from, less than 20. Other losses have the scale of what they measure.
_LARGEST_CROSS_ENTROPY, _LARGEST_LOSS = 100.0, 1e20
_CROSS_ENTROPIES = {"binary_cross_entropy", "cross_entropy", *SEQUENCE_LOSSES}


class EvaluationError(SparseDPError):
    """The data cannot be evaluated on. The model is as good as it was."""


def evaluate(
    config: Config,
    model: nn.Module,
    loss: Loss,
    data: Data,
    progress: ExamplesDone = lambda count: None,
    *,
    by_halves: bool = False,
) -> dict[str, Any]:
    """AUC, log loss and calibration for binary cross-entropy; accuracy, precision and recall for classes; NDCG, HIT and MRR for
    held-out items of sequences; else the mean loss, with the mean squared error where outputs and targets are numbers of one
    shape.

    Empty if nothing is held out. If the held-out data have periods, "periods" has the same for each of them. With `by_halves`,
    "validation" and "test" have the same for two halves, to choose by and to report: the same for all runs on the same data.
    """
    held_out = data.held_out
    parts = _parts(held_out) if by_halves else {}
    if held_out is None:
        return {}
    if isinstance(held_out, HeldOutItems):
        of_parts = {name: rank_items(config, model, data, part) for name, part in parts.items()}
        return {**rank_items(config, model, data, held_out), **of_parts}
    collate = getattr(held_out, "collate", data.collate)
    outputs = {name: _outputs(config, model, loss, part, collate, progress, "Held-out") for name, part in parts.items()}
    of_parts = {name: _metrics([one]) for name, one in outputs.items()}
    periods = getattr(held_out, "periods", None)
    if outputs and periods is None:
        return {**_metrics(list(outputs.values())), **of_parts}
    every = getattr(held_out, "every", None)
    return {**evaluate_on(config, model, loss, held_out, collate, periods, progress, every=every), **of_parts}


def _parts(held_out: Any) -> dict[str, Subset[Any]]:
    """Drawn at random once and for all. Labels of one test user stay together."""
    if held_out is None or len(held_out) < 2:
        raise EvaluationError("Nothing is held out, so that the run has no utility to compare.")
    places = halves(held_out, getattr(held_out, "owners", None))
    if not all(map(len, places)):
        raise EvaluationError(
            "All that is held out is of one user, so that it has no halves to choose by and to report."
        )
    return {name: Subset(held_out, half.tolist()) for name, half in zip(("validation", "test"), places)}


def rank_items(config: Config, model: nn.Module, data: Data, held_out: Any) -> dict[str, Any]:
    """NDCG@10, HIT@10 and their kind on some of the held-out items, beside those of the most popular items."""
    with evaluating(model):
        return rank(config, model, data.training, held_out)


def rank(config: Config, model: nn.Module, training: Any, held_out: Any) -> dict[str, float]:
    """NDCG@10, HIT@10 and their kind over all items: of the model, the most popular items and any planted model."""
    if not hasattr(model, "score_next"):
        raise ConfigError(f"model.kind: to rank items, {type(model).__name__} needs a method score_next(history)")
    scorers: dict[str, Scorer] = {"": model.score_next}  # type: ignore[dict-item]
    if hasattr(training, "item_counts"):
        scorers["popularity_"] = popularity_scorer(training)
    planted = getattr(getattr(training, "sequences", None), "planted_scores", None)
    if planted is not None:
        scorers["planted_"] = planted
    exclude = getattr(config.data, "exclude_seen", False)
    metrics: dict[str, float] = {}
    for prefix, score in scorers.items():
        ranking = rank_held_out(score, held_out, k=TOP, exclude_seen=exclude)
        metrics |= {f"{prefix}{name}": value for name, value in ranking.to_dict().items()}
    return metrics


def evaluate_on(
    config: Config,
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    collate: Callable[[Any], Any],
    periods: Any = None,
    progress: ExamplesDone = lambda count: None,
    part: str = "Held-out",
    every: Every | None = None,
) -> dict[str, Any]:
    """As `evaluate`, on any data set, which errors call `part`.

    `periods` holds the period of each of its examples, and `every` says what that is.
    """
    if len(dataset) == 0:
        raise EvaluationError("The held-out data are empty.")
    if periods is None:
        return _metrics([_outputs(config, model, loss, dataset, collate, progress, part)])
    periods = np.asarray(periods)
    parts: dict[int, _Outputs] = {}
    for period in np.unique(periods):
        of_period = Subset(dataset, np.flatnonzero(periods == period).tolist())
        parts[int(period)] = _outputs(config, model, loss, of_period, collate, progress, part)
    return {
        **_metrics(list(parts.values())),
        "periods": {
            period_name(period, every): {"examples": one.count, **_metrics([one])} for period, one in parts.items()
        },
    }


def refuse_diverged(config: Config, metrics: dict[str, Any], last_losses: Sequence[float]) -> None:
    """Raises if a loss is so large that no data and no noise alone explain it: of what is held out, or of the last steps.

    Of the steps the median counts, as a single batch may have an example that is far from all others.
    """
    most = _LARGEST_CROSS_ENTROPY if config.loss in _CROSS_ENTROPIES else _LARGEST_LOSS
    losses = {"on the held-out data": metrics.get("log_loss", metrics.get("loss", 0.0))}
    if last_losses:
        losses[f"of the last {len(last_losses)} training steps"] = float(np.median(last_losses))
    for where, value in losses.items():
        if not value <= most:
            raise DivergedError(f"The loss {where} is {value:.3g}: training has diverged. Lower optimizer.lr.")


def name_the_row(config: Config, model: nn.Module, loss: Loss, data: Data) -> None:
    """After a failure in training: raises an `EvaluationError` if it is an example of the training set that is to blame."""
    try:
        evaluate_on(config, model, loss, data.training, data.collate, part="Training")
    except DivergedError:
        return


@dataclass(frozen=True)
class _Outputs:
    """What a model makes of some examples."""

    loss: float  # summed
    count: int
    logits: torch.Tensor | None  # these and the labels for binary cross-entropy alone
    labels: torch.Tensor | None
    squares: tuple[float, int] | None = None  # the sum of squared errors and of how many, where these are defined
    confusion: np.ndarray | None = None  # counts [label, prediction], for cross-entropy alone


def _metrics(parts: Sequence[_Outputs]) -> dict[str, float]:
    """The metrics of all parts together."""
    examples = sum(part.count for part in parts)
    mean = {"loss": sum(part.loss for part in parts) / examples}
    confusions = [part.confusion for part in parts if part.confusion is not None]
    if len(confusions) == len(parts):
        return {**class_scores(np.sum(confusions, axis=0)), **mean}
    if any(part.logits is None for part in parts):
        squares = [part.squares for part in parts if part.squares is not None]
        if len(squares) == len(parts):
            mean["mse"] = sum(total for total, _ in squares) / sum(count for _, count in squares)
        return mean
    logits, labels = (
        torch.cat([getattr(part, name) for part in parts]).flatten().numpy() for name in ("logits", "labels")
    )
    if not np.isin(labels, (0, 1)).all():  # shares of clicks: nothing to rank
        return mean
    metrics = {
        "auc": auc,
        "log_loss": log_loss,
        "brier_score": brier_score,
        "calibration_ratio": calibration_ratio,
        "calibration_error": calibration_error,
    }
    return {name: metric(labels, logits) for name, metric in metrics.items()}


def _outputs(
    config: Config,
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    collate: Callable[[Any], Any],
    progress: ExamplesDone,
    part: str,
) -> _Outputs:
    batch_size = config.training.max_physical_batch or config.training.batch_size
    outputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    total, done = 0.0, 0
    squared, numbers = 0.0, 0
    comparable = True  # outputs with targets
    confusion: np.ndarray | None = None
    with torch.no_grad(), evaluating(model):
        batches = _batches(dataset, collate, batch_size)
        while done < len(dataset):
            rows = range(done, min(done + batch_size, len(dataset)))
            try:
                batch = next(batches)
                output, target, value = forward(model, loss, batch)
            except Exception as error:
                raise _unusable(model, loss, dataset, collate, rows, error, part) from error
            if not torch.isfinite(value).all():
                raise _not_finite(model, dataset, rows, batch, value.item(), part)
            total += value.item() * (len(rows) if config.privacy.loss_reduction == "mean" else 1)
            done = rows.stop
            progress(len(rows))
            if config.loss == "binary_cross_entropy":
                outputs.append(output)
                targets.append(target)
            elif config.loss == "cross_entropy":
                classes = output.shape[1]
                pairs = torch.bincount(target * classes + output.argmax(1), minlength=classes**2).view(classes, classes)
                confusion = pairs.numpy() if confusion is None else confusion + pairs.numpy()
            elif comparable := comparable and _are_numbers_alike(output, target):
                squared += (output.double() - target.double()).square().sum().item()
                numbers += output.numel()
    if config.loss == "cross_entropy":
        return _Outputs(total, done, None, None, confusion=confusion)
    if config.loss != "binary_cross_entropy":
        return _Outputs(total, done, None, None, (squared, numbers) if comparable and numbers else None)
    return _Outputs(total, done, torch.cat(outputs), torch.cat(targets))


def _are_numbers_alike(output: Any, target: Any) -> bool:
    return all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in (output, target)) and (
        output.shape == target.shape
    )


def _unusable(
    model: nn.Module, loss: Loss, dataset: Any, collate: Callable[[Any], Any], rows: range, error: Exception, part: str
) -> EvaluationError:
    """Names the first example of the batch that fails on its own, as the batch did."""
    for row in rows:
        try:
            forward(model, loss, next(_batches(Subset(dataset, [row]), collate, 1)))
        except Exception as alone:
            return EvaluationError(f"{part} row {_row(dataset, row)}: {one_line(_explained(model, alone))}")
    first, last = _row(dataset, rows[0]), _row(dataset, rows[-1])
    return EvaluationError(f"{part} rows {first} to {last}: {one_line(error)}")


def _explained(model: nn.Module, error: Exception) -> Exception:
    """The same in the words of `refuse_ids`, if it is a lookup in one of the model's tables that failed."""
    names = {id(module): name for name, module in model.named_modules()}
    trace = error.__traceback__
    while trace is not None:
        table, ids = (trace.tb_frame.f_locals.get(name) for name in ("self", "input"))
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and isinstance(ids, torch.Tensor):
            try:
                refuse_ids(f"'{names.get(id(table), '')}.weight'", table.num_embeddings, ids, error)
            except DataError as explained:
                return explained
        trace = trace.tb_next
    return error


def _not_finite(model: nn.Module, dataset: Any, rows: range, batch: Any, value: float, part: str) -> SparseDPError:
    """Why a loss is not finite: the data of some rows, or the weights."""
    parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
    for name, column in parts:
        if not isinstance(column, torch.Tensor) or not column.is_floating_point() or len(column) != len(rows):
            continue
        wrong = torch.flatten(~torch.isfinite(column), 1).any(1) if column.dim() > 1 else ~torch.isfinite(column)
        if wrong.any():
            numbers = [str(_row(dataset, rows[i])) for i in wrong.nonzero()[:5, 0].tolist()]
            label = not isinstance(batch, dict) and name == len(batch) - 1
            what = "label" if label else f"input {name!r}" if isinstance(name, str) else f"input {name + 1}"
            more = ", ..." if int(wrong.sum()) > len(numbers) else ""
            where = f"{part.lower()} row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}{more}"
            return EvaluationError(f"The {what} is NaN or infinite in {where}.")
    weights = (p.detach() for p in (*model.parameters(), *model.buffers()) if not p.is_meta)  # meta: in other processes
    if all(bool(torch.isfinite(p).all()) for p in weights if p.is_floating_point()):
        where = f"in {part.lower()} rows {_row(dataset, rows[0])} to {_row(dataset, rows[-1])}"
        return DivergedError(
            f"The loss is {value} {where}, where the data are finite: the model's outputs are too large. Lower optimizer.lr."
        )
    return DivergedError(
        f"The loss on the {part.lower()} data is {value}: the weights have diverged. Lower optimizer.lr."
    )


def _row(dataset: Any, index: int) -> int:
    """The number of a row in the set that subsets were taken of."""
    while isinstance(dataset, Subset):
        index, dataset = int(dataset.indices[index]), dataset.dataset
    return index


def _batches(dataset: Any, collate: Callable[[Any], Any], batch_size: int) -> Iterator[Any]:
    # A generator of its own, so that an evaluation leaves torch's global one alone.
    return iter(DataLoader(dataset, batch_size=batch_size, collate_fn=collate, generator=torch.Generator()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """eval() for a while. Then each module has its own mode again: a frozen BatchNorm must stay in eval()."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
