"""The runs of a membership attack: a target and its shadow models, each on examples drawn by fair coins, and their losses.

    membership.json   what was asked for, and the key that the coins come from
    runs/target/      ordinary run folders, which can be resumed
    runs/shadow-01/   ...
    losses/           the loss of each example under the model of each run
    result.json  roc.png

All of it is computed on private data: nothing here is for release.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsedp.audit.part import Part
from sparsedp.cli.canaries import example_losses
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.files import write_file, write_text
from sparsedp.cli.prepare import with_collate
from sparsedp.cli.progress import Reporter, evaluation_progress
from sparsedp.cli.run import run_training
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.cli.trained import read_weights, trained_model
from sparsedp.errors import ConfigError, SparseDPError
from sparsedp.noise import RandomKey

_COINS, _SCORED = 0, 1  # purposes of the key


@dataclass(frozen=True)
class MembershipAudit:
    """What decides the runs of an audit: its folder holds it."""

    path: Path
    config: Config
    key: str  # a secret in hexadecimal
    shadows: int
    examples: int  # that are scored, at most

    @staticmethod
    def open(path: Path, config: Config, shadows: int, examples: int) -> MembershipAudit:
        """A new audit, or the one in `path`, if it was asked for the same."""
        asked = {"config": plain(config.to_dict()), "shadows": shadows, "examples": examples}
        file = path / "membership.json"
        if file.is_file():
            try:
                before = json.loads(file.read_text())
                key = before.pop("key")
                bytes.fromhex(key)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SparseDPError(
                    f"{file} cannot be read: it is no audit of this command, or was damaged."
                ) from error
            changed = [name for name in asked if json.loads(json.dumps(asked[name])) != before.get(name)]
            if changed:
                raise ConfigError(
                    f"{path} holds an audit with another {', '.join(changed)}. Give the same again to go on with it, or another "
                    "--audit-dir"
                )
            return MembershipAudit(path, config, key, shadows, examples)
        if path.exists() and any(path.iterdir()):
            raise ConfigError(f"{path} is not empty, and no audit of this kind. Give another --audit-dir")
        path.mkdir(parents=True, exist_ok=True)
        key = RandomKey.from_os().secret.hex()
        write_text(file, json.dumps({"key": key, **asked}, indent=2) + "\n")
        return MembershipAudit(path, config, key, shadows, examples)

    @property
    def names(self) -> list[str]:
        return ["target", *(f"shadow-{number:02d}" for number in range(1, self.shadows + 1))]

    def run_dir(self, number: int) -> Path:
        return self.path / "runs" / self.names[number]

    def coins(self, number: int, units: int) -> np.ndarray:
        """Which units are in the data of a run, bool (units,). Of two shadow models, one has those that the other has not."""
        heads = self._key.generator(_COINS, (number + 1) // 2).random(units) < 0.5
        return ~heads if number and number % 2 == 0 else heads

    def scored(self, units: int) -> np.ndarray:
        """The units that are attacked, ascending."""
        return np.sort(self._key.generator(_SCORED).permutation(units)[: self.examples])

    @property
    def _key(self) -> RandomKey:
        return RandomKey(bytes.fromhex(self.key), seeded=True)


@dataclass(frozen=True)
class Units:
    """Whose the examples of a data set are: unit i has examples[i]."""

    examples: list[np.ndarray]

    @staticmethod
    def of(config: Config, training: Any) -> Units:
        if config.privacy.unit == "example":
            return Units([np.array([index]) for index in range(len(training))])
        users = getattr(training, "users", None)
        if users is None:
            raise ConfigError("privacy.unit: user, but these data do not say whose each example is")
        order = np.argsort(np.asarray(users), kind="stable")
        _, begins = np.unique(np.asarray(users)[order], return_index=True)
        return Units(np.split(order, begins[1:]))

    def __len__(self) -> int:
        return len(self.examples)

    def indices(self, chosen: np.ndarray) -> np.ndarray:
        """The examples of some units, ascending."""
        return np.sort(np.concatenate([self.examples[unit] for unit in chosen]))


@dataclass(frozen=True)
class Losses:
    """Of each scored unit (n,): under the target, under the shadow models (K, n), and who was in them."""

    target: np.ndarray
    is_member: np.ndarray
    shadows: np.ndarray
    in_shadows: np.ndarray


def collect_losses(audit: MembershipAudit, data: Data, reporter: Reporter) -> Losses | None:
    """Trains what is not trained yet and scores it; None if a run was stopped, and can be gone on with."""
    units = Units.of(audit.config, data.training)
    if len(units) < 8:
        raise ConfigError(f"The data have {len(units)} units: too few to train on half of them and to attack")
    scored = audit.scored(len(units))
    losses, coins = [], []
    for number, name in enumerate(audit.names):
        inside = audit.coins(number, len(units))
        reporter.say(
            f"Model {number + 1} of {len(audit.names)} ({name}): {int(inside.sum()):,} of {len(units):,} units"
        )
        if not _train(audit, number, data, units.indices(np.flatnonzero(inside)), reporter):
            return None
        losses.append(_unit_losses(audit, number, data, [units.examples[unit] for unit in scored], reporter))
        coins.append(inside[scored])
    return Losses(losses[0], coins[0], np.array(losses[1:]), np.array(coins[1:]))


def _train(audit: MembershipAudit, number: int, data: Data, indices: np.ndarray, reporter: Reporter) -> bool:
    """Whether the run is finished, now or before."""
    run_dir = audit.run_dir(number)
    if RunFolder(run_dir).is_released:
        return True
    config = audit.config
    if config.training.seed is not None:  # or all runs would draw the same noise
        config = replace(config, training=dataclasses.replace(config.training, seed=config.training.seed + number))
    part = replace(data, training=Part(data.training, indices))
    begun = (run_dir / "private" / "config.yaml").is_file()
    result = run_training(config, run_dir, resume=begun, reporter=reporter, data=part, on_signals=True)
    return result.finished


def _unit_losses(
    audit: MembershipAudit, number: int, data: Data, examples: list[np.ndarray], reporter: Reporter
) -> np.ndarray:
    """The mean loss of each unit's examples under the model of a run, kept in a file."""
    file = audit.path / "losses" / f"{audit.names[number]}.npy"
    if file.is_file():
        return np.load(file)
    with_batches = with_collate(audit.config, data)
    folder = RunFolder(audit.run_dir(number))
    model = trained_model(audit.config, folder, with_batches, read_weights(folder)[1])
    flat = np.concatenate(examples)
    progress = evaluation_progress(reporter, len(flat), "examples that are attacked")
    attacked: Any = Part(data.training, flat)
    of_examples = example_losses(audit.config, model, with_batches, attacked, progress)
    owners = np.repeat(np.arange(len(examples)), [len(part) for part in examples])
    values = np.bincount(owners, of_examples) / np.bincount(owners)
    file.parent.mkdir(exist_ok=True)
    write_file(file, lambda stream: np.save(stream, values))
    return values
