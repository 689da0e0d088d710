"""deepctr-torch: click models on one matrix of columns, with sparse, dense and sequence features."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import click_loss, clicks, drawn, normal, without_batch_norm

SPARSE, DENSE, ROWS, LENGTH = 4, 2, 5, 4


def columns(n: int) -> tuple[Tensor, Tensor]:
    return torch.cat([drawn(n, SPARSE, high=ROWS).float(), normal(n, DENSE).sigmoid()], 1), clicks(n)


def two_tasks(n: int) -> tuple[Tensor, Tensor]:
    return columns(n)[0], torch.stack([clicks(n), clicks(n).flip(0)], 1)


def sparse_columns(n: int) -> tuple[Tensor, Tensor]:
    return drawn(n, SPARSE, high=ROWS).float(), clicks(n)


def histories(n: int) -> tuple[Tensor, Tensor]:
    """user, item, history of items (padded with 0), its length."""
    lengths = drawn(n, 1, low=1, high=LENGTH + 1, seed=3)
    history = drawn(n, LENGTH, low=1, high=ROWS, seed=2) * (torch.arange(LENGTH) < lengths)
    return torch.cat([drawn(n, 2, low=1, high=ROWS), history, lengths], 1).float(), clicks(n)


def _features(dense: bool = True) -> list[Any]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    sparse = [SparseFeat(f"s{i}", ROWS, embedding_dim=4) for i in range(SPARSE)]
    return sparse + [DenseFeat(f"d{i}", 1) for i in range(DENSE if dense else 0)]


def _build(name: str, one: bool = False, dense: bool = True, **options: Any) -> Callable[[], nn.Module]:
    """`one`: the model has a single list of features instead of a linear and a deep one."""

    def build() -> nn.Module:
        features = _features(dense)
        # Their own initial tables are of the size 1e-4: every gradient would be as small.
        settings = {"init_std": 0.1, **options}
        model = getattr(importlib.import_module("deepctr_torch.models"), name)
        return model(features, **settings) if one else model(features, features, **settings)

    return build


def _build_history(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat

        features = [
            SparseFeat("user", ROWS, embedding_dim=4),
            SparseFeat("item", ROWS, embedding_dim=4),
            VarLenSparseFeat(
                SparseFeat("hist_item", ROWS, embedding_dim=4, embedding_name="item"),
                maxlen=LENGTH,
                length_name="length",
            ),
        ]
        model = getattr(importlib.import_module("deepctr_torch.models"), name)
        return without_batch_norm(model(features, ["item"], init_std=0.1, dnn_hidden_units=(8,), **options))

    return build


DNN = {"dnn_hidden_units": (8,)}
# Name and options; the class is the name up to its first point.
TWO_LISTS: list[tuple[str, dict[str, Any]]] = [
    ("WDL", DNN), ("DeepFM", DNN), ("xDeepFM", {**DNN, "cin_layer_size": (4, 4)}), ("NFM", DNN), ("DCN", DNN), ("DCN.matrix", {**DNN, "cross_parameterization": "matrix"}),
    ("DCNMix", {**DNN, "low_rank": 3, "num_experts": 2}), ("AutoInt", {**DNN, "att_layer_num": 2}), ("ONN", DNN),
    ("FiBiNET", DNN), ("FiBiNET.all", {**DNN, "bilinear_type": "all"}), ("FiBiNET.each", {**DNN, "bilinear_type": "each"}),
    ("IFM", DNN), ("DIFM", {**DNN, "att_head_num": 2}), ("DeepFM.batch_norm", {**DNN, "dnn_use_bn": True}),
]  # fmt: skip
TASKS: list[tuple[str, dict[str, Any]]] = [
    ("SharedBottom", {"bottom_dnn_hidden_units": (8,), "tower_dnn_hidden_units": (4,)}),
    ("ESMM", {"tower_dnn_hidden_units": (8,)}),
    ("MMOE", {"expert_dnn_hidden_units": (8,), "gate_dnn_hidden_units": (4,), "tower_dnn_hidden_units": (4,)}),
    ("PLE", {"expert_dnn_hidden_units": (8,), "gate_dnn_hidden_units": (4,), "tower_dnn_hidden_units": (4,)}),
]


def _case(name: str, build: Callable[[], nn.Module], batch: Callable[[int], Any]) -> Case:
    return Case(f"deepctr.{name}", "deepctr_torch", build, batch, click_loss)


CASES = [
    *(_case(name, _build(name.split(".")[0], **options), columns) for name, options in TWO_LISTS),
    _case("AFM", _build("AFM", dense=False, attention_factor=4), sparse_columns),
    _case("AFN", lambda: without_batch_norm(_build("AFN", ltl_hidden_size=6, afn_dnn_hidden_units=(8,))()), columns),
    _case("PNN", _build("PNN", one=True, **DNN), columns),
    _case("PNN.outer", _build("PNN", one=True, use_inner=False, use_outter=True, **DNN), columns),
    _case("MLR", _build("MLR", one=True, region_num=2), columns),
    _case("CCPM", _build("CCPM", dense=False, conv_kernel_width=(3, 2), conv_filters=(2, 2), **DNN), sparse_columns),
    *(_case(name, _build(name, one=True, **options), two_tasks) for name, options in TASKS),
    _case("DIN", _build_history("DIN", att_hidden_size=(4,)), histories),
    _case("DIN.softmax", _build_history("DIN", att_hidden_size=(4,), att_weight_normalization=True), histories),
    *(_case(f"DIEN.{kind}", _build_history("DIEN", gru_type=kind, att_hidden_units=(4,)), histories)
      for kind in ("GRU", "AIGRU", "AGRU", "AUGRU")),
]  # fmt: skip
