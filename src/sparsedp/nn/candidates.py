"""Sampled candidates: a loss over a large table that touches a few of its rows.

A softmax over a whole vocabulary uses every row of the output table for every unit: the gradient is dense, and AdaFEST
has nothing to select by. Scoring the target against some negatives looks up 1 + count rows. Negatives come from a public
distribution and are drawn for each unit on its own; the other units of the batch may not serve as negatives, because then
one unit's loss would depend on another.

Draw candidates before the forward pass and hand them to the module as an input, like all that belongs to a unit:

    sample = CandidateSampler(rows, count=50)
    for history, target in loader:
        loss = candidate_loss(model(history, sample(target)))  # forward: candidate_scores(hidden, self.table, candidates)
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.errors import SparseDPError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey


class CandidateSampler:
    """Draws `count` negatives from `probabilities` over the rows of a table (public; by default uniform).

    They come from the stream cipher, under a key of its own from the operating system. The guarantee takes negatives to be
    independent from unit to unit and not known to the reader of the model, so a `generator` of one's own, torch's or
    `RandomKey.from_seed(seed).generator()`, is for tests. With `shared`, all positions of a unit have the same negatives:
    fewer touched rows.
    """

    def __init__(
        self,
        rows: int,
        count: int,
        probabilities: Tensor | None = None,
        *,
        shared: bool = False,
        generator: CipherGenerator | torch.Generator | None = None,
    ) -> None:
        if rows < 1 or count < 1:
            raise ValueError(f"{rows=} and {count=} must be at least 1")
        self.rows, self.count, self.shared = rows, count, shared
        self._probabilities = None if probabilities is None else _normalised(probabilities, rows)
        self._cumulative = None if self._probabilities is None else self._probabilities.cumsum(0)
        self._generator = RandomKey.from_os().generator() if generator is None else generator
        self._process = os.getpid()

    def __call__(self, target: Tensor) -> Tensor:
        """The candidates of each position, (..., 1 + count): the target, then negatives. `target` is (units, ...)."""
        if os.getpid() != self._process:
            raise SparseDPError(
                "Candidates were drawn in another process than the sampler was made in (a loader's worker?): both would "
                "draw the same ones. Draw them in the training loop."
            )
        lead = target.shape[:1] + (1,) * (target.ndim - 1) if self.shared else target.shape
        # float64: float32 has 2^24 values in [0, 1), fewer than large tables have rows.
        uniform = _uniform((*lead, self.count), self._generator)
        if self._cumulative is None:
            negatives = (uniform * self.rows).long()
        else:
            negatives = torch.searchsorted(self._cumulative, uniform * self._cumulative[-1], right=True)
        negatives = negatives.clamp_max(self.rows - 1).to(target.device).expand(*target.shape, self.count)
        return torch.cat([target.long()[..., None], negatives], -1)

    def log_expected(self, candidates: Tensor) -> Tensor:
        """log Q: the logarithm of how often each candidate is drawn on average, count * probability, (..., 1 + count)."""
        if self._probabilities is None:
            return torch.full(candidates.shape, math.log(self.count / self.rows), device=candidates.device)
        drawn = self.count * self._probabilities.to(candidates.device)[candidates]
        if not (drawn > 0).all():
            raise ValueError("log_expected: a candidate has probability 0. Every row that can be a target needs some.")
        return drawn.log().float()


def _uniform(shape: tuple[int, ...], generator: CipherGenerator | torch.Generator) -> Tensor:
    if isinstance(generator, CipherGenerator):
        return torch.from_numpy(generator.random(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _normalised(probabilities: Tensor, rows: int) -> Tensor:
    weights = probabilities.detach().cpu().double()
    if weights.shape != (rows,) or not torch.isfinite(weights).all() or weights.min() < 0 or weights.sum() == 0:
        raise ValueError(f"probabilities must be {rows} finite numbers, not negative, with a positive sum")
    return weights / weights.sum()


def candidate_scores(
    hidden: Tensor, table: nn.Embedding, candidates: Tensor, log_expected: Tensor | None = None
) -> Tensor:
    """hidden . table[candidates], (..., 1 + count), through a lookup: the table's gradient has candidates' rows only.

    `hidden` is (..., dim), `candidates` (..., 1 + count) with the target first. `log_expected` (log Q, for negatives that
    are not uniform) is subtracted, so that the loss estimates that of a softmax over all rows (Bengio and Senecal 2008).
    A negative that happens to be the target counts as none: its score is -infinity.
    """
    scores = (table(candidates) @ hidden[..., None]).squeeze(-1)
    if log_expected is not None:
        scores = scores - log_expected.to(scores.dtype)
    hits = candidates[..., 1:] == candidates[..., :1]
    return torch.cat([scores[..., :1], scores[..., 1:].masked_fill(hits, -math.inf)], -1)


def candidate_loss(scores: Tensor, valid: Tensor | None = None) -> Tensor:
    """Cross-entropy of (units, ..., 1 + count) scores with the target at 0: the mean over units of each one's own mean.

    `valid`, (units, ...) bool, says which positions count; a unit without any has loss 0.
    """
    return _mean_of_units(-scores.log_softmax(-1)[..., 0], valid)


def binary_candidate_loss(scores: Tensor, valid: Tensor | None = None) -> Tensor:
    """-log sigmoid(target's score) - sum over negatives of log(1 - sigmoid(score)) (SASRec, Kang and McAuley 2018, eq. 6).

    Scores, `valid` and means are as in `candidate_loss`. A negative with score -infinity, one that is the target, adds 0.
    """
    return _mean_of_units(F.softplus(-scores[..., 0]) + F.softplus(scores[..., 1:]).sum(-1), valid)


def _mean_of_units(losses: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over units of each one's own mean over its positions, (units, ...)."""
    counted = torch.ones_like(losses) if valid is None else valid.to(losses.dtype)
    losses, counted = losses[:, None].flatten(1), counted[:, None].flatten(1)
    return ((losses * counted).sum(1) / counted.sum(1).clamp_min(1)).mean()
