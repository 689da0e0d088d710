"""`sparsedp sweep --private`: a search over settings whose cost is known, because the best run alone is shown.

How many runs there are, and with which settings, is drawn once, with a secret key, before the first of them (Papernot and Steinke
2021, arXiv:2110.03620), and kept in the folder's private part: whoever goes on with a search does not draw again. Nothing but the
best run's model, its settings and its score are kept; runs that lost are deleted.

    best/             the folder of the best run; the statement in its release/ has the cost of the whole search
    search.json       its settings, its score and that cost
    private/          what was drawn, scores so far, and runs at work
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dp_accounting import DpEvent, NonPrivateDpEvent
from rich.console import Console

from sparsedp import concerns
from sparsedp.accounting.events import canonical
from sparsedp.accounting.search import draw_poisson, search_epsilon
from sparsedp.cli.config.sweepfile import Sweep, SweepRun
from sparsedp.cli.files import locked, write_text
from sparsedp.cli.prepare import make_model, prepare, with_collate
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.signals import stop_on_signals
from sparsedp.cli.sweepjobs import DataCache, Job, carry_out
from sparsedp.errors import ConfigError, SparseDPError
from sparsedp.noise import RandomKey
from sparsedp.report.front import VALIDATION, is_better_when_more
from sparsedp.statement import PrivacyStatement

FAILED, INTERRUPTED = 1, 130
_METRICS = ("auc", "ndcg@10", "loss")  # the first that there is, unless the sweep names one


@dataclass
class Search:
    """What was drawn, and how far it is. Only the best leaves."""

    digest: str  # of what is searched: settings and mean
    picks: list[int]  # the candidate of each run
    order: list[int]  # of two runs with the same score the one that comes first here wins
    scores: dict[int, float | None]  # of the runs that have ended; None: it failed
    best: int | None = None

    @staticmethod
    def draw(digest: str, candidates: int, mean: float) -> Search:
        random = RandomKey.from_os().generator()
        count = draw_poisson(mean, random)
        picks = random.integers(candidates, count).tolist()
        return Search(digest, picks, random.permutation(count).tolist(), {})

    @staticmethod
    def read(path: Path) -> Search:
        values = json.loads(path.read_text())
        scores = {int(run): score for run, score in values.pop("scores").items()}
        return Search(**values, scores=scores)

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(vars(self)) + "\n")

    @property
    def left(self) -> list[int]:
        return [run for run in range(len(self.picks)) if run not in self.scores]

    def add(self, run: int, score: float | None) -> int | None:
        """Takes the score of a run, and returns the run that has lost by it, if any."""
        self.scores[run] = score
        if score is None:
            return run
        before = self.best
        if before is not None and self._rank(before) > self._rank(run):
            return run
        self.best = run
        return before

    def _rank(self, run: int) -> tuple[float, int]:
        score = self.scores[run]
        assert score is not None
        return score, -self.order.index(run)


def search_privately(
    sweep: Sweep,
    runs: Sequence[SweepRun],
    folder: Path,
    *,
    mean: float,
    processes: int,
    console: Console,
    as_json: bool = False,
) -> int:
    """Carries out a search, or what is left of it, and returns the exit code."""
    candidates = _candidates(sweep, runs)
    if mean < 1:
        raise ConfigError(f"--mean-runs must be at least 1, not {mean:g}")
    with locked(folder):
        cache = DataCache()
        cost, delta = _cost(candidates, mean, cache)
        state = folder / "private" / "search.json"
        state.parent.mkdir(parents=True, exist_ok=True)
        search = _begin(state, candidates, mean)
        console.print(
            f"{len(candidates)} settings, {mean:g} runs on average: the search has epsilon {cost:.4g} at delta {delta:g} in all",
            markup=False,
        )
        if search.left:
            _carry_out(search, state, sweep, candidates, processes, console)
            if search.left:
                console.print("Stopped. The same command goes on; what was drawn stays.", markup=False)
                return INTERRUPTED
        return _finish(search, state, sweep, candidates, (cost, delta, mean), console, as_json)


def _candidates(sweep: Sweep, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """The settings that are searched: those of the variants, at the one point of the sweep, once each."""
    if sweep.seeded:
        raise ConfigError("seeded: true: whoever knows the seeds can take the noise away, so that nothing is private")
    if len(sweep.points()) > 1:
        raise ConfigError("over: a private search has one winner; give one value for each key")
    candidates = [run for run in runs if run.group in sweep.variants and run.seed == sweep.seeds[0]]
    for run in candidates:
        privacy = run.config.privacy
        if privacy.chosen_on_data or privacy.mechanism.get("look_at") == "data":
            raise ConfigError(f"{run.id}: it looks at the data without noise, which the search cannot pay for")
    return candidates


def _cost(candidates: Sequence[SweepRun], mean: float, cache: DataCache) -> tuple[float, float]:
    """(epsilon, delta) of the search. Of the data, only their size is looked at."""
    events: list[DpEvent] = []
    deltas = set()
    for run in candidates:
        data = with_collate(run.config, cache.get(_job(run, Path(), 0)))
        with concerns.without_warnings():
            parts = prepare(run.config, data, make_model(run.config, data.training))
        deltas.add(parts.delta)
        ledger = parts.engine.plan.ledger(parts.steps)
        events += ledger.events()
        parts.engine.close()
        if any(NonPrivateDpEvent() in canonical(event) for event in ledger.events()):
            raise ConfigError(f"{run.id} has no guarantee: leave it out of a private search")
    if len(deltas) > 1:
        raise ConfigError(
            f"privacy.target_delta: the settings have several ({', '.join(map(str, sorted(deltas)))}); give one"
        )
    delta = deltas.pop()
    return search_epsilon(events, mean, delta), delta


def _begin(state: Path, candidates: Sequence[SweepRun], mean: float) -> Search:
    """What was drawn for this search before, or else drawn now."""
    settings = [{**run.config.to_dict(), "name": ""} for run in candidates]
    digest = hashlib.sha256(json.dumps([settings, mean], sort_keys=True, default=str).encode()).hexdigest()
    if not state.is_file():
        search = Search.draw(digest, len(candidates), mean)
        search.write(state)
        return search
    search = Search.read(state)
    if search.digest != digest:
        raise ConfigError(
            f"{state.parent.parent} holds a search over other settings, which is paid for as it was begun. Give this one another "
            "--run-dir: it costs its own epsilon."
        )
    return search


def _carry_out(
    search: Search, state: Path, sweep: Sweep, candidates: Sequence[SweepRun], processes: int, console: Console
) -> None:
    """Runs what is left. Neither scores nor the number of runs are shown."""
    jobs = {f"run-{i:06}": (i, _job(candidates[search.picks[i]], state.parent, i)) for i in search.left}
    with stop_on_signals() as asked:
        for outcome in carry_out([job for _, job in jobs.values()], processes, asked):
            if outcome.status == "stopped":
                continue
            run, job = jobs[outcome.id]
            score = _score(RunFolder(job.folder), sweep) if outcome.status == "done" else None
            lost = search.add(run, score)
            search.write(state)  # before anything is deleted: a run that has ended is not repeated
            if lost is not None:
                shutil.rmtree(state.parent / f"run-{lost:06}", ignore_errors=True)
            console.print("A run has ended.", markup=False)


def _job(run: SweepRun, private: Path, number: int) -> Job:
    id = f"run-{number:06}"
    return Job(id, replace(run.config, name=id), run.data_key, private / id, keep_model=True)


def _score(folder: RunFolder, sweep: Sweep) -> float | None:
    """The metric on the validation half, larger for better; None if there is none."""
    metrics = (folder.read_result() or {}).get(VALIDATION, {})
    name: str = sweep.metric or next(name for name in _METRICS if name in metrics)
    value = metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return float(value) if is_better_when_more(name) else -float(value)


def _finish(
    search: Search, state: Path, sweep: Sweep, candidates: Sequence[SweepRun], cost: tuple[float, float, float],
    console: Console, as_json: bool,
) -> int:  # fmt: skip
    """Lets the best run leave, with a statement that has paid for the search."""
    epsilon, delta, mean = cost
    folder = state.parent.parent
    if search.best is None:
        console.print(
            "The search has no winner: no run was drawn, or all of them failed. That is an outcome like any other, and is paid "
            "for; another search costs its epsilon again.",
            markup=False,
        )
        return FAILED
    best, chosen = RunFolder(folder / "best"), candidates[search.picks[search.best]]
    at_work = state.parent / f"run-{search.best:06}"
    if at_work.is_dir():
        at_work.rename(best.path)
    if not best.is_released:
        raise SparseDPError(f"{best.path} has lost the model of the best run.")
    statement = PrivacyStatement.from_dict(json.loads((best.release / "statement.json").read_text()))
    if SEARCHED not in statement.guarantee:
        best.write_statement(_of_search(statement, epsilon, mean, len(candidates)))
    score = search.scores[search.best]
    values = {
        "settings": {"variant": chosen.group, **chosen.point, **chosen.settings},
        "score": score,
        "epsilon": epsilon,
        "delta": delta,
        "mean_runs": mean,
        "candidates": len(candidates),
    }
    write_text(folder / "search.json", json.dumps(values, indent=2, default=str) + "\n")
    console.print(
        f"Best: {values['settings']}, score {score:.4f}. Model and statement: {best.release}",
        markup=False,
        soft_wrap=True,
    )
    print(json.dumps(values, indent=2, default=str) if as_json else best.read_statement())
    return 0


SEARCHED = "; and for the search that chose it among others"


def _of_search(statement: PrivacyStatement, epsilon: float, mean: float, candidates: int) -> PrivacyStatement:
    """The statement of the best run, with the cost of the whole search."""
    choices = "Choices made by looking at private data"
    not_covered = [text for text in statement.not_covered if not text.startswith(choices)]
    return replace(
        statement,
        epsilon=epsilon,
        accountant="RDP",
        dp_accounting_epsilon=None,
        guarantee=statement.guarantee + SEARCHED,
        assumptions=(
            *statement.assumptions,
            f"It is the best of a random number of runs (Poisson, {mean:g} on average), each with one of {candidates} settings, "
            f"drawn at random; nothing of the others left. This run alone has epsilon {statement.epsilon:.4g} (Papernot and "
            "Steinke 2021, theorem 6).",
            "The held-out data, on which the runs were compared, are public.",
        ),
        not_covered=(
            f"{choices} other than this search: vocabularies, the list of settings, early stopping.",
            *not_covered,
        ),
    )
