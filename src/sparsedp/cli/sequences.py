"""What training on sequences takes: data, a model, batches with negatives, a loss, and a ranking of all items."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.cli.config import (
    CANDIDATE_LOSSES,
    Config,
    GeneratedSequencesData,
    RecurrentModel,
    SequencesData,
    TransformerModel,
)
from sparsedp.data.generatedsequences import generated_sequences
from sparsedp.data.ranking import Scorer, popularity_scorer, rank_held_out
from sparsedp.data.sequences import HeldOutItems, SequenceDataset, Sequences, open_sequences
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import ConfigError
from sparsedp.generator import CipherGenerator
from sparsedp.models import DPFormer, RecurrentRecommender
from sparsedp.nn import CandidateSampler, binary_candidate_loss, candidate_loss
from sparsedp.noise import RandomKey
from sparsedp.plan import PrivacyPlan

TOP = 10  # the k of NDCG@k and HIT@k


def load_sequences(source: GeneratedSequencesData | SequencesData) -> tuple[SequenceDataset, HeldOutItems]:
    """The training set, and the items that are held out."""
    if isinstance(source, GeneratedSequencesData):
        sequences: Sequences = generated_sequences(
            source.users,
            source.items,
            seed=source.seed,
            groups=source.groups,
            structure=source.structure,
            skew=source.skew,
            mean_length=source.mean_length,
        )
    else:
        sequences = open_sequences(
            source.path, source.format, min_actions=source.min_actions, until_stable=source.until_stable
        )
    split = sequences.split(source.length, validation=source.held_out == "validation")
    return split.training, split.test if split.validation is None else split.validation


# ------------------------------------------------------------------ model


def make_sequence_model(chosen: TransformerModel | RecurrentModel, training: Any) -> nn.Module:
    if not hasattr(training, "items") or not hasattr(training, "length"):
        raise ConfigError(
            f"model.kind: {chosen.kind} needs sequences; this data set has no attributes items and length"
        )
    items, length = training.items, training.length
    common: dict[str, Any] = {"dim": chosen.dim, "dropout": chosen.dropout, "tied": chosen.tied}
    if isinstance(chosen, RecurrentModel):
        return RecurrentRecommender(items, length, cell=chosen.kind, **common)
    reattention = chosen.kind == "dpformer"
    return DPFormer(items, length, blocks=chosen.blocks, heads=chosen.heads, reattention=reattention, **common)


def tell_noise(config: Config, model: nn.Module, training: Any, plan: PrivacyPlan | None = None) -> None:
    """Tells a model with re-attention of the noise; before there is a plan, of some, so that it can be tried."""
    chosen = config.model
    if not isinstance(chosen, TransformerModel) or chosen.kind != "dpformer":
        return
    assert isinstance(model, DPFormer)
    # Those that are to be released are not known before training.
    public = torch.ones(model.items + 1) if config.privacy.frequencies else _frequencies(chosen, training)
    model.track_errors(
        noise_multiplier=1.0 if plan is None else plan.mechanism.gradient_noise(plan.noise_multiplier),
        batch_size=config.training.batch_size,
        frequencies=public,
    )


def release_frequencies(config: Config, model: nn.Module, engine: PrivacyEngine) -> None:
    """Once in a run, if it is planned. A run that is resumed has what was released in its checkpoint."""
    if config.privacy.frequencies is not None and not engine.ledger.setups(None):
        assert isinstance(model, DPFormer)
        model.estimate_errors(engine)


def _frequencies(chosen: TransformerModel, training: Any) -> Tensor:
    """The public share of users that have each item, [items + 1]."""
    sequences = getattr(training, "sequences", None)
    if chosen.frequencies is None:
        public = getattr(sequences, "public_frequencies", None)
        if public is None:
            raise ConfigError(
                "model.frequencies: missing. Re-attention has to know which items are rare, and must not count them on "
                "private data: name a JSON file with the share of users for each item, {item: share}, from public data, let "
                "them be released with noise (privacy.frequencies={epsilon: 0.5}), or train model.kind=transformer"
            )
        return public
    path = Path(chosen.frequencies)
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.frequencies: {path} cannot be read: {error}") from error
    numbers = isinstance(given, dict) and all(
        isinstance(share, (int, float)) and 0 <= share <= 1 for share in given.values()
    )
    if not numbers:
        raise ConfigError(f"model.frequencies: {path}: expected {{item: share of users, from 0 to 1}}")
    names = getattr(sequences, "item_names", ()) or tuple(str(item) for item in range(1, training.items + 1))
    if not set(names) & set(given):
        raise ConfigError(f"model.frequencies: {path} names none of the {training.items} items of the data")
    return torch.tensor([0.0, *(float(given.get(name, 0.0)) for name in names)])


# ------------------------------------------------------------------ batches and losses


class SequenceCollate:
    """A batch of (history, target) as the arguments that the model takes for a loss.

    softmax: history and target. Otherwise history and candidates, [n, length, 1 + negatives]: the target, then negatives
    drawn evenly from all items; all 0 where there is no target.
    """

    def __init__(self, config: Config, items: int, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._sampler: CandidateSampler | None = None
        self._generator: CipherGenerator | None = None
        settings = config.training
        if settings.negatives is not None:
            if settings.seed is not None:
                self._generator = RandomKey.from_seed(settings.seed).generator()
            self._sampler = CandidateSampler(
                items, settings.negatives, shared=settings.shared_negatives, generator=self._generator
            )

    def __call__(self, examples: Any) -> dict[str, Tensor]:
        history, target = self._collate(examples)
        if self._sampler is None:
            return {"history": history, "target": target}
        candidates = self._sampler(target - 1) + 1  # 0 is padding, and no negative
        return {"history": history, "candidates": candidates * (target > 0)[..., None]}

    def state(self) -> list[int] | None:
        """Of a seeded generator, to go on with the same negatives; nothing else is to be repeated."""
        return None if self._generator is None else self._generator.state()

    def restore(self, state: list[int] | None) -> None:
        if self._generator is not None and state is not None:
            self._generator.restore(state)


def make_sequence_loss(config: Config) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    """The mean, or sum, over units of each unit's own mean over its targets."""
    name, summed = config.loss, config.privacy.loss_reduction == "sum"

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if name in CANDIDATE_LOSSES:
            valid = batch["candidates"][..., 0] > 0
            mean = (candidate_loss if name == "sampled_softmax" else binary_candidate_loss)(output, valid)
        else:
            mean = output.mean()
        return mean * len(batch["history"]) if summed else mean

    return loss


# ------------------------------------------------------------------ ranking


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
    found: dict[str, float] = {}
    for prefix, score in scorers.items():
        ranking = rank_held_out(score, held_out, k=TOP, exclude_seen=exclude)
        found |= {f"{prefix}{name}": value for name, value in ranking.to_dict().items()}
    return found
