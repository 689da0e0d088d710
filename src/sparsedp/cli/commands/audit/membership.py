"""Guesses which examples a model was trained on, by its losses, and compares the guesses with what epsilon allows.

A target and several shadow models are trained as the configuration says, each on examples that fair coins choose.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsedp.audit.membership import (
    AttackResult,
    Interval,
    RateAt,
    Variant,
    likelihood_ratios,
    logit_scaled,
    measure_attack,
)
from sparsedp.cli.arguments import positive_count
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import add_config_arguments, explain_config, load_config
from sparsedp.cli.files import write_text
from sparsedp.cli.membership import Losses, MembershipAudit, collect_losses
from sparsedp.cli.progress import make_reporter
from sparsedp.cli.run import load_with_progress
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.errors import ConfigError

ABOVE_THE_CLAIM, INTERRUPTED = 1, 130
_EXAMPLES = 24_000  # of which fair coins leave 10,000 non-members, as FPR 0.1 % needs, with all but certainty
EPILOG = """examples:
  sparsedp audit membership demo                                  a target and 8 shadow models: 9 runs
  sparsedp audit membership demo --shadows 4 --examples 10000     fewer shadow models, fewer examples to attack
  sparsedp audit membership my.yaml --audit-dir audits/mine       the same again goes on after Ctrl-C or a crash
  sparsedp audit membership my.yaml --json                        the result as JSON; progress goes to stderr

Two attacks: a threshold on the loss, and LiRA, the likelihood ratio of logit-scaled losses with normal laws fitted to shadow
models (online: to those that had an example and to those that had not; offline: to the latter alone). Thresholds are chosen on
one half of the examples and measured on the other. A false positive rate of 0.1 % needs 10,000 non-members, 1 % needs 1,000.

The audit's folder holds runs on private data, and who was in them: it is not for release.

Exit codes: 0 done; 1 more is shown than the claimed epsilon allows; 2 an error; 130 stopped, and can be gone on with.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument(
        "--shadows", type=_shadows, default=8, metavar="K", help="shadow models, an even number from 4 on (default: 8)"
    )
    parser.add_argument("--variant", choices=("online", "offline"), default="online", help="of LiRA (default: online)")
    parser.add_argument(
        "--examples",
        type=positive_count,
        default=_EXAMPLES,
        metavar="N",
        help=f"units to attack, at most; about half are non-members (default: {_EXAMPLES})",
    )
    parser.add_argument(
        "--audit-dir",
        metavar="DIR",
        type=Path,
        help="the audit's folder (audits/<name>-membership); goes on with what is there",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, args.trust)
    if args.show_config:
        print(explain_config(config), end="")
        return 0
    if config.stream is not None:
        raise ConfigError("stream: a membership attack draws examples by coins, over all periods. Leave the stream out")
    console = Console(stderr=args.json, highlight=False)
    reporter = make_reporter(console, args.quiet)
    config.make_mechanism()  # what it refuses is refused before there is a folder
    path = args.audit_dir or Path("audits") / f"{config.name}-membership"
    audit = MembershipAudit.open(path, config, args.shadows, args.examples)
    losses = collect_losses(audit, load_with_progress(config, reporter), reporter)
    if losses is None:
        console.print(f"Stopped. Go on with the same command: its folder is {path}.", markup=False, soft_wrap=True)
        return INTERRUPTED
    epsilon, delta = _claim(audit)
    attacks = _attacks(losses, args.variant, args.shadows, epsilon, delta)
    result = _result(config, attacks, epsilon, delta)
    write_text(path / "result.json", json.dumps(plain(result), indent=2) + "\n")
    plotted = _plot(attacks, epsilon, delta, config, path / "roc.png")
    if args.json:
        print(json.dumps(plain(result), indent=2))
    else:
        console.print(_table(attacks, epsilon))
        for line in (result["sentence"], *result["notes"], plotted):
            console.print(line, markup=False, soft_wrap=True)
    return ABOVE_THE_CLAIM if result["above_the_claim"] else 0


def _claim(audit: MembershipAudit) -> tuple[float, float]:
    """Epsilon and delta that the target's statement promises."""
    statement = json.loads((RunFolder(audit.run_dir(0)).release / "statement.json").read_text())
    epsilon = statement["epsilon"]
    return math.inf if epsilon == "infinity" else float(epsilon), float(statement["delta"])


def _attacks(losses: Losses, variant: Variant, shadows: int, epsilon: float, delta: float) -> list[AttackResult]:
    ratios = likelihood_ratios(logit_scaled(losses.target), logit_scaled(losses.shadows), losses.in_shadows, variant)
    name = f"LiRA, {variant}, {shadows} shadow models"
    scores = {"loss threshold": -losses.target, name: ratios}
    # The larger of the two bounds has 95 % confidence if each has half of what may go wrong.
    each = 0.05 / len(scores)
    return [measure_attack(what, values, losses.is_member, epsilon, delta, each) for what, values in scores.items()]


def _result(config: Config, attacks: list[AttackResult], epsilon: float, delta: float) -> dict[str, Any]:
    shown = max(attack.epsilon_bound for attack in attacks)
    above = shown > epsilon
    best = max(attacks, key=lambda attack: attack.area)
    claim = f"epsilon {epsilon:.3g} at delta {delta:.1g}" if math.isfinite(epsilon) else "no epsilon"
    reached = "".join(
        f", TPR {_percent(rate.tpr)} at FPR {_level(rate)}" for rate in best.rates if rate.tpr is not None
    )
    sentence = (
        f"{best.name}: area {best.area:.3f}{reached}. With 95 % confidence epsilon is at least {shown:.2f}; the run claims "
        f"{claim}."
    )
    if above:
        sentence += " THAT IS ABOVE THE CLAIM: the guarantee does not hold for this run."
    notes = [
        f"TPR at FPR {_level(rate)} is not given: it needs {rate.needed:,} non-members, and there are {best.non_members:,}."
        for rate in best.rates
        if rate.tpr is None
    ]
    return {
        "epsilon": epsilon, "delta": delta, "epsilon_at_least": shown, "above_the_claim": above, "unit": config.privacy.unit,
        "sentence": sentence, "notes": notes, "attacks": [attack.to_dict() for attack in attacks],
    }  # fmt: skip


def _level(rate: RateAt) -> str:
    return f"{100 * rate.level:g} %"


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return "too few"
    return f"{100 * interval.value:.2f} % [{100 * interval.low:.2f}, {100 * interval.high:.2f}]"


def _table(attacks: list[AttackResult], epsilon: float) -> Table:
    """A column for each attack."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("", *(attack.name for attack in attacks)):
        table.add_column(head)
    table.add_row("members, non-members", *(f"{attack.members:,}, {attack.non_members:,}" for attack in attacks))
    table.add_row("area under the ROC curve", *(f"{attack.area:.3f}" for attack in attacks))
    for rates in zip(*(attack.rates for attack in attacks)):
        level = _level(rates[0])
        table.add_row(f"TPR for FPR {level}", *(_percent(rate.tpr) for rate in rates))
        table.add_row("  FPR measured", *(_percent(rate.fpr) for rate in rates))
        if math.isfinite(epsilon):
            table.add_row("  epsilon allows TPR", *(_allowed(rate) for rate in rates))
    table.add_row("epsilon at least", *(f"{attack.epsilon_bound:.2f}" for attack in attacks))
    return table


def _allowed(rate: RateAt) -> str:
    return "-" if rate.allowed is None else f"{100 * rate.allowed:.2f} %"


def _plot(attacks: list[AttackResult], epsilon: float, delta: float, config: Config, path: Path) -> str:
    try:
        from sparsedp.report.roc import write_roc
    except ImportError:
        return "No plot: matplotlib is not installed (pip install 'sparsedp[plot]')."
    write_roc(attacks, epsilon, delta, f"Who was in? {config.name}, {config.privacy.mechanism['name']}", path)
    return f"Plot: {path}"


def _shadows(text: str) -> int:
    count = positive_count(text)
    if count < 4 or count % 2:
        raise argparse.ArgumentTypeError(
            f"expected an even number of shadow models, at least 4: they come in pairs; got {text}"
        )
    return count
