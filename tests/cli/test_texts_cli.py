"""`data.kind: text` with `text_bag` and `encoder` from the command line: what is trained, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.prepare import load_data, make_model
from sparsedp.data import WordList
from sparsedp.models import TextBag
from words import WORDS, write_reviews, write_tokenizer

Values = dict[str, Any]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSEDP_DATA", raising=False)


def configuration(**sections: Values) -> Path:
    values: dict[str, Any] = {
        "data": {
            "kind": "text",
            "paths": "train.tsv",
            "text": "sentence",
            "buckets": 200,
            "length": 8,
            "held_out": "dev.tsv",
        },
        "model": {"kind": "text_bag", "dim": 8},
        "loss": "cross_entropy",
        "optimizer": {"name": "Adagrad", "lr": 0.2},
        "training": {"epochs": 4, "batch_size": 50, "threads": 1, "init_seed": 0, "check": False},
        "privacy": {"noise_multiplier": 0.5, "target_delta": 1e-4, "max_grad_norm": 1.0, "mechanism": "dpsgd"},
    }
    for name, section in sections.items():
        values[name] = section if isinstance(section, str) else {**values[name], **section}
    write_reviews(Path("train.tsv"), 400)
    write_reviews(Path("dev.tsv"), 100, seed=1)
    Path("words.txt").write_text("".join(f"{word}\n" for word in WORDS))
    path = Path("texts.yaml")
    path.write_text(yaml.safe_dump({key: {k: v for k, v in section.items() if v is not None} if isinstance(section, dict) else section
                                    for key, section in values.items()}))  # fmt: skip
    return path


def result_of(path: Path, *options: str) -> Values:
    assert main(["train", str(path), "--run-dir", "run", "--quiet", *options]) == 0
    return json.loads(Path("run/private/result.json").read_text())


def refused(capsys: pytest.CaptureFixture[str], path: Path | str, *options: str) -> str:
    capsys.readouterr()
    assert main(["train", str(path), "--quiet", *options]) == 2
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    return err


def test_a_bag_of_hashed_words_learns() -> None:
    result = result_of(configuration(), "--set", "training.check=true")
    assert min(result["precision"], result["recall"]) > 0.9
    assert result["accuracy"] > 0.95 and result["loss"] < 0.6 and result["dense_gradient_size"] == 200 * 8


def test_evaluate_and_report_tell_the_accuracy_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    path = configuration(training={"epochs": 1})
    result = result_of(path)
    config = load_config(path)
    data = load_data(config)
    model = make_model(config, data.training)
    model.load_state_dict(torch.load("run/release/model.pt", weights_only=True))
    *texts, labels = torch.utils.data.default_collate([data.held_out[i] for i in range(len(data.held_out))])
    with torch.no_grad():
        right = model.eval()(*texts).argmax(1) == labels
    assert 0.6 < result["accuracy"] < 1 and result["accuracy"] == pytest.approx(float(right.float().mean()))
    capsys.readouterr()
    assert main(["evaluate", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accuracy"] == result["accuracy"] and told["loss"] == pytest.approx(result["loss"])
    assert main(["evaluate", "run"]) == 0
    assert f"{result['accuracy']:.4f}" in capsys.readouterr().out
    for options, name in (([], "report.html"), (["--markdown", "--private"], "model_card.md")):
        assert main(["report", "run", *options]) == 0
        page = Path("run/private", name).read_text()
        assert "accuracy" in page and f"{result['accuracy']:.4g}" in page
    assert main(["report", "run", "--markdown"]) == 0
    _, header, body = Path("run/release/README.md").read_text().split("---\n", 2)
    assert "accuracy" not in body and yaml.safe_load(header)["metrics"] == ["accuracy"]  # its name, and no number


def test_a_sweep_of_texts_compares_accuracies(capsys: pytest.CaptureFixture[str]) -> None:
    configuration(training={"epochs": 1})
    sweep: Values = {
        "base": "texts.yaml", "metric": "accuracy", "reference": "dpsgd", "losses": [0.05],
        "variants": {"dpsgd": {}, "adafest": {"set": {"privacy.mechanism": {"name": "adafest", "threshold": 2.0}}}},
        "controls": {"frozen": None},
    }  # fmt: skip
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    assert main(["sweep", "sweep.yaml", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in Path("runs/sweep/runs.jsonl").read_text().splitlines()]
    accuracies = {row["group"]: row["test"]["accuracy"] for row in rows}
    assert accuracies["dpsgd"] > 0.7 and accuracies["adafest"] > 0.7
    assert json.loads(Path("runs/sweep/front.json").read_text())["metric"] == "accuracy"
    assert "accuracy" in out and all(f"{accuracies[group]:.4f}" in out for group in ("dpsgd", "adafest"))


@pytest.mark.parametrize("mechanism", ["adafest", "fest", "lazydp"])
def test_every_mechanism_takes_it(mechanism: str) -> None:
    settings: Values = {"name": mechanism} | {"adafest": {"threshold": 2.0}, "fest": {"k": 20}}.get(mechanism, {})
    path = configuration(privacy={"mechanism": settings}, optimizer={"name": "SGD", "lr": 1.0}, training={"epochs": 1})
    assert result_of(path)["accuracy"] > 0.75


def test_pairs_are_one_bag_or_two_towers() -> None:
    pairs: Values = {"second": "other", "vocabulary": "words.txt", "buckets": None, "held_out": 0.2}
    for pair, width in (("one_bag", 8), ("towers", 32)):
        path = configuration(data=pairs, model={"pair": pair, "dim": 8})
        write_reviews(Path("train.tsv"), 400, second=True)
        config = load_config(path)
        model = make_model(config, load_data(config).training)
        assert isinstance(model, TextBag) and model.head[0].in_features == width
        assert main(["train", str(path), "--run-dir", pair, "--quiet", "--set", "training.check=true"]) == 0
        assert json.loads(Path(pair, "private/result.json").read_text())["accuracy"] > 0.9


def test_the_table_starts_from_the_rows_of_a_file() -> None:
    rows = np.random.default_rng(0).standard_normal((len(WORDS), 6)).astype(np.float32)
    np.save("rows.npy", rows)
    data: Values = {"vocabulary": "words.txt", "buckets": None}
    config = load_config(configuration(data=data, model={"pretrained": "rows.npy", "scale": 0.5, "dim": None}))
    model = make_model(config, load_data(config).training)
    assert isinstance(model, TextBag)
    table = model.table.weight.detach().numpy()
    assert np.array_equal(table[: len(WORDS)], rows * 0.5) and not table[len(WORDS)].any()  # padding is a row more
    ids = torch.from_numpy(WordList("words.txt").encode(["good film"], 4))
    torch.testing.assert_close(model.table(ids)[0], 0.5 * torch.from_numpy(rows[[5, 7]]).mean(0))


@pytest.mark.models
def test_a_safetensors_file_may_have_several_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"rows": torch.ones(len(WORDS), 4), "other": torch.ones(3)}, "rows.safetensors")
    data: Values = {"vocabulary": "words.txt", "buckets": None}
    path = configuration(data=data, model={"pretrained": "rows.safetensors", "dim": None})
    assert "model.tensor, one of" in refused(capsys, path)
    assert "no tensor 'none'" in refused(capsys, path, "--set", "model.tensor=none")
    assert "expected rows of numbers" in refused(capsys, path, "--set", "model.tensor=other")
    assert "not 8" in refused(capsys, path, "--set", "model.tensor=rows", "--set", "model.dim=8")
    config = load_config(path, ["model.tensor=rows"])
    assert make_model(config, load_data(config).training).table.weight.shape == (len(WORDS) + 1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"text": "text"}}, "lacks the columns text; it has sentence, label"),
        ({"data": {"paths": "no.tsv"}}, "no.tsv: no such file"),
        ({"data": {"paths": "$SPARSEDP_DATA/a.tsv"}}, "no environment variable SPARSEDP_DATA"),
        pytest.param({"data": {"tokenizer": "nowhere", "buckets": None}}, "data.tokenizer", marks=pytest.mark.models),
        ({"data": {"tokenizer": "nowhere"}}, "give one of tokenizer, vocabulary and buckets"),
        ({"data": {"special_tokens": True}}, "name its folder, data.tokenizer"),
        ({"data": {"classes": ["good", "bad"]}}, "is no class; expected good, bad"),
        ({"data": {"classes": 1}}, "data.classes"),
        ({"data": {"second": "sentence"}}, "named twice"),
        ({"model": {"pair": "towers"}}, "towers are for two texts"),
        ({"model": {"scale": 0.1}}, "model.pretrained: missing"),
        ({"model": {"pretrained": "no.npy"}}, "cannot be read"),
        ({"loss": "binary_cross_entropy"}, "expected cross_entropy"),
        (
            {"model": {"kind": "pctr", "dim": None}},
            "pctr is about clicks, and the rest of the configuration about texts",
        ),
        ({"model": {"kind": "encoder", "path": "x", "dim": None}}, "data.special_tokens: give true"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, configuration(**changes)) if "is no class" not in message else ""
    if not error:  # which rows are wrong stands in lines of their own
        assert main(["train", str(configuration(**changes)), "--quiet"]) == 2
        error = capsys.readouterr().err
        assert "train.tsv, line 2: the label" in error
    assert message in error


def test_rows_that_do_not_belong_to_the_vocabulary_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    data: Values = {"vocabulary": "words.txt", "buckets": None}
    path = configuration(data=data, model={"pretrained": "rows.npy", "dim": None})
    np.save("rows.npy", np.ones((5, 4), np.float32))
    assert "has 5 rows, and the vocabulary 32" in refused(capsys, path)
    np.save("rows.npy", np.full((40, 4), np.nan, np.float32))
    assert "not finite" in refused(capsys, path)
    np.save("rows.npy", np.ones((40, 4), np.int64))
    assert "expected rows of numbers" in refused(capsys, path)


def test_classes_are_the_loss_of_texts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cross_entropy is the loss of classes" in refused(capsys, "demo", "--set", "loss=cross_entropy")


def test_sst2_says_where_its_data_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no environment variable SPARSEDP_DATA. Set it, or name the file: --set data.paths=FILE" in refused(
        capsys, "sst2"
    )


def test_sst2_trains_where_the_data_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path))
    (tmp_path / "sst2").mkdir()
    for name in ("train", "dev"):
        write_reviews(tmp_path / "sst2" / f"{name}.tsv.gz", 300)
    changes = ["training.epochs=1", "training.batch_size=30", "training.check=false", "privacy.target_delta=1e-4"]
    result = result_of(Path("sst2"), *(part for change in changes for part in ("--set", change)))
    assert result["accuracy"] > 0.95 and result["epsilon"] <= 3


def test_fest_chooses_by_public_counts() -> None:
    counts = np.zeros(len(WORDS) + 1)
    counts[rows := [WORDS.index("good"), WORDS.index("bad")]] = 1.0
    np.savez("counts.npz", **{"table.weight": counts, "units": 1.0})
    data: Values = {"vocabulary": "words.txt", "buckets": None}
    privacy: Values = {"mechanism": {"name": "fest", "k": 2, "counts": "public"}, "counts": "counts.npz"}
    path = configuration(data=data, privacy=privacy)
    config = load_config(path)
    start = make_model(config, load_data(config).training).table.weight.detach().clone()
    result = result_of(path)
    assert result["gradient_size"] == 2 * 8 and result["accuracy"] > 0.9
    end = torch.load("run/release/model.pt", weights_only=True)["table.weight"]
    moved = (end != start).any(1).nonzero().flatten().tolist()
    assert moved == sorted(rows)
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert "The counts that rows were selected by are public." in statement["assumptions"]


def test_public_counts_are_for_those_who_look_at_them(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("counts.npz", **{"table.weight": np.ones(200), "units": 1.0})
    assert "privacy.counts" in refused(capsys, configuration(privacy={"counts": "counts.npz"}))
    nested: Values = {"name": "adafest", "threshold": 1.0, "preselect": {"name": "fest", "k": 5, "counts": "public"}}
    assert "privacy.counts" in refused(capsys, configuration(privacy={"mechanism": nested}))
    path = configuration(privacy={"mechanism": nested, "counts": "counts.npz"}, training={"epochs": 1})
    assert result_of(path)["gradient_size"] <= 5 * 8
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert "The counts that rows were selected by are public." in statement["assumptions"]


def test_users_are_the_unit() -> None:
    path = configuration(data={"user": "other"}, privacy={"unit": "user"}, training={"batch_size": 10, "epochs": 1})
    for name, rows in (("train.tsv", 400), ("dev.tsv", 100)):
        reviews = [line.split("\t") for line in write_reviews(Path(name), rows).read_text().splitlines()[1:]]
        lines = [f"{text}\tu{i % 100}\t{label}" for i, (text, label) in enumerate(reviews)]
        Path(name).write_text("\n".join(["sentence\tother\tlabel", *lines]) + "\n")
    result = result_of(path)
    assert result["steps"] == 10  # 100 users in batches of 10
    assert json.loads(Path("run/release/statement.json").read_text())["unit"] == "user"


# ------------------------------------------------------------------ encoders


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return write_tokenizer(tmp_path / "bert")


def encoder(model: Values, **sections: Values) -> Path:
    data: Values = {"tokenizer": "bert", "buckets": None, "special_tokens": True}
    return configuration(
        data=data,
        model={"kind": "encoder", "path": "bert", "dim": None, "dropout": 0.0, **model},
        optimizer={"name": "Adagrad", "lr": 0.05},
        training={"epochs": 1, "max_physical_batch": 20, **sections.pop("training", {})},
        **sections,
    )


def trained_names(path: Path) -> set[str]:
    config = load_config(path)
    model = make_model(config, load_data(config).training)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.models
@pytest.mark.parametrize("embeddings", ["train", "freeze", "lora"])
def test_an_encoder_trains_what_it_says(embeddings: str, bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = encoder({"lora": {"rank": 2}, "embeddings": embeddings})
    names = trained_names(path)
    words = {name for name in names if "word_embeddings" in name}
    adapters = {name for name in names if "lora" in name} - words
    assert adapters and all("query" in name or "value" in name for name in adapters)
    assert any("classifier" in name for name in names) and not any("position" in name for name in names)
    if embeddings == "lora":
        assert words and all("lora_embedding" in name for name in words)
    else:
        assert len(words) == (embeddings == "train")
    config = load_config(path)
    start = {name: value.clone() for name, value in make_model(config, load_data(config).training).state_dict().items()}
    result = result_of(path, "--set", "training.check=true")
    end = torch.load("run/release/model.pt", weights_only=True)
    assert {
        name for name in end if not torch.equal(end[name], start[name])
    } == names  # all that is trained, and nothing else
    table, adapter = len(WORDS) * 16, (len(WORDS) + 16) * 2
    sizes = {"train": (table, table, 0), "freeze": (0, 0, 0), "lora": (table, adapter, adapter)}[embeddings]
    assert tuple(result[key] for key in ("dense_gradient_size", "gradient_size", "adapter_gradient_size")) == sizes
    reduction = {"train": 1.0, "freeze": None, "lora": pytest.approx(table / adapter)}[
        embeddings
    ]  # (V d) / ((V + d) r)
    assert result["reduction"] == reduction and (result["kept_mass"] is None) == (embeddings != "train")
    steps = [
        line
        for line in map(json.loads, Path("run/private/metrics.jsonl").read_text().splitlines())
        if line["kind"] == "step"
    ]
    assert steps and all((step["gradient_size"], step["reduction"]) == (sizes[1], reduction) for step in steps)


@pytest.mark.models
def test_an_encoder_under_adafest_learns(bert: Path) -> None:
    path = encoder(
        {"lora": {"rank": 2}},
        training={"epochs": 6},
        privacy={"mechanism": {"name": "adafest", "threshold": 1.0}, "noise_multiplier": 0.1},
    )
    result = result_of(path, "--set", "optimizer.lr=0.2")
    assert result["accuracy"] > 0.8 and result["gradient_size"] < len(WORDS) * 16


@pytest.mark.models
def test_an_encoder_without_adapters_is_trained_in_full(bert: Path) -> None:
    names = trained_names(encoder({"embeddings": "freeze"}))
    assert any("position_embeddings" in name for name in names) and not any("word_embeddings" in name for name in names)
    assert any("word_embeddings" in name for name in trained_names(encoder({})))


@pytest.mark.models
def test_padding_changes_nothing(bert: Path) -> None:
    config = load_config(encoder({"lora": {"rank": 2}}))
    model = make_model(config, load_data(config).training).eval()
    tokens = config.data.make_tokens()  # type: ignore[union-attr]
    short, long = (tokens.encode_joined(["a good film"], None, length) for length in (5, 12))
    with torch.no_grad():
        one, other = (model(*map(torch.from_numpy, parts)) for parts in (short, long))
    torch.testing.assert_close(one, other)


@pytest.mark.models
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"path": "nowhere"}, "there is no such folder"),
        ({"lora": {"targets": ["no_such_map"]}}, "model.lora.targets"),
        ({"embeddings": "lora"}, "model.lora: missing"),
        (
            {"embeddings": "lora", "lora": {"rank": 2}, "freeze_tables": True},
            "model.freeze_tables: embeddings: lora trains an adapter beside the table, which is frozen already",
        ),
    ],
)
def test_encoders_that_cannot_be_made(
    model: Values, message: str, bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, encoder(model))


@pytest.mark.models
def test_a_tokenizer_of_another_model_is_refused(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(bert, [*WORDS, "more"])
    assert "word embeddings, and the tokenizer" in refused(capsys, encoder({}))
    write_tokenizer(bert, ["[UNK]", "[CLS]", "[SEP]", "good"])
    (bert / "tokenizer_config.json").unlink()
    assert "no token for padding" in refused(capsys, encoder({}))
