"""What judges other people's models judges these rightly: one that is exact, wrong steps, a refusal, and a check that disagrees."""

from __future__ import annotations

import pytest
import torch
from model_matrix.expected import Expectation, words_of
from model_matrix.harness import SIZES, Case, Reference, run_case
from torch import Tensor, nn

import sparsedp
from support import Apply, Clicks, clicks


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, target)


def _case(build=Clicks, loss=_loss, **options) -> Case:
    return Case("own", "torch", build, clicks, loss, **options)


def test_an_exact_model_works_in_every_stage() -> None:
    result = run_case(_case())
    assert set(result.stages) == {"dpsgd", "check", "adafest", "lazydp", "empty"}
    assert result.verdict == "works" and result.reason == ""


@pytest.mark.parametrize("factor", [0.99, 1.001])
def test_a_unit_that_is_clipped_otherwise_is_seen(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    true = sparsedp.Clipping.factors
    monkeypatch.setattr(sparsedp.Clipping, "factors", lambda self, norms: true(self, norms) * factor)
    result = run_case(_case())
    assert result.verdict == "wrong" and "of its size" in result.reason


def test_a_penalty_inside_of_a_units_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # A loss that has no penalty, held against a reference that expects one.
    result = run_case(_case(penalty=lambda module: module.out.weight.square().sum()))
    assert result.verdict == "wrong"


def test_batch_statistics_are_refused() -> None:
    def build() -> nn.Module:
        return Apply(lambda m, ids, x: m.out(m.norm(x)).squeeze(-1), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 1))

    result = run_case(_case(build))
    assert (
        result.verdict == "refused"
        and words_of(result.reason) == "(BatchNorm1d): batch statistics mix the units of a batch"
    )
    assert Expectation("refused", reason="batch statistics").fits(result.verdict, result.reason)


def test_the_step_and_check_may_not_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **options) -> None:
        raise sparsedp.UnsupportedError("not this one")

    monkeypatch.setattr(sparsedp, "check", refuse)
    result = run_case(_case())
    assert result.verdict == "check_disagrees" and result.reason == "[check] refused: not this one"


def test_the_limit_for_small_parameters_is_lowered() -> None:
    def build() -> nn.Module:  # an operation without a rule of its own, which may take small parameters alone
        return Apply(lambda m, ids, x: torch.cdist(x, m.weight).sum(1), weight=nn.Parameter(torch.randn(50, 3)))

    assert run_case(_case(build)).verdict == "works"
    assert run_case(_case(build), "large").verdict == "refused"


def test_a_reference_that_fails_serves_both_sizes() -> None:
    def build() -> nn.Module:
        return Apply(lambda m, ids, x: m.out(m.norm(x)).squeeze(-1), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 1))

    case = _case(build)
    reference = Reference(case)
    verdicts = [run_case(case, sizes, reference).verdict for sizes in SIZES]
    assert verdicts == ["refused", "refused"]


def test_an_example_without_a_gradient_is_compared_too() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:  # of the examples whose target is 1 alone
        return (target * output.square()).mean()

    assert run_case(_case(loss=loss)).verdict == "works"
