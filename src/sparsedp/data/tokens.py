"""From a text to rows of a table: a Hugging Face tokenizer, a public list of words, or words that are hashed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from sparsedp.data.codes import Form, codes_of
from sparsedp.data.vocabulary import HashVocabulary
from sparsedp.errors import ConfigError, one_line

Split = Literal["words", "whitespace"]
_WORDS = re.compile(r"\w+|[^\w\s]")  # runs of letters and digits, and each other character
_PADDINGS = ("[PAD]", "<pad>", "<PAD>", "<|pad|>")
_EXTRA = "pip install -e '.[text]' brings it"


class Tokens(Protocol):
    """`rows` rows of a table, of which `padding` stands where a text has ended."""

    rows: int
    padding: int

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """The first `length` rows of each text, int64 [texts, length]; nothing is put before or behind them."""


class TokenizerFolder:
    """A folder with a Hugging Face tokenizer, or the file tokenizer.json itself.

    Without a token for padding, that is one row more than the tokenizer has.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tokenizer = _read_tokenizer(self.path)
        self._tokenizer.no_padding()
        known = self._tokenizer.get_vocab_size(with_added_tokens=True)
        names = [_configured_padding(self.path), *_PADDINGS]
        ids = [self._tokenizer.token_to_id(name) for name in names if name is not None]
        self.padding: int = next((row for row in ids if row is not None), known)
        self.rows: int = known + (self.padding == known)
        self.has_padding = self.padding < known

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        self._tokenizer.enable_truncation(length)
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return padded([one.ids for one in found], length, self.padding)

    def encode_joined(
        self, texts: Sequence[str], seconds: Sequence[str] | None, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each text, or pair of texts, as the tokenizer puts it for a model, with its special tokens; and which text a token is
        of. Of the longer one tokens are left out until there are `length`.
        """
        try:
            self._tokenizer.enable_truncation(length, strategy="longest_first")
            pairs: Sequence[Any] = list(texts) if seconds is None else list(zip(texts, seconds))
            found = self._tokenizer.encode_batch(pairs, add_special_tokens=True)
        except Exception as error:  # the tokenizers package raises plain Exceptions
            raise ConfigError(
                f"{self.path}: cannot write texts of at most {length} tokens: {one_line(error)}"
            ) from error
        ids = padded([one.ids for one in found], length, self.padding)
        return ids, padded([one.type_ids for one in found], length, 0)

    def words(self) -> list[str]:
        """The tokens in order of their rows."""
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        words = [""] * self.rows
        for name, row in names.items():
            words[row] = name
        return words


def _read_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"data.tokenizer: the package tokenizers is not installed. {_EXTRA}") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"data.tokenizer: {path}: there is no such folder")
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        from transformers import (
            AutoTokenizer,
        )  # older folders: made from vocab.txt, merges.txt or a SentencePiece model

        read = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return Tokenizer.from_str(read.backend_tokenizer.to_str())
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer: {path} has no tokenizer.json; the package transformers makes one of other files. {_EXTRA}"
        ) from error
    except Exception as error:  # of many kinds, among them plain Exceptions
        raise ConfigError(f"data.tokenizer: {path} cannot be read as a tokenizer: {one_line(error)}") from error


def _configured_padding(path: Path) -> str | None:
    """The token for padding that tokenizer_config.json names."""
    try:
        named = json.loads((path / "tokenizer_config.json").read_text()).get("pad_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = named.get("content") if isinstance(named, dict) else named
    return token if isinstance(token, str) else None


class WordList:
    """A public text file with a word in each line, whose row is the number of the line, from 0. Padding is one row more.

    Texts are cut into words in lower case; words that are not in the file are left out.
    """

    def __init__(self, path: str | Path, split: Split = "words") -> None:
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.vocabulary: {path} cannot be read: {one_line(error)}") from error
        words = lines[:-1] if lines[-1] == "" else lines
        self._row_of: dict[str, int] = {}
        for row, word in enumerate(words):
            self._row_of.setdefault(word.rstrip("\r"), row)
        if not words:
            raise ConfigError(f"data.vocabulary: {path} is empty; expected a word in each line")
        self.padding = len(words)
        self.rows = len(words) + 1
        self._split = split

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        rows = ((self._row_of.get(word) for word in words_of(text, self._split)) for text in texts)
        return padded([[row for row in of_text if row is not None][:length] for of_text in rows], length, self.padding)


class HashedWords:
    """Words in lower case, hashed to `buckets` rows, of which row 0 is padding."""

    padding = 0

    def __init__(self, buckets: int, split: Split = "words") -> None:
        (self._column,) = HashVocabulary(buckets).for_columns(["text"], [Form.TEXT])
        self.rows = buckets
        self._split = split

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        words = [words_of(text, self._split)[:length] for text in texts]
        distinct = sorted({word for of_text in words for word in of_text})
        codes, _ = codes_of(pa.array([word.encode() for word in distinct], pa.binary()), Form.TEXT)
        row_of = dict(zip(distinct, self._column.encode(codes).tolist()))
        return padded([[row_of[word] for word in of_text] for of_text in words], length, self.padding)


def words_of(text: str, split: Split) -> list[str]:
    text = text.lower()
    return text.split() if split == "whitespace" else _WORDS.findall(text)


def padded(rows: Sequence[Sequence[int]], length: int, padding: int) -> np.ndarray:
    """int64 [texts, length]"""
    out = np.full((len(rows), length), padding, np.int64)
    for i, of_text in enumerate(rows):
        out[i, : len(of_text)] = of_text
    return out
