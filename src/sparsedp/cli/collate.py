"""Batches of sequences: labels that are drawn from timelines, and the negatives that a loss may want."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsedp.cli.config.sections import TrainingConfig
from sparsedp.data import LabelCollate
from sparsedp.generator import CipherGenerator
from sparsedp.nn import CandidateSampler
from sparsedp.noise import RandomKey


class SequenceCollate:
    """A batch of (history, target) as the arguments that the model takes for a loss.

    softmax: history and target. Otherwise history and candidates, [n, length, 1 + negatives]: the target, then negatives
    drawn evenly from all items; all 0 where there is no target. Of timelines there is one target, and no axis of positions.
    Without `named`, for a loss of the user's own: (history, target). Of several processes, each `rank` draws others.
    """

    def __init__(
        self, settings: TrainingConfig, items: int, collate: Callable[[Any], Any], named: bool = True, rank: int = 0
    ) -> None:
        self._named = named
        self._generator: CipherGenerator | None = None
        if settings.seed is not None:
            key = RandomKey.from_seed(settings.seed)
            self._generator = (key.child(rank) if rank else key).generator()
        self._collate = LabelCollate(collate.context, self._generator) if isinstance(collate, LabelCollate) else collate
        self._sampler: CandidateSampler | None = None
        if settings.negatives is not None:
            self._sampler = CandidateSampler(
                items, settings.negatives, shared=settings.shared_negatives, generator=self._generator
            )

    def __call__(self, examples: Any) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        history, target = self._collate(examples)
        if not self._named:
            return history, target
        if self._sampler is None:
            return {"history": history, "target": target}
        candidates = self._sampler(target - 1) + 1  # 0 is padding, and no negative
        return {"history": history, "candidates": candidates * (target > 0)[..., None]}

    def state(self) -> list[int] | None:
        """Of a seeded generator, to go on with the same labels and negatives; nothing else is to be repeated."""
        return None if self._generator is None else self._generator.state()

    def restore(self, state: list[int] | None) -> None:
        if self._generator is not None and state is not None:
            self._generator.restore(state)
