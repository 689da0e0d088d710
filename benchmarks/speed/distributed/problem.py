"""TorchRec's DLRM and a light model, with tables divided among the ranks, and a batch of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.speed.access import draw_ids
from benchmarks.speed.distributed.setting import NUMBERS, Setting
from benchmarks.speed.steps import matched_adafest
from sparsedp.distributed import shard_tables
from sparsedp.engine import PrivacyEngine
from sparsedp.mechanisms import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, LazyDP, Mechanism
from sparsedp.sampling import BatchInfo

LEARNING_RATE = 0.01


class Light(nn.Module):
    """Tables and one linear layer over them: a step is little but lookups, messages and updates of rows."""

    def __init__(self, tables: EmbeddingBagCollection, width: int) -> None:
        super().__init__()
        self.tables = tables
        self.over = nn.Linear(width, 1)

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat([numbers, self.tables(features).values()], 1))


class Apart(nn.Module):
    """`Light` with a bag of torch's own for each table."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, setting.dim, mode="sum") for rows in setting.table_sizes)
        self.over = nn.Linear(NUMBERS + setting.dim * len(setting.table_sizes), 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        return self.over(torch.cat([numbers, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1))


def make_model(setting: Setting) -> tuple[nn.Module, str]:
    """The model, its tables without memory yet, and the name of their collection."""
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t{i:02}", embedding_dim=setting.dim, num_embeddings=rows, feature_names=[f"f{i:02}"]
            )
            for i, rows in enumerate(setting.table_sizes)
        ],
        device=torch.device("meta"),
    )
    torch.manual_seed(0)
    if setting.model != "dlrm":
        return Light(tables, NUMBERS + setting.dim * len(setting.table_sizes)), "tables"
    layers = {"dense_arch_layer_sizes": [512, 256, setting.dim], "over_arch_layer_sizes": [1024, 1024, 512, 256, 1]}
    return DLRM(tables, NUMBERS, **layers), "sparse_arch.embedding_bag_collection"


def dense_bytes(setting: Setting) -> int:
    """Of the dense parameters."""
    module, name = make_model(setting)
    return sum(4 * p.numel() for key, p in module.named_parameters() if not key.startswith(f"{name}."))


def _plan(setting: Setting, collection: EmbeddingBagCollection) -> Any:
    ranks = dist.get_world_size()
    make: dict[str, Callable[[int], Any]] = {
        "row_wise": lambda table: row_wise(compute_kernel="fused"),
        "table_wise": lambda table: table_wise(rank=_rank_of(setting, ranks)[table], compute_kernel="fused"),
        "column_wise": lambda table: column_wise(ranks=list(range(ranks)), compute_kernel="fused"),
    }
    names = [config.name for config in collection.embedding_bag_configs()]
    return construct_module_sharding_plan(
        collection, {name: make[setting.sharding](i) for i, name in enumerate(names)},
        local_size=ranks, world_size=ranks, device_type="cpu",
    )  # fmt: skip


def _rank_of(setting: Setting, ranks: int) -> list[int]:
    """The rank of each table: the largest first, each where there are fewest tables, then fewest rows."""
    held, rank_of = [(0, 0, rank) for rank in range(ranks)], [0] * len(setting.table_sizes)
    for table in sorted(range(len(rank_of)), key=lambda table: -setting.table_sizes[table]):
        tables, rows, rank = min(held)
        held[held.index((tables, rows, rank))] = (tables + 1, rows + setting.table_sizes[table], rank)
        rank_of[table] = rank
    return rank_of


@dataclass
class Batch:
    """What a rank has of a batch: numbers (B, 13), features, labels (B, 1)."""

    numbers: Tensor
    features: KeyedJaggedTensor
    labels: Tensor

    def loss(self, module: nn.Module, apart: bool = False) -> Tensor:
        """With `apart`, the module takes ids (B, tables, ids of each) in the place of features."""
        given: Any = self.features
        if apart:
            given = given.values().view(len(given.keys()), len(self.numbers), -1).transpose(0, 1).contiguous()
        return binary_cross_entropy_with_logits(module(self.numbers, given), self.labels)


def draw_batch(setting: Setting, draw: torch.Generator) -> Batch:
    ids = draw_ids(setting.table_sizes, setting.batch, pooling=setting.ids, generator=draw)
    keys = [f"f{i:02}" for i in range(len(setting.table_sizes))]
    lengths = torch.full((len(keys) * setting.batch,), setting.ids)
    features = KeyedJaggedTensor(keys=keys, values=ids.transpose(0, 1).flatten(), lengths=lengths)
    labels = torch.rand(setting.batch, 1, generator=draw).round()
    return Batch(torch.rand(setting.batch, NUMBERS, generator=draw), features, labels)


class Batches:
    """A batch that all variants take their next step on; this rank's own."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self._draw = setting, torch.Generator().manual_seed(1 + dist.get_rank())
        self.renew()

    def renew(self) -> None:
        self.now = draw_batch(self.setting, self._draw)

    def rows(self) -> int:
        """The distinct rows that this rank's part of the batch looks up."""
        values = self.now.features.values().view(len(self.setting.table_sizes), -1)
        return sum(torch.unique(ids).numel() for ids in values)


def plain_step(batches: Batches, watch: Any) -> Callable[[], None]:
    """TorchRec's ordinary training: fused SGD in the tables' backward pass, DistributedDataParallel for the dense part."""
    module, name = make_model(batches.setting)
    collection = module.get_submodule(name)
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": LEARNING_RATE})
    plan = ShardingPlan({name: _plan(batches.setting, collection)})
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=[EmbeddingBagCollectionSharder()]
    )
    fused = {id(parameter) for parameter in model.module.get_submodule(name).parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in fused]
    optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        with watch("forward"):
            loss = batches.now.loss(model)
        with watch("backward"):
            loss.backward()
        with watch("update"):
            optimizer.step()
        watch.lap()

    return step


def private_step(name: str, batches: Batches, watch: Any, apart: bool = False) -> Callable[[], None]:
    """The same step made private, on a batch of fixed size, so that both do the same work.

    With `apart`, of the light model whose tables are no collection: `shard_tables` divides each by itself.
    """
    setting = batches.setting
    module: nn.Module
    if apart:
        torch.manual_seed(0)
        module = Apart(setting)
        shard_tables(module, setting.sharding)
    else:
        module, collection = make_model(setting)
        parent, _, last = collection.rpartition(".")
        tables = module.get_submodule(collection)
        sharded = shard(tables, _plan(setting, tables), device=torch.device("cpu"))
        setattr(module.get_submodule(parent), last, sharded)
    units = setting.batch * dist.get_world_size()
    loader: Any = DataLoader(TensorDataset(torch.zeros(100 * units, 1)), batch_size=units)
    private: Any
    private, optimizer, loader = PrivacyEngine(rank_timeout=600.0).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=LEARNING_RATE), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, mechanism=mechanism_of(name, batches),
    )  # fmt: skip
    optimizer.stage = watch
    steps = iter(range(1 << 60))

    def step() -> None:
        loader.current = BatchInfo(setting.batch, units, True, True, next(steps))
        optimizer.zero_grad()
        with watch("forward"):
            loss = batches.now.loss(private, apart)
        with watch("backward"):
            loss.backward()
        optimizer.step()
        watch.lap()

    return step


def mechanism_of(name: str, batches: Batches) -> Mechanism:
    """Settings under which every sparse mechanism changes about as many rows as a batch touches, on all ranks the same."""
    setting = batches.setting
    rows, every_rank = sum(setting.table_sizes), torch.tensor(batches.rows())
    dist.all_reduce(every_rank)
    touched = min(rows, int(every_rank))
    adafest = matched_adafest(touched, rows)
    if name == "adafest":
        return adafest
    _, collection = make_model(setting)
    prefix = f"{collection}.embedding_bags"
    counts = {f"{prefix}.t{i:02}.weight": torch.arange(n, 0, -1) for i, n in enumerate(setting.table_sizes)}
    if name == "adafest+":
        return AdaFEST(adafest.threshold, adafest.noise_ratio, preselect=FEST(k=max(1, rows // 2), counts=counts))
    make: dict[str, Callable[[], Mechanism]] = {
        "dpsgd": DPSGD,
        "lazydp": LazyDP,
        "eana": EANA,
        "fest": lambda: FEST(k=touched, counts=counts),
        "exponential": lambda: ExponentialSelection(k=touched),
    }
    return make[name]()
