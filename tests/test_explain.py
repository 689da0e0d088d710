"""sparsedp.explain tells the whole way of the units, and everything that is refused, and changes nothing."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from sparsedp import SparseDPError
from support import Apply, Clicks, clicks, loader_of, make_private

UNITS, LENGTH, DIM = 5, 7, 4
X, Y = torch.randn(UNITS, DIM), torch.randn(UNITS)
IDS = torch.randint(0, 20, (UNITS, LENGTH))


def squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def bce(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y)


def test_the_page_about_it_shows_what_it_prints(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "explain.md").read_text(encoding="utf-8")
    model, call = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    error, printed = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.py").write_text(model)
    scope: dict[str, Any] = {}
    exec(compile(model, str(tmp_path / "model.py"), "exec", dont_inherit=True), scope)
    exec(compile(call, "<call>", "exec", dont_inherit=True), scope)
    assert str(scope["explanation"]).replace(f"{tmp_path}/", "") == printed.rstrip()
    with pytest.raises(sparsedp.UnitsMixedError) as caught:
        sparsedp.check(scope["Model"](), F.cross_entropy, (scope["ids"], scope["target"]))
    raised = f"UnitsMixedError: {caught.value}".replace(f"{tmp_path}/", "")
    assert raised == " ".join(error.split("\n")[:3]) + "\n" + "\n".join(
        error.rstrip().split("\n")[3:]
    )  # which is wrapped


class Faulty(nn.Module):
    """Four refusals, of which a step would show the first."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.items(ids).mean(1)
        h = self.norm(h)
        h = h - h.mean(0)
        top = h.abs().max()
        scores = (h / top) @ h.T
        return self.out(scores @ h)[:, 0]


def test_all_refusals_at_once_each_with_its_line() -> None:
    explanation = sparsedp.explain(Faulty(), squares, (IDS, Y))
    assert not explanation.ok and explanation.units == UNITS
    lines = [refusal.source for refusal in explanation.refusals]
    assert lines == [
        "h = self.norm(h)",
        "h = h - h.mean(0)",
        "top = h.abs().max()",
        "scores = (h / top) @ h.T",
        "return self.out(scores @ h)[:, 0]",
    ]
    assert all(refusal.file == __file__ and "*" in " ".join(refusal.operands) for refusal in explanation.refusals)
    text = str(explanation)
    assert "Refusal 5 of 5" in text and "+ self.norm = nn.GroupNorm(1, 4)" in text
    assert "embedding: (5*, 7), 'items.weight' (20, 4) -> (5*, 7, 4)   [items]" in text


def test_layers_of_one_kind_have_their_places_each() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    module = Apply(lambda m, x: m.l(m.two(m.one(x)))[:, 0], one=Block(), two=Block(), l=nn.Linear(DIM, 1))
    refusals = sparsedp.explain(module, squares, (X, Y)).refusals
    assert [(refusal.module, refusal.source) for refusal in refusals] == [
        ("one.norm", "return self.norm(x)"),
        ("two.norm", "return self.norm(x)"),
    ]


def test_the_first_refusal_is_the_one_of_a_step() -> None:
    module = Faulty()
    module.norm = nn.Identity()  # type: ignore[assignment]
    first = sparsedp.explain(module, squares, (IDS, Y)).refusals[0]
    with pytest.raises(sparsedp.UnitsMixedError) as caught:
        sparsedp.check(module, squares, (IDS, Y))
    assert caught.value.refusal == first


def test_the_way_of_a_sound_model() -> None:
    explanation = sparsedp.explain(Clicks(), bce, clicks(8))
    assert explanation.ok and explanation.refusals == () and explanation.notes == ()
    way = [(step.operation, step.outputs) for step in explanation.operations]
    assert way[0] == ("embedding", ("(8*, 6)",)) and ("cat", ("(8*, 9)",)) in way
    assert way[-1] == ("binary_cross_entropy_with_logits", ("() of all units",))
    assert [step.module for step in explanation.operations][-1] == "the loss"
    assert "Nothing is refused" in str(explanation)


def test_json_holds_all_of_it() -> None:
    explanation = sparsedp.explain(Faulty(), squares, (IDS, Y))
    told = json.loads(json.dumps(explanation.to_dict()))
    assert told["ok"] is False and told["units"] == UNITS
    assert len(told["operations"]) == len(explanation.operations)
    assert told["refusals"][1]["suggestion"] == list(explanation.refusals[1].suggestion)
    assert [step["refused"] for step in told["operations"]].count(True) == 5


class Restless(nn.Module):
    """Draws from everybody's generators, changes a buffer and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(DIM, 1)
        self.register_buffer("mean", torch.zeros(DIM))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        x.mul_(2.0)
        factor = random.random() + np.random.rand()
        return self.line(self.drop(x) * factor)[:, 0]


def test_nothing_is_changed() -> None:
    module = Restless()
    squares(module(X.clone()), Y).backward()
    state, grads = copy.deepcopy(module.state_dict()), [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
    x = X.clone()
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    hooks = [len(part._forward_pre_hooks) for part in module.modules()]
    explanation = sparsedp.explain(module, squares, (x, Y))
    assert {refusal.source for refusal in explanation.refusals} == {
        "self.mean = 0.9 * self.mean + 0.1 * x.mean(0)",
        "return self.line(self.drop(x) * factor)[:, 0]",
    }
    assert torch.equal(x, X) and module.training
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), grads))  # type: ignore[arg-type]
    assert random.getstate() == python and torch.equal(torch.get_rng_state(), torchs)
    assert all(np.array_equal(now, was) for now, was in zip(np.random.get_state(), numpy))
    assert [len(part._forward_pre_hooks) for part in module.modules()] == hooks


def test_the_gradients_and_buffers_of_a_loss_stay_as_they_are() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return squares(self.scale * out[:, 0], target)

    loss = Scaled()
    assert sparsedp.explain(nn.Linear(DIM, 1), loss, (X, Y)).ok
    assert loss.scale.grad is None and float(loss.calls) == 0  # type: ignore[arg-type]


def test_nothing_that_it_returns_can_be_trained_on() -> None:
    """It keeps texts and numbers alone: no tensor, no module."""
    explanation = sparsedp.explain(Faulty(), squares, (IDS, Y))

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        if isinstance(value, (tuple, list)):
            return all(map(plain, value))
        return isinstance(value, (str, int, bool))

    for part in (*explanation.operations, *explanation.refusals):
        assert plain(vars(part))


def test_works_on_a_private_module_and_leaves_it_private() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    assert sparsedp.explain(module, bce, clicks(8)).ok
    assert sparsedp.explain(module, bce, data_loader=loader).ok
    assert engine.ledger.steps == 0
    for ids, features, y in loader:
        optimizer.zero_grad()
        bce(module(ids, features), y).backward()
        optimizer.step()
    assert engine.ledger.steps == len(loader)


def test_batches_that_are_dicts() -> None:
    module = Apply(lambda m, x: m.l(x)[:, 0], l=nn.Linear(DIM, 1))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return squares(self.inner(x), y)

    assert sparsedp.explain(Named(), lambda out, batch: out, {"x": X, "y": Y}).ok


def test_nested_tensors_have_no_shape() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return (m.l(x) * torch.nested.nested_tensor([x.mean(0)]).to_padded_tensor(0.0)[0]).sum(1)

    explanation = sparsedp.explain(Apply(function, l=nn.Linear(DIM, DIM)), squares, (X, Y))
    assert not explanation.ok and "a nested tensor" in str(explanation)


def test_inputs_without_units_are_noted() -> None:
    module = Apply(lambda m, x, scale: m.l(x)[:, 0] * scale, l=nn.Linear(DIM, 1))
    explanation = sparsedp.explain(module, squares, (X, torch.tensor(2.0), Y))
    assert (
        explanation.ok and "'inputs[1]' of shape ()" in explanation.notes[0] and "public_inputs" in explanation.notes[0]
    )


# ---------------------------------------------------------------------- the loss

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "centred": (lambda out, y: ((out[:, 0] - out.mean()) - y).square().mean(), "combines each unit"),
    "in-batch negatives": (lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out))), "every other one"),
    "divisor": (lambda out, y: (out[:, 0] * y).sum() / y.abs().sum(), "acts on a sum or mean"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_losses_are_followed_too(case: str) -> None:
    loss, words = LOSSES[case]
    refusals = sparsedp.explain(nn.Linear(DIM, 1), loss, (X, Y)).refusals
    assert len(refusals) == 1 and words in refusals[0].reason and refusals[0].file == __file__


def test_penalties_in_the_loss_are_told_of_weight_decay() -> None:
    module = nn.Linear(DIM, 1)
    explanation = sparsedp.explain(module, lambda out, y: squares(out[:, 0], y) + module.weight.norm(), (X, Y))
    assert len(explanation.refusals) == 1 and "weight_decay" in explanation.refusals[0].reason
    assert "'weight'" in explanation.refusals[0].reason and explanation.refusals[0].file == __file__


def test_penalties_in_forward_are_noted() -> None:
    module = Apply(lambda m, x: m.l(x).square().mean() + m.l.weight.norm(), l=nn.Linear(DIM, 1))
    explanation = sparsedp.explain(module, lambda out, y: out, (X, Y))
    assert explanation.ok and "'l.weight' alone" in explanation.notes[0] and "weight_decay" in explanation.notes[0]


def test_what_a_loss_does_that_is_not_followed_is_noted_and_not_refused() -> None:
    """A step takes it, as it does not look into the loss, and check compares it."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.multi_dot([out[:, 0] - y, torch.eye(UNITS), out[:, 0] - y]) / UNITS

    explanation = sparsedp.explain(nn.Linear(DIM, 1), loss, (X, Y))
    assert explanation.ok and "sparsedp.check" in explanation.notes[0]


def test_a_loss_on_positions_that_a_mask_picks() -> None:
    """How many there are is everybody's: the mean divides by it."""
    module = Apply(lambda m, ids: m.e(ids)[ids > 9], e=nn.Embedding(20, DIM))
    ids = IDS.clone()
    ids[:, 0], ids[0, 1] = 10, 15
    refusals = sparsedp.explain(module, lambda out, y: out.square().mean(), (ids, Y)).refusals
    assert [refusal.operation for refusal in refusals] == ["mean"] and refusals[0].file == __file__


def test_custom_functions_and_what_comes_after_them() -> None:
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x - x.mean(0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    def function(m: Any, x: Tensor) -> Tensor:
        h = Centred.apply(m.l(x))
        return (h / h.max())[:, 0]

    refusals = sparsedp.explain(Apply(function, l=nn.Linear(DIM, 3)), squares, (X, Y)).refusals
    assert [refusal.operation for refusal in refusals] == ["Centred", "max"]
    assert refusals[0].source == "h = Centred.apply(m.l(x))"


# ---------------------------------------------------------------------- what it cannot explain


@pytest.mark.parametrize(
    "module, loss, batch, words",
    [
        (nn.Linear(DIM, 1), squares, (X[:0], Y[:0]), "at least 2 units.*has 0"),
        (nn.Linear(DIM, 1), squares, (X[:1], Y[:1]), "at least 2 units.*has 1"),
        (nn.Linear(DIM, 1), squares, None, "nothing to explain on"),
        (nn.Linear(DIM, 1), squares, X, "what the loader yields"),
        (nn.Linear(DIM, 1), squares, (X,), "what the loader yields"),
        (nn.Linear(DIM, 1), squares, {}, "what the loader yields"),
        (nn.ReLU(), squares, (X, Y), "no parameter"),
        (nn.Linear(DIM, 1).requires_grad_(False), squares, (X, Y), "no parameter"),
        (nn.Linear(DIM, 1), lambda out, y: (out[:, 0] - y).square(), (X, Y), r"shape \(5,\).*one number"),
        (nn.Linear(DIM, 1), lambda out, y: 1.0, (X, Y), "The loss is float"),
        (nn.Linear(DIM, 1), lambda out, y: out.detach().mean(), (X, Y), "does not depend on any trained parameter"),
    ],
)  # fmt: skip
def test_bad_input_is_named(module: nn.Module, loss: Any, batch: Any, words: str) -> None:
    with pytest.raises(SparseDPError, match=words):
        sparsedp.explain(module, loss, batch)


def test_a_module_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        sparsedp.explain(lambda x: x, squares, (X, Y))  # type: ignore[arg-type]


def test_errors_of_the_model_are_the_models() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        sparsedp.explain(Apply(lambda m, x: m.l(x.T), l=nn.Linear(DIM, 1)), squares, (X, Y))

    def function(m: Any, x: Tensor) -> Tensor:
        h = m.l(x)
        h = h - h.mean(0)
        raise RuntimeError("out of ideas")

    explanation = sparsedp.explain(Apply(function, l=nn.Linear(DIM, 1)), squares, (X, Y))
    assert len(explanation.refusals) == 1 and "out of ideas" in explanation.notes[0]


def test_surroundings_that_a_step_refuses() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        explanation = sparsedp.explain(Clicks(), bce, clicks(8))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [refusal.reason.split()[0] for refusal in explanation.refusals] == ["torch.set_float32_matmul_precision,"]
