"""`sparsedp sweep --private`: what is drawn, what it costs, what is left of it, and attacks on that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsedp.accounting.search import search_epsilon
from sparsedp.cli import privatesearch
from sparsedp.cli.config.sweepfile import expand, load_sweep
from sparsedp.cli.main import main
from sparsedp.cli.privatesearch import Search
from sparsedp.cli.sweepjobs import Outcome

pytestmark = pytest.mark.filterwarnings("ignore::sparsedp.UtilityWarning")  # small data
BASE = """
data: {kind: generated, rows: 400, scale: 0.01, held_out: 0.25}
model: {kind: pctr, hidden: 4, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 100, log_every: 1, check: false}
privacy: {noise_multiplier: 2, target_delta: 1.0e-4, max_grad_norm: 2}
"""
SWEEP = """
base: base.yaml
reference: rates
variants:
  rates: {grid: {optimizer.lr: [0.01, 0.1]}}
  adafest: {set: {privacy.mechanism: {name: adafest, threshold: 2.0}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path / "search"


def search(*more: str) -> int:
    return main(["sweep", "sweep.yaml", "--private", "--run-dir", "search", "--jobs", "1", *more])


def drawn(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "private" / "search.json").read_text())


def pretend(monkeypatch: pytest.MonkeyPatch, scores: list[float | None], stop_after: int = 99) -> list[str]:
    """Runs that take no time: the i-th to end has the i-th score; None: it fails. Returns which ran."""
    ran: list[str] = []

    def carry_out(jobs: Any, processes: int, asked: Any) -> Any:
        for count, job in enumerate(jobs):
            if count == stop_after:
                yield Outcome(job.id, "stopped")
                return
            ran.append(job.id)
            score = scores[(len(ran) - 1) % len(scores)]
            job.folder.mkdir(parents=True)
            (job.folder / "score").write_text(json.dumps(score))
            yield Outcome(job.id, "failed" if score is None else "done")

    monkeypatch.setattr(privatesearch, "carry_out", carry_out)
    monkeypatch.setattr(privatesearch, "_score", lambda folder, sweep: json.loads((folder.path / "score").read_text()))
    monkeypatch.setattr(privatesearch, "_finish", lambda search, *rest: 0)
    monkeypatch.setattr(privatesearch, "_cost", lambda *rest: (1.0, 1e-4))
    return ran


def test_a_search_leaves_one_run_whose_statement_has_paid_for_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search("--mean-runs", "4") == 0
    output = capsys.readouterr()
    statement = json.loads((folder / "best/release/statement.json").read_text())
    result = json.loads((folder / "search.json").read_text())
    runs = expand(*load_sweep("sweep.yaml"))
    assert statement["accountant"] == "RDP" and statement["epsilon"] == result["epsilon"]
    assert 0 < result["epsilon"] < 10
    assert any("best of a random number of runs (Poisson, 4 on average)" in text for text in statement["assumptions"])
    assert any("held-out data" in text for text in statement["assumptions"])
    assert statement["guarantee"].count(privatesearch.SEARCHED) == 1
    assert not any("hyper-parameters" in text for text in statement["not_covered"])
    assert result["candidates"] == len([run for run in runs if run.group not in ("non_private", "frozen")]) == 3
    picks = drawn(folder)["picks"]
    assert [path.name for path in (folder / "private").glob("run-*")] == []  # those that lost are gone
    assert f"epsilon = {statement['epsilon']:.4g}" in output.out
    assert str(len(picks)) not in json.dumps(result["settings"]) and "of " + str(len(picks)) not in output.err
    before = (folder / "best/release/statement.json").read_bytes()
    assert search("--mean-runs", "4") == 0  # nothing is drawn or run again
    assert drawn(folder)["picks"] == picks and (folder / "best/release/statement.json").read_bytes() == before
    assert main(["export", str(folder / "best"), "--to", "out"]) == 0


def test_its_cost_is_that_of_the_runs_that_may_be_drawn(folder: Path) -> None:
    sweep, path = load_sweep("sweep.yaml")
    candidates = privatesearch._candidates(sweep, expand(sweep, path))
    cost, delta = privatesearch._cost(candidates, 4.0, privatesearch.DataCache())
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.dp_event import PoissonSampledDpEvent

    run = SelfComposedDpEvent(PoissonSampledDpEvent(1 / 3, GaussianDpEvent(2.0)), 3)
    assert delta == 1e-4 and cost == pytest.approx(search_epsilon([run], 4.0, 1e-4), rel=1e-9)


def test_whoever_goes_on_does_not_draw_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pretend(monkeypatch, [0.5, 0.7, 0.6], stop_after=2)
    assert search("--mean-runs", "8") == 130
    state = drawn(folder)
    assert list(state["scores"]) == ["0", "1"] and len(state["picks"]) > 3
    monkeypatch.setattr(privatesearch.Search, "draw", lambda *args: pytest.fail("drawn again"))
    second = pretend(monkeypatch, [0.1])
    assert search("--mean-runs", "8") == 0
    assert drawn(folder)["picks"] == state["picks"] and not set(first) & set(second)
    assert len(first) + len(second) == len(state["picks"])
    assert drawn(folder)["best"] == 1


def test_a_run_that_failed_is_not_repeated_and_cannot_win(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(monkeypatch, [None, 0.9] + [0.1] * 50)
    assert search("--mean-runs", "6") == 0
    state = drawn(folder)
    assert len(ran) == len(state["picks"]) and state["scores"]["0"] is None and state["best"] == 1
    assert search("--mean-runs", "6") == 0
    assert len(ran) == len(state["picks"])


def test_a_search_over_other_settings_does_not_take_over_what_was_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, [0.5])
    assert search("--mean-runs", "4") == 0
    state = drawn(folder)
    assert search("--mean-runs", "5") == 2 and search("--mean-runs", "4", "--set", "training.epochs=2") == 2
    assert "costs its own epsilon" in capsys.readouterr().err
    assert drawn(folder) == state


def test_ties_go_by_an_order_that_was_drawn_before() -> None:
    for order, best in (([2, 0, 1], 2), ([1, 2, 0], 1)):
        for arrival in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            tied = Search("", [0, 0, 0], order, {})
            lost = [tied.add(run, 0.5) for run in arrival]
            assert tied.best == best and best not in lost
    last = Search("", [0, 0], [0, 1], {})
    assert [last.add(0, 0.5), last.add(1, 0.6)] == [None, 0] and last.best == 1


def test_what_is_drawn_is_a_poisson_number_of_settings_each_as_likely() -> None:
    draws = [Search.draw("", 3, 5.0) for _ in range(400)]
    counts = [len(each.picks) for each in draws]
    assert sum(counts) / 400 == pytest.approx(5, abs=0.45) and len(set(counts)) > 6
    picks = [pick for each in draws for pick in each.picks]
    assert all(picks.count(pick) / len(picks) == pytest.approx(1 / 3, abs=0.05) for pick in range(3))
    assert all(sorted(each.order) == list(range(len(each.picks))) for each in draws)


def test_a_search_without_a_run_has_no_winner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(privatesearch, "draw_poisson", lambda mean, random: 0)
    monkeypatch.setattr(privatesearch, "_cost", lambda *rest: (1.0, 1e-4))
    for _ in range(2):
        assert search() == 1
        assert "no winner" in " ".join(capsys.readouterr().err.split())
    assert not (folder / "best").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeded": True}, "whoever knows the seeds"),
        ({"over": {"training.epochs": [1, 2]}}, "one winner"),
        ({"variants": {"rates": {"set": {"privacy.mechanism": {"name": "eana"}}}}}, "has no guarantee"),
        ({"variants": {"rates": {"set": {"privacy.noise_multiplier": 0}}}}, "has no guarantee"),
        (
            {"variants": {"rates": {"set": {"privacy.mechanism": {"name": "adafest", "threshold": "auto", "look_at": "data"}}}}},
            "looks at the data",
        ),
        ({"variants": {"rates": {"set": {"privacy.chosen_on_data": True}}}}, "looks at the data"),
        ({"variants": {"rates": {"grid": {"privacy.target_delta": [1.0e-4, 1.0e-5]}}}}, "give one"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str) -> None:
    values = {"base": "base.yaml", "reference": "rates", "variants": {"rates": {}}, **change}
    Path("sweep.yaml").write_text(json.dumps(values))
    assert search() == 2
    assert message in capsys.readouterr().err
    assert not (folder / "private" / "search.json").exists()


@pytest.mark.parametrize("flags", [["--report-only"], ["--redo"], ["--keep-models"], ["--mean-runs", "0.5"]], ids=str)
def test_flags_that_do_not_go_with_it(folder: Path, flags: list[str]) -> None:
    assert search(*flags) == 2
