"""Per-unit gradient norms to clip factors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Real
from typing import Literal

from torch import Tensor

from sparsedp.errors import ConfigError

Style = Literal["flat", "automatic"]


@dataclass(frozen=True)
class Clipping:
    """Bounds every unit's gradient, over all parameters together, to the norm `max_norm` (C).

    - flat: factor C / max(norm, C) (Abadi et al. 2016)
    - automatic: factor C / (norm + gamma), normalised gradients (Bu et al. 2022); the norm stays below C
    """

    max_norm: float
    style: Style = "flat"
    gamma: float = 0.01

    def __post_init__(self) -> None:
        if self.style not in ("flat", "automatic"):
            raise ValueError(f"clipping must be 'flat' or 'automatic', not {self.style!r}")
        if isinstance(self.max_norm, bool) or not isinstance(self.max_norm, Real):
            kind = "None" if self.max_norm is None else f"a {type(self.max_norm).__name__}"
            raise ConfigError(
                f"max_grad_norm must be a number above 0, such as 1.0, not {kind}: without a bound on each unit's gradient "
                "there is nothing that noise could hide."
            )
        object.__setattr__(self, "max_norm", float(self.max_norm))
        if not 0 < self.max_norm < float("inf"):
            raise ValueError(f"max_grad_norm must be positive and finite, not {self.max_norm}")
        if not 0 < self.gamma < float("inf"):
            raise ValueError(f"gamma must be positive and finite, not {self.gamma}")

    def factors(self, norms: Tensor) -> Tensor:
        """The factor of each unit, (B,), from the norm of each unit's gradient, (B,)."""
        if self.style == "flat":
            return self.max_norm / norms.clamp_min(self.max_norm)
        return self.max_norm / (norms + self.gamma)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)
