"""TorchRec's sharded collections of tables, in a private module: images stand where they stood, and are captured.

An image is TorchRec's own unsharded collection on the device "meta": the same names, shapes and code, without memory. For its
forward pass it lets the sharded collection look up what the batch asks for, without gradients, and hands out each feature's
part of the result where the unsharded code would look it up itself. So capture sees lookups in whole tables, as in one process,
and TorchRec's own backward pass, which would ship unclipped gradients, never runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp._torch import without_functions
from sparsedp.capture.ops import absent
from sparsedp.distributed.embeddings import DividedBag, DividedEmbedding
from sparsedp.distributed.placement import PlacedShard
from sparsedp.errors import SparseDPWarning, UnsupportedError
from sparsedp.kernels.loops import group
from sparsedp.tables import Shard

BeforeRead = Callable[
    [Mapping[str, Tensor]], None
]  # told the rows of each table that are about to be read, distinct, ascending

_SHARDINGS = ("row_wise", "table_wise", "column_wise", "table_row_wise", "data_parallel")
_KERNELS = ("fused", "dense")
# Why others are not among them.
_REASONS = {
    "grid_shard": "TorchRec's own mean pooling is wrong under it: it does not divide by the number of ids there",
    "table_column_wise": "it may put several parts of a table on one rank, which moves and noises one part of each",
}


class _AbsentBag(nn.EmbeddingBag):
    """A table of an image; `found` are the results of its next lookups."""

    found: list[Tensor]

    def forward(self, input: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return absent.embedding_bag(
            input, self.weight, offsets, found=partial(self.found.pop, 0), mode=self.mode,
            per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset,
        )  # fmt: skip

    def _load_from_state_dict(self, *args: Any) -> None:
        """The image loads for all of its tables."""


class _AbsentEmbedding(nn.Embedding):
    """As `_AbsentBag`, of a collection that does not add rows up."""

    found: list[Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return absent.embedding(input, self.weight, found=partial(self.found.pop, 0))

    def _load_from_state_dict(self, *args: Any) -> None:
        """The image loads for all of its tables."""


def make_image(name: str, sharded: nn.Module) -> nn.Module:
    """The image of a sharded collection, `name` in the module."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    unsharded: Any = (
        EmbeddingBagCollection if isinstance(sharded, ShardedEmbeddingBagCollection) else EmbeddingCollection
    )

    class Image(_ImageMethods, unsharded):
        pass

    meta = torch.device("meta")
    if isinstance(sharded, ShardedEmbeddingBagCollection):
        image = Image(tables=sharded._embedding_bag_configs, is_weighted=sharded._is_weighted, device=meta)
    else:
        image = Image(tables=sharded._embedding_configs, device=meta, need_indices=sharded._need_indices)
    image.stand_for(name, sharded)
    return image


class _ImageMethods:
    """What an image does otherwise than the unsharded collection."""

    is_sharded = True
    sharded: nn.Module
    warned: bool  # of another order of features
    looks_up: bool  # whether it calls the sharded one
    watches: list[Any]  # hooks of the sharded one
    prefix: str  # of the names of its tables in the module
    before_read: BeforeRead | None
    before_state: Callable[[], None] | None  # called before weights leave
    _feature_names: list[list[str]]  # TorchRec's own, as the two below
    _embedding_names: list[str]
    _embedding_names_by_table: list[list[str]]
    watched: Callable[[], AbstractContextManager[Any]]  # entered around whatever waits for other ranks

    def stand_for(self, name: str, sharded: nn.Module) -> None:
        # Not as attributes of a module: the sharded one is not a part of the image.
        self.__dict__.update(
            sharded=sharded, prefix=f"{name}.", before_read=None, before_state=None, watched=nullcontext
        )
        self.__dict__.update(warned=False, looks_up=False)
        # Whoever kept the sharded one from before would train it by TorchRec's own backward pass, or read what is owed noise.
        self.__dict__["watches"] = [
            sharded.register_forward_pre_hook(self._refuse_others),
            sharded.register_state_dict_pre_hook(lambda *_: self.before_state and self.before_state()),
        ]
        trained = {key: p.requires_grad for key, p in sharded.named_parameters()}
        kind = _AbsentBag if hasattr(self, "embedding_bags") else _AbsentEmbedding
        for key, table in self.tables().items():
            table.__class__ = kind
            table.__dict__["found"] = []
            table.weight.requires_grad_(trained[key])

    def _refuse_others(self, sharded: nn.Module, args: Any) -> None:
        if not self.looks_up:
            raise UnsupportedError(
                f"The sharded collection '{self.prefix[:-1]}' was called itself, by a reference from before make_private. "
                "Nothing would clip what its own backward pass does: call the module's attribute, where the private one is."
            )

    def listen(
        self,
        before_read: BeforeRead | None,
        before_state: Callable[[], None] | None,
        watched: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Sets what is called before rows are read and before weights leave, and what is entered around waiting."""
        self.__dict__.update(before_read=before_read, before_state=before_state, watched=watched)

    def step_down(self) -> None:
        """Lets the sharded collection be called again."""
        self.listen(None, None, nullcontext)
        for watch in self.watches:
            watch.remove()

    def tables(self) -> dict[str, Any]:
        """The tables by the names of their weights in the collection."""
        group = "embedding_bags" if hasattr(self, "embedding_bags") else "embeddings"
        return {f"{group}.{name}.weight": table for name, table in getattr(self, group).items()}

    def features(self) -> dict[str, list[str]]:
        """The names of the features that are looked up in each table."""
        return dict(zip(self.tables(), self._feature_names))

    def forward(self, features: Any) -> Any:
        if features.variable_stride_per_key():
            raise UnsupportedError(
                "A KeyedJaggedTensor with another batch for each feature is refused: which of its values are of the same "
                "example, whose gradient is to be clipped as a whole, is not known. Give every feature a length for each "
                "example of the batch, 0 where it has no ids."
            )
        # What it keeps besides these, such as the parts of each feature, may be of other values: capture and the sharded
        # collection would not look up the same.
        features = _of_parts(features, features.weights_or_none())
        with torch.no_grad(), without_functions():
            self._look_up(features)
        return super().forward(features)  # type: ignore[misc]

    def _look_up(self, features: Any) -> None:
        """Lets the sharded collection look everything up, and gives each table its results."""
        # TorchRec's sharded collections take weights that come along, also those which unsharded ones leave alone.
        weights = features.weights_or_none() if getattr(self, "_is_weighted", False) else None
        # Another object: it keeps what is computed of it, and capture has not seen that being made.
        copy = _of_parts(features, weights)
        parts = dict(zip(copy.keys(), copy.values().split(copy.length_per_key())))
        self._require_rows(parts)
        if self.before_read is not None:
            self.before_read({
                self.prefix + key: group(torch.cat([parts[name] for name in names]).long())[0]
                for key, names in self.features().items()
            })  # fmt: skip
        with self.watched():
            self.__dict__["looks_up"] = True
            try:
                found = self.sharded(copy)
            finally:
                self.__dict__["looks_up"] = False
            self._hand_out(found.wait() if hasattr(found, "wait") else found)

    def _require_rows(self, parts: Mapping[str, Tensor]) -> None:
        """Raises if an id of a feature is not a row of the feature's table."""
        rows = {key: table.weight.shape[0] for key, table in self.tables().items()}
        looked_up = [(key, parts[name]) for key, names in self.features().items() for name in names]
        ids = torch.cat([part for _, part in looked_up])
        limits = torch.tensor([rows[key] for key, _ in looked_up])
        limits = limits.repeat_interleave(torch.tensor([len(part) for _, part in looked_up]))
        if not ((ids < 0) | (ids >= limits)).any():  # one look for all features
            return
        for key, names in self.features().items():
            for name in names:
                least, most = map(int, parts[name].aminmax()) if len(parts[name]) else (0, 0)
                if not 0 <= least <= most < rows[key]:
                    wrong = least if least < 0 else most
                    raise IndexError(
                        f"Feature {name}: id {wrong} is not a row of table '{key}', which has {rows[key]}."
                    )

    def _hand_out(self, found: Any) -> None:
        if hasattr(self, "embedding_bags"):
            results = {name: found[name] for name in found.keys()}  # noqa: SIM118  a KeyedTensor
            names = iter(self._embedding_names)
            if list(results) != self._embedding_names and not self.warned:
                self.__dict__["warned"] = True
                warnings.warn(
                    f"TorchRec's sharded collection '{self.prefix[:-1]}' gives features in the order {', '.join(results)}; in "
                    f"private training they come as in one process, {', '.join(self._embedding_names)}. A model that takes "
                    ".values() of the result would see another order after engine.close(): take result[name], or regroup.",
                    SparseDPWarning,
                    stacklevel=2,
                )
        else:
            results = {name: jagged.values() for name, jagged in found.items()}
            names = (name for names in self._embedding_names_by_table for name in names)
        for key, table in self.tables().items():
            table.found[:] = [results[next(names)].detach().clone() for _ in self.features()[key]]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """That of the sharded collection, settled."""
        return self.sharded.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A private module with sharded tables cannot be copied or pickled: its rows are in several processes. Save a "
            "checkpoint, or engine.close() and state_dict()."
        )

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list, unexpected: list, errors: list
    ) -> None:
        own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        keys = self.sharded.load_state_dict(own, strict=False)
        missing += [prefix + key for key in keys.missing_keys]
        unexpected += [prefix + key for key in keys.unexpected_keys]


def _of_parts(features: Any, weights: Tensor | None) -> Any:
    """A KeyedJaggedTensor of the same ids, by keys, values and lengths alone."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=features.keys(), values=features.values(), weights=weights,
        lengths=features.lengths(), stride=features.stride(),
    )  # fmt: skip


# ---------------------------------------------------------------------- a module with collections in it


def divided_tables(module: nn.Module) -> Iterator[tuple[str, DividedEmbedding | DividedBag]]:
    """The parts of a module that `shard_tables` made, by name."""
    for name, part in module.named_modules():
        if isinstance(part, (DividedEmbedding, DividedBag)):
            yield name, part


def sharded_collections(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """TorchRec's sharded parts of a module, the outermost ones, by name; raises for those that cannot be private."""
    if "torchrec" not in sys.modules:
        return
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.types import ShardedModule

    inside: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if not isinstance(part, ShardedModule) or name.startswith(inside):
            continue
        inside = (*inside, f"{name}.")
        if type(part) not in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
            raise UnsupportedError(
                f"Module '{name}' ({type(part).__name__}): of TorchRec's sharded modules EmbeddingBagCollection and "
                "EmbeddingCollection can be trained privately. Managed collision and pruning change ids by the data, which is "
                "a release of its own, and others hide their lookups."
            )
        if getattr(part, "_use_index_dedup", False):
            raise UnsupportedError(
                f"Module '{name}' looks each id of a batch up once for all examples (use_index_dedup), for which FBGEMM has "
                "nothing on CPUs. Rows of an example are merged here: make EmbeddingCollectionSharder without it, and "
                "set_ec_index_dedup(False)."
            )
        yield name, part


def placement_of(name: str, sharded: nn.Module) -> dict[str, tuple[PlacedShard, ...]]:
    """Where the shards of a collection's tables are, by the names of the tables in the module; () for a replicated one."""
    group = "embedding_bags" if hasattr(sharded, "embedding_bags") else "embeddings"
    plan: Any = sharded.module_sharding_plan
    return placement_in({f"{name}.{group}.{table}.weight": sharding for table, sharding in plan.items()})


def placement_in(plan: Mapping[str, Any]) -> dict[str, tuple[PlacedShard, ...]]:
    """As `placement_of`, of TorchRec's plan for each table."""
    placed: dict[str, tuple[PlacedShard, ...]] = {}
    for full, sharding in plan.items():
        kind, kernel = sharding.sharding_type, sharding.compute_kernel
        if kind not in _SHARDINGS:
            reason = _REASONS.get(kind, "where its rows are then is not known here")
            raise UnsupportedError(
                _refused(full, f"sharding type '{kind}'", reason, f"Use one of {', '.join(_SHARDINGS)}")
            )
        if kernel not in _KERNELS:
            reason = "it keeps rows in a cache or a store of its own, and here they are moved where they are"
            raise UnsupportedError(_refused(full, f"compute kernel '{kernel}'", reason, "Use 'fused'"))
        if kind == "data_parallel":
            placed[full] = ()
            continue
        parts = tuple(
            PlacedShard(shard.placement.rank(), _shard(shard.shard_offsets, shard.shard_sizes))
            for shard in sharding.sharding_spec.shards
        )
        held = [part.rank for part in parts if len(part.shard.rows)]
        if len(set(held)) < len(held):
            reason = "a rank moves and noises one part of each"
            raise UnsupportedError(_refused(full, "several shards on one rank", reason, "Give each rank one shard"))
        placed[full] = tuple(part for part in parts if len(part.shard.rows))
    return placed


def _shard(offsets: list[int], sizes: list[int]) -> Shard:
    (row, column), (rows, columns) = offsets, sizes
    return Shard(range(row, row + rows), range(column, column + columns))


def _refused(table: str, what: str, reason: str, instead: str) -> str:
    return f"Table '{table}' has {what}, which cannot be trained privately: {reason}. {instead}."


def local_shards(sharded: nn.Module) -> dict[str, Tensor]:
    """The memory of the shards that this rank has, by the names of the tables in the collection."""
    from torch.distributed.tensor import DTensor

    shards = {}
    for key, value in sharded.state_dict().items():
        if hasattr(value, "local_shards"):
            local = value.local_shards()
            if local:
                shards[key] = local[0].tensor.detach()
        elif isinstance(value, DTensor):  # of ShardingEnv(output_dtensor=True): it wraps a list of shards
            wrapped: Any = value.to_local()
            if parts := wrapped.local_shards():
                shards[key] = parts[0].detach()
        elif isinstance(value, Tensor):
            shards[key] = value.detach()
    return shards
