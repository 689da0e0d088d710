"""What benchmarks share that time several variants at a base setting and along quantities that are varied one at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from benchmarks.speed.peaks import Runs, peaks

S = TypeVar("S")  # a frozen dataclass: what a step is measured at


@dataclass(frozen=True)
class Quantity(Generic[S]):
    """One quantity that is varied while the others stay as they are."""

    title: str
    values: Callable[[S], Iterable[S]]


@dataclass(frozen=True)
class Memory(Generic[S]):
    """What `peaks` is to run for the variants at a setting, and a small setting for the runs before."""

    runs: Callable[[S, list[str]], Runs]
    small: Callable[[S], S]


def measure_varied(
    base: S,
    quantities: Sequence[tuple[str, Quantity[S]]],
    names: list[str],
    fitting: Callable[[S], list[str]],
    measure: Callable[[S, list[str]], list[dict[str, Any]]],
    reason: str,
    say: Callable[[str], None],
    memory: Memory[S] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What `measure(setting, variants)` finds at all settings, and the variants that were left out, for what reason.

    `fitting(setting)` are the variants that can be measured there: none, if the first of `names` is not among them. With
    `memory` each row has its variant's peak memory.
    """
    varied: dict[S, list[str]] = {base: []}
    for name, quantity in quantities:
        for setting in quantity.values(base):
            varied.setdefault(setting, []).append(name)
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for number, (setting, along) in enumerate(varied.items(), 1):
        gc.collect()  # the last setting's tables
        fit = fitting(setting)
        values: dict[str, Any] = asdict(setting)  # type: ignore[call-overload]
        if missing := [name for name in names if name not in fit]:
            left_out.append({"setting": values, "variants": missing, "reason": reason})
        say(f"{number}/{len(varied)}  {setting}: {', '.join(fit) or 'does not fit into memory'}")
        if names[0] in fit:
            measured = measure(setting, fit)
            if memory is not None:
                gc.collect()  # the tables that were timed
                taken = peaks(memory.runs, (setting, fit), (memory.small(setting), fit))
                measured = [{**row, "memory": taken[row["variant"]].beyond} for row in measured]
            rows += [{"setting": values, "base": setting == base, "varied": along, **row} for row in measured]
    return rows, left_out


def off_base(repeats: int, base: bool) -> int:
    """Half as many repeats where a quantity is varied as at the base setting."""
    return repeats if base else -(-repeats // 2)
