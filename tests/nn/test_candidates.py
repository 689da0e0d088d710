"""sparsedp.nn's sampled candidates: the law of the draw, exact private gradients, and row-sparse ones."""

from __future__ import annotations

import math
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import sparsedp
from neighbours import largest_influence
from sparsedp import FEST, AdaFEST, SparseDPError, SparseDPWarning
from sparsedp.capture import RowSparse
from sparsedp.clipping import Clipping
from sparsedp.nn import CandidateSampler, FallbackEmbedding, candidate_loss, candidate_scores
from support import Apply, assert_exact, capture_uses, loader_of, make_private


class Next(nn.Module):
    """The next item of a history, scored against candidates by the table that embeds the history."""

    def __init__(self, rows: int, dim: int = 5, table: nn.Embedding | None = None) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, dim) if table is None else table
        self.out = nn.Linear(dim, dim)

    def forward(self, history: Tensor, candidates: Tensor, log_expected: Tensor | None = None) -> Tensor:
        hidden = self.out(self.items(history).tanh()).mean(1)
        return candidate_scores(hidden, self.items, candidates, log_expected)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- the draw


@pytest.mark.parametrize("shares", [None, [0.5, 0.0, 0.2, 0.3]], ids=["uniform", "given"])
def test_negatives_have_the_given_law_and_are_independent(shares: list[float] | None) -> None:
    probabilities = None if shares is None else 7 * torch.tensor(shares)
    sample = CandidateSampler(4, 2, probabilities, generator=generator())
    target = torch.randint(4, (20_000,), generator=generator(1))
    found = sample(target)
    assert found.shape == (20_000, 3) and torch.equal(found[:, 0], target)
    wanted = np.array(shares or [0.25] * 4)
    one, other = found[:, 1].numpy(), found[:, 2].numpy()
    table = np.histogram2d(one, other, bins=np.arange(5))[0]
    expected = 20_000 * np.outer(wanted, wanted)
    assert table[expected == 0].sum() == 0
    assert stats.chisquare(table[expected > 0], expected[expected > 0]).pvalue > 1e-4
    with_target = np.histogram2d(target.numpy(), one, bins=np.arange(5))[0]
    assert stats.chi2_contingency(with_target[:, wanted > 0]).pvalue > 1e-4
    # From one unit to the next: independent as well.
    follow = np.histogram2d(one[:-1], one[1:], bins=np.arange(5))[0]
    assert stats.chi2_contingency(follow[wanted > 0][:, wanted > 0]).pvalue > 1e-4


def test_all_rows_of_large_tables_can_be_drawn() -> None:
    """float32 has 2^24 numbers in [0, 1): with 2^26 rows it would draw every fourth only."""
    found = CandidateSampler(2**26, 1000, generator=generator())(torch.zeros(50, dtype=torch.long))[:, 1:]
    assert stats.chisquare(np.bincount(found.flatten().numpy() % 4, minlength=4)).pvalue > 1e-4
    assert stats.kstest(found.flatten().numpy() / 2**26, "uniform").pvalue > 1e-4


def test_positions_have_negatives_of_their_own_or_share_them() -> None:
    target = torch.randint(1000, (5, 7))
    own = CandidateSampler(1000, 6)(target)
    assert own.shape == (5, 7, 7) and torch.equal(own[..., 0], target)
    assert not torch.equal(own[:, 0, 1:], own[:, 1, 1:])
    shared = CandidateSampler(1000, 6, shared=True)(target)
    assert shared.shape == (5, 7, 7) and torch.equal(shared[..., 0], target)
    assert (shared[:, :1, 1:] == shared[..., 1:]).all() and not torch.equal(shared[0, 0], shared[1, 0])
    assert CandidateSampler(1000, 6)(target[:0]).shape == (0, 7, 7)


def test_torch_manual_seed_has_no_influence() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(CandidateSampler(10**6, 5)(torch.zeros(3, dtype=torch.long)))
    assert not torch.equal(*found)


def test_what_cannot_be_drawn_is_refused() -> None:
    for rows, count, probabilities in (
        (0, 1, None), (3, 0, None), (3, 1, torch.ones(4)), (3, 1, torch.tensor([1.0, -1, 1])), (3, 1, torch.zeros(3)),
        (3, 1, torch.tensor([1.0, math.nan, 1])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"at least 1|probabilities must be"):
            CandidateSampler(rows, count, probabilities)
    sample = CandidateSampler(3, 1, torch.tensor([0.0, 1, 1]))
    with pytest.raises(ValueError, match="probability 0"):
        sample.log_expected(torch.tensor([[0, 1]]))


def _draw(sample: CandidateSampler, answers: Any) -> None:
    try:
        sample(torch.zeros(2, dtype=torch.long))
        answers.put("drawn")
    except SparseDPError as error:
        answers.put(str(error))


def test_a_forked_process_does_not_draw_the_same_negatives() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_draw, args=(CandidateSampler(10, 2), answers))
    process.start()
    assert "another process" in answers.get(timeout=30)
    process.join()


# ---------------------------------------------------------------------- scores and loss


def test_scores_and_loss_by_hand() -> None:
    table, hidden = nn.Embedding(6, 3), torch.randn(2, 3)
    candidates = torch.tensor([[4, 0, 4, 1], [2, 3, 3, 5]])
    scores = candidate_scores(hidden, table, candidates)
    wanted = torch.einsum("bd,bcd->bc", hidden, table.weight[candidates])
    wanted[0, 2] = -math.inf  # an accidental hit
    torch.testing.assert_close(scores, wanted)
    loss = candidate_loss(scores)
    torch.testing.assert_close(loss, F.cross_entropy(wanted, torch.zeros(2, dtype=torch.long)))
    loss.backward()
    assert torch.isfinite(table.weight.grad).all()  # type: ignore[arg-type]
    only_hits = candidate_loss(candidate_scores(hidden, table, torch.tensor([[1, 1], [2, 2]])))
    assert only_hits.item() == 0


def test_log_expected_makes_the_loss_that_of_the_full_softmax() -> None:
    """With log Q, the sum over negatives estimates the sum over all rows; without, popular rows count too much."""
    torch.manual_seed(0)
    table, hidden = nn.Embedding(8, 4), torch.randn(1, 4)
    probabilities = torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1])
    sample = CandidateSampler(8, 20_000, probabilities, generator=generator())
    candidates = sample(torch.tensor([7]))
    expected = sample.log_expected(candidates)
    torch.testing.assert_close(expected.exp()[0, 0], torch.tensor(20_000 / 19))
    corrected = candidate_scores(hidden, table, candidates, expected)[0, 1:]
    others = (hidden @ table.weight.T)[0, :7]
    torch.testing.assert_close(corrected.logsumexp(0), others.logsumexp(0), rtol=0, atol=0.05)
    plain = candidate_scores(hidden, table, candidates)[0, 1:] - math.log(20_000 / 8)
    assert abs((plain.logsumexp(0) - others.logsumexp(0)).item()) > 0.1
    uniform = CandidateSampler(8, 4)
    torch.testing.assert_close(uniform.log_expected(candidates), torch.full(candidates.shape, math.log(0.5)))


def test_a_units_loss_is_the_mean_over_its_own_positions() -> None:
    scores = torch.randn(3, 4, 5)
    valid = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    each = F.cross_entropy(scores.flatten(0, 1), torch.zeros(12, dtype=torch.long), reduction="none").view(3, 4)
    torch.testing.assert_close(candidate_loss(scores), each.mean())
    torch.testing.assert_close(candidate_loss(scores, valid), (each[0].mean() + each[1, 0]) / 3)
    torch.testing.assert_close(candidate_loss(scores[:, 0], valid[:, 0]), each[:2, 0].sum() / 3)


# ---------------------------------------------------------------------- the guarantee


@pytest.mark.parametrize("corrected", [False, True])
def test_norms_and_sums_are_exact(corrected: bool) -> None:
    """Against one unit at a time in float64; the table is embedding and output at once, with ids that repeat."""
    torch.manual_seed(0)
    sample = CandidateSampler(9, 6, torch.arange(1, 10).float(), generator=generator())
    candidates = sample(torch.randint(9, (7,)))
    inputs = [torch.randint(9, (7, 4)), candidates]
    if corrected:
        inputs.append(sample.log_expected(candidates))
    found = assert_exact(Next(9), *inputs, loss=lambda scores: len(scores) * candidate_loss(scores))
    total = found.uses["items.weight"].weighted_sum(torch.ones(7, dtype=torch.float64), torch.Size((9, 5)))
    assert isinstance(total, RowSparse)


def test_positions_are_exact() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, i, c: candidate_scores(m.e(i).tanh(), m.e, c), e=nn.Embedding(9, 5))
    for shared in (False, True):
        candidates = CandidateSampler(9, 3, shared=shared, generator=generator())(torch.randint(9, (6, 4)))
        loss = lambda scores: len(scores) * candidate_loss(scores)  # noqa: E731
        assert_exact(model, torch.randint(9, (6, 4)), candidates, loss=loss)


def test_neighbour_replay() -> None:
    torch.manual_seed(0)
    inputs = [torch.randint(9, (6, 4)), CandidateSampler(9, 3, generator=generator())(torch.randint(9, (6,)))]
    for size in (1.0, 1e3):
        loss = lambda scores, size=size: size * len(scores) * candidate_loss(scores)  # noqa: E731
        worst = largest_influence(Next(9), inputs, Clipping(0.5), loss)
        assert worst <= 0.5 * (1 + 1e-4)
    assert worst > 0.45


def test_check_passes() -> None:
    torch.manual_seed(0)
    target = torch.randint(30, (8,))
    batch = (torch.randint(30, (8, 4)), CandidateSampler(30, 5)(target), target)
    report = sparsedp.check(Next(30), lambda scores, _: candidate_loss(scores), batch)
    assert report.largest_difference < 1e-9


# ---------------------------------------------------------------------- with mechanisms


def history(count: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Popular items: rank r with probability proportional to 1 / (r + 1)."""
    weights = 1 / torch.arange(1, rows + 1)
    drawn = torch.multinomial(weights, count * 4, replacement=True, generator=generator(seed)).view(count, 4)
    return drawn[:, :3], drawn[:, 3]


def train(module: nn.Module, optimizer: Any, loader: Any, sample: CandidateSampler) -> list[float]:
    losses = []
    for items, target in loader:
        optimizer.zero_grad()
        loss = candidate_loss(module(items, sample(target)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adafest_selects_few_rows_of_a_tied_table() -> None:
    """A step's selection and gradient follow the rows that units look up, not the size of the table."""
    rows = 20_000
    sample, module = CandidateSampler(rows, 8), Next(rows)
    engine, module, optimizer, loader = make_private(
        module, loader_of(*history(1024, rows), batch_size=256), mechanism=AdaFEST(threshold=12.0, noise_ratio=2.0),
        optimizer=torch.optim.Adagrad(module.parameters(), lr=0.1),
    )  # fmt: skip
    before = module.items.weight.detach().clone()
    seen: list[Tensor] = []
    inner = optimizer.inner.step

    def watched() -> None:
        grad = module.items.weight.grad
        assert grad.is_sparse
        seen.append(grad.coalesce().indices()[0])
        inner()

    optimizer.inner.step = watched
    train(module, optimizer, loader, sample)
    assert len(seen) == 4
    for selected in seen:
        assert 1 <= len(selected) < rows / 100
        assert 0 in selected.tolist()  # the most popular item
    changed = (module.items.weight != before).any(1).nonzero().flatten()
    assert changed.tolist() == torch.unique(torch.cat(seen)).tolist()
    table = optimizer.last_step.tables["items.weight"]
    assert table.rows_touched <= 350 * 12 and table.rows_selected == len(seen[-1])


def test_fest_counts_the_lookups_that_it_is_told_of() -> None:
    rows = 200
    sample = CandidateSampler(rows, 4)
    items, target = history(500, rows)
    mechanism = FEST(k=5, epsilon=50.0, inputs=lambda batch: (batch[0], sample(batch[1])))
    engine, module, optimizer, loader = make_private(
        Next(rows), loader_of(items, target, batch_size=100), mechanism=mechanism
    )
    train(module, optimizer, loader, sample)
    assert {0, 1, 2} <= set(optimizer.prepared["items.weight"].tolist())


def test_a_fallback_table_maps_candidates_too() -> None:
    table = FallbackEmbedding(10, 5)
    table.keep([1, 2])
    module = Next(10, table=table)
    found = capture_uses(
        module, [torch.tensor([[1, 5]]), torch.tensor([[7, 2, 8]])], lambda scores: candidate_loss(scores)
    )
    assert found.uses["items.weight"].touched_rows(11).tolist() == [1, 2, 10]


@pytest.mark.slow
def test_training_learns() -> None:
    """Pairs of items that belong together are found by private training, far above chance."""
    rows = 40
    first = torch.randint(rows, (8000,), generator=generator())
    torch.manual_seed(0)
    module = Next(rows, dim=16)
    sample = CandidateSampler(rows, 10)
    engine, module, optimizer, loader = make_private(
        module, loader_of(first[:, None], (first + 1) % rows, batch_size=800), noise_multiplier=0.6,
        optimizer=torch.optim.Adagrad(module.parameters(), lr=0.3), mechanism=AdaFEST(threshold=4.0),
    )  # fmt: skip
    for _ in range(15):
        train(module, optimizer, loader, sample)
    with torch.no_grad():
        every = torch.arange(rows)
        scores = module(every[:, None], every.expand(rows, rows))
        scores[:, 1:][every[1:].expand(rows, -1) == 0] = -math.inf
        right = (scores.argmax(1) == (every + 1) % rows).float().mean()
    assert right > 0.5


# ---------------------------------------------------------------------- the warning


def softmax_run(mechanism: Any) -> Any:
    module = Apply(lambda m, i: (m.e(i).sin() @ m.e.weight.T).sum(1), e=nn.Embedding(10, 4))
    return make_private(module, loader_of(torch.randint(10, (60,)), batch_size=20), mechanism=mechanism)


def one_epoch(run: Any) -> None:
    _, module, optimizer, loader = run
    for (ids,) in loader:
        optimizer.zero_grad()
        module(ids).mean().backward()
        optimizer.step()


def test_adafest_warns_once_of_a_table_that_is_used_whole() -> None:
    run = softmax_run(AdaFEST(threshold=-100.0))
    with pytest.warns(SparseDPWarning, match=r"Table 'e\.weight' is used whole.*candidate_scores") as found:
        one_epoch(run)
        one_epoch(run)
    assert len(found) == 1
    # FEST's selection does not hang on what a batch touches: no warning.
    one_epoch(softmax_run(FEST(k=5, epsilon=1.0, inputs=lambda batch: batch)))
