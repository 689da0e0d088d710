"""Sums of many units: what float32 loses of thousands of equal terms must stay far below what one of them adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsedp.capture.uses import Built, Linear, Use
from sparsedp.kernels import loops


def uses_of(units: int, height: int, width: int, factor: float, seed: int) -> dict[str, tuple[Use, Tensor]]:
    """Units that are all alike, with a gradient of norm `factor`, about 1, and the exact sum."""
    random = torch.Generator().manual_seed(seed)
    grad, inputs = (torch.nn.functional.normalize(torch.randn(n, generator=random), dim=0) for n in (height, width))
    grad = grad * factor
    exact = units * torch.outer(grad.double(), inputs.double()).flatten()
    bias = torch.nn.functional.normalize(torch.randn(height, generator=random), dim=0) * factor
    return {
        "linear": (Linear(inputs.repeat(units, 1, 1), grad.repeat(units, 1, 1), 0), exact),
        "built": (Built(bias.repeat(units, 1), 0), units * bias.double()),
    }


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(loops, "compiled", lambda *tensors: False)
    return str(request.param)


@pytest.mark.parametrize("kind", ["linear", "built"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 8), (64, 1), (1, 64), (64, 64)])
def test_units_that_are_all_alike(height: int, width: int, kind: str, path: str) -> None:
    """Relative to one unit's part: n 2^-24 where sums are rounded once, more where torch multiplies matrices."""
    bound = 2e-6 if min(height, width) > 1 and kind == "linear" else 1e-7
    for units in (300, 5000):
        for last_digit in range(12):
            use, exact = uses_of(units, height, width, 1 + last_digit * 2.0**-23, seed=last_digit)[kind]
            out = torch.zeros(exact.shape)
            use.add_weighted_sum(out, torch.ones(units))
            assert float((out.double() - exact).norm()) <= bound * units, (units, last_digit)


def test_a_float32_sum_would_not_do() -> None:
    """So the test above can fail."""
    lost = []
    for last_digit in range(12):
        use, exact = uses_of(5000, 64, 1, 1 + last_digit * 2.0**-23, seed=last_digit)["built"]
        assert isinstance(use, Built)
        total = torch.zeros(64)
        for row in use.values:
            total += row
        lost.append(float((total.double() - exact).norm()))
    assert max(lost) > 1e-5 * 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (7, 0), (700, 300), (40, 5000)])
def test_weighted_rows(rows: int, columns: int, dtype: torch.dtype, path: str) -> None:
    """Also of a matrix that is a part of another, or turned, and added to what is there."""
    whole = torch.randn(rows, columns + 4, dtype=dtype)
    for values in (
        whole[:, 2 : columns + 2],
        whole.mT.contiguous().mT[:, :columns],
        whole[:1, :columns].expand(rows, -1),
    ):
        factors = torch.randn(2 * len(values), dtype=dtype)[::2]
        out = torch.ones(columns, dtype=dtype)
        loops.add_weighted_rows(out, values, factors)
        exact = 1 + values.double().mT @ factors.double()
        torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
