"""The command line on sequences: models, losses, rankings beside their baselines, resuming, plans, sweeps, and errors."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparsedp.cli.config.datasets import GeneratedSequencesData, SequencesData
from sparsedp.cli.config.load import dump_config, load_config
from sparsedp.cli.config.models import RecurrentModel, TransformerModel
from sparsedp.cli.config.sections import SchedulerConfig
from sparsedp.cli.evaluation import rank
from sparsedp.cli.main import main
from sparsedp.cli.prepare import load_data, make_model, with_collate
from sparsedp.cli.run import run_training
from sparsedp.data.sequencefiles import FORMATS
from sparsedp.errors import ConfigError

TINY = """
data: {kind: generated_sequences, users: 300, items: 60, length: 8, groups: 6, mean_length: 8}
model: {kind: transformer, dim: 8, blocks: 1, dropout: 0.1}
loss: softmax
optimizer: {name: Adam, lr: 0.01}
training: {epochs: 2, batch_size: 50, log_every: 1, evaluate_every_epochs: 1, threads: 1}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1, unit: user}
"""
STEPS = 12  # 300 users in batches of 50, twice
CONFIGS = Path(__file__).parents[2] / "src/sparsedp/cli/configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "tiny.yaml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(run: str, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(run, "private/metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


# ------------------------------------------------------------------ runs


def test_a_run_is_ranked_beside_its_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "run"]) == 0
    out = capsys.readouterr().out
    result = json.loads(Path("run/private/result.json").read_text())
    assert result["steps"] == STEPS
    for name in ("ndcg@10", "hit@10"):
        assert 0 <= result[name] <= 1 and 0 < result[f"popularity_{name}"] < result[f"planted_{name}"] < 1
    assert [row["step"] for row in rows("run", "evaluation")] == [6, 12]
    assert rows("run", "evaluation")[-1]["ndcg@10"] == result["ndcg@10"]
    assert "NDCG@10, held out" in out and "for the most popular items" in out and "Checked" in out
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert "vocabulary, which was counted" not in json.dumps(statement)
    assert "one user" in json.dumps(statement)


@pytest.mark.parametrize("kind", ["dpformer", "transformer", "gru", "lstm"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_model_trains_and_its_gradients_are_checked(kind: str, tied: bool) -> None:
    settings = ["training.epochs=1", "training.batch_size=150", f"model={{kind: {kind}, dim: 8, tied: {tied}}}"]
    result = run_training(load_config("tiny.yaml", settings), Path("run"))
    assert result.finished and 0 <= result.metrics["ndcg@10"] <= 1
    names = torch.load("run/release/model.pt", weights_only=True).keys()
    assert ("output_table.weight" in names) == (not tied)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["softmax", "sampled_softmax", "binary_candidates"])
def test_every_loss_trains_and_its_units_are_apart(loss: str, reduction: str) -> None:
    settings = [f"loss={loss}", "training.epochs=1", f"privacy.loss_reduction={reduction}", "training.batch_size=150"]
    if loss != "softmax":
        settings += ["training.negatives=5", "training.max_physical_batch=64"]
    result = run_training(load_config("tiny.yaml", settings), Path("run"))
    assert result.finished
    losses = [row["loss"] for row in rows("run", "step")]
    assert all(0.3 < value < 12 for value in losses)  # of one unit, whatever the reduction


@pytest.mark.parametrize("shared", [False, True])
def test_negatives_are_items_and_padding_has_none(shared: bool) -> None:
    settings = ["loss=sampled_softmax", "training.negatives=7", f"training.shared_negatives={shared}"]
    config = load_config("tiny.yaml", settings)
    raw = load_data(config)
    batch = with_collate(config, raw).examples(300)
    history, target = raw.examples(300)
    assert set(batch) == {"history", "candidates"} and torch.equal(batch["history"], history)
    candidates = batch["candidates"]
    assert candidates.shape == (300, 8, 8) and torch.equal(candidates[..., 0], target)
    assert (candidates[target == 0] == 0).all()
    drawn = candidates[target > 0][:, 1:]
    assert drawn.min() == 1 and drawn.max() == 60
    first, second = candidates[0, 0, 1:], candidates[0, 1, 1:]
    assert torch.equal(first, second) == shared


def test_sampled_negatives_touch_few_rows() -> None:
    settings = ["training.epochs=1", "data.items=5000", "data.groups=20", "training.check=false"]
    full = run_training(load_config("tiny.yaml", settings), Path("full"))
    sampled = ["loss=sampled_softmax", "training.negatives=5", "training.shared_negatives=true"]
    few = run_training(load_config("tiny.yaml", [*settings, *sampled]), Path("few"))
    assert full.rows_touched >= 5000 and few.rows_touched < 1000


def test_validation_items_are_others_than_test_items() -> None:
    test = load_data(load_config("tiny.yaml"))
    validation = load_data(load_config("tiny.yaml", ["data.held_out=validation"]))
    assert test.held_out is not None and validation.held_out is not None
    history, item = validation.held_out[0]
    later, last = test.held_out[0]
    assert later[(later > 0).sum() - 1] == item
    assert test.training[0][1].count_nonzero() >= validation.training[0][1].count_nonzero()


def test_what_was_seen_can_be_left_out_of_the_ranking() -> None:
    config = load_config("tiny.yaml")
    data = load_data(config)
    model = make_model(config, data.training).eval()
    plain = rank(config, model, data.training, data.held_out)
    excluding = load_config("tiny.yaml", ["data.exclude_seen=true"])
    assert rank(excluding, model, data.training, data.held_out)["popularity_hit@10"] != plain["popularity_hit@10"]


def test_evaluation_leaves_dropout_as_it_was() -> None:
    """A run that is evaluated in between ends with the weights of one that is not."""
    for name, every in (("a", "null"), ("b", "1")):
        settings = ["training.seed=3", f"training.evaluate_every_epochs={every}"]
        run_training(load_config("tiny.yaml", settings), Path(name))
    a, b = (torch.load(f"{name}/release/model.pt", weights_only=True) for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("loss", ["softmax", "sampled_softmax"])
def test_a_resumed_run_is_the_same_run(loss: str) -> None:
    settings = [f"loss={loss}", "training.seed=3", f"training.negatives={5 if loss != 'softmax' else 'null'}"]
    config = load_config("tiny.yaml", settings)
    run_training(config, Path("whole"))
    run_training(config, Path("parts"), should_stop=lambda step: step == 5)
    result = run_training(config, Path("parts"), resume=True)
    assert result.finished
    whole, parts = (torch.load(f"{name}/release/model.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_reattention_is_told_the_noise_of_the_plan() -> None:
    config = load_config("tiny.yaml", ["model.kind=dpformer", "training.epochs=1", "privacy.noise_multiplier=2.0"])
    run_training(config, Path("run"))
    weights = torch.load("run/release/model.pt", weights_only=True)
    assert weights["weight_error"].item() == pytest.approx(2.0 / 50)
    assert weights["item_error"][0] == 0 and (weights["item_error"][1:] >= 2.0 / 50).all()


def test_a_file_of_frequencies(tmp_path: Path) -> None:
    Path("log").write_text("".join(f"u{u} {'abcde'[(u + k) % 5]}\n" for u in range(20) for k in range(5)))
    data = f"data={{kind: sequences, path: {tmp_path}/log, length: 4}}"
    changes = [data, "model.kind=dpformer", "training.batch_size=5"]
    with pytest.raises(ConfigError, match=r"model.frequencies: missing. .*model.kind=transformer"):
        run_training(load_config("tiny.yaml", changes), Path("none"))
    Path("shares.json").write_text(json.dumps({"a": 0.5, "c": 1.0, "z": 0.1}))
    config = load_config("tiny.yaml", [*changes, "model.frequencies=shares.json", "training.epochs=1"])
    run_training(config, Path("run"))
    error = torch.load("run/release/model.pt", weights_only=True)["item_error"]
    # 1 / (5 p), where 5 p counts as at least 1: items a to e have ids 1 to 5.
    assert error.tolist() == pytest.approx([0, 0.4, 1, 0.2, 1, 1])
    for text, problem in (
        ("[1]", "expected {item: share"),
        ('{"a": 2}', "expected {item"),
        ('{"y": 0.1}', "names none"),
    ):
        Path("shares.json").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            run_training(config, Path("wrong"))


def test_released_frequencies_are_paid_for_once() -> None:
    changes = ["model.kind=dpformer", "privacy.frequencies={epsilon: 1.0, clip: 4.0}"]
    config = load_config("tiny.yaml", changes)
    stopped = run_training(config, Path("run"), should_stop=lambda step: step == 4)
    assert not stopped.finished
    before = torch.load("run/private/checkpoint.pt", weights_only=True)["model"]["item_error"]
    result = run_training(config, Path("run"), resume=True)
    assert result.finished and result.statement.epsilon <= 8.0 and "frequencies" in result.statement.guarantee
    assert torch.equal(torch.load("run/release/model.pt", weights_only=True)["item_error"], before)
    assert torch.load("run/release/frequencies.pt", weights_only=True).keys() == {"item_table.weight"}
    with pytest.raises(ConfigError, match=r"privacy.frequencies: only re-attention"):
        load_config("tiny.yaml", ["privacy.frequencies={epsilon: 1.0}"])


def test_the_statement_names_a_vocabulary_from_a_file(tmp_path: Path) -> None:
    Path("log").write_text("".join(f"{u}::{(u + k) % 7}::5::{k}\n" for u in range(40) for k in range(6)))
    changes = ["data={kind: sequences, path: log, length: 4}", "training.epochs=1", "training.batch_size=10"]
    config = load_config("tiny.yaml", changes)
    assert isinstance(config.data, SequencesData) and config.data.path == str(tmp_path / "log")
    result = run_training(config, Path("run"))
    assert (
        "The vocabulary, which was counted on the private data without noise."
        in Path("run/release/statement.txt").read_text()
    )
    assert "planted_ndcg@10" not in result.metrics and result.metrics["popularity_hit@10"] == 1  # 7 items


def test_a_plan_predicts_the_rows_of_each_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.yaml", "--json", "--no-measure"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted"]["rows_touched"] >= 60 and report["steps"] == STEPS
    sampled = ["--set=loss=sampled_softmax", "--set=training.negatives=3", "--set=training.shared_negatives=true"]
    assert main(["plan", "tiny.yaml", "--json", "--set=data.items=2000", *sampled]) == 0
    report = json.loads(capsys.readouterr().out)
    touched = report["measured"]["rows_touched"]
    assert report["predicted"]["rows_touched"] == pytest.approx(touched, rel=0.15) and touched < 600


def test_a_sweep_compares_by_ndcg() -> None:
    Path("sweep.yaml").write_text(
        "base: tiny.yaml\nset: {training.check: false, training.epochs: 1}\nreference: dpsgd\nvariants: {dpsgd: {}}\n"
    )
    assert main(["sweep", "sweep.yaml", "--jobs", "1", "--run-dir", "sweep"]) == 0
    front = json.loads(Path("sweep/front.json").read_text())
    assert front["metric"] == "ndcg@10" and front["more_is_better"]
    assert "NDCG@10" in Path("sweep/report.md").read_text()


OWN = """
from sparsedp.data import generated_sequences
from sparsedp.models import RecurrentRecommender
from sparsedp.nn import sequence_loss

def data():
    split = generated_sequences(120, 40, groups=5).split(6)
    return split.training, split.test

def model(training):
    return RecurrentRecommender(training.items, training.length, dim=8)

def loss(output, target):
    return sequence_loss(output, target)
"""


@pytest.mark.parametrize("loss", ["softmax", "mine_too:loss"])
@pytest.mark.parametrize("data", [True, False])
def test_own_sequences_model_and_loss(loss: str, data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_too", raising=False)
    Path("mine_too.py").write_text(OWN)
    changes = [f"loss={loss}", "model={kind: 'mine_too:model'}", "training.epochs=1"]
    changes += ["data={kind: 'mine_too:data'}"] if data else []
    result = run_training(load_config("tiny.yaml", changes), Path("run"))
    assert 0 < result.metrics["popularity_ndcg@10"] < result.metrics["planted_ndcg@10"]


# ------------------------------------------------------------------ configurations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["loss=binary_cross_entropy"], r"loss: expected softmax, .* for sequences; got binary_cross_entropy"),
        (["model={kind: pctr}"], r"model.kind: pctr is about clicks"),
        (["data={kind: generated, rows: 10}"], r"data.kind: generated is about clicks"),
        (["loss=sampled_softmax"], r"training.negatives: missing; .*sampled_softmax"),
        (["training.negatives=3"], r"the loss softmax draws none; sampled_softmax and binary_candidates do"),
        (["training.shared_negatives=true"], r"there are no negatives to share"),
        (["loss=sampled_softmax", "training.negatives=3", "training.workers=1"], r"training.workers: .*give 0"),
        (["training.evaluate_every=3"], r"training.evaluate_every_epochs: give it or evaluate_every"),
        (["model.heads=3"], r"model.heads: expected a divisor of model.dim, 8; got 3"),
        (["model.frequencies=x.json"], r"model.frequencies: re-attention alone looks at them"),
        (["model={kind: gru, blocks: 2}"], r"model.blocks: unknown key"),
        (["data.held_out=0.1"], r"data.held_out: expected test or validation; got 0.1"),
        (["data={kind: sequences, path: a, format: csvv}"], r"data.format: .*Did you mean 'csv'\?"),
        (["data={kind: sequences, path: $NOWHERE/a}"], r"data.path: .*no environment variable NOWHERE. Set it, or .*--set data.path"),
        (["optimizer.scheduler={warmup: 3, warmup_share: 0.1}"], r"warmup_share: give it or warmup, not both"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny.yaml", changes)


def test_a_data_set_without_sequences_is_refused() -> None:
    Path("own_clicks.py").write_text(
        "import torch\ndef data():\n    return torch.utils.data.TensorDataset(torch.zeros(50, 3), torch.zeros(50))\n"
    )
    with pytest.raises(ConfigError, match="softmax is for sequences; this data set has no attribute items"):
        run_training(load_config("tiny.yaml", ["data={kind: 'own_clicks:data'}"]))


def test_warm_up_as_a_share_of_all_steps() -> None:
    by_share = SchedulerConfig("linear", warmup_share=0.2).shares(100)
    by_steps = SchedulerConfig("linear", warmup=20).shares(100)
    assert [by_share(step) for step in range(101)] == [by_steps(step) for step in range(101)]
    assert by_share(0) < by_share(19) < by_share(20) == 1 > by_share(21)


@pytest.mark.parametrize("name", ["sequences", "movielens"])
def test_bundled_configurations_survive_being_written(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path))
    config = load_config(name)
    Path("written.yaml").write_text(dump_config(config))
    assert load_config("written.yaml") == config
    if isinstance(config.data, SequencesData):
        assert config.data.path == str(tmp_path / "ml-1m/ratings.csv.gz")
        monkeypatch.delenv("SPARSEDP_DATA")
        with pytest.raises(ConfigError, match=r"movielens.yaml: data.path: .*no environment variable SPARSEDP_DATA"):
            load_config(name)
        assert load_config(name, ["data.path=ratings.dat"]).data.path == str(tmp_path / "ratings.dat")  # type: ignore[union-attr]


def test_the_bundled_configurations_explain_every_key() -> None:
    texts = [(CONFIGS / f"{name}.yaml").read_text() for name in ("sequences", "movielens")]
    for section, kinds in {
        "data": (GeneratedSequencesData, SequencesData),
        "model": (TransformerModel, RecurrentModel),
    }.items():
        for name in {field.name for kind in kinds for field in dataclasses.fields(kind)}:
            assert any(name in yaml.safe_load(text)[section] for text in texts), f"{section}.{name}"
    assert all(f"{name}:" in texts[1] for name in FORMATS)


def test_the_formats_of_the_configuration_are_those_of_the_reader() -> None:
    for name in FORMATS:
        load_config("tiny.yaml", [f"data={{kind: sequences, path: a, format: {name}}}"])
    with pytest.raises(ConfigError, match=re.escape("expected auto or")):
        load_config("tiny.yaml", ["data={kind: sequences, path: a, format: x}"])


# ------------------------------------------------------------------ what training is worth


@pytest.mark.slow
def test_training_beats_popularity_and_a_frozen_table_does_not() -> None:
    changes = ["training.evaluate_every_epochs=null", "training.check=false", "training.seed=0"]
    trained = run_training(load_config("sequences", changes), Path("trained")).metrics
    frozen = run_training(load_config("sequences", [*changes, "model.freeze_tables=true"]), Path("frozen")).metrics
    assert trained["ndcg@10"] > 1.7 * trained["popularity_ndcg@10"]
    assert trained["ndcg@10"] > 1.5 * frozen["ndcg@10"]
    assert trained["ndcg@10"] < 1.05 * trained["planted_ndcg@10"]


@pytest.mark.slow
def test_the_bundled_movielens_configuration() -> None:
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not Path(folder, "ml-1m/ratings.csv.gz").is_file():
        pytest.skip("set SPARSEDP_DATA to a folder that holds ml-1m/ratings.csv.gz")
    changes = ["training.epochs=1", "data.length=10", "training.batch_size=200", "training.threads=1", "model.dim=16"]
    result = run_training(load_config("movielens", changes), Path("run"))
    assert result.finished and result.planned_steps == 31  # 6040 users
    assert result.metrics["popularity_ndcg@10"] == pytest.approx(0.01834, abs=1e-4)  # of each user's last 11 films
