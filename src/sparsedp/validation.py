"""Validation while a run goes on: a private set's mean loss, released with noise a planned number of times; when to stop.

A run that stops early has the cost of its whole plan. When it ends depends on what it learned, and the epsilon of the steps up
to a moment that was chosen by looking is no guarantee (Rogers, Roth, Ullman and Vadhan 2016, "Privacy odometers and filters").
The whole plan's is: to stop before its end is to look at less of what it releases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import dp_accounting
import numpy as np
import torch

from sparsedp.accounting.ledger import Ledger
from sparsedp.errors import SparseDPError
from sparsedp.grid import grid_of, round_to
from sparsedp.noise import RandomKey

# Values are whole multiples of the clip / 2^20, so that their sum is exact and one unit moves it by no more than it may.
_PARTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PrivateValidation:
    """`looks` releases of the mean of one value for each of `units` private units, such as their losses.

    Values are clipped to [0, clip], and what is no number counts as `clip`. With v_i such a value, b the clip and n = `units`,
    a look releases b / 2 + (sum of (v_i - b / 2) + N(0, (n std)^2)) / n, rounded to a grid. Adding or removing a unit moves the
    sum by b / 2 at most, so that a look is a Gaussian mechanism on all units with the noise multiplier n std / (b / 2).

    `std` is the deviation of the noise on the mean: improvements much smaller than it cannot be seen. `units` is public.
    """

    units: int
    looks: int
    std: float
    clip: float = 2.0

    def __post_init__(self) -> None:
        for name in ("units", "looks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"PrivateValidation: {name} must be a whole number of at least 1, not {value!r}")
        for name in ("std", "clip"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"PrivateValidation: {name} must be a positive number, not {value!r}")

    @property
    def noise_multiplier(self) -> float:
        return self.units * self.std / (self.clip / 2)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Of one look."""
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def looks_made(self, ledger: Ledger) -> int:
        """Abandoned ones included."""
        return ledger.setups(None, self.event)

    def look(self, values: Any, users: Any | None, unit: str, ledger: Ledger, key: RandomKey) -> float:
        """The next look, which the ledger is charged with. `users`, with unit="user": whose each value is."""
        if (unit == "user") != (users is not None):
            raise ValueError(
                "unit='user' protects users: give users=..., whose each example of the validation set is."
                if users is None
                else "users is for unit='user'; the units of this plan are examples."
            )
        of_units, look = self.of_units(values, users), self.looks_made(ledger)
        if look >= self.looks:
            raise SparseDPError(
                f"The {self.looks} looks at the validation set that are planned were made, and their budget is spent. Plan "
                "for more of them from the start: PrivateValidation(looks=...)."
            )
        ledger.record(self.event, setup=True)
        return self.draw(of_units, key, look)

    def draw(self, values: np.ndarray, key: RandomKey, look: int) -> float:
        """The mean that is released at a look, by its number. `values` float64 [units]."""
        total = int(self._steps(values).sum())
        noise = float(key.generator(look).standard_normal(1)[0]) * self.units * self.std
        exact = np.array([total * (self.clip / _PARTS) + noise])
        return self.clip / 2 + float(round_to(exact, grid_of(self.units * self.std))[0]) / self.units

    def _steps(self, values: np.ndarray) -> np.ndarray:
        """How many multiples of clip / 2^20 each clipped value is above clip / 2, int64 [n]: at most 2^19 either way."""
        shares = self._clipped(values) / self.clip
        return np.round((shares - 0.5) * _PARTS).astype(np.int64)

    def _clipped(self, values: np.ndarray) -> np.ndarray:
        return np.clip(np.where(np.isnan(values), self.clip, values), 0, self.clip)

    def of_units(self, values: Any, users: Any | None) -> np.ndarray:
        """One value for each unit, float64 [units]: with `users`, the mean of the clipped values of each user's examples."""
        of_units = _numbers("values", values)
        if users is not None:
            ids = np.asarray(users.cpu() if isinstance(users, torch.Tensor) else users)
            if ids.shape != of_units.shape:
                raise ValueError(
                    f"values and users must go together: there are {len(of_units)} values, {ids.shape} users"
                )
            _, place = np.unique(ids, return_inverse=True)
            of_units = np.bincount(place, self._clipped(of_units)) / np.bincount(place)
        if len(of_units) != self.units:
            whose = "units" if users is None else "users"
            raise SparseDPError(
                f"The plan is for a validation set of {self.units} units, and these are the values of {len(of_units)} {whose}. "
                "Give one value for each example of the whole set; PrivateValidation(units=...) says how many there are."
            )
        return of_units

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Validation = PrivateValidation | Literal["public"]


class EarlyStopping:
    """Says when to stop: after `patience` looks in a row, none of which was below the best one by more than `min_improvement`.

    Numbers are better the smaller they are, such as losses; of others, give the negative. It looks at these numbers alone, so
    that what it decides costs nothing beyond them.
    """

    def __init__(self, patience: int = 2, min_improvement: float = 0.0) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1, not {patience!r}")
        if not 0 <= min_improvement < math.inf:
            raise ValueError(f"min_improvement must be zero or positive, not {min_improvement}")
        self.patience, self.min_improvement = patience, min_improvement
        self.best = math.inf
        self.waited = 0  # looks since the best one

    @property
    def stopped(self) -> bool:
        return self.waited >= self.patience

    def __call__(self, value: float) -> bool:
        """Takes in what a look gave, and says whether to stop. What is no number is no improvement."""
        if value < self.best - self.min_improvement:
            self.best, self.waited = float(value), 0
        else:
            self.waited += 1
        return self.stopped

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.waited = float(state["best"]), int(state["waited"])


def _numbers(name: str, values: Any) -> np.ndarray:
    """float64 [n] of a tensor, an array, or several of them one after another."""
    if not isinstance(values, (torch.Tensor, np.ndarray)):
        values = list(values) if isinstance(values, Iterable) else values
        parts = isinstance(values, list) and bool(values) and all(np.ndim(part) for part in map(_array, values))
        values = np.concatenate([_array(part) for part in values]) if parts else values
    array = _array(values).astype(np.float64)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be one number for each example, an array of one axis, not of shape {array.shape}"
        )
    return array


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
