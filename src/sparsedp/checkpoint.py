"""Checkpoints: written atomically, checked in full before anything is restored."""

from __future__ import annotations

import copy
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsedp.accounting.ledger import Ledger
from sparsedp.errors import CheckpointError
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import PrivateLoader

if TYPE_CHECKING:
    from sparsedp.optimizer import PrivateOptimizer

_FORMAT = "sparsedp-checkpoint-1"
_KEYS = {
    "format",
    "plan",
    "plan_hash",
    "run",
    "mark",
    "model",
    "optimizer",
    "ledger",
    "loader",
    "seed",
    "torch_generator",
    "extra",
}


@dataclass
class State:
    plan: PrivacyPlan
    run: str  # the same for all checkpoints of a run, by whichever engine that continued it
    mark: str  # this checkpoint's own
    model: dict[str, Any]
    optimizer: dict[str, Any]
    ledger: Any
    loader: dict[str, Any]
    prepared: dict[str, torch.Tensor] | None  # what the mechanism decided ahead of its steps, on the data
    counted: list[int | None]  # of these scopes, and what it keeps of them for the next
    memory: dict[str, torch.Tensor]
    seed: int | None
    extra: dict[str, Any]
    torch_generator: torch.Tensor | None = None


def save(path: str | os.PathLike[str], state: State) -> None:
    """Writes beside `path` first and renames, so that an interrupted write leaves the old file."""
    target = Path(path)
    # Dropout draws from torch's own generator: a seeded run needs its state to go on alike.
    generator = None if state.seed is None else torch.get_rng_state()
    content = {
        "format": _FORMAT,
        "plan": state.plan.to_dict(),
        "plan_hash": state.plan.hash,
        "run": state.run,
        "mark": state.mark,
        "model": state.model,
        "optimizer": state.optimizer,
        "ledger": state.ledger,
        "loader": state.loader,
        "prepared": state.prepared,
        "counted": state.counted,
        "memory": state.memory,
        "seed": state.seed,
        "torch_generator": generator,
        "extra": state.extra,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], plan: PrivacyPlan, seed: int | None) -> State:
    """Reads a checkpoint of a run with this plan and seed; anything else raises `CheckpointError`."""
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is not a complete SparseDP checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a SparseDP checkpoint of format {_FORMAT}.")
    if missing := _KEYS - content.keys():
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}.")
    if content["plan_hash"] != plan.hash:
        lines = "; ".join(plan.differences(content["plan"]))
        raise CheckpointError(f"{path} belongs to another plan: {lines}.")
    if content["seed"] != seed:
        raise CheckpointError(f"{path} was written with seed {content['seed']}, this engine has seed {seed}.")
    return State(
        plan=plan,
        run=content["run"],
        mark=content["mark"],
        model=content["model"],
        optimizer=content["optimizer"],
        ledger=content["ledger"],
        loader=content["loader"],
        prepared=content["prepared"],
        # Checkpoints from before there were streams do not have these: what was prepared was so on all data.
        counted=content.get("counted", [] if content["prepared"] is None else [None]),
        memory=content.get("memory", {}),
        seed=content["seed"],
        extra=content["extra"],
        torch_generator=content["torch_generator"],
    )


def restore(
    state: State,
    common: Ledger | None,
    module: nn.Module,
    optimizer: PrivateOptimizer,
    ledger: Ledger,
    loader: PrivateLoader,
) -> None:
    """Puts a state in place. What can fail is tried on the side, so that a failure changes nothing.

    `common` is what the ledger has in common with the checkpoint's; None: all that the checkpoint's holds.
    """
    _check_model(state.model, module)
    saved = Ledger()
    saved.load_state_dict(state.ledger)
    if saved.composition != ledger.composition:
        raise CheckpointError(
            f"The checkpoint's ledger has {saved.composition} composition, this run {ledger.composition}."
        )
    before = copy.deepcopy(optimizer.state_dict())
    position = loader.state_dict()
    try:
        optimizer.load_state_dict(state.optimizer)
        loader.load_state_dict(state.loader)
    except Exception as error:
        optimizer.load_state_dict(before)
        loader.load_state_dict(position)
        raise CheckpointError(f"The checkpoint does not fit the optimizer or the loader: {error}") from error
    module.load_state_dict(state.model)
    ledger.go_back(saved, saved if common is None else common)
    optimizer.forget()
    optimizer.prepared, optimizer.counted, optimizer.memory = state.prepared, list(state.counted), dict(state.memory)
    if state.torch_generator is not None:
        torch.set_rng_state(state.torch_generator)


def _check_model(saved: dict[str, Any], module: nn.Module) -> None:
    own = module.state_dict()
    if saved.keys() != own.keys():
        different = ", ".join(sorted(saved.keys() ^ own.keys())[:5])
        raise CheckpointError(f"The checkpoint's model has other parameters or buffers: {different}.")
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and value.shape != saved[name].shape:
            raise CheckpointError(f"'{name}' has shape {tuple(saved[name].shape)} there and {tuple(value.shape)} here.")
