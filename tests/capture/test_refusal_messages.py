"""How a refusal reads: the line of the model's own code, the shapes, the reason that is true, and what to write instead."""

from __future__ import annotations

import importlib.util
import pickle
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from sparsedp import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.errors import Refusal, one_line
from support import Apply, loader_of, make_private

UNITS, LENGTH, DIM = 5, 7, 4

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(20, 4)
        self.out = nn.Linear(4, 20)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, ids, target):
        h = self.items(ids)
"""
TAIL = """
        losses = F.cross_entropy(self.out(h).transpose(1, 2), target.clamp(min=0), reduction="none")
        return losses.mean()
"""


def loaded(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path, name: str, body: str) -> Path:
    path = folder / f"{name}.py"
    lines = [f"        {line}" if line else "" for line in body.splitlines()]
    path.write_text(HEAD + "\n".join(lines) + ("" if "return" in body else TAIL) + "\n")
    return path


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 20, (UNITS, LENGTH), generator=generator)
    target[:, 5:] = -100
    target[0, 3:] = -100
    return {"ids": torch.randint(0, 20, (UNITS, LENGTH), generator=generator), "target": target}


def run(path: Path) -> None:
    sparsedp.check(loaded(path).Model(), lambda out, _: out, batch())


def refusal_of(call: Callable[[], Any], kind: type[SparseDPError] = SparseDPError) -> Refusal:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.refusal is not None, str(caught.value)
    assert str(caught.value).startswith(caught.value.message)
    return caught.value.refusal


# The statement that is refused, the one to write instead, and the statements of forward() that they are among.
PATCHES = {
    "batch mean": ("h = h - h.mean(0)", "h = h - h.mean(dim=(1, 2), keepdim=True)", "{}"),
    "batch mean by name": ("m = h.mean(dim=0)", "m = h.mean(dim=(1, 2), keepdim=True)", "{}\nh = h - m"),
    "maximum": ("top = h.abs().max()", "top = h.abs().amax(dim=(1, 2), keepdim=True)", "{}\nh = h / top"),
    "deviation": ("h = h / torch.std(h)", "h = h / torch.std(h, dim=(1, 2), keepdim=True)", "{}"),
    "softmax": ("h = torch.softmax(h, dim=0)", "h = torch.softmax(h, dim=2)", "{}"),
    "softmax function": ("h = F.softmax(h, 0)", "h = F.softmax(h, dim=2)", "{}"),
    "norm": (
        "penalty = torch.norm(h, p=2)",
        "penalty = torch.norm(h, p=2, dim=(1, 2)).mean()",
        "{}\nreturn F.cross_entropy(self.out(h).flatten(0, 1), ids.flatten()) + penalty",
    ),
    "valid positions": (
        "loss = F.cross_entropy(self.out(h).flatten(0, 1), target.flatten())",
        "loss = F.cross_entropy(self.out(h).flatten(0, 1), target.flatten(), reduction='none').mean()",
        "{}\nreturn loss",
    ),
    "number of valid positions": (
        "loss = losses.sum() / (target >= 0).sum()",
        "loss = losses.mean()",
        "losses = F.cross_entropy(self.out(h).transpose(1, 2), target, reduction='none')\n{}\nreturn loss",
    ),
    "second of two on a line": (
        "h = h.mean(1, keepdim=True) * h + h.mean(0)",
        "h = h.mean(1, keepdim=True) * h + h.mean(dim=(1, 2), keepdim=True)",
        "{}",
    ),
    "in place": ("z += h", "z = z + h", "z = torch.zeros(h.shape)\nz += self.shift\n{}\nh = z"),
    "in place method": ("z.add_(h)", "z = z.add(h)", "z = torch.zeros(h.shape)\nz += self.shift\n{}\nh = z"),
    "other arguments": (
        "h = h + torch.embedding(self.items.weight, ids)",
        "h = h + torch.nn.functional.embedding(ids, self.items.weight)",
        "{}",
    ),
    "hook": ("h.register_hook(lambda grad: grad * 2)", "", "{}"),
}  # fmt: skip


@pytest.mark.parametrize("case", PATCHES)
def test_the_suggested_line_is_accepted_in_its_place(case: str, tmp_path: Path) -> None:
    old, new, body = PATCHES[case]
    if "two" in case and sys.version_info < (3, 11):
        pytest.skip("Python does not tell which of several expressions runs")
    path = written(tmp_path, "refused", body.format(old))
    refusal = refusal_of(lambda: run(path))
    assert refusal.suggestion == ((f"- {old}", f"+ {new}") if new else (f"- {old}",))
    patched = path.read_text().replace(old, new or "pass")
    (tmp_path / "patched.py").write_text(patched)
    run(tmp_path / "patched.py")


def test_file_line_operation_shapes_and_statement(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "lines",
        "h = h.transpose(0, 1)\ntop = torch.amax(\n    h,\n    dim=1,\n    keepdim=True,\n)\nh = h / top",
    )
    refusal = refusal_of(lambda: run(path), UnitsMixedError)
    lines = path.read_text().splitlines()
    assert (refusal.file, refusal.function, refusal.operation) == (str(path), "forward", "amax")
    assert lines[refusal.line - 1].strip() == "top = torch.amax("
    assert refusal.source.splitlines()[1:3] == ["    h,", "    dim=1,"]
    assert refusal.operands == ("(7, 5*, 4)",)
    text = str(refusal)
    assert f'File "{path}", line {refusal.line}, in forward' in text and "(* = axis of units)" in text
    assert "clipping" in refusal.risk


def test_a_stock_layers_line_is_the_one_that_calls_it(tmp_path: Path) -> None:
    path = written(tmp_path, "layers", "ids = ids.flip(0)\nh = self.items(ids)\nreturn h.mean()")
    refusal = refusal_of(lambda: run(path))
    assert (refusal.source, refusal.module, refusal.operation) == ("h = self.items(ids)", "items", "embedding")
    assert refusal.origin.startswith("'flip' (") and str(path) in refusal.origin
    assert refusal.operands == ("(5, 7) of all units", "'items.weight' (20, 4)")
    assert "put together across the units" in refusal.reason


def test_a_mean_over_what_a_mask_picks_names_its_line(tmp_path: Path) -> None:
    body = "h = self.out(h)\npicked = h[target >= 0]\nreturn picked.square().mean()"
    path = written(tmp_path, "lost", body)
    refusal = refusal_of(lambda: run(path), UnitsMixedError)
    assert refusal.source == "return picked.square().mean()" and refusal.operation == "mean"


def test_the_message_of_a_private_step_has_the_line_too(tmp_path: Path) -> None:
    path = written(tmp_path, "stepped", "h = h - h.mean(0)\nreturn self.out(h).sum((1, 2))")
    data = batch()
    _, module, optimizer, loader = make_private(
        loaded(path).Model(), loader_of(data["ids"], data["target"], batch_size=5), poisson_sampling=False
    )
    ids, target = next(iter(loader))
    refusal = refusal_of(lambda: module(ids, target), UnitsMixedError)
    assert refusal.source == "h = h - h.mean(0)" and refusal.operands == ("(5*, 7, 4)", "(7, 4) of all units")


def test_errors_travel_and_are_told_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "travelling", "h = h - h.mean(0)")
    with pytest.raises(UnitsMixedError) as caught:
        run(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.refusal == caught.value.refusal
    line = one_line(again)
    assert "\n" not in line and line.endswith(f"({path}:{again.refusal.line})")


def test_a_step_that_refuses_nothing_walks_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk() -> None:
        raise AssertionError("frames were walked")

    for module in ("places", "refused", "tape"):
        monkeypatch.setattr(f"sparsedp.capture.{module}.place_in_code", walk)
    model = Apply(lambda m, i: m.out(m.items(i).relu()).sum((1, 2)), items=nn.Embedding(9, 4), out=nn.Linear(4, 1))
    _, module, optimizer, loader = make_private(
        model, loader_of(torch.randint(9, (8, 3)), torch.randn(8), batch_size=4)
    )
    for ids, target in loader:
        optimizer.zero_grad()
        (module(ids) - target).square().mean().backward()
        optimizer.step()


# ---------------------------------------------------------------------- wrong reasons, and errors that were not ours


def squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


X, Y = torch.randn(UNITS, DIM), torch.randn(UNITS)


def test_tensordot_does_not_write_in_place() -> None:
    model = Apply(
        lambda m, x: torch.tensordot(x, m.w, dims=([1, 2], [0, 1])).sum(1), w=nn.Parameter(torch.randn(3, 4, 2))
    )
    sparsedp.check(model, squares, (torch.randn(UNITS, 3, 4), Y))


def test_rows_that_the_loop_made_are_not_called_units() -> None:
    model = Apply(
        lambda m, x: m.l(x.reshape(3, UNITS, DIM).transpose(0, 1).reshape(3 * UNITS, DIM)), l=nn.Linear(DIM, 1)
    )
    _, module, optimizer, loader = make_private(
        model, loader_of(torch.randn(UNITS, 3, DIM), Y, batch_size=UNITS), poisson_sampling=False
    )
    x, _ = next(iter(loader))
    with pytest.raises(UnsupportedError, match="15 rows that the module was called with, while the batch has 5 units"):
        module(x.flatten(0, 1))


def test_a_mean_over_valid_positions_is_not_told_to_use_layer_norm() -> None:
    model = Apply(
        lambda m, ids, target: F.cross_entropy(m.e(ids).flatten(0, 1), target.flatten()), e=nn.Embedding(20, 20)
    )
    data = batch()
    with pytest.raises(UnitsMixedError, match="number of valid positions") as caught:
        sparsedp.check(model, lambda out, _: out, (data["ids"], data["target"], Y))
    assert "LayerNorm" not in str(caught.value)


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "Python"])
def test_random_losses_are_called_random(draw: Callable[[], float]) -> None:
    with pytest.raises(SparseDPError, match="draws random numbers") as caught:
        sparsedp.check(nn.Linear(DIM, 1), lambda out, y: squares(out[:, 0] * draw(), y), (X, Y))
    assert "report" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.g[:, None] * m.v / m.v.norm(dim=1, keepdim=True)).sum(1),
        lambda m, x: torch.cdist(x[:, None], m.v).sum((1, 2)) + m.g.sum(),
        lambda m, x: (x @ torch.linalg.solve(m.v + 9 * torch.eye(DIM), m.v.T)).sum(1) + (m.g * x).sum(1),
    ],
    ids=["weight norm", "unit by unit", "solve"],
)  # fmt: skip
def test_anomaly_mode_changes_nothing(function: Callable) -> None:
    model = Apply(function, g=nn.Parameter(torch.randn(DIM)), v=nn.Parameter(torch.randn(DIM, DIM)))
    with torch.autograd.detect_anomaly(check_nan=True):
        sparsedp.check(model, squares, (X, Y))


def test_a_penalty_in_the_loss_is_told_of_weight_decay() -> None:
    model = nn.Linear(DIM, 1)
    penalty: Callable[[Tensor, Tensor], Tensor] = lambda out, y: squares(out[:, 0], y) + model.weight.norm()  # noqa: E731
    with pytest.raises(SparseDPError, match="weight_decay"):
        sparsedp.check(model, penalty, (X, Y))
    _, module, optimizer, loader = make_private(model, loader_of(X, Y, batch_size=UNITS), poisson_sampling=False)
    x, y = next(iter(loader))
    with pytest.raises(SparseDPError, match="weight_decay"):
        penalty(module(x), y).backward()


def test_a_penalty_on_looked_up_rows_of_all_units_is_told_of_weight_decay() -> None:
    model = Apply(lambda m, ids: (h := m.e(ids)).square().mean() + torch.norm(h), e=nn.Embedding(20, 4))
    with pytest.raises(UnitsMixedError, match="weight_decay"):
        sparsedp.check(model, lambda out, _: out, (batch()["ids"], Y))


def test_a_parameter_added_to_zeros_is_exact() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), DIM)
        z += m.p
        return (z * m.l(x)).sum(1)

    sparsedp.check(Apply(function, p=nn.Parameter(torch.randn(DIM)), l=nn.Linear(DIM, DIM)), squares, (X, Y))


def test_an_error_of_a_rule_becomes_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in capture alone is refused by name; what goes wrong in the model itself is the model's error."""
    from sparsedp.capture.ops.registry import AXIS_RULES

    def broken(*_: Any) -> None:
        return [][0]

    model = Apply(lambda m, x: m.l(x.sin()).sum(1), l=nn.Linear(DIM, 1))
    with monkeypatch.context() as patched:
        patched.setitem(AXIS_RULES, "sin", broken)
        with pytest.raises(UnsupportedError, match=r"'sin' cannot be followed in this form.*IndexError") as caught:
            sparsedp.check(model, squares, (X, Y))
    assert caught.value.refusal is not None and isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize(
    "function, error",
    [
        (lambda m, x: m.l(x[:, 17]), IndexError),
        (lambda m, x: m.l(x @ x), RuntimeError),
        (lambda m, x: m.l(x).clone().index_fill_(0, torch.tensor([99]), 0.0), IndexError),
        (lambda m, x: m.l.weight.add_(1), RuntimeError),
    ],
)  # fmt: skip
def test_errors_of_the_model_stay_as_they_are(function: Callable, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        sparsedp.check(Apply(function, l=nn.Linear(DIM, 1)), squares, (X, Y))
    assert not isinstance(caught.value, SparseDPError)


# ---------------------------------------------------------------------- layers, before training

LAYERS: dict[str, tuple[nn.Module, tuple[str, ...], nn.Module]] = {
    "flat": (nn.BatchNorm1d(6), ("- self.part = nn.BatchNorm1d(6)", "+ self.part = nn.GroupNorm(1, 6)"), nn.GroupNorm(1, 6)),
    "image": (nn.BatchNorm2d(6), ("- self.part = nn.BatchNorm2d(6)", "+ self.part = nn.GroupNorm(3, 6)"), nn.GroupNorm(3, 6)),
    "lstm": (nn.LSTM(4, 3), ("- self.part = nn.LSTM(4, 3)", "+ self.part = sparsedp.nn.LSTM(4, 3)"), sparsedp.nn.LSTM(4, 3)),
    "max_norm": (
        nn.Embedding(9, 4, max_norm=1.0),
        ("- self.part = nn.Embedding(9, 4, max_norm=1.0)", "+ self.part = nn.Embedding(9, 4)"),
        nn.Embedding(9, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_refused_with_the_one_to_take_instead(case: str) -> None:
    from sparsedp.refusals import refuse_module

    layer, suggestion, instead = LAYERS[case]
    refusal = refusal_of(lambda: refuse_module(Apply(lambda m, x: x, part=layer)), UnsupportedError)
    assert refusal.suggestion == suggestion and refusal.module == "part"
    refuse_module(Apply(lambda m, x: x, part=instead))


def test_logsigmoid_keeps_units_in_their_places() -> None:
    sparsedp.check(Apply(lambda m, x: m.l(F.logsigmoid(m.l(x))).sum(1), l=nn.Linear(DIM, DIM)), squares, (X, Y))
    with pytest.raises(SparseDPError):
        sparsedp.check(
            Apply(lambda m, x: m.l(F.logsigmoid(m.l(x)).flip(0)).sum(1), l=nn.Linear(DIM, DIM)), squares, (X, Y)
        )


def test_losses_of_flattened_positions_are_followed_one_by_one() -> None:
    """reduction='none' on (units * positions, classes), which suggestions write; class weights that units decide mix them."""
    data = batch()
    inputs = (data["ids"], data["target"], Y)

    def flat(m: Any, ids: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(m.e(ids).flatten(0, 1), target.flatten(), reduction="none")
        return m.l(losses.unflatten(0, (len(ids), -1))).sum(1)

    sparsedp.check(Apply(flat, e=nn.Embedding(20, 20), l=nn.Linear(LENGTH, 2)), squares, inputs)

    def weighted(m: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(m.l(x), target, weight=x[:, 0].exp(), reduction="none")

    classes = torch.randint(0, UNITS, (UNITS,))
    with pytest.raises(UnitsMixedError, match="'cross_entropy' combines"):
        sparsedp.check(Apply(weighted, l=nn.Linear(DIM, UNITS)), squares, (X, classes, Y))
