"""White-box audits of every mechanism: never above the claim, close to it for DP-SGD, and EANA's leak in the open."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.audit.bound import DELTA, guaranteed

from sparsedp import EANA, FEST, AdaFEST, LazyDP
from sparsedp.audit import AuditedTraining, EpsilonAudit, audit_many_runs, audit_one_run
from sparsedp.audit.evidence import ChangeRates
from sparsedp.audit.gradient_canaries import GradientCanaries
from sparsedp.audit.white_box import train_canaries
from sparsedp.errors import SparseDPError


def _audit(name: str, epsilon: float, canaries: int, **settings: Any) -> EpsilonAudit:
    training = AuditedTraining.with_epsilon(epsilon, DELTA, mechanism=guaranteed(epsilon, canaries)[name])
    return audit_one_run(training, delta=DELTA, canaries=canaries, seed=1, **settings)


@pytest.mark.parametrize("name", guaranteed(1.0, 8))
def test_a_guarantee_is_not_contradicted_and_something_is_shown(name: str) -> None:
    """The short form that runs with the ordinary tests: every mechanism, on rows that only a canary touches."""
    audit = _audit(name, 4.0, 1000)
    assert 0 < audit.bound <= audit.claimed <= 4.0, str(audit)
    assert audit.statement.mechanism == guaranteed(4.0, 1000)[name].name and audit.statement.epsilon == audit.claimed


@pytest.mark.slow
@pytest.mark.parametrize("on", ["dense", "rows"])
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("name", guaranteed(1.0, 8))
def test_a_guarantee_is_never_contradicted(name: str, epsilon: float, on: Any) -> None:
    method = "one_run" if name == "ExponentialSelection" else "one_run_fdp"  # whose curve is not a Gaussian mechanism's
    audit = _audit(name, epsilon, 5000, on=on, method=method)
    assert 0 <= audit.bound <= audit.claimed <= epsilon, str(audit)


@pytest.mark.slow
@pytest.mark.parametrize("name", guaranteed(1.0, 8))
def test_a_guarantee_is_not_contradicted_with_sampled_batches(name: str) -> None:
    mechanism = guaranteed(4.0, 2000)[name]
    training = AuditedTraining.with_epsilon(4.0, DELTA, mechanism=mechanism, sample_rate=0.2, steps=10)
    audit = audit_one_run(training, delta=DELTA, canaries=2000, rows=2, method="one_run", seed=1)
    assert 0 <= audit.bound <= audit.claimed <= 4.0, str(audit)


@pytest.mark.parametrize("on", ["dense", "rows"])
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_one_run_shows_a_good_part_of_dpsgd(epsilon: float, on: Any) -> None:
    audit = _audit("DPSGD", epsilon, 5000, on=on)
    assert 0.3 <= audit.share <= 1, str(audit)


@pytest.mark.slow
def test_many_runs_show_most_of_dpsgd() -> None:
    audit = audit_many_runs(AuditedTraining.with_epsilon(8.0, DELTA, steps=1), delta=DELTA, runs=600, seed=1)
    assert 0.6 <= audit.share <= 1, str(audit)


def test_eana_is_seen_on_rows_that_only_a_canary_touches() -> None:
    """Above what DP-SGD of the same noise may show at all; on the dense parameter both are alike."""
    alike = AuditedTraining.with_epsilon(1.0, DELTA)
    training = replace(alike, mechanism=EANA())
    rows, dense = (
        audit_one_run(training, delta=DELTA, canaries=2000, on=on, method="one_run", seed=1) for on in ("rows", "dense")
    )
    assert rows.bound > 3 > 1.0 >= dense.bound
    assert math.isinf(rows.claimed) and "no epsilon is claimed" in str(rows) and not rows.contradicts


def test_the_leak_of_eana_is_seen_with_several_rows_and_sampled_batches() -> None:
    training = AuditedTraining(noise_multiplier=5.0, mechanism=EANA(), sample_rate=0.1, steps=20)
    assert audit_one_run(training, delta=DELTA, canaries=1000, rows=3, method="one_run", seed=1).bound > 2


def test_a_result_holds_its_claim_its_statement_and_a_sentence() -> None:
    audit = _audit("DPSGD", 4.0, 500)
    assert audit.statement.epsilon == audit.claimed and audit.statement.steps == 4
    assert str(audit).startswith("With 95 % confidence epsilon is at least")
    values = json.loads(audit.to_json())
    assert values["sentence"] == str(audit) and values["canaries"] == 500 and values["statement"]["steps"] == 4
    assert _audit("DPSGD", 4.0, 500) == audit  # a seed repeats everything


def test_too_few_canaries_show_nothing_and_it_says_how_many_would() -> None:
    audit = _audit("DPSGD", 4.0, 4)
    assert audit.bound == 0 and audit.reason is not None
    assert "4 canaries cannot give confidence 0.95" in str(audit)
    needed = int(audit.reason.rpartition(";")[2].split()[0])
    assert _audit("DPSGD", 4.0, needed).reason is None


def test_a_delta_with_which_nothing_can_be_shown_is_told() -> None:
    training = AuditedTraining(noise_multiplier=1.0)
    audit = audit_one_run(training, delta=0.01, canaries=50, method="one_run", significance=0.01, seed=1)
    assert audit.bound == 0 and "no number of canaries" in str(audit)


def test_without_noise_everything_is_seen() -> None:
    audit = audit_one_run(AuditedTraining(noise_multiplier=0.0), delta=DELTA, canaries=500, method="one_run", seed=1)
    assert audit.bound > 3 and math.isinf(audit.claimed)


@pytest.mark.parametrize("on, rows", [("dense", 1), ("rows", 1), ("rows", 3)])
def test_a_canary_moves_its_own_weights_by_the_clipping_norm(on: Any, rows: int) -> None:
    """And whoever is out moves nothing: without noise the sums are exact."""
    is_in = np.array([True, False, True, True])
    canaries = GradientCanaries(4, on, rows)
    training = AuditedTraining(noise_multiplier=0.0, steps=1, max_grad_norm=2.0)
    run = train_canaries(training, canaries, is_in, seed=1)
    scores = run.evidence.scores("likelihood", None)
    np.testing.assert_allclose(scores[is_in], 2.0 * (2.0 - 1.0) / 4.0, rtol=1e-5)
    assert (run.evidence.changes == np.where(is_in, rows if on == "rows" else 1, 0)).all()
    assert run.engine.plan.dataset_size == 4  # whoever is out


def test_mechanisms_that_were_set_up_for_another_model() -> None:
    """Public frequencies and inputs of that model's tables and batches are none of the canaries'."""
    fest = FEST(k=3, counts={"items.weight": torch.ones(9)}, inputs=lambda batch: batch["items"])
    for mechanism in (fest, AdaFEST(threshold=0.0, preselect=fest)):
        training = AuditedTraining(noise_multiplier=1.0, mechanism=mechanism, steps=2)
        run = train_canaries(training, GradientCanaries(6), np.ones(6, bool), seed=1)
        assert (run.evidence.changes > 0).sum() <= 3


def test_the_last_model_alone_is_looked_at_where_only_that_is_protected() -> None:
    run = train_canaries(
        AuditedTraining(noise_multiplier=1.0, mechanism=LazyDP()), GradientCanaries(6), np.ones(6, bool)
    )
    assert run.evidence.steps == 1
    assert (
        train_canaries(AuditedTraining(noise_multiplier=1.0), GradientCanaries(6), np.ones(6, bool)).evidence.steps == 4
    )


def test_no_canary_more_or_less_changes_the_plan() -> None:
    """Neighbours differ in one canary, and in nothing that is public."""
    plans = [
        train_canaries(
            AuditedTraining(noise_multiplier=1.0, sample_rate=0.3, steps=1), GradientCanaries(10), is_in, seed=1
        )
        for is_in in (np.zeros(10, bool), np.ones(10, bool))
    ]
    assert plans[0].engine.plan == plans[1].engine.plan


def test_rates_of_changes_are_those_of_the_rehearsal() -> None:
    is_in = np.arange(200) % 2 == 0
    rates = ChangeRates(np.where(is_in, 3, 0), is_in)
    assert rates.log_ratios(np.array([0]))[0] < -4 and rates.log_ratios(np.array([3]))[0] > 4
    even = ChangeRates(np.full(200, 3), is_in)
    assert even.log_ratios(np.array([3]))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one_run", "one_run_fdp"])
def test_a_canary_that_leaves_no_trace_is_not_found(method: str) -> None:
    """Null coverage of the whole audit, rehearsals included: with noise of 10^4 clipping norms nothing can be told."""
    runs, training = 60, AuditedTraining(noise_multiplier=1e4, steps=2, mechanism=AdaFEST(threshold=1e4))
    alarms = sum(
        audit_one_run(training, delta=DELTA, canaries=200, method=method, seed=seed).bound > 0 for seed in range(runs)
    )
    assert alarms / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize("given, match", [
    ({"canaries": 0}, "count must be a whole number"),
    ({"on": "tables"}, "on must be 'dense' or 'rows'"),
    ({"rows": 0}, "rows must be"),
    ({"significance": 1.0}, "significance must lie"),
    ({"delta": 0.2}, "is above 0.01"),
    ({"method": "clopper_pearson"}, "method must be one of one_run, one_run_fdp"),
])  # fmt: skip
def test_bad_settings_are_told(given: dict[str, Any], match: str) -> None:
    with pytest.raises(SparseDPError, match=match):
        audit_one_run(AuditedTraining(noise_multiplier=1.0), **({"delta": DELTA, "canaries": 10} | given))


@pytest.mark.parametrize(
    "given, match", [({"steps": 0}, "steps must be"), ({"sample_rate": 0.0}, "sample_rate must lie")]
)
def test_bad_trainings_are_told(given: dict[str, Any], match: str) -> None:
    with pytest.raises(SparseDPError, match=match):
        AuditedTraining(noise_multiplier=1.0, **given)


def test_many_runs_need_at_least_two() -> None:
    with pytest.raises(SparseDPError, match="runs must be a whole number of at least 2"):
        audit_many_runs(AuditedTraining(noise_multiplier=1.0), delta=DELTA, runs=1)
