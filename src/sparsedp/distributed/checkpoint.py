"""Checkpoints of several processes: a folder with the tensors of all of them, and one small file that says what they are.

The tensors are written by `torch.distributed.checkpoint`, each rank its own, into a new folder; then rank 0 replaces the small
file, `state.pt`, which names that folder. So an interrupted write leaves the checkpoint before it as it was. Weights and
optimizer state of a table lie under the table's name as one tensor, whoever had its parts: they load into any number of ranks,
any sharding, and one process.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsedp import checkpoint
from sparsedp._torch import make_sharded_tensor, without_subclasses
from sparsedp.accounting.ledger import Ledger
from sparsedp.checkpoint import State
from sparsedp.errors import CheckpointError, RankLostError, one_line
from sparsedp.kernels.mapped import copy_mapped
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.sampling import PrivateLoader
from sparsedp.several_optimizers import kinds_in, require_same_optimizers
from sparsedp.tables import Shard

if TYPE_CHECKING:
    from sparsedp.distributed.training import Together

STATE = "state.pt"
_MARK = re.compile("[0-9a-f]{32}")  # the name of a folder with tensors
_READ = 1 << 24  # bytes of a file that are digested at a time


@dataclass(frozen=True)
class Layout:
    """The shape and type of a tensor, and whether a table's rows, or its rows and columns, are along its first axes."""

    shape: tuple[int, ...]  # of the whole table's
    dtype: torch.dtype
    by_rows: bool = False
    by_columns: bool = False

    def of(self, shard: Shard | None) -> tuple[slice, ...]:
        """Where the part of a shard is in the whole."""
        if shard is None or not self.by_rows:
            return ()
        rows = slice(shard.rows.start, shard.rows.stop)
        return (rows, slice(shard.columns.start, shard.columns.stop)) if self.by_columns else (rows,)

    def local_shape(self, shard: Shard | None) -> tuple[int, ...]:
        cut = [part.stop - part.start for part in self.of(shard)]
        return (*cut, *self.shape[len(cut) :])

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Layout:
        return Layout(**{**values, "shape": tuple(values["shape"]), "dtype": getattr(torch, values["dtype"])})


@dataclass(frozen=True)
class Part:
    """What this process has of a tensor of the checkpoint; None: nothing."""

    layout: Layout
    shard: Shard | None
    tensor: Tensor | None


class Held:
    """All that a checkpoint holds of a run's tensors, as this process has them."""

    def __init__(self, module: nn.Module, optimizer: PrivateOptimizer, run: Together | None) -> None:
        self.module, self.optimizer, self.run = module, optimizer, run
        self.parameters = optimizer.parameters_by_name()
        self.tables = dict(optimizer.private_step.tables)
        self.divided = {name for name in self.tables if run is not None and run.placement.get(name)}

    def shard_of(self, name: str) -> Shard | None:
        """This rank's shard of a parameter that is divided; None: it has all of it, or none."""
        return self.optimizer.private_step.ranks.shards.get(name) if name in self.divided else None

    def has(self, name: str) -> bool:
        return name not in self.divided or self.shard_of(name) is not None

    def model(self) -> Iterator[tuple[str, Part]]:
        """The weights: parameters, and the buffers that a state_dict has."""
        present = {} if self.run is None else self.run.held
        tensors = {name: present.get(name, tensor) for name, tensor in _state_tensors(self.module).items()}
        for name, tensor in tensors.items():
            shape = self.tables[name].shape if name in self.tables else tensor.shape
            layout = Layout(tuple(shape), tensor.dtype, name in self.tables, name in self.tables)
            yield name, Part(layout, self.shard_of(name), tensor if self.has(name) else None)

    def optimizer_layouts(self) -> dict[str, dict[str, Layout]]:
        """Of the optimizer's tensors that have as many rows as their parameter, by parameter and name, as this rank has them."""
        layouts: dict[str, dict[str, Layout]] = {}
        for name, parameter in self.parameters.items():
            if not self.has(name):
                continue
            for key, value in self.optimizer.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    is_table, whole = name in self.tables, value.shape == parameter.shape
                    shape = tuple(value.shape)
                    if is_table:
                        table = self.tables[name]
                        shape = tuple(table.shape) if whole else (table.rows, *shape[1:])
                    layouts.setdefault(name, {})[key] = Layout(shape, value.dtype, is_table, is_table and whole)
        return layouts

    def optimizer_numbers(self) -> dict[str, dict[str, Any]]:
        """What else the optimizer keeps for each parameter, such as its number of steps."""
        numbers: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.inner.state.get(parameter, {}).items():
                if self.has(name) and not (isinstance(value, Tensor) and value.ndim):
                    numbers.setdefault(name, {})[key] = copy.deepcopy(value)
        return numbers

    def optimizer_parts(self, layouts: Mapping[str, Mapping[str, Layout]]) -> Iterator[tuple[str, Part]]:
        """The optimizer's tensors; what this rank has none of yet, and should have, is made."""
        for name, fields in layouts.items():
            shard, parameter = self.shard_of(name), self.parameters[name]
            for key, layout in fields.items():
                tensor = None
                if self.has(name):
                    state = self.optimizer.inner.state[parameter]
                    tensor = state.get(key)
                    if tensor is not None and tensor.layout != torch.strided:
                        tensor = state[key] = tensor.to_dense()
                    if tensor is None or tuple(tensor.shape) != layout.local_shape(shard):
                        tensor = state[key] = torch.zeros(layout.local_shape(shard), dtype=layout.dtype)
                yield f"{name}/{key}", Part(layout, shard, tensor)


def _state_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    return tensors


def _for_torch(parts: Mapping[str, Part], run: Together | None) -> dict[str, Any]:
    """What `torch.distributed.checkpoint` writes, or reads into: the memory of `parts`."""
    tensors: dict[str, Any] = {}
    for name, part in parts.items():
        with without_subclasses():
            local = None if part.tensor is None else part.tensor.detach().as_subclass(Tensor)
        if run is None or not part.layout.by_rows or name.partition("/")[0] not in run.divided:
            tensors[name] = local
            continue
        cuts = [(cut.start, cut.stop) for cut in part.layout.of(part.shard)]
        cuts += [(0, size) for size in part.layout.shape[len(cuts) :]]
        tensors[name] = make_sharded_tensor(local, cuts, part.layout.shape, run.rank, run.group)
    return tensors


def is_of_several(path: Any) -> bool:
    """Whether a checkpoint is one of several processes."""
    return (Path(path) / STATE).is_file()


def save(
    path: Any, state: State, key: bytes | None, run: Together, module: nn.Module, optimizer: PrivateOptimizer
) -> None:
    """Writes the checkpoint at `path`, a folder, on all ranks together."""
    with run.failing_together():
        _save(Path(path), state, key, run, module, optimizer)


def _save(
    target: Path, state: State, key: bytes | None, run: Together, module: nn.Module, optimizer: PrivateOptimizer
) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

    from sparsedp.distributed.storage import Writer

    mark, ledger = state.lineage.last
    digest = hashlib.sha256(repr(ledger.state_dict()).encode()).hexdigest()
    run.require_same({"its number of steps": ledger.steps, "its ledger": digest, "its place in the data": state.loader})
    optimizer.owner.settle_all()
    folder = target / mark
    if run.rank == 0:
        if target.is_file():
            raise CheckpointError(f"{target} is a file; a checkpoint of several processes is a folder.")
        folder.mkdir(parents=True)
    run.gather("the folder is there")
    held = Held(module, optimizer, run)
    layouts = run.merged(held.optimizer_layouts())
    numbers = run.merged(held.optimizer_numbers())
    parts = dict(held.model()) | dict(held.optimizer_parts(layouts))
    writer = Writer(folder, run.long_work.meet)
    run.long_work.meet()  # optimizer state may have been made
    with run.watched():
        save_state_dict(_for_torch(parts, run), storage_writer=writer, process_group=run.group)
    writer.write_metadata()
    digests = run.merged({name: {"digest": _digest(folder / name, key)} for name in _files_of(folder, run.rank)})
    if run.rank == 0:
        content = {
            "files": {name: value["digest"] for name, value in digests.items()},
            "layouts": {
                name: {k: layout.to_dict() for k, layout in fields.items()} for name, fields in layouts.items()
            },
            "numbers": numbers,
            "model": {name: part.layout.to_dict() for name, part in held.model()},
        }
        named = optimizer.named_state_dict()
        options = {"param_groups": named["param_groups"], **kinds_in(named)}
        small = replace(state, model={"of_several": content}, optimizer=options)
        checkpoint.save(target / STATE, small, key)
        for old in target.iterdir():
            if _MARK.fullmatch(old.name) and old.name != mark:  # whatever else is there is not ours
                shutil.rmtree(old)


def load(path: Any, key: bytes | None, **asked: Any) -> State:
    """The small file of a checkpoint, when it and all others are as they were written; see `sparsedp.checkpoint.load`."""
    state = checkpoint.load(Path(path) / STATE, key=key, **asked)
    folder = Path(path) / state.lineage.last[0]
    for name, digest in state.model["of_several"]["files"].items():
        if not (folder / name).is_file() or _digest(folder / name, key) != digest:
            raise CheckpointError(f"{folder / name} is missing, or not as it was written.")
    return state


def read_weights(path: Any) -> tuple[int, dict[str, Tensor]]:
    """The step of a checkpoint and its weights, whole, for one process. A weight with several names has the first."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

    content = torch.load(Path(path) / STATE, map_location="cpu", weights_only=True)
    layouts = {name: Layout.from_dict(values) for name, values in content["model"]["of_several"]["model"].items()}
    weights: dict[str, Any] = {name: torch.empty(layout.shape, dtype=layout.dtype) for name, layout in layouts.items()}
    load_state_dict(weights, checkpoint_id=Path(path) / content["mark"], no_dist=True)
    return int(content["loader"]["step"]), weights


def restore(
    path: Any, state: State, common: Ledger, module: nn.Module, optimizer: PrivateOptimizer, ledger: Ledger,
    loader: PrivateLoader, run: Together | None,
) -> Callable[[], None]:  # fmt: skip
    """As `sparsedp.checkpoint.restore`: between any number of processes that wrote it, and that read it."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

    from sparsedp.distributed.storage import Reader

    held = Held(module, optimizer, run)
    if "of_several" in state.model:
        content = state.model["of_several"]
        layouts = {
            name: {key: Layout.from_dict(values) for key, values in fields.items()}
            for name, fields in content["layouts"].items()
        }
        numbers, whole = content["numbers"], None
        shapes = {name: tuple(values["shape"]) for name, values in content["model"].items()}
    else:  # a file of one process
        layouts, numbers, whole = _read_whole(state, held)
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        again = names - {name for name, _ in module.named_parameters()}  # further names of shared weights
        shapes = {name: tuple(tensor.shape) for name, tensor in state.model.items() if name not in again}
    parts = dict(held.model())
    here = {name: part.layout.shape for name, part in parts.items()}
    if here != shapes:
        different = sorted(name for name in here.keys() | shapes.keys() if here.get(name) != shapes.get(name))
        raise CheckpointError(f"The checkpoint's model has other parameters or buffers: {', '.join(different[:5])}.")
    unknown = sorted((layouts.keys() | numbers.keys()) - held.parameters.keys())
    if unknown:
        raise CheckpointError(f"The checkpoint's optimizer has other parameters: {', '.join(unknown[:5])}.")
    mark, saved = state.lineage.last
    if run is not None:
        run.require_same({"the checkpoint that it loads": mark})
    loader.load_state_dict(state.loader)
    ledger.go_back(saved, common)
    optimizer.partly_loaded = True
    optimizer.forget()
    optimizer.preparation.state = state.prepared
    _load_options(optimizer, state.optimizer)
    for name, values in numbers.items():
        if held.has(name):
            optimizer.inner.state[held.parameters[name]].update(copy.deepcopy(values))
    parts |= dict(held.optimizer_parts(layouts))
    if state.torch_generator is not None:
        torch.set_rng_state(state.torch_generator)

    def finish() -> None:
        if whole is not None:
            for name, part in parts.items():
                if part.tensor is not None:
                    copy_mapped(part.tensor, whole[name][part.layout.of(part.shard)])
        else:
            try:
                group = None if run is None else run.group
                folder = Path(path) / state.lineage.last[0]
                reader = Reader(folder, (lambda: None) if run is None else run.long_work.meet)
                with nullcontext() if run is None else run.watched():
                    load_state_dict(
                        _for_torch(parts, run), storage_reader=reader, process_group=group, no_dist=run is None
                    )
            except RankLostError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path} could not be read: {one_line(error)}") from error
        optimizer.partly_loaded = False

    return finish


def _read_whole(
    state: State, held: Held
) -> tuple[dict[str, dict[str, Layout]], dict[str, dict[str, Any]], dict[str, Tensor]]:
    """What a file of one process has of the optimizer: layouts of its tensors, other values, and all tensors by name."""
    layouts: dict[str, dict[str, Layout]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    whole: dict[str, Tensor] = dict(state.model)
    for name, values in state.optimizer["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                is_table = name in held.tables
                value = value.to_dense() if value.layout != torch.strided else value
                by_columns = is_table and value.shape == held.tables[name].shape
                layouts.setdefault(name, {})[key] = Layout(tuple(value.shape), value.dtype, is_table, by_columns)
                whole[f"{name}/{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return layouts, numbers, whole


def _load_options(optimizer: PrivateOptimizer, saved: dict[str, Any]) -> None:
    """Learning rates and the like of the parameter groups."""
    groups, mine = saved["param_groups"], optimizer.named_state_dict()["param_groups"]
    if [group["params"] for group in mine] != [group["params"] for group in groups]:
        raise CheckpointError("The checkpoint's optimizer has other parameter groups.")
    try:
        require_same_optimizers(optimizer.inner, saved)
    except ValueError as error:
        raise CheckpointError(f"The checkpoint does not fit the optimizers: {error}.") from error
    for group, options in zip(optimizer.param_groups, groups):
        group.update({key: copy.deepcopy(value) for key, value in options.items() if key != "params"})


def _files_of(folder: Path, rank: int) -> list[str]:
    """The files that a rank wrote; rank 0 also the list of all tensors."""
    mine = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
    return mine + ([".metadata"] if rank == 0 else [])


def _digest(path: Path, key: bytes | None) -> str:
    """Of a file's content: where checkpoints are signed one that nobody can aim at, otherwise a checksum."""
    digest, checksum = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ):
            if key is None:
                checksum = zlib.crc32(piece, checksum)
            else:
                digest.update(piece)
    return digest.hexdigest() if key is not None else f"{path.stat().st_size}-{checksum:08x}"
