"""Models of texts: exact capture with padding, repeated tokens and empty texts; what one text can do to a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neighbours import largest_influence
from sparsedp.clipping import Clipping
from sparsedp.errors import ConfigError
from sparsedp.models import Lora, TextBag, read_encoder
from support import assert_exact
from words import WORDS

ROWS, LENGTH, CLASSES, UNITS = 9, 5, 3, 6
VARIANTS: dict[str, dict[str, Any]] = {
    "one bag": {},
    "a hidden layer": {"hidden": [4]},
    "towers": {"hidden": [4], "towers": True},
    "padding is the last row": {"padding": ROWS - 1},
}


def texts(padding: int = 0, units: int = UNITS) -> tuple[Tensor, Tensor]:
    """Two texts of each unit: one is empty, one a repeated token, others have padding behind."""
    torch.manual_seed(1)
    first, second = (torch.randint(1, ROWS - 1, (units, LENGTH)) for _ in range(2))
    first[0], first[1] = padding, 3
    second[2, 2:], second[1] = padding, 3
    return first, second


def bag(variant: str) -> TextBag:
    torch.manual_seed(0)
    return TextBag(ROWS, CLASSES, **{"padding": 0, "dim": 4, **VARIANTS[variant]})


def one_class(logits: Tensor) -> Tensor:
    """The same class for all, so that a unit alone has the same loss."""
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="sum")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("units", [1, UNITS])
def test_bags_are_captured_exactly(variant: str, units: int) -> None:
    model = bag(variant)
    found = assert_exact(model, *texts(model.padding, max(units, 3))[: 1 + (units > 1 or model.towers)], loss=one_class)
    assert "table.weight" in found.uses


def test_an_empty_text_is_zero_and_touches_nothing() -> None:
    model = bag("one bag")
    empty = torch.zeros(1, LENGTH, dtype=torch.long)
    model(empty).sum().backward()
    assert not model.table(empty).any()
    assert model.table.weight.grad is not None and not model.table.weight.grad.any()


@pytest.mark.parametrize("variant", ["one bag", "towers"])
def test_one_text_moves_the_clipped_sum_by_the_bound_at_most(variant: str) -> None:
    inputs = list(texts())
    worst = max(
        largest_influence(bag(variant), inputs, Clipping(0.5), lambda s, k=k: k * one_class(s)) for k in (1.0, 1e3)
    )
    assert 0.45 < worst <= 0.5 * (1 + 1e-4)


def test_tokens_of_two_texts_are_one_bag_or_two() -> None:
    first, second = texts()
    one, two = bag("one bag"), bag("towers")
    both = torch.cat([first, second], 1)
    torch.testing.assert_close(one(first, second), one(both))
    assert not torch.allclose(two(first, second), two(second, first))


# ---------------------------------------------------------------------- encoders


@pytest.mark.models
@pytest.mark.parametrize("embeddings", ["train", "freeze", "lora"])
@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_encoders_are_captured_exactly(kind: str, embeddings: Any, adapters: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    if embeddings == "lora" and not adapters:
        pytest.skip("an adapter needs its rank")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "pad_token_id": 0}
    names = ("dim", "n_layers", "n_heads", "hidden_dim") if kind == "DistilBert" else (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes, **dict(zip(names, (8, 1, 2, 8))))
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    model = read_encoder(
        tmp_path,
        classes=CLASSES,
        rows=len(WORDS),
        padding=0,
        lora=Lora(2, targets=("q_lin", "v_lin") if kind == "DistilBert" else ()) if adapters else None,
        embeddings=embeddings,
        dropout=0.0,
    )
    for name, parameter in model.named_parameters():  # B of an adapter begins at zero, and A then has no gradient
        if "lora" in name and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(4, len(WORDS), (4, LENGTH))
    ids[0, 3:], ids[1, 1:], ids[2] = 0, 0, 5
    found = assert_exact(model, ids, torch.zeros_like(ids), loss=one_class, tolerance=1e-7)
    assert any("word_embeddings" in name for name in found.uses) == (embeddings != "freeze")


# Families and what their folder is of: the tasks need layers that no folder has.
FOLDERS = {
    "Bert": "BertModel", "BertWithoutPooler": "BertForMaskedLM", "DistilBert": "DistilBertModel", "Electra": "ElectraModel",
    "MPNet": "MPNetModel", "DebertaV2": "DebertaV2Model", "ModernBert": "ModernBertModel", "Bart": "BartModel",
    "T5": "T5ForConditionalGeneration", "GPT2": "GPT2Model",
}  # fmt: skip
TARGETS = {"DistilBert": ("q_lin", "v_lin"), "MPNet": ("q", "v"), "ModernBert": ("Wqkv",)}


@pytest.mark.models
@pytest.mark.parametrize("family", FOLDERS)
def test_layers_that_the_folder_has_no_weights_for_are_trained(family: str, tmp_path: Path) -> None:
    """What differs from one reading to the next is random: it must not stay so."""
    from model_matrix import hf

    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    name = family.removesuffix("WithoutPooler")
    config = getattr(transformers, f"{name}Config")(**hf.FAMILIES_BY_NAME[name])
    getattr(transformers, FOLDERS[family])(config).save_pretrained(tmp_path)

    def read() -> torch.nn.Module:
        lora = Lora(2, targets=TARGETS.get(family, ()))
        return read_encoder(tmp_path, classes=CLASSES, rows=len(WORDS), padding=0, lora=lora, embeddings="freeze")

    one, other = dict(read().named_parameters()), dict(read().named_parameters())
    random = {key for key, value in one.items() if not torch.equal(value, other[key]) and "original_module" not in key}
    heads = {key for key in random if "lora_" not in key}
    assert heads and all(one[key].requires_grad for key in random)
    trained = {key for key, value in one.items() if value.requires_grad and "lora_" not in key}
    assert all("modules_to_save" in key for key in trained)  # and nothing else but adapters


@pytest.mark.models
def test_a_folder_without_word_embeddings_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    from model_matrix import hf

    transformers.BertModel(transformers.BertConfig(**hf.BERT)).save_pretrained(tmp_path)
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file(
        {name: value for name, value in weights.items() if "word_embeddings" not in name},
        tmp_path / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="no weights of the word embeddings"):
        read_encoder(tmp_path, classes=CLASSES, rows=len(WORDS), padding=0)
