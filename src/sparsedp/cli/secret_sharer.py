"""The secret sharer test of a run that was trained with canaries, in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from sparsedp.audit.canaries import CanaryPlan
from sparsedp.audit.secret_sharers import SecretSharer, secret_sharer
from sparsedp.cli.canaries import canary_losses, require_canaries
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.files import write_file, write_text
from sparsedp.cli.progress import Reporter, every_few_seconds
from sparsedp.cli.run import load_with_progress
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.errors import SparseDPError

AUDIT = "secret-sharer"
RESULT, PLOT = "secret_sharer.json", "secret_sharer.png"


def audit_run(config: Config, path: Path, data: Data | None, reporter: Reporter) -> SecretSharer:
    """The result that lies in the folder of a finished run or, if there is none yet, a new one, which is written there.

    `data` are those of the configuration, if they were loaded before.
    """
    with RunFolder.open(path) as folder:
        plan = require_canaries(folder, AUDIT)
        earlier = _read(folder)
        if earlier is not None:
            return earlier
        data = load_with_progress(config, reporter) if data is None else data
        losses = canary_losses(config, folder, data, _progress(plan, reporter)).losses
        result = secret_sharer(losses, plan.repetitions)
        values = {
            "private": "Losses of canaries in private data, without noise: not for release.",
            **result.to_dict(),
            "losses": losses.tolist(),
            "repetitions": list(plan.repetitions),
        }
        draw({config.name: result}, folder.private / PLOT, reporter)
        write_text(folder.private / RESULT, json.dumps(plain(values)) + "\n")
        return result


def _read(folder: RunFolder) -> SecretSharer | None:
    path = folder.private / RESULT
    if not path.is_file():
        return None
    try:
        return SecretSharer.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise SparseDPError(f"{path} is damaged: delete it, and it is made again ({error!r})") from error


def _progress(plan: CanaryPlan, reporter: Reporter) -> Callable[[int], None]:
    return every_few_seconds(lambda done: reporter.say(f"Losses of {done:,} of {len(plan.repetitions):,} canaries"))


def draw(results: Mapping[str, SecretSharer], path: Path, reporter: Reporter) -> None:
    """One picture of several runs, by their names."""
    try:
        from sparsedp.report.exposure_plot import exposure_plot
    except ImportError:
        reporter.alert("No plot: matplotlib is missing. pip install 'sparsedp[plot]'")
        return
    figure = exposure_plot(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: figure.savefig(file, format="png", dpi=130))
