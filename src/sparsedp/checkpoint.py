"""Checkpoints: written atomically, checked in full before anything is restored.

Nothing of a table's size is made on the way: torch writes tensors from where they are, and a file is checked piece by piece,
mapped, and copied piece by piece into the tensors that it replaces.
"""

from __future__ import annotations

import copy
import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsedp.accounting.ledger import Ledger
from sparsedp.errors import CheckpointError, one_line
from sparsedp.kernels.mapped import PIECE, copy_mapped
from sparsedp.plan import PrivacyPlan
from sparsedp.preparation import Prepared
from sparsedp.sampling import PrivateLoader
from sparsedp.signature import same, sign

if TYPE_CHECKING:
    from sparsedp.optimizer import PrivateOptimizer

_FORMAT = "sparsedp-checkpoint-3"
# Checkpoints that a lineage reaches back to.
_MARKS = 1000
_KEYS = {
    "format",
    "plan",
    "plan_hash",
    "mark",
    "ledger",
    "lineage",
    "model",
    "optimizer",
    "loader",
    "prepared",
    "seed",
    "torch_generator",
    "extra",
    "notes",
    "order",
    "signature",
}


@dataclass
class Lineage:
    """The checkpoints that a run went through, oldest first, and the ledgers in them, by marks that nobody else draws.

    A ledger holds everything that is in the ledgers of its lineage.
    """

    ledgers: dict[str, Ledger] = field(default_factory=dict)

    def add(self, ledger: Ledger, mark: str | None = None) -> None:
        """Adds the ledger of a checkpoint that is written now; under a `mark` that several processes agree on, if given.

        Of many, the oldest are forgotten: going back to one of them is then charged too much, never too little.
        """
        self.ledgers[mark or secrets.token_hex(16)] = Ledger(list(ledger.entries), ledger.composition)
        while len(self.ledgers) > _MARKS:
            del self.ledgers[next(iter(self.ledgers))]

    def join(self, other: Lineage) -> None:
        """Adds the lineage of a checkpoint that was read."""
        self.ledgers = {**self.ledgers, **other.ledgers}

    def common(self, other: Lineage) -> Ledger:
        """The largest ledger that both have; the empty one if they have none."""
        shared = [ledger for mark, ledger in other.ledgers.items() if mark in self.ledgers]
        return max(shared, key=lambda ledger: sum(entry.count for entry in ledger.entries), default=Ledger())

    @property
    def last(self) -> tuple[str, Ledger]:
        return next(reversed(self.ledgers.items()))


@dataclass
class State:
    plan: PrivacyPlan
    lineage: Lineage  # the last is this checkpoint's own
    model: dict[str, Any]  # if read, its tensors are mapped, and those of the optimizer: copy what is to be kept
    optimizer: dict[str, Any]  # by the parameters' names
    loader: dict[str, Any]
    prepared: Prepared  # what the mechanism decided ahead of its steps, on the data
    seed: int | None
    extra: dict[str, Any]
    notes: list[str] = field(default_factory=list)  # of the statement
    order: str | None = None  # which examples belong together, signed
    torch_generator: torch.Tensor | None = None


def content_of(state: State, key: bytes | None = None) -> dict[str, Any]:
    """What a checkpoint holds, for `torch.save`: plain values, and the tensors themselves. Signed if there is a key."""
    # The loop, the data set and the loss may draw from torch's own generator: a seeded run needs its state to go on alike.
    generator = None if state.seed is None else torch.get_rng_state()
    mark, ledger = state.lineage.last
    content = {
        "format": _FORMAT,
        "plan": state.plan.to_dict(),
        "plan_hash": state.plan.hash,
        "mark": mark,
        "ledger": ledger.state_dict(),
        "lineage": {mark: ledger.state_dict() for mark, ledger in state.lineage.ledgers.items()},
        "model": state.model,
        "optimizer": state.optimizer,
        "loader": state.loader,
        "prepared": state.prepared.to_dict(),
        "seed": state.seed,
        "torch_generator": generator,
        "extra": state.extra,
        "notes": state.notes,
        "order": state.order,
    }
    content["signature"] = None if key is None else sign(key, content)
    return content


def save(path: str | os.PathLike[str], state: State, key: bytes | None = None) -> None:
    """Writes beside `path` first and renames, so that an interrupted write leaves the old file. Signed if there is a key."""
    target, content = Path(path), content_of(state, key)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file, _checksums():
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(
    path: str | os.PathLike[str],
    plan: PrivacyPlan,
    seed: int | None,
    key: bytes | None = None,
    order: str | None = None,
) -> State:
    """Reads a checkpoint of a run with this plan, seed, key and signed order; anything else raises `CheckpointError`."""
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        _require_intact(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} is not a complete SparseDP checkpoint: {one_line(error)}") from error
    return state_of(content, path, plan, seed, key, order)


def state_of(
    content: Any,
    path: str | os.PathLike[str],
    plan: PrivacyPlan,
    seed: int | None,
    key: bytes | None = None,
    order: str | None = None,
) -> State:
    """As `load`, from what a checkpoint holds; `path` is what messages call it."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a SparseDP checkpoint of format {_FORMAT}.")
    if missing := _KEYS - content.keys():
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}.")
    plan = plan.with_threshold_of(content["plan"])
    if content["plan_hash"] != plan.hash:
        lines = "; ".join(plan.differences(content["plan"]))
        raise CheckpointError(
            f"{path} belongs to another plan: {lines}. Take the model, settings and data of its run, or start anew."
        )
    if content["seed"] != seed:
        raise CheckpointError(f"{path} was written with seed {content['seed']}, this engine has seed {seed}.")
    lineage = Lineage()
    for mark, saved in {**content["lineage"], content["mark"]: content["ledger"]}.items():
        lineage.ledgers[mark] = Ledger()
        lineage.ledgers[mark].load_state_dict(saved)
    if not all(lineage.last[1].holds(ledger) for ledger in lineage.ledgers.values()):
        raise CheckpointError(f"{path}: the ledger lacks steps that the checkpoints before it had. It was cut short.")
    _require_signed(path, content, key, order)
    small = copy.deepcopy({key: value for key, value in content.items() if key not in ("model", "optimizer")})
    content = {**content, **small}  # not mapped
    return State(
        plan=plan,
        lineage=lineage,
        model=content["model"],
        optimizer=content["optimizer"],
        loader=content["loader"],
        prepared=Prepared(**content["prepared"]),
        seed=content["seed"],
        extra=content["extra"],
        notes=content["notes"],
        order=content["order"],
        torch_generator=content["torch_generator"],
    )


def _require_signed(
    path: str | os.PathLike[str], content: dict[str, Any], key: bytes | None, order: str | None
) -> None:
    signature = content["signature"]
    if key is None and signature is None:
        return
    if key is None:
        raise CheckpointError(f"{path} is signed. Give this engine the ledger_key of the one that wrote it.")
    if signature is None:
        raise CheckpointError(
            f"{path} is not signed, and this engine has a ledger_key: who wrote its ledger is not known."
        )
    unsigned = {name: value for name, value in content.items() if name != "signature"}
    if not same(signature, sign(key, unsigned)):
        raise CheckpointError(f"{path} was changed after it was written, or signed with another ledger_key.")
    if content["order"] != order:
        raise CheckpointError(
            f"{path} belongs to another arrangement of the data: examples have other periods, or other users, than there."
        )


def restore(
    state: State,
    common: Ledger,
    module: nn.Module,
    optimizer: PrivateOptimizer,
    ledger: Ledger,
    loader: PrivateLoader,
) -> Callable[[], None]:
    """Puts a state in place, all but weights and the optimizer's tensors: these the function copies that it returns.

    What can fail is tried on the side, so that a failure changes nothing; what is copied has its place then. If the copying
    is interrupted, `optimizer.partly_loaded` stays True and the ledger has paid for both states.
    `common` is what the ledger has in common with the checkpoint's.
    """
    _check_model(state.model, module)
    _, saved = state.lineage.last
    if saved.composition != ledger.composition:
        raise CheckpointError(
            f"The checkpoint's ledger has {saved.composition} composition, this run {ledger.composition}."
        )
    before, position = _shared(optimizer.state_dict()), loader.state_dict()
    old = {parameter: dict(values) for parameter, values in optimizer.state.items() if isinstance(values, dict)}
    try:
        optimizer.load_named_state_dict(state.optimizer)
        loader.load_state_dict(state.loader)
        copies = _make_room(optimizer.state, old)
    except Exception as error:
        optimizer.load_state_dict(before)
        loader.load_state_dict(position)
        raise CheckpointError(f"The checkpoint does not fit the optimizer or the loader: {error}") from error
    ledger.go_back(saved, common)
    optimizer.partly_loaded = True
    optimizer.forget()
    optimizer.preparation.state = state.prepared
    if state.torch_generator is not None:
        torch.set_rng_state(state.torch_generator)

    def finish() -> None:
        for target, source in copies:
            copy_mapped(target, source)
        _load_model(state.model, module)
        optimizer.partly_loaded = False

    return finish


@contextmanager
def _checksums() -> Iterator[None]:
    """Lets torch write them whatever its settings: `_require_intact` needs them."""
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(chosen)


def _require_intact(path: str | os.PathLike[str]) -> None:
    """Reads the whole file, a megabyte at a time, and compares its checksums, which `torch.load` does not look at."""
    with zipfile.ZipFile(path) as archive:
        # All are 0 in a file from before `_checksums`, if torch was told to leave them out: no damage does that.
        if any(record.CRC for record in archive.infolist()) and (damaged := archive.testzip()) is not None:
            raise CheckpointError(f"its part {damaged} is damaged: the checksum is another")


def _shared(value: Any) -> Any:
    """A copy of an optimizer's state with the same tensors: torch's optimizers load others in their place."""
    if isinstance(value, dict):
        return {key: _shared(item) for key, item in value.items()}
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _make_room(state: Any, old: dict[Any, dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Puts tensors that are not mapped into an optimizer's state, and returns what is to be copied: (target, source).

    They are those of its `old` state, where these fit: momentum is as large as the table that it belongs to.
    """
    copies = []
    for parameter, values in state.items():
        if not isinstance(values, dict):
            continue
        for key, loaded in values.items():
            if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided:
                values[key] = copy.deepcopy(loaded)
                continue
            before = old.get(parameter, {}).get(key)
            values[key] = before if _fits(before, loaded) else torch.empty_like(loaded)
            copies.append((values[key], loaded))
    return copies


def _fits(before: Any, loaded: torch.Tensor) -> bool:
    if not isinstance(before, torch.Tensor) or before.layout != torch.strided or not before.is_contiguous():
        return False
    return (before.shape, before.dtype, before.device) == (loaded.shape, loaded.dtype, loaded.device)


def _load_model(saved: dict[str, Any], module: nn.Module) -> None:
    """`module.load_state_dict`, with the module's hooks, after what is large has been copied."""
    for name, target in module.state_dict().items():
        if not isinstance(saved[name], torch.Tensor):
            saved[name] = copy.deepcopy(saved[name])
        elif target.layout == torch.strided and target.is_contiguous() and saved[name].nbytes > PIECE:
            copy_mapped(target, saved[name])
            saved[name] = target  # to copy a tensor to itself takes torch no time
    module.load_state_dict(saved)


def _check_model(saved: dict[str, Any], module: nn.Module) -> None:
    present = module.state_dict()
    if saved.keys() != present.keys():
        different = ", ".join(sorted(saved.keys() ^ present.keys())[:5])
        raise CheckpointError(f"The checkpoint's model has other parameters or buffers: {different}.")
    for name, value in present.items():
        if isinstance(value, torch.Tensor) != isinstance(saved[name], torch.Tensor):
            raise CheckpointError(f"'{name}' is {type(saved[name]).__name__} there and {type(value).__name__} here.")
        if isinstance(value, torch.Tensor) and value.shape != saved[name].shape:
            raise CheckpointError(f"'{name}' has shape {tuple(saved[name].shape)} there and {tuple(value.shape)} here.")
