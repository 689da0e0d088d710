"""Configurations: what is unknown, of a wrong type or impossible is refused by the full path of its key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sparsedp.cli.config.config import differences
from sparsedp.cli.config.datasets import ClickLogData, FileVocabulary, GeneratedData, OwnData
from sparsedp.cli.config.load import bundled_names, dump_config, explain_config, load_config
from sparsedp.cli.config.schema import all_paths
from sparsedp.errors import ConfigError
from sparsedp.mechanisms import FEST

MINIMAL = """
data: {kind: generated, rows: 1000}
model: {kind: pctr}
optimizer: {name: SGD, lr: 0.1}
training: {epochs: 1, batch_size: 100}
privacy: {noise_multiplier: 1, max_grad_norm: 1}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.name == "mine"
    assert isinstance(config.data, GeneratedData) and config.data.held_out == 0.1
    assert config.loss == "binary_cross_entropy"
    assert config.optimizer.scheduler.kind == "none"
    assert config.training.seed is None and config.training.checkpoint_every == 1000
    assert config.privacy.mechanism == {"name": "dpsgd"}
    assert config.privacy.max_grad_norm == 1.0 and isinstance(config.privacy.max_grad_norm, float)


@pytest.mark.parametrize("name", ["demo", "dlrm", "own_model"])
def test_bundled_configurations_load_and_survive_being_written(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config))
    assert load_config(written) == config


def test_criteo_needs_paths_and_makes_them_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"criteo.yaml: data.paths: missing; expected text or a list"):
        load_config("criteo")
    data = load_config("criteo", ["data.paths=[day_0.gz, /elsewhere/day_1.gz]"]).data
    assert isinstance(data, ClickLogData)
    assert data.paths == [str(tmp_path / "day_0.gz"), "/elsewhere/day_1.gz"]
    assert data.cache_dir == str(tmp_path / "runs/cache")
    given = ["data.paths=day_*.gz", "data.vocabulary={kind: given, path: words.json}"]
    data = load_config("criteo", given).data
    assert isinstance(data, ClickLogData) and isinstance(data.vocabulary, FileVocabulary)
    assert (data.paths, data.vocabulary.path) == (str(tmp_path / "day_*.gz"), str(tmp_path / "words.json"))


def test_the_demo_explains_every_key_that_it_can_have() -> None:
    configs = Path(__file__).parents[2] / "src/sparsedp/cli/configs"
    values = yaml.safe_load((configs / "demo.yaml").read_text())
    assert values["stream"] is None
    lines = (configs / "demo.yaml").read_text().splitlines()
    on_one_line = {  # sections that are null, whose keys stand behind them
        "optimizer.tables.": next(line for line in lines if "  tables: null" in line),
        "training.early_stopping.": next(line for line in lines if "  early_stopping: null" in line),
    }
    values["stream"] = yaml.safe_load((configs / "stream.yaml").read_text())["stream"]  # which explains these keys
    of_sequences = {  # which sequences.yaml and movielens.yaml explain
        "data": {"items", "length", "groups", "structure", "mean_length", "exclude_seen",
                 "path", "format", "user", "item", "time", "min_actions", "until_stable"},
        "model": {"blocks", "heads", "dropout", "tied", "frequencies"},
        "privacy": {"frequencies"},
    }  # fmt: skip
    of_timelines = {  # which dual.yaml and dual-movielens.yaml explain
        "data": {"context", "test_labels", "split_seed", "titles"},
        "model": {"context", "features", "buckets"},
    }
    of_dlrm = {"bottom", "top"}  # which dlrm.yaml explains
    of_texts = {section: yaml.safe_load((configs / "sst2.yaml").read_text())[section] for section in ("data", "model")}
    of_encoders = yaml.safe_load((configs / "sst2-encoder.yaml").read_text())["model"]
    of_tables = yaml.safe_load((configs / "table.yaml").read_text())["data"]
    for path in all_paths(type(load_config("demo"))):
        section, _, key = path.partition(".")
        of_others = {
            "data": {
                "paths",
                "cache_dir",
                "vocabulary",
                "max_malformed",
                "user_column",
                "options",
                *of_sequences["data"],
                *of_timelines["data"],
                *of_tables,
                *of_texts["data"],
            },
            "model": {
                "options",
                *of_sequences["model"],
                *of_timelines["model"],
                *of_dlrm,
                *of_texts["model"],
                *of_encoders,
            },
            "privacy": of_sequences["privacy"],
        }
        if (within := next((start for start in on_one_line if path.startswith(start)), None)) is not None:
            assert f"{path.removeprefix(within)}: " in on_one_line[within], path
            continue
        if key.partition(".")[0] not in of_others.get(section, set()):
            found = values
            for part in path.split("."):
                assert part in found, path
                found = found[part]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainig.epochs=2", r"--set trainig.epochs: trainig: unknown key; .*Did you mean 'training'\?"),
        ("training.epoch=2", r"training.epoch: unknown key; .*Did you mean 'epochs'\?"),
        ("epochs=2", r"epochs: unknown key.* There is training.epochs"),
        ("privacy.lr=2", r"privacy.lr: unknown key.* There is optimizer.lr"),
        ("data.paths=x", r"data.paths: unknown key; expected one of kind, rows, seed"),
        ("training.epochs=two", r"training.epochs: expected a whole number of at least 1; got 'two'"),
        ("training.epochs=1.5", r"training.epochs: expected a whole number of at least 1; got 1.5"),
        ("training.epochs=true", r"training.epochs: expected a whole number of at least 1; got True"),
        ("training.epochs=null", r"training.epochs: expected a whole number of at least 1; got None"),
        ("training.check=1", r"training.check: expected true or false; got 1"),
        ("training.workers=-1", r"training.workers: expected a whole number of at least 0; got -1"),
        ("privacy.max_grad_norm=0", r"privacy.max_grad_norm: expected a number above 0; got 0"),
        ("privacy.max_grad_norm=.inf", r"privacy.max_grad_norm: expected a number above 0; got inf"),
        (
            "privacy.target_delta=1",
            r"privacy.target_delta: expected a number above 0 and below 1 or null; got 1",
        ),
        ("privacy.clipping=flta", r"privacy.clipping: expected flat or automatic.*Did you mean 'flat'\?"),
        (
            "privacy.target_epsilon=1",
            r"privacy.target_epsilon: give exactly one of target_epsilon and noise_mult",
        ),
        ("privacy.noise_multiplier=null", r"privacy.target_epsilon: give exactly one of"),
        ("privacy.mechanism.name=dpsdg", r"privacy.mechanism: Unknown mechanism 'dpsdg'; known are"),
        ("privacy.mechanism={name: dpsgd, k: 3}", r"privacy.mechanism: Mechanism 'dpsgd' has no setting 'k'"),
        ("privacy.mechanism=dpsdg", r"privacy.mechanism: Unknown mechanism 'dpsdg'; .*Did you mean 'dpsgd'\?"),
        ("privacy.mechanism=AdaFEST", r"privacy.mechanism: Unknown mechanism 'AdaFEST'; .*Did you mean 'adafest'\?"),
        (
            "privacy.mechanism={name: adafest, treshold: 3}",
            r"privacy.mechanism: Mechanism 'adafest' has no setting 'treshold'; .*Did you mean 'threshold'\?",
        ),
        (
            "privacy.mechanism={name: adafest, preselect: {name: fest, eps: 3}}",
            r"privacy.mechanism: Mechanism 'fest' has no setting 'eps'; its settings are count_clip",
        ),
        ("privacy.mechanism=5", r"privacy.mechanism: expected a mapping; got 5"),
        (
            "data.kind=generatd",
            r"data.kind: expected generated or table or clicklog or generated_sequences or sequences or generated_timelines or timelines or text or 'package.module:name'.*'generated'\?",
        ),
        (
            "data.kind=my module:f",
            r"data.kind: expected generated or table or clicklog or generated_sequences or sequences or generated_timelines or timelines or text or 'package.module:name'",
        ),
        (
            "data={kind: table, paths: a.csv, label: y, positive: [yes]}",
            r"data.positive\[0\]: expected text; got True, which yes and no, on and off are without quotes$",
        ),
        ("data=none", r"data: expected a mapping with the key kind; got 'none'"),
        ("data={rows: 3}", r"data.kind: missing; expected generated or table or clicklog"),
        ("data.held_out=1", r"data.held_out: expected a number of at least 0 and below 1 or a list"),
        ("data.held_out=[1, x]", r"data.held_out\[1\]: expected a whole number; got 'x'"),
        ("model.hidden=0", r"model.hidden: expected a whole number of at least 1; got 0"),
        (
            "loss=mse",
            r"loss: expected binary_cross_entropy or cross_entropy or softmax or sampled_softmax or binary_candidates or 'package.module:name'; got 'mse'",
        ),
        (
            "optimizer.name=Adm",
            r"optimizer.name: expected an optimizer of torch.optim.*Did you mean 'Adam'\?",
        ),
        ("optimizer.name=Optimizer", r"optimizer.name: expected an optimizer of torch.optim"),
        ("optimizer.options.lr=1", r"optimizer.options.lr: give the learning rate as optimizer.lr"),
        ("optimizer.tables={name: SGD}", r"optimizer.tables.lr: missing"),
        (
            "optimizer.tables={name: Adagrd, lr: 1}",
            r"optimizer.tables.name: expected an optimizer.*Did you mean 'Adagrad'\?",
        ),
        ("optimizer.tables={nane: SGD, lr: 1}", r"optimizer.tables.nane: unknown key.*Did you mean 'name'\?"),
        ("optimizer.table={name: SGD, lr: 1}", r"optimizer.table: unknown key.*Did you mean 'tables'\?"),
        (
            "optimizer.tables={name: SGD, lr: 1, options: {lr: 2}}",
            r"tables.options.lr: give the learning rate as optimizer.tables.lr",
        ),
        (
            "optimizer={name: Adam, lr: 1, table_lr: 2, tables: {name: SGD, lr: 1}}",
            r"optimizer.table_lr: the tables have an optimizer",
        ),
        ("optimizer.scheduler.kind=cos", r"optimizer.scheduler.kind: expected none or linear or cosine"),
        ("optimizer.scheduler.final=0.5", r"optimizer.scheduler.final: a learning rate that does not decay"),
        ("name=a/b", r"name: names the run's folder"),
        ("training.epochs", r"--set training.epochs: expected KEY=VALUE"),
        ("=2", r"--set =2: expected KEY=VALUE"),
        ("training.epochs.x=2", r"--set training.epochs.x: training.epochs is 1, which has no keys"),
        ("training.epochs={", r"--set training.epochs is not valid YAML"),
    ],
)
def test_refusals(minimal: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(minimal, [change])


def test_a_refusal_names_the_file_or_the_command_line(minimal: Path) -> None:
    minimal.write_text(MINIMAL.replace("rows: 1000", "rows: many"))
    with pytest.raises(ConfigError, match=r"^mine.yaml: data.rows: expected a whole number of at least 1; got 'many'"):
        load_config(minimal)
    minimal.write_text(MINIMAL.replace("lr: 0.1", ""))
    with pytest.raises(ConfigError, match=r"^mine.yaml: optimizer.lr: missing; expected a number above 0"):
        load_config(minimal)
    with pytest.raises(ConfigError, match=r"^--set optimizer.lr: expected a number"):  # the key, once
        load_config(minimal, ["optimizer.lr=fast"])
    with pytest.raises(ConfigError, match=r"^--set data.row: unknown key; .*Did you mean 'rows'\?"):
        load_config(minimal, ["data.row=5"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {kind: generated, kind: clicklog}", "the key 'kind' stands here twice"),
        ("data: [", "not valid YAML"),
        ("just text", "expected a mapping with the sections data, model"),
        ("", "expected a mapping with the sections"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"demoo is neither a file nor a bundled .*Did you mean 'demo'\?"):
        load_config("demoo")
    with pytest.raises(ConfigError, match="neither a file"):
        load_config(tmp_path)
    assert {"demo", "criteo", "own_model"} <= set(bundled_names())


def test_values_of_set(minimal: Path) -> None:
    changes = [
        "privacy.target_delta=1e-5",  # text, to YAML 1.1
        "data.rows=1e6",
        "data.held_out=[3, 4]",
        "optimizer.options.momentum=0.9",
        "optimizer.scheduler.kind=cosine",
        "training.seed=7",
        "training.epochs=2",
        "training.epochs=3",  # the last one counts
    ]
    config = load_config(minimal, changes)
    assert config.privacy.target_delta == 1e-5
    assert isinstance(config.data, GeneratedData)
    assert config.data.rows == 1_000_000 and isinstance(config.data.rows, int)
    assert config.data.held_out == [3, 4]
    assert config.optimizer.options == {"momentum": 0.9}
    assert config.optimizer.scheduler.kind == "cosine"
    assert (config.training.seed, config.training.epochs) == (7, 3)
    own = load_config(minimal, ["data={kind: 'my.package:make', options: {n: 3}}"])
    assert own.data == OwnData("my.package:make", {"n": 3})  # type: ignore[arg-type]


def test_a_mechanism_by_its_bare_name(minimal: Path) -> None:
    """On the command line and in a file, and settings can still join it."""
    assert load_config(minimal, ["privacy.mechanism=adafest"]).privacy.mechanism == {"name": "adafest"}
    joined = ["privacy.mechanism=adafest", "privacy.mechanism.threshold=3"]
    assert load_config(minimal, joined).privacy.mechanism == {"name": "adafest", "threshold": 3}
    minimal.write_text(MINIMAL.replace("max_grad_norm: 1", "max_grad_norm: 1, mechanism: fest"))
    assert load_config(minimal).privacy.mechanism == {"name": "fest"}
    assert load_config(minimal, ["privacy.mechanism.k=7"]).privacy.make_mechanism() == FEST(k=7)


def test_a_threshold_of_bundled_configurations_is_found_unless_it_is_that_of_the_demo() -> None:
    """Which has to run in several processes, too, where data are not looked at."""
    mechanisms = {name: load_config(name).privacy.mechanism for name in ("demo", "dlrm", "own_model")}
    assert mechanisms["demo"]["threshold"] == 10.0
    assert mechanisms["dlrm"] | {"threshold": "auto", "look_at": "data"} == mechanisms["dlrm"]


@pytest.mark.parametrize("name", ["demo", "own_model", "stream"])
def test_an_explained_configuration_is_the_same_configuration(name: str, tmp_path: Path) -> None:
    config = load_config(name, ["training.epochs=2"])
    text = explain_config(config)
    written = tmp_path / "config.yaml"
    written.write_text(text)
    assert load_config(written) == config
    assert "  max_physical_batch: null  # larger batches reach the model in parts, to save memory" in text.splitlines()
    assert "  epochs: 2" in text.splitlines()  # what one bundled file says of its own value is not said of others
    explained = [line for line in text.splitlines() if "  # " in line]
    assert len(explained) > 25


def test_differences(minimal: Path) -> None:
    old = load_config(minimal)
    new = load_config(minimal, ["training.epochs=2", "optimizer.options.momentum=0.9"])
    assert differences(old, new) == ["optimizer.options", "training.epochs"]
    assert differences(old, old) == []
    other = load_config(minimal, ["data={kind: 'a:b'}"])
    assert differences(old, other) == ["data"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{site: 0}", "data.categorical.site: expected"),
        ("{site: false}", "data.categorical.site: expected"),
        ("{site: ''}", "data.categorical.site: expected"),
        ("{site: []}", "data.categorical.site: expected"),
        ("[site, device, site]", "data.categorical: the column 'site' is named twice"),
    ],
)
def test_what_is_said_of_a_column_is_a_mapping_or_nothing(columns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("table", ["data.paths=x.csv", "data.label=y", f"data.categorical={columns}"])
    load_config("table", ["data.paths=x.csv", "data.label=y", "data.categorical={site: null, device: {}}"])
