"""`sparsedp plan --compare`, thresholds that configurations leave to be found, and releases that runs pay for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsedp.advice import NOTE_OF_DATA
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.prepare import load_data, make_model
from sparsedp.tables import find_tables

pytestmark = pytest.mark.filterwarnings("ignore::sparsedp.UtilityWarning")  # small data
TINY = """
data: {kind: generated, rows: 1000, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 2, batch_size: 100, log_every: 1}
privacy: {target_epsilon: 5, target_delta: 1.0e-4, max_grad_norm: 2}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return "tiny.yaml"


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["plan", *arguments, "--compare", "--no-measure", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_names_every_mechanism_and_recommends_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--compare", "--look-at-data"]) == 0
    shown = capsys.readouterr().out
    for name in ("DPSGD", "LazyDP", "AdaFEST", "FEST", "exponential", "EANA", "Recommended", "not for release"):
        assert name in shown
    values = compared(capsys, config, "--look-at-data")
    assert values["private"] and values["settings"]["privacy.chosen_on_data"] == "true"
    assert values["recommended"] in [option["label"] for option in values["options"]]


def test_it_says_what_it_does_on_the_error_stream(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", config, "--compare", "--look-at-data", "--json"]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["options"]
    for task in (
        "Reading the data",
        "Making the model",
        "Counting rows",
        "Predicting LazyDP",
        "Taking steps with EANA to measure",
    ):
        assert task in told.err
    assert main([*arguments, "--quiet", "--no-measure"]) == 0
    assert capsys.readouterr().err == ""


def test_memory_is_that_of_the_plan_and_every_mechanism_has_a_time(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--compare", "--look-at-data", "--json", "--quiet"]) == 0
    options = {option["label"]: option for option in json.loads(capsys.readouterr().out)["options"]}
    assert all(option["seconds_per_step"] > 0 for option in options.values() if option["refused"] is None)
    assert options["EANA"]["seconds_per_step"] > 0 and not options["EANA"]["private"]
    assert main(["plan", config, "--no-measure", "--json", "--set", "privacy.mechanism=dpsgd"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert planned["optimizer_state"] > 0
    assert options["DPSGD"]["memory_bytes"] == planned["total"] - planned["activations"]


def test_what_it_recommends_trains(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = compared(capsys, config, "--look-at-data")["settings"]
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    assert main(["train", config, "--run-dir", "run", "--quiet", *changes]) == 0
    assert NOTE_OF_DATA in json.loads(Path("run/release/statement.json").read_text())["not_covered"]


def test_public_counts(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_config(config)
    model = make_model(loaded, load_data(loaded).training)
    counts = {name: np.full(len(p), 900 / len(p)) for name, p in model.named_parameters() if name in find_tables(model)}
    np.savez("counts.npz", units=900, **counts)
    values = compared(capsys, config, "--counts", "counts.npz")
    assert values["source"] == "given counts" and "privacy.chosen_on_data" not in values["settings"]
    auto = "privacy.mechanism={name: adafest, threshold: auto, look_at: counts}"
    change = ["--set", auto, "--set", "privacy.counts=counts.npz"]
    assert main(["train", config, "--run-dir", "run", "--quiet", *change]) == 0
    plan = json.loads(Path("run/release/plan.json").read_text())
    assert plan["mechanism"]["found"] >= 0 and plan["mechanism"]["look_at"]["units"] == 900
    assert "privacy.counts" in Path("run/release/config.yaml").read_text().splitlines()[0]
    assert main(["train", config, "--set", auto]) == 2
    assert "privacy.counts" in capsys.readouterr().err


def test_a_release_is_drawn_once_and_paid_by_the_run(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = compared(capsys, config, "--release", "release.pt")
    written = Path("release.pt").read_bytes()
    assert not values["private"] and "released" in values["source"]
    assert compared(capsys, config, "--release", "release.pt")["options"] == values["options"]  # read, not drawn again
    assert Path("release.pt").read_bytes() == written
    change = ["--set", "privacy.mechanism={name: adafest, threshold: auto, look_at: release}"]
    change += ["--set", values["settings"]["privacy.frequencies"].join(["privacy.frequencies=", ""])]
    assert main(["train", config, "--run-dir", "run", "--quiet", *change]) == 0
    plan = json.loads(Path("run/release/plan.json").read_text())
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert plan["mechanism"]["found"] is not None and plan["frequencies"]["epsilon"] == pytest.approx(0.1)
    assert statement["epsilon"] <= 5 and "released once" in statement["guarantee"]
    released = torch.load("run/release/frequencies.pt", weights_only=True)
    assert all(
        torch.equal(released[k], v) for k, v in torch.load("release.pt", weights_only=True)["frequencies"].items()
    )
    assert main(["train", config, "--run-dir", "other", "--quiet", *change]) == 0
    again = json.loads(Path("other/release/plan.json").read_text())
    assert again["mechanism"]["found"] == plan["mechanism"]["found"]


def test_a_release_within_the_run_is_in_its_plan(config: str) -> None:
    change = ["--set", "privacy.mechanism={name: adafest, threshold: auto, look_at: release, keep: 0.5}"]
    change += ["--set", "privacy.frequencies={epsilon: 0.5}"]
    assert main(["train", config, "--run-dir", "run", "--quiet", *change]) == 0
    plan = json.loads(Path("run/release/plan.json").read_text())
    assert plan["mechanism"]["found"] is not None and plan["mechanism"]["keep"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare"], "Say what may be looked at"),
        (["--compare", "--look-at-data", "--release", "x.pt"], "Say what may be looked at"),
        (["--look-at-data"], "are for --compare"),
        (["--compare", "--look-at-data", "--reduction", "10"], "about one mechanism"),
        (["--compare", "--look-at-data", "--set", "privacy.target_epsilon=null", "--set", "privacy.noise_multiplier=1"], "same epsilon"),
        (["--compare", "--release", "tiny.yaml"], "is no release"),
        (["--compare", "--counts", "missing.npz"], "missing.npz"),
        (["--set", "privacy.frequencies={epsilon: 0.5}"], "only re-attention looks at them"),
        (["--set", "privacy.frequencies={epsilon: 0.3, drawn: x.pt}"], "leave epsilon, delta and clip out"),
        (["--set", "privacy.counts=x.npz"], "look_at: counts"),
        (["--set", "privacy.mechanism={name: adafest, threshold: auto}"], "what may be looked at"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", config, "--no-measure", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_plan_says_what_will_learn_little(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    change = ["--set", "privacy.mechanism={name: adafest, threshold: 500.0}", "--no-measure"]
    assert main(["plan", config, *change]) == 0
    assert "the tables will learn little" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", config, "--json", *change]) == 0
    assert any("learn little" in text for text in json.loads(capsys.readouterr().out)["concerns"])
