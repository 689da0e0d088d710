"""White-box audits: gradient canaries, trained by the real engine with the mechanism and plan that are audited.

The auditor sees the model after every step, if that is what the mechanism protects, and otherwise the settled last one; it
knows the canaries' directions. One run, many canaries: each is in by a fair coin (Steinke et al. 2023). Many runs, one
canary: `audit_many_runs` (Nasr et al. 2023).

How the canaries are scored is learned on rehearsals: other runs of the same training, with other coins. Nothing of the
run that is tested enters the choice, so that the choice costs no confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from sparsedp.accounting import calibrate
from sparsedp.accounting.ledger import Ledger
from sparsedp.audit.bounds import BY_SIGN, Way, one_run_bound
from sparsedp.audit.epsilon_audit import EpsilonAudit, audit_scores, why_nothing
from sparsedp.audit.evidence import RULES, ChangeRates, Evidence, Noise
from sparsedp.audit.gradient_canaries import GradientCanaries, Place
from sparsedp.audit.numbers import probability
from sparsedp.clipping import Style
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import SparseDPError, suggestion
from sparsedp.mechanisms import DPSGD, Mechanism
from sparsedp.noise import RandomKey
from sparsedp.plan import require_delta
from sparsedp.progress import Advance, Progress, no_progress

_DPSGD = DPSGD()
_SEEDS = 1 << 62
# Among these a rehearsal chooses. To guess fewer canaries would often be better, and sometimes much worse; all of them are for
# canaries that are told apart without a mistake.
_REHEARSED_WAYS: tuple[Way, ...] = ((0.125, 2), (0.125, 1), (0.25, 2), BY_SIGN)
_ONE_RUN, _MANY_RUNS = ("one_run", "one_run_fdp"), ("clopper_pearson", "clopper_pearson_gdp")


@dataclass(frozen=True, kw_only=True)
class AuditedTraining:
    """The training that is audited: its mechanism and plan. The model is the audit's own."""

    noise_multiplier: float
    mechanism: Mechanism = _DPSGD
    steps: int = 4
    sample_rate: float = 1.0
    max_grad_norm: float = 1.0
    clipping: Style = "flat"
    accountant: str = "pld"
    poisson_sampling: bool = True  # False: shuffled batches, accounted for as if they were not

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise SparseDPError(f"steps must be a whole number of at least 1, not {self.steps!r}.")
        if not 0 < self.sample_rate <= 1:
            raise SparseDPError(f"sample_rate must lie between 0 and 1, and may be 1, not {self.sample_rate}.")

    @staticmethod
    def with_epsilon(
        epsilon: float, delta: float, *, mechanism: Mechanism = _DPSGD, steps: int = 4, sample_rate: float = 1.0,
        max_grad_norm: float = 1.0, clipping: Style = "flat", accountant: str = "pld",
    ) -> AuditedTraining:  # fmt: skip
        """The one with the least noise that keeps within (`epsilon`, `delta`)."""

        def ledger(noise_multiplier: float) -> Ledger:
            ledger = Ledger()
            if (setup := mechanism.setup_event()) is not None:
                ledger.record(setup, setup=True)
            ledger.record(mechanism.step_event(noise_multiplier, sample_rate), steps)
            return ledger

        return AuditedTraining(
            noise_multiplier=calibrate(ledger, epsilon, delta, accountant), mechanism=mechanism, steps=steps,
            sample_rate=sample_rate, max_grad_norm=max_grad_norm, clipping=clipping, accountant=accountant,
        )  # fmt: skip

    @property
    def shows_every_step(self) -> bool:
        """Whether the model after every step is protected, and not the last, settled one alone."""
        return not self.mechanism.noise_waits

    def noise(self) -> Noise:
        """What a step, or all steps together where only the last model is protected, does to a canary."""
        std = self.mechanism.gradient_noise(self.noise_multiplier) * self.max_grad_norm
        if self.shows_every_step:
            return Noise(std, self.max_grad_norm, self.sample_rate)
        return Noise(std * self.steps**0.5, self.max_grad_norm * self.steps * self.sample_rate, 1.0)

    def sizes(self, canaries: int) -> tuple[int, int]:
        """Units of the data, at least as many as canaries, and the batch size, with the sampling rate as their ratio."""
        batch_size = int(np.ceil(self.sample_rate * canaries - 1e-9))
        return max(canaries, round(batch_size / self.sample_rate)), batch_size


@dataclass(frozen=True)
class CanaryRun:
    """A training of gradient canaries, and what it says about each."""

    is_in: np.ndarray  # (canaries,) bool
    evidence: Evidence
    batches: list[np.ndarray]  # for each step, the canaries' places that were drawn, whether in or out
    engine: PrivacyEngine

    def scores(self, rule: str, changes: ChangeRates | None) -> tuple[np.ndarray, np.ndarray]:
        """Of the canaries that were in, and of those that were not."""
        scores = self.evidence.scores(rule, changes)
        return scores[self.is_in], scores[~self.is_in]


def train_canaries(
    training: AuditedTraining, canaries: GradientCanaries, is_in: np.ndarray, *, seed: int | None = None,
    rehearsed: Sequence[np.ndarray] | None = None, advance: Advance = lambda count: None,
) -> CanaryRun:  # fmt: skip
    """Trains the canaries that are in, by an engine of its own. `rehearsed` are the `batches` of a rehearsal."""
    units, batch_size = training.sizes(canaries.count)
    model = canaries.module()
    engine = PrivacyEngine(training.accountant, seed)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=canaries.loader(is_in, units, batch_size, training.max_grad_norm),
        noise_multiplier=training.noise_multiplier,
        max_grad_norm=training.max_grad_norm,
        clipping=training.clipping,
        mechanism=training.mechanism.for_tables(canaries.table_rows),
        loss_reduction="sum",
        poisson_sampling=training.poisson_sampling,
    )
    evidence = Evidence(canaries.count, training.noise(), rehearsed if training.shows_every_step else None)
    batches: list[np.ndarray] = []
    before = canaries.coordinates(module.state_dict())
    step = 0
    while step < training.steps:
        for *inputs, places in loader:
            # A canary pulls forth and back: noise that comes again in the next step would cancel, and uncover it. Where only
            # the last model is seen, it pulls one way.
            sign = -1.0 if training.shows_every_step and step % 2 else 1.0
            optimizer.zero_grad()
            (sign * module(*inputs).sum()).backward()
            info = loader.current
            optimizer.step()
            step += 1
            drawn = places.numpy() if info is not None and not info.stand_in else np.zeros(0, np.int64)
            batches.append(drawn[drawn < canaries.count])
            if training.shows_every_step or step == training.steps:
                after = canaries.coordinates(module.state_dict())
                evidence.add(*(sign * (old - new) for old, new in zip(before, after)))
                before = after
            advance(1)
            if step == training.steps:
                break
    engine.close()
    return CanaryRun(is_in, evidence, batches, engine)


def audit_one_run(
    training: AuditedTraining, *, delta: float, canaries: int = 5000, on: Place = "rows", rows: int = 1,
    significance: float = 0.05, method: str = "one_run_fdp", seed: int | None = None, progress: Progress = no_progress,
) -> EpsilonAudit:  # fmt: skip
    """A lower bound on the epsilon of `training` from one run with many canaries, on a "dense" parameter or on `rows` rows each.

    Two rehearsals come before the run: the first says how often rows change and who was in which batch, the second by which
    rule the canaries are told apart best, and how many should be guessed. With a `seed` everything can be repeated exactly.
    """
    probability("significance", significance)
    require_delta(delta, None, allow_large=False)
    made = GradientCanaries(canaries, on, rows)
    key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
    _require_method(method, _ONE_RUN)
    reason = why_nothing(method, canaries, delta, significance, [BY_SIGN])
    runs: list[CanaryRun] = []
    with progress("audit", 3 * training.steps) as advance:
        for number in range(3):
            runs.append(
                train_canaries(
                    training, made, key.generator(number, 0).random(canaries) < 0.5,
                    seed=None if seed is None else _seed(key, number),
                    rehearsed=runs[0].batches if runs else None, advance=advance,
                )
            )  # fmt: skip
    first, second, tested = runs
    changes = ChangeRates(first.evidence.changes, first.is_in)

    def bound(run: CanaryRun, rule: str, way: Way) -> float:
        return one_run_bound(*run.scores(rule, changes), delta, significance, method, [way])

    # Of choices that are equally good, the first.
    rule, way = max(product(RULES, _REHEARSED_WAYS), key=lambda choice: bound(second, *choice))
    inside, outside = tested.scores(rule, changes)
    return EpsilonAudit(
        bound=bound(tested, rule, way),
        significance=significance,
        method=method,
        attack=f"white box, one run, gradient canaries on {_named(on, rows)}",
        rule=f"{rule}; {way[0]:.3g} of the canaries guessed{', all to be in' if way[1] == 1 else ''}",
        reason=reason,
        statement=tested.engine.statement(delta),
        in_scores=inside,
        out_scores=outside,
    )


def audit_many_runs(
    training: AuditedTraining, *, delta: float, runs: int = 4000, on: Place = "dense", rows: int = 1,
    significance: float = 0.05, method: str = "clopper_pearson_gdp", seed: int | None = None,
    progress: Progress = no_progress,
) -> EpsilonAudit:  # fmt: skip
    """A lower bound on the epsilon of `training` from `runs` runs by engines of their own, with one canary in half of them.

    The threshold is chosen on some of the runs, and tested on the others.
    """
    if not isinstance(runs, int) or runs < 2:
        raise SparseDPError(f"runs must be a whole number of at least 2, not {runs!r}.")
    probability("significance", significance)
    require_delta(delta, None, allow_large=False)
    made = GradientCanaries(1, on, rows)
    _require_method(method, _MANY_RUNS)
    scores: tuple[list[float], list[float]] = ([], [])  # out, in
    with progress("audit", runs * training.steps) as advance:
        for number in range(runs):
            is_in = number % 2
            run = train_canaries(
                training, made, np.array([bool(is_in)]),
                seed=None if seed is None else _seed(RandomKey.from_seed(seed), number), advance=advance,
            )  # fmt: skip
            scores[is_in].append(float(run.evidence.scores(RULES[0], None)[0]))
    return audit_scores(
        scores[1], scores[0], statement=run.engine.statement(delta), significance=significance, method=method,
        attack=f"white box, {runs} runs, a gradient canary on {_named(on, rows)} in half of them",
    )  # fmt: skip


def _require_method(method: str, allowed: Sequence[str]) -> None:
    if method not in allowed:
        raise SparseDPError(f"method must be one of {', '.join(allowed)}, not {method!r}{suggestion(method, allowed)}")


def _seed(key: RandomKey, number: int) -> int:
    """Of the engine of run `number`."""
    return int(key.generator(number, 1).integers(_SEEDS, 1)[0])


def _named(on: Place, rows: int) -> str:
    return "the dense parameter" if on == "dense" else "one row of a table" if rows == 1 else f"{rows} rows of a table"
