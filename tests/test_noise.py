"""The noise has the right law and scale, is fresh, and does not come from a guessable seed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from sparsedp.grid import grid_of, round_to
from sparsedp.noise import CHUNK, GaussianNoise, RandomKey, Sums, add_row_normals, row_normals
from support import Clicks, clicks, loader_of, make_private, train


def accepts(sample: np.ndarray, std: float) -> bool:
    return bool(stats.kstest(sample / std, "norm").pvalue > 1e-4)


def test_law_of_large_and_small_tensors() -> None:
    noise = GaussianNoise(RandomKey.from_seed(1))
    tensors = {0: torch.empty(CHUNK + 1000), 1: torch.empty(50, 40), 2: torch.empty(3)}
    noise.fill(tensors, 2.5, step=4)
    for index in (0, 1):
        sample = tensors[index].flatten().numpy()[-50_000:]
        assert accepts(sample, 2.5)
        assert not accepts(sample, 2.5 * 2 / 3)
        assert not accepts(sample, 2.5 * 3 / 2)


def test_fresh_at_every_step_and_different_on_every_tensor() -> None:
    noise = GaussianNoise(RandomKey.from_seed(1))
    drawn = []
    for step in range(3):
        tensors = {index: torch.empty(100_000) for index in range(2)} | {
            2: torch.empty(500),
            3: torch.empty(500),
        }
        noise.fill(tensors, 1.0, step)
        drawn += [tensor.clone() for tensor in tensors.values()]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            n = min(len(one), len(other))
            assert abs(float(torch.corrcoef(torch.stack([one[:n], other[:n]]))[0, 1])) < 6 / n**0.5


def test_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        tensor = torch.empty(2 * CHUNK + 5)
        GaussianNoise(RandomKey.from_seed(3)).fill({0: tensor}, 1.0, 0)
        results.append(tensor)
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_zero_deviation() -> None:
    tensor = torch.ones(5)
    GaussianNoise(RandomKey.from_os()).fill({0: tensor}, 0.0, 0)
    assert float(tensor.abs().max()) == 0


def test_torch_seed_has_no_influence() -> None:
    """Trap 10: `torch.manual_seed` must not fix the noise."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        tensor = torch.empty(10)
        GaussianNoise(RandomKey.from_os()).fill({0: tensor}, 1.0, 0)
        drawn.append(tensor)
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("device, dtype", [("cpu", torch.bfloat16), ("cpu", torch.float16), ("meta", torch.float32)])
def test_other_dtypes_and_devices_get_the_ciphers_noise(device: str, dtype: torch.dtype) -> None:
    """Drawn on the CPU and copied: the same numbers, to rounding, as float32 has; nothing of the device's generator."""
    tensor, same = torch.empty(3, 40_000, dtype=dtype, device=device), torch.empty(3, 40_000)
    noise = GaussianNoise(RandomKey.from_seed(1))
    noise.fill({7: tensor}, 2.0, 5)
    noise.fill({7: same}, 2.0, 5)
    assert device == "meta" or torch.equal(tensor, same.to(dtype))


def test_keys_keep_their_secret() -> None:
    key = RandomKey.from_os()
    assert key.secret.hex() not in repr(key) and str(key.secret) not in repr(key)
    assert key.child(1) != key.child(2) and not key.child(1).seeded


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_of_a_step(reduction: str) -> None:
    """Trap 6: a step's update is lr * noise / divisor with deviation sigma * C on the sum, on every parameter."""
    sigma, clip, lr, batch = 1.3, 0.7, 0.5, 16
    torch.manual_seed(0)
    module = Clicks(rows=2000, dim=20)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    data = loader_of(*clicks(320, rows=2000), batch_size=batch)
    engine, module, optimizer, loader = make_private(
        module,
        data,
        optimizer=optimizer,
        noise_multiplier=sigma,
        max_grad_norm=clip,
        loss_reduction=reduction,
    )
    samples = []
    for ids, x, _ in loader:
        before = copy.deepcopy(module.state_dict())
        optimizer.zero_grad()
        (module(ids, x) * 0).sum().backward()  # no signal: the update is the noise alone
        optimizer.step()
        samples.append((module.table.weight.detach() - before["table.weight"]).flatten().numpy())
        hidden = (module.hidden.weight.detach() - before["hidden.weight"]).flatten().numpy()
        assert 0.7 < hidden.std() / (lr * sigma * clip / (batch if reduction == "mean" else 1)) < 1.4
    sample = np.concatenate(samples)[:200_000]
    std = lr * sigma * clip / (batch if reduction == "mean" else 1)
    assert accepts(sample, std)
    assert not accepts(sample, std * 2 / 3) and not accepts(sample, std * 3 / 2)


def test_unused_parameters_get_noise() -> None:
    """A table that no unit of the batch uses, or that forward skips, is noised all the same."""
    module = Clicks()
    module.spare = nn.Linear(3, 3)
    engine, module, optimizer, loader = make_private(module, loader_of(*clicks(64), batch_size=8))
    before = copy.deepcopy(module.state_dict())
    train(module, optimizer, loader)
    for name, value in module.state_dict().items():
        assert (value != before[name]).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_on_rows_in_place(dtype: torch.dtype) -> None:
    """Compiled, and as torch does it for other types and for tables with gaps."""
    key, rows, std = RandomKey.from_seed(0), torch.tensor([4, 0, 7]), np.array([1.0, 2.0, 0.5])
    grid, factor = 2.0**-11, np.array([0.5, 2.0, 1.0])
    own = torch.float64 if dtype == torch.float64 else torch.float32
    noise = row_normals(key, rows, torch.empty(9, 3, 5, dtype=own)).double()
    total = noise * torch.from_numpy(std).view(3, 1, 1) + torch.from_numpy(factor).view(3, 1, 1)
    expected = torch.ones(9, 3, 5, dtype=dtype)
    expected[rows] = round_to(total, grid).to(dtype)
    together = torch.ones(9, 3, 5, dtype=dtype)
    apart = torch.ones(9, 3, 10, dtype=dtype)[:, :, ::2]
    for table in (together, apart):
        add_row_normals(key, table, rows, std, grid, factor)
        assert (round_to(table, grid) == table).all()
        torch.testing.assert_close(table, expected, rtol=0.01 if dtype == torch.bfloat16 else 0, atol=1.01 * grid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_on_sums(dtype: torch.dtype) -> None:
    """Compiled, and for other types; where all rows hold sums, some, and none; on vectors, numbers and nothing at all."""
    key, std = RandomKey.from_seed(0), 0.3
    grid = grid_of(std)
    shapes = [(40, 3, 5), (7,), (), (0, 4)]
    for shape in shapes:
        count = shape[0] if shape else 0
        for rows in (None, torch.empty(0, dtype=torch.long), torch.arange(min(1, count), count, 3)):
            sums = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
            held = torch.zeros_like(sums)
            if rows is None:
                held = sums.clone()
            elif rows.numel():
                held[rows] = sums[rows]
            noise = torch.empty(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            GaussianNoise(key).fill({3: noise}, std, 5)
            expected, without = round_to(held.double() + noise.double(), grid).to(dtype), sums.clone()
            GaussianNoise(key).add({3: Sums(sums, rows)}, std, 5)
            assert (round_to(sums, grid) == sums).all()
            torch.testing.assert_close(sums, expected, rtol=0.01 if dtype == torch.bfloat16 else 0, atol=1.01 * grid)
            GaussianNoise(key).add({3: Sums(without, rows)}, 0.0, 5)  # no noise, no rounding
            assert torch.equal(without, held)


def test_noise_on_sums_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        sums = torch.ones(CHUNK // 2, 5)
        GaussianNoise(RandomKey.from_seed(3)).add({0: Sums(sums, torch.arange(0, CHUNK // 2, 7))}, 1.0, 0)
        results.append(sums)
    torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_law_of_what_is_rounded() -> None:
    """The right scale, on the grid, and nothing beside it: rounding adds a millionth of the variance."""
    sums = torch.zeros(500, 100)
    GaussianNoise(RandomKey.from_seed(1)).add({0: Sums(sums)}, 2.5, step=4)
    sample = sums.flatten().numpy()
    assert accepts(sample, 2.5)
    assert not accepts(sample, 2.5 * 2 / 3) and not accepts(sample, 2.5 * 3 / 2)
    steps = sample / grid_of(2.5)
    assert (steps == np.rint(steps)).all()
    assert stats.chisquare(np.bincount(steps.astype(np.int64) % 16, minlength=16)).pvalue > 1e-4
