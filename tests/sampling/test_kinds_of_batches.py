"""Batches of any kind, from the loader through the step and `check`: the run of a batch that is a tuple."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.errors import SparseDPError

ROWS = 30


@dataclass
class Texts:
    ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Frozen:
    ids: Tensor
    labels: Tensor


@dataclass
class Nested:
    inputs: dict[str, Any]
    labels: Tensor


class Pair(NamedTuple):
    ids: Tensor
    labels: Tensor


def encoding(ids: Tensor, labels: Tensor) -> Any:
    return pytest.importorskip("transformers").BatchEncoding({"ids": ids, "labels": labels})


def output(ids: Tensor, labels: Tensor) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.utils.ModelOutput(ids=ids, labels=labels)


# How a batch is made, and where the ids and labels are in it.
KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda ids, labels: (ids, labels), lambda batch: tuple(batch)),
    "list": (lambda ids, labels: [ids, labels], lambda batch: tuple(batch)),
    "named tuple": (Pair, lambda batch: (batch.ids, batch.labels)),
    "dict": (lambda ids, labels: {"ids": ids, "labels": labels}, lambda batch: (batch["ids"], batch["labels"])),
    "dataclass": (Texts, lambda batch: (batch.ids, batch.labels)),
    "frozen dataclass": (Frozen, lambda batch: (batch.ids, batch.labels)),
    "nested tuples": (lambda ids, labels: (((ids,),), labels), lambda batch: (batch[0][0][0], batch[1])),
    "dict in a tuple": (lambda ids, labels: ({"x": {"ids": ids}}, labels), lambda batch: (batch[0]["x"]["ids"], batch[1])),
    "dict in a dict": (
        lambda ids, labels: {"x": {"ids": ids, "name": "text"}, "labels": labels},
        lambda batch: (batch["x"]["ids"], batch["labels"]),
    ),
    "dict in a dataclass": (
        lambda ids, labels: Nested({"ids": [ids]}, labels),
        lambda batch: (batch.inputs["ids"][0], batch.labels),
    ),
    "dataclass in a dict": (lambda ids, labels: {"x": Texts(ids, labels)}, lambda batch: (batch["x"].ids, batch["x"].labels)),
    "BatchEncoding": (encoding, lambda batch: (batch.ids, batch["labels"])),
    "BatchEncoding in a tuple": (
        lambda ids, labels: (encoding(ids, labels), labels), lambda batch: (batch[0].ids, batch[1])
    ),
    "ModelOutput": (output, lambda batch: (batch["ids"], batch.labels)),
}  # fmt: skip
kinds = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.models] if "Batch" in kind or "Model" in kind else []) for kind in KINDS],
)


class Model(nn.Module):
    """Takes a batch of a kind, or its parts by name, as a loop hands it over."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table, self.out = nn.EmbeddingBag(ROWS, 4), nn.Linear(4, 1)

    def forward(self, *batch: Any, **named: Any) -> Tensor:
        value = named or (batch[0] if len(batch) == 1 else batch)
        while not isinstance(value, Tensor):  # the ids are what comes first
            if isinstance(value, Mapping):
                value = value["ids"] if "ids" in value else value["x"]
            elif isinstance(value, (tuple, list)):
                value = value[0]
            else:
                value = value.ids if hasattr(value, "ids") else value.inputs
        return self.out(self.table(value)).squeeze(1)


def collate_of(kind: str, mixes: bool = False) -> Callable[[Any], Any]:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
        ids, labels = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        if mixes:
            labels = labels - labels.mean()
        return KINDS[kind][0](ids, labels)

    return collate


def data(size: int = 24) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randint(ROWS, (size, 3), generator=draw), torch.randint(2, (size,), generator=draw).float()
    )


def arguments(batch: Any) -> tuple[tuple, dict]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch[:-1]), {}
    return (batch,), {}


def run(kind: str, size: int, batch_size: int, **settings: Any) -> tuple[dict[str, Tensor], int, int]:
    model, engine = Model(kind), sparsedp.PrivacyEngine(seed=2)
    loader = DataLoader(data(size), batch_size=batch_size, collate_fn=collate_of(kind))
    _, optimizer, private = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, **settings,
    )  # fmt: skip
    empty = 0
    for _ in range(3):
        for batch in private:
            empty += private.current.units == 0
            assert isinstance(batch, type(KINDS[kind][0](torch.zeros(1), torch.zeros(1))))
            args, kwargs = arguments(batch)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(*args, **kwargs), KINDS[kind][1](batch)[1]).backward()
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, engine.ledger.steps, empty


@kinds
@pytest.mark.parametrize("settings", [{}, {"max_physical_batch": 3}], ids=["whole", "in parts"])
def test_every_kind_trains_as_a_tuple_does(kind: str, settings: dict[str, Any]) -> None:
    wanted, steps, _ = run("tuple", 24, 8, **settings)
    found, count, _ = run(kind, 24, 8, **settings)
    assert count == steps == 9
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


@kinds
def test_empty_batches_of_every_kind(kind: str) -> None:
    wanted, _, _ = run("tuple", 4, 1)
    found, steps, empty = run(kind, 4, 1)
    assert steps == 12 and empty >= 1
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def loss_of(kind: str) -> Callable[[Tensor, Any], Tensor]:
    def loss(logits: Tensor, target: Any) -> Tensor:
        labels = target if isinstance(target, Tensor) else KINDS[kind][1](target)[1]
        return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    return loss


@kinds
def test_check_takes_every_kind(kind: str) -> None:
    loader = DataLoader(data(), batch_size=6, collate_fn=collate_of(kind))
    report = sparsedp.check(Model(kind), loss_of(kind), next(iter(loader)), data_loader=loader)
    assert report.units >= 4
    assert not sparsedp.explain(Model(kind), loss_of(kind), next(iter(loader))).refusals


@kinds
def test_a_collate_function_that_mixes_is_refused_in_every_kind(kind: str) -> None:
    loader = DataLoader(data(), batch_size=6, collate_fn=collate_of(kind, mixes=True))
    model = Model(kind)
    with pytest.raises(SparseDPError, match=r"other examples of the batch|other units"):
        sparsedp.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(SparseDPError):
        sparsedp.check(model, loss_of(kind), data_loader=loader)
