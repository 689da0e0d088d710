"""LazyDP's rows with large weights take gradient and noise together: the noise has the law of eager DP-SGD, once per step.

Gradients are 0, so that what moves a row is its noise alone: after T steps it has deviation s sqrt(sum lr^2), s that of one step,
and weight decay pulls both towards 0. Half of the rows are never read; of the others, some take noise together, some apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import sparsedp
from sparsedp.kernels import loops
from support import loader_of

ROWS, STEPS, BATCH, CLIP, RATE = 3000, 30, 200, 0.4, 0.05

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"decay": 0.3},
    "a schedule": {"rate": lambda step: RATE / (1 + step / 5), "decay": 0.5},
    "no steps between": {"rate": lambda step: 0.0 if step % 3 == 0 else RATE},
    "a finer grid": {"rate": lambda step: RATE if step < 15 else RATE / 1000},
    "read after every step": {"read_every": 1},
    "resumed": {"resumed_at": 13},
    "one column": {"width": 1},
}


def moved_by(
    tmp_path: Path, width: int = 5, decay: float = 0.0, rate: Callable[[int], float] = lambda step: RATE, read_every: int = 0,
    resumed_at: int = 0,
) -> Tensor:  # fmt: skip
    """By how many deviations each number of a table was moved, (rows, width)."""
    torch.manual_seed(1)
    ids, weights = torch.randint(0, ROWS // 2, (2000, 3)), torch.randn(ROWS, width)

    def private() -> tuple[Any, ...]:
        module: Any = nn.Embedding.from_pretrained(weights.clone(), freeze=False, sparse=True)
        engine = sparsedp.PrivacyEngine(seed=2)
        return engine, *engine.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=RATE, weight_decay=decay),
            data_loader=loader_of(ids, batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=CLIP,
            mechanism=sparsedp.LazyDP(),
        )  # fmt: skip

    engine, module, optimizer, loader = private()
    step, kept, variance = 0, 1.0, 0.0
    while step < STEPS:
        for (rows,) in loader:
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            (module(rows) * 0).sum().backward()
            optimizer.step()
            factor = 1 - rate(step) * decay
            kept, variance = kept * factor, variance * factor**2 + (rate(step) * CLIP / BATCH) ** 2
            step += 1
            if read_every and step % read_every == 0:
                module.state_dict()["weight"].clone()
            if step in (resumed_at, STEPS):
                break
        if step == resumed_at:
            engine.save_checkpoint(tmp_path / "checkpoint.pt")
            engine, module, optimizer, loader = private()
            engine.load_checkpoint(tmp_path / "checkpoint.pt")
    after = torch.Tensor(module.state_dict()["weight"]).double()
    engine.close()
    return (after - kept * weights.double()) / math.sqrt(variance)


@pytest.mark.parametrize("case", CASES)
def test_the_noise_has_the_law_of_eager(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, touched, move_rows_within = [], [], loops.move_rows_within

    def every_other_step(table: Tensor, rows: Tensor, values: Tensor, step: float, limit: float) -> Tensor:
        """Rows go from one way to the other: a lower or a higher limit would do the same."""
        beyond = move_rows_within(table, rows, values, step, limit if len(together) % 2 else 8 * limit)
        together.append(len(beyond))
        touched.append(len(rows))
        return beyond

    monkeypatch.setattr("sparsedp.tables.lazy.loops.move_rows_within", every_other_step)
    moved = moved_by(tmp_path, **CASES[case])
    share = sum(together) / sum(touched)
    assert 0.05 < share < 0.95
    for half in (moved[: ROWS // 2], moved[ROWS // 2 :]):  # that was read, or not
        assert scipy.stats.kstest(half.flatten().numpy(), "norm").pvalue > 1e-4
        for scale in (2 / 3, 3 / 2):
            assert scipy.stats.kstest(half.flatten().numpy(), "norm", (0, scale)).pvalue < 1e-4
        assert abs(float(half.std()) - 1) < 5 / math.sqrt(2 * half.numel())


def test_an_owner_without_rows_has_none_beyond() -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert not len(loops.move_rows_within(torch.zeros(0, 4), none, torch.zeros(0, 4), 1.0, 1.0))
