"""What a mechanism is: the rule for selection and noise on tables, and its privacy cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, ClassVar

import dp_accounting
from torch import Tensor

from sparsedp.accounting.events import gaussian_step
from sparsedp.capture import Captured
from sparsedp.noise import RandomKey

_REGISTRY: dict[str, type[Mechanism]] = {}


class Mechanism(ABC):
    """Base of all mechanisms. A subclass is a frozen dataclass of its settings, registered by its `name`."""

    name: ClassVar[str]
    selects: ClassVar[bool] = False  # whether `select` chooses rows; physical batches are then held until it has

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            _REGISTRY[cls.name] = cls

    @property
    @abstractmethod
    def guarantee(self) -> str:
        """What the statement says of this mechanism's promise."""

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The noise multiplier of the clipped sum, out of that of the whole step."""
        return noise_multiplier

    def select(
        self, batch: Sequence[Captured], tables: Mapping[str, Tensor], noise_multiplier: float, key: RandomKey
    ) -> dict[str, Tensor] | None:
        """The selection: for each table the rows that may change in this step, distinct and ascending.

        None stands for all rows of all tables. `batch` holds the uses of a whole logical batch, in physical ones;
        `key` is this step's own.
        """
        return None

    def step_event(self, noise_multiplier: float, sample_rate: float) -> dp_accounting.DpEvent:
        """The privacy event of one step."""
        return gaussian_step(noise_multiplier, sample_rate)

    def setup_event(self) -> dp_accounting.DpEvent | None:
        """The privacy event of what happens once before training, such as a selection of rows; None if nothing."""
        return None

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


def mechanism_from_dict(values: dict[str, Any]) -> Mechanism:
    """The mechanism that `to_dict` described."""
    settings = dict(values)
    name = settings.pop("name", None)
    if name not in _REGISTRY:
        raise ValueError(f"Unknown mechanism {name!r}; known are {', '.join(sorted(_REGISTRY))}.")
    known = {field.name for field in fields(_REGISTRY[name])}  # type: ignore[arg-type]
    if unknown := set(settings) - known:
        raise ValueError(f"Mechanism {name!r} has no setting {', '.join(sorted(map(repr, unknown)))}.")
    return _REGISTRY[name](**settings)
