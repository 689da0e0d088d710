"""A mechanism from outside of the package goes through everything that SparseDP's own go through."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from listed_rows import ListedRows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.mechanisms import Mechanism, mechanism_from_dict
from sparsedp.prediction import find_threshold, predict
from support import Clicks, clicks, loader_of, make_private, train

ROWS = (1, 2, 3, 5, 8, 13)
MECHANISM = ListedRows(rows=ROWS, least=1.0)
ROOT = Path(__file__).parents[2]


def start(seed: int | None = 0, mechanism: Mechanism = MECHANISM, **options: Any) -> tuple:
    torch.manual_seed(5)
    return make_private(Clicks(), loader_of(*clicks(240), batch_size=24), seed=seed, mechanism=mechanism, **options)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------- plan, training, statement


def test_plan_and_calibration() -> None:
    plans = {}
    for mechanism in (MECHANISM, sparsedp.DPSGD()):
        model, engine = Clicks(), sparsedp.PrivacyEngine(seed=0)
        engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader_of(*clicks(240), batch_size=24), max_grad_norm=1.0, mechanism=mechanism,
            target_epsilon=2.0, target_delta=1e-5, epochs=2,
        )  # fmt: skip
        plans[mechanism.name] = engine.plan
    plan = plans["listed_rows"]
    assert plan.epsilon(20, 1e-5) <= 2.0
    # Its two halves are on one sample: together they are one Gaussian.
    assert plan.noise_multiplier == pytest.approx(plans["dpsgd"].noise_multiplier, rel=2e-3)
    again = sparsedp.PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.hash == plan.hash and again.mechanism == MECHANISM
    assert replace(plan, mechanism=replace(MECHANISM, least=2.0)).hash != plan.hash


def test_training_changes_listed_rows_alone() -> None:
    engine, module, optimizer, loader = start()
    before = weights(module)
    train(module, optimizer, loader)
    changed = (module.table.weight != before["table.weight"]).any(1).nonzero().flatten().tolist()
    assert set(changed) <= set(ROWS) and len(changed) >= 4
    assert optimizer.last_step.tables["table.weight"].rows_selected <= len(ROWS)
    assert engine.get_epsilon(1e-5) == engine.plan.epsilon(10, 1e-5)


def test_the_noise_on_the_gradient_is_the_half_that_it_says() -> None:
    engine, module, optimizer, loader = start(noise_multiplier=1.5)
    assert optimizer.private_step.std == pytest.approx(np.sqrt(2) * 1.5 / 24)


def test_statement() -> None:
    engine, module, optimizer, loader = start()
    train(module, optimizer, loader)
    statement = engine.statement(1e-5)
    assert statement.mechanism == "listed_rows"
    assert statement.settings == {"rows": ROWS, "least": 1.0}
    assert statement.guarantee == MECHANISM.guarantee
    assert MECHANISM.assumptions[0] in statement.assumptions and MECHANISM.not_covered[0] in statement.not_covered
    assert any("defined in listed_rows, which is no part of SparseDP" in line for line in statement.assumptions)
    own = start(mechanism=sparsedp.EANA())[0].statement(1e-5)
    assert not any("no part of SparseDP" in line for line in own.assumptions)
    assert "listed_rows(rows=(1, 2, 3, 5, 8, 13), least=1.0)" in str(statement)


def test_no_noise_is_no_privacy() -> None:
    engine, module, optimizer, loader = start(noise_multiplier=0.0)
    train(module, optimizer, loader)
    assert not engine.statement(1e-5).holds


def test_optimizers_that_cannot_take_its_gradients_are_refused() -> None:
    model = Clicks()
    with pytest.raises(sparsedp.UnsupportedError, match="row-sparse gradients for tables, which Adam does not take"):
        make_private(
            model, loader_of(*clicks(64), batch_size=8), mechanism=MECHANISM,
            optimizer=torch.optim.Adam(model.parameters()),
        )  # fmt: skip


# ---------------------------------------------------------------------- prediction


@pytest.mark.parametrize("least", [0.0, 1.0, 3.0])
def test_prediction(least: float) -> None:
    engine, module, optimizer, loader = start(mechanism=replace(MECHANISM, least=least), noise_multiplier=0.5)
    predicted = predict(engine.plan, engine.touch_statistics())
    selected: list[int] = []
    false: list[int] = []

    def note() -> None:
        selected.append(optimizer.last_step.tables["table.weight"].rows_selected)
        false.append(optimizer.last_step.tables["table.weight"].rows_false)

    train(module, optimizer, loader, epochs=20, each=note)
    assert predicted.rows_selected == pytest.approx(np.mean(selected), rel=0.15, abs=0.1)
    assert predicted.rows_false == pytest.approx(np.mean(false), rel=0.2, abs=0.1)


def test_the_threshold_of_its_own_name() -> None:
    engine, *_ = start()
    statistics = engine.touch_statistics()
    found = find_threshold(engine.plan, statistics, 12.0)
    within = predict(replace(engine.plan, mechanism=replace(MECHANISM, least=found)), statistics)
    assert found > 0 and 11.9 <= within.gradient_size <= 12.0


# ---------------------------------------------------------------------- checkpoints, users, streams


def with_users(**options: Any) -> tuple:
    torch.manual_seed(5)
    loader = loader_of(*clicks(240), batch_size=6)
    return make_private(Clicks(), loader, mechanism=MECHANISM, unit="user", users=np.arange(240) % 40, **options)


def with_periods(composition: Any = "sequential", **options: Any) -> tuple:
    return start(stream=sparsedp.Stream(np.arange(240) // 80, composition), **options)


@pytest.mark.parametrize("make", [start, with_users, with_periods])
@pytest.mark.parametrize("limit", [None, 13])
def test_resumed_equals_uninterrupted(make: Any, limit: int | None, tmp_path: Path) -> None:
    def run() -> tuple:
        return make(max_physical_batch=limit)

    engine, module, optimizer, loader = run()
    train(module, optimizer, loader, epochs=2)
    part = run()
    train(*part[1:], epochs=1)
    part[0].save_checkpoint(tmp_path / "run.pt")
    resumed = run()
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    assert resumed[2].prepared["table.weight"].tolist() == list(ROWS)
    train(*resumed[1:], epochs=1)
    assert_same(weights(resumed[1]), weights(module))
    assert resumed[0].get_epsilon(1e-5) == engine.get_epsilon(1e-5)


def test_a_checkpoint_of_another_setting_is_refused(tmp_path: Path) -> None:
    start()[0].save_checkpoint(tmp_path / "run.pt")
    with pytest.raises(sparsedp.errors.CheckpointError, match="mechanism"):
        start(mechanism=replace(MECHANISM, least=2.0))[0].load_checkpoint(tmp_path / "run.pt")


def test_users_are_the_units() -> None:
    engine, module, optimizer, loader = with_users()
    train(module, optimizer, loader)
    assert engine.statement(1e-5).unit == "user" and engine.plan.dataset_size == 40
    assert predict(engine.plan, engine.touch_statistics()).rows_selected > 0


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
def test_streams_by_period(composition: str) -> None:
    engine, module, optimizer, loader = with_periods(composition)
    train(module, optimizer, loader)
    assert engine.get_epsilon(1e-5) == engine.plan.epsilon(len(loader), 1e-5)
    assert "3 spans" in str(engine.statement(1e-5))
    assert predict(engine.plan, engine.touch_statistics()).rows_selected > 0


def test_fallback_rows_join_its_choice() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = sparsedp.nn.FallbackEmbedding(50, 4), nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids)).squeeze(1)

    ids, _, target = clicks(240)
    engine, module, optimizer, loader = make_private(
        Model(), DataLoader(TensorDataset(ids, target), batch_size=24, shuffle=True), mechanism=MECHANISM
    )
    engine.prepare()
    assert optimizer.prepared["table.weight"].tolist() == [*ROWS, 50]
    assert module.table.kept.nonzero().flatten().tolist() == [*ROWS, 50]


# ---------------------------------------------------------------------- the command line


TINY = """
data: {kind: generated, rows: 400, scale: 0.01, held_out: 0.25, users: 60}
model: {kind: pctr, hidden: 4, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 2, batch_size: 60, log_every: 1, seed: 1, checkpoint_every: 1}
privacy:
  noise_multiplier: 1
  max_grad_norm: 2
  mechanism: {name: "listed_rows:ListedRows", rows: [3, 1, 2], least: 1.0}
"""
SWEEP = """
base: tiny.yaml
reference: dpsgd
variants:
  dpsgd: {set: {privacy.mechanism: dpsgd}}
  listed:
    grid: {privacy.mechanism.least: [0.0, 2.0]}
"""
BESIDE = """
from dataclasses import dataclass
import torch
from sparsedp.mechanisms import Mechanism

@dataclass(frozen=True)
class FirstRows(Mechanism):
    name = "first_rows"
    selects = True
    guarantee = "(epsilon, delta)-differential privacy"
    count: int = 2

    def select(self, batch, step):
        return {name: torch.arange(min(self.count, table.rows)) for name, table in step.tables.items()}

class Unnamed(FirstRows):
    pass
"""
TRUSTED = ["--trust", "listed_rows"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "outside_mine", raising=False)
    for name, text in {"tiny.yaml": TINY, "sweep.yaml": SWEEP, "outside_mine.py": BESIDE}.items():
        (tmp_path / name).write_text(text)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def test_train_and_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", *TRUSTED, "--run-dir", "run", "--quiet"]) == 0
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert statement["mechanism"] == "listed_rows" and statement["settings"]["rows"] == [1, 2, 3]
    assert "no part of SparseDP" in json.dumps(statement)
    assert json.loads(Path("run/release/plan.json").read_text())["mechanism"]["name"] == "listed_rows"
    config = load_config("tiny.yaml", trust=["listed_rows"])
    assert not run_training(config, Path("stopped"), should_stop=lambda step: step >= 4).finished
    assert main(["train", "--resume", "stopped", "--quiet"]) == 2
    assert "--trust listed_rows" in capsys.readouterr().err
    assert main(["train", "--resume", "stopped", *TRUSTED, "--quiet"]) == 0
    models = [torch.load(f"{run}/release/model.pt", weights_only=True) for run in ("run", "stopped")]
    assert_same(*models)
    assert main(["evaluate", "run", "--quiet"]) == 0  # which needs no mechanism
    assert main(["export", "run", "--to", "exported", "--without-guarantee"]) == 0


def test_users_on_the_command_line(folder: Path) -> None:
    users = ["--set", "privacy.unit=user", "--set", "training.batch_size=20"]
    assert main(["train", "tiny.yaml", *TRUSTED, *users, "--run-dir", "run", "--quiet"]) == 0
    assert json.loads(Path("run/release/statement.json").read_text())["unit"] == "user"


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.yaml", *TRUSTED, "--no-measure", "--json", "--reduction", "200"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mechanism"] == {"name": "listed_rows", "rows": [1, 2, 3], "least": 1.0}
    assert 0 < report["predicted"]["rows_selected"] <= 3 * 26
    assert report["suggested"]["setting"] == "least" and report["suggested"]["threshold"] > 0
    assert main(["plan", "tiny.yaml", *TRUSTED, "--no-measure", "--reduction", "200"]) == 0
    assert "--set privacy.mechanism.least=" in capsys.readouterr().out


def test_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "sweep.yaml", *TRUSTED, "--jobs", "1", "--quiet", "--set", "training.epochs=1"]) == 0
    text = "".join(path.read_text() for path in Path("runs").rglob("*.md"))
    assert "listed" in text and "least" in text


def test_beside_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = "privacy.mechanism={name: 'outside_mine:FirstRows', count: 1}"
    assert main(["train", "tiny.yaml", "--run-dir", "run", "--quiet", "--set", mine]) == 0
    assert json.loads(Path("run/release/plan.json").read_text())["mechanism"] == {"name": "first_rows", "count": 1}
    assert "outside_mine" in json.loads(Path("run/private/code.json").read_text())["sha256"]


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("listed_rows:ListedRows", "privacy.mechanism.name: listed_rows:ListedRows is neither in a file beside"),
        ("os:system", "privacy.mechanism.name: os:system is neither in a file beside"),
        ("outside_mine:dataclass", "privacy.mechanism.name: outside_mine:dataclass is not defined in outside_mine"),
        ("outside_mine:Unnamed", "outside_mine:Unnamed is no sparsedp.Mechanism with a name of its own"),
        (
            "{name: 'outside_mine:FirstRows', cuont: 1}",
            "privacy.mechanism: Mechanism 'first_rows' has no setting 'cuont'",
        ),
        ("{name: adafest, preselect: {name: 'os:system'}}", "privacy.mechanism.preselect.name: os:system is neither"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train", "sweep"])
def test_what_may_not_be_named(
    folder: Path, mechanism: str, message: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "sweep":
        quoted = mechanism if mechanism.startswith("{") else f"'{mechanism}'"
        Path("tiny.yaml").write_text(re.sub("mechanism: .*", f"mechanism: {quoted}", TINY))
        arguments = ["sweep.yaml", "--jobs", "1"]
        Path("sweep.yaml").write_text(SWEEP.replace("grid: {privacy.mechanism.least: [0.0, 2.0]}", "set: {}"))
    else:
        arguments = ["tiny.yaml", "--set", f"privacy.mechanism={mechanism}"]
    assert main([command, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


# ---------------------------------------------------------------------- names, and who may ask for a class


def test_a_name_belongs_to_one_mechanism() -> None:
    with pytest.raises(TypeError, match=r"sparsedp.mechanisms.dpsgd.DPSGD has the name 'dpsgd' already"):

        @dataclass(frozen=True)
        class Taken(Mechanism):
            name: ClassVar[str] = "dpsgd"

    assert isinstance(mechanism_from_dict({"name": "dpsgd"}), sparsedp.DPSGD)
    assert mechanism_from_dict(MECHANISM.to_dict()) == MECHANISM


def test_nobody_outside_asks_for_a_mechanisms_class() -> None:
    """Then a mechanism from outside could not answer."""
    classes = "AdaFEST|LazyDP|FEST|EANA|DPSGD|ExponentialSelection"
    asks = re.compile(rf"isinstance\(.*\b({classes})\b|getattr\((\w+\.)*mechanism\b|\.mechanism\.name (==|!=|in)")
    files = [path for part in ("src", "benchmarks") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        if (ROOT / "src/sparsedp/mechanisms") not in path.parents:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not asks.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
