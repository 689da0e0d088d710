"""What is wrong with data or settings is said in one line: the table, the row, the id, and what to do."""

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
from sparsedp.errors import ConfigError, DataError, NonFiniteGradientError, UnsupportedError

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
    return TensorDataset(ids, labels), TensorDataset(held_ids, held_labels)


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


def train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *settings: str, mechanism: str = "eana"
) -> tuple[int, str]:
    """The exit code, and what was printed."""
    sys.modules.pop("strange", None)  # of the test before, in another folder
    (tmp_path / "strange.py").write_text(CODE)
    (tmp_path / "strange.yaml").write_text(CONFIG.replace("MECHANISM", mechanism))
    overrides = [part for setting in settings for part in ("--set", setting)]
    code = main(["train", str(tmp_path / "strange.yaml"), "--run-dir", str(tmp_path / "run"), "--quiet", *overrides])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


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
        ("NaN label", "The label is NaN or infinite in held-out row 5"),
    ],
)
def test_held_out_data_cost_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, message: str
) -> None:
    code, text = train(tmp_path, capsys, f"data.options.case=held {case}")
    assert code == 3 and message in text and "Traceback" not in text
    assert (tmp_path / "run" / "release").is_dir()


def test_a_run_that_diverged_is_a_failure_and_its_model_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = train(tmp_path, capsys, "optimizer.lr=1e6")
    assert code == 2 and "of no use" in text and "training has diverged. Lower optimizer.lr" in text
    assert (tmp_path / "run" / "release").is_dir() and list((tmp_path / "run").rglob("checkpoint*"))


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

    def test_a_rate_that_diverges(self, mechanism: Any) -> None:
        with pytest.raises(NonFiniteGradientError, match=r"training has diverged\. Lower the learning rate"):
            one_step(torch.tensor([1, 2, 3]), lr=1e30, mechanism=mechanism)


def test_settings_and_sets() -> None:
    with pytest.raises(ConfigError, match=r"max_grad_norm must be a number above 0, such as 1\.0, not None"):
        one_step(torch.tensor([1, 2]), max_grad_norm=None)
    with pytest.raises(ConfigError, match="not a str"):
        one_step(torch.tensor([1, 2]), max_grad_norm="1")
    with pytest.raises(UnsupportedError, match="The data set is empty"):
        one_step(torch.zeros(0, dtype=torch.int64), max_grad_norm=1.0)
    one_step(torch.arange(4), stream=sparsedp.Stream(torch.tensor([0, 0, 0, 0]), composition="parallel"))


def test_labels_that_the_loss_does_not_take_are_named_by_check() -> None:
    batch = (torch.tensor([1, 2]), torch.ones(2, 2, dtype=torch.int64), torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"The labels are of type int64, .* labels.float\(\)"):
        sparsedp.check(Scores(), binary_cross_entropy_with_logits, batch)
