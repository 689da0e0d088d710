"""Going on with a run: what may be changed about it, and the command to type."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from sparsedp.cli.config.config import Config, differences
from sparsedp.cli.config.load import BUNDLED, covers
from sparsedp.cli.runfolder import RunFolder, require_run_folder
from sparsedp.errors import ConfigError

# What a resumed run may do differently: nothing that the plan, the weights or the data depend on.
MAY_CHANGE = {
    "training.workers",
    "training.threads",
    "training.max_physical_batch",
    "training.evaluate_every",
    "training.evaluate_every_epochs",
    "training.checkpoint_every",
    "training.checkpoint_minutes",
    "training.log_every",
    "training.check",
    "stream.evaluate_next",
    "callbacks",
    "distributed",
}


def resumed_config(
    folder: Path,
    source: str | None,
    overrides: Sequence[str],
    trust: Sequence[str],
    code: str | None,
    may_change: Set[str] = MAY_CHANGE,
) -> Config:
    """The configuration that the run was started with. Another one, or --set, may change the keys `may_change` alone."""
    require_run_folder(folder)
    old, new = RunFolder(folder).load_config(source, overrides, trust, code)
    refused = sorted(key for key in differences(old, new) if not any(covers(allowed, key) for allowed in may_change))
    if refused:
        raise ConfigError(
            f"{folder} was started with another {', '.join(refused)}. Here only {', '.join(sorted(may_change))} may change; "
            "start a new run for the rest."
        )
    return new


def command_on_run(name: str, config: Config, folder: RunFolder) -> str:
    """What to type for `name`, with the folder, the configuration beside which the code lies, and trusted packages."""
    words = ["sparsedp", name, str(folder.path)]
    path = config.code.configuration
    if path is not None and any(map(config.code.is_beside, config.addresses().values())):
        words += ["--code", path.stem if path.parent == BUNDLED else str(path)]
    return " ".join([*words, *(f"--trust {package}" for package in config.code.trusted)])
