"""The models that `python -m benchmarks language` trains: real sizes, random weights, made from configurations alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.speed.steps import Workload
from sparsedp.errors import SparseDPError
from sparsedp.integrations.table_softmax import softmax_over_table

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

WORDS = "embed_tokens"  # of Gemma 3; "word_embeddings" of the encoders


@dataclass(frozen=True)
class Size:
    """Of an encoder. Dropout is that of the published configurations."""

    kind: str  # "bert" or "mpnet"
    rows: int
    width: int
    layers: int
    heads: int
    inner: int
    batch: int = 32
    length: int = 64

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


ENCODERS = {
    "minilm": Size("bert", 30_522, 384, 6, 12, 1536),
    "mpnet": Size("mpnet", 30_527, 768, 12, 12, 3072),
}
SMALL = {
    "minilm": Size("bert", 200, 16, 1, 2, 32, 4, 6),
    "mpnet": Size("mpnet", 200, 16, 1, 2, 32, 4, 6),
}


@dataclass(frozen=True)
class Vocabulary:
    """A table of words, and how many of them a batch has."""

    rows: int
    width: int = 640  # Gemma 3 270M's
    batch: int = 32
    length: int = 64


VOCABULARIES = (Vocabulary(30_522), Vocabulary(262_144))
SMALL_VOCABULARIES = (Vocabulary(300, 8, 4, 6), Vocabulary(600, 8, 4, 6))
CAUSAL = Vocabulary(262_144, batch=4, length=32)
SMALL_CAUSAL = Vocabulary(600, 8, 4, 6)


def require_models() -> tuple[Any, Any]:
    """transformers and peft."""
    try:
        import peft
        import transformers
    except ImportError as error:
        raise SparseDPError(
            f'This part trains models of transformers and peft ({error}): pip install -c constraints.txt -e ".[models]"'
        ) from error
    return transformers, peft


def words(batch: int, length: int, rows: int) -> Tensor:
    """Ids (batch, length), as popular as rank^-1."""
    popularity = torch.arange(1, rows - 2, dtype=torch.float64).reciprocal()
    return 3 + torch.multinomial(popularity, batch * length, replacement=True).view(batch, length)


def encoder(size: Size, way: str) -> Workload:
    """A classifier of texts. `way`: "lora" with trained word embeddings, or "full"."""
    transformers, peft = require_models()
    ids = words(size.batch, size.length, size.rows)

    def make(sparse: bool) -> nn.Module:
        sizes = {
            "vocab_size": size.rows, "hidden_size": size.width, "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads, "intermediate_size": size.inner,
        }  # fmt: skip
        if size.kind == "bert":
            model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
            targets = ["query", "value"]
        else:
            model = transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**sizes))
            targets = ["attn.q", "attn.v"]
        if way == "lora":
            config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=["classifier"])
            model = peft.get_peft_model(model, config)
        table = model.get_input_embeddings()
        table.weight.requires_grad_(True)
        table.sparse = sparse
        return model.train()

    return Workload(f"{size.kind} {way}", make, (ids, torch.ones_like(ids), torch.randint(2, (size.batch,))), _classes)


def _classes(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, mask, labels = batch
    return cross_entropy(module(input_ids=ids, attention_mask=mask).logits, labels)


class Words(nn.Module):
    """The mean of a text's rows, and a class: the table is all there is."""

    def __init__(self, weight: Tensor, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(weight, freeze=False, sparse=sparse)
        self.out = nn.Linear(weight.shape[1], 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).mean(1))


def table_alone(vocabulary: Vocabulary) -> Workload:
    weight = torch.empty(vocabulary.rows, vocabulary.width).normal_(0, 0.02)
    # The same words whatever the vocabulary: those that are frequent in texts come first.
    ids = words(vocabulary.batch, vocabulary.length, min(VOCABULARIES[0].rows, vocabulary.rows))
    batch = (ids, torch.randint(2, (vocabulary.batch,)))
    return Workload(f"{vocabulary.rows} rows", lambda sparse: Words(weight, sparse), batch, _of_words)


def _of_words(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, labels = batch
    return cross_entropy(module(ids), labels)


def causal(vocabulary: Vocabulary, *, over_table: bool, tied: bool = False) -> Workload:
    """A Gemma 3 of one block with LoRA and trained words: rows of their own beside the frozen head, or tied to it."""
    transformers, peft = require_models()
    ids = words(vocabulary.batch, vocabulary.length, vocabulary.rows)
    config = transformers.Gemma3TextConfig(
        vocab_size=vocabulary.rows, hidden_size=vocabulary.width, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=max(2, vocabulary.width // 4), intermediate_size=2 * vocabulary.width,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.Gemma3ForCausalLM(config).train()

    def make(sparse: bool) -> nn.Module:
        model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        table = model.get_input_embeddings()
        if tied:
            table.weight.requires_grad_(True)
        else:
            table.weight = nn.Parameter(table.weight.detach().clone())
            table.sparse = sparse
        return softmax_over_table(model) if over_table else model

    return Workload("causal", make, (ids, torch.ones_like(ids), ids), _next_words if over_table else _of_logits)


def _next_words(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, mask, labels = batch
    loss: Tensor = module(input_ids=ids, attention_mask=mask, labels=labels).loss
    return loss


def _of_logits(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, mask, labels = batch
    logits = module(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return cross_entropy(logits.mT, labels[:, 1:], reduction="none").mean(1).mean()


Step = Callable[[], None]
