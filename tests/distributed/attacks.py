"""What ranks run to break the guarantee, or to come apart: `launch("attacks.name", ...)` calls a function on each of them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec
from programs import (
    BATCH,
    FEATURES,
    Clicks,
    _replaced,
    _said,
    alone,
    begin,
    collate,
    make,
    parts_of,
    sharded,
    sharding_of,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import construct_module_sharding_plan

import sparsedp
from sparsedp import checkpoint
from sparsedp.distributed import ranks

# ---------------------------------------------------------------------- neighbouring data sets


class Given(Dataset):
    def __init__(self, items: list[Any], users: Any = None) -> None:
        self.items = items
        if users is not None:
            self.users = users

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def with_weights(items: list[Any]) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    numbers, ids, weights, labels = zip(*items)
    places = range(len(FEATURES))
    bags = [example[feature] for feature in places for example in ids]
    features = KeyedJaggedTensor(
        keys=list(FEATURES), values=torch.cat(bags), lengths=torch.tensor([len(bag) for bag in bags]),
        weights=torch.cat([example[feature] for feature in places for example in weights]),
    )  # fmt: skip
    return torch.stack(numbers), features, torch.stack(labels)


class TwoCollections(nn.Module):
    """Tables of the same names in both; features that share a table, and one that is in two; one collection called twice."""

    def __init__(self, weighted: bool, pooling: str) -> None:
        super().__init__()
        self.one, self.two = (
            EmbeddingBagCollection(
                is_weighted=weighted,
                tables=[
                    EmbeddingBagConfig(
                        name=name, embedding_dim=8, num_embeddings=rows, feature_names=features,
                        pooling=torchrec.PoolingType[pooling],
                    )
                    for name, rows, features in (("t0", 37, ["a", "b"]), ("t1", 37, ["a"]), ("t2", 53, ["d"]))
                ],
            )
            for _ in range(2)
        )  # fmt: skip
        self.over = nn.Linear(3 + 3 * 32, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor) -> Tensor:
        found = [self.one(features).values(), self.two(features).values(), self.one(features).values() ** 2]
        return self.over(torch.cat([numbers, *found], 1)).squeeze(1)

    def sharded(self, kind: str) -> TwoCollections:
        weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        ranks = dist.get_world_size()
        for at, name in enumerate(("one", "two")):
            collection = getattr(self, name)
            plan = construct_module_sharding_plan(
                collection, {f"t{i}": sharding_of(kind, i + at) for i in range(3)},
                local_size=ranks, world_size=ranks, device_type="cpu",
            )  # fmt: skip
            setattr(self, name, shard(collection, plan, device=torch.device("cpu")))
        for name, part, where in parts_of(self):
            part.copy_(weights[name][where])
        return self


def example(seed: int, size: float = 1.0, longest: int = 3) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """Bags with weights of both signs; some empty, some with one id alone, some with the ids of another feature."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(FEATURES),), generator=draw).tolist()
    ids = [torch.randint(0, rows, (n,), generator=draw) for n, rows in zip(lengths, FEATURES.values())]
    if seed % 2:
        ids = [bag[:1].repeat(len(bag)) for bag in ids]
    if seed % 3 == 0:
        ids[1] = ids[0].clone()
    weights = [torch.randn(len(bag), generator=draw) for bag in ids]
    return size * torch.randn(3, generator=draw), ids, weights, torch.tensor(float(seed % 2))


def _every(ids: Tensor, weights: Tensor, numbers: float = 1.0) -> Any:
    return torch.full((3,), numbers), [ids] * len(FEATURES), [weights] * len(FEATURES), torch.tensor(1.0)


NEIGHBOURS = {
    "large": example(101, 1e4, 30),
    "empty bags": _every(torch.empty(0, dtype=torch.long), torch.empty(0), 50.0),
    "one id twenty times": _every(torch.zeros(20, dtype=torch.long), torch.ones(20)),
    "huge weights of both signs": _every(torch.arange(5), torch.tensor([1e3, -1e3, 3.0, 1e-8, -500.0])),
}


def clipped_sum(
    items: list[Any],
    kind: str,
    weighted: bool,
    pooling: str,
    users: Any = None,
    in_one: bool = False,
    alike: bool = False,
) -> dict[Any, Tensor]:
    """The sum of all units' clipped gradients (C = 1), from one step on all of them without noise: parts of all ranks."""
    units = len(items) if users is None else len(np.unique(users))
    with alone() if in_one else nullcontext():
        torch.manual_seed(0)
        module = TwoCollections(weighted, pooling)
        if alike:  # all features get the same gradients
            nn.init.ones_(module.over.weight)
        module = module if in_one else module.sharded(kind)
        before = [part.clone() for _, part, _ in parts_of(module)]
        engine = sparsedp.PrivacyEngine(seed=5)
        _, optimizer, loader = engine.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0,
            data_loader=DataLoader(Given(items, users), batch_size=units, shuffle=True, collate_fn=with_weights),
            mechanism=sparsedp.EANA(), unit="example" if users is None else "user",
            max_physical_batch=None if users is None else 8,
        )  # fmt: skip
        for *inputs, labels in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(module(*inputs), labels).backward()
            optimizer.step()
        after = [(name, part, [(cut.start, cut.stop) for cut in where]) for name, part, where in parts_of(module)]
        sums = {(name, *where): (old - new) * units for (name, new, where), old in zip(after, before)}
        engine.close()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sums)
    return {key: part for sums in every for key, part in sums.items()}


def distance(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> float:
    return sum(float((one[key] - other[key]).double().square().sum()) for key in one) ** 0.5


def contributions(kind: str, weighted: bool, pooling: str) -> dict[str, float]:
    """By how much (times C) the sum changes with one unit more, the first or the last of the data, whichever rank reads it."""
    how: Any = (kind, weighted, pooling)
    data = [example(seed) for seed in range(9)]
    without = clipped_sum(data, *how)
    largest = {
        name: max(distance(clipped_sum(more, *how), without) for more in ([extra, *data], [*data, extra]))
        for name, extra in NEIGHBOURS.items()
    }
    users = np.array([0, 1, 2, 0, 1, 2, 3, 3, 3])
    more = [*data, NEIGHBOURS["large"], NEIGHBOURS["one id twenty times"]]
    largest["a user"] = distance(
        clipped_sum(more, *how, users=np.append(users, [7, 7])), clipped_sum(data, *how, users=users)
    )
    return largest


def _norms_of_parts(parts_of_lookup: Callable[[Any], Tensor]) -> Any:
    """Lets positions of a unit be added up before squaring only where they also are in the same part of the lookups."""
    from sparsedp.capture.rows import LookupNorms, TouchedRows

    def apart(self: Any, slots: Any, row_norms: Any) -> LookupNorms:
        every = torch.zeros(len(self.lookups), self.units, dtype=torch.float64)
        for total, lookup in zip(every, self.lookups.values()):
            values, used = lookup.positions().double(), lookup.ids >= 0
            keys = torch.stack([lookup.units, lookup.ids, parts_of_lookup(lookup)], 1)[used]
            distinct, places = torch.unique(keys, dim=0, return_inverse=True)
            sums = values.new_zeros(len(distinct), values.shape[1]).index_add_(0, places, values[used])
            total.index_add_(0, distinct[:, 0], sums.square().sum(1))
        return LookupNorms(list(self.lookups), every, every)

    return _replaced(TouchedRows, "_added_norms", apart)


def _features_of(lookup: Any) -> Tensor:
    """The features, which follow each other: an example's positions in one of them come before the next example's."""
    return torch.cat([torch.zeros(1, dtype=torch.long), (lookup.units.diff() < 0).long().cumsum(0)])


NORMS: dict[str, Callable[[], Any]] = {
    "as they are": nullcontext,
    "an example's rows not merged": lambda: _norms_of_parts(lambda lookup: torch.arange(len(lookup.ids))),
    "features not merged": lambda: _norms_of_parts(_features_of),
}


def contributions_with(norms: str) -> dict[str, float]:
    """By how much (times C) the sum changes with a unit of which a row gets several gradients of the same direction."""
    label, data = torch.tensor(0.0), [example(seed) for seed in range(9)]
    one_id = torch.zeros(1, dtype=torch.long)
    neighbours = {
        "one id twenty times": (*_every(one_id.repeat(20), torch.ones(20))[:3], label),
        "the same id in all features": (*_every(one_id, torch.ones(1))[:3], label),
    }
    with NORMS[norms]():
        without = clipped_sum(data, "row_wise", True, "SUM", alike=True)
        return {
            name: distance(clipped_sum([*data, extra], "row_wise", True, "SUM", alike=True), without)
            for name, extra in neighbours.items()
        }


# ---------------------------------------------------------------------- ways around the private step


def _fresh(
    mechanism: str = "adafest", change: Callable[[nn.Module], Any] = lambda module: None, **settings: Any
) -> Any:
    module = sharded(make(with_country=False), settings.pop("sharding", "row_wise"))
    change(module)
    return begin(module, mechanism, **{"timeout": 20.0, **settings})


def around() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for mechanism, settings in (("adafest", {}), ("adafest", {"optimizer": "adagrad"}), ("lazydp", {"momentum": 0.9})):
        result[f"gradient at a shard, {mechanism} {settings}"] = _said(
            lambda: _gradient_at_a_shard(mechanism, settings)
        )
    result["kept"] = _kept()
    result["after a failure"] = _after_a_failure()
    return result


def _gradient_at_a_shard(mechanism: str, settings: dict[str, Any]) -> None:
    """The optimizer knows this rank's shards, which the module has not: nobody would clip what arrives there."""
    engine, module, optimizer, loader = _fresh(mechanism, **settings)
    shards = [p for group in optimizer.param_groups for p in group["params"] if p.shape[1:] == (8,)]
    before = [shard.detach().clone() for shard in shards]
    *inputs, labels = next(iter(loader))
    loss = F.binary_cross_entropy_with_logits(module(*inputs), labels)
    (loss + 1e4 * inputs[0].sum() * sum(shard.sum() for shard in shards)).backward()
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(shard.detach(), old) for shard, old in zip(shards, before)), (
            "an unclipped gradient was taken"
        )
        assert all(shard.grad is None for shard in shards)


def _kept() -> dict[str, Any]:
    """A reference to the sharded collection from before make_private."""
    held: list[Any] = []
    run = _fresh("lazydp", change=lambda module: held.append(module.tables))
    train(run, 3)
    *inputs, _ = collate([Clicks()[i] for i in range(4)])
    result: dict[str, Any] = {"called": _said(lambda: held[0](inputs[1]))}
    result["owed before"] = sum(run[0].pending().values())
    held[0].state_dict()
    result["owed in its state_dict"] = sum(run[0].pending().values())
    run[0].close()
    result["called after close"] = _said(lambda: held[0](inputs[1]))
    return result


def _after_a_failure() -> dict[str, Any]:
    """make_private again, after it refused a loader: with LazyDP, whose rows must be settled before weights leave."""
    module = sharded(make(with_country=False), "row_wise")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    before = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    engine = sparsedp.PrivacyEngine(seed=3)

    def private(batch_size: int) -> Any:
        loader = DataLoader(Clicks(), batch_size=batch_size, shuffle=True, collate_fn=collate)
        return engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            mechanism=sparsedp.LazyDP(),
        )  # fmt: skip

    result: dict[str, Any] = {"refused": _said(lambda: private(1000))}
    result["optimizer as it was"] = [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == before
    train((engine, *private(BATCH)), 4)
    result["owed before"] = sum(engine.pending().values())
    module.state_dict()
    result["owed in a state_dict"] = sum(engine.pending().values())
    return result


# ---------------------------------------------------------------------- ranks that come apart


def _reversed_users() -> Dataset:
    data = Clicks()
    if dist.get_rank() == 1:
        data.users = data.users[::-1].copy()
    return data


def _frozen(module: nn.Module) -> None:
    module.over[0].bias.requires_grad_(dist.get_rank() == 0)


def _other_buffer(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        module.over.register_buffer("extra", torch.zeros(3))


def apart() -> dict[str, Any]:
    """What is said where rank 1 does otherwise than rank 0, at the start or before a step."""
    rank = dist.get_rank()
    starts: dict[str, Callable[[], Any]] = {
        "the optimizer": lambda: train(_fresh(optimizer="adagrad" if rank else "sgd"), 1),
        "momentum": lambda: train(_fresh("lazydp", momentum=0.9 if rank else 0.0), 1),
        "users": lambda: _fresh(unit="user", data=_reversed_users()),
        "own data that all have": lambda: _fresh(own_data=True),
        "own data on one": lambda: _fresh(own_data=bool(rank)),
        "frozen": lambda: _fresh(change=_frozen),
        "a buffer": lambda: _fresh(change=_other_buffer),
    }
    said = {name: _said(start) for name, start in starts.items()}
    changes: dict[str, Callable[[Any], Any]] = {
        "learning rate": lambda run: run[2].param_groups[0].update(lr=0.5),
        "frozen table": lambda run: run[1].tables.embedding_bags["t1"].weight.requires_grad_(False),
        "frozen bias": lambda run: run[1].over[0].bias.requires_grad_(False),
    }
    for name, change in changes.items():
        for mechanism in ("adafest", "lazydp"):
            said[f"{name}, {mechanism}"] = _changed_in_training(mechanism, change)
    return said


def _changed_in_training(mechanism: str, change: Callable[[Any], Any]) -> str:
    run = _fresh(mechanism)
    said = _said(lambda: train(run, 5, lambda step: change(run) if step == 2 and dist.get_rank() == 1 else None))
    return f"{run[0].ledger.steps} steps; {said}"


def copies_that_start_otherwise() -> list[float]:
    """Data-parallel tables that each rank made by itself: what is the sum of their weights after training?"""

    def change(module: nn.Module) -> None:
        for _, part, _ in parts_of(module):
            part.add_(dist.get_rank())

    run = _fresh(change=change, sharding="data_parallel")
    train(run, 3)
    return [float(part.double().sum()) for _, part, _ in parts_of(run[1])]


def half_a_step() -> dict[str, Any]:
    """Rank 0 fails after the sums came in: rank 1 may take the step. No ledger may be without it."""
    engine, module, optimizer, loader = run = _fresh(timeout=5.0)
    noise, shards = optimizer.noise, [p for p in optimizer.param_groups[0]["params"] if p.shape[1:] == (8,)]
    add, calls, before = noise.add, [0], []

    def fail_in_the_third(*args: Any) -> None:
        before[:] = [shard.detach().clone() for shard in shards]
        calls[0] += 1
        if calls[0] == 3 and dist.get_rank() == 0:
            raise MemoryError("no memory for noise")
        add(*args)

    noise.add = fail_in_the_third
    said = _said(lambda: train(run, 3))
    moved = max(float((shard.detach() - old).abs().max()) for shard, old in zip(shards, before))
    return {"said": said, "steps": engine.ledger.steps, "moved": moved}


def checkpoints(folder: str) -> dict[str, Any]:
    rank, path = dist.get_rank(), Path(folder)
    run = _fresh(seed=None)
    (path / "a" / "logs").mkdir(parents=True, exist_ok=True)
    for place in ("a", "a", "b"):
        train(run, run[0].ledger.steps + 1)
        run[0].save_checkpoint(path / place)
    result: dict[str, Any] = {"a": sorted(len(entry.name) for entry in (path / "a").iterdir())}
    resumed = _fresh(seed=None)
    engine = resumed[0]
    result["two"] = _said(lambda: engine.load_checkpoint(path / ("b" if rank else "a")))
    result["missing on one"] = _said(lambda: engine.load_checkpoint(path / ("nothing" if rank else "a")))
    result["steps then"] = engine.ledger.steps
    engine.load_checkpoint(path / "a")
    train(resumed, 4)
    result["steps after"] = engine.ledger.steps
    dist.barrier()
    if rank == 0:
        (path / "file").touch()
    result["a file"] = _said(lambda: engine.save_checkpoint(path / "file"))
    with _replaced(checkpoint, "save", _disk_is_full if rank == 0 else checkpoint.save):
        result["a full disk"] = _said(lambda: engine.save_checkpoint(path / "d"))
    if rank == 1:
        engine.ledger.record(engine.plan.step_event(None))
    result["another ledger"] = _said(lambda: engine.save_checkpoint(path / "c"))
    result["written"] = os.path.exists(path / "c")
    return result


def _disk_is_full(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("PytorchStreamWriter failed writing file")  # as torch says it


class _OtherParts(nn.Module):
    """Gives the collection ids of other units, beside the parts of each feature that were made of the right ones."""

    def __init__(self) -> None:
        super().__init__()
        inner = make("weighted")
        self.tables, self.over = inner.tables, inner.over

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor) -> Tensor:
        parts = features.to_dict()
        rolled = [torch.roll(parts[key].values(), 1) for key in features.keys()]  # noqa: SIM118
        other = KeyedJaggedTensor(
            keys=features.keys(), values=torch.cat(rolled), lengths=features.lengths(), weights=features.weights()
        )
        other._jt_dict = parts
        found = self.tables(other)
        return self.over(torch.cat([numbers, *(found[name] for name in ("a", "b", "d"))], 1)).squeeze(1)


def other_parts() -> str:
    module = sharded(_OtherParts(), "row_wise")
    loader = DataLoader(Given([example(seed) for seed in range(9)]), batch_size=9, collate_fn=with_weights)
    _, _, loader = sparsedp.PrivacyEngine(seed=5).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=1.0, mechanism=sparsedp.EANA(),
    )  # fmt: skip
    *inputs, _ = next(iter(loader))
    return _said(lambda: module(*inputs))


# ---------------------------------------------------------------------- one rank does something else in the loop


def out_of_step(how: str, mechanism: str) -> dict[str, Any]:
    """In its third step, rank 1 takes the step twice, leaves backward out, or has NaN where there were numbers."""
    ranks._GRACE = 4.0
    engine, module, optimizer, loader = _fresh(mechanism)
    mine = dist.get_rank() == 1
    before: list[Tensor] = []

    def one_step(step: int, inputs: list[Any], labels: Tensor) -> None:
        odd = how if mine and step == 2 else ""
        if odd == "NaN in weights":
            for _, part, where in parts_of(module):
                if where:  # of a table
                    part.fill_(float("nan"))
        if odd == "NaN in a batch":
            inputs[0][:1] = float("nan")
        if step == 2:
            before[:] = [part.clone() for _, part, _ in parts_of(module)]
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(module(*inputs), labels)
        if odd != "no backward":
            loss.backward()
        optimizer.step()
        if odd == "step twice":
            optimizer.step()

    def loop() -> None:
        for step, (*inputs, labels) in enumerate(loader):
            one_step(step, inputs, labels)

    said = _said(loop)
    now = [part for _, part, _ in parts_of(module)] if "RankLost" not in said and mechanism != "lazydp" else []
    same = all(torch.equal(old.nan_to_num(), part.nan_to_num()) for old, part in zip(before, now))
    return {"said": said, "steps": engine.ledger.steps, "same": same}


# ---------------------------------------------------------------------- checkpoints that are not whole


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _at(owner: Any, name: str, before: bool) -> None:
    """Lets this rank be killed before or after the function does its work."""
    once = getattr(owner, name)
    setattr(owner, name, _die if before else lambda *args, **kwargs: (once(*args, **kwargs), _die()))


def _while_removing(folder: Path) -> None:
    next(path for path in folder.iterdir() if path.suffix == ".distcp").unlink()
    _die()


MOMENTS: dict[str, Callable[[], None]] = {
    "before the files": lambda: _at(state_dict_saver, "save", before=True),
    "within a file": lambda: _at(os, "fsync", before=True),
    "after the files": lambda: _at(state_dict_saver, "save", before=False),
    "before the rename": lambda: _at(os, "replace", before=True),
    "after the rename": lambda: _at(os, "replace", before=False),
    "while the last one is removed": lambda: setattr(shutil, "rmtree", _while_removing),
    "stopped within a file": lambda: setattr(os, "fsync", _stop),
}
TIMEOUT, GRACE = 4.0, 2.0  # seconds


def killed_in_save(path: str, moment: str, killed: int) -> tuple[str, float]:
    """A rank is killed in its second save; what the others say of it, and the seconds until they do."""
    ranks._GRACE = GRACE
    run = _fresh("lazydp by step", momentum=0.9, timeout=TIMEOUT)
    train(run, 2)
    run[0].save_checkpoint(path)
    train(run, 4)
    if dist.get_rank() == killed:
        MOMENTS[moment]()
    begin = time.monotonic()
    return _said(lambda: run[0].save_checkpoint(path)), time.monotonic() - begin


def two_saves(path: str) -> None:
    run = _fresh()
    for place in ("one", "two"):
        train(run, run[0].ledger.steps + 2)
        run[0].save_checkpoint(Path(path) / place)


def loads(paths: list[str]) -> dict[str, Any]:
    """What is said of each checkpoint, by a run that still is as it was; how many steps the last one has."""
    run = _fresh()
    first = [part.clone() for _, part, _ in parts_of(run[1])]
    said = {}
    for path in paths:
        said[Path(path).name] = _said(lambda: run[0].load_checkpoint(path))
        if path != paths[-1]:
            assert run[0].ledger.steps == 0
            assert all(torch.equal(old, part) for old, (_, part, _) in zip(first, parts_of(run[1])))
    return said | {"steps": run[0].ledger.steps}
