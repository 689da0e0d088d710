"""Tables of nn.Embedding and nn.EmbeddingBag that are divided among processes, under the names that they had.

`shard_tables` puts a `DividedEmbedding` or `DividedBag` in the place of each. It has this process's part of the weight, as its
parameter `weight`, and looks rows up through a sharded collection of TorchRec's that holds this one table. Names of parameters,
keys of a state_dict and noise are therefore those of the model in one process. In private training images stand for them, as
for TorchRec's own collections (`collections.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp._torch import without_functions
from sparsedp.capture.ops import absent
from sparsedp.distributed.placement import read_place
from sparsedp.distributed.requirements import require_torchrec
from sparsedp.errors import UnsupportedError
from sparsedp.tables import find_tables

if TYPE_CHECKING:
    from sparsedp.distributed.sharding import Sharding

SHARDINGS = ("row_wise", "table_wise", "column_wise", "data_parallel")
_MULTIPLE = 4  # of columns: what FBGEMM's kernels take
_TABLE, _FEATURE = "table", "ids"


class DividedTable:
    """A table in a sharded collection of its own."""

    def __init__(self, name: str, rows: int, dim: int, plan: Any) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.distributed.shard import shard
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan

        self.name, self.rows, self.dim = name, rows, dim
        config = EmbeddingConfig(name=_TABLE, num_embeddings=rows, embedding_dim=dim, feature_names=[_FEATURE])
        whole = EmbeddingCollection([config], device=torch.device("meta"))
        ranks = dist.get_world_size()
        sharding = construct_module_sharding_plan(
            whole, {_TABLE: plan}, local_size=ranks, world_size=ranks, device_type="cpu"
        )
        self.collection: Any = shard(whole, sharding, device=torch.device("cpu"))
        self.before_read: Callable[[Mapping[str, Tensor]], None] | None = None
        self.before_state: Callable[[], None] | None = None
        self.watched: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def sharding(self) -> Any:
        """TorchRec's plan of where the parts are."""
        return self.collection.module_sharding_plan[_TABLE]

    def state(self) -> Any:
        """The whole table, as TorchRec has it in a state_dict; settled."""
        if self.before_state is not None:
            self.before_state()
        return self.collection.state_dict()[f"embeddings.{_TABLE}.weight"]

    def local(self) -> tuple[Tensor | None, tuple[slice, slice]]:
        """The memory of this process's part, and where that is in the table; None if it has none."""
        for shard in self.collection.state_dict()[f"embeddings.{_TABLE}.weight"].local_shards():
            if shard.tensor.numel():
                begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                rows, columns = (slice(b, b + s) for b, s in zip(begin, size))
                return shard.tensor.detach(), (rows, columns)
        return None, (slice(0, 0), slice(0, 0))

    @torch.no_grad()
    def look_up(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, (..., dim), wherever they are. All processes have to ask, each for what it wants."""
        from torchrec import KeyedJaggedTensor

        with without_functions():
            flat = ids.detach().reshape(-1).long().contiguous()
            lowest, highest = map(int, torch.aminmax(flat)) if len(flat) else (0, 0)
            if not 0 <= lowest <= highest < self.rows:
                wrong = lowest if lowest < 0 else highest
                raise IndexError(f"id {wrong} is not a row of table '{self.name}', which has {self.rows}.")
            if self.before_read is not None:
                self.before_read({self.name: torch.unique(flat)})
            # All ids as those of one example: how many there are may differ from process to process.
            asked = KeyedJaggedTensor(keys=[_FEATURE], values=flat, lengths=torch.tensor([len(flat)]))
            with self.watched():
                found = self.collection(asked).wait()[_FEATURE].values()
            return found.detach().clone().view(*ids.shape, self.dim)


class _Divided:
    """What the classes below have in common. Each is a module of torch's with the attributes of the one that was divided."""

    weight: Any
    _table: DividedTable
    is_sharded = True

    @classmethod
    def like(cls, module: nn.Module, table: DividedTable, weight: nn.Parameter) -> Any:
        made: Any = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update({k: v for k, v in vars(module).items() if not k.startswith("_")})
        made.__dict__["_table"] = table  # not as a part of the module: the collection's names are none of the model's
        made.weight = weight
        return made

    @property
    def table(self) -> DividedTable:
        return self._table

    def listen(
        self,
        before_read: Callable[[Mapping[str, Tensor]], None] | None,
        before_state: Callable[[], None] | None,
        watched: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Sets what is called before rows are read and before weights leave, and what is entered around waiting."""
        table = self._table
        table.before_read, table.before_state, table.watched = before_read, before_state, watched

    def step_down(self) -> None:
        """Lets rows be looked up without the run that it stood in."""
        self.listen(None, None, nullcontext)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self._table.state()

    def _load_from_state_dict(self, *args: Any) -> None:
        """A checkpoint puts each process's part in its place."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"Table '{self._table.name}' cannot be copied or pickled: its rows are in several processes. Save a checkpoint, or "
            "engine.save_state_dict(path)."
        )


class DividedEmbedding(_Divided, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return self._table.look_up(input)


class DividedBag(_Divided, nn.EmbeddingBag):
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return self._pooled(input, offsets, per_sample_weights)

    def _pooled(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """What torch's own module would return, out of the rows that were looked up."""
        with torch.no_grad(), without_functions():
            found = self._table.look_up(input)
            places = torch.arange(input.numel()).view(input.shape)
            padding = None
            if self.padding_idx is not None:  # one more row stands for padding
                padding = input.numel()
                places = places.masked_fill(input == self.padding_idx % self._table.rows, padding)
            rows = torch.cat([found.view(-1, self._table.dim), found.new_zeros(1, self._table.dim)])
            given = None if weights is None else weights.detach()
            return F.embedding_bag(
                places, rows, offsets, mode=self.mode, per_sample_weights=given,
                include_last_offset=self.include_last_offset, padding_idx=padding,
            )  # fmt: skip


class EmbeddingImage(DividedEmbedding):
    """Stands for a `DividedEmbedding` in private training: its weight is the whole table, without memory."""

    def forward(self, input: Tensor) -> Tensor:
        found = self._table.look_up(input)
        return absent.embedding(input, self.weight, found=lambda: found, padding_idx=self.padding_idx)


class BagImage(DividedBag):
    """As `EmbeddingImage`."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        found = self._pooled(input, offsets, per_sample_weights)
        return absent.embedding_bag(
            input, self.weight, offsets, found=lambda: found, mode=self.mode,
            per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )  # fmt: skip


def make_image_of(divided: DividedEmbedding | DividedBag, weight: nn.Parameter | None) -> EmbeddingImage | BagImage:
    """The image; `weight` is that of another image of the same table."""
    table = divided.table
    if weight is None:
        weight = nn.Parameter(
            torch.empty(table.rows, table.dim, device="meta", dtype=divided.weight.dtype),
            requires_grad=divided.weight.requires_grad,
        )
    kind = EmbeddingImage if isinstance(divided, DividedEmbedding) else BagImage
    return kind.like(divided, table, weight)


# ---------------------------------------------------------------------- a model with tables in it


def shard_tables(model: nn.Module, sharding: str | Mapping[str, str] | Sharding = "row_wise") -> None:
    """Divides the tables of a model among the processes of the default group, in place; all of them call it.

    `sharding` is "row_wise" (each process has a range of rows of every table), "table_wise" (each table is on one process, so
    that all have about as much), "column_wise" (each process has some columns) or "data_parallel" (every process has all
    tables, and nothing is done). Or it says for each table, by the name of its weight, which of these it is and on which
    ranks: what `choose_sharding` returns, or texts such as "table_wise 3", "column_wise 0 2" and "row_wise". Tables are those
    of nn.Embedding, nn.EmbeddingBag and of TorchRec's collections. Each process has the same weights before, and keeps its part
    of them. An optimizer is made afterwards.
    """
    if isinstance(sharding, str):
        if sharding not in SHARDINGS:
            raise UnsupportedError(f"sharding must be one of {', '.join(SHARDINGS)}, not {sharding!r}")
        places = None
    else:
        places = dict(sharding if isinstance(sharding, Mapping) else sharding.places)
        _require_places(places, find_tables(model))
    if dist.get_world_size() == 1 or set([sharding] if places is None else places.values()) == {"data_parallel"}:
        return
    require_torchrec()
    collections = list(_collections(model))
    inside = tuple(f"{name}." for name, _ in collections)
    by_weight: dict[int, list[tuple[str, nn.Embedding | nn.EmbeddingBag]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not f"{name}.".startswith(inside):
            by_weight.setdefault(id(module.weight), []).append((name, module))
    weights = {f"{parts[0][0]}.weight".lstrip("."): parts for parts in by_weight.values()}
    if places is not None:
        weights = {name: parts for name, parts in weights.items() if places[name] != "data_parallel"}
    sizes = {name: parts[0][1].weight for name, parts in weights.items()}
    sizes |= {f"{name}.{key}": weight for name, part in collections for key, weight in part.named_parameters()}
    for name, weight in sizes.items():
        if weight.dtype != torch.float32 or weight.device.type not in ("cpu", "meta"):
            raise UnsupportedError(
                f"Table '{name}' is {weight.dtype} on {weight.device}; tables of float32 on the CPU are divided."
            )
    shapes = {name: (len(weight), weight.shape[1]) for name, weight in sizes.items()}
    plans = _plans(shapes, str(sharding)) if places is None else _plans_of(shapes, places)
    for name, parts in weights.items():
        _divide(model, name, parts, plans[name])
    for name, collection in collections:
        _shard_collection(model, name, collection, plans)


def _collections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    for name, module in model.named_modules():
        if type(module) in (EmbeddingBagCollection, EmbeddingCollection):
            yield name, module


def _require_places(places: Mapping[str, str], tables: Iterable[str]) -> None:
    """Raises if the places of tables are not those of the model's tables, or none of these ranks."""
    ranks = dist.get_world_size()
    different = sorted(places.keys() ^ set(tables))
    if different:
        problem = (
            "is no table of the model"
            if different[0] in places
            else "is a table of the model, of which nothing is said"
        )
        raise UnsupportedError(f"The places of tables are of another model: '{different[0]}' {problem}. Plan again.")
    for name, text in places.items():
        try:
            _, numbers = read_place(text)
        except ValueError as error:
            raise UnsupportedError(f"Table '{name}': {error}.") from None
        if numbers and max(numbers) >= ranks:
            raise UnsupportedError(
                f"Table '{name}' is planned for rank {max(numbers)}, and there are {ranks} processes: plan for as many "
                f"(sparsedp plan CONFIG --nproc {ranks}), or choose row_wise."
            )


def _require_columns(name: str, dim: int, parts: int = 1) -> None:
    if dim % (_MULTIPLE * parts) == 0:
        return
    if dim % _MULTIPLE == 0:
        raise UnsupportedError(
            f"Table '{name}' has {dim} columns, which {parts} processes cannot have in multiples of {_MULTIPLE}."
        )
    raise UnsupportedError(
        f"Table '{name}' has {dim} columns, and the kernels under TorchRec take multiples of {_MULTIPLE}. Give it such a "
        "number (of a bundled model: model.dim), or leave tables whole on every process: data_parallel."
    )


def _plans_of(sizes: Mapping[str, tuple[int, int]], places: Mapping[str, str]) -> dict[str, Any]:
    """As `_plans`, where a place is said of each table."""
    from torchrec.distributed import sharding_plan as torchrec

    plans: dict[str, Any] = {}
    for name, (_, dim) in sizes.items():
        kind, ranks = read_place(places[name])
        if kind == "data_parallel":  # in a collection
            plans[name] = torchrec.data_parallel()
            continue
        _require_columns(name, dim, max(1, len(ranks)))
        if kind == "row_wise":
            plans[name] = torchrec.row_wise(compute_kernel="fused")
        elif kind == "table_wise":
            plans[name] = torchrec.table_wise(rank=ranks[0], compute_kernel="fused")
        else:
            plans[name] = torchrec.column_wise(ranks=list(ranks), compute_kernel="fused")
    return plans


def _plans(sizes: Mapping[str, tuple[int, int]], sharding: str) -> dict[str, Any]:
    """Where the parts of each table (rows, dim) go."""
    from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

    ranks = dist.get_world_size()
    for name, (_, dim) in sizes.items():
        _require_columns(name, dim)
    load = [0] * ranks
    plans: dict[str, Any] = {}
    for name, (rows, dim) in sorted(sizes.items(), key=lambda item: -item[1][0] * item[1][1]):  # the largest first
        if sharding == "row_wise":
            plans[name] = row_wise(compute_kernel="fused")
        elif sharding == "table_wise":
            rank = load.index(min(load))
            plans[name] = table_wise(rank=rank, compute_kernel="fused")
            load[rank] += rows * dim
        else:
            blocks = dim // _MULTIPLE
            count = max(n for n in range(1, ranks + 1) if blocks % n == 0)
            chosen = sorted(sorted(range(ranks), key=load.__getitem__)[:count])
            plans[name] = column_wise(ranks=chosen, compute_kernel="fused")
            for rank in chosen:
                load[rank] += rows * dim // count
    return plans


@torch.no_grad()
def _divide(model: nn.Module, name: str, parts: list[tuple[str, nn.Embedding | nn.EmbeddingBag]], plan: Any) -> None:
    """Puts divided ones in the place of modules that share a weight."""
    weight = parts[0][1].weight
    table = DividedTable(name, len(weight), weight.shape[1], plan)
    memory, where = table.local()
    if memory is None:
        memory = weight.new_empty(0, table.dim)
    else:
        memory.copy_(weight[where])
    mine = nn.Parameter(memory, requires_grad=weight.requires_grad)
    for path, module in parts:
        if not path:
            raise UnsupportedError("The model is a table itself. Make it a part of a module.")
        parent, _, last = path.rpartition(".")
        kind = DividedBag if isinstance(module, nn.EmbeddingBag) else DividedEmbedding
        setattr(model.get_submodule(parent), last, kind.like(module, table, mine))


@torch.no_grad()
def _shard_collection(model: nn.Module, name: str, collection: Any, plans: Mapping[str, Any]) -> None:
    from torchrec.distributed.shard import shard
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan

    group = "embedding_bags" if hasattr(collection, "embedding_bags") else "embeddings"
    weights = dict(collection.named_parameters())
    of_tables = {table: plans[f"{name}.{group}.{table}.weight"] for table in getattr(collection, group)}
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(collection, of_tables, local_size=ranks, world_size=ranks, device_type="cpu")
    sharded: Any = shard(collection, plan, device=torch.device("cpu"))
    for key, value in sharded.state_dict().items():
        if isinstance(value, Tensor):  # of a table that every process has whole
            value.copy_(weights[key])
            continue
        for local in value.local_shards():
            begin, size = local.metadata.shard_offsets, local.metadata.shard_sizes
            local.tensor.copy_(weights[key][tuple(slice(b, b + s) for b, s in zip(begin, size))])
    for key, parameter in sharded.named_parameters():
        parameter.requires_grad_(weights[key].requires_grad)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, sharded)
