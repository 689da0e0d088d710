"""The command line on timelines with a dual encoder: runs, labels on the fly, resuming, titles, noise on the mean, errors."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sparsedp.cli.config.datasets import GeneratedTimelinesData, TimelinesData
from sparsedp.cli.config.load import dump_config, load_config
from sparsedp.cli.config.models import DualModel
from sparsedp.cli.config.sweepfile import expand, load_sweep
from sparsedp.cli.evaluation import evaluate
from sparsedp.cli.main import main
from sparsedp.cli.prepare import forward, load_data, make_model, prepare, with_collate
from sparsedp.cli.run import run_training
from sparsedp.errors import ConfigError

TINY = """
data: {kind: generated_timelines, users: 400, items: 60, groups: 6, mean_length: 15, context: 8}
model: {kind: dual, dim: 8, hidden: [8]}
loss: softmax
optimizer: {name: SGD, lr: 0.1}
training: {epochs: 2, batch_size: 50, log_every: 1, evaluate_every_epochs: 1, threads: 1, check: false}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1, unit: user}
"""
STEPS = 14  # 310 of the 400 users are for training, in batches of 50, twice
CONFIGS = Path(__file__).parents[2] / "src/sparsedp/cli/configs"
SAMPLED = ["loss=sampled_softmax", "training.negatives=5"]
TITLES = "model={kind: dual, dim: 8, hidden: [8], context: transformer, heads: 2, features: [items, unigrams, bigrams], buckets: 50}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights(run: str) -> dict[str, torch.Tensor]:
    return torch.load(f"{run}/release/model.pt", weights_only=True)


# ------------------------------------------------------------------ runs


def test_a_run_reports_precision_and_recall(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "run", "--set", "training.check=true"]) == 0
    out = capsys.readouterr().out
    result = json.loads(Path("run/private/result.json").read_text())
    for k in (1, 5, 10, 20):
        assert result[f"precision@{k}"] == pytest.approx(result[f"recall@{k}"] / k)
        assert result[f"popularity_recall@{k}"] > 0 and result[f"planted_recall@{k}"] > 0
    assert result["planted_recall@10"] > result["popularity_recall@10"]
    assert "precision@20, held out" in out and "Checked" in out
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert statement["unit"] == "user" and any("A user is one timeline" in text for text in statement["assumptions"])
    assert main(["evaluate", "run", "--json"]) == 0  # the same test labels as in the run
    again = json.loads(capsys.readouterr().out)
    assert all(again[f"recall@{k}"] == result[f"recall@{k}"] for k in (1, 5, 10, 20))
    assert main(["export", "run", "--to", "out"]) == 0 and Path("out/model.pt").is_file()


@pytest.mark.parametrize(
    "changes", [[], SAMPLED, [TITLES], [TITLES, *SAMPLED]], ids=["softmax", "sampled", "titles", "both"]
)
def test_units_are_apart(changes: list[str]) -> None:
    """`sparsedp.check` runs before training, on what the model really gets."""
    result = run_training(load_config("tiny.yaml", [*changes, "training.check=true", "training.epochs=1"]), Path("run"))
    assert result.finished and "sparsedp.check found it so" in Path("run/release/statement.txt").read_text()


def test_a_batch_has_one_label_of_each_timeline_drawn_anew() -> None:
    config = load_config("tiny.yaml", ["training.seed=1", *SAMPLED])
    data = with_collate(config, load_data(config))
    one, other = (data.examples(200) for _ in range(2))
    assert one["candidates"].shape == (200, 6) and one["history"].shape == (200, 8)
    assert (one["candidates"][:, 0] > 0).all() and not torch.equal(one["candidates"][:, 0], other["candidates"][:, 0])
    for i in range(200):
        label, context = int(one["candidates"][i, 0]), [int(item) for item in one["history"][i] if item]
        items = data.training[i].items.tolist()
        assert any(items[k] == label and items[max(0, k - 8) : k] == context for k in range(1, len(items)))
    again = with_collate(config, load_data(config)).examples(200)
    assert torch.equal(one["candidates"], again["candidates"])


def test_without_a_seed_no_two_runs_draw_the_same() -> None:
    config = load_config("tiny.yaml", ["training.init_seed=0", *SAMPLED])
    data = [with_collate(config, load_data(config)) for _ in range(2)]
    one, other = (part.examples(100)["candidates"] for part in data)
    assert all(part.collate.state() is None for part in data)  # type: ignore[attr-defined]  # nothing for a checkpoint
    assert not torch.equal(one[:, 0], other[:, 0]) and not torch.equal(one[:, 1:], other[:, 1:])


def test_the_loss_of_a_given_context_and_label() -> None:
    """What an audit looks at: each unit's own loss, of a trained model."""
    config = load_config("tiny.yaml", ["training.epochs=1"])
    run_training(config, Path("run"))
    model = make_model(config, load_data(config).training)
    model.load_state_dict(weights("run"))
    history, label = torch.tensor([[3, 4, 0], [5, 0, 0]]), torch.tensor([7, 9])
    losses = model(history, target=label)
    scores = model.score_next(history)  # type: ignore[operator]
    wanted = torch.nn.functional.cross_entropy(scores[:, 1:], label - 1, reduction="none")
    torch.testing.assert_close(losses, wanted)


# ------------------------------------------------------------------ resuming

RESUMED = {
    "dpsgd, softmax": [],
    "lazydp, sampled": [*SAMPLED, "privacy.mechanism=lazydp"],
    "adafest, in parts": [
        *SAMPLED,
        "privacy.mechanism={name: adafest, threshold: 3.0}",
        "training.max_physical_batch=16",
    ],
    "eana, titles": [TITLES, *SAMPLED, "privacy.mechanism=eana"],
}


@pytest.mark.parametrize("changes", RESUMED.values(), ids=RESUMED.keys())
def test_a_run_that_was_killed_and_resumed_is_the_same_run(changes: list[str]) -> None:
    """What a kill after step 5 leaves is the folder with the checkpoint after step 3; evaluations draw no labels."""
    config = load_config("tiny.yaml", [*changes, "training.seed=3", "training.checkpoint_every=3"])

    def killed(step: int) -> bool:
        if step == 5:
            shutil.copytree("whole", "killed")
        return False

    assert run_training(config, Path("whole"), should_stop=killed).finished
    assert torch.load("killed/private/checkpoint.pt", weights_only=True)["loader"]["step"] == 3
    assert run_training(config, Path("killed"), resume=True).finished
    whole, resumed = weights("whole"), weights("killed")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    stepped = [json.loads(line) for line in Path("killed/private/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in stepped if row["kind"] == "step"] == list(range(1, STEPS + 1))


def test_a_run_that_was_stopped_by_an_error_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that is saved after an error has the labels' generator where the last complete step left it."""
    config = load_config("tiny.yaml", ["training.seed=3", *SAMPLED])
    run_training(config, Path("whole"))
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:  # the batch is there, and with it its labels
            raise RuntimeError("out of luck")
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr("sparsedp.cli.loop.forward", failing)
        with pytest.raises(RuntimeError, match="out of luck"):
            run_training(config, Path("parts"))
    assert run_training(config, Path("parts"), resume=True).finished
    whole, parts = weights("whole"), weights("parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


# ------------------------------------------------------------------ files and titles


def write_log(users: int = 40) -> None:
    lines = [f"{u},{(u * 3 + k) % 9},{k}" for u in range(users) for k in range(8)]
    Path("log.csv").write_text("\n".join(["user,item,timestamp", *lines]))
    Path("titles.csv").write_text("item,title\n" + "".join(f'{i},"Film, the {i}. part"\n' for i in range(9)))


def test_timelines_and_titles_from_files(tmp_path: Path) -> None:
    write_log()
    data = "data={kind: timelines, path: log.csv, titles: titles.csv, context: 4}"
    config = load_config("tiny.yaml", [data, TITLES, "training.batch_size=10", "training.epochs=1"])
    assert isinstance(config.data, TimelinesData)
    assert (config.data.path, config.data.titles) == (str(tmp_path / "log.csv"), str(tmp_path / "titles.csv"))
    result = run_training(config, Path("run"))
    assert result.finished and "precision@5" in result.metrics and "planted_recall@10" not in result.metrics
    assert weights("run")["tables.unigrams.weight"].shape == (51, 8)
    assert "The vocabulary, which was counted" in Path("run/release/statement.txt").read_text()
    without = load_config("tiny.yaml", [data.replace("titles: titles.csv, ", ""), TITLES, "training.batch_size=10"])
    with pytest.raises(ConfigError, match=r"model.features: unigrams, bigrams are of titles.*data.titles"):
        run_training(without, Path("none"))


def test_large_hashed_tables_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    model = TITLES.replace("buckets: 50", "buckets: 200000")
    changes = [f"--set={change}" for change in (model, *SAMPLED, "privacy.mechanism=eana")]
    assert main(["plan", "tiny.yaml", "--json", *changes]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {table["rows"] for table in report["tables"]} == {61, 200_001}
    assert report["measured"]["rows_touched"] < 2000


def test_a_loss_of_ones_own_gets_pairs() -> None:
    Path("mine_dual.py").write_text(
        "from sparsedp.nn import sequence_loss\ndef loss(output, target):\n    return sequence_loss(output, target)\n"
    )
    config = load_config("tiny.yaml", ["loss=mine_dual:loss", "training.seed=1", "training.check=true"])
    run_training(config, Path("whole"))
    run_training(config, Path("parts"), should_stop=lambda step: step == 5)
    run_training(config, Path("parts"), resume=True)
    whole, parts = weights("whole"), weights("parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


# ------------------------------------------------------------------ noise on the mean


def test_noise_on_the_mean_is_that_of_the_paper() -> None:
    """0.01 on the mean of 64 units that are clipped to 1 is 0.64 on their sum; with another norm, as a multiple of it."""
    for norm, wanted in ((1.0, 0.64), (0.5, 1.28)):
        changes = ["privacy.noise_multiplier=null", "privacy.noise_on_mean=0.01", f"privacy.max_grad_norm={norm}"]
        config = load_config("tiny.yaml", [*changes, "training.batch_size=64"])
        data = with_collate(config, load_data(config))
        parts = prepare(config, data, make_model(config, data.training))
        assert parts.engine.plan.noise_multiplier == pytest.approx(wanted)


def test_the_noise_on_the_mean_as_a_step_adds_it() -> None:
    """Of a step at rate 1 with SGD, the difference to the same step without noise has the deviation that was asked for."""
    after = {}
    for noise in (0.0, 0.02):
        changes = [
            "privacy.noise_multiplier=null",
            f"privacy.noise_on_mean={noise}",
            "optimizer.lr=1.0",
            "training.seed=5",
        ]
        config = load_config("tiny.yaml", [*changes, "training.epochs=1", "privacy.max_grad_norm=0.7"])
        run_training(config, Path(f"noise-{noise}"), should_stop=lambda step: step == 1)
        after[noise] = torch.load(f"noise-{noise}/private/checkpoint.pt", weights_only=True)["model"]
    for name in ("context_table.weight", "label_table.weight"):
        difference = (after[0.02][name] - after[0.0][name]).flatten()  # 61 x 8 numbers
        assert difference.std().item() == pytest.approx(0.02, rel=4 / math.sqrt(2 * len(difference)))


def test_a_sweep_may_give_either() -> None:
    Path("sweep.yaml").write_text(
        "base: tiny.yaml\nreference: dpsgd\nmetric: precision@10\ncontrol_rates: [1.0]\nset: {privacy.noise_multiplier: null, privacy.noise_on_mean: 0.01}\n"
        "variants: {dpsgd: {}, eana: {set: {privacy.mechanism: eana}, grid: {privacy.noise_on_mean: [0.01, 0.001]}},\n"
        "  eight: {set: {privacy.noise_on_mean: null, privacy.target_epsilon: 8.0}}}\n"
    )
    runs = {run.id: run.config for run in expand(*load_sweep("sweep.yaml"))}
    assert runs["eana,noise_on_mean=0.001,seed=0"].noise_multiplier == pytest.approx(0.05)
    assert runs["non_private,seed=0"].noise_multiplier == 0
    assert runs["eight,seed=0"].noise_multiplier is None
    assert main(["sweep", "sweep.yaml", "--jobs", "1", "--run-dir", "sweep", "--set", "training.epochs=1"]) == 0
    front = json.loads(Path("sweep/front.json").read_text())
    assert front["metric"] == "precision@10" and front["more_is_better"]


def test_a_sweep_keeps_the_labels_of_a_test_user_in_one_half() -> None:
    config = load_config("tiny.yaml", ["data.test_labels=4"])
    data = with_collate(config, load_data(config))
    assert data.held_out is not None
    owners = data.held_out.owners
    assert np.array_equal(np.bincount(owners), np.full(len(owners) // 4, 4))
    parts = prepare(config, data, make_model(config, data.training))
    halves: list[set[int]] = []

    def ranked(config: Any, model: Any, data: Any, part: Any) -> dict[str, Any]:
        if part is not data.held_out:
            halves.append({int(owners[row]) for row in part.indices})
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsedp.cli.evaluation.rank_items", ranked)
        evaluate(config, parts.model, parts.loss, data, by_halves=True)
    assert not halves[0] & halves[1] and len(halves[0]) + len(halves[1]) == len(owners) // 4


# ------------------------------------------------------------------ configurations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["privacy.noise_on_mean=0.01"], r"privacy.target_epsilon: give exactly one of .*got None, 1.0 and 0.01"),
        (["privacy.unit=example"], r"privacy.unit: a timeline is all that a user did: give user"),
        (["training.workers=1"], r"training.workers: labels are drawn in the main process: give 0"),
        (["model={kind: gru}"], r"model.kind: gru is about sequences, and data.kind generated_timelines about timelines"),
        (["model={kind: dlrm}"], r"model.kind: dlrm is about clicks"),
        (["data={kind: generated_sequences, users: 9, items: 9}"], r"model.kind: dual is about timelines, and data.kind"),
        (["loss=binary_cross_entropy"], r"loss: expected softmax, "),
        (["model.features=[]"], r"model.features: expected at least one feature"),
        (["model.features=[items, items]"], r"model.features: .*none twice"),
        (["model.features=[words]"], r"model.features\[0\]: expected items or unigrams or bigrams"),
        (["model.features=[unigrams]", "model.tied=true"], r"model.tied: the label's table is tied"),
        (["model.context=transformer", "model.heads=3"], r"model.heads: expected a divisor of model.dim, 8; got 3"),
        (["model.heads=2"], r"model.heads: is for model.context: transformer"),
        (["model.blocks=2"], r"model.blocks: is for model.context: transformer"),
        (["model.buckets=9"], r"model.buckets: unigrams and bigrams are hashed to them"),
        (["model.context=transformer", "model.dim=6"], r"model.heads: expected a divisor of model.dim, 6; got 4"),
        (["data={kind: timelines, path: a, titles: b}"], r"data.titles: no feature looks at them"),
        (["data.held_out=1.0"], r"data.held_out: expected a number of at least 0 and below 1"),
        (["data={kind: timelines, path: a, titles: $NOWHERE/b}", "model.features=[items, unigrams]"], r"data.titles: .*no environment variable NOWHERE"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    changes: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ConfigError, match=message):
        load_config("tiny.yaml", changes)


@pytest.mark.parametrize("name", ["dual", "dual-movielens"])
def test_bundled_configurations_survive_being_written(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path))
    config = load_config(name)
    Path("written.yaml").write_text(dump_config(config))
    assert load_config("written.yaml") == config


def test_the_bundled_configurations_explain_every_key() -> None:
    texts = [(CONFIGS / f"{name}.yaml").read_text() for name in ("dual", "dual-movielens")]
    for section, kinds in {"data": (GeneratedTimelinesData, TimelinesData), "model": (DualModel,)}.items():
        for key in {field.name for kind in kinds for field in dataclasses.fields(kind)}:
            assert any(key in yaml.safe_load(text)[section] for text in texts), f"{section}.{key}"


# ------------------------------------------------------------------ what training is worth


@pytest.mark.slow
def test_training_beats_popularity_and_a_frozen_table_does_not() -> None:
    changes = ["training.evaluate_every_epochs=null", "training.check=false", "training.seed=0"]
    trained = run_training(load_config("dual", changes), Path("trained")).metrics
    frozen = run_training(load_config("dual", [*changes, "model.freeze_tables=true"]), Path("frozen")).metrics
    assert trained["precision@10"] > 1.5 * trained["popularity_precision@10"]
    assert trained["precision@10"] > 1.5 * frozen["precision@10"]
    assert trained["precision@10"] < 1.05 * trained["planted_precision@10"]


@pytest.mark.slow
def test_films_are_learned_without_privacy() -> None:
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not Path(folder, "ml-1m/ratings.csv.gz").is_file():
        pytest.skip("set SPARSEDP_DATA to a folder that holds ml-1m/ratings.csv.gz")
    changes = [
        "training.epochs=20",
        "training.batch_size=256",
        "training.evaluate_every_epochs=null",
        "training.check=false",
    ]
    no_privacy = ["target_epsilon=null", "noise_multiplier=0", "max_grad_norm=1e9", "clipping=flat"]
    config = load_config("dual-movielens", [*changes, *(f"privacy.{change}" for change in no_privacy)])
    metrics = run_training(config, Path("run")).metrics
    assert metrics["popularity_precision@10"] == pytest.approx(0.00445, abs=1e-4)
    assert metrics["precision@10"] > 2 * metrics["popularity_precision@10"]
