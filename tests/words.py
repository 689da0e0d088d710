"""A tiny vocabulary, a tokenizer of it, and texts whose class is a word in them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "good",
    "bad",
    "film",
    "one",
    "not",
    ",",
    *(f"w{i}" for i in range(20)),
]


def write_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> Path:
    """A folder with a Hugging Face tokenizer of whole words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "[CLS]" in words:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, words.index(name)) for name in ("[CLS]", "[SEP]")],
        )
        tokenizer.add_special_tokens([name for name in ("[PAD]", "[CLS]", "[SEP]") if name in words])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if "[PAD]" in words:
        (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    return folder


def write_reviews(path: Path, rows: int = 200, seed: int = 0, second: bool = False) -> Path:
    """Texts of w0 to w19 with "good" (1) or "bad" (0) among them; of pairs, in the second."""
    draw = random.Random(seed)
    lines = ["sentence\tother\tlabel" if second else "sentence\tlabel"]
    for _ in range(rows):
        label = draw.randrange(2)
        words = [f"w{draw.randrange(20)}" for _ in range(draw.randrange(1, 6))]
        words.insert(draw.randrange(len(words) + 1), ("bad", "good")[label])
        text = " ".join(words)
        lines.append(f"a film\t{text}\t{label}" if second else f"{text}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return path
