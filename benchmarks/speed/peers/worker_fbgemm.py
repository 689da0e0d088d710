"""FBGEMM without privacy: its table operator for CPUs, which updates rows in the backward pass (fused SGD).

This is the operator that TorchRec's tables run on, without TorchRec's modules around it. An example's rows are put side by
side, so every id is a bag of its own, with sums: unpooled rows (`PoolingMode.NONE`) give the same, but took twice as long. The
layers are PyTorch's, with `torch.optim.SGD`.
"""

from __future__ import annotations

from collections.abc import Callable

from problem import Problem
from worker import Peer, importing, main

with importing():
    import fbgemm_gpu
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torch import nn
    from torchmodels import Net, make_batches


def make_step(variant: str, problem: Problem) -> Callable[[int], None]:
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(problem.rows, problem.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=problem.lr,
        pooling_mode=PoolingMode.SUM,
    )
    problem.fill(table.split_embedding_weights()[0].numpy())
    net = Net(torch.empty(1, problem.dim), problem.layers())
    layers = nn.Sequential(net.hidden, nn.ReLU(), net.out, nn.Flatten(0))
    optimizer = torch.optim.SGD(layers.parameters(), problem.lr)
    loss = nn.BCEWithLogitsLoss()
    batches = make_batches(problem)
    offsets = torch.arange(problem.batch * problem.ids + 1)

    def step(number: int) -> None:
        ids, target = batches[number % len(batches)]
        optimizer.zero_grad()
        embedded = table(ids.flatten(), offsets)
        loss(layers(embedded.view(len(ids), -1)), target).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(Peer(lambda: {"fbgemm-gpu-cpu": fbgemm_gpu.__version__, "torch": torch.__version__}, make_step))
