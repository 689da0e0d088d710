"""The means inside of bias-reduced SGD, by every method: neighbours, noise, recovery, and what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.stats import kstest

from sparsedp import ConfigError, SparseDPError
from sparsedp.convex import BiasReducedSGD, ModuleGradients
from sparsedp.convex.boosting import plan_boost
from sparsedp.convex.inner_means import NoisyMean, RecoveredMean, recovery_of
from sparsedp.convex.ladder import Ladder, pure_epsilon, pure_multiplier
from sparsedp.convex.release import Releases
from sparsedp.convex.rows import RowBounds
from sparsedp.noise import RandomKey

COLUMNS = 300
# The delta that each method takes, and its sensitivity for L = 1, s = 2.
METHODS = {
    "projection": (1e-5, 1.0),
    "gaussian": (1e-5, 1.0),
    "l1_recovery": (1e-5, 1.5),
    "laplace": (0.0, math.sqrt(2)),
}


def solver(mean: str, delta: float | None = None, **change) -> BiasReducedSGD:
    settings = {"epsilon": 1.0, "bound": 1.0, "sparsity": 2.0, "steps": 20, "rows": 16, "columns": COLUMNS, "seed": 3}
    return BiasReducedSGD(mean=mean, delta=METHODS[mean][0] if delta is None else delta, **(settings | change))


def constant_gradients(values: np.ndarray):
    return lambda w, batch: csr_array(values[batch])


@pytest.mark.parametrize("mean", METHODS)
def test_a_row_moves_the_triplet_by_no_more_than_its_sensitivity(mean, monkeypatch) -> None:
    one = solver(mean)
    rung, p = 2, 1 if mean == "laplace" else 2
    values = np.zeros((16, COLUMNS))
    values[:, :2] = 1e6  # far beyond both bounds, and at both once clipped
    values[5] = 0
    values[5, 7:9] = -1e9
    without = values.copy()
    without[5] = 0.0  # as if the row were not there: a Poisson sample of the others is the same
    sums: list[np.ndarray] = []

    def release(self, values, sensitivity, noise):
        sums.append(values.values)
        sensitivities.append(sensitivity)
        return np.zeros(len(values.whole))

    monkeypatch.setattr(Releases, "gaussian", release)
    monkeypatch.setattr(Releases, "laplace", release)
    largest, single_moved = 0.0, 0.0
    for seed in range(40):
        moved = []
        for data in (values, without):
            sums.clear()
            sensitivities: list[float] = []
            samples = RandomKey.from_seed(seed).generator()
            one._estimate(constant_gradients(data), np.zeros(COLUMNS), rung, samples, Releases(RandomKey.from_seed(0)))
            moved.append([total.copy() for total in sums])
        apart = [float(np.linalg.norm(a - b, ord=p)) / s for a, b, s in zip(*moved, sensitivities)]
        assert max(apart) <= 1 and (apart[0] == 0 or (apart[1] == 0) != (apart[2] == 0))  # in exactly one half
        largest, single_moved = max(largest, apart[0]), max(single_moved, apart[3])
    assert sensitivities[0] == pytest.approx(METHODS[mean][1])
    assert sensitivities[3] == pytest.approx(1.0 if mean == "l1_recovery" else METHODS[mean][1])
    # The claim is no empty one; of measurements, whose norm is about 1, the clip at 1.5 is seldom reached.
    assert largest > (0.4 if mean == "l1_recovery" else 0.999)


def test_measurements_of_any_row_are_clipped() -> None:
    mean = RecoveredMean(
        RowBounds(1.0, 1.0), COLUMNS, 1.0, 2, RandomKey.from_seed(0)
    )  # two measurements: norms vary a lot
    norms = [np.linalg.norm(mean.total(csr_array(np.eye(1, COLUMNS, j))).values) for j in range(COLUMNS)]
    assert max(norms) <= 1.5 and max(norms) > 1.4999 and min(norms) < 0.5


def test_laplace_noise_of_an_estimate_has_its_law() -> None:
    one = solver("laplace", rows=64, columns=4000)
    size = 8
    zeros = lambda w, batch: csr_array((len(batch), 4000))  # noqa: E731
    samples = RandomKey.from_seed(0).generator()
    estimate = one._estimate(zeros, np.zeros(4000), 2, samples, Releases(RandomKey.from_os()))
    # The same sum of four independent Laplace numbers, drawn otherwise.
    p, scale = one.ladder.probabilities[2], one.noise_multiplier * math.sqrt(2)
    rng = np.random.default_rng(0)
    whole, first, second, alone = rng.laplace(size=(4, 400_000)) * scale
    wanted = (whole / size - (first + second) / size) / p + alone
    assert kstest(estimate, wanted).pvalue > 1e-4
    for factor in (2 / 3, 3 / 2):
        assert kstest(estimate / factor, wanted).pvalue < 1e-6


def test_pure_accounting() -> None:
    ladder = Ladder(1000)
    rungs = ladder.draw(RandomKey.from_seed(1).generator(), 100)
    b = pure_multiplier(ladder, rungs, 1.0)
    assert 0.99999 < pure_epsilon(ladder, rungs, b) <= 1.0
    by_hand = sum(
        math.log(1 + 2 ** (k + 1) / 1000 * (math.exp(2 / b) - 1)) + math.log(1 + (math.exp(1 / b) - 1) / 1000)
        for k in rungs.tolist()
    )
    assert pure_epsilon(ladder, rungs, b) == pytest.approx(by_hand)
    # Whatever the budget: huge ones do not overflow, and a run whose sample is everybody has no amplification.
    for epsilon in (1e-6, 50.0, 3000.0):
        assert pure_epsilon(ladder, rungs, pure_multiplier(ladder, rungs, epsilon)) <= epsilon
    everybody = pure_epsilon(Ladder(2), np.zeros(1, int), 1.0)
    assert everybody == pytest.approx(2 + math.log(1 + (math.e - 1) / 2))
    for mean in ("laplace", "projection"):
        result = solver(mean, delta=0.0).minimise(lambda w, batch: csr_array((len(batch), COLUMNS)))
        assert result.statement.delta == 0 and 0.99 < result.statement.epsilon <= 1.0
        assert "Laplace" in result.statement.noise and "pure" in result.statement.accountant


def test_each_size_has_its_mean() -> None:
    bounds, key = RowBounds(1.0, math.sqrt(2)), RandomKey.from_seed(0)
    alone = recovery_of(1, bounds, COLUMNS, 2.0, key)
    assert isinstance(alone, NoisyMean) and alone.projected  # algorithm 1
    some = recovery_of(8, bounds, COLUMNS, 2.0, key)
    assert isinstance(some, RecoveredMean)
    assert some.measurements == math.ceil(8 * math.sqrt(4 * math.log(150)) / 2)
    many = recovery_of(1 << 10, bounds, COLUMNS, 2.0, key)
    assert isinstance(many, NoisyMean) and not many.projected  # d < m ln^2 m
    means = solver("l1_recovery", rows=64)._means
    assert sorted(means) == [1, 2, 4, 8, 16, 32, 64]


def test_recovery_finds_a_sparse_mean() -> None:
    mean = RecoveredMean(RowBounds(1.0, math.sqrt(2)), COLUMNS, 0.01, 40, RandomKey.from_seed(0))
    rows = np.zeros((8, COLUMNS))
    rows[:, 4], rows[:, 9] = 0.6, -0.8
    found = mean.release(mean.total(csr_array(rows)), 8, Releases(RandomKey.from_seed(1)))
    assert np.linalg.norm(found - rows[0]) < 0.02
    # Noise that leaves nothing to be found: a vector of norm above 2 L is no estimate, and zero is taken.
    noisy = RecoveredMean(RowBounds(1.0, math.sqrt(2)), COLUMNS, 1e4, 40, RandomKey.from_seed(0))
    np.testing.assert_array_equal(noisy.release(noisy.total(csr_array(rows)), 8, Releases(RandomKey.from_seed(1))), 0.0)


@pytest.mark.parametrize("mean", METHODS)
def test_descends_by_every_method(mean) -> None:
    # Everybody's gradient is w - t: with a large budget, steps go towards t.
    wanted = np.zeros(8)
    wanted[:2] = 0.5
    gradients = lambda w, batch: csr_array(np.tile(w - wanted, (len(batch), 1)))  # noqa: E731
    one = solver(mean, epsilon=3000.0, rows=64, columns=8, steps=100, step_size=0.1)
    weights = one.minimise(gradients).weights
    assert np.linalg.norm(weights - wanted) < 0.75 * np.linalg.norm(wanted)


def test_refusals() -> None:
    for mean, delta in (("laplace", 1e-5), ("gaussian", 0.0), ("l1_recovery", 0.0)):
        with pytest.raises(ConfigError, match=f"mean='{mean}' does not go with"):
            solver(mean, delta=delta)
    with pytest.raises(ConfigError, match="needs a delta above 0"):
        solver("projection", delta=0.0, accounting="filter", steps=None)
    with pytest.raises(ConfigError, match="a delta above 0"):
        plan_boost(solver("laplace"))
    module = ModuleGradients(
        torch.nn.Linear(COLUMNS - 1, 1),
        torch.nn.functional.mse_loss,
        [torch.zeros(16, COLUMNS - 1), torch.zeros(16, 1)],
    )
    for mean, delta in (("l1_recovery", 1e-5), ("laplace", 0.0), ("projection", 0.0)):
        with pytest.raises(SparseDPError, match="only the l2 norms"):
            solver(mean, delta=delta).minimise(module)
