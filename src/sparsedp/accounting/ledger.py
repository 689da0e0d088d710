"""The ledger: what really ran, as privacy events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from sparsedp.accounting.events import event_from_dict, event_to_dict, require_count, validate_event
from sparsedp.errors import CheckpointError, SparseDPError

_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """`count` releases of the same event in a row.

    `setup` marks a one-off cost, which is not a step; `abandoned` marks what ran, but was thrown away by going back to a
    checkpoint: it is no step of the model that is left, but whoever went back has seen it.
    """

    event: DpEvent
    count: int
    setup: bool = False
    abandoned: bool = False


@dataclass
class Ledger:
    """Events in the order they happened. Ledgers are equal if the same events happened in the same order."""

    entries: list[Entry] = field(default_factory=list)

    def record(self, event: DpEvent, count: int = 1, *, setup: bool = False) -> None:
        """Add `count` releases of `event`; an event equal to the last one only raises its count."""
        count = require_count("count", count, low=0)
        if count == 0:
            return
        last = self.entries[-1] if self.entries else None
        if last is not None and last.setup == setup and not last.abandoned and last.event == event:
            self.entries[-1] = Entry(last.event, last.count + count, setup)
            return
        validate_event(event)
        self.entries.append(Entry(event, count, setup))

    @property
    def steps(self) -> int:
        """Training steps of the model at hand; one-off costs and abandoned steps are not."""
        return sum(entry.count for entry in self.entries if not entry.setup and not entry.abandoned)

    @property
    def abandoned(self) -> int:
        """Steps that ran, but are not part of the model at hand."""
        return sum(entry.count for entry in self.entries if entry.abandoned and not entry.setup)

    def go_back(self, saved: Ledger, *, same_run: bool) -> None:
        """Takes over a saved ledger, and keeps on record what ran besides it.

        With `same_run` the saved ledger is an earlier state of this one; otherwise everything here ran besides it.
        """
        left = Counter({(entry.event, entry.setup): 0 for entry in self.entries})
        for entry in self.entries:
            left[entry.event, entry.setup] += entry.count
        if same_run:
            for entry in saved.entries:
                left[entry.event, entry.setup] -= entry.count
        besides = [Entry(event, count, setup, abandoned=True) for (event, setup), count in left.items() if count > 0]
        self.entries = [*saved.entries, *besides]

    def event(self) -> ComposedDpEvent:
        """Everything on record as one event, for an accountant."""
        return ComposedDpEvent([SelfComposedDpEvent(entry.event, entry.count) for entry in self.entries])

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        entries = [
            {
                "event": event_to_dict(entry.event),
                "count": entry.count,
                "setup": entry.setup,
                "abandoned": entry.abandoned,
            }
            for entry in self.entries
        ]
        return {"version": _VERSION, "entries": entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the record by a saved one; if any of it is malformed or unknown, nothing changes."""
        if not isinstance(state, dict) or state.get("version") != _VERSION or set(state) != {"version", "entries"}:
            raise CheckpointError(f"not a ledger of version {_VERSION}: {state!r:.200}")
        if not isinstance(state["entries"], list):
            raise CheckpointError("the ledger's entries must be a list")
        self.entries = [_load_entry(index, entry) for index, entry in enumerate(state["entries"])]


def _load_entry(index: int, data: Any) -> Entry:
    fields = {"event", "count", "setup", "abandoned"}
    if not isinstance(data, dict) or set(data) != fields:
        raise CheckpointError(f"ledger entry {index} must have the fields {sorted(fields)}; got {data!r:.200}")
    for flag in ("setup", "abandoned"):
        if not isinstance(data[flag], bool):
            raise CheckpointError(f"ledger entry {index}: {flag} must be true or false; got {data[flag]!r}")
    try:
        count = require_count("count", data["count"], low=1)
        return Entry(event_from_dict(data["event"]), count, data["setup"], data["abandoned"])
    except SparseDPError as error:
        raise CheckpointError(f"ledger entry {index}: {error}") from error
