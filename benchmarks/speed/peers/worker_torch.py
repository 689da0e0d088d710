"""Plain PyTorch without privacy: `nn.Embedding(sparse=True)`, `torch.optim.SGD`, autograd."""

from __future__ import annotations

from collections.abc import Callable

from problem import Problem
from worker import Peer, importing, main

with importing():
    import torch
    from torchmodels import make_batches, make_net


def make_step(variant: str, problem: Problem) -> Callable[[int], None]:
    net, batches = make_net(problem, sparse=True), make_batches(problem)
    optimizer = torch.optim.SGD(net.parameters(), problem.lr)
    loss = torch.nn.BCEWithLogitsLoss()

    def step(number: int) -> None:
        ids, target = batches[number % len(batches)]
        optimizer.zero_grad()
        loss(net(ids), target).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(Peer(lambda: {"torch": torch.__version__}, make_step))
