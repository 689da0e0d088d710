"""The auditor works: each of these mistakes in the real code makes an audit contradict the claim, and without it none does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
import torch

from sparsedp import DPSGD, EANA
from sparsedp.accounting.ledger import Ledger
from sparsedp.audit import AuditedTraining, audit_one_run
from sparsedp.clipping import Clipping
from sparsedp.noise import GaussianNoise, RandomKey, Sums
from sparsedp.sampling import loader as loader_module
from sparsedp.sampling.draws import Draws

DELTA = 1e-5
FULL = AuditedTraining.with_epsilon(4.0, DELTA)
SAMPLED = AuditedTraining.with_epsilon(1.0, DELTA, sample_rate=0.1, steps=10)


def _audit(training: AuditedTraining, on: Any) -> Any:
    return audit_one_run(training, delta=DELTA, canaries=4000, on=on, seed=3)


def _half_the_noise(patch: pytest.MonkeyPatch) -> None:
    add = GaussianNoise.add
    patch.setattr(GaussianNoise, "add", lambda self, tensors, std, step: add(self, tensors, std / 2, step))


def _no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clipping, "factors", lambda self, norms: torch.ones_like(norms))


def _same_noise_in_two_steps(patch: pytest.MonkeyPatch) -> None:
    add = GaussianNoise.add
    patch.setattr(GaussianNoise, "add", lambda self, tensors, std, step: add(self, tensors, std, step // 2))


def _same_noise_on_two_parameters(patch: pytest.MonkeyPatch) -> None:
    add = GaussianNoise.add

    def add_alike(self: GaussianNoise, tensors: Mapping[int, Sums], std: float, step: int) -> None:
        for sums in tensors.values():
            add(self, {0: sums}, std, step)

    patch.setattr(GaussianNoise, "add", add_alike)


def _noise_on_touched_rows_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DPSGD, "selects", True)
    patch.setattr(DPSGD, "select", EANA.select)


def _ledger_that_forgets(patch: pytest.MonkeyPatch) -> None:
    events = Ledger.events

    def forgetful(self: Ledger) -> list[dp_accounting.DpEvent]:
        return events(Ledger([replace(entry, count=1) for entry in self.entries]))

    patch.setattr(Ledger, "events", forgetful)


def _fixed_order(patch: pytest.MonkeyPatch, shuffle: bool) -> None:
    def draws(key: RandomKey, spans: Any, size: int, poisson: bool, shuffled: bool, *others: Any) -> Draws:
        return Draws(RandomKey.from_seed(0), spans, size, False, shuffle, *others)

    patch.setattr(loader_module, "Draws", draws)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], AuditedTraining, str]] = {
    "half the noise": (_half_the_noise, FULL, "dense"),
    "half the noise on rows": (_half_the_noise, FULL, "rows"),
    "no clipping": (_no_clipping, FULL, "rows"),
    "same noise in two steps": (_same_noise_in_two_steps, FULL, "rows"),
    "same noise on two parameters": (_same_noise_on_two_parameters, FULL, "dense"),
    "noise on touched rows only": (_noise_on_touched_rows_only, FULL, "rows"),
    "a ledger that forgets steps": (_ledger_that_forgets, FULL, "dense"),
    "batches in the order of the data": (functools.partial(_fixed_order, shuffle=False), SAMPLED, "dense"),
    "batches shuffled by a public seed": (functools.partial(_fixed_order, shuffle=True), SAMPLED, "rows"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, training, on = MUTANTS[name]
    mutate(monkeypatch)
    audit = _audit(training, on)
    assert audit.contradicts, str(audit)
    assert "THE CLAIM IS WRONG" in str(audit)


@pytest.mark.parametrize("on", ["dense", "rows"])
@pytest.mark.parametrize("training", [FULL, SAMPLED], ids=["full batches", "sampled"])
def test_without_a_mistake_nothing_is_contradicted(training: AuditedTraining, on: str) -> None:
    audit = _audit(training, on)
    assert 0 <= audit.bound <= audit.claimed, str(audit)
    assert not audit.contradicts
