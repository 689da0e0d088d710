"""What is decided ahead of the steps, on the data: FEST's rows and released frequencies. It is charged here, once.

Which data are counted is a scope: a span of the stream, or None for all data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sparsedp.accounting.ledger import Ledger
from sparsedp.capture import Capture, RowSpace
from sparsedp.counting import captured_forwards, count_rows
from sparsedp.errors import SparseDPError
from sparsedp.fallback import keep_selection
from sparsedp.frequencies import count_lookups
from sparsedp.noise import PREPARATION, RandomKey
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import PrivateLoader
from sparsedp.tables import OneRank, Ranks, TableSpec, find_tables, table_specs

_log = logging.getLogger("sparsedp")

_LOOKUP_CHUNK = 256  # examples in a forward pass that counts lookups: it may end with a softmax over all rows

CountScope = Callable[[float | None, int | None], dict[str, Tensor]]  # of (clip, scope): as `Mechanism.prepare` counts


@dataclass(frozen=True)
class Prepared:
    """What was decided ahead of the steps so far. A checkpoint holds it."""

    # The rows that the mechanism chose of each table, ascending; None: it was not asked yet.
    rows: dict[str, Tensor] | None = None
    scopes: list[int | None] = field(default_factory=list)  # the data that it has counted for this
    released: dict[str, Tensor] = field(default_factory=dict)  # numbers with noise, for each row of each table

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "scopes": list(self.scopes), "released": dict(self.released)}


def decide(
    plan: PrivacyPlan, tables: Mapping[str, TableSpec], count: CountScope, key: RandomKey, scope: int | None,
    before: Prepared,
) -> Prepared:  # fmt: skip
    """Lets the mechanism choose its rows, on the data of a scope. Charges nothing and changes nothing."""
    share, released = plan.examples_counted(scope), dict(before.released)

    def counted(clip: float | None) -> dict[str, Tensor]:
        return {name: counts / share for name, counts in count(clip, scope).items()}

    scope_key = key.child(PREPARATION, *([] if scope is None else [scope]))
    rows = plan.mechanism.prepare(tables, counted, scope_key, released)
    return Prepared(rows, [*before.scopes, scope], released)


class Preparation:
    """Prepares a run's steps, when they first need it, and remembers what was decided."""

    def __init__(
        self, plan: PrivacyPlan, module: nn.Module, capture: Capture, loader: PrivateLoader, ledger: Ledger,
        tables: Callable[[], Mapping[str, TableSpec]], key: Callable[[], RandomKey], ranks: Ranks | None = None,
        find_threshold: Callable[[], PrivacyPlan] | None = None,
    ) -> None:  # fmt: skip
        """`tables()` are those that are trained at present; `key()` is the noise's key. `ranks` each count a part of the data.

        `find_threshold()` is called where the mechanism waits for a release, and returns the plan that it gives.
        """
        self._find_threshold = find_threshold
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self.state = Prepared()
        self._plan, self._module, self._capture, self._loader, self._ledger = plan, module, capture, loader, ledger
        self._tables, self._key = tables, key

    def prepare(self, span: int | None) -> None:
        """Lets the mechanism decide what it decides ahead of its steps, such as FEST its rows, and charges it.

        Once in a run; with running frequencies, once for each span of the stream, when training first comes to it.
        """
        release = self._plan.frequencies
        if release is not None and release.drawn is not None and not self.state.released:
            self.release_frequencies()  # it was made, so it is paid for, whoever looks at it
        if self._plan.mechanism.looks_at == "release" and self._find_threshold is not None:
            self._plan = self._find_threshold()
        plan, mechanism, scope = self._plan, self._plan.mechanism, self._plan.setup_scope(span)
        if not mechanism.prepares:
            self.state = Prepared({}, self.state.scopes, self.state.released)
            return
        if scope in self.state.scopes:
            return
        event = mechanism.setup_event()
        if event is not None and plan.steps is not None and self._ledger.setups(scope, event):
            raise SparseDPError(
                f"The {mechanism.name} mechanism has already counted these data, after the checkpoint that this run went "
                f"back to. Counting them again would exceed its privacy budget (epsilon {plan.target_epsilon}): go "
                "back to a later checkpoint, or start a new run."
            )
        where = "" if scope is None else f" of span {scope}"
        _log.info("%s goes over the data%s to choose rows", mechanism.name, where)
        decided = decide(plan, self._tables(), self._count, self._key(), scope, self.state)
        if event is not None:
            self._ledger.record(event, setup=True, scope=scope)
        self.state = Prepared(keep_selection(self._module, decided.rows or {}), decided.scopes, decided.released)

    def replan(self, plan: PrivacyPlan) -> None:
        self._plan = plan

    def _count(self, clip: float | None, scope: int | None) -> dict[str, Tensor]:
        tables, inputs = find_tables(self._module), self._plan.mechanism.inputs
        indices = self._loader.indices(scope)
        counts = count_rows(self._module, self._capture, self._loader, tables, inputs, clip, indices, scope)
        self._ranks.add_up_dense(list(counts.values()))
        return counts

    def release_frequencies(self) -> dict[str, Tensor]:
        """The frequencies that the plan releases once: the first call counts, charges and draws them."""
        release = self._plan.frequencies
        if release is None:
            raise SparseDPError("No release is planned: give make_private frequencies=sparsedp.FrequencyRelease(...).")
        if not self.state.released:
            if self._plan.steps is not None and self._ledger.setups(None, release.event):
                raise SparseDPError(
                    "The frequencies were released after the checkpoint that this run went back to. Another release would "
                    f"exceed its privacy budget (epsilon {self._plan.target_epsilon}): go back to a later checkpoint."
                )
            _log.info("The rows' frequencies are counted, to be released once with noise")
            tables = table_specs(dict(self._module.named_parameters()), find_tables(self._module))
            if release.drawn is not None:
                drawn = release.drawn_for(tables)
                self._ledger.record(release.event, setup=True)
                self.state = Prepared(self.state.rows, self.state.scopes, drawn)
                return dict(self.state.released)
            uses = captured_forwards(self._module, self._capture, self._loader, release.inputs, chunk=_LOOKUP_CHUNK)
            counts = count_lookups(uses, RowSpace.of(tables), release.clip)
            self._ranks.add_up_dense(list(counts.values()))
            self._ledger.record(release.event, setup=True)
            drawn = release.draw(counts, self._plan.dataset_size, tables, self._key().child(PREPARATION))
            self.state = Prepared(self.state.rows, self.state.scopes, drawn)
        return dict(self.state.released)
