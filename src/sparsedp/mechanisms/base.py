"""What a mechanism is: the rule for selection and noise on tables, and its privacy cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import dp_accounting
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.accounting.events import gaussian_step
from sparsedp.capture import Captured, RowSpace
from sparsedp.clipping import Clipping
from sparsedp.errors import UnsupportedError, suggestion
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.mechanisms.look import Look, PublicCounts
from sparsedp.mechanisms.optimizers import refuse_for_dense_gradients, refuse_for_sparse_gradients
from sparsedp.noise import RandomKey
from sparsedp.tables import LocalExchange, LocalOwner, Owner, Ownership, RowExchange, TableSpec

_REGISTRY: dict[str, type[Mechanism]] = {}


@dataclass(frozen=True)
class Step:
    """What a selection may look at, besides the batch."""

    tables: Mapping[str, TableSpec]  # those that are trained
    noise_multiplier: float
    clipping: Clipping
    scale: Callable[[Captured], float]  # what a captured gradient is multiplied by to be that of the unit's own loss
    key: RandomKey  # this step's own
    prepared: Mapping[str, Tensor]
    # Tells the owners of rows which global rows the units of this process touch. With several processes a batch is one
    # process's part of it, and the selection is of the rows that the process owns: the exchange adds up what the parts say.
    exchange: Callable[[RowSpace, Tensor], RowExchange] = LocalExchange
    first: bool = False  # whether it is the first step since training began or was resumed: the one to warn at


Count = Callable[[float | None], dict[str, Tensor]]
# Which data of a stream are counted: all at once, those of its first span, or those of each span when it begins.
CountedData = Literal["all", "first", "running"]


class Mechanism(ABC):
    """Base of all mechanisms. A subclass is a frozen dataclass of its settings, registered by its `name`."""

    name: ClassVar[str]
    selects: ClassVar[bool] = False  # whether `select` chooses rows; physical batches are then held until it has
    # Whether `select` looks at the clipped sum, which several processes then add up on its rows' owners before it.
    selects_by_sum: ClassVar[bool] = False
    prepares: ClassVar[bool] = False  # whether `prepare` has to run before the first step
    # Whether `select` looks at units through `Captured` alone, as it must if a unit may have several examples.
    takes_users: ClassVar[bool] = False
    # Whether `select` asks `Step.exchange` about the rows that a batch touches, as it must if several processes train together.
    takes_ranks: ClassVar[bool] = False
    # How a mechanism that counts on the data wants a batch turned into the module's arguments; None: all but its last element.
    inputs: Callable[[Any], Any] | None = None
    noise_waits: ClassVar[bool] = False  # whether the tables' noise waits until rows are read (sparsedp.tables.lazy)
    # The setting, a number from 0 on, that lets `select` choose fewer rows the larger it is; None: there is none.
    # `sparsedp plan` and `sparsedp.prediction.find_threshold` look for its value.
    threshold_setting: ClassVar[str | None] = None
    # What a threshold of "auto" is found from; None: there is none to find.
    look_at: Look | None = None
    # The same while it is not found yet.
    looks_at: Look | None = None
    # What that threshold is to give: a gradient size in coordinates, or else a share of touches that is kept.
    gradient_size: float | None = None
    wanted_keep: float = 0.8

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            return
        held = _REGISTRY.get(cls.name)
        # The same class may be made twice: by dataclass(slots=True), or when its module is loaded again.
        if held is not None and (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__}: {held.__module__}.{held.__qualname__} has the name {cls.name!r} "
                "already. Checkpoints and configurations know a mechanism by its name: choose another."
            )
        _REGISTRY[cls.name] = cls

    @property
    @abstractmethod
    def guarantee(self) -> str:
        """What the statement says of this mechanism's promise."""

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The noise multiplier of the clipped sum, out of that of the whole step."""
        return noise_multiplier

    @property
    def rounded(self) -> str:
        """What the statement says of the numbers that are rounded to the grid of their noise."""
        return "each sum with its noise"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the promise takes for granted, beyond what the plan says: sentences for the statement."""
        return ()

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the promise does not cover, beyond what every run leaves out: sentences for the statement."""
        return ()

    @property
    def origin(self) -> str | None:
        """The module that defines a mechanism which is no part of SparseDP; None for one that is."""
        module = type(self).__module__
        return None if module.partition(".")[0] == "sparsedp" else module

    @property
    def counted_data(self) -> CountedData:
        """Which data of a stream `prepare` counts."""
        return "all"

    def prepare(
        self, tables: Mapping[str, TableSpec], count: Count, key: RandomKey, memory: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """What a mechanism with `prepares` decides ahead of its steps: rows of each table, ascending.

        `count(clip)` goes over the data and adds up the units' contributions to each row of each table, as in
        `sparsedp.contribution`; what a unit adds has norm at most `clip`. Whatever is used of it must be in `setup_event`.
        With running `counted_data`, `prepare` is called at every new span, and `memory` is for what has to be known
        then: it is empty at first, and a checkpoint holds it. So only what was released may be put there.
        """
        return {}

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor] | None:
        """The selection: for each table the rows that may change in this step, distinct and ascending.

        None stands for all rows of all tables. `batch` holds the uses of a whole logical batch, in physical ones. Its `uses`
        are by example; what a unit touches and its norms are what `captured.touched(space).pairs()` and
        `captured.squared_norms(uses)` say, and `captured.each(factors)` is what weighted sums take.
        """
        return None

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        """What `select` is expected to choose in a step, before any is taken. Of a mechanism that selects, its own to say."""
        if self.selects:
            raise UnsupportedError(f"There is no rule yet to predict what mechanism {self.name!r} selects.")
        return rows.all_chosen()

    @property
    def contribution_clip(self) -> float | None:
        """What a unit's contribution to the map of rows is clipped to that `select` looks at; None: it looks at none."""
        return None

    @property
    def public_counts(self) -> PublicCounts | None:
        """Counts that nobody has to protect, by which `make_private` judges the settings before a step is taken."""
        return None

    @property
    def prediction_note(self) -> str | None:
        """What a prediction of this mechanism's selection leaves out, if anything."""
        return None

    def step_event(self, noise_multiplier: float, sample_rate: float) -> dp_accounting.DpEvent:
        """The privacy event of one step."""
        return gaussian_step(noise_multiplier, sample_rate)

    def with_threshold(self, threshold: float) -> Mechanism:
        """This mechanism with another value of its `threshold_setting`."""
        assert self.threshold_setting is not None
        return replace(self, **{self.threshold_setting: threshold})  # type: ignore[type-var]

    def owner(self, ownership: Ownership) -> Owner:
        """Who owns the tables' rows: what stands before a read of them, and lets them take their gradients."""
        return LocalOwner(ownership)

    def for_tables(self, rows: Mapping[str, int]) -> Mechanism:
        """This mechanism, set up for a model of which nothing is known but the number of rows of each table."""
        return self

    def refuse_tables(self, names: Collection[str]) -> None:  # noqa: B027
        """Raises `UnsupportedError` if the mechanism cannot train tables with these names, before anything is charged."""

    def refuse_optimizer(
        self, optimizer: Optimizer, tables: Collection[str], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Raises `UnsupportedError` for an optimizer that cannot take the gradients which the mechanism leaves.

        `parameters` are all of the module's by name, `tables` the names of those that are tables.
        """
        if self.selects:
            refuse_for_sparse_gradients(optimizer, tables, parameters)
        else:
            refuse_for_dense_gradients(optimizer)

    def setup_event(self) -> dp_accounting.DpEvent | None:
        """The privacy event of one `prepare`, such as a selection of rows; None if it costs nothing."""
        return None

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        plain = {key: value.to_dict() if isinstance(value, Mechanism) else value for key, value in values.items()}
        return {"name": self.name, **plain}


def mechanism_from_dict(values: dict[str, Any]) -> Mechanism:
    """The mechanism that `to_dict` described."""
    settings = dict(values)
    name = settings.pop("name", None)
    if name not in _REGISTRY:
        hint = suggestion(name, _REGISTRY) or "."
        raise ValueError(f"Unknown mechanism {name!r}; known are {', '.join(sorted(_REGISTRY))}{hint}")
    allowed = {field.name for field in fields(_REGISTRY[name])}  # type: ignore[arg-type]
    if unknown := set(settings) - allowed:
        has = f"its settings are {', '.join(sorted(allowed))}" if allowed else "it has none"
        hint = next(filter(None, (suggestion(key, allowed) for key in sorted(unknown))), ".")
        raise ValueError(f"Mechanism {name!r} has no setting {', '.join(sorted(map(repr, unknown)))}; {has}{hint}")
    nested = {key: mechanism_from_dict(v) if isinstance(v, dict) and "name" in v else v for key, v in settings.items()}
    return _REGISTRY[name](**nested)
