"""A module, its optimizer and its data in several processes that train one model: what `make_private` needs to know of them."""

from __future__ import annotations

import hmac
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp._torch import get_timeout, set_timeout
from sparsedp.capture import RowSpace
from sparsedp.distributed.collections import (
    divided_tables,
    local_shards,
    make_image,
    placement_in,
    placement_of,
    sharded_collections,
)
from sparsedp.distributed.embeddings import DividedTable, make_image_of
from sparsedp.distributed.long_work import LongWork
from sparsedp.distributed.placement import PlacedShard, Placement
from sparsedp.distributed.ranks import ProcessRanks
from sparsedp.distributed.requirements import require_torchrec
from sparsedp.distributed.torchrec_optimizers import refuse_means_over_columns
from sparsedp.errors import RankLostError, SparseDPError, UnsupportedError
from sparsedp.fingerprint import fingerprint
from sparsedp.noise import RandomKey
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import PrivateLoader, Share, Users, is_repeatable
from sparsedp.several_optimizers import parts_of
from sparsedp.signature import sign_order
from sparsedp.tables import Owner, Shard, TableSpec
from sparsedp.version import __version__


def is_distributed(module: nn.Module) -> bool:
    """Whether several processes train a module together, or one that has TorchRec's sharded collections."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    inner = unwrapped(module)
    return dist.get_world_size() > 1 or any(True for _ in (*sharded_collections(inner), *divided_tables(inner)))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, without TorchRec's DistributedModelParallel around it."""
    inner = getattr(module, "_dmp_wrapped_module", None)
    return module if inner is None else inner


@dataclass(eq=False)
class Together:
    """The part that this process has in a run of several."""

    group: Any
    rank: int
    count: int
    long_work: LongWork
    images: dict[str, Any] = field(default_factory=dict)  # of the sharded collections, by name
    # Of their tables; () for those that every rank has as a whole.
    placement: dict[str, tuple[PlacedShard, ...]] = field(default_factory=dict)
    told: bool = False  # whether ranks were told of an error
    watched: Callable[[], AbstractContextManager[None]] = nullcontext  # around messages: names the ranks that are lost
    # Where images stand: the module, the attribute, and the sharded collection that was there.
    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    # Of their tables: this rank's shards, for the optimizer.
    held: dict[str, nn.Parameter] = field(default_factory=dict)
    # What the optimizer has in the place of TorchRec's own parameters, which it is given back at the end.
    optimizer: Optimizer | None = None
    exchanged: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    timeout_before: timedelta | None = None  # of the default group, through which TorchRec looks rows up

    def held_parameters(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {name: self.held.get(name, parameter) for name, parameter in parameters.items()}

    def ranks(self, tables: Mapping[str, TableSpec], dtype: torch.dtype) -> ProcessRanks:
        placed = {name: self.placement.get(name, ()) for name in tables}
        everywhere = frozenset(name for name, parts in placed.items() if not parts)
        for name in everywhere:
            whole = Shard(range(tables[name].rows), range(tables[name].dim))
            placed[name] = tuple(PlacedShard(rank, whole) for rank in range(self.count))
        ranks = ProcessRanks(self.group, Placement(self.count, placed, everywhere), tables, dtype)
        self.watched = ranks.watched
        return ranks

    def settle_before_reads(self, owner: Owner, ranks: ProcessRanks, tables: Mapping[str, TableSpec]) -> None:
        """From now on, owners settle rows before a sharded collection reads them, and all before its weights leave it."""

        def before_read(rows: Mapping[str, Tensor]) -> None:
            space = RowSpace.of({name: tables[name] for name in rows if name in tables})
            asked = space.split(ranks.exchange(space, space.join({name: rows[name] for name in space.names})).rows)
            for name, numbers in asked.items():
                if ranks.owns(name) and len(numbers):
                    owner.before_read(name, numbers)

        for image in self.images.values():
            image.listen(before_read if owner.adds_noise else None, owner.settle_all, ranks.watched)

    def put_image(self, module: nn.Module, name: str, image: Any) -> None:
        """Lets an image stand for the part `name` of the module."""
        parent, _, last = name.rpartition(".")
        owner = module.get_submodule(parent)
        self.places.append((owner, last, getattr(owner, last)))
        setattr(owner, last, image)
        self.images[name] = image

    def close(self) -> None:
        """Puts the sharded collections and their parameters back where they were, and lets ranks wait for as long as before."""
        for parent, last, sharded in self.places:
            setattr(parent, last, sharded)
        for image in self.images.values():
            image.step_down()
        if self.optimizer is not None:
            _replace(self.optimizer, {mine: given for given, mine in self.exchanged.items()})
            self.optimizer = None
        if self.timeout_before is not None:
            set_timeout(dist.group.WORLD, self.timeout_before)
            self.timeout_before = None

    def gather(self, value: Any) -> list[Any]:
        """What all ranks have. Raises if one of them has failed (`tell`) instead."""
        return self._gather(None, value)

    def tell(self, error: Exception) -> None:
        """Lets the other ranks, which wait for this one in `gather`, know why it does not come."""
        if not self.told:
            with suppress(RuntimeError, SparseDPError):  # they may be gone, or have failed, too
                self._gather(f"{type(error).__name__}: {error}", None)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If what happens inside fails on one rank, all raise. Inside, ranks wait for each other in `gather` alone."""
        self.told = False
        try:
            yield
        except RankLostError:  # nobody can be told
            raise
        except Exception as error:
            self.tell(error)
            raise
        self.gather("done")

    def _gather(self, failure: str | None, value: Any) -> list[Any]:
        every: list[Any] = [None] * self.count
        self.long_work.meet()
        with self.watched():
            dist.all_gather_object(every, (failure, value), group=self.group)
        failed = [(rank, text) for rank, (text, _) in enumerate(every) if text is not None]
        self.told = bool(failed)
        if failed and failure is None:
            raise SparseDPError(f"On rank {failed[0][0]}: {failed[0][1]}")
        return [value for _, value in every]

    def share(self, data: Any, users: Users | None, own_data: bool) -> Share | None:
        """Which units of each batch this process reads."""
        if self.count == 1:
            return None
        self.require_same({"own_data": own_data})
        if not own_data:
            return Share(self.rank, self.count)
        if users is None:
            return Share.of_own_data(self.rank, self.gather(len(data)))
        self._require_apart(users)
        sizes = self.gather(users.sizes)
        return Share.of_own_data(self.rank, [len(part) for part in sizes], sizes)

    def _require_apart(self, users: Users) -> None:
        """A user on two ranks would count as two units, each protected alone."""
        ids = self.gather(users.ids)
        for rank, mine in enumerate(ids):
            for other in range(rank):
                common = np.intersect1d(mine, ids[other], assume_unique=True)
                if len(common):
                    raise UnsupportedError(
                        f"{len(common)} user(s) have examples on rank {other} and on rank {rank}. All examples of a user have to "
                        "be on one rank: divide the data by users."
                    )

    def begin(
        self,
        plan: PrivacyPlan,
        module: nn.Module,
        tables: Mapping[str, TableSpec],
        loader: PrivateLoader,
        key: RandomKey,
    ) -> ProcessRanks:
        """Makes sure that all ranks are about to do the same, and sends them the dense parameters of rank 0."""
        if not plan.mechanism.takes_ranks:
            raise UnsupportedError(
                f"The mechanism '{plan.mechanism.name}' selects by what it sees of a batch itself, and cannot train in several "
                "processes. It would have to ask step.exchange and set takes_ranks."
            )
        copied = sorted(tables.keys() - self.placement.keys())
        if plan.mechanism.noise_waits and copied:
            raise UnsupportedError(
                f"Table '{copied[0]}' is on every rank as a whole, outside of TorchRec's collections. With "
                f"{plan.mechanism.name}, a rank that reads its rows would settle them, and the others would not hear of it. "
                "Divide it: sparsedp.distributed.shard_tables(model), before the optimizer is made."
            )
        self.require_same({
            "the plan": plan.hash, "torch": torch.__version__, "SparseDP": __version__, "TorchRec": _torchrec_version(),
            "max_physical_batch": loader.max_physical_batch, "the steps of an epoch": loader.steps_per_epoch,
            "the data": None if loader.share.begin is not None else _digest_of_data(loader, key, loader.dataset_size),
            "what belongs together in the data": None if loader.share.begin is not None else _digest_of_order(loader, key),
            **{f"parameter '{name}'": _described(p) for name, p in module.named_parameters()},
            **{f"buffer '{name}'": _described(b) for name, b in module.named_buffers()},
            **{f"the sharding of '{name}'": str(parts) for name, parts in self.placement.items()},
        })  # fmt: skip
        if loader.share.begin is not None:
            self._require_other_data(loader, key)
        self.send_dense(module)
        return self.ranks(tables, next(iter(tables.values())).dtype if tables else torch.float32)

    def _require_other_data(self, loader: PrivateLoader, key: RandomKey) -> None:
        """Where each rank has data of its own, an example that two of them have would count twice."""
        sizes = self.gather(len(loader.dataset))  # type: ignore[arg-type]
        every = self.gather(_digest_of_data(loader, key, min(sizes)))
        for rank, mine in enumerate(every):
            if mine is not None and mine in every[:rank]:
                raise UnsupportedError(
                    f"Ranks {every.index(mine)} and {rank} have the same examples. With own_data=True each rank reads a part of "
                    "the data that no other has. Leave it out where all ranks read the same data set."
                )

    @property
    def divided(self) -> set[str]:
        """The tables of which each rank has a part alone."""
        return {name for name, parts in self.placement.items() if parts}

    def merged(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What all ranks know of things by name: where several know of one, the first of them says."""
        every = self.gather({name: dict(known) for name, known in values.items()})
        merged: dict[str, dict[str, Any]] = {}
        for known in reversed(every):
            for name, entries in known.items():
                merged[name] = {**merged.get(name, {}), **entries}
        return merged

    def from_rank_0(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def share_key(self, key: RandomKey) -> RandomKey:
        """Rank 0's key, for all ranks. It is sent once, and never written down."""
        return RandomKey(*self.from_rank_0((key.secret, key.seeded)))

    def require_same(self, what: Mapping[str, Any]) -> None:
        """Raises on all ranks if one has something else than rank 0."""
        every = self.gather(dict(what))
        for rank, other in enumerate(every):
            different = [name for name in (*every[0], *other) if other.get(name) != every[0].get(name)]
            if different:
                name = different[0]
                raise SparseDPError(
                    f"Rank {rank} differs from rank 0 in {name}: {other.get(name)!r} there, {every[0].get(name)!r} on rank 0. "
                    "All ranks must train the same model with the same settings, on the data and versions that belong together."
                )

    def send_dense(self, module: nn.Module) -> None:
        """Rank 0's dense parameters and buffers, and tables that all have as a whole, for all ranks."""
        copies = [self.held[name] for name, parts in self.placement.items() if not parts]
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *copies):
                if not tensor.is_meta:
                    dist.broadcast(tensor.data, src=0, group=self.group)


@contextmanager
def together(module: nn.Module, optimizer: Optimizer, timeout: timedelta) -> Iterator[Together | None]:
    """Lets images stand for the sharded collections of a module; not if what happens inside fails.

    None where this process trains alone. Ranks wait for each other for at most `timeout`.
    """
    if not is_distributed(module):
        yield None
        return
    inner = unwrapped(module)
    _refuse_wrapped(inner)
    rank, count = dist.get_rank(), dist.get_world_size()
    run = Together(dist.new_group(backend="gloo", timeout=timeout), rank, count, LongWork(rank, count, timeout))
    run.timeout_before = get_timeout(dist.group.WORLD)
    set_timeout(dist.group.WORLD, timeout)
    try:
        for name, sharded in list(sharded_collections(inner)):
            require_torchrec()
            if not name:
                raise UnsupportedError("The module is a sharded collection itself. Make it a part of a module.")
            run.placement |= placement_of(name, sharded)
            run.put_image(inner, name, make_image(name, sharded))
            shards = _held_shards(name, sharded)
            run.held |= {f"{name}.{key}": mine for key, (_, mine) in shards.items()}
            run.exchanged |= dict(shards.values())
        _replace(optimizer, run.exchanged)
        run.optimizer = optimizer
        weights: dict[DividedTable, nn.Parameter] = {}  # of images, by their tables: modules may share one
        for name, divided in list(divided_tables(inner)):
            table = divided.table
            if table not in weights:
                table.name = f"{name}.weight"
                run.placement |= placement_in({table.name: table.sharding})
                run.held[table.name] = divided.weight
            image = make_image_of(divided, weights.get(table))
            weights[table] = image.weight
            run.put_image(inner, name, image)
        refuse_means_over_columns(optimizer, run.placement, run.held)
        yield run
        run.gather("ready")
    except BaseException as error:
        run.close()
        if isinstance(error, Exception):
            run.tell(error)
        raise


def _refuse_wrapped(module: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise UnsupportedError(
                f"Module '{name}' is wrapped in DistributedDataParallel, which would add up unclipped gradients. With TorchRec, "
                "make DistributedModelParallel(module, init_data_parallel=False), or use torchrec.distributed.shard."
            )
        if isinstance(part, (FSDPModule, FullyShardedDataParallel)):  # of fully_shard, and of FSDP's first version
            raise UnsupportedError(
                f"Module '{name}' is under FSDP, whose own backward pass adds up gradients of all ranks, and divides them among "
                "these, before any example's is clipped. Leave the dense part whole on every rank: without fully_shard, its "
                "clipped sums are added up over the ranks."
            )


def _held_shards(name: str, sharded: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """TorchRec's parameters, which are views of this rank's shards, and leaves with the same memory, by name."""
    memory = local_shards(sharded)
    return {
        key: (given, nn.Parameter(memory[key] if key in memory else given.detach(), requires_grad=given.requires_grad))
        for key, given in sharded.named_parameters()
    }


def _replace(optimizer: Optimizer, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Lets an optimizer have other parameters in the place of some."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
        for before, after in others.items():
            if before in part.state:  # Adagrad makes its own when it is made
                part.state[after] = part.state.pop(before)


def _torchrec_version() -> str | None:
    return getattr(sys.modules.get("torchrec"), "__version__", None)


_COMPARED = 16  # examples that are compared among the ranks


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {'trained' if tensor.requires_grad else 'not trained'}"


def _digest_of_data(loader: PrivateLoader, key: RandomKey, size: int) -> str | None:
    """A digest of some of the first `size` examples, at places that the key chooses; None where each reading draws anew."""
    if not is_repeatable(loader.dataset, loader.collate_fn):
        return None
    places = key.generator(_COMPARED).permutation(size)[:_COMPARED]
    examples = [loader.dataset[int(place)] for place in places]
    return _keyed(fingerprint([len(loader.dataset), *examples], {}, lambda module: None), key)  # type: ignore[arg-type]


def _digest_of_order(loader: PrivateLoader, key: RandomKey) -> str:
    """A digest of which examples are whose, and of which span."""
    users, stream = loader.users, loader.stream
    arrays = [*(() if users is None else (users.begin, users.order)), *(() if stream is None else stream.spans)]
    return sign_order(key.secret, arrays)


def _keyed(text: str, key: RandomKey) -> str:
    """Tells nothing of the text without the key: it may end up in an error on somebody's screen."""
    return hmac.new(key.secret, text.encode(), "sha256").hexdigest()
