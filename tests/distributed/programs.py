"""What ranks run in the tests: `launch("name", ...)` calls a function of this file on each of them."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import comm_ops
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import sparsedp
import sparsedp.distributed.training as training
from sparsedp.distributed import shard_tables
from sparsedp.distributed.placement import PlacedShard
from sparsedp.distributed.ranks import _sum_of_bits
from sparsedp.distributed.sharding import choose_sharding
from sparsedp.distributed.sizes import Cluster, TableUse, Work, sent_in_step
from sparsedp.prediction import predict_part
from sparsedp.tables import Shard

FEATURES = {"a": 37, "b": 37, "c": 11, "d": 53}
BATCH, STEPS = 32, 20


class Clicks(Dataset):
    """Bags of up to three ids for each of four features, some empty, some with an id twice; dense numbers; a label; a user."""

    def __init__(self, count: int = 200, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (count, len(FEATURES)), generator=draw)
        self.ids = [
            [torch.randint(0, rows, (int(n),), generator=draw) for n, rows in zip(row, FEATURES.values())]
            for row in lengths
        ]
        for bags in self.ids[::3]:
            for bag in bags:
                bag[1:] = bag[:1].expand(len(bag[1:])) if len(bag) else bag[1:]
        self.numbers = torch.randn(count, 3, generator=draw)
        self.country = torch.randint(0, 9, (count,), generator=draw)
        self.labels = (torch.rand(count, generator=draw) < 0.4).float()
        self.users = torch.randint(0, 60, (count,), generator=draw).numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        return self.numbers[i], self.ids[i], self.country[i], self.labels[i]


def collate(items: list[Any]) -> tuple[Tensor, KeyedJaggedTensor, Tensor, Tensor]:
    numbers, ids, country, labels = zip(*items)
    bags = [example[feature] for feature in range(len(FEATURES)) for example in ids]
    lengths = torch.tensor([len(bag) for bag in bags])
    values = torch.cat(bags)
    # A collection without weights leaves them alone.
    features = KeyedJaggedTensor(
        keys=list(FEATURES), values=values, lengths=lengths, weights=(values % 5).float() - 1.5
    )
    return torch.stack(numbers), features, torch.stack(country), torch.stack(labels)


class Bags(nn.Module):
    """Tables of a collection, one of them for two features, by mean and by sum."""

    def __init__(self, with_country: bool = True) -> None:
        super().__init__()
        mean = torchrec.PoolingType.MEAN
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="t0", embedding_dim=8, num_embeddings=37, feature_names=["a", "b"], pooling=mean
                ),
                EmbeddingBagConfig(name="t1", embedding_dim=8, num_embeddings=11, feature_names=["c"]),
                EmbeddingBagConfig(name="t2", embedding_dim=16, num_embeddings=53, feature_names=["d"]),
            ]
        )
        self.country = nn.Embedding(9, 4) if with_country else None
        width = 3 + 8 + 8 + 8 + 16 + (4 if with_country else 0)
        self.over = nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        parts = [numbers, self.tables(features).values()]
        if self.country is not None:
            parts.append(self.country(country))
        return self.over(torch.cat(parts, 1)).squeeze(1)


class Sequences(nn.Module):
    """Tables of a collection that does not add rows up: each example's rows are added up here."""

    def __init__(self, with_country: bool = True) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="t0", embedding_dim=8, num_embeddings=37, feature_names=["a", "b"]),
                EmbeddingConfig(name="t1", embedding_dim=8, num_embeddings=53, feature_names=["d"]),
            ]
        )
        self.over = nn.Linear(3 + 24, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        rows = self.tables(features)
        sums = [rows[name].to_padded_dense(4).sum(1) for name in ("a", "b", "d")]
        return self.over(torch.cat([numbers, *sums], 1)).squeeze(1)


KINDS: dict[str, type[nn.Module]] = {"bags": Bags, "sequences": Sequences}


def make(kind: str = "bags", with_country: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind](with_country)


def sharding_of(kind: str, table: int) -> Any:
    ranks = dist.get_world_size()
    return {
        "row_wise": lambda: row_wise(compute_kernel="fused"),
        "table_wise": lambda: table_wise(rank=table % ranks, compute_kernel="fused"),
        "column_wise": lambda: column_wise(ranks=list(range(ranks))[:2], compute_kernel="fused"),
        "table_row_wise": lambda: table_row_wise(host_index=0),
        "data_parallel": lambda: data_parallel(),
    }[kind]()


def sharded(module: nn.Module, sharding: str) -> nn.Module:
    """The module with its collection sharded, and the weights that it had."""
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    group = "embedding_bags" if hasattr(module.tables, "embedding_bags") else "embeddings"
    names = list(getattr(module.tables, group))
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module.tables, {name: sharding_of(sharding, i) for i, name in enumerate(names)},
        local_size=ranks, world_size=ranks, device_type="cpu",
    )  # fmt: skip
    module.tables = shard(module.tables, plan, device=torch.device("cpu"))
    for name, part, where in parts_of(module):
        part.copy_(weights[name][where])
    return module


def parts_of(module: nn.Module) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
    """What this rank has of each tensor of a state_dict, and where in the whole tensor that is."""
    for name, value in module.state_dict().items():
        if hasattr(value, "local_shards"):
            for local in value.local_shards():
                begin, size = local.metadata.shard_offsets, local.metadata.shard_sizes
                yield name, local.tensor, tuple(slice(b, b + s) for b, s in zip(begin, size))
        else:
            yield name, value, ()


PUBLIC = {f"tables.embedding_bags.t{i}.weight": torch.arange(n).float() % 7 for i, n in enumerate((37, 11, 53))}
PUBLIC["country.weight"] = torch.arange(9).float()
MECHANISMS: dict[str, Callable[[], sparsedp.mechanisms.Mechanism]] = {
    "dpsgd": lambda: sparsedp.DPSGD(),
    "lazydp": lambda: sparsedp.LazyDP(),
    "lazydp by step": lambda: sparsedp.LazyDP(aggregate=False),
    "eana": lambda: sparsedp.EANA(),
    "fest": lambda: sparsedp.FEST(k=40, counts=PUBLIC),
    "fest, counted": lambda: sparsedp.FEST(k=40, epsilon=1.0, delta=1e-6, inputs=lambda batch: batch[:-1]),
    "adafest": lambda: sparsedp.AdaFEST(threshold=2.0, noise_ratio=2.0),
    "adafest+": lambda: sparsedp.AdaFEST(
        threshold=2.0, noise_ratio=2.0, preselect=sparsedp.FEST(k=60, epsilon=1.0, delta=1e-6)
    ),
    "exponential": lambda: sparsedp.ExponentialSelection(k=20),
}


def begin(
    module: nn.Module, mechanism: str, *, seed: int | None = 3, optimizer: str = "sgd", momentum: float = 0.0,
    data: Dataset | None = None, timeout: float = 60.0, noise_multiplier: float = 1.0, batch_size: int = BATCH, **settings: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(engine, module, optimizer, loader) of a private run."""
    mover: Any
    parameters = list(module.parameters())
    if optimizer == "adagrad":
        mover = torch.optim.Adagrad(parameters, lr=0.01)
    elif optimizer == "sgd":
        mover = torch.optim.SGD(parameters, lr=0.01, momentum=momentum)
    else:  # one for the tables, and one for the others
        tables = [p for name, p in module.named_parameters() if name.startswith(("tables", "country"))]
        others = [p for name, p in module.named_parameters() if not name.startswith(("tables", "country"))]
        kinds = {
            "adagrad and adam": torch.optim.Adagrad, "sgd and adam": torch.optim.SGD,
            "sparse adam and sgd": torch.optim.SparseAdam, "row-wise adagrad and adam": sparsedp.RowWiseAdagrad,
            "torchrec's row-wise adagrad and adam": RowWiseAdagrad,
        }  # fmt: skip
        dense = torch.optim.SGD if optimizer.endswith("sgd") else torch.optim.Adam
        mover = [kinds[optimizer](tables, lr=0.01), dense(others, lr=0.01)]
    data = Clicks() if data is None else data
    loader = DataLoader(data, batch_size=batch_size, shuffle=len(data) > 0, collate_fn=collate)  # type: ignore[arg-type]
    engine = sparsedp.PrivacyEngine(seed=seed, rank_timeout=timeout)
    private = engine.make_private(
        module=module, optimizer=mover, data_loader=loader, noise_multiplier=noise_multiplier, max_grad_norm=1.0,
        mechanism=MECHANISMS[mechanism](), **settings,
    )  # fmt: skip
    return engine, *private


def train(run: tuple[Any, Any, Any, Any], steps: int = STEPS, after: Callable[[int], None] = lambda step: None) -> None:
    engine, module, optimizer, loader = run
    while engine.ledger.steps < steps:
        for *inputs, labels in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(module(*inputs), labels).backward()
            optimizer.step()
            if loader.current.last:
                after(engine.ledger.steps)
            if engine.ledger.steps == steps:
                return


@contextmanager
def alone() -> Iterator[None]:
    """Within it, a rank trains as a process does that nobody trains with."""
    before, training.is_distributed = training.is_distributed, lambda module: False
    try:
        yield
    finally:
        training.is_distributed = before


def distance(module: nn.Module, whole: dict[str, Tensor]) -> float:
    """The largest difference between what this rank has and whole tensors."""
    return max(float((part - whole[name][where]).abs().max()) for name, part, where in parts_of(module) if part.numel())


def compare(
    mechanisms: list[str], shardings: list[str], kind: str = "bags", mutant: str = "", **settings: Any
) -> dict[tuple[str, str], dict[str, Any]]:
    """For each mechanism and sharding, how far a run of all ranks is from that of one process, and how far that one moved."""
    result = {}
    for mechanism in mechanisms:
        with_country = not mechanism.startswith("lazydp")
        with alone():
            one = begin(make(kind, with_country), mechanism, **settings)
            train(one)
        whole = {name: tensor.clone() for name, tensor in one[1].state_dict().items()}
        at_first = make(kind, with_country).state_dict()
        for sharding in shardings:
            together = begin(sharded(make(kind, with_country), sharding), mechanism, **settings)
            with MUTANTS[mutant]():
                train(together)
            result[mechanism, sharding] = {
                "distance": distance(together[1], whole),
                "moved": max(float((whole[n] - at_first[n]).abs().max()) for n in whole if n.startswith("tables")),
                "ledger": together[0].ledger.state_dict() == one[0].ledger.state_dict(),
                "statement": without_boundary(together[0]) == without_boundary(one[0]),
            }
    return result


def without_boundary(engine: Any) -> str:
    """The statement, without the sentence that says what several processes send each other."""
    return "\n".join(line for line in str(engine.statement(1e-6)).splitlines() if "between the processes" not in line)


# ---------------------------------------------------------------------- mistakes that the comparison has to show


@contextmanager
def _none() -> Iterator[None]:
    yield


@contextmanager
def _gradient_division(divides: bool) -> Iterator[None]:
    """Whether TorchRec divides gradients by the number of ranks in its own backward pass, which fails in the meantime."""
    before = comm_ops.get_gradient_division()
    comm_ops.set_gradient_division(divides)
    with _no_backward_of_torchrec():
        yield
    comm_ops.set_gradient_division(before)


@contextmanager
def _no_backward_of_torchrec() -> Iterator[None]:
    """Lets the backward pass of each of TorchRec's messages fail."""

    def fail(ctx: Any, *gradients: Any) -> None:
        raise AssertionError("TorchRec sent gradients")

    kinds = [
        kind for kind in vars(comm_ops).values() if isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
    ]
    assert len(kinds) > 8
    with ExitStack() as replaced:
        for kind in kinds:
            replaced.enter_context(_replaced(kind, "backward", staticmethod(fail)))
        yield


def own_backward(sharding: str) -> str:
    """What is said where TorchRec's own backward pass runs, without privacy, and may not."""
    module = sharded(make(with_country=False), sharding)
    *inputs, labels = collate([Clicks()[i] for i in range(20)])
    with _no_backward_of_torchrec():
        loss = F.binary_cross_entropy_with_logits(module(*inputs), labels)
        return _said(loss.backward)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def _not_merged() -> Any:
    """Of rows that several ranks touch, one rank's sums count."""
    from sparsedp.distributed import exchange

    def last_wins(self: Tensor, axis: int, index: Tensor, values: Tensor) -> Tensor:
        self[index] = values
        return self

    merged = exchange.ProcessExchange._merged

    def mutant(self: Any, *args: Any) -> Any:
        with _replaced(torch.Tensor, "index_add_", last_wins):
            return merged(self, *args)

    return _replaced(exchange.ProcessExchange, "_merged", mutant)


def _noise_twice() -> Any:
    from sparsedp.step import PrivateStep

    once = PrivateStep.add_noise

    def twice(self: Any, *args: Any) -> Any:
        once(self, *args)
        return once(self, *args)

    return _replaced(PrivateStep, "add_noise", twice)


def _not_added_up() -> Any:
    """Each rank keeps its own sums of the dense parameters."""
    from sparsedp.distributed.ranks import ProcessRanks

    return _replaced(ProcessRanks, "add_up_dense", lambda self, sums: None)


MUTANTS: dict[str, Callable[[], Any]] = {
    "": _none,
    "gradient division": lambda: _gradient_division(True),
    "no gradient division": lambda: _gradient_division(False),
    "not merged": _not_merged,
    "noise twice": _noise_twice,
    "not added up": _not_added_up,
}


# ---------------------------------------------------------------------- checkpoints, and ranks that are lost


def resume(
    mechanism: str, sharding: str, steps: int, load: str | None, save: str | None, saves: tuple[int, ...] = (),
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trains up to a step, from a checkpoint and to one, which is also written after some steps.

    A sharding "none": this process alone.
    """
    settings.setdefault("seed", 3)
    if sharding == "none":
        with alone():
            run = begin(make(with_country=False), mechanism, **settings)
    else:
        run = begin(sharded(make(with_country=False), sharding), mechanism, **settings)
    if load is not None:
        run[0].load_checkpoint(load)
    loaded = run[0].ledger.steps
    for step in saves:
        train(run, step)
        run[0].save_checkpoint(save)
    train(run, steps)
    if save is not None:
        run[0].save_checkpoint(save)
    return {
        "parts": [(name, part.clone(), where) for name, part, where in parts_of(run[1])],
        "ledger": run[0].ledger.state_dict(),
        "epsilon": run[0].get_epsilon(1e-6),
        "loaded": loaded,
        "within an epoch": steps % run[3].steps_per_epoch > 0,
    }


GRACE = 4.0  # seconds in which ranks that are there say so


def lose(path: str, when: int, how: str, timeout: float = 60.0) -> tuple[str, float]:
    """Rank 1 is killed or stopped in step `when`, after a checkpoint; what the others are told, seconds after the last step."""
    sparsedp.distributed.ranks._GRACE = GRACE
    run = begin(sharded(make(with_country=False), "row_wise"), "adafest", seed=None, timeout=timeout)
    engine, module = run[:2]

    def after(step: int) -> None:
        if step == when - 2:
            engine.save_checkpoint(path)
        ended[:] = [time.monotonic()]

    ended: list[float] = []

    def before(module: Any, args: Any) -> None:
        if engine.ledger.steps == when - 1 and dist.get_rank() == 1 and module.training:
            os.kill(os.getpid(), getattr(signal, how))

    module.over.register_forward_pre_hook(before)
    said = _said(lambda: train(run, STEPS, after))
    return said, time.monotonic() - ended[0]


def after_close(kernel: str, path: str) -> dict[str, Any]:
    """Of the optimizer after close(): whether it has the module's parameters, and moves the tables that it moved."""
    module = make(with_country=False)
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module.tables, {name: row_wise(compute_kernel=kernel) for name in module.tables.embedding_bags},
        local_size=ranks, world_size=ranks, device_type="cpu",
    )  # fmt: skip
    module.tables = shard(module.tables, plan, device=torch.device("cpu"))
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    loader = DataLoader(Clicks(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    engine = sparsedp.PrivacyEngine(seed=3)
    private = engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        mechanism=sparsedp.AdaFEST(threshold=2.0, noise_ratio=2.0),
    )  # fmt: skip
    train((engine, *private), 2)
    sums = sorted(float(state["sum"].sum()) for state in optimizer.state.values())
    engine.close()
    engine.close()
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    result = {
        "the module's": mine == {id(parameter) for parameter in module.parameters()},
        "state": sorted(float(optimizer.state[p]["sum"].sum()) for p in module.parameters()) == sums,
        "checkpoint": _said(lambda: engine.save_checkpoint(path)),
    }
    before = [part.clone() for _, part, _ in parts_of(module)]
    *inputs, labels = collate([Clicks()[i] for i in range(20)])
    optimizer.zero_grad()
    F.binary_cross_entropy_with_logits(module(*inputs), labels).backward()
    optimizer.step()
    moved = {name: float((part - old).abs().max()) for old, (name, part, _) in zip(before, parts_of(module))}
    return result | {"moved": {name: far for name, far in moved.items() if name.startswith("tables")}}


class _SlowFile(io.BytesIO):
    """Whose first large piece takes as long as three timeouts."""

    slept = False

    def write(self, data: Any) -> int:
        if len(data) > 256 and not self.slept:
            self.slept = True
            time.sleep(3 * SHORT)
        return super().write(data)


SHORT = 2.0  # seconds: a timeout that is waited for


def slow(folder: str) -> dict[str, Any]:
    """What takes three timeouts on one rank alone: an export, settling, files, their digests, an evaluation."""
    from sparsedp.distributed import checkpoint

    rank, path = dist.get_rank(), str(Path(folder) / "checkpoint")
    before = training.get_timeout(dist.group.WORLD)
    run = begin(sharded(make(with_country=False), "row_wise"), "lazydp", timeout=SHORT)
    engine = run[0]
    train(run, 2)
    within = training.get_timeout(dist.group.WORLD)

    def once(work: Any) -> Any:
        done: list[bool] = []

        def slowly(*args: Any) -> Any:
            if not done:
                done.append(True)
                time.sleep(3 * SHORT)
            return work(*args)

        return slowly

    written = _SlowFile()
    engine.save_state_dict(written)
    train(run, 3)
    if rank == 1:
        run[2].owner.settle_all = once(run[2].owner.settle_all)
    with _replaced(os, "fsync", once(os.fsync) if rank == 0 else os.fsync):
        engine.save_checkpoint(path)
    train(run, 4)
    with _replaced(checkpoint, "_digest", once(checkpoint._digest) if rank else checkpoint._digest):
        engine.save_checkpoint(path)
    train(run, 5)
    with _replaced(checkpoint, "_digest", once(checkpoint._digest) if rank else checkpoint._digest):
        engine.load_checkpoint(path)
    train(run, 6)
    with engine.long_work():
        if rank == 0:
            time.sleep(3 * SHORT)
    train(run, 7)
    failed = _said(lambda: _fail_in_long_work(engine))
    train(run, 8)
    engine.close()
    after = training.get_timeout(dist.group.WORLD)
    return {"steps": engine.ledger.steps, "slept": written.slept, "timeouts": (before, within, after), "failed": failed}


def _fail_in_long_work(engine: Any) -> None:
    with engine.long_work():
        if dist.get_rank() == 1:
            raise OSError("no space left")


def skip_empty() -> tuple[str, list[int]]:
    """Rank 1 leaves out a step on a batch of which it has no example; what is said, and the units in batches left out."""
    module = sharded(make(with_country=False), "row_wise")
    engine, module, optimizer, loader = begin(module, "adafest", data=Clicks(12), batch_size=1)
    skipped: list[int] = []

    def loop() -> None:
        for *inputs, labels in loader:
            optimizer.zero_grad()
            if loader.current.stand_in and dist.get_rank() == 1 and not skipped:
                skipped.append(loader.current.units)
                continue
            F.binary_cross_entropy_with_logits(module(*inputs), labels).backward()
            optimizer.step()

    return _said(loop), skipped


# ---------------------------------------------------------------------- what is refused


def _said(make_run: Callable[[], Any]) -> str:
    try:
        make_run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(folder: str) -> dict[str, str]:
    """What ranks are told, of things that cannot be trained together."""
    rank = dist.get_rank()
    said = {}
    said["another plan"] = _said(
        lambda: begin(sharded(make(with_country=False), "row_wise"), "adafest", noise_multiplier=1.0 + rank)
    )
    said["other data"] = _said(
        lambda: begin(sharded(make(with_country=False), "row_wise"), "adafest", data=Clicks(seed=1 + rank))
    )
    said["users on two ranks"] = _said(
        lambda: begin(sharded(make(with_country=False), "row_wise"), "adafest", unit="user", own_data=True)
    )
    said["only rank 1 fails"] = _said(
        lambda: begin(sharded(make(with_country=False), "row_wise"), "adafest", data=Clicks(20 if rank else 200))
    )
    with _replaced(torch, "__version__", "2.99.0" if rank else torch.__version__):
        said["another torch"] = _said(lambda: begin(sharded(make(with_country=False), "row_wise"), "adafest"))
    said["DDP"] = _said(lambda: begin(_with_ddp(), "adafest"))
    said["FSDP"] = _said(lambda: begin(_with_fsdp(), "adafest"))
    said["a copied table"] = _said(lambda: begin(sharded(make(), "row_wise"), "lazydp"))
    said["a wrong id"] = _said(_wrong_id)
    said["NaN on one rank"] = _said(_nan_on_one_rank)
    said["parted"] = _said(_parted)
    said["another batch for each feature"] = _said(_batch_of_each_feature)
    said["index dedup"] = _said(_index_dedup)
    return said


def _with_ddp() -> nn.Module:
    module = sharded(make(with_country=False), "row_wise")
    module.over = nn.parallel.DistributedDataParallel(module.over)
    return module


def _with_fsdp() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = sharded(make(with_country=False), "row_wise")
    fully_shard(module.over, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def of_torchrec() -> dict[str, Any]:
    """What is said of TorchRec's own optimizers, and whether what is said to pass instead trains the model of one process."""
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    def asked(module: nn.Module, make_optimizer: Callable[[nn.Module], Any], mechanism: str = "adafest") -> str:
        loader = DataLoader(Clicks(), batch_size=BATCH, shuffle=True, collate_fn=collate)
        settings: Any = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "mechanism": MECHANISMS[mechanism]()}
        optimizer, engine = make_optimizer(module), sparsedp.PrivacyEngine(seed=3)
        return _said(lambda: engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **settings))

    def with_fused() -> nn.Module:
        module = make(with_country=False)
        _apply_optimizer_in_backward(RowWiseAdagrad, module.tables.parameters(), {"lr": 0.02})
        return sharded(module, "row_wise")

    def dense(module: nn.Module) -> Any:
        rest = dict(in_backward_optimizer_filter(module.named_parameters()))
        return KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=0.001))

    def row_wise_adagrad(module: nn.Module) -> Any:
        return [RowWiseAdagrad(module.tables.parameters()), torch.optim.SGD(module.over.parameters())]

    def own_row_wise_adagrad(module: nn.Module) -> Any:
        return [sparsedp.RowWiseAdagrad(module.tables.parameters()), torch.optim.SGD(module.over.parameters())]

    return {
        "combined": asked(with_fused(), lambda m: CombinedOptimizer([m.tables.fused_optimizer, dense(m)])),
        "wrapped": asked(with_fused(), dense),
        "in a list": asked(with_fused(), lambda m: [m.tables.fused_optimizer, torch.optim.Adam(m.over.parameters())]),
        "row-wise": asked(with_fused(), row_wise_adagrad),
        "row-wise by columns": asked(sharded(make(with_country=False), "column_wise"), row_wise_adagrad, "dpsgd"),
        "ours": asked(sharded(make(with_country=False), "row_wise"), own_row_wise_adagrad),
        "ours by columns": asked(sharded(make(with_country=False), "column_wise"), own_row_wise_adagrad),
        "in the backward pass": _said(_in_backward),
        "instead": asked(
            with_fused(),
            lambda module: [
                sparsedp.RowWiseAdagrad(sparsedp.table_parameters(module), lr=0.02),
                torch.optim.Adam(sparsedp.dense_parameters(module), lr=0.001),
            ],
        ),
    }


def _in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = make(with_country=False)
    _apply_optimizer_in_backward(torch.optim.SGD, module.tables.parameters(), {"lr": 0.02})
    with alone():
        begin(module, "adafest")


def as_dtensors(sharding: str) -> dict[str, Any]:
    """A collection whose state_dict has DTensors: how far the run is from that of one process, and what its shards are."""
    with alone():
        one = begin(make(with_country=False), "adafest")
        train(one)
    whole = {name: tensor.clone() for name, tensor in one[1].state_dict().items()}
    module = make(with_country=False)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    ranks, names = dist.get_world_size(), list(module.tables.embedding_bags)
    plan = construct_module_sharding_plan(
        module.tables, {name: sharding_of(sharding, i) for i, name in enumerate(names)},
        local_size=ranks, world_size=ranks, device_type="cpu",
    )  # fmt: skip
    env = ShardingEnv(ranks, dist.get_rank(), dist.group.WORLD, output_dtensor=True)
    module.tables = shard(module.tables, plan, env=env, device=torch.device("cpu"))

    def parts() -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
        for name, value in module.state_dict().items():
            if isinstance(value, DTensor):
                local = value.to_local()
                for part, offsets in zip(local.local_shards(), local.local_offsets()):
                    yield name, part, tuple(slice(at, at + size) for at, size in zip(offsets, part.shape))
            else:
                yield name, value, ()

    for name, part, where in parts():
        part.copy_(weights[name][where])
    train(begin(module, "adafest"))
    kinds = sorted({type(value).__name__ for value in module.tables.state_dict().values()})
    far = max(float((part - whole[name][where]).abs().max()) for name, part, where in parts() if part.numel())
    return {"distance": far, "kinds": kinds}


def odd_parameters() -> dict[str, Any]:
    """Dense parameters without an axis, and frozen ones of half precision and odd width; what is said when they part."""

    class Odd(Bags):
        def __init__(self) -> None:
            super().__init__(with_country=False)
            self.factor = nn.Parameter(torch.tensor(1.0))
            self.short = nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
            self.flags = nn.Parameter(torch.ones(5, dtype=torch.uint8), requires_grad=False)

        def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
            return self.factor * super().forward(numbers, features, country)

    shapes = {torch.float64: (), torch.float16: (3,), torch.bfloat16: (7, 1), torch.bool: (3, 3), torch.complex128: ()}
    told_apart = [
        _sum_of_bits(torch.ones(shape, dtype=dtype)) != _sum_of_bits(torch.zeros(shape, dtype=dtype))
        for dtype, shape in shapes.items()
    ]
    run = begin(sharded(Odd(), "row_wise"), "adafest")
    train(run, 2)

    def part(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                run[1].factor.add_(1)

    return {"told apart": told_apart, "parted": _said(lambda: train(run, 6, part))}


def other_configurations(path: str, changes: dict[str, list[str]], file: str) -> dict[str, str]:
    """What `sparsedp train` says where rank 1 has another configuration, file of code, or version of torch."""
    from sparsedp.cli.config.load import load_config
    from sparsedp.cli.processes import Together
    from sparsedp.cli.run import run_training

    rank, processes = dist.get_rank(), Together()

    def run(overrides: list[str]) -> None:
        run_training(load_config(path, overrides if rank else []), Path(path).parent / "run", processes=processes)

    said = {name: _said(lambda: run(overrides)) for name, overrides in changes.items()}
    with _replaced(torch, "__version__", "2.99.0" if rank else torch.__version__):
        said["another torch"] = _said(lambda: run([]))
    if rank:  # the module is loaded by now
        sys.modules["own"].__file__ = file
    said["other code"] = _said(lambda: run([]))
    return said


def _wrong_id() -> None:
    run = begin(sharded(make(with_country=False), "row_wise"), "adafest")
    for numbers, features, country, _ in run[3]:
        features._values[:] = 999
        run[1](numbers, features, country)


def _batch_of_each_feature() -> None:
    run = begin(sharded(make(with_country=False), "row_wise"), "adafest")
    sizes = [2, 3, 2, 2]
    features = KeyedJaggedTensor(
        keys=list(FEATURES), values=torch.zeros(sum(sizes), dtype=torch.long),
        lengths=torch.ones(sum(sizes), dtype=torch.long), stride_per_key_per_rank=[[size] for size in sizes],
    )  # fmt: skip
    run[1].tables(features)


def _index_dedup() -> None:
    from torchrec.distributed.embedding import set_ec_index_dedup

    set_ec_index_dedup(True)
    try:
        begin(sharded(make("sequences"), "row_wise"), "adafest")
    finally:
        set_ec_index_dedup(False)


def _nan_on_one_rank() -> None:
    run = begin(sharded(make(with_country=False), "row_wise"), "adafest")
    engine, module, optimizer, loader = run
    for *inputs, labels in loader:
        optimizer.zero_grad()
        if dist.get_rank() == 1:
            labels = labels * float("nan")
        F.binary_cross_entropy_with_logits(module(*inputs), labels).backward()
        optimizer.step()


def _parted() -> None:
    run = begin(sharded(make(with_country=False), "row_wise"), "adafest")

    def after(step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                run[1].over[0].bias.add_(1)

    train(run, 5, after)


def without_examples() -> float:
    """A batch of one example on average: most ranks have none in most steps. The distance from one process."""

    def one_run(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        engine = sparsedp.PrivacyEngine(seed=3)
        loader = DataLoader(Clicks(12), batch_size=1, shuffle=True, collate_fn=collate)
        private = engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            mechanism=MECHANISMS["adafest"](),
        )  # fmt: skip
        train((engine, *private), 12)
        return private[0]

    with alone():
        whole = {name: tensor.clone() for name, tensor in one_run(make(with_country=False)).state_dict().items()}
    return distance(one_run(sharded(make(with_country=False), "row_wise")), whole)


class Part(Dataset):
    """Every second example or so: those of some users."""

    def __init__(self, data: Clicks, rank: int, ranks: int, by_users: bool = True) -> None:
        self.data = data
        of = data.users if by_users else range(len(data))
        self.places = [i for i in range(len(data)) if of[i] % ranks == rank]
        self.users = data.users[self.places]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Any:
        return self.data[self.places[i]]


def own_data(unit: str, empty: int = 0) -> dict[str, Any]:
    """Each rank has a part of the data, the last `empty` ranks none: what a rank was given in each step, and what is planned."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Part(Clicks(), rank, ranks - empty, by_users=unit == "user" or not empty)
    run = begin(sharded(make(with_country=False), "row_wise"), "adafest", data=part, unit=unit, own_data=True)
    sizes = []
    train(run, 10, lambda step: sizes.append((run[3].current.units, run[3].current.logical_units)))
    parts = [(name, part.clone()) for name, part, where in parts_of(run[1]) if not where]
    plan = run[0].plan
    return {"sizes": sizes, "units": plan.dataset_size, "rate": plan.sample_rate, "dense": parts, "here": len(part)}


def keys() -> tuple[int, bool]:
    """A number that stands for the engine's key, and whether the statement says that the key is nobody's seed."""
    engine = begin(sharded(make(with_country=False), "row_wise"), "adafest", seed=None)[0]
    return int.from_bytes(hashlib.sha256(engine._key.secret).digest()[:4], "big"), engine._key.seeded


def model_parallel(folder: str) -> dict[str, Any]:
    """TorchRec's DistributedModelParallel around a module, and its DLRM."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRM, DLRMTrain

    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=rows, feature_names=[feature])
        for i, (feature, rows) in enumerate(FEATURES.items())
    ]

    class Clicked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            collection = EmbeddingBagCollection(tables=tables)
            self.dlrm = DLRM(
                collection, dense_in_features=3, dense_arch_layer_sizes=[8, 8], over_arch_layer_sizes=[8, 1]
            )

        def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
            return self.dlrm(numbers, features).squeeze(1)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Clicked()

    assert DLRMTrain is not None
    with alone():
        one = begin(made(), "adafest")
        train(one)
    whole = {name: tensor.clone() for name, tensor in one[1].state_dict().items()}
    module = made()
    at_first = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    path = "dlrm.sparse_arch.embedding_bag_collection"
    ranks = dist.get_world_size()
    collection = module.get_submodule(path)
    per_table = {table.name: row_wise(compute_kernel="fused") for table in tables}
    plan = construct_module_sharding_plan(collection, per_table, local_size=ranks, world_size=ranks, device_type="cpu")
    parallel = DistributedModelParallel(
        module, plan=ShardingPlan({path: plan}), device=torch.device("cpu"), init_data_parallel=False
    )
    for name, part, where in parts_of(parallel):
        part.copy_(at_first[name][where])
    run = begin(parallel, "adafest")
    train(run)
    names = set(parallel.state_dict()) == set(whole)
    run[0].close()
    return {"distance": distance(parallel, whole), "same object": run[1] is parallel, "names": names}


class Weighted(nn.Module):
    """A collection whose rows have weights in their bags, and a table for two features."""

    def __init__(self, with_country: bool = True) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            is_weighted=True,
            tables=[
                EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=37, feature_names=["a", "b"]),
                EmbeddingBagConfig(name="t1", embedding_dim=8, num_embeddings=53, feature_names=["d"]),
            ],
        )
        self.over = nn.Linear(3 + 24, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        found = self.tables(features)
        return self.over(torch.cat([numbers, *(found[name] for name in ("a", "b", "d"))], 1)).squeeze(1)


KINDS["weighted"] = Weighted


def evaluated(mechanism: str, sharding: str) -> dict[str, Any]:
    """How far outputs are from one process's: in training's private module, and after it was closed."""
    with alone():
        one = begin(make("sequences", with_country=False), mechanism)
        train(one)
    run = begin(sharded(make("sequences", with_country=False), sharding), mechanism)
    train(run)
    *inputs, _ = collate([Clicks()[i] for i in range(7)])
    outputs = []
    for module in (one[1], run[1]):
        module.eval()
        with torch.no_grad():
            outputs.append(module(*inputs))
    said = _said(lambda: run[0].touch_statistics())
    run[0].close()
    with torch.no_grad():
        outputs.append(run[1](*inputs))
    return {"private": float((outputs[0] - outputs[1]).abs().max()), "closed": float((outputs[0] - outputs[2]).abs().max()),
            "statistics": said}  # fmt: skip


# ---------------------------------------------------------------------- what is sent, and what was predicted

MANY_ROWS = {"a": 3000, "b": 3000, "c": 400, "d": 7000}


class Skewed(Clicks):
    """As `Clicks`, of larger tables in which some rows are looked up far more often than others."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        draw = torch.Generator().manual_seed(2)
        self.ids = [
            [(rows * torch.rand(len(bag), generator=draw) ** 3).long() for bag, rows in zip(bags, MANY_ROWS.values())]
            for bags in self.ids
        ]


class ManyRows(nn.Module):
    """Bags, or with `pooled` False the rows themselves, of larger tables, one of them for two features."""

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        sizes = [("t0", 16, 3000, ["a", "b"]), ("t1", 8, 400, ["c"]), ("t2", 32, 7000, ["d"])]
        self.pooled = pooled
        if pooled:
            bags = [
                EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=names)
                for name, dim, rows, names in sizes
            ]
            self.tables = EmbeddingBagCollection(tables=bags)
        else:
            alike = [
                EmbeddingConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=names)
                for name, _, rows, names in sizes
            ]
            self.tables = EmbeddingCollection(tables=alike)
        self.over = nn.Linear(3 + (72 if pooled else 64), 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        found = self.tables(features)
        parts = found.values() if self.pooled else torch.cat([found[n].to_padded_dense(3).sum(1) for n in "abcd"], 1)
        return self.over(torch.cat([numbers, parts], 1)).squeeze(1)


def bytes_left() -> int:
    """How many bytes left all sockets of this process so far, as the kernel counts them (tcpi_bytes_sent)."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as end:
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, 200)[0]
    return total


class Messages(TorchDispatchMode):
    """Bytes that collectives give to other ranks, by phase, kind of collective and type; sums go round a ring."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.phase, self.sent, self.calls = ranks, "", Counter(), Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("c10d.").removesuffix(".default")
        if name == "alltoall_base_":
            given, splits, rank = args[1], args[4], dist.get_rank()
            own = splits[rank] if splits else given.shape[0] // self.ranks
            self._count(name, given, (len(given) - own) / max(len(given), 1))
        elif name == "allgather_":
            self._count(name, args[1][0], self.ranks - 1)
        elif name == "allreduce_":
            self._count(name, args[0][0], 2 * (self.ranks - 1) / self.ranks)
        elif name == "reduce_scatter_":
            for part in args[1][0]:
                self._count(name, part, 2 * (self.ranks - 1) / self.ranks)
        elif name == "_reduce_scatter_base_":
            self._count("reduce_scatter_", args[1], 2 * (self.ranks - 1) / self.ranks)
        elif "c10d" in str(func):
            raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: Tensor, times: float) -> None:
        self.calls[self.phase] += 1
        self.sent[self.phase, name.strip("_"), str(tensor.dtype).removeprefix("torch.")] += times * tensor.nbytes


def sent_and_predicted(mechanism: str, sharding: str, pooled: bool, steps: int = 9, batch: int = 600) -> dict[str, Any]:
    """Bytes that this rank sent in a step, on average, beside what `sparsedp.distributed.sizes` predicts of it."""
    data, ranks = Skewed(6000), dist.get_world_size()
    loader = DataLoader(data, batch_size=batch, shuffle=True, collate_fn=collate)

    def made(module: nn.Module) -> tuple[Any, Any, Any, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        engine = sparsedp.PrivacyEngine(seed=3)
        private = engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=0.7, max_grad_norm=1.0,
            mechanism=MECHANISMS[mechanism]() if mechanism != "exponential" else sparsedp.ExponentialSelection(k=300),
        )  # fmt: skip
        return engine, *private

    with alone():
        one = made(ManyRows(pooled))
        statistics = one[0].touch_statistics()
        parts = predict_part(one[0].plan, statistics, 1 / ranks)
        together = predict_part(one[0].plan, statistics, 1.0)
        one[0].close()
    module = ManyRows(pooled)
    if sharding == "chosen":
        names = {config.name: config for config in _configs(module)}
        uses = [TableUse(name, config.num_embeddings, config.embedding_dim) for name, config in names.items()]
        chosen = choose_sharding(uses, ranks, memory=2.2e6, work=Work(batch / ranks, MECHANISMS[mechanism]()))
        assert chosen.fits and len({choice.kind for choice in chosen.tables.values()}) > 1, chosen.advice
        plan = construct_module_sharding_plan(
            module.tables, {name: choice.for_torchrec() for name, choice in chosen.tables.items()},
            local_size=ranks, world_size=ranks, device_type="cpu",
        )  # fmt: skip
        module.tables = shard(module.tables, plan, device=torch.device("cpu"))
        for name, choice in chosen.tables.items():
            assert module.tables.module_sharding_plan[name].sharding_type == choice.kind
    else:
        module = sharded(module, sharding)
    kinds = {name: one.sharding_type for name, one in module.tables.module_sharding_plan.items()}
    engine, module, optimizer, loader = made(module)
    assert engine._run is not None
    uses, placed = [], {}
    for name, found in parts.items():
        config = next(config for config in _configs(module) if f".{config.name}." in name)
        places = [list(FEATURES).index(feature) for feature in config.feature_names]
        uses.append(
            TableUse(
                name, config.num_embeddings, config.embedding_dim, features=len(places), pooled=pooled,
                lookups=sum(len(bags[place]) for bags in data.ids for place in places) / len(data),
                touched=found.touched, passed=found.passed, touched_by_all=together[name].touched,
            )
        )  # fmt: skip
        whole = Shard(range(config.num_embeddings), range(config.embedding_dim))
        copies = tuple(PlacedShard(rank, whole) for rank in range(ranks))
        placed[name] = kinds[config.name], engine._run.placement[name] or copies
    dense = sum(p.numel() for p in module.over.parameters())
    work = Work(batch / ranks, engine.plan.mechanism, dense)
    predicted = sent_in_step(uses, placed, Cluster(ranks), work)
    messages, before, taken = Messages(ranks), 0, 0
    with messages:
        for *inputs, labels in loader:
            optimizer.zero_grad()
            messages.phase = "forward"
            output = module(*inputs)
            messages.phase = "step"
            F.binary_cross_entropy_with_logits(output, labels).backward()
            optimizer.step()
            if taken == 0:  # the first step prepares
                messages.sent.clear()
                before = bytes_left()
            taken += 1
            if taken == steps + 1:
                break
    left = (bytes_left() - before) / steps
    rank = dist.get_rank()
    return {
        "left": left,
        "predicted": {name: float(values[rank]) for name, values in predicted.by_purpose().items()},
        "sent": {kind: size / steps for kind, size in messages.sent.items()},
    }


def _configs(module: nn.Module) -> list[Any]:
    bags = hasattr(module.tables, "embedding_bags")
    return module.tables.embedding_bag_configs() if bags else module.tables.embedding_configs()


# ---------------------------------------------------------------------- tables of nn.Embedding


class Plain(nn.Module):
    """Tables of torch's own modules, two of which share one."""

    def __init__(self, rows: int = 9, dim: int = 8) -> None:
        super().__init__()
        self.country = nn.Embedding(rows, dim)
        self.bag = nn.EmbeddingBag(rows, dim, mode="sum", padding_idx=0)
        self.bag.weight = self.country.weight
        self.over = nn.Linear(3 + 2 * dim, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        bags = self.bag(torch.stack([country, 8 - country], 1))
        return self.over(torch.cat([numbers, self.country(country), bags], 1)).squeeze(1)


def memory_of_export(path: str, rows: int, dim: int) -> dict[str, float]:
    """By how much this rank's memory grew, at most, while the state_dict was written; the size of the table; the largest error."""
    torch.manual_seed(0)
    module = Plain(rows, dim)
    shard_tables(module)
    run = begin(module, "adafest")
    train(run, steps=1)
    run[0].save_state_dict(path)  # once before: a forked process has yet to map pages of the libraries that this calls
    gc.collect()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is as high as the memory is now
    run[0].save_state_dict(path)
    grown = _memory("VmHWM") - before
    dist.barrier()
    written = torch.load(path, mmap=True, weights_only=True)
    names = set(written) == {"country.weight", "bag.weight", "over.weight", "over.bias"}
    return {"grown": grown, "table": 4.0 * rows * dim, "distance": distance(run[1], written), "names": names}


def _memory(entry: str) -> int:
    """Bytes, as the system counts them for this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(entry)]
    return 1024 * int(line.split()[1])


class Several(nn.Module):
    """So many tables of one size, each looked up by itself."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 8) for _ in range(tables))
        self.over = nn.Linear(3 + 8 * tables, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        return self.over(torch.cat([numbers, *(table(country) for table in self.tables)], 1)).squeeze(1)


def messages_of_divided(tables: int, mechanism: str) -> dict[str, int]:
    """How many collectives a step has before its loss, and from there on, with tables that are divided one by one."""
    module = Several(tables)
    shard_tables(module)
    run = begin(module, mechanism)
    train(run, 1)
    messages, (_, module, optimizer, loader) = Messages(dist.get_world_size()), run
    *inputs, labels = next(iter(loader))
    with messages:
        messages.phase = "forward"
        output = module(*inputs)
        messages.phase = "step"
        F.binary_cross_entropy_with_logits(output, labels).backward()
        optimizer.step()
    return dict(messages.calls)


def whole_weight() -> str:
    """What is said of a model that uses a divided table otherwise than by looking rows up."""

    class Tied(Plain):
        def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
            hidden = self.country(country)
            return F.linear(hidden, self.country.weight).sum(1)

    module = Tied()
    shard_tables(module)
    return _said(lambda: train(begin(module, "dpsgd"), steps=1))


class Unequal(nn.Module):
    """Tables of several sizes, one of which has columns that cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.wide = nn.Embedding(2000, 8), nn.Embedding(9, 32)
        self.bag, self.odd = nn.EmbeddingBag(400, 8, mode="sum"), nn.Embedding(9, 6)
        self.over = nn.Linear(3 + 8 + 32 + 8 + 6, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor, country: Tensor) -> Tensor:
        parts = [self.large(country), self.wide(country), self.bag(country[:, None]), self.odd(country)]
        return self.over(torch.cat([numbers, *parts], 1)).squeeze(1)


def planned_and_placed(mechanism: str, memory: float) -> dict[str, Any]:
    """The kinds of a plan, and whether each table is then where the plan says."""
    module, ranks = Unequal(), dist.get_world_size()
    uses = [TableUse(f"{name}.weight", *part.weight.shape, pooled=False, apart=True)
            for name, part in module.named_children() if name != "over"]  # fmt: skip
    work = Work(20.0, MECHANISMS[mechanism](), dense=58)
    chosen = choose_sharding(uses, ranks, memory=memory, work=work, by_shard_tables=True)
    shard_tables(module, chosen)
    run = begin(module, mechanism)
    assert run[0]._run is not None
    placement = dict(run[0]._run.placement)
    train(run, 1)
    expected = {name: choice.parts for name, choice in chosen.tables.items() if choice.kind != "data_parallel"}
    return {"kinds": {name: choice.kind for name, choice in chosen.tables.items()}, "placed": placement == expected}


def checked(kind: str) -> dict[str, Any]:
    """What `sparsedp.check` finds on a batch with a KeyedJaggedTensor; and says of modules whose tables are sharded."""
    batch = collate([Clicks()[i] for i in range(6)])
    loss = F.binary_cross_entropy_with_logits
    report = sparsedp.check(make(kind, with_country=False), loss, batch)
    divided = Plain()
    shard_tables(divided)
    module = sharded(make(kind, with_country=False), "row_wise")
    said = [_said(lambda: sparsedp.check(module, loss, batch)), _said(lambda: sparsedp.check(divided, loss, batch))]
    private = begin(module, "adafest")[1]
    said += [_said(lambda: sparsedp.check(private, loss, batch)), _said(lambda: sparsedp.explain(private, loss, batch))]
    return {"units": report.units, "difference": report.largest_difference, "dtype": str(report.dtype), "said": said}


def places_refused(places: dict[str, str]) -> str:
    return _said(lambda: shard_tables(Unequal(), places))
