"""Frequencies of rows are released once, with the right noise and sensitivity, and are paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import FrequencyRelease
from sparsedp.capture import Capture, RowSpace
from sparsedp.frequencies import count_lookups
from sparsedp.models import DPFormer
from sparsedp.noise import RandomKey
from sparsedp.tables import table_specs

UNITS, ROWS, LENGTH = 40, 12, 5


class Tied(nn.Module):
    """Lookups, and a softmax that uses the same table whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, padding_idx=0)
        self.other = nn.Embedding(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).sum(1) + self.other(ids[:, 0] % 3)
        return hidden @ self.table.weight.T


def sequences() -> Tensor:
    return torch.randint(0, ROWS, (UNITS, LENGTH), generator=torch.Generator().manual_seed(0))


def private(
    release: FrequencyRelease | None, *, seed: int | None = 1, epsilon: float | None = None, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    module = Tied()
    engine = sparsedp.PrivacyEngine(seed=seed)
    loader: Any = DataLoader(TensorDataset(sequences(), torch.zeros(UNITS)), batch_size=8)
    common: dict[str, Any] = {
        "module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "data_loader": loader,
        "max_grad_norm": 1.0, "frequencies": release, **options,
    }  # fmt: skip
    if epsilon is None:
        made = engine.make_private(noise_multiplier=1.0, **common)
    else:
        made = engine.make_private_with_epsilon(target_epsilon=epsilon, target_delta=1e-5, epochs=2, **common)
    return engine, *made


def naive(clip: float, rows: Tensor, users: list[int] | None = None) -> Tensor:
    """The contributions to the rows of `table` and `other`, one unit at a time."""
    sums = torch.zeros(ROWS + 3, dtype=torch.float64)
    owners = list(range(len(rows))) if users is None else users
    for user in sorted(set(owners)):
        mine = [row for row, owner in zip(rows, owners) if owner == user]
        touched = {int(i) for row in mine for i in row if i > 0} | {ROWS + int(row[0]) % 3 for row in mine}
        for row in touched:
            sums[row] += min(1.0, clip / len(touched) ** 0.5)
    return sums


def counted(engine: sparsedp.PrivacyEngine, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What is released, without its noise, as the sum over units."""
    monkeypatch.setattr("sparsedp.frequencies._noise_multiplier", lambda epsilon, delta: 0.0)
    monkeypatch.setattr(FrequencyRelease, "event", property(lambda self: dp_accounting.GaussianDpEvent(1.0)))
    released = engine.release_frequencies()
    return torch.cat([released["table.weight"], released["other.weight"]]) * engine.plan.dataset_size


@pytest.mark.parametrize("clip", [0.7, 1.0, 10.0])
def test_counts_are_of_lookups_and_clipped(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = private(FrequencyRelease(clip=clip))[0]
    torch.testing.assert_close(counted(engine, monkeypatch), naive(clip, sequences()))


def test_users_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    users = [u % 9 for u in range(UNITS)]
    engine = private(FrequencyRelease(clip=2.0), unit="user", users=users)[0]
    torch.testing.assert_close(counted(engine, monkeypatch), naive(2.0, sequences(), users))


@pytest.mark.parametrize("left_out", range(0, UNITS, 7))
def test_sensitivity(left_out: int) -> None:
    """Without one unit the counts differ by at most the clip, in l2."""

    def counts(rows: Tensor) -> Tensor:
        module = Tied()
        capture = Capture(module, dict(module.named_parameters()))
        capture.attach()
        seen = [capture.capture_forward_only(lambda: module(rows))]
        space = RowSpace.of(dict(module.named_parameters()))
        return torch.cat(list(count_lookups(iter(seen), space, 0.9).values()))

    rows = sequences()
    kept = torch.arange(UNITS) != left_out
    assert torch.linalg.vector_norm(counts(rows) - counts(rows[kept])) <= 0.9 + 1e-12


def test_noise_has_the_promised_deviation() -> None:
    release = FrequencyRelease(epsilon=0.7, delta=1e-5, clip=3.0)
    counts = {"t": torch.zeros(40_000, dtype=torch.float64)}
    drawn = release.draw(counts, 10, table_specs({"t": torch.empty(40_000, 1)}, ["t"]), RandomKey.from_seed(0))["t"]
    assert float(drawn.std()) == pytest.approx(release.noise_multiplier * 3.0 / 10, rel=0.02)
    ledger = sparsedp.accounting.Ledger()
    ledger.record(release.event, setup=True)
    assert sparsedp.accounting.epsilon_of(ledger, 1e-5) == pytest.approx(0.7, rel=1e-3)


def test_a_target_includes_the_release() -> None:
    engine, _, _, _ = private(FrequencyRelease(epsilon=1.0), epsilon=2.0)
    alone = private(None, epsilon=2.0)[0]
    assert engine.plan.noise_multiplier > alone.plan.noise_multiplier
    assert engine.get_epsilon(1e-5) == 0
    first = engine.release_frequencies()
    cost = engine.get_epsilon(1e-5)
    assert 0 < cost < 2.0 and "frequencies" in str(engine.statement())
    again = engine.release_frequencies()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert engine.get_epsilon(1e-5) == cost and engine.plan.epsilon(10, 1e-5) <= 2.0
    assert sparsedp.PrivacyPlan.from_dict(engine.plan.to_dict()) == engine.plan


def test_a_checkpoint_holds_the_release(tmp_path: Path) -> None:
    release = FrequencyRelease()
    engine = private(release, seed=None, epsilon=2.0)[0]
    engine.save_checkpoint(tmp_path / "before.pt")
    first = engine.release_frequencies()
    engine.save_checkpoint(tmp_path / "after.pt")
    other = private(release, seed=None, epsilon=2.0)[0]
    other.load_checkpoint(tmp_path / "after.pt")
    again = other.release_frequencies()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert other.ledger == engine.ledger
    engine.load_checkpoint(tmp_path / "before.pt")
    with pytest.raises(sparsedp.SparseDPError, match="went back"):
        engine.release_frequencies()


def test_refusals() -> None:
    with pytest.raises(sparsedp.SparseDPError, match="No release is planned"):
        private(None)[0].release_frequencies()
    with pytest.raises(sparsedp.UnsupportedError, match="counts the data itself"):
        private(FrequencyRelease(), mechanism=sparsedp.FEST(k=3))
    with pytest.raises(sparsedp.UnsupportedError, match="stream"):
        private(FrequencyRelease(), stream=sparsedp.Stream(torch.arange(UNITS) // 20, composition="parallel"))
    for wrong in ({"epsilon": 0.0}, {"delta": 1.0}, {"clip": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FrequencyRelease(**wrong)


def test_dpformer_estimates_its_errors() -> None:
    torch.manual_seed(0)
    model = DPFormer(ROWS - 1, LENGTH, dim=8, blocks=1, reattention=True)
    engine = sparsedp.PrivacyEngine(seed=1)
    ids = sequences()
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=2.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(ids, torch.zeros(UNITS)), batch_size=8),
        frequencies=FrequencyRelease(epsilon=50.0, delta=1e-3, clip=3.0),
    )  # fmt: skip
    model.estimate_errors(engine)
    share = torch.stack([(ids == item).any(1).double().mean() for item in range(ROWS)])
    expected = 2.0 / (8 * share[1:]).clamp(1, 8)
    assert (model.item_error[1:] / expected - 1).abs().median() < 0.2
    assert engine.ledger.setups(None) == 1
