"""What a run may promise: its ledger, charged as its plan says, and what its statement has to mention."""

from __future__ import annotations

import math

from sparsedp.accounting.epsilon import dp_accounting_above, epsilon_of
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.registry import find_accountant
from sparsedp.plan import PrivacyPlan, default_delta, require_delta
from sparsedp.statement import PrivacyStatement, make_statement
from sparsedp.validation import PrivateValidation


class Promise:
    """`accountant` is the name of a registered one. A delta above 0.01 is refused unless `allow_large_delta`."""

    def __init__(self, accountant: str, allow_large_delta: bool) -> None:
        self.accountant = find_accountant(accountant).name
        self.ledger = Ledger()
        self.notes: list[str] = []  # on what no epsilon covers, such as a vocabulary counted on private data
        self.unit_is: str | None = None  # what an example or a user is, where that is not plain
        self.checked = 0  # units that sparsedp.check looked at
        self.resumed = False  # whether a checkpoint was loaded
        self._allow_large_delta = allow_large_delta

    def add_notes(self, notes: list[str]) -> None:
        """Those that are not there yet."""
        self.notes += [note for note in notes if note not in self.notes]

    def require_delta(self, delta: float, units: int | None) -> float:
        return require_delta(delta, units, self._allow_large_delta)

    def delta(self, plan: PrivacyPlan | None, delta: float | None) -> float:
        """`delta`, or the plan's target, or 0.1 / N rounded down to one digit, N the number of units."""
        units = None if plan is None else plan.dataset_size
        if delta is None and plan is not None:
            delta = plan.target_delta
        if delta is None and units is not None:
            delta = default_delta(units)
        if delta is None:
            raise ValueError("delta is needed: there is no plan with a target delta yet")
        return self.require_delta(delta, units)

    def epsilon(self, plan: PrivacyPlan | None, delta: float | None) -> float:
        return epsilon_of(self._charged(plan), self.delta(plan, delta), self.accountant)

    def _charged(self, plan: PrivacyPlan | None) -> Ledger:
        """What a promise rests on. No more than the plan can have run, abandoned steps and looks included."""
        if plan is None or plan.validation is None or plan.steps is None or not self.ledger.entries:
            return self.ledger
        return plan.ledger(plan.steps)

    def looks(self, plan: PrivacyPlan) -> int:
        """At the private validation set, abandoned ones included."""
        validation = plan.validation
        return validation.looks_made(self.ledger) if isinstance(validation, PrivateValidation) else 0

    def statement(
        self, plan: PrivacyPlan, delta: float | None, *, seeded: bool, signed: bool, drawn: int, several: bool
    ) -> PrivacyStatement:
        """`seeded`: the key is not secret. `signed`: checkpoints are. `drawn`: batches, by the loader. `several`: processes."""
        delta, charged = self.delta(plan, delta), self._charged(plan)
        epsilon = epsilon_of(charged, delta, self.accountant)
        compared = find_accountant(self.accountant).compared_with_dp_accounting and math.isfinite(epsilon)
        return make_statement(
            plan,
            epsilon=epsilon,
            delta=delta,
            steps=self.ledger.steps,
            seeded=seeded,
            notes=tuple(self.notes),
            unit_is=self.unit_is,
            checked=self.checked,
            abandoned=self.ledger.abandoned,
            dp_accounting_epsilon=dp_accounting_above(charged, delta, epsilon / 0.9) if compared else None,
            resumed=self.resumed,
            signed=signed,
            drawn=drawn,
            several=several,
            looks=self.looks(plan),
        )
