"""Audits every mechanism by gradient canaries: claimed epsilons and lower bounds, in a table; and EANA's leak, in a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from sparsedp import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, LazyDP
from sparsedp.audit import AuditedTraining, EpsilonAudit, audit_many_runs, audit_one_run
from sparsedp.audit.gradient_canaries import Place
from sparsedp.cli.progress import draw_progress
from sparsedp.mechanisms import Mechanism
from sparsedp.report.panels import legend_beside

DELTA = 1e-5
EPSILONS = (1.0, 4.0, 8.0)
NOISES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the comparison with EANA, as the epsilons of DP-SGD with the same noise
MANY_RUNS = {1.0: 12_000, 4.0: 4000, 8.0: 2000}
PLACES: tuple[Place, ...] = ("dense", "rows")

EPILOG = """examples:
  python -m benchmarks audit-bound
  python -m benchmarks audit-bound --canaries 1000 --no-many-runs
"""


@dataclass(frozen=True)
class Line:
    """One audit."""

    part: str  # of the page
    mechanism: str
    where: str
    epsilon: float  # that DP-SGD's noise, or the mechanism's own, is calibrated to
    audit: EpsilonAudit

    def __str__(self) -> str:
        audit = self.audit
        return (
            f"{self.part}: {self.mechanism}, {self.where}, {audit.method}, epsilon {self.epsilon:g}: "
            f"claimed {audit.claimed:.3g}, bound {audit.bound:.3g} ({audit.share:.2f})"
        )


def guaranteed(epsilon: float, canaries: int) -> dict[str, Mechanism]:
    """Every mechanism with a guarantee, with settings that give its own releases a fair share of the budget."""
    first = FEST(k=canaries // 2, epsilon=epsilon / 4, delta=DELTA / 10)
    return {
        "DPSGD": DPSGD(),
        "LazyDP": LazyDP(),
        "FEST": first,
        "AdaFEST": AdaFEST(threshold=1.0, noise_ratio=1.0),
        "AdaFEST+": AdaFEST(threshold=1.0, noise_ratio=1.0, preselect=first),
        "ExponentialSelection": ExponentialSelection(k=canaries // 4, epsilon=epsilon / 8),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--canaries", metavar="N", type=int, default=5000, help="of each one-run audit (5000)")
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="of coins, noise and samples (1)")
    parser.add_argument("--no-many-runs", action="store_true", help="leave out the audits by many runs, of minutes")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/audit"), help="(runs/audit)")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for part in (_one_run, _eana, *(() if args.no_many_runs else (_many_runs,))):
        for line in part(args.canaries, args.seed):
            lines.append(line)
            console.print(str(line), markup=False, soft_wrap=True)
    table = _markdown(lines)
    (args.out / "bound.md").write_text(table)
    results = [
        {
            "part": line.part,
            "mechanism": line.mechanism,
            "where": line.where,
            "epsilon": line.epsilon,
            **line.audit.to_dict(),
        }
        for line in lines
    ]
    (args.out / "bound.json").write_text(json.dumps(results, indent=2))
    eana_plot(lines).savefig(args.out / "eana-bound.png", dpi=130)
    wrong = [line for line in lines if line.audit.contradicts]
    console.print(
        f"{table}\n{len(lines)} audits, {len(wrong)} of them contradict the claim. Written to {args.out}", markup=False
    )
    return 1 if wrong else 0


def _one_run(canaries: int, seed: int) -> Iterator[Line]:
    for epsilon in EPSILONS:
        for name, mechanism in guaranteed(epsilon, canaries).items():
            training = AuditedTraining.with_epsilon(epsilon, DELTA, mechanism=mechanism)
            for on in PLACES:
                # The picks of an exponential mechanism have no Gaussian trade-off curve.
                for method in ("one_run",) if name == "ExponentialSelection" else ("one_run", "one_run_fdp"):
                    audit = audit_one_run(
                        training,
                        delta=DELTA,
                        canaries=canaries,
                        on=on,
                        method=method,
                        seed=seed,
                        progress=draw_progress,
                    )
                    yield Line("one run", name, on, epsilon, audit)


def _eana(canaries: int, seed: int) -> Iterator[Line]:
    """EANA and DP-SGD with the same noise, by the method that takes no curve for granted."""
    for epsilon in NOISES:
        dpsgd = AuditedTraining.with_epsilon(epsilon, DELTA)
        cases: tuple[tuple[str, Mechanism, Place], ...] = (
            ("DPSGD", DPSGD(), "rows"), ("EANA", EANA(), "dense"), ("EANA", EANA(), "rows"),
        )  # fmt: skip
        for name, mechanism, on in cases:
            audit = audit_one_run(
                replace(dpsgd, mechanism=mechanism), delta=DELTA, canaries=canaries, on=on, method="one_run", seed=seed + 1,
                progress=draw_progress,
            )  # fmt: skip
            yield Line("the same noise", name, on, epsilon, audit)


def _many_runs(canaries: int, seed: int) -> Iterator[Line]:
    for epsilon, runs in MANY_RUNS.items():
        training = AuditedTraining.with_epsilon(epsilon, DELTA, steps=1)
        audit = audit_many_runs(training, delta=DELTA, runs=runs, seed=seed, progress=draw_progress)
        yield Line("many runs", "DPSGD", "dense", epsilon, audit)


def _markdown(lines: list[Line]) -> str:
    """For each part a table of bounds, with a column for each epsilon."""
    tables = []
    for part in dict.fromkeys(line.part for line in lines):
        bounds: dict[tuple[str, str, str], dict[float, EpsilonAudit]] = {}
        for line in lines:
            if line.part == part:
                bounds.setdefault((line.mechanism, line.where, line.audit.method), {})[line.epsilon] = line.audit
        epsilons = sorted({epsilon for audits in bounds.values() for epsilon in audits})
        rows = [["mechanism", "canaries on", "method", *(f"epsilon {epsilon:g}" for epsilon in epsilons)]]
        rows.append(["---"] * len(rows[0]))
        rows += [
            [*names, *(f"{audits[epsilon].bound:.2f}" if epsilon in audits else "" for epsilon in epsilons)]
            for names, audits in bounds.items()
        ]
        tables.append(f"{part}:\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(tables)


def eana_plot(lines: list[Line]) -> Figure:
    """The bounds of EANA and DP-SGD with the same noise against the epsilon that DP-SGD has with it."""
    figure = Figure(figsize=(7.8, 4.2), layout="constrained")
    panel = figure.subplots()
    panel.plot(NOISES, NOISES, color="0.35", linestyle="--", label="what DP-SGD of this noise may show")
    for name, title, on, where, color in (
        ("EANA", "EANA", "rows", "on rows of a table", "#d55e00"),
        ("EANA", "EANA", "dense", "in dense parameters", "#e69f00"),
        ("DPSGD", "DP-SGD", "rows", "on rows of a table", "#0072b2"),
    ):
        shown = {
            line.epsilon: line.audit.bound
            for line in lines
            if (line.part, line.mechanism, line.where) == ("the same noise", name, on)
        }
        panel.plot(list(shown), list(shown.values()), marker="o", color=color, label=f"{title}, canaries {where}")
    panel.set_xscale("log", base=2)
    panel.set_xticks(NOISES, [f"{noise:g}" for noise in NOISES])
    panel.set_xlabel("epsilon of DP-SGD with the same noise")
    panel.set_ylabel("lower bound on epsilon, 95 % confidence")
    panel.grid(alpha=0.25)
    legend_beside(figure)
    return figure
