"""Streams: released frequencies, any mechanism, checkpoints and the statement."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sparsedp import DPSGD, FEST, AdaFEST, CheckpointError, SparseDPError, Stream, UnsupportedError
from sparsedp.accounting import epsilon_of
from sparsedp.capture import Captured
from sparsedp.mechanisms import Mechanism, Step
from sparsedp.plan import PrivacyPlan
from streams import CHOICE, PERIODS, STEPS, calibrated, composed, start, step_event, steps, stream
from support import Clicks, loader_of, make_private, train


def test_running_frequencies_follow_the_spans() -> None:
    """With a generous budget: the most frequent rows of the data so far. Rows that leave keep their values."""
    ids = torch.cat([torch.arange(5).repeat(12), torch.arange(10, 15).repeat(40), torch.arange(20, 25).repeat(80)])
    periods = np.repeat([0, 1, 2], (60, 200, 400))
    rare = torch.randint(50, (660,), generator=torch.Generator().manual_seed(0))
    ids = torch.where(torch.arange(660) % 12 == 0, rare, ids)
    for mechanism in (
        FEST(k=10, epsilon=30.0, frequencies="running"),
        AdaFEST(threshold=-100.0, preselect=FEST(k=10, epsilon=30.0, frequencies="running")),
    ):
        engine, module, optimizer, private = make_private(
            Clicks(), loader_of(ids, torch.randn(660, 3), torch.ones(660), batch_size=20), mechanism=mechanism,
            stream=Stream(periods, "parallel"),
        )  # fmt: skip
        engine.prepare()
        assert set(range(5)) < set(optimizer.prepared["table.weight"].tolist())
        chosen: list[tuple[int, list[int]]] = []
        tables: list[Tensor] = []

        def note(
            chosen: Any = chosen, tables: Any = tables, o: Any = optimizer, p: Any = private, m: Any = module
        ) -> None:
            rows = o.prepared["table.weight"].tolist()
            tables.append(m.table.weight.detach().clone())
            if not chosen or chosen[-1] != (p.current.span, rows):
                chosen.append((p.current.span, rows))

        train(module, optimizer, private, epochs=2, each=note)
        spans = [span for span, _ in chosen]
        assert spans == [0, 1, 2, 0, 1, 2]  # one selection a span, and in the second pass the last one throughout
        assert set(range(5)) | set(range(10, 15)) == set(chosen[1][1])
        assert set(range(10, 15)) | set(range(20, 25)) == set(chosen[2][1])
        assert chosen[3][1] == chosen[4][1] == chosen[5][1] == chosen[2][1]
        assert [entry.scope for entry in engine.ledger.entries if entry.setup] == [0, 1, 2]
        # Row 0 was trained in the first two spans (13 steps) and never after.
        assert not torch.equal(tables[11][0], tables[12][0]) and torch.equal(tables[12][0], tables[-1][0])
        assert torch.equal(tables[2][20], tables[0][20]) and not torch.equal(tables[12][20], tables[-1][20])
        assert optimizer.preparation.state.released["table.weight"].shape == (50,)


def test_noise_is_fresh_in_every_span_and_has_the_scale_that_was_paid_for() -> None:
    data = (torch.zeros(60, dtype=torch.long), torch.randn(60, 3), torch.ones(60))
    mechanism = FEST(k=5, epsilon=0.7, frequencies="running")
    run = make_private(
        Clicks(rows=4000), loader_of(*data, batch_size=10), mechanism=mechanism,
        stream=Stream(np.repeat([0, 1, 2], 20), "sequential"),
    )  # fmt: skip
    sums = [torch.zeros(4000, dtype=torch.float64)]

    def note() -> None:
        if not torch.equal(sums[-1], run[2].preparation.state.released["table.weight"]):
            sums.append(run[2].preparation.state.released["table.weight"].clone())

    train(*run[1:], epochs=2, each=note)
    scale = CHOICE.noise_multiplier  # type: ignore[union-attr]
    noise = [(b - a)[1:].numpy() / scale for a, b in pairwise(sums)]  # nobody touches rows from 1 on
    assert len(noise) == 3
    for part in noise:
        assert stats.kstest(part, "norm").pvalue > 1e-3
        assert stats.kstest(part * 1.2, "norm").pvalue < 1e-3
    assert abs(np.corrcoef(noise)[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frequencies": "daily"}, "'all', 'first' or 'running'"),
        ({"frequencies": "running", "method": "gumbel"}, "Gumbel noise pays for the names"),
        ({"frequencies": "first", "counts": {"a": torch.ones(3)}}, "leave it out"),
        ({"frequencies": "running", "counts": {"a": torch.ones(3)}}, "leave it out"),
    ],
)
def test_frequencies_that_make_no_sense(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FEST(**options)


@pytest.mark.parametrize("frequencies", ["first", "running"])
def test_frequencies_of_spans_need_a_stream(frequencies: Any) -> None:
    chosen = FEST(k=5, frequencies=frequencies)
    for mechanism in (chosen, AdaFEST(preselect=chosen)):
        with pytest.raises(UnsupportedError, match=r"needs data in periods.*sparsedp\.Stream"):
            start(mechanism, stream=None)


@dataclass(frozen=True)
class Rows(Mechanism):
    """A mechanism from before there were streams: it knows nothing of them."""

    name: ClassVar[str] = "rows_of_old"
    selects: ClassVar[bool] = True

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy"

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        return {name: torch.tensor([1, 2]) for name in step.tables}


def test_any_mechanism_works_on_a_stream() -> None:
    run = start(Rows(), "sequential")
    train(*run[1:])
    assert run[0].get_epsilon(1e-5) == start(DPSGD(), "sequential")[0].plan.epsilon(sum(STEPS), 1e-5)


# ---------------------------------------------------------------------- checkpoints


RESUMED: dict[str, Any] = {
    "dpsgd": (DPSGD(), {}),
    "first": (FEST(k=12, epsilon=1.0, frequencies="first"), {}),
    "running": (FEST(k=12, epsilon=1.0, frequencies="running"), {}),
    "running, parts": (FEST(k=12, epsilon=1.0, frequencies="running"), {"max_physical_batch": 3}),
    "running, shuffled": (FEST(k=12, epsilon=1.0, frequencies="running"), {"poisson_sampling": False}),
    "adafest+ running": (AdaFEST(threshold=1.0, preselect=FEST(k=12, epsilon=1.0, frequencies="running")), {}),
}


@pytest.mark.parametrize("name", list(RESUMED))
def test_resumed_equals_uninterrupted(tmp_path: Path, name: str) -> None:
    mechanism, options = RESUMED[name]
    whole = start(mechanism, **options)
    steps(whole, 38)
    for at in (3, 5, 19, 24):  # within a span, at a border, at the end of a pass, in the second
        first, second = (start(mechanism, **options) for _ in range(2))
        steps(first, at)
        first[0].save_checkpoint(tmp_path / "c.pt")
        second[0].load_checkpoint(tmp_path / "c.pt")
        assert second[0].ledger == first[0].ledger
        steps(second, 38 - at)
        assert second[0].ledger == whole[0].ledger and second[0].ledger.steps == 38
        assert second[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)
        for one, other in (
            (whole[1].state_dict(), second[1].state_dict()),
            (whole[2].preparation.state.released, second[2].preparation.state.released),
        ):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        assert whole[2].preparation.state.scopes == second[2].preparation.state.scopes


def test_resumed_with_workers(tmp_path: Path) -> None:
    whole = start(RESUMED["running"][0])
    steps(whole, 38)
    first = start(RESUMED["running"][0], workers=2)
    steps(first, 6)
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = start(RESUMED["running"][0], workers=2)
    second[0].load_checkpoint(tmp_path / "c.pt")
    steps(second, 32)
    assert second[0].ledger == whole[0].ledger
    assert torch.equal(second[1].state_dict()["table.weight"], whole[1].state_dict()["table.weight"])


def test_an_unseeded_run_goes_on_with_fresh_noise_and_pays_no_release_twice(tmp_path: Path) -> None:
    mechanism = FEST(k=12, epsilon=1.0, frequencies="running")
    first = start(mechanism, seed=None)
    steps(first, 7)
    first[0].save_checkpoint(tmp_path / "c.pt")
    sums = []
    for _ in range(2):
        again = start(mechanism, seed=None)
        again[0].load_checkpoint(tmp_path / "c.pt")
        steps(again, 31)
        assert [entry.scope for entry in again[0].ledger.entries if entry.setup] == [0, 1, 2]
        assert again[0].get_epsilon(1e-5) == again[0].plan.epsilon(38, 1e-5)
        sums.append(
            again[2].preparation.state.released["table.weight"] - first[2].preparation.state.released["table.weight"]
        )
    assert not torch.equal(*sums)  # the third span's noise is drawn anew


def test_going_back_keeps_what_was_seen_in_its_scope(tmp_path: Path) -> None:
    run = start(FEST(k=12, epsilon=1.0, frequencies="running"), seed=None)
    engine = run[0]
    steps(run, 4)
    engine.save_checkpoint(tmp_path / "c.pt")
    steps(run, 5)  # the first span anew, as after a break
    steps(run, 7)  # and once more, into the second
    before = engine.get_epsilon(1e-5)
    engine.load_checkpoint(tmp_path / "c.pt")
    assert engine.ledger.steps == 4 and engine.ledger.abandoned == 12
    assert [engine.ledger.taken(s) for s in range(3)] == [14, 2, 0]
    assert engine.get_epsilon(1e-5) == before
    old = run[2].preparation.state.released["table.weight"].clone()
    steps(run, 3)  # comes to the second span again, which is counted again, with other noise, and paid for again
    assert engine.ledger.setups(1) == 2 and not torch.equal(run[2].preparation.state.released["table.weight"], old)
    wanted = [
        composed((step_event(0), 15), (FEST(epsilon=1.0).setup_event(), 1)),  # type: ignore[arg-type]
        composed((step_event(1), 4), (FEST(epsilon=1.0).setup_event(), 2)),  # type: ignore[arg-type]
    ]
    assert engine.get_epsilon(1e-5) == max(epsilon_of(event, 1e-5) for event in wanted)


def test_a_budget_does_not_pay_for_a_second_count(tmp_path: Path) -> None:
    run = calibrated(FEST(k=12, epsilon=0.5, frequencies="running"), "parallel", epochs=3, seed=None)
    engine = run[0]
    steps(run, 4, epochs=9)
    engine.save_checkpoint(tmp_path / "c.pt")
    for _ in range(2):
        engine.load_checkpoint(tmp_path / "c.pt")
        steps(run, 1, epochs=9)  # within the first span, which was counted before the checkpoint
    engine.load_checkpoint(tmp_path / "c.pt")
    steps(run, 2, epochs=9)
    engine.load_checkpoint(tmp_path / "c.pt")
    with pytest.raises(SparseDPError, match=r"already counted these data.*exceed its privacy budget"):
        steps(run, 2, epochs=9)
    assert engine.get_epsilon() <= 2.0


def test_checkpoints_belong_to_their_stream(tmp_path: Path) -> None:
    first = start()
    steps(first, 3)
    first[0].save_checkpoint(tmp_path / "c.pt")
    moved = PERIODS.copy()
    moved[np.flatnonzero(PERIODS == 3)[0]] = 4
    for other in (stream("sequential"), stream(span=2), stream(periods=moved), None):
        with pytest.raises(CheckpointError, match="stream"):
            start(stream=other)[0].load_checkpoint(tmp_path / "c.pt")
    renamed = start(stream=stream(periods=PERIODS * 2 + 100))  # the same spans under other names
    renamed[0].load_checkpoint(tmp_path / "c.pt")
    assert renamed[0].ledger == first[0].ledger


def test_plan_round_trip() -> None:
    for options in ({}, {"composition": "sequential"}, {"stream": None}):
        plan = start(FEST(k=3), **options)[0].plan
        again = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan and again.hash == plan.hash
    text = json.dumps(start()[0].plan.to_dict())
    assert '"sizes": [40, 61, 48]' in text and len(text) < 2000  # no list of everybody's periods


# ---------------------------------------------------------------------- the statement


def test_statement() -> None:
    said = {}
    for composition in ("parallel", "sequential"):
        run = start(FEST(k=9, epsilon=1.0, frequencies="running"), composition)
        train(*run[1:])
        said[composition] = str(run[0].statement(1e-5))
        values = run[0].statement(1e-5).to_dict()
        assert values["epsilon"] == run[0].get_epsilon(1e-5) and values["settings"]["frequencies"] == "running"
        for words in (
            "3 spans of 1 period(s)",
            "sizes (40, 61, 48), are public",
            "more than one example in a span",
            "0.131 to 0.2",
        ):
            assert words in said[composition], words
    assert "composed in parallel" in said["parallel"] and "one span only, as was declared" in said["parallel"]
    assert "protects:     one example;" in said["parallel"] and "Units with data in several spans" in said["parallel"]
    assert "composed in sequence" in said["sequential"] and "at most one example in each span" in said["sequential"]
    assert "one example in every span" in said["sequential"] and "in several spans" not in said["sequential"]
    assert "period" not in str(start(stream=None)[0].statement(1e-5))
