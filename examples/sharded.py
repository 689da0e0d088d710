"""A click model whose tables are divided among processes: torchrun --nproc-per-node 2 examples/sharded.py

Run with another number of processes, or with one, it ends with the same model: the engine is seeded.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.distributed import require_torchrec

FEATURES, ROWS, DIM = ("query", "ad"), 10_000, 16


def main() -> None:
    require_torchrec()
    warnings.filterwarnings("ignore")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.shard import shard
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise

    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[name])
                    for name in FEATURES
                ]
            )
            self.score = nn.Linear(DIM * len(FEATURES), 1)

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            return self.score(self.tables(features).values()).squeeze(1)

    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[KeyedJaggedTensor, Tensor]:
        ids, labels = (torch.stack(column) for column in zip(*examples))
        lengths = torch.ones(ids.numel(), dtype=torch.long)
        return KeyedJaggedTensor(keys=list(FEATURES), values=ids.T.flatten(), lengths=lengths), labels

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    ids = (ROWS * torch.rand(20_000, len(FEATURES)) ** 4).long()  # few are frequent
    data = TensorDataset(ids, (torch.rand(20_000) < torch.sigmoid((ids[:, 0] % 7 - ids[:, 1] % 5).float())).float())
    model = Clicks()
    plan = construct_module_sharding_plan(
        model.tables, {name: row_wise(compute_kernel="fused") for name in FEATURES},
        local_size=ranks, world_size=ranks, device_type="cpu",
    )  # fmt: skip
    model.tables = shard(model.tables, plan, device=torch.device("cpu"))
    loader = DataLoader(data, batch_size=1024, shuffle=True, collate_fn=collate)
    engine = sparsedp.PrivacyEngine(seed=0)  # for the example alone: with a seed, nothing is private
    module, optimizer, private = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=20.0), data_loader=loader, target_epsilon=8.0,
        target_delta=1e-6, epochs=3, max_grad_norm=1.0, mechanism=sparsedp.AdaFEST(threshold=4.0),
    )  # fmt: skip
    for epoch in range(3):
        total = torch.zeros(2)
        for features, labels in private:
            optimizer.zero_grad()
            logits = module(features)
            F.binary_cross_entropy_with_logits(logits, labels).backward()
            optimizer.step()
            total += torch.tensor([((logits > 0) == (labels > 0.5)).sum(), len(labels)])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy on the training batches {total[0] / total[1]:.3f} (not private)")
    if dist.get_rank() == 0:
        print(engine.statement())
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
