"""The statement: what may be promised about a trained model, in words and numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from sparsedp.plan import PrivacyPlan
from sparsedp.validation import PrivateValidation

_SIZES_SHOWN = 24  # of a stream's spans
_COMPOSED = {
    "parallel": "parallel: the epsilon is that of the costliest span",
    "sequential": "sequence: the epsilon is that of all spans together",
}


@dataclass(frozen=True)
class PrivacyStatement:
    """A promise and everything that it rests on. `str()` gives it as text."""

    epsilon: float
    delta: float
    delta_times_units: float  # how many units a mechanism may publish that this delta permits, in expectation
    steps: int
    abandoned_steps: int  # that ran and are not part of the model; the epsilon includes them
    unit: str
    neighbouring: str
    mechanism: str
    settings: dict[str, Any]  # of the mechanism
    guarantee: str
    noise_multiplier: float
    max_grad_norm: float
    clipping: str
    sampling: str
    composition: str | None  # of the periods of a stream
    accountant: str
    dp_accounting_epsilon: float | None  # of dp_accounting's PLD accountant, where that is more than a tenth above ours
    rounding: str | None  # what keeps floating-point numbers from telling more than the noise lets through
    batches_drawn: int  # from the loader
    batches_without_step: int  # of these
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...]
    charged_steps: int | None = (
        None  # of a plan that may stop early: all that it has, whatever ran; None: those that ran
    )

    @property
    def holds(self) -> bool:
        """Whether there is a finite guarantee at all."""
        return math.isfinite(self.epsilon)

    @property
    def _mechanism(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items() if value is not None)
        return f"{self.mechanism}({settings})" if settings else self.mechanism

    @property
    def _accounting(self) -> str:
        parts = [f"{self.steps} steps by the {self.accountant} accountant"]
        if self.charged_steps is not None and self.charged_steps != self.steps:
            parts.append(f"charged for all {self.charged_steps} that were planned")
        if self.abandoned_steps:
            parts.append(f"with {self.abandoned_steps} more that ran and are not part of this model")
        if self.dp_accounting_epsilon is not None:
            parts.append(f"dp_accounting's PLD, on a coarser grid, gives epsilon = {self.dp_accounting_epsilon:.4g}")
        if self.batches_without_step:  # they cost nothing, and nothing was learned from them
            parts.append(f"of {self.batches_drawn} batches drawn, {self.batches_without_step} had no step")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["epsilon"] = self.epsilon if self.holds else "infinity"
        values["assumptions"] = list(self.assumptions)
        values["not_covered"] = list(self.not_covered)
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> PrivacyStatement:
        """The statement that `to_dict` described."""
        lists = {key: tuple(values[key]) for key in ("assumptions", "not_covered")}
        return PrivacyStatement(**{**values, "epsilon": float(values["epsilon"]), **lists})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        if self.holds:
            promise = f"epsilon = {self.epsilon:.4g} at delta = {self.delta:.3g}"
        else:
            promise = "NO differential privacy guarantee (epsilon is infinite)"
        lines = [
            f"Privacy statement: {promise}",
            f"  protects:     one {self.unit}; neighbouring data sets differ by {self.neighbouring}",
            f"  mechanism:    {self._mechanism}, noise multiplier {self.noise_multiplier:.4g}, "
            f"{self.clipping} clipping at {self.max_grad_norm:.4g}",
            f"  promise:      {self.guarantee}",
            f"  sampling:     {self.sampling}",
            *([] if self.composition is None else [f"  periods:      {self.composition}"]),
            f"  accounting:   {self._accounting}",
            *([] if self.rounding is None else [f"  rounding:     {self.rounding}"]),
        ]
        if self.holds:
            lines.insert(1, f"  delta:        delta x N = {self.delta_times_units:.3g}, N the number of units")
        for title, items in (("assumes", self.assumptions), ("not covered", self.not_covered)):
            lines += [f"  {title + ':':13s} {items[0]}"] + [f"{'':16s}{item}" for item in items[1:]] if items else []
        return "\n".join(lines)


def make_statement(
    plan: PrivacyPlan, *, epsilon: float, delta: float, steps: int, seeded: bool, notes: tuple[str, ...] = (),
    checked: int = 0, abandoned: int = 0, dp_accounting_epsilon: float | None = None, resumed: bool = False,
    signed: bool = False, drawn: int = 0, unit_is: str | None = None, several: bool = False, looks: int = 0,
) -> PrivacyStatement:  # fmt: skip
    """The statement for a run of `steps` steps by `plan`. `notes` are further things that are not covered.

    `checked` is the number of units that `sparsedp.check` looked at, `abandoned` that of steps which are not part of the model.
    `resumed`: the run went on from a checkpoint, which was `signed` with a key or not. `drawn` logical batches came from the
    loader. `unit_is` says what a unit is in these data. `several` processes trained together. `looks` were made at the private
    validation set.
    """
    rate = f"rate {plan.batch_size}/{plan.dataset_size} = {plan.sample_rate:.3g}"
    unit: str = plan.unit
    neighbouring, composition = f"adding or removing one {plan.unit}", None
    assumptions = [
        f"The size of the data set, {plan.dataset_size}, is public.",
        f"Each unit's loss depends on that unit alone. {_verified(checked)}",
    ]
    if plan.unit == "user":
        neighbouring += ", with all of their examples"
        assumptions = [
            f"The number of users, {plan.dataset_size}, is public.",
            "Each example has the user id that it was given, and a person has one id.",
            f"Each example's loss depends on that example alone. {_verified(checked)}",
            "Batches keep the order of the examples that they are made of: neither collate_fn nor the loop sorts them.",
        ]
    if unit_is is not None:
        assumptions.insert(1, unit_is)
    if plan.public_inputs:
        named = ", ".join(plan.public_inputs)
        assumptions.append(f"These inputs do not depend on who is in a batch, as was declared: {named}.")
    if plan.mechanism.origin is not None:
        assumptions.append(
            f"A step costs what the mechanism '{plan.mechanism.name}' says: it is defined in {plan.mechanism.origin}, which is "
            "no part of SparseDP."
        )
    assumptions += plan.mechanism.assumptions
    not_covered = [
        "Choices made by looking at private data: hyper-parameters, vocabularies, early stopping"
        + (" by other numbers than those of the looks." if isinstance(plan.validation, PrivateValidation) else "."),
        "Metrics and step reports, which are computed from private data without noise.",
        *plan.mechanism.not_covered,
        *notes,
    ]
    assumptions += _of_validation(plan)
    if several:
        not_covered.append(
            "What travels between the processes that train: ids, and clipped gradients before there is noise on them. Their "
            "network and their memory are inside of the boundary of trust."
        )
    if plan.stream is not None:
        spans, by_user = len(plan.stream.steps), plan.unit == "user"
        rate = f"rates {min(plan.sample_rates):.3g} to {plan.sample_rate:.3g} within the {spans} spans of periods"
        composition = f"{spans} spans of {plan.stream.span} period(s), composed in {_COMPOSED[plan.stream.composition]}"
        sizes = ", ".join(map(str, plan.stream.sizes[:_SIZES_SHOWN])) + (", ..." if spans > _SIZES_SHOWN else "")
        if plan.stream.sample_rate is None:
            of = ", in users" if by_user else ""
            assumptions.insert(
                1, f"Which periods form the {spans} spans, and the spans' sizes{of} ({sizes}), are public."
            )
        else:
            rate = f"rate {plan.sample_rate:.3g} within each of the {spans} spans of periods, whatever their sizes"
            divided = (
                f"sums are divided by {plan.divisor:g}" if plan.loss_reduction == "mean" else "sums are not divided"
            )
            assumptions.insert(
                1,
                f"Which periods form the {spans} spans is public. How many {plan.unit}s a span has need not be: in all of them "
                f"the rate and the number of steps are the same, and {divided}.",
            )
        if by_user and plan.stream.composition == "parallel":
            neighbouring += ", which are in one span"
            assumptions.insert(0, "Each user has data in one span only, which was seen to be so by their ids.")
        elif by_user:
            neighbouring += " in all spans"
        elif plan.stream.composition == "parallel":
            assumptions.insert(0, "Each unit has data in one span only, as was declared.")
            not_covered.append("Units with data in several spans: each span has this epsilon by itself.")
        else:
            unit = f"{plan.unit} in every span"
            neighbouring = f"adding or removing a unit that has at most one {plan.unit} in each span"
            assumptions.insert(0, f"A unit has at most one {plan.unit} in each span, as was declared.")
        if not by_user:
            not_covered.append(f"Units with more than one {plan.unit} in a span.")
    whom = " of users" if plan.unit == "user" else ""
    if plan.poisson_sampling:
        sampling = f"Poisson{whom}, {rate}"
    else:
        sampling = f"shuffled fixed-size batches{whom}, accounted as Poisson with {rate}"
        assumptions.insert(
            0, "Poisson sampling, which did NOT happen: batches were shuffled. The epsilon is not proven."
        )
    if plan.unit == "user":
        most = plan.max_examples_per_user
        where = "" if plan.stream is None else " in the span"
        sampling += f"; each with {'all' if most is None else f'at most {most}'} of their examples{where}"
    if resumed:
        assumptions += _of_checkpoints(signed)
    if seeded:
        not_covered.insert(0, "Seeded, do not release: whoever knows the seed can take the noise away.")
    guarantee = plan.mechanism.guarantee if plan.noise_multiplier > 0 else "none: there is no noise"
    if plan.frequencies is not None and plan.noise_multiplier > 0:
        guarantee += "; and for the rows' frequencies, released once"
    if isinstance(plan.validation, PrivateValidation) and plan.noise_multiplier > 0:
        guarantee += f"; and for the looks at the validation set (at most {plan.validation.looks}, made {looks})"
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        delta_times_units=delta * plan.dataset_size,
        steps=steps,
        abandoned_steps=abandoned,
        unit=unit,
        neighbouring=neighbouring,
        mechanism=plan.mechanism.name,
        settings={key: value for key, value in plan.mechanism.to_dict().items() if key != "name"},
        guarantee=guarantee,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.clipping.max_norm,
        clipping=plan.clipping.style,
        sampling=sampling,
        composition=composition,
        accountant=plan.accountant.upper(),
        dp_accounting_epsilon=dp_accounting_epsilon,
        rounding=_rounding(plan),
        batches_drawn=drawn,
        batches_without_step=max(0, drawn - steps),
        assumptions=tuple(assumptions),
        not_covered=tuple(not_covered),
        charged_steps=None if plan.validation is None else plan.steps,
    )


def _rounding(plan: PrivacyPlan) -> str | None:
    if plan.noise_multiplier == 0:
        return None
    return (
        f"{plan.mechanism.rounded} is rounded to a power-of-two grid of at most 1/1024 of the noise's deviation, so that the "
        "bits of weights and optimizer state do not tell what was added"
    )


def _verified(checked: int) -> str:
    if checked:
        return f"sparsedp.check found it so, on {checked} of them."
    return "Nothing but sparsedp.check verifies that for the loss function, and no check is on record."


def _of_validation(plan: PrivacyPlan) -> list[str]:
    """What early stopping takes for granted, and what it costs."""
    validation = plan.validation
    if validation is None:
        return []
    whole = (
        "The epsilon is that of the whole plan, however early training stopped: when it did depends on what it learned."
    )
    if not isinstance(validation, PrivateValidation):
        return [f"The validation set that early stopping looked at is public: nobody in it is protected. {whole}"]
    data = "The epsilon adds up both sets, so that it holds for one {0} with data in one of them or in both."
    return [
        f"The number of {plan.unit}s in the private validation set, {validation.units}, is public, and each {plan.unit}'s value "
        f"depends on the weights and that {plan.unit} alone. {data.format(plan.unit)} {whole}"
    ]


def _of_checkpoints(signed: bool) -> list[str]:
    """What a run that went on from a checkpoint takes for granted."""
    edited = "" if signed else " Nobody edited them: without a ledger_key only accidental changes are found."
    return [
        "The checkpoints that this run went on from hold all that ran before: neither the runs that wrote them took further "
        "steps, nor did other runs go on from them, save those whose checkpoints were loaded here." + edited
    ]
