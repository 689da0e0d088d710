"""A pretrained Transformer of Hugging Face as a classifier of texts, with low-rank adapters and its word embeddings trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsedp.errors import ConfigError, one_line

Embeddings = Literal["train", "freeze", "lora"]
_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "attention_dropout", "activation_dropout",
    "mlp_dropout", "embedding_dropout", "pooler_dropout", "dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Lora:
    """Adapters of `rank` beside linear maps: W x + (alpha / rank) B A x (Hu et al.).

    `targets` are the ends of the names of the maps; without any, those that peft knows for the kind of model: mostly the
    attention's queries and values.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()


class TextEncoder(nn.Module):
    """Logits [n, classes] of tokens, int64 [n, length], as their tokenizer wrote them; `types` tells of which text each is.

    Tokens that are `padding` are not attended to.
    """

    def __init__(self, model: nn.Module, padding: int, *, takes_types: bool) -> None:
        super().__init__()
        self.model, self.padding, self._takes_types = model, padding, takes_types

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        more = {"token_type_ids": types} if self._takes_types else {}
        return self.model(input_ids=ids, attention_mask=(ids != self.padding).long(), **more).logits


def read_encoder(
    folder: str | Path,
    *,
    classes: int,
    rows: int,
    padding: int,
    lora: Lora | None = None,
    embeddings: Embeddings = "train",
    dropout: float | None = None,
) -> TextEncoder:
    """The model in a folder, with a new head. With `lora` all else is frozen but the head, layers that the folder has no weights
    for (poolers, mostly), and the word embeddings as `embeddings` says; without, everything is trained, save word embeddings that
    are frozen.
    """
    try:
        from transformers import AutoConfig, AutoModelForSequenceClassification
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            "model.kind: encoder needs the package transformers, and peft for lora: pip install -e '.[encoder]'"
        ) from error
    if not Path(folder).is_dir():
        raise ConfigError(f"model.path: {folder}: there is no such folder")
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would tell that the head is new, which it is meant to be
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.num_labels, config.pad_token_id = classes, padding
        if dropout is not None:
            _set_dropout(config, dropout, folder)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            folder, config=config, local_files_only=True, output_loading_info=True
        )
    except ConfigError:
        raise
    except Exception as error:  # of many kinds
        raise ConfigError(f"model.path: {folder} cannot be read as a classifier: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    words = model.get_input_embeddings()
    if words.num_embeddings < rows:
        raise ConfigError(
            f"model.path: {folder} has {words.num_embeddings:,} word embeddings, and the tokenizer {rows:,} tokens: they do not "
            "belong together"
        )
    name = next(name for name, module in model.named_modules() if module is words)
    if f"{name}.weight" in loaded["missing_keys"]:
        raise ConfigError(f"model.path: {folder} has no weights of the word embeddings, {name}.weight")
    takes_types = getattr(config, "type_vocab_size", 0) > 1
    if lora is not None:
        model = _with_lora(
            model, lora, name if embeddings == "lora" else None, _new_modules(model, loaded["missing_keys"])
        )
    words.weight.requires_grad_(embeddings == "train")
    return TextEncoder(model.float(), padding, takes_types=takes_types)


def _set_dropout(config: Any, dropout: float, folder: str | Path) -> None:
    names = [name for name in _DROPOUTS if hasattr(config, name)]
    if not names:
        raise ConfigError(f"model.dropout: the model in {folder} has none that is known by name; leave it out")
    for name in names:
        setattr(config, name, dropout)


def _new_modules(model: nn.Module, missing: set[str]) -> list[str]:
    """The outermost modules that own a parameter without weights in the folder: random, until they are trained."""
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters() if name in missing}
    # peft trains these ends of names by itself, and wraps no module twice
    heads = {name for name, _ in model.named_modules() if name.endswith(("classifier", "score"))}
    return sorted(
        owner
        for owner in owners
        if owner not in heads and not any(owner.startswith(f"{other}.") for other in owners | heads)
    )


def _with_lora(model: nn.Module, lora: Lora, words: str | None, new: list[str]) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora needs the package peft: pip install -e '.[encoder]'") from error
    targets = [*(lora.targets or _known_targets(model)), *([] if words is None else [words])]
    try:
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type=peft.TaskType.SEQ_CLS,
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=0.0,
                target_modules=targets,
                modules_to_save=new,
            ),
        )
    except ValueError as error:  # no such modules
        raise ConfigError(f"model.lora.targets: {one_line(error)}") from error


def _known_targets(model: nn.Module) -> list[str]:
    """What peft takes for this kind of model."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known

    kind = model.config.model_type  # type: ignore[union-attr]
    if kind not in known:
        raise ConfigError(f"model.lora.targets: missing; peft knows none for {kind}")
    return list(known[kind])


def lora_size(rows: int, dim: int, rank: int) -> int:
    """Coordinates of the gradient of an adapter beside a table: A is rank x rows, B dim x rank (DP-AdaFEST, section 4.4)."""
    return (rows + dim) * rank


def read_rows(path: str | Path, name: str | None = None) -> Tensor:
    """The rows of a table, float32 [rows, dim], in a file .safetensors or .npy; `name` is that of the tensor among several."""
    import numpy as np

    path = Path(path)
    where = f"model.pretrained: {path}"
    if path.suffix not in (".safetensors", ".npy"):
        raise ConfigError(f"{where}: expected a file .safetensors or .npy")
    try:
        if path.suffix == ".npy":
            found = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                names = list(file.keys())
                if name is None and len(names) > 1:
                    raise ConfigError(
                        f"{where} has several tensors; say which: model.tensor, one of {', '.join(names)}"
                    )
                if name is not None and name not in names:
                    raise ConfigError(f"{where} has no tensor {name!r}; it has {', '.join(names)}")
                found = file.get_tensor(name or names[0])
    except ImportError as error:
        raise ConfigError(f"{where}: the package safetensors is not installed: pip install -e '.[text]'") from error
    except ConfigError:
        raise
    except Exception as error:  # of many kinds: safetensors has its own
        raise ConfigError(f"{where} cannot be read: {one_line(error)}") from error
    if found.dim() != 2 or not found.is_floating_point():
        raise ConfigError(f"{where}: expected rows of numbers; got {found.dtype} of the shape {tuple(found.shape)}")
    return found.float()
