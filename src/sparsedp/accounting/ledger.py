"""The ledger: what really ran, as privacy events."""

from dataclasses import dataclass, field
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from sparsedp.accounting.events import event_from_dict, event_to_dict, require_count, validate_event
from sparsedp.errors import CheckpointError, SparseDPError

_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """`count` releases of the same event in a row; `setup` marks a one-off cost, which is not a step."""

    event: DpEvent
    count: int
    setup: bool = False


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
        if last is not None and last.setup == setup and last.event == event:
            self.entries[-1] = Entry(last.event, last.count + count, setup)
            return
        validate_event(event)
        self.entries.append(Entry(event, count, setup))

    @property
    def steps(self) -> int:
        """Training steps on record; one-off costs are not steps."""
        return sum(entry.count for entry in self.entries if not entry.setup)

    def event(self) -> ComposedDpEvent:
        """Everything on record as one event, for an accountant."""
        return ComposedDpEvent([SelfComposedDpEvent(entry.event, entry.count) for entry in self.entries])

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        entries = [
            {"event": event_to_dict(entry.event), "count": entry.count, "setup": entry.setup} for entry in self.entries
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
    if not isinstance(data, dict) or set(data) != {"event", "count", "setup"}:
        raise CheckpointError(f"ledger entry {index} must have the fields event, count and setup; got {data!r:.200}")
    if not isinstance(data["setup"], bool):
        raise CheckpointError(f"ledger entry {index}: setup must be true or false; got {data['setup']!r}")
    try:
        count = require_count("count", data["count"], low=1)
        return Entry(event_from_dict(data["event"]), count, data["setup"])
    except SparseDPError as error:
        raise CheckpointError(f"ledger entry {index}: {error}") from error
