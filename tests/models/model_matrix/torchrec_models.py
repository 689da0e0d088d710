"""TorchRec: collections of tables on a KeyedJaggedTensor, and its models.

Each is tried twice: with the KeyedJaggedTensor made by the collate function, as TorchRec's own data loaders do, and
(`.inside`) made in forward() of ids padded to the same length.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import clicks, drawn, logit_loss, normal

FEATURES, ROWS, DIM, LONGEST, DENSE = ("f0", "f1", "f2"), 12, 8, 3, 4


def padded(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dense (n, DENSE), ids (n, features, LONGEST), lengths (n, features), click."""
    return (
        normal(n, DENSE),
        drawn(n, len(FEATURES), LONGEST, high=ROWS),
        drawn(n, len(FEATURES), high=LONGEST + 1, seed=1),
        clicks(n),
    )


def examples(n: int) -> list[Any]:
    return list(zip(*padded(n)))


def jagged(ids: Tensor, lengths: Tensor, weighted: bool = False) -> Any:
    """Feature by feature, example by example, the first `length` ids of each, with weights of both signs."""
    sparse = importlib.import_module("torchrec.sparse.jagged_tensor")
    by_feature, sizes = ids.transpose(0, 1), lengths.T
    values = by_feature[torch.arange(LONGEST) < sizes[..., None]]
    weights = (values % 5).float() - 1.5 if weighted else None
    return sparse.KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=sizes.reshape(-1), weights=weights)


def collate(rows: list[Any], weighted: bool = False) -> Any:
    dense, ids, lengths, click = (torch.stack(column) for column in zip(*rows))
    return dense, jagged(ids, lengths, weighted), click


def _tables(bags: bool, shared: bool = False, mean: bool = False, dims: int = DIM, weighted: bool = False) -> nn.Module:
    torchrec = importlib.import_module("torchrec")
    names = [list(FEATURES)] if shared else [[feature] for feature in FEATURES]
    config = torchrec.EmbeddingBagConfig if bags else torchrec.EmbeddingConfig
    pooling = {"pooling": torchrec.PoolingType.MEAN} if mean else {}
    tables = [
        config(name=f"t{i}", embedding_dim=dims, num_embeddings=ROWS, feature_names=features, **pooling)
        for i, features in enumerate(names)
    ]
    collection = torchrec.EmbeddingBagCollection if bags else torchrec.EmbeddingCollection
    options = {"is_weighted": True} if weighted else {}
    return collection(device=torch.device("cpu"), tables=tables, **options)


class Pooled(nn.Module):
    """A user's own model over a collection of bags."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tables = _tables(True, **options)
        self.over = nn.Linear(len(FEATURES) * DIM + DENSE, 1)

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        return self.over(torch.cat([self.tables(ids).values(), dense], 1))


class Sequences(nn.Module):
    """A user's own model over a collection of sequences, padded to a common length."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tables = _tables(False, **options)
        self.over = nn.Linear(len(FEATURES) * DIM + DENSE, 1)

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        found = self.tables(ids)
        pooled = [found[name].to_padded_dense(desired_length=LONGEST).sum(1) for name in FEATURES]
        return self.over(torch.cat([*pooled, dense], 1))


def _dlrm(name: str, **options: Any) -> nn.Module:
    model = getattr(importlib.import_module("torchrec.models.dlrm"), name)
    return model(
        embedding_bag_collection=_tables(True), dense_in_features=DENSE, dense_arch_layer_sizes=[8, DIM],
        over_arch_layer_sizes=[8, 1], **options,
    )  # fmt: skip


def _transformer() -> nn.Module:
    model = importlib.import_module("torchrec.models.experimental.transformerdlrm").DLRM_Transformer
    return model(
        embedding_bag_collection=_tables(True), dense_in_features=DENSE, dense_arch_layer_sizes=[8, DIM],
        over_arch_layer_sizes=[8, 1], nhead=2, ntransformer_layers=1,
    )  # fmt: skip


def _deepfm() -> nn.Module:
    model = importlib.import_module("torchrec.models.deepfm").SimpleDeepFMNN
    return LogitOf(
        model(
            num_dense_features=DENSE, embedding_bag_collection=_tables(True), hidden_layer_size=8, deep_fm_dimension=4
        )
    )


class LogitOf(nn.Module):
    """DeepFM returns a probability."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        return torch.logit(self.model(dense, ids))


class Inside(nn.Module):
    """Makes the KeyedJaggedTensor in forward()."""

    def __init__(self, model: nn.Module, weighted: bool) -> None:
        super().__init__()
        self.model, self.weighted = model, weighted

    def forward(self, dense: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.model(dense, jagged(ids, lengths, self.weighted))


MODELS: list[tuple[str, Callable[[], nn.Module]]] = [
    ("EmbeddingBagCollection", Pooled),
    ("EmbeddingBagCollection.mean", lambda: Pooled(mean=True)),
    ("EmbeddingBagCollection.shared", lambda: Pooled(shared=True)),
    ("EmbeddingBagCollection.weighted", lambda: Pooled(weighted=True)),
    ("EmbeddingBagCollection.weighted.shared", lambda: Pooled(weighted=True, shared=True)),
    ("EmbeddingCollection", Sequences),
    ("EmbeddingCollection.shared", lambda: Sequences(shared=True)),
    ("DLRM", lambda: _dlrm("DLRM")),
    ("DLRM_DCN", lambda: _dlrm("DLRM_DCN", dcn_num_layers=2, dcn_low_rank_dim=4)),
    ("DLRM_Projection", lambda: _dlrm("DLRM_Projection", interaction_branch1_layer_sizes=[16, 16],
                                      interaction_branch2_layer_sizes=[16, 16])),
    ("DLRM_Transformer", _transformer),
    ("SimpleDeepFMNN", _deepfm),
]  # fmt: skip


def _cases(name: str, build: Callable[[], nn.Module]) -> list[Case]:
    weighted = ".weighted" in name
    return [
        Case(f"torchrec.{name}", "torchrec", build, examples, logit_loss, partial(collate, weighted=weighted)),
        Case(f"torchrec.{name}.inside", "torchrec", lambda: Inside(build(), weighted), padded, logit_loss),
    ]


CASES = [case for name, build in MODELS for case in _cases(name, build)]
