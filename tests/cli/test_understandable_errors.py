"""What is wrong with data or settings is said in one line: the table, the row, the id, and what to do."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.cli.main import main
from sparsedp.cli.result import metric_lines
from sparsedp.errors import ConfigError, DataError, NonFiniteGradientError, UnsupportedError
from words import write_reviews

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.out = nn.Embedding(10, 4), nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.item(ids)).squeeze(-1)


def make_model(training):
    return Scores()


def make_data(case):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, (200,), generator=generator)
    labels = torch.rand(200, generator=generator).round()
    part, _, change = case.partition(" ")
    held_ids, held_labels = ids[:50].clone(), labels[:50].clone()
    if part == "held":
        held_ids, held_labels = CHANGES[change](held_ids, held_labels)
    if part == "training":
        ids, labels = CHANGES[change](ids, labels)
    training = TensorDataset(ids, labels)
    return training if part == "nothing" else (training, TensorDataset(held_ids, held_labels))


def at(values, place, value):
    values[place] = value
    return values


CHANGES = {
    "integer labels": lambda ids, labels: (ids, labels.long()),
    "float ids": lambda ids, labels: (ids.float(), labels),
    "large id": lambda ids, labels: (at(ids, 3, 12), labels),
    "negative id": lambda ids, labels: (at(ids, 3, -1), labels),
    "NaN label": lambda ids, labels: (ids, at(labels, 5, float("nan"))),
    "empty": lambda ids, labels: (ids[:0], labels[:0]),
    "one class": lambda ids, labels: (ids, torch.ones_like(labels)),
}
"""

CONFIG = """
data: {kind: "strange:make_data", options: {case: ok}}
model: {kind: "strange:make_model"}
loss: binary_cross_entropy
optimizer: {name: SGD, lr: 0.1}
training: {epochs: 3, batch_size: 20, seed: 0}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0, target_delta: 1.0e-4, mechanism: {name: MECHANISM}}
"""

TEXTS = """
data: {kind: text, paths: train.tsv, text: sentence, buckets: 100, length: 8, held_out: 0.2}
model: {kind: text_bag, dim: 8}
loss: cross_entropy
optimizer: {name: SGD, lr: 1.0e+7}
training: {epochs: 3, batch_size: 20, threads: 1, seed: 0, init_seed: 0, check: false}
privacy: {noise_multiplier: 100.0, max_grad_norm: 1.0, target_delta: 1.0e-4, mechanism: dpsgd}
"""


def train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *settings: str, mechanism: str = "eana"
) -> tuple[int, str]:
    """The exit code, and the error, which has to be one line of the error stream."""
    sys.modules.pop("strange", None)  # of the test before, in another folder
    (tmp_path / "strange.py").write_text(CODE)
    (tmp_path / "strange.yaml").write_text(CONFIG.replace("MECHANISM", mechanism))
    overrides = [part for setting in settings for part in ("--set", setting)]
    code = main(["train", str(tmp_path / "strange.yaml"), "--run-dir", str(tmp_path / "run"), "--quiet", *overrides])
    captured = capsys.readouterr()
    return code, the_error(captured.err, captured.out)


def the_error(err: str, out: str = "") -> str:
    """The one line in which a command says what is wrong; beside it there is how to go on, at most."""
    errors = [line for line in err.splitlines() if line.startswith("sparsedp: error: ")]
    others = [line for line in err.splitlines() if line not in errors]
    assert len(errors) == 1 and "sparsedp: error: " not in out, err
    for line in others:
        assert line.startswith(("The run has stopped. ", "  sparsedp train --resume ")), line
    return errors[0]


@pytest.mark.parametrize("mechanism", ["eana", "lazydp"])
@pytest.mark.parametrize(
    "case, message",
    [
        ("integer labels", "Training row 0: The labels are of type int64"),
        ("float ids", "Training row 0: Table 'item.weight' was given ids of type float32"),
        ("large id", "Training row 3: Table 'item.weight' has rows 0 to 9, and was asked for row 12"),
        ("negative id", "Training row 3: Table 'item.weight' has rows 0 to 9, and was asked for row -1"),
        ("NaN label", "The label is NaN or infinite in training row 5"),
        ("empty", "empty training set"),
    ],
)
def test_training_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, message: str, mechanism: str
) -> None:
    code, text = train(tmp_path, capsys, f"data.options.case=training {case}", mechanism=mechanism)
    assert code == 2 and message in text and "Traceback" not in text


@pytest.mark.parametrize(
    "case, message",
    [
        ("integer labels", "Held-out row 0: The labels are of type int64"),
        ("float ids", "Held-out row 0: Table 'item.weight' was given ids of type float32"),
        ("large id", "Held-out row 3: Table 'item.weight' has rows 0 to 9, and was asked for row 12"),
        ("negative id", "Held-out row 3: Table 'item.weight' has rows 0 to 9, and was asked for row -1"),
        ("NaN label", "The label is NaN or infinite in held-out row 5"),
    ],
)
def test_held_out_data_cost_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, message: str
) -> None:
    code, text = train(tmp_path, capsys, f"data.options.case=held {case}")
    assert code == 3 and message in text and "Traceback" not in text
    assert (tmp_path / "run" / "release").is_dir()


def test_an_empty_held_out_set_is_refused_before_anything_is_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = train(tmp_path, capsys, "data.options.case=held empty")
    assert code == 2 and "returned an empty held-out set" in text and not (tmp_path / "run").exists()


def diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str], *settings: str, mechanism: str = "eana") -> str:
    code, text = train(tmp_path, capsys, *settings, mechanism=mechanism)
    assert code == 2 and "of no use" in text and "training has diverged. Lower optimizer.lr" in text
    assert (tmp_path / "run" / "release").is_dir() and list((tmp_path / "run").rglob("checkpoint*"))
    return text


class TestARunThatDivergedIsAFailureAndItsModelIsKept:
    def test_by_what_is_held_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "on the held-out data" in diverges(tmp_path, capsys, "optimizer.lr=1e6")

    def test_by_its_training_where_nothing_is_held_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """10 steps an epoch: the first epoch, which begins with sound losses, does not count."""
        error = diverges(tmp_path, capsys, "optimizer.lr=1e6", "data.options.case=nothing")
        assert "The loss of the last 10 training steps is" in error
        code = main(["train", "--resume", str(tmp_path / "run"), "--code", str(tmp_path / "strange.yaml"), "--quiet"])
        assert code == 2 and "The loss of the last 10 training steps is" in the_error(capsys.readouterr().err)

    def test_where_it_ends_at_1e26(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        error = diverges(tmp_path, capsys, "optimizer.lr=1e13", "training.epochs=1")
        assert re.search(r"is [0-9.]+e\+2[4-8]: training has diverged", error), error

    @pytest.mark.parametrize("loss", ["loss=softmax", "loss=sampled_softmax"])
    def test_of_sequences_which_are_ranked(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str) -> None:
        settings = ["data.users=100", "data.items=20", "training.batch_size=20", loss, "optimizer={name: SGD, lr: 3e3}",
                    "training.negatives=4" if "sampled" in loss else "training.epochs=3", "training.check=false", "training.threads=1", "training.seed=0"]  # fmt: skip
        overrides = [part for setting in settings for part in ("--set", setting)]
        code = main(["train", "sequences", "--run-dir", str(tmp_path / "run"), "--quiet", *overrides])
        captured = capsys.readouterr()
        assert code == 2 and "training has diverged" in the_error(captured.err, captured.out)
        assert (tmp_path / "run" / "release").is_dir()

    def test_of_classes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_reviews(tmp_path / "train.tsv", 200)
        (tmp_path / "texts.yaml").write_text(TEXTS)
        for held_out in ("0.2", "0.0"):
            run = tmp_path / f"run {held_out}"
            changes = ["--set", f"data.held_out={held_out}", "--set", f"data.paths={tmp_path / 'train.tsv'}"]
            code = main(["train", str(tmp_path / "texts.yaml"), "--run-dir", str(run), "--quiet", *changes])
            captured = capsys.readouterr()
            assert code == 2 and "training has diverged" in the_error(captured.err, captured.out)
            assert (run / "release").is_dir()

    def test_where_a_look_stops_it_after_an_evaluation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        early = "training.early_stopping={validation: public, every_epochs: 1, patience: 1, min_improvement: 1e30}"
        target = ["privacy.noise_multiplier=null", "privacy.target_epsilon=5"]
        diverges(
            tmp_path, capsys, "optimizer.lr=1e6", early, "training.evaluate_every_epochs=1", *target, mechanism="lazydp"
        )
        rows = [json.loads(line) for line in (tmp_path / "run" / "private" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [10, 20], "it was not evaluated again"


def test_a_run_that_diverged_is_said_to_have_by_export_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    diverges(tmp_path, capsys, "optimizer.lr=1e18", mechanism="eana")
    run = str(tmp_path / "run")
    assert main(["export", run, "--to", str(tmp_path / "out"), "--without-guarantee"]) == 0
    output = capsys.readouterr()
    assert "warning: training has diverged, and this model is of no use: " in output.err and "Copied to" in output.out
    assert not [path for path in (tmp_path / "out").iterdir() if b"diverged" in path.read_bytes()]
    assert main(["report", run, run, "--out", str(tmp_path / "both.html"), "--quiet"]) == 0
    page = (tmp_path / "both.html").read_text()
    assert "diverged: the model is of no use" in page and ">finished<" not in page


def test_metrics_that_are_very_large_are_short() -> None:
    lines = dict(metric_lines({"auc": 0.51234, "log_loss": 3.4871e35, "loss": 12345.678}, None))
    assert lines["log loss, held out"] == "3.49e+35" and lines["loss, held out"] == "12345.6780"
    assert lines["AUC, held out"].startswith("0.5123 (0.5 for guessing")


@pytest.mark.filterwarnings("always::sparsedp.UtilityWarning")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("training one class", "All labels to train on are 1: "),
        ("held one class", "All held-out labels are 1: there is no AUC"),
    ],
)
def test_labels_of_one_class_in_tensors_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str, message: str
) -> None:
    with pytest.raises(AssertionError):  # there is no error
        train(tmp_path, capsys, f"data.options.case={case}")
    warnings = [
        json.loads(line)["message"]
        for line in (tmp_path / "run" / "private" / "metrics.jsonl").read_text().splitlines()
        if '"warning"' in line
    ]
    assert [text for text in warnings if text.startswith(message)] and not [
        text for text in warnings if text.startswith("All") and not text.startswith(message)
    ]


def test_sound_runs_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for case in ("ok", "nothing"):
        folder = tmp_path / case
        folder.mkdir()
        with pytest.raises(AssertionError):  # there is no error
            train(folder, capsys, f"data.options.case={case}")
        assert (folder / "run" / "release").is_dir()


def test_weights_that_overflow_are_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = train(tmp_path, capsys, "optimizer.lr=1e25")
    assert code == 2 and "training has diverged. Lower the learning rate" in text


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.bag, self.out = nn.Embedding(10, 4), nn.EmbeddingBag(10, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        return self.out(self.item(ids) + self.bag(bags)).squeeze(-1)


MECHANISMS = [sparsedp.EANA(), sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.AdaFEST(threshold=1.0)]


def one_step(ids: Any, labels: Any = None, bags: Any = None, lr: float = 0.1, **settings: Any) -> None:
    labels = torch.rand(len(ids)).round() if labels is None else labels
    bags = torch.ones(len(ids), 2, dtype=torch.int64) if bags is None else bags
    module = Scores()
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=0).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=lr),
        data_loader=DataLoader(TensorDataset(ids, bags, labels), batch_size=len(ids) or 1),
        **{
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "poisson_sampling": False,
            "mechanism": sparsedp.EANA(),
            **settings,
        },
    )
    for _ in range(2):
        for ids, bags, label in loader:
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(module(ids, bags), label).backward()
            optimizer.step()


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
class TestInPython:
    def test_ids(self, mechanism: Any) -> None:
        with pytest.raises(DataError, match=r"'item.weight' has rows 0 to 9, and was asked for row 12 \(at place 1 "):
            one_step(torch.tensor([1, 12, 3]), mechanism=mechanism)
        with pytest.raises(DataError, match=r"was asked for rows -1, 10 \(at places 1, 2 "):
            one_step(torch.tensor([1, 10, -1]), mechanism=mechanism)
        with pytest.raises(DataError, match=r"ids of type float32; .*ids.long\(\)"):
            one_step(torch.tensor([1.0, 2.0]), mechanism=mechanism)
        with pytest.raises(DataError, match=r"'bag.weight' has rows 0 to 9, and was asked for row 99"):
            one_step(torch.tensor([1, 2]), bags=torch.tensor([[1, 2], [3, 99]]), mechanism=mechanism)

    def test_labels(self, mechanism: Any) -> None:
        with pytest.raises(
            NonFiniteGradientError, match=r"for 1 of the batch's 3 units, at place\(s\) 2: look for NaN"
        ):
            one_step(torch.tensor([1, 2, 3]), torch.tensor([0, 1, float("nan")]), mechanism=mechanism)

    def test_labels_of_so_many_that_it_may_be_the_rate(self, mechanism: Any) -> None:
        labels = torch.cat([torch.full((6,), float("nan")), torch.ones(24)])
        with pytest.raises(
            NonFiniteGradientError, match=r"for 6 of the batch's 30 units, .*: lower the learning rate, if .*NaN"
        ):
            one_step(torch.arange(30) % 10, labels, mechanism=mechanism)

    def test_a_rate_that_diverges(self, mechanism: Any) -> None:
        with pytest.raises(NonFiniteGradientError, match=r"training has diverged\. Lower the learning rate"):
            one_step(torch.tensor([1, 2, 3]), lr=1e30, mechanism=mechanism)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"max_grad_norm": None}, ConfigError, r"max_grad_norm must be a number above 0, such as 1\.0, not None"),
        ({"max_grad_norm": "1"}, ConfigError, "not a str"),
        (
            {"noise_multiplier": None},
            ConfigError,
            r"noise_multiplier must be a number of at least 0, such as 1\.0, not None",
        ),
        ({"noise_multiplier": "1"}, ConfigError, "not a str"),
        ({"ids": []}, UnsupportedError, "The data set is empty"),
        ({"stream": [0, 0, 0, 1]}, UnsupportedError, "period"),
    ],
    ids=["no clip", "a clip that is a text", "no noise", "noise that is a text", "empty", "a period for too many"],
)
def test_settings_and_sets(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    ids = torch.tensor(settings.pop("ids", [1, 2]), dtype=torch.int64)
    if "stream" in settings:
        settings["stream"] = sparsedp.Stream(torch.tensor(settings["stream"]), composition="parallel")
    with pytest.raises(error, match=message) as raised:
        one_step(ids, **settings)
    assert "\n" not in str(raised.value)


def loop_over_shuffled_data(ids: torch.Tensor, labels: torch.Tensor, **settings: Any) -> None:
    module = Scores()
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=0).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(ids, ids.long()[:, None] % 10, labels), batch_size=8, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        mechanism=sparsedp.EANA(),
        **settings,
    )
    for _ in range(4):  # a row is not in every epoch
        for x, bags, y in loader:
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(module(x, bags), y).backward()
            optimizer.step()


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")  # that a loop ended early
@pytest.mark.parametrize("settings", [{}, {"poisson_sampling": False}, {"max_physical_batch": 3}], ids=str)
def test_an_error_of_a_batch_is_one_line_with_the_row_of_the_data_set(settings: dict[str, Any]) -> None:
    ids, labels = torch.arange(40) % 10, torch.rand(40).round()
    ids[17] = 12
    with pytest.raises(
        DataError, match=r"was asked for row 12 \(at place \d+ of the batch's ids\).* row 17\. \(.*\.py:\d+\)$"
    ) as raised:
        loop_over_shuffled_data(ids, labels, **settings)
    assert "\n" not in str(raised.value)
    labels[23] = float("nan")
    with pytest.raises(NonFiniteGradientError, match=r"at place\(s\) \d+: .* \(in the data set: row\(s\) 23\)") as nan:
        loop_over_shuffled_data(torch.arange(40) % 10, labels, **settings)
    assert "\n" not in str(nan.value)


def test_ids_that_are_no_whole_numbers_are_one_line_without_a_risk() -> None:
    with pytest.raises(DataError) as raised:
        loop_over_shuffled_data(torch.rand(40), torch.rand(40).round())
    assert re.search(r"ids of type float32; .*ids.long\(\).*\(.*\.py:\d+\)$", str(raised.value))
    assert "\n" not in str(raised.value) and raised.value.refusal is not None and not raised.value.refusal.risk


def test_rows_of_users_are_named_where_their_examples_are_known() -> None:
    ids, users = torch.arange(40) % 10, torch.arange(40) // 2
    ids[17] = 12
    with pytest.raises(DataError, match=r"In the data set: row 17\."):
        loop_over_shuffled_data(ids, torch.rand(40), unit="user", users=users)


def test_periods_may_be_a_tensor() -> None:
    one_step(torch.arange(4), stream=sparsedp.Stream(torch.tensor([0, 0, 0, 0]), composition="parallel"))


def test_settings_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("max_grad_norm=null", "max_grad_norm=-1", "max_grad_norm=big"):
        code, text = train(tmp_path, capsys, f"privacy.{setting}")
        assert code == 2 and "privacy.max_grad_norm" in text and not (tmp_path / "run").exists()


def test_labels_that_the_loss_does_not_take_are_named_by_check() -> None:
    batch = (torch.tensor([1, 2]), torch.ones(2, 2, dtype=torch.int64), torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"The labels are of type int64, .* labels.float\(\)"):
        sparsedp.check(Scores(), binary_cross_entropy_with_logits, batch)
