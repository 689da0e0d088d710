"""Privacy events: what a step released, and its plain JSON form.

An event says what happened, `epsilon.py` says what it costs. Events are `dp_accounting`'s, plus the
exponential mechanism. Neighbours differ by adding or removing one unit.
"""

import math
from numbers import Integral, Real
from typing import Any

import attr
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
)

from sparsedp.errors import ConfigError, UnsupportedError


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ExponentialMechanismDpEvent(DpEvent):
    """One draw from the exponential mechanism, P[i] proportional to exp(epsilon * u_i / range(u)).

    range(u) is how far one unit can move two scores apart: twice the sensitivity in general, the sensitivity
    itself if a unit moves all scores the same way (counts). The privacy loss then has range epsilon (Durfee &
    Rogers 2019). Gumbel noise of scale range(u) / epsilon and the k largest scores are k such draws.
    """

    epsilon: float


def gaussian_step(noise_multiplier: float, sample_rate: float) -> DpEvent:
    """One step of DP-SGD: N(0, (sigma C)^2) on the sum over a Poisson sample, each unit clipped to norm C."""
    sigma = require_number("noise_multiplier", noise_multiplier, low=0.0)
    rate = require_number("sample_rate", sample_rate, low=0.0, high=1.0)
    if rate == 0:
        return NoOpDpEvent()
    if sigma == 0:
        return NonPrivateDpEvent()
    gaussian = GaussianDpEvent(sigma)
    return gaussian if rate == 1 else PoissonSampledDpEvent(rate, gaussian)


def combined_multiplier(*noise_multipliers: float) -> float:
    """(sum sigma_i^-2)^(-1/2): several Gaussians on one sample are one Gaussian (DP-AdaFEST, section 3.3).

    Only so may they be Poisson-sampled: as separately sampled events they would be charged as if each had a
    sample of its own, which reports far too small an epsilon.
    """
    if not noise_multipliers:
        raise ConfigError("combined_multiplier needs at least one noise multiplier")
    sigmas = [require_number("noise_multiplier", sigma, low=0.0) for sigma in noise_multipliers]
    smallest = min(sigmas)
    if smallest == 0:
        return 0.0
    return smallest / math.sqrt(sum((smallest / sigma) ** 2 for sigma in sigmas))


def split_multiplier(noise_multiplier: float, ratio: float) -> tuple[float, float]:
    """(sigma1, sigma2) with sigma1 / sigma2 = ratio that cost what sigma costs (DP-AdaFEST, section 3.3)."""
    sigma = require_number("noise_multiplier", noise_multiplier, low=0.0)
    ratio = require_number("ratio", ratio, low=0.0, low_open=True)
    second = sigma * math.hypot(1.0, 1.0 / ratio)
    return ratio * second, second


def require_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """`value` as a finite float within the range, or an error that names the argument and the range."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        number = float(value)
        above = number > low if low_open else number >= low
        below = number < high if high_open else number <= high
        if above and below:
            return number
    left = "(" if low_open else "["
    right = ")" if high_open or high == math.inf else "]"
    raise ConfigError(f"{name} must be a number in {left}{low:g}, {high:g}{right}; got {value!r}")


def require_count(name: str, value: Any, *, low: int) -> int:
    """`value` as an int of at least `low`, or an error that names the argument."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}; got {value!r}")
    return int(value)


# The fields of each event that may be recorded, and what each holds. Anything that is not here fails closed.
_FIELDS: dict[type[DpEvent], dict[str, str]] = {
    NoOpDpEvent: {},
    NonPrivateDpEvent: {},
    GaussianDpEvent: {"noise_multiplier": "amount"},
    LaplaceDpEvent: {"noise_multiplier": "amount"},
    ExponentialMechanismDpEvent: {"epsilon": "amount"},
    ZCDpEvent: {"rho": "amount", "xi": "amount"},
    PoissonSampledDpEvent: {"sampling_probability": "probability", "event": "event"},
    SelfComposedDpEvent: {"event": "event", "count": "count"},
    ComposedDpEvent: {"events": "events"},
}
_KINDS = ("amount", "probability", "count", "event", "events")


def register_event(cls: type[DpEvent], fields: dict[str, str]) -> None:
    """Let events of class `cls` be recorded and saved.

    `fields` names every field of the class and its kind: amount (>= 0), probability, count, event or events.
    To be charged, the class also has to be known to an accountant (`pairs.py`, `rdp.py`).
    """
    declared = {field.name for field in attr.fields(cls)}
    if declared != set(fields) or not set(fields.values()) <= set(_KINDS):
        raise ConfigError(
            f"register_event({cls.__name__}): fields must map each of {sorted(declared)} to one of {_KINDS}; "
            f"got {fields}"
        )
    if any(registered.__name__ == cls.__name__ and registered is not cls for registered in _FIELDS):
        raise ConfigError(f"register_event: another event class is already registered as {cls.__name__}")
    _FIELDS[cls] = dict(fields)


def event_to_dict(event: DpEvent) -> dict[str, Any]:
    """The event as plain JSON types: its class name under "event_type", and its fields."""
    fields = _FIELDS.get(type(event))
    if fields is None:
        raise UnsupportedError(f"{type(event).__name__} is not a privacy event that can be recorded: {event!r}")
    out: dict[str, Any] = {"event_type": type(event).__name__}
    for name, kind in fields.items():
        value = getattr(event, name)
        if kind == "event":
            out[name] = event_to_dict(value)
        elif kind == "events":
            out[name] = [event_to_dict(part) for part in value]
        else:
            out[name] = _scalar(f"{type(event).__name__}.{name}", value, kind)
    return out


def event_from_dict(data: Any) -> DpEvent:
    """The inverse of `event_to_dict`. Refuses unknown events, and unknown, missing or impossible fields."""
    if not isinstance(data, dict) or not isinstance(data.get("event_type"), str):
        raise UnsupportedError(f'a privacy event must be an object with an "event_type"; got {data!r}')
    name = data["event_type"]
    cls = next((registered for registered in _FIELDS if registered.__name__ == name), None)
    if cls is None:
        raise UnsupportedError(f"unknown privacy event {name!r}; its cost cannot be accounted for")
    fields = _FIELDS[cls]
    given = set(data) - {"event_type"}
    if given != set(fields):
        raise UnsupportedError(f"{name} has the fields {sorted(fields)}; got {sorted(map(str, given))}")
    values: dict[str, Any] = {}
    for field, kind in fields.items():
        if kind == "event":
            values[field] = event_from_dict(data[field])
        elif kind == "events":
            if not isinstance(data[field], list):
                raise UnsupportedError(f"{name}.{field} must be a list of events; got {data[field]!r}")
            values[field] = [event_from_dict(part) for part in data[field]]
        else:
            values[field] = _scalar(f"{name}.{field}", data[field], kind)
    return cls(**values)


def validate_event(event: DpEvent) -> None:
    """Refuse an event, or a part of it, that is unknown or has an impossible value."""
    event_to_dict(event)


def canonical(event: DpEvent) -> dict[DpEvent, int]:
    """The event as distinct leaves and how often each was composed; {} if it costs nothing.

    Nested compositions are flattened, equal events merged, and Gaussians on the same data made one. Anything
    non-private makes the whole `{NonPrivateDpEvent(): 1}`.
    """
    validate_event(event)
    leaves: dict[DpEvent, int] = {}
    _collect(event, 1, leaves)
    if NonPrivateDpEvent() in leaves:
        return {NonPrivateDpEvent(): 1}
    gaussians = {leaf: count for leaf, count in leaves.items() if isinstance(leaf, GaussianDpEvent)}
    if gaussians:
        smallest = min(leaf.noise_multiplier for leaf in gaussians)
        precision = sum(count * (smallest / leaf.noise_multiplier) ** 2 for leaf, count in gaussians.items())
        leaves = {leaf: count for leaf, count in leaves.items() if leaf not in gaussians}
        leaves[GaussianDpEvent(smallest / math.sqrt(precision))] = 1
    # Sorted, so that the cost does not depend on the order, not even in its last digit.
    return dict(sorted(leaves.items(), key=lambda item: repr(item[0])))


def _collect(event: DpEvent, count: int, leaves: dict[DpEvent, int]) -> None:
    if count == 0 or isinstance(event, NoOpDpEvent):
        return
    if isinstance(event, SelfComposedDpEvent):
        _collect(event.event, event.count * count, leaves)
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            _collect(part, count, leaves)
    elif isinstance(event, PoissonSampledDpEvent):
        _collect_sampled(event, count, leaves)
    elif isinstance(event, ExponentialMechanismDpEvent) and event.epsilon == 0:
        return
    else:
        noiseless = isinstance(event, (GaussianDpEvent, LaplaceDpEvent)) and event.noise_multiplier == 0
        leaf = NonPrivateDpEvent() if noiseless else event
        leaves[leaf] = leaves.get(leaf, 0) + count


def _collect_sampled(event: PoissonSampledDpEvent, count: int, leaves: dict[DpEvent, int]) -> None:
    inner = canonical(event.event)
    rate = event.sampling_probability
    if rate == 0 or not inner:
        return
    if rate == 1 or NonPrivateDpEvent() in inner:
        for leaf, times in inner.items():
            leaves[leaf] = leaves.get(leaf, 0) + times * count
        return
    parts = [leaf if times == 1 else SelfComposedDpEvent(leaf, times) for leaf, times in inner.items()]
    # A tuple, so that the leaf can be a key.
    step = parts[0] if len(parts) == 1 else ComposedDpEvent(tuple(parts))
    leaf = PoissonSampledDpEvent(rate, step)
    leaves[leaf] = leaves.get(leaf, 0) + count


def _scalar(name: str, value: Any, kind: str) -> float | int:
    try:
        if kind == "count":
            return require_count(name, value, low=0)
        return require_number(name, value, low=0.0, high=1.0 if kind == "probability" else math.inf)
    except ConfigError as error:
        raise UnsupportedError(str(error)) from None
