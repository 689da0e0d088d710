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

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.config.losses import Loss
from sparsedp.cli.prepare import forward
from sparsedp.data import HeldOutItems, auc, log_loss
from sparsedp.data.ranking import Scorer, popularity_scorer, rank_held_out
from sparsedp.errors import ConfigError, SparseDPError, one_line

ExamplesDone = Callable[[int], None]  # called after each batch with how many examples it has
TOP = 10  # the k of NDCG@k and HIT@k


class EvaluationError(SparseDPError):
    """The held-out data cannot be evaluated on. The model is as good as it was."""


class DivergedError(SparseDPError):
    """The weights, or what the model makes of sound data, are not finite any more."""


def evaluate(
    config: Config, model: nn.Module, loss: Loss, data: Data, progress: ExamplesDone = lambda count: None
) -> dict[str, Any]:
    """AUC and log loss for binary cross-entropy, NDCG and HIT for held-out items of sequences, else the mean loss.

    Empty if nothing is held out. If the held-out data have periods, "periods" has the same for each of them.
    """
    if data.held_out is None:
        return {}
    if isinstance(data.held_out, HeldOutItems):
        return rank_items(config, model, data, data.held_out)
    collate = getattr(data.held_out, "collate", data.collate)
    periods = getattr(data.held_out, "periods", None)
    return evaluate_on(config, model, loss, data.held_out, collate, periods, progress)


def rank_items(config: Config, model: nn.Module, data: Data, held_out: Any) -> dict[str, Any]:
    """NDCG@10 and HIT@10 on some of the held-out items, beside those of the most popular items."""
    with evaluating(model):
        return rank(config, model, data.training, held_out)


def rank(config: Config, model: nn.Module, training: Any, held_out: Any) -> dict[str, float]:
    """NDCG@10 and HIT@10 over all items: of the model, of the most popular items and, if there is one, of the planted model."""
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
) -> dict[str, Any]:
    """As `evaluate`, on any data set. `periods` holds the period of each of its examples."""
    if len(dataset) == 0:
        raise EvaluationError("The held-out data are empty.")
    if periods is None:
        return _metrics([_outputs(config, model, loss, dataset, collate, progress)])
    periods = np.asarray(periods)
    parts: dict[int, _Outputs] = {}
    for period in np.unique(periods):
        part = Subset(dataset, np.flatnonzero(periods == period).tolist())
        parts[int(period)] = _outputs(config, model, loss, part, collate, progress)
    return {
        **_metrics(list(parts.values())),
        "periods": {str(period): {"examples": part.count, **_metrics([part])} for period, part in parts.items()},
    }


@dataclass(frozen=True)
class _Outputs:
    """What a model makes of some examples."""

    loss: float  # summed
    count: int
    logits: torch.Tensor | None  # these and the labels for binary cross-entropy alone
    labels: torch.Tensor | None


def _metrics(parts: Sequence[_Outputs]) -> dict[str, float]:
    """The metrics of all parts together."""
    mean = {"loss": sum(part.loss for part in parts) / sum(part.count for part in parts)}
    if any(part.logits is None for part in parts):
        return mean
    logits, labels = (
        torch.cat([getattr(part, name) for part in parts]).flatten().numpy() for name in ("logits", "labels")
    )
    if not np.isin(labels, (0, 1)).all():  # shares of clicks: nothing to rank
        return mean
    return {"auc": auc(labels, logits), "log_loss": log_loss(labels, logits)}


def _outputs(
    config: Config, model: nn.Module, loss: Loss, dataset: Any, collate: Callable[[Any], Any], progress: ExamplesDone
) -> _Outputs:
    batch_size = config.training.max_physical_batch or config.training.batch_size
    outputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    total, done = 0.0, 0
    with torch.no_grad(), evaluating(model):
        batches = _batches(dataset, collate, batch_size)
        while done < len(dataset):
            rows = range(done, min(done + batch_size, len(dataset)))
            try:
                batch = next(batches)
                output, target, value = forward(model, loss, batch)
            except Exception as error:
                raise _unusable(model, loss, dataset, collate, rows, error) from error
            if not torch.isfinite(value).all():
                raise _not_finite(model, dataset, rows, batch, value.item())
            total += value.item() * (len(rows) if config.privacy.loss_reduction == "mean" else 1)
            done = rows.stop
            progress(len(rows))
            if config.loss == "binary_cross_entropy":
                outputs.append(output)
                targets.append(target)
    if config.loss != "binary_cross_entropy":
        return _Outputs(total, done, None, None)
    return _Outputs(total, done, torch.cat(outputs), torch.cat(targets))


def _unusable(
    model: nn.Module, loss: Loss, dataset: Any, collate: Callable[[Any], Any], rows: range, error: Exception
) -> EvaluationError:
    """Names the first example of the batch that fails on its own, as the batch did."""
    for row in rows:
        try:
            forward(model, loss, next(_batches(Subset(dataset, [row]), collate, 1)))
        except Exception as alone:
            return EvaluationError(f"Held-out row {_row(dataset, row)}: {one_line(alone)}")
    first, last = _row(dataset, rows[0]), _row(dataset, rows[-1])
    return EvaluationError(f"Held-out rows {first} to {last}: {one_line(error)}")


def _not_finite(model: nn.Module, dataset: Any, rows: range, batch: Any, value: float) -> SparseDPError:
    """Why a loss is not finite: the data of some rows, or the weights."""
    parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
    for name, part in parts:
        if not isinstance(part, torch.Tensor) or not part.is_floating_point() or len(part) != len(rows):
            continue
        wrong = torch.flatten(~torch.isfinite(part), 1).any(1) if part.dim() > 1 else ~torch.isfinite(part)
        if wrong.any():
            numbers = [str(_row(dataset, rows[i])) for i in wrong.nonzero()[:5, 0].tolist()]
            label = not isinstance(batch, dict) and name == len(batch) - 1
            what = "label" if label else f"input {name!r}" if isinstance(name, str) else f"input {name + 1}"
            more = ", ..." if int(wrong.sum()) > len(numbers) else ""
            return EvaluationError(
                f"The {what} is NaN or infinite in held-out row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}{more}."
            )
    if all(bool(torch.isfinite(p).all()) for p in model.state_dict().values() if p.is_floating_point()):
        where = f"in held-out rows {_row(dataset, rows[0])} to {_row(dataset, rows[-1])}"
        return DivergedError(
            f"The loss is {value} {where}, where the data are finite: the model's outputs are too large. Lower optimizer.lr."
        )
    return DivergedError(f"The loss on the held-out data is {value}: the weights have diverged. Lower optimizer.lr.")


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
