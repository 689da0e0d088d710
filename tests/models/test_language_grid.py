"""Language models against each of their texts alone in float64, with the losses of PrivateTrainer.

The grid: families, classification and language modelling, eager and sdpa attention, trained in full and as LoRA adapters with the
word embeddings beside them. Texts are padded; labels are missing at some places, and everywhere in one text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_matrix import hf
from torch import Tensor, nn

from sparsedp.integrations.unit_losses import CLASSIFIERS, IGNORED, LABELS, losses_of_units
from support import assert_exact

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

loss_kind = pytest.importorskip("sparsedp.integrations.transformers").loss_kind

pytestmark = pytest.mark.models

TEXTS = 4
CAUSAL, SEQ2SEQ = hf.CAUSAL, hf.SEQ2SEQ
OF_HF = hf.FAMILIES_BY_NAME
# Windows that leave something out, but no place of a text with 4 tokens or more without a token to look at: eager attention
# gives NaN there.
GEMMA3 = {**hf.LLAMA, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
MODERN = {**OF_HF["ModernBert"], "local_attention": 12}
# Family: configuration, head of the language model, modules that LoRA changes, word embeddings.
FAMILIES: dict[str, tuple[dict[str, Any], str, list[str], str]] = {
    "Bert": (hf.BERT, hf.MASKED, ["query", "value"], "word_embeddings"),
    "Roberta": (hf.BERT, hf.MASKED, ["query", "value"], "word_embeddings"),
    "DistilBert": (hf.DISTIL, hf.MASKED, ["q_lin", "v_lin"], "word_embeddings"),
    "Electra": (OF_HF["Electra"], hf.MASKED, ["query", "value"], "word_embeddings"),
    "MPNet": (OF_HF["MPNet"], hf.MASKED, ["q", "v"], "word_embeddings"),
    "DebertaV2": (OF_HF["DebertaV2"], hf.MASKED, ["query_proj", "value_proj"], "word_embeddings"),
    "ModernBert": (MODERN, hf.MASKED, ["Wqkv"], "tok_embeddings"),
    "GPT2": (hf.GPT, "LMHeadModel", ["c_attn"], "wte"),
    "OPT": (OF_HF["OPT"], CAUSAL, ["q_proj", "v_proj"], "embed_tokens"),
    "Llama": (hf.LLAMA, CAUSAL, ["q_proj", "v_proj"], "embed_tokens"),
    "Gemma3Text": (GEMMA3, CAUSAL, ["q_proj", "v_proj"], "embed_tokens"),
    "Qwen3": (OF_HF["Qwen3"], CAUSAL, ["q_proj", "v_proj"], "embed_tokens"),
    "T5": (hf.T5, SEQ2SEQ, ["q", "v"], "shared"),
    "Bart": (hf.BART, SEQ2SEQ, ["q_proj", "v_proj"], "shared"),
}
# Of transformers' own models, these have no sdpa attention.
WITHOUT_SDPA = {"DebertaV2", "MPNet"}


def model_of(family: str, task: str, attention: str, lora: bool) -> nn.Module:
    settings, head, targets, words = FAMILIES[family]
    torch.manual_seed(0)
    name = {"Gemma3Text": "Gemma3"}.get(family, family)
    head = hf.CLASSIFIER if task == "classifier" else head
    config = getattr(transformers, f"{family}Config")(**{**settings, "num_labels": 3, "use_cache": False})
    config._attn_implementation = attention
    made = getattr(transformers, f"{family if hasattr(transformers, family + head) else name}{head}")(config)
    assert made.config._attn_implementation == attention
    if not lora:
        return made
    return peft.get_peft_model(
        made, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets, modules_to_save=[words])
    )


def texts(family: str, task: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, their mask and labels of TEXTS texts."""
    batch = hf.classes(TEXTS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert not mask.all()
    if family in ("Bart", "T5") and task == "classifier":  # they classify at the token that ends the text
        ids[torch.arange(TEXTS), mask.sum(1) - 1] = hf.END
    if task == "classifier":
        return ids, mask, batch["labels"]
    labels = hf.drawn(TEXTS, hf.LENGTH, low=3, seed=3).masked_fill(mask == 0, IGNORED)
    labels[0, 2:] = IGNORED
    labels[1] = IGNORED
    return ids, mask, labels


class WithLabels(nn.Module):
    """Hands labels on beside what the model makes of the texts, without labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        more = {}
        if loss_kind(self.model) == SEQ2SEQ:
            more["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        return self.model(input_ids=ids, attention_mask=mask, **more).logits, labels


GRID = [
    pytest.param(family, task, attention, lora, id=f"{family}-{task}-{attention}-{'lora' if lora else 'full'}")
    for family in FAMILIES
    for task in ("classifier", "language")
    for attention in ("eager", "sdpa")
    if attention == "eager" or family not in WITHOUT_SDPA
    for lora in (False, True)
]


@pytest.mark.parametrize("family", sorted(WITHOUT_SDPA))
def test_transformers_itself_has_no_sdpa_attention_there(family: str) -> None:
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        model_of(family, "classifier", "sdpa", lora=False)


@pytest.mark.parametrize(("family", "task", "attention", "lora"), GRID)
def test_norms_and_sums_are_those_of_each_text_alone(family: str, task: str, attention: str, lora: bool) -> None:
    model = WithLabels(model_of(family, task, attention, lora))
    kind = loss_kind(model.model)
    assert kind in LABELS and (kind in CLASSIFIERS) == (task == "classifier")

    def loss(output: Any) -> Tensor:
        logits, labels = output
        return losses_of_units(kind, {"logits": logits}, {"labels": labels}).sum()

    assert_exact(model, *texts(family, task), loss=loss, tolerance=1e-8)
