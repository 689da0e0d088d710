"""The private mean: what one row can do, the noise's law, and what is said about both."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from scipy import stats

from sparsedp import ConfigError, DataError, SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.accounting import epsilon_of
from sparsedp.convex import L1Ball, PrivateMean, mean, private_mean, project
from sparsedp.convex.choice import Sizes, choose, choose_measuring, error_bounds
from sparsedp.convex.recovery import measurements_for
from sparsedp.convex.release import gaussian_multiplier
from sparsedp.grid import grid_of

# Each method with a delta that it takes, and the l1 recovery with so few measurements that it recovers.
METHODS: dict[str, dict[str, Any]] = {
    "gaussian": {"method": "gaussian", "delta": 1e-6},
    "laplace": {"method": "laplace", "delta": 0},
    "projection": {"method": "projection", "delta": 1e-6},
    "pure projection": {"method": "projection", "delta": 0},
    "l1_recovery": {"method": "l1_recovery", "delta": 1e-6, "measurements": 6},
    "auto": {"method": "auto", "delta": 1e-6},
}
NEIGHBOURS = ("add_remove", "replace_one")
methods = pytest.mark.parametrize("method", METHODS)
relations = pytest.mark.parametrize("neighbours", NEIGHBOURS)


def sparse_rows(n: int = 60, d: int = 40, s: int = 4) -> sp.csr_array:
    """Rows of norm 1 with s non-zeros each."""
    rng = np.random.default_rng(0)
    columns = np.concatenate([rng.choice(d, s, replace=False) for _ in range(n)])
    values = rng.choice([-1.0, 1.0], n * s) / math.sqrt(s)
    return sp.csr_array((values, columns, np.arange(0, n * s + 1, s)), shape=(n, d))


def ask(X: Any, method: str = "gaussian", **changes: Any) -> PrivateMean:
    return private_mean(X, **{"epsilon": 1.0, "bound": 1.0, "sparsity": 4, **METHODS[method], **changes})


def adversarial(d: int) -> list[np.ndarray]:
    """Rows that try to move a sum by more than their share."""
    ones = np.ones(d)
    return [
        ones * 1e200,
        -ones,
        np.eye(d)[0] * 1e-3,
        np.eye(d)[d - 1] * 1e308,
        np.where(np.arange(d) % 2, 1.0, -1.0) / math.sqrt(d),
        np.concatenate([np.full(4, 0.5), np.zeros(d - 4)]),
        np.concatenate([np.full(5, 0.5), np.zeros(d - 5)]),
        np.zeros(d),
        np.full(d, 5e-324),
    ]


# ---------------------------------------------------------------------- what one row can do


@methods
@relations
def test_one_row_moves_what_gets_noise_by_its_bound_at_most(
    method: str, neighbours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbour replay of what is given to the noise, with the sensitivity that is claimed to it: for every adversarial row."""
    seen: list[tuple[str, np.ndarray, float]] = []
    for name in ("gaussian", "laplace"):
        otherwise = getattr(mean.Releases, name)

        def recorded(self: Any, values: Any, sensitivity: float, by: float, name=name, otherwise=otherwise) -> Any:
            seen.append((name, values.values, sensitivity))
            return otherwise(self, values, sensitivity, by)

        monkeypatch.setattr(mean.Releases, name, recorded)
    base = sparse_rows().toarray()

    def given_to_noise(rows: np.ndarray) -> list[tuple[str, np.ndarray, float]]:
        seen.clear()
        clip = {"measurement_clip": 0.5} if method == "l1_recovery" else {}
        ask(sp.csr_array(rows), method, neighbours=neighbours, seed=3, **clip)
        return list(seen)

    moves = []
    for row in adversarial(base.shape[1]):
        if neighbours == "replace_one":
            pairs = [(base, np.vstack([base[:-1], row])), (np.vstack([base, row]), np.vstack([base, -row]))]
        else:
            pairs = [(base, np.vstack([base, row])), (np.vstack([row, base]), base)]
        for one, other in pairs:
            first, second = given_to_noise(one), given_to_noise(other)
            assert len(first) == len(second) == (2 if neighbours == "add_remove" else 1)
            for (name, before, sensitivity), (_, after, same) in zip(first, second):
                assert sensitivity == same and before.shape == after.shape
                moved = np.linalg.norm(after - before) if name == "gaussian" else np.abs(after - before).sum()
                assert moved <= sensitivity * (1 + 1e-12)
                moves.append(moved / sensitivity)
    assert max(moves) > 0.9  # the sensitivity is not claimed too large either


@methods
@relations
def test_neighbours_replayed_with_the_same_noise(method: str, neighbours: str) -> None:
    """From end to end: results of neighbours differ by what one row may do, over n. (Projections do not stretch distances.)"""
    X = sparse_rows(300).toarray()
    other = X.copy()
    other[7] = -1e9 * other[7]
    one, two = (ask(rows, method, neighbours=neighbours, seed=5, rows=300) for rows in (X, other))
    if method == "l1_recovery":
        assert not np.array_equal(one.mean, two.mean)  # not continuous; what gets noise is tested above
        return
    # Replacing is removing and adding.
    bound = 2.0 / 300
    std = {"gaussian": 1, "laplace": 2}[one.noise] * 60 / 300
    assert 0 < np.linalg.norm(one.mean - two.mean) <= bound + math.sqrt(40) * grid_of(std)


def test_the_users_data_are_not_changed() -> None:
    X = sparse_rows() * 7.0
    before = X.copy()
    ask(X)
    assert (before != X).nnz == 0


# ---------------------------------------------------------------------- noise


def residuals(method: str, neighbours: str, **changes: Any) -> tuple[np.ndarray, PrivateMean]:
    """Noise on the sum, in units of the rows' bound."""
    X = sp.csr_array(np.tile(np.eye(1500)[:4] * 0.5, (25, 1)))
    changes = {"rows": 100, "sparsity": 1500, "bound": 2.0, "neighbours": neighbours, **changes}
    noisy = ask(X, method, **changes)
    plain = ask(X, method, **changes, seed=1, noise_multiplier=0)
    return (noisy.mean - plain.mean) * 100 / 2.0, noisy


def accepts_only_its_scale(sample: np.ndarray, law: Any, scale: float) -> bool:
    accepted = [stats.kstest(sample, law(scale=scale * by).cdf).pvalue > 1e-3 for by in (1, 2 / 3, 1.5)]
    return accepted == [True, False, False]


@relations
@pytest.mark.parametrize("method", ["gaussian", "projection", "auto"])
def test_gaussian_noise_has_the_calibrated_scale(method: str, neighbours: str) -> None:
    """With an l1 ball so large that the projection changes nothing."""
    noise, answer = residuals(method, neighbours, epsilon=200.0)
    assert answer.noise == "gaussian"
    scale = gaussian_multiplier(200.0, 1e-6) * (2 if neighbours == "replace_one" else 1)
    assert accepts_only_its_scale(noise, stats.norm, scale)


@relations
@pytest.mark.parametrize("method", ["laplace", "pure projection"])
def test_laplace_noise_has_the_calibrated_scale(method: str, neighbours: str) -> None:
    noise, answer = residuals(method, neighbours, epsilon=1000.0)
    assert answer.noise == "laplace"
    scale = math.sqrt(1500) / 1000 * (2 if neighbours == "replace_one" else 1)
    assert accepts_only_its_scale(noise, stats.laplace, scale)


@relations
@pytest.mark.parametrize("calibration", ["analytic", "paper"])
def test_measurements_have_noise_of_the_calibrated_scale(
    neighbours: str, calibration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[np.ndarray] = []
    solve = mean.least_l1

    def recorded(matrix: Any, target: np.ndarray, **how: Any) -> Any:
        targets.append(target)
        return solve(matrix, target * 0, **how)

    monkeypatch.setattr(mean, "least_l1", recorded)
    X = sp.csr_array((50, 30_000))
    asked = {"measurements": 600, "calibration": calibration, "neighbours": neighbours, "rows": 50}
    ask(X, "l1_recovery", measurement_clip=None if calibration == "paper" else 1.5, **asked)
    multiplier = gaussian_multiplier(1.0, 1e-6, calibration, halved=True)
    moved = (2 if neighbours == "replace_one" else 1) * 1.5
    assert accepts_only_its_scale(targets[0] * 50, stats.norm, multiplier * moved)
    if calibration == "paper" and neighbours == "replace_one":  # sigma^2 = 18 L^2 ln(2.5 / delta) / (n epsilon)^2
        assert (multiplier * moved) ** 2 == pytest.approx(18 * math.log(2.5 / 1e-6))


def test_printed_constants() -> None:
    """sigma^2 = 8 L^2 ln(1.25 / delta) / (n epsilon)^2, scale 2 L sqrt(s) / (n epsilon)."""
    noise, answer = residuals("gaussian", "replace_one", epsilon=0.5, calibration="paper")
    scale = math.sqrt(8 * math.log(1.25 / 1e-6)) / 0.5
    assert accepts_only_its_scale(noise, stats.norm, scale)
    assert answer.statement.epsilon < 0.5 < 2 * answer.statement.epsilon  # by the ledger it costs less
    with pytest.raises(ConfigError, match="epsilon up to 1"):
        ask(sparse_rows(), calibration="paper", epsilon=1.5, neighbours="replace_one")
    with pytest.raises(ConfigError, match="public number of rows"):
        ask(sparse_rows(), calibration="paper")
    ask(sparse_rows(), calibration="paper", rows=60)


def test_noise_is_new_in_every_call_and_the_global_seeds_do_not_matter() -> None:
    X = sparse_rows()
    seen = []
    for _ in range(2):
        np.random.seed(0)
        seen.append(ask(X).mean)
    assert not np.array_equal(*seen)
    assert np.array_equal(ask(X, seed=4).mean, ask(X, seed=4).mean)
    assert not np.array_equal(ask(X, seed=4).mean, ask(X, seed=5).mean)


def test_what_is_released_lies_on_a_grid() -> None:
    answer = ask(sparse_rows(), neighbours="replace_one")
    multiples = answer.mean * 60 / grid_of(2 * gaussian_multiplier(1.0, 1e-6))
    assert np.abs(multiples - np.rint(multiples)).max() < 1e-6


# ---------------------------------------------------------------------- results


@methods
@relations
def test_without_noise_it_is_the_mean(method: str, neighbours: str) -> None:
    X = np.tile(np.eye(40)[:3], (20, 1))
    changes = {}
    if method == "l1_recovery":  # finds a mean of one non-zero
        X, changes = np.tile(np.eye(40)[:1], (60, 1)), {"measurements": 8}
    answer = ask(X, method, neighbours=neighbours, seed=1, noise_multiplier=0, **changes)
    assert np.allclose(answer.mean, X.mean(axis=0), atol=1e-6) and answer.rows == 60
    assert answer.statement.epsilon == math.inf and not answer.statement.holds
    assert "NO differential privacy" in str(answer.statement) and "no noise" in answer.statement.guarantee
    assert json.loads(answer.statement.to_json())["epsilon"] == "infinity"


@methods
@relations
def test_statements(method: str, neighbours: str) -> None:
    answer = ask(sparse_rows(), method, neighbours=neighbours)
    statement = answer.statement
    assert 0.999 < statement.epsilon <= 1 and statement.target_epsilon == 1
    assert statement.delta == (0 if answer.noise == "laplace" else 1e-6)
    if answer.noise == "gaussian":
        assert epsilon_of(answer.ledger, 1e-6) == statement.epsilon
    assert "clipped" not in repr(answer).replace("How many rows were clipped", "")
    assert ("replacing" in statement.neighbouring) == (neighbours == "replace_one")
    text = str(statement)
    assert "Seeded" not in text and "clipped" in text
    assert ("number of rows, 60, is public" in text) == (neighbours == "replace_one")
    assert ("the number of rows, each with noise" in text) == (neighbours == "add_remove")
    seeded = ask(sparse_rows(), method, neighbours=neighbours, seed=1).statement
    assert "Seeded, do not release" in str(seeded)
    assert json.loads(statement.to_json())["mechanism"] == statement.mechanism == answer.method


def test_the_number_of_rows_stays_private_unless_it_is_given() -> None:
    X = sparse_rows(500)
    counts = [ask(X).rows for _ in range(40)]
    assert len(set(counts)) > 10 and 480 < np.mean(counts) < 520
    assert ask(X, rows=400).rows == 400
    assert ask(X, neighbours="replace_one").rows == 500
    assert "400" not in str(ask(X).statement)
    with pytest.raises(DataError, match="500 rows"):
        ask(X, neighbours="replace_one", rows=400)


def test_a_larger_part_of_the_noise_goes_to_the_count() -> None:
    """One Gaussian for both: what each costs adds up to what was asked for."""
    answer = ask(sparse_rows(), epsilon=0.7)
    assert answer.statement.accountant.startswith("2 releases")
    assert 0.6999 < answer.statement.epsilon <= 0.7


def test_clipped_rows_are_counted() -> None:
    X = sparse_rows().toarray()
    X[:3] *= 2
    X[5] = 1 / math.sqrt(40)  # norm 1, and an l1 norm of sqrt(40)
    assert ask(X).clipped_rows == 4
    assert ask(X, sparsity=40).clipped_rows == 3
    assert ask(X, bound=10.0).clipped_rows == 0
    clipped = ask(X, "l1_recovery", measurement_clip=0.1).recovery.clipped_measurements
    assert clipped == 60


def test_projection_beats_noise_alone_where_noise_is_large() -> None:
    X = sparse_rows(n=200, d=5000, s=2)
    true = np.asarray(X.mean(axis=0)).ravel()
    errors = {
        method: np.linalg.norm(ask(X, method, sparsity=2, rows=200).mean - true)
        for method in ("gaussian", "projection")
    }
    assert errors["projection"] < errors["gaussian"] / 2
    assert np.abs(ask(X, "projection", sparsity=2).mean).sum() <= math.sqrt(2) * (1 + 1e-9)


def test_a_planted_sparse_mean_is_recovered() -> None:
    """40,000 rows around one sparse vector, and measurements with noise."""
    planted = np.zeros(6000)
    planted[[5, 77, 1234]] = [0.5, -0.4, 0.6]
    X = sp.csr_array(np.broadcast_to(planted, (1, 6000))[np.zeros(1, int)])
    rows = (sp.vstack([X] * 2000, format="csr") for _ in range(20))
    answer = ask(rows, "l1_recovery", sparsity=3, measurements=150, rows=40_000)
    assert answer.recovery is not None and answer.recovery.finished and not answer.recovery.cut
    assert np.linalg.norm(answer.mean - planted) < 0.05
    assert set(np.argsort(-np.abs(answer.mean))[:3]) == {5, 77, 1234}
    assert answer.error_bound == pytest.approx(min(3.0, answer.bounds.get("l1_recovery", 3.0)))
    assert np.linalg.norm(answer.mean - planted) < answer.error_bound


def test_a_recovery_longer_than_twice_the_bound_is_cut() -> None:
    answer = ask(sparse_rows(n=2), "l1_recovery", epsilon=1e-3, rows=2)
    assert answer.recovery is not None and answer.recovery.cut and not answer.mean.any()


def test_recovery_is_noise_alone_where_there_is_nothing_to_recover() -> None:
    for changes in ({"measurements": 40}, {"measurements": 100}, {"measurements": None, "epsilon": 5.0}):
        answer = ask(sparse_rows(), "l1_recovery", **changes)
        assert answer.recovery is None and answer.method == "l1_recovery" and "as good as recovery" in answer.reason
    assert ask(sparse_rows(), "l1_recovery", measurements=5).recovery is not None


def test_an_unfinished_solve_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = mean.least_l1
    monkeypatch.setattr(mean, "least_l1", lambda *of, **how: solve(*of, **how, rounds=1))
    with pytest.warns(SparseDPWarning, match="costs accuracy, not privacy"):
        answer = ask(sparse_rows(d=4000), "l1_recovery", measurements=40, solver="columns")
    assert answer.recovery is not None and not answer.recovery.finished and answer.statement.epsilon <= 1


# ---------------------------------------------------------------------- auto


def sizes(rows: int = 1000, columns: int = 100, sparsity: float = 4, delta: float = 1e-6) -> Sizes:
    return Sizes(rows, columns, 1.0, sparsity, 1.0, delta)


def test_auto_takes_the_smallest_bound_and_says_why() -> None:
    answer = ask(sparse_rows(n=200, d=2000, s=2), "auto", sparsity=2, rows=200)
    assert answer.error_bound == min(answer.bounds.values())
    assert answer.method == "projection" and "smaller bound" in answer.reason
    for name, bound in answer.bounds.items():
        assert f"{name} {bound:.3g}" in answer.reason
    # Laplace noise on the mean of one-hot rows, when delta is tiny.
    assert ask(np.eye(3), "auto", delta=1e-300, sparsity=1, rows=3).noise == "laplace"
    assert ask(np.eye(3), "auto", delta=0, sparsity=1).noise == "laplace"
    assert "zero has as small a bound" in ask(np.eye(3), "auto", sparsity=1, epsilon=0.01).reason


def test_bounds_hold_on_average() -> None:
    rng = np.random.default_rng(0)
    for noise, law in (("gaussian", rng.normal), ("laplace", rng.laplace)):
        for d in (1, 2, 50, 3000):
            for scale in (1e-3, 0.1):
                alone, projected = error_bounds(sizes(columns=d, sparsity=min(4, d)), noise, scale)
                true = np.zeros(d)
                true[: min(4, d)] = 0.5
                errors = []
                for _ in range(60):
                    point = true + law(scale=scale, size=d)
                    errors.append(
                        [np.linalg.norm(point - true), np.linalg.norm(project_l1(point, math.sqrt(min(4, d))) - true)]
                    )
                root_mean_square = np.sqrt(np.square(errors).mean(axis=0))
                assert root_mean_square[0] <= alone * 1.3 and root_mean_square[1] <= projected * 1.3
                assert projected <= alone


def project_l1(point: np.ndarray, radius: float) -> np.ndarray:
    return project(point, L1Ball(radius), norm="l2")


def test_the_bound_of_recovery_is_never_the_smallest() -> None:
    """What "auto" rests on, and what the page says."""
    ratios = []
    for epsilon, delta in ((0.1, 1e-6), (1.0, 1e-6), (1.0, 1e-12), (10.0, 1e-4)):
        for rows in (1, 1000, 10**6):
            for columns in (10, 10**3, 10**6, 10**12):
                for sparsity in (1.0, 10.0, 900.0):
                    of = Sizes(rows, columns, 1.0, min(sparsity, columns), epsilon, delta)
                    scale = 2 * gaussian_multiplier(epsilon, delta) / rows
                    measuring = choose_measuring(of, scale, None, None, printed=False)
                    if not measuring.noise_alone:
                        ratios.append(measuring.bound / choose(of, {"gaussian": scale}, "projection").bound)
    assert len(ratios) > 30 and 2.5 < min(ratios) < 3.5


def test_auto_says_what_recovery_would_promise() -> None:
    answer = ask(sparse_rows(n=200, d=5000, s=2), "auto", sparsity=2, rows=200)
    assert answer.bounds["l1_recovery"] > answer.bounds["projection with gaussian noise"]
    assert f"l1_recovery {answer.bounds['l1_recovery']:.3g}" in answer.reason
    recovered = ask(sparse_rows(n=200, d=5000, s=2), "l1_recovery", sparsity=2, rows=200, measurements=None)
    assert recovered.bounds == answer.bounds and recovered.error_bound == min(3.0, answer.bounds["l1_recovery"])
    assert "l1_recovery" not in ask(sparse_rows(), "auto", delta=0).bounds


def test_printed_constants_of_recovery() -> None:
    """m and the clip by the paper, where its calibration was asked for."""
    rows = sparse_rows(n=100, d=5000, s=4)
    printed = ask(rows, "l1_recovery", rows=100, measurements=None, calibration="paper")
    assert printed.recovery is not None and printed.recovery.measurements == math.ceil(
        measurements_for(100, 5000, 4, 1.0, 1e-6)
    )
    assert printed.statement.settings["measurement_clip"] == 1.5
    ours = ask(rows, "l1_recovery", rows=100, measurements=None)
    assert ours.recovery is not None and ours.statement.settings["measurement_clip"] < 1.5
    assert ours.error_bound <= printed.error_bound


# ---------------------------------------------------------------------- edges


@methods
@relations
@pytest.mark.parametrize(
    "X, sparsity",
    [
        (np.ones((1, 1)), 1),  # one row, one column
        (np.ones((2, 1)), 1),
        (np.ones((1, 30)), 4),
        (np.ones((2, 30)), 30),  # s = d
        (np.ones((2, 30)), 1000),  # s above d
        (np.zeros((3, 30)), 2),  # zero rows
        (np.tile(np.eye(30)[:1], (9, 1)), 2),  # duplicate rows
        (np.ones((3, 30), int), 2),
        (np.ones((3, 30), bool), 1.5),
        (sp.csr_array((5, 30)), 2),  # nothing in it
    ],
)
def test_edges(X: Any, sparsity: float, method: str, neighbours: str) -> None:
    answer = ask(X, method, neighbours=neighbours, sparsity=sparsity)
    assert answer.mean.shape == (X.shape[1],) and np.isfinite(answer.mean).all()
    assert answer.statement.epsilon <= 1
    plain = ask(X, method, neighbours=neighbours, sparsity=sparsity, seed=0, noise_multiplier=0)
    if plain.recovery is None:
        dense = (X.toarray() if sp.issparse(X) else X).astype(float)
        norms = np.maximum(1, np.linalg.norm(dense, axis=1))
        l1 = np.maximum(1, np.abs(dense / norms[:, None]).sum(axis=1) / math.sqrt(min(sparsity, X.shape[1])))
        assert np.allclose(plain.mean, (dense / (norms * l1)[:, None]).mean(axis=0), atol=1e-8)


@methods
def test_no_rows(method: str) -> None:
    """With a private number of rows an error would tell that there are none."""
    answer = ask(np.zeros((0, 30)), method)
    assert answer.mean.shape == (30,) and answer.rows >= 1
    assert ask(np.zeros((0, 30)), method, rows=10).rows == 10
    with pytest.raises(DataError, match="no rows"):
        ask(np.zeros((0, 30)), method, neighbours="replace_one")


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0},
        {"epsilon": -1},
        {"epsilon": math.nan},
        {"epsilon": math.inf},
        {"delta": -1e-9},
        {"delta": 1},
        {"delta": 0},  # with Gaussian noise
        {"bound": 0},
        {"bound": math.inf},
        {"sparsity": 0.5},
        {"sparsity": math.nan},
        {"neighbours": "both"},
        {"calibration": "printed"},
        {"rows": 0},
        {"rows": 2.5},
        {"measurements": 5},  # of another method
        {"measurement_clip": 1.5},
        {"solver": "columns"},
        {"method": "l1_recovery", "delta": 0},
        {"method": "l1_recovery", "measurements": 0},
        {"method": "l1_recovery", "solver": "simplex"},
        {"method": "l1_recovery", "measurement_clip": 0},
        {"noise_multiplier": 0},  # without a seed
        {"noise_multiplier": 1.0, "seed": 1},
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ask(sparse_rows(), **changes)


def test_methods_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match=r"gaussian, laplace.*Did you mean 'projection'"):
        private_mean(sparse_rows(), epsilon=1, delta=0, bound=1, sparsity=4, method="projections")


def test_deltas_that_promise_little() -> None:
    with pytest.raises(UnsupportedError, match="delta"):
        ask(sparse_rows(), delta=0.1)
    with pytest.warns(SparseDPWarning, match="above 1 / N"):
        ask(sparse_rows(500), delta=5e-3, neighbours="replace_one")


def test_data_that_are_refused() -> None:
    for X in (np.array([[math.nan, 1.0]]), np.zeros((3, 0)), np.zeros(3), []):
        with pytest.raises(SparseDPError):
            ask(X)


@pytest.mark.parametrize("epsilon", [1e-4, 1.0, 30.0, 1e4])
def test_any_epsilon(epsilon: float) -> None:
    for method in ("gaussian", "projection", "pure projection", "laplace"):
        answer = ask(sparse_rows(), method, epsilon=epsilon, neighbours="replace_one")
        assert answer.statement.epsilon <= epsilon and answer.statement.epsilon > 0.99 * min(epsilon, 100)
    assert epsilon_of(mean.Releases(None).ledger, 1e-6) == 0  # type: ignore[arg-type]
