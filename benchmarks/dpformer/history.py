"""Does a trained sequence model use its histories, and does re-attention change its attention?

    sparsedp train movielens --run-dir runs/one ...
    python benchmarks/dpformer/history.py runs/one

For each run: NDCG@10 with everybody's own history and with somebody else's; they are alike if the model ranks items by popularity
alone. For Transformers also, over the positions of some histories: the spread of a query's attention logits over its keys, and
that of the correction that re-attention subtracts from them.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsedp.cli.config.load import load_config
from sparsedp.data.ranking import rank_held_out
from sparsedp.models import DPFormer

USERS = 256  # whose attention is looked at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a finished run")
    for run in parser.parse_args().runs:
        print(run.name)
        for line in describe(run):
            print(f"  {line}")


def describe(run: Path) -> list[str]:
    config = load_config(run / "private/config.yaml")
    data = config.data.load(config.code)
    held_out: Any = data.held_out
    model = config.model.make(data.training, config.code)
    model.load_state_dict(torch.load(run / "release/model.pt", weights_only=True))
    model.eval()
    with_histories = rank_held_out(model.score_next, held_out)  # type: ignore[arg-type]
    # A chunk's histories, one user further on.
    with_others = rank_held_out(lambda history: model.score_next(history.roll(1, 0)), held_out)  # type: ignore[operator]
    lines = [f"NDCG@10 with own histories {with_histories.ndcg:.4f}, with another user's {with_others.ndcg:.4f}"]
    if isinstance(model, DPFormer):
        history, _ = held_out.collate(held_out.__getitems__(list(range(USERS))))
        lines += attention(model, history)
    return lines


@torch.no_grad()
def attention(model: DPFormer, history: Tensor) -> list[str]:
    """A line for each block: standard deviations over the keys of a query, averaged over queries with two or more."""
    lines = []
    for number, block in enumerate(model.blocks, 1):
        attentions: list[tuple[Tensor, Tensor | None]] = []
        weights = block._weights

        def watched(query, key, future, noise, weights=weights, attentions=attentions):  # type: ignore[no-untyped-def]
            plain = weights(query, key, future, None)
            attentions.append((plain, None if noise is None else weights(query, key, future, noise)))
            return weights(query, key, future, noise)

        block._weights = watched  # type: ignore[assignment]
        model.score_next(history)
        del block._weights
        plain, corrected = attentions[-1]
        # Scores are only defined up to a constant for each query, as is their logarithm's deviation.
        line = f"block {number}: logits vary by {_deviation(plain.log()):.3f} over the keys of a query"
        if corrected is not None:
            line += f", their correction by {_deviation(plain.log() - corrected.log()):.3f}"
        lines.append(line)
    return lines


def _deviation(logits: Tensor) -> float:
    """[B, heads, L, L] -> mean over queries of the deviation over the keys that are not in the future."""
    length = logits.shape[-1]
    deviations = [logits[:, :, query, : query + 1].std(-1) for query in range(1, length)]
    value = float(torch.cat([row.flatten() for row in deviations]).nanmean())
    assert math.isfinite(value)
    return value


if __name__ == "__main__":
    main()
