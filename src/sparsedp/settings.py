"""What is asked of a private run: the name, default and meaning of each setting, and what it must be. Written once, here.

Settings that decide what is promised to whom are apart from those that decide how fast it goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, TypeVar, get_args

from sparsedp.clipping import Clipping, Style
from sparsedp.errors import UnsupportedError, suggestion
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import DPSGD, Mechanism
from sparsedp.sampling import Stream, StreamPlan, Users, users_of
from sparsedp.validation import PrivateValidation, Validation

Unit = Literal["example", "user"]
LossReduction = Literal["mean", "sum"]

_DPSGD = DPSGD()
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class PlannedSettings:
    """The settings that the plan holds as they were given, so that its hash ties a checkpoint to them."""

    mechanism: Mechanism = _DPSGD
    unit: Unit = "example"
    loss_reduction: LossReduction = "mean"
    poisson_sampling: bool = True
    stream: Stream | StreamPlan | None = None
    max_examples_per_user: int | None = None
    frequencies: FrequencyRelease | None = None
    validation: Validation | None = None
    public_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(f"mechanism must be a sparsedp mechanism such as sparsedp.DPSGD(), not {self.mechanism!r}")
        if self.unit not in get_args(Unit):
            raise UnsupportedError(f"unit={self.unit!r} is not available: the unit is an 'example' or a 'user'.")
        if self.loss_reduction not in get_args(LossReduction):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {self.loss_reduction!r}")
        if self.unit == "example" and self.max_examples_per_user is not None:
            raise UnsupportedError("max_examples_per_user is for unit='user'; with unit='example' leave it out.")
        if self.unit == "user" and self.mechanism.selects and not self.mechanism.takes_users:
            raise UnsupportedError(
                f"Mechanism {self.mechanism.name!r} does not say that it looks at users rather than at examples (takes_users)."
            )
        if self.frequencies is not None and (self.stream is not None or self.mechanism.setup_event() is not None):
            raise UnsupportedError(
                "frequencies together with a stream, or with a mechanism that counts the data itself, is not available."
            )
        if not (self.validation in (None, "public") or isinstance(self.validation, PrivateValidation)):
            raise TypeError(
                'validation must be "public" or sparsedp.PrivateValidation(units=..., looks=..., std=...), not '
                f"{self.validation!r}"
            )
        if isinstance(self.validation, PrivateValidation) and self.stream is not None:
            raise UnsupportedError(
                "A private validation set together with a stream is not available: a unit may have data in the set and in the "
                "spans. Leave one of them out, or validate on public data."
            )
        if self.mechanism.look_at == "release" and self.frequencies is None:  # also with what was found on it before
            raise UnsupportedError(
                'look_at="release" needs a release: give make_private frequencies=sparsedp.FrequencyRelease(epsilon=...), whose '
                "cost a target epsilon then includes (privacy.frequencies in a configuration)."
            )
        if self.stream is None and self.mechanism.counted_data != "all":
            raise UnsupportedError(
                f"frequencies={self.mechanism.counted_data!r} needs data in periods: give make_private a "
                "stream=sparsedp.Stream(periods, composition=...), or use frequencies='all'."
            )
        if isinstance(self.public_inputs, str):
            raise TypeError(f"public_inputs must be a sequence of names, such as ({self.public_inputs!r},)")
        object.__setattr__(self, "public_inputs", tuple(self.public_inputs))


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(PlannedSettings):
    """What `make_private` and `make_private_with_epsilon` are told about privacy, beside the noise or the target.

    max_grad_norm: the norm that each unit's gradient, over all parameters together, is clipped to.
    mechanism: the rule for selection and noise on tables; by default `DPSGD()`.
    clipping: "flat", "automatic", or a `Clipping`, whose norm is replaced by `max_grad_norm`.
    loss_reduction: "mean" or "sum", as the loop's loss is made of the losses of a batch's examples.
    unit: what is protected, an "example" or a "user". With "user" all examples of a user are protected together. The loader's
        batch size, `len(loader)` and the default delta then count users.
    users: with unit="user", the user's id, a whole number, for each example of the data set; None: the data set's own
        attribute `users`.
    max_examples_per_user: each user that is drawn brings all of their examples (None), or so many, chosen anew at random;
        their gradients are added up and clipped as one.
    poisson_sampling: whether each unit joins a batch by itself, as the accounting assumes; otherwise the loader's own batches
        are used, and the statement says so.
    stream: a `Stream`, if the data come in periods: an epoch is then one pass over its spans of periods, in order of time.
    frequencies: a `FrequencyRelease`, if `release_frequencies` is to be called, once: a target epsilon includes its cost.
    validation: what early stopping looks at. A `PrivateValidation`, whose looks `engine.validate` makes: a target epsilon
        includes the cost of all of them, and its units are protected as those that are trained on. "public": a set that
        protects nobody, which costs nothing. Either way the epsilon is that of the whole plan, however early the run stops.
    public_inputs: names of what does not depend on who is in a batch, although it is not the same for every batch or comes
        from the loop: arguments of forward() such as "temperature", entries of a batch such as "batch['step']". Whatever
        else a batch or forward() has without an axis of examples is refused, by its name. A Python number that the loop
        passes to forward() counts as declared.
    """

    max_grad_norm: float
    clipping: Style | Clipping = "flat"
    stream: Stream | None = None
    users: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.stream is not None and not isinstance(self.stream, Stream):
            raise TypeError(f"stream must be a sparsedp.Stream, not {type(self.stream).__name__}")
        super().__post_init__()
        if self.unit == "example" and self.users is not None:
            raise UnsupportedError("users is for unit='user'; with unit='example' leave it out.")
        self.bound()  # what it refuses is refused with all other settings

    def bound(self) -> Clipping:
        """The bound on a unit's gradient, as the plan holds it."""
        clipping = self.clipping if isinstance(self.clipping, Clipping) else Clipping(self.max_grad_norm, self.clipping)
        return replace(clipping, max_norm=self.max_grad_norm)

    def users_of(self, dataset: Any) -> Users | None:
        """Whose each example of the data is; None if the units are examples."""
        return None if self.unit == "example" else users_of(dataset, self.users, self.max_examples_per_user)


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    """How a run is carried out. The law of its result does not depend on it, and neither plan nor statement holds it.

    max_physical_batch: batches of more examples than that reach the loop in parts; None: all are whole.
    replace_recurrent: whether torch's LSTM, GRU and RNN layers, whose fused kernels hide their uses, run as those of
        `sparsedp.nn` until `engine.close()`; the same objects, weights and names.
    own_data: where several processes train together, whether each has a part of the data that no other has; otherwise all can
        read the same data set, and each reads its share of every batch.
    """

    max_physical_batch: int | None = None
    replace_recurrent: bool = False
    own_data: bool = False


class _RequiredKeywords(TypedDict):
    max_grad_norm: float


class SettingsKeywords(_RequiredKeywords, total=False):
    """The settings as keywords, for type checkers and editors, which cannot read them off the classes above."""

    mechanism: Mechanism | None
    clipping: Style | Clipping
    loss_reduction: LossReduction
    unit: Unit
    poisson_sampling: bool
    max_physical_batch: int | None
    replace_recurrent: bool
    own_data: bool
    stream: Stream | None
    users: Any
    max_examples_per_user: int | None
    frequencies: FrequencyRelease | None
    validation: Validation | None
    public_inputs: Sequence[str]


def read_settings(
    given: SettingsKeywords | Mapping[str, Any], function: str
) -> tuple[PrivacySettings, ExecutionSettings]:
    """Keywords as settings; mechanism=None stands for the default. `function` is who takes them, for an error."""
    values: dict[str, Any] = {**given}
    names = setting_names()
    for name in values:
        if name not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{suggestion(name, names)}")
    for setting in _all_settings():
        if setting.default is MISSING and setting.name not in values:
            raise TypeError(f"{function}() is missing the required keyword argument {setting.name!r}")
    if values.get("mechanism") is None:
        values.pop("mechanism", None)
    speed = {setting.name: values.pop(setting.name) for setting in fields(ExecutionSettings) if setting.name in values}
    return PrivacySettings(**values), ExecutionSettings(**speed)


def takes_settings(function: Function) -> Function:
    """Lets `help` and `inspect` show the settings of a function that takes them as keywords, for `read_settings`."""
    signature = inspect.signature(function)
    taken = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    settings = [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if setting.default is MISSING else setting.default,
            annotation=setting.type,
        )
        for setting in _all_settings()
    ]
    function.__signature__ = signature.replace(parameters=[*taken, *settings])  # type: ignore[attr-defined]
    meanings = [inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[2] for kind in _KINDS]
    function.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__ or ""), "\n".join(meanings)])
    return function


def setting_names() -> list[str]:
    return [setting.name for setting in _all_settings()]


_KINDS = (PrivacySettings, ExecutionSettings)


def _all_settings() -> list[Field[Any]]:
    """Those without a default first."""
    settings = [setting for kind in _KINDS for setting in fields(kind)]
    return sorted(settings, key=lambda setting: setting.default is not MISSING)
