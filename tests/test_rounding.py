"""Sum and noise are rounded together: how floating-point numbers came about tells nothing about what was added.

Noise alone, std * z in float32, reaches a pattern of numbers with holes; what has a gradient lands in the holes (Mironov 2012).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsedp
from sparsedp.grid import grid_of, round_to
from sparsedp.kernels import loops, normals
from sparsedp.noise import GaussianNoise, RandomKey, Sums, zero_others
from support import loader_of

ROWS, DIM, UNITS = 1500, 64, 1200
SIGMA, CLIP, BATCH = 3.0, 1.0, 120


class Model(nn.Module):
    """A table whose rows begin with zeros, as do the optimizers' states, and a dense layer."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.out = nn.Linear(dim, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).sum((1, 2)) + 0.1


MECHANISMS: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "dpsgd": sparsedp.DPSGD,
    "adafest": lambda: sparsedp.AdaFEST(threshold=0.5, noise_ratio=1.0, map_clip=1.0),
    "fest": lambda: sparsedp.FEST(k=ROWS // 2, counts={"table.weight": torch.arange(ROWS).flip(0)}),
    "eana": sparsedp.EANA,
    "exponential": lambda: sparsedp.ExponentialSelection(k=30, epsilon=1.0),
    "lazydp": sparsedp.LazyDP,
    "lazydp by step": lambda: sparsedp.LazyDP(aggregate=False),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.25),
    "decay": lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
    "row-wise adagrad": lambda p: sparsedp.RowWiseAdagrad(p, lr=0.3),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.3),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.3, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.3, fused=True),
}
SPARSE = {"adafest", "fest", "eana", "exponential"}


def takes(mechanism: str, optimizer: str) -> bool:
    if mechanism.startswith("lazydp"):
        return optimizer in ("sgd", "decay", "momentum")
    if mechanism in SPARSE:
        return optimizer in ("sgd", "adagrad", "row-wise adagrad", "sparse adam")
    return optimizer != "sparse adam"


class Run:
    """A seeded run. Notes which rows were touched, and what each step handed to the optimizer."""

    def __init__(
        self, mechanism: str, optimizer: str, *, seed: int = 0, noise: GaussianNoise | None = None, users: bool = False,
        physical: int | None = None, dtype: torch.dtype = torch.float32, sigma: float = SIGMA, rows: int = ROWS,
    ) -> None:  # fmt: skip
        torch.manual_seed(1)
        self.module: Any = Model(rows, DIM).to(dtype)
        inputs = torch.randint(rows, (UNITS, 2)), torch.rand(UNITS, dtype=dtype).round()
        made = OPTIMIZERS[optimizer]
        self.inner = made(self.module.parameters() if optimizer != "sparse adam" else [self.module.table.weight])
        if optimizer == "sparse adam":
            self.module.out.requires_grad_(False)
        self.engine = sparsedp.PrivacyEngine(seed=seed)
        options = {"unit": "user", "users": torch.arange(UNITS) // 2} if users else {}
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=self.module, optimizer=self.inner, data_loader=loader_of(*inputs, batch_size=BATCH),
            noise_multiplier=sigma, max_grad_norm=CLIP, mechanism=MECHANISMS[mechanism](), max_physical_batch=physical,
            **options,
        )  # fmt: skip
        if noise is not None:
            self.optimizer.noise = noise
        plan = self.engine.plan
        self.std = plan.mechanism.gradient_noise(plan.noise_multiplier) * CLIP / plan.divisor
        self.touched: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.selections: list[Tensor | None] = []
        hand_over = self.optimizer.private_step.hand_over

        def watched(gradient: Any) -> bool:
            self.gradients.append({name: value.clone() for name, value in gradient.values.items()})
            self.selections.append(None if gradient.selection is None else gradient.selection["table.weight"].clone())
            return hand_over(gradient)

        self.optimizer.private_step.hand_over = watched

    def train(self, steps: int) -> Run:
        rows = []
        while len(self.touched) < steps:
            for ids, target in self.loader:
                self.optimizer.zero_grad()
                rows.append(ids.flatten())
                binary_cross_entropy_with_logits(self.module(ids), target).backward()
                self.optimizer.step()
                if self.loader.current.last:
                    self.touched.append(torch.unique(torch.cat(rows)))
                    rows = []
                    if len(self.touched) == steps:
                        break
        return self

    def states(self) -> dict[str, np.ndarray]:
        """The table's weights and all of its optimizer state, as a checkpoint would hold them."""
        found = {"weight": self.module.state_dict()["table.weight"]}
        own = self.optimizer.state_dict()["state"].get(0, {})
        found |= {key: value for key, value in own.items() if isinstance(value, Tensor) and value.ndim == 2}
        return {key: torch.Tensor(value).clone().numpy() for key, value in found.items()}


def on_grid(values: Tensor | np.ndarray, grid: float) -> bool:
    steps = np.asarray(values, np.float64) / grid
    return bool((steps == np.rint(steps)).all())


COMBINATIONS = [
    (mechanism, optimizer) for mechanism in MECHANISMS for optimizer in OPTIMIZERS if takes(mechanism, optimizer)
]


@pytest.mark.parametrize(("mechanism", "optimizer"), COMBINATIONS)
def test_all_that_is_released_lies_on_the_grid(mechanism: str, optimizer: str) -> None:
    """With examples and users, in one physical batch and in several, in float32 and float64."""
    for users, physical, dtype in ((False, None, torch.float32), (True, 50, torch.float32), (False, 50, torch.float64)):
        run = Run(mechanism, optimizer, users=users, physical=physical, dtype=dtype).train(3)
        grid = grid_of(run.std)
        assert run.std / 2048 < grid <= run.std / 1024
        for gradient in run.gradients:
            for name, values in gradient.items():
                assert name.startswith("table") == (name == "table.weight")
                if not (mechanism.startswith("lazydp") and name == "table.weight"):  # those are sums, which stay inside
                    assert on_grid(values, grid), name
                    assert (values != 0).double().mean() > 0.9
        if mechanism == "lazydp":
            states = run.states()
            assert on_grid(states["weight"], grid_of(run.inner.param_groups[0]["lr"] * run.std))
            if optimizer == "momentum":
                assert on_grid(states["momentum_buffer"], grid)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_without_noise_nothing_is_rounded(mechanism: str) -> None:
    run = Run(mechanism, "sgd", sigma=0.0, dtype=torch.float64).train(2)
    values = torch.cat([value.flatten() for gradient in run.gradients for value in gradient.values()])
    values = values[values != 0]
    assert values.numel() > 100 and not on_grid(values, grid_of(float(values.abs().mean())))


# ---------------------------------------------------------------------- the attack


class NoiseWithHoles(GaussianNoise):
    """As it was: noise in float32, to which float32 sums are added, and nothing rounded."""

    def add(self, tensors: Any, std: float, step: int) -> None:
        for index, sums in tensors.items():
            zero_others(sums)
            noise = torch.empty_like(sums.values)
            self.fill({index: noise}, std, step)
            sums.values.add_(noise)


def in_image(values: np.ndarray, std: float, squared: bool) -> np.ndarray:
    """Whether fl(std z) is such a value for some float32 z; or its square, rounded."""
    scale, values = np.float32(std), np.abs(values.astype(np.float32))
    roots = np.sqrt(values.astype(np.float64)).astype(np.float32) if squared else values
    found = np.zeros(values.shape, bool)
    for root in (np.nextafter(roots, np.float32(0)), roots, np.nextafter(roots, np.float32(np.inf))):
        matches = (root * root if squared else root) == values
        quotient = (root.astype(np.float64) / float(scale)).astype(np.float32)
        for z in (np.nextafter(quotient, np.float32(0)), quotient, np.nextafter(quotient, np.float32(np.inf))):
            found |= matches & (scale * z == root)
    return found


def trailing_zeros(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32) | np.uint32(1 << 24)
    return np.log2((bits & (~bits + np.uint32(1))).astype(np.float64))


def observations(values: np.ndarray, std: float) -> dict[str, np.ndarray]:
    """What an attacker computes from each row, who knows the deviation and the learning rate."""
    found = {"trailing zeros": trailing_zeros(values), "size": np.abs(values)}
    for rate, squared in itertools.product((1.0, 0.25, 0.3), (False, True)):
        found[f"in the image, times {rate:g}, {squared}"] = in_image(values, std * rate, squared).astype(float)
    for rate in (1.0, 0.25, 0.3, 0.1, grid_of(std), 0.001):
        steps = values.astype(np.float64) / (grid_of(std) * rate)
        found[f"residual, times {rate:g}"] = np.abs(steps - np.rint(steps))
        found[f"whole, times {rate:g}"] = (steps == np.rint(steps)).astype(float)
        for modulus in (2, 3, 16):
            found[f"steps mod {modulus}, times {rate:g}"] = np.rint(steps) % modulus
    return {name: value.mean(1) for name, value in found.items()}


def separations(values: np.ndarray, touched: np.ndarray, untouched: np.ndarray, std: float) -> dict[str, float]:
    """For every observation, by how many deviations its area under the curve differs from a half."""
    found = {}
    for name, seen in observations(values, std).items():
        one, other = seen[touched], seen[untouched]
        if np.ptp(np.concatenate([one, other])) == 0:
            continue
        area = stats.mannwhitneyu(one, other).statistic / (len(one) * len(other))
        found[name] = abs(area - 0.5) / np.sqrt((len(one) + len(other) + 1) / (12 * len(one) * len(other)))
    return found


def groups(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Rows that were touched in just one step, and rows that never were, all of which got noise equally often.

    That is in each step, or, where the selection is another one in each of them, in just one.
    """
    touches, selected = np.zeros(ROWS, int), np.zeros(ROWS, int)
    hits = np.zeros(ROWS, int)
    for rows, selection in zip(run.touched, run.selections):
        chosen = np.arange(ROWS) if selection is None or run.optimizer.owner.adds_noise else selection.numpy()
        np.add.at(touches, rows.numpy(), 1)
        np.add.at(selected, chosen, 1)
        np.add.at(hits, np.intersect1d(chosen, rows.numpy()), 1)
    among = selected == (1 if run.engine.plan.mechanism.name == "adafest" else len(run.touched))
    return np.flatnonzero(among & (hits == 1)), np.flatnonzero(among & (hits == 0) & (touches == 0))


ATTACKED = [
    pair for pair in COMBINATIONS if pair[0] not in ("eana", "exponential")
]  # which give untouched rows no noise


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("mechanism", "optimizer"), ATTACKED)
def test_touched_rows_do_not_show(mechanism: str, optimizer: str, steps: int) -> None:
    """Neither in weights nor in the optimizer's state."""
    run = Run(mechanism, optimizer).train(steps)
    touched, untouched = groups(run)
    assert len(touched) > 40 and len(untouched) > 200
    for name, values in run.states().items():
        found = separations(values, touched, untouched, run.std)
        assert len(found) >= 5
        assert max(found.values()) < 5, (name, found)


@pytest.mark.parametrize(
    ("mechanism", "optimizer", "state", "steps"),
    [
        ("adafest", "adagrad", "sum", 4),
        ("adafest", "sgd", "weight", 4),
        ("fest", "sgd", "weight", 1),
        ("dpsgd", "sgd", "weight", 1),
        ("dpsgd", "momentum", "momentum_buffer", 1),
    ],
)
def test_the_attack_finds_touched_rows_where_nothing_is_rounded(
    mechanism: str, optimizer: str, state: str, steps: int
) -> None:
    """Nearly all of them: so the test above can fail."""
    run = Run(mechanism, optimizer, noise=NoiseWithHoles(RandomKey.from_seed(0))).train(steps)
    values, (touched, untouched) = run.states()[state], groups(run)
    share = in_image(values, run.std * (0.25 if state == "weight" else 1.0), state == "sum").mean(1)
    assert share[untouched].min() == 1 and (share[touched] < 1).mean() > 0.95
    assert max(separations(values, touched, untouched, run.std).values()) > 9


def test_two_checkpoints_do_not_tell_touched_rows_by_their_momentum() -> None:
    """Without Nesterov, w' = w - lr v': whoever has both checkpoints computes what was lost in rounding, without any noise.

    Sums that were added to w and v while these wait for their noise would be rounded in each of them by their own.
    """
    torch.manual_seed(0)
    run = Run("lazydp", "momentum")
    weights = torch.Tensor(run.module.state_dict()["table.weight"])
    run.module.load_state_dict({**run.module.state_dict(), "table.weight": torch.rand_like(weights) * 100})
    before = run.states()["weight"]
    after = run.train(1).states()
    rest = after["weight"].astype(np.float64) - before + 0.3 * after["momentum_buffer"].astype(np.float64)
    touched, untouched = groups(run)
    seen = np.abs(rest)
    for row_wise in (seen.mean(1), seen.max(1), (rest**2).mean(1)):
        one, other = row_wise[touched], row_wise[untouched]
        area = stats.mannwhitneyu(one, other).statistic / (len(one) * len(other))
        assert abs(area - 0.5) < 5 * np.sqrt((len(one) + len(other) + 1) / (12 * len(one) * len(other)))


@pytest.mark.parametrize("optimizer", ["sgd", "decay", "momentum"])
@pytest.mark.parametrize("rate", [0.0, 1e-44])
def test_a_learning_rate_of_nothing_leaves_weights_alone(optimizer: str, rate: float) -> None:
    """There is no noise on them, so there is no grid; afterwards there is one again, the same for all rows."""
    run = Run("lazydp", optimizer)
    weights = torch.Tensor(run.module.state_dict()["table.weight"])
    run.module.load_state_dict({**run.module.state_dict(), "table.weight": torch.rand_like(weights)})
    before = run.states()["weight"]
    run.optimizer.param_groups[0]["lr"] = rate
    run.train(3)
    assert (run.states()["weight"] == before).all()
    run.optimizer.param_groups[0]["lr"] = 0.3
    run.train(5)
    assert on_grid(run.states()["weight"], grid_of(0.3 * run.std))
    run.optimizer.param_groups[0]["lr"] = rate
    assert on_grid(run.train(6).states()["weight"], grid_of(0.3 * run.std))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_settling_in_parts_has_the_same_law(optimizer: str) -> None:
    """Rows that are read in between are rounded more often, which nobody can see."""
    drawn = []
    for read in (False, True):
        run = Run("lazydp", optimizer, seed=4)
        for step in range(1, 7):
            run.train(step)
            if read:
                run.states()
        _, untouched = groups(run)
        drawn.append(run.states()["weight"][untouched].flatten())
    assert stats.ks_2samp(*drawn).pvalue > 1e-4
    assert 0.98 < drawn[0].std() / drawn[1].std() < 1.02
    steps = [np.rint(values / grid_of(0.3 * 3.0 / BATCH)).astype(np.int64) % 16 for values in drawn]
    assert stats.chi2_contingency([np.bincount(one, minlength=16) for one in steps]).pvalue > 1e-4


def test_neighbours_differ_by_their_unit_and_one_step_of_the_grid() -> None:
    """The same noise on sums of D and of D plus one unit: no more than rounding is added to what the unit moves."""
    random, std = torch.Generator().manual_seed(0), 0.02
    for width, count in itertools.product((1, 7, 64), (1, 300)):
        sums = torch.randn(400, width, generator=random)
        rows = torch.randperm(400, generator=random)[:count].sort().values
        more = sums.clone()
        unit = torch.randn(count, width, generator=random)
        more[rows] += CLIP * unit / unit.norm()
        noise = GaussianNoise(RandomKey.from_seed(width))
        sensitivity = float((more.double() - sums.double()).norm())
        for tensor in (sums, more):
            noise.add({0: Sums(tensor)}, std, 0)
        difference = more.double() - sums.double()
        assert (difference[~torch.isin(torch.arange(400), rows)] == 0).all()
        assert float(difference.norm()) <= sensitivity + grid_of(std) * (count * width) ** 0.5


def test_a_sum_moves_every_cell_by_what_it_is() -> None:
    """How often each point of the grid is hit, noise alone and noise plus a sum that is no multiple of the grid.

    What has a sum is what has none, moved: also between the numbers of float32, which are 2^-12 of a cell apart here.
    """
    std, count = 1.0, 1 << 22
    grid = grid_of(std)
    hits = []
    for shift in (0.0, 0.37 * grid, 1e-3 * grid):
        out = np.full(count, shift, np.float32)
        normals.add_normal(out, std, grid, RandomKey.from_seed(9).stream(), 0, count, np.zeros(1, np.int64))
        steps = np.rint(out / grid).astype(np.int64)
        hits.append(np.bincount(np.clip(steps, -300, 300) + 300, minlength=601)[1:-1])
        edges = (np.arange(-300, 300) + 0.5) * grid - shift
        expected = np.diff(stats.norm.cdf(edges / std)) * count
        assert stats.chisquare(hits[-1], expected * hits[-1].sum() / expected.sum()).pvalue > 1e-4
    assert (hits[0] != hits[1]).any()


@njit
def words_above(edge: float, radius: float, std: float, rounded: bool) -> float:
    """How many of 2^32 words give a point with std * radius * point >= edge > 0.

    With `rounded`, radius * point is float32. Angles from 0 to 45 degrees have 2^29 steps; cosines fall, and sines rise.
    """
    scale, count = np.float64(np.float32(std) * radius), 0.0
    for sine in (False, True):
        begin, end = 0, 1 << 29
        while begin < end:
            middle = (begin + end) // 2
            cosine, own = normals._circle(np.uint32(middle))
            point = own if sine else cosine
            value = np.float64(std * np.float64(radius * point)) if rounded else scale * np.float64(point)
            if (value >= edge) == sine:
                end = middle
            else:
                begin = middle + 1
        count += 2.0 * ((1 << 29) - begin) if sine else 2.0 * begin
    return count


@njit
def deviation(radii: np.ndarray, std: float, begin: float, end: float, rounded: bool) -> float:
    """By how much more words than there should be lead to between `begin` and `end`, relative to their number."""
    found = expected = 0.0
    for radius in radii:
        scale = np.float64(std * radius)
        due = 2.0**32 / np.pi * (np.arccos(min(1.0, begin / scale)) - np.arccos(min(1.0, end / scale)))
        found += words_above(begin, radius, std, rounded) - words_above(end, radius, std, rounded) - due
        expected += due
    return found / expected


@pytest.mark.parametrize("place", [0.3, 1.0, 2.0])
def test_cells_have_the_mass_of_a_gaussian(place: float) -> None:
    """The number of words of the cipher that lead to one point of the grid, wherever a sum lies between two of them.

    For some of the radii: what their counts are off by averages out, the more the more of them there are. Normals that are
    rounded to float32 before the sum is added have the same error for all radii, which does not.
    """
    std, random = 0.7 * 2**11, np.random.default_rng(0)  # in units of the grid
    radii = np.sqrt(-2 * np.log(random.random(1 << 13))).astype(np.float32)
    cell, shifts = round(place * std), random.random(6)
    exact, rounded = (
        np.std([deviation(radii, std, cell - 0.5 - shift, cell + 0.5 - shift, after) for shift in shifts])
        for after in (False, True)
    )
    assert exact < 3e-6 * max(1.0, place**2)
    assert rounded > 5 * exact


def test_rounding_to_the_grid_is_exact() -> None:
    values = torch.tensor([0.0, 1.0, -3.3, 1e30, 5e-324], dtype=torch.float64)
    assert on_grid(round_to(values, 2.0**-20), 2.0**-20)
    assert float(round_to(values, 2.0**-20)[3]) == 1e30


@pytest.mark.parametrize("momentum, rate", [(0.9, 0.03), (0.9, 0.1), (0.0, 3e-6)])
def test_rows_that_were_read_before_the_learning_rate_fell(momentum: float, rate: float) -> None:
    """They were rounded to the grid of the old rate, which a finer grid would show: so all rows are."""
    module = Model(ROWS, DIM)
    ids = torch.randint(ROWS, (UNITS, 1), generator=torch.Generator().manual_seed(0))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=4).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.3, momentum=momentum),
        data_loader=loader_of(ids, torch.ones(UNITS), batch_size=BATCH), noise_multiplier=SIGMA, max_grad_norm=CLIP,
        mechanism=sparsedp.LazyDP(),
    )  # fmt: skip
    rates, read = [0.3, 0.3, 0.3, rate], []
    for value, (own, target) in zip(rates, loader):
        optimizer.param_groups[0]["lr"] = value
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(module(own), target).backward()
        optimizer.step()
        read.append(own.unique())
    weights = module.table.weight.detach().clone().double()
    if momentum:  # without the noise of the last step
        weights += rate * optimizer.state_dict()["state"][0]["momentum_buffer"].clone().double()
    steps = weights.numpy() / grid_of(0.3 * SIGMA * CLIP / BATCH)
    distance = np.abs(steps - np.rint(steps)).mean(1)
    last = np.isin(np.arange(ROWS), read[-1].numpy())
    waiting = ~np.isin(np.arange(ROWS), torch.cat(read).numpy())  # since the first step
    assert abs(distance[last].mean() - distance[waiting].mean()) < 0.02


@pytest.mark.parametrize("apart", [False, True])
def test_large_weights_do_not_tell_what_rounding_made_of_a_unit(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' sum leaves lr S just below half of w's last place; a unit of C / 200 carries 4,096 coordinates over it.

    Rounded before there is noise, they would move by a whole place each: sixteen deviations of the noise, which is four places.
    With gradient and noise `apart`, as small weights have them, they do.
    """
    last_place, rate, sigma = 2.0**-23, 1e-5, 0.095  # of weights of 1.5
    others, unit = 0.499 * last_place * 64 * 2 / rate, 0.005

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 64)
            nn.init.constant_(self.table.weight, 1.5)

        def forward(self, ids: Tensor, size: Tensor) -> Tensor:
            return self.table(ids).sum((1, 2)) / 64 * size

    if apart:
        within = loops.move_rows_within
        monkeypatch.setattr(
            "sparsedp.tables.lazy.loops.move_rows_within",
            lambda table, rows, values, step, limit: within(table, rows, values, step, math.inf),
        )
    means = []
    for seed, size in enumerate((0.0, unit)):
        module: Any = Scores()
        module, optimizer, loader = sparsedp.PrivacyEngine(seed=seed).make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=rate),
            data_loader=loader_of(torch.arange(64).repeat(2, 1), torch.tensor([others, size]), batch_size=2),
            noise_multiplier=sigma, max_grad_norm=1.0, mechanism=sparsedp.LazyDP(),
        )  # fmt: skip
        for ids, sizes in loader:
            optimizer.zero_grad()
            module(ids, sizes).mean().backward()
            optimizer.step()
        assert (optimizer.owner.pending()["table.weight"] == 0) != apart
        means.append(float(torch.Tensor(module.state_dict()["table.weight"]).double().mean()))
    deviations = abs(means[0] - means[1]) * 64 / (rate * sigma / 2) / 2**0.5
    assert deviations > 8 if apart else deviations < 4
