"""The ledger: what really ran, as privacy events."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from sparsedp.accounting.events import event_from_dict, event_to_dict, require_count, validate_event
from sparsedp.errors import CheckpointError, SparseDPError

_VERSION = 3
# How entries of different scopes compose: see `Ledger`.
Composition = Literal["sequential", "parallel"]


@dataclass(frozen=True)
class Entry:
    """`count` releases of the same event in a row.

    `setup` marks a cost beside the steps; `abandoned` marks what ran, but was thrown away by going back to a
    checkpoint: it is no step of the model that is left, but whoever went back has seen it. `scope` is the span of periods
    whose data were used; None stands for all data.
    """

    event: DpEvent
    count: int
    setup: bool = False
    abandoned: bool = False
    scope: int | None = None


@dataclass
class Ledger:
    """Events in the order they happened. Ledgers are equal if the same events happened in the same order.

    With `composition` "sequential" a unit may have data in every scope, and everything composes. With "parallel" a unit
    has data in one scope only: neighbours differ in that one, all other scopes' events have the same law on both, and
    what composes is that scope's entries and those without a scope.
    """

    entries: list[Entry] = field(default_factory=list)
    composition: Composition = "sequential"

    def record(self, event: DpEvent, count: int = 1, *, setup: bool = False, scope: int | None = None) -> None:
        """Add `count` releases of `event`; an event equal to the last one only raises its count."""
        count = require_count("count", count, low=0)
        if count == 0:
            return
        last = self.entries[-1] if self.entries else None
        if last is not None and last == Entry(event, last.count, setup, scope=scope):
            self.entries[-1] = Entry(last.event, last.count + count, setup, scope=scope)
            return
        validate_event(event)
        self.entries.append(Entry(event, count, setup, scope=scope))

    @property
    def steps(self) -> int:
        """Training steps of the model at hand; one-off costs and abandoned steps are not."""
        return sum([entry.count for entry in self.entries if not entry.setup and not entry.abandoned])

    @property
    def abandoned(self) -> int:
        """Steps that ran, but are not part of the model at hand."""
        return sum(entry.count for entry in self.entries if entry.abandoned and not entry.setup)

    def taken(self, scope: int | None) -> int:
        """Steps on the data of a scope, abandoned ones included."""
        return sum(entry.count for entry in self.entries if entry.scope == scope and not entry.setup)

    def setups(self, scope: int | None, event: DpEvent | None = None) -> int:
        """Releases beside the steps on the data of a scope, abandoned ones included; with `event`, those that were this one."""
        counted = [entry for entry in self.entries if entry.scope == scope and entry.setup]
        return sum(entry.count for entry in counted if event is None or entry.event == event)

    def go_back(self, saved: Ledger, common: Ledger) -> None:
        """Takes over a saved ledger, and keeps on record what ran here and is not in it.

        `common` is an earlier state of this ledger: the saved one has it in common with this one as far as it goes.
        """
        besides = _counted(self)
        besides.subtract(_counted(common) & _counted(saved))
        events = {_key(entry): entry for entry in self.entries}
        left = [replace(events[key], count=n, abandoned=True) for key, n in besides.items() if n > 0]
        self.entries = [*saved.entries, *left]

    def events(self) -> list[DpEvent]:
        """What a unit can have been part of, for an accountant: the costliest of these events is the ledger's cost."""
        scopes = sorted({entry.scope for entry in self.entries if entry.scope is not None})
        if self.composition == "sequential" or not scopes:
            return [_composed(self.entries)]
        return [_composed([entry for entry in self.entries if entry.scope in (None, scope)]) for scope in scopes]

    def holds(self, other: Ledger) -> bool:
        """Whether everything that is in the other ledger is in this one."""
        return not _counted(other) - _counted(self)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types, with a digest of them, which finds accidents; whoever edits them on purpose edits it too."""
        entries = [
            {
                "event": event_to_dict(entry.event),
                "count": entry.count,
                "setup": entry.setup,
                "abandoned": entry.abandoned,
                "scope": entry.scope,
            }
            for entry in self.entries
        ]
        return {
            "version": _VERSION,
            "composition": self.composition,
            "entries": entries,
            "digest": _digest(self.composition, entries),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the record by a saved one; if any of it is malformed or unknown, nothing changes."""
        keys = {"version", "composition", "entries", "digest"}
        if not isinstance(state, dict) or state.get("version") != _VERSION or set(state) != keys:
            raise CheckpointError(f"not a ledger of version {_VERSION}: {state!r:.200}")
        if not isinstance(state["entries"], list):
            raise CheckpointError("the ledger's entries must be a list")
        composition = state["composition"]
        if composition not in get_args(Composition):
            raise CheckpointError(f"the ledger's composition must be sequential or parallel; got {composition!r}")
        entries = [_load_entry(index, entry) for index, entry in enumerate(state["entries"])]
        if state["digest"] != _digest(composition, state["entries"]):
            raise CheckpointError("the ledger was changed after it was written: its digest is another one's")
        self.entries, self.composition = entries, composition


def _digest(composition: str, entries: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([composition, entries], sort_keys=True).encode()).hexdigest()


def _counted(ledger: Ledger) -> Counter[str]:
    """How often each event happened, abandoned or not."""
    counts: Counter[str] = Counter()
    for entry in ledger.entries:
        counts[_key(entry)] += entry.count
    return counts


def _key(entry: Entry) -> str:
    """An event, whether it was a setup, and its scope, as text: composed events cannot be hashed."""
    return json.dumps([event_to_dict(entry.event), entry.setup, entry.scope], sort_keys=True)


def _composed(entries: list[Entry]) -> DpEvent:
    return ComposedDpEvent([SelfComposedDpEvent(entry.event, entry.count) for entry in entries])


def _load_entry(index: int, data: Any) -> Entry:
    fields = {"event", "count", "setup", "abandoned", "scope"}
    if not isinstance(data, dict) or set(data) != fields:
        raise CheckpointError(f"ledger entry {index} must have the fields {sorted(fields)}; got {data!r:.200}")
    for flag in ("setup", "abandoned"):
        if not isinstance(data[flag], bool):
            raise CheckpointError(f"ledger entry {index}: {flag} must be true or false; got {data[flag]!r}")
    try:
        count = require_count("count", data["count"], low=1)
        scope = None if data["scope"] is None else require_count("scope", data["scope"], low=0)
        return Entry(event_from_dict(data["event"]), count, data["setup"], data["abandoned"], scope)
    except SparseDPError as error:
        raise CheckpointError(f"ledger entry {index}: {error}") from error
