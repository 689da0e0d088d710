"""Canaries: examples that are put into the training data on purpose, to see what the trained model tells of them.

Whoever has a data set says what a canary of it is: an example that looks like the others, drawn from a space that is so
large that no real example lies where it does. Canaries that were not put in are the references to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from sparsedp.errors import SparseDPError
from sparsedp.fingerprint import fingerprint
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey

# Whose a canary is where users are units: one new user's with all its repetitions; each repetition a new user's of its own;
# a user's who is in the data, drawn at random.
Owner = Literal["one", "each", "existing"]
OWNERS: tuple[str, ...] = get_args(Owner)

# Streams of the plan's key.
_EXAMPLES, _HOSTS = 0, 1
# Draws for each canary, and beside, after which no further different one is expected.
_DRAWS, _SPARE_DRAWS = 20, 1000


@runtime_checkable
class MakesCanaries(Protocol):
    """What a training set needs for canaries: this method.

    It may also have `canary_loss(model, canaries)`, a loss for each of them, (n,), under a trained model in eval mode; without
    it, the loss of the run is taken for each by itself.
    """

    def make_canary(self, generator: CipherGenerator) -> Any:
        """One example, as `__getitem__` gives them, made at random by `generator` alone."""


@dataclass(frozen=True)
class CanaryPlan:
    """Everything that decides which canaries there are. Canary i is inserted repetitions[i] times; 0: it is a reference."""

    audit: str  # what the canaries are for
    key: str  # a secret in hexadecimal, from which they are drawn
    repetitions: tuple[int, ...]
    owner: Owner | None = None  # None: examples are units

    def __post_init__(self) -> None:
        if self.owner is not None and self.owner not in OWNERS:
            raise SparseDPError(f"A canary's owner must be one of {', '.join(OWNERS)}, not {self.owner!r}.")
        if not self.repetitions or min(self.repetitions) < 0:
            raise SparseDPError("There must be at least one canary, and none can be inserted less often than never.")

    @staticmethod
    def make(audit: str, repetitions: Sequence[int], owner: Owner | None, seed: int | None = None) -> CanaryPlan:
        """With a new secret; with a `seed`, always the same canaries, for tests."""
        key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed).child(0)
        return CanaryPlan(audit, key.secret.hex(), tuple(int(number) for number in repetitions), owner)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> CanaryPlan:
        try:
            plan = CanaryPlan(values["audit"], values["key"], tuple(values["repetitions"]), values["owner"])
            bytes.fromhex(plan.key)
        except (KeyError, TypeError, ValueError) as error:
            raise SparseDPError(f"This is no plan of canaries: {error!r}.") from error
        return plan

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def insertions(self) -> int:
        return sum(self.repetitions)

    def generator(self, purpose: int) -> CipherGenerator:
        """Random numbers of the plan, the same each time; purposes from 8 on are the audit's own."""
        return RandomKey(bytes.fromhex(self.key), seeded=True).generator(purpose)

    def hosts(self, size: int) -> np.ndarray:
        """For each canary an example of a data set of that size, whose user and period it may take over; int64 [canaries]."""
        return self.generator(_HOSTS).integers(size, len(self.repetitions))


def make_canaries(training: Any, plan: CanaryPlan) -> list[Any]:
    """The canaries of the plan, all different, the same each time for the same data set."""
    if not isinstance(training, MakesCanaries):
        raise SparseDPError(
            f"No canary can be made for these data: {type(training).__name__} has no method make_canary(generator). Give it "
            "one that returns an example made at random, as docs/audit.md shows."
        )
    wanted = len(plan.repetitions)
    generator = plan.generator(_EXAMPLES)
    canaries: dict[str, Any] = {}
    for _ in range(_DRAWS * wanted + _SPARE_DRAWS):
        canary = training.make_canary(generator)
        canaries.setdefault(fingerprint(canary, {}, lambda module: None), canary)
        if len(canaries) == wanted:
            return list(canaries.values())
    raise SparseDPError(
        f"{wanted:,} different canaries and references were asked for, and {type(training).__name__}.make_canary makes "
        f"{len(canaries):,} only. Ask for fewer, or draw them from a larger space."
    )
