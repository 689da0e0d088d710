"""The benchmark's model and the cases for the clip bound in PyTorch; imports nothing else, so that workers can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """The rows that an example looks up, side by side, and two layers."""

    def __init__(self, table: Tensor, layers: Mapping[str, Any], sparse: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(table.shape[0], table.shape[1], sparse=sparse, _weight=table)
        self.hidden = _linear(layers, "hidden")
        self.out = _linear(layers, "out")

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(self.emb(ids).flatten(1)))).squeeze(1)


def make_net(problem: Any, sparse: bool = False) -> Net:
    table = torch.empty(problem.rows, problem.dim)
    problem.fill(table.numpy())
    return Net(table, problem.layers(), sparse)


def make_batches(problem: Any) -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(ids), torch.from_numpy(target)) for ids, target in problem.batches()]


class CaseNet(nn.Module):
    """See `problem.Case`."""

    def __init__(self, kind: str, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self.kind = kind
        table = _tensor(weights["emb.weight"])
        rows, dim = table.shape
        if kind == "bag":
            self.emb: Any = nn.EmbeddingBag(rows, dim, mode="sum", _weight=table)
        else:
            self.emb = nn.Embedding(rows, dim, _weight=table)
        if kind == "positions":
            positions = _tensor(weights["pos.weight"])
            self.pos = nn.Embedding(positions.shape[0], dim, _weight=positions)
        if kind == "module tie":
            self.out = nn.Linear(dim, rows, bias=False)
            self.out.weight = self.emb.weight
        elif kind != "functional tie":
            self.out = _linear(weights, "out")

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "bag":
            return self.out(self.emb(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])))
        embedded = self.emb(ids)
        if self.kind == "module tie":
            return self.out(embedded.sum(1))
        if self.kind == "functional tie":
            return F.linear(embedded.sum(1), self.emb.weight)
        if self.kind == "positions":
            embedded = embedded + self.pos(torch.arange(ids.shape[1])[None])
        return self.out(embedded.flatten(1))


def case_module(case: Any) -> nn.Module:
    if case.kind == "model":
        return Net(_tensor(case.weights["emb.weight"]), case.weights)
    return CaseNet(case.kind, case.weights)


def case_loss(case: Any) -> nn.Module:
    return nn.BCEWithLogitsLoss() if case.kind == "model" else nn.CrossEntropyLoss()


def moved(module: nn.Module, step: Callable[[], None]) -> dict[str, Tensor]:
    """What a step takes off the parameters."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    step()
    return {name: before[name] - p.detach() for name, p in module.named_parameters()}


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())


def _linear(weights: Mapping[str, Any], name: str) -> nn.Linear:
    weight = _tensor(weights[f"{name}.weight"])
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(_tensor(weights[f"{name}.bias"]))
    return layer
