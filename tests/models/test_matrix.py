"""The matrix of other people's models: every case does what expected.tsv says of it, and works if that says nothing."""

from __future__ import annotations

import pytest
from model_matrix.cases import CASES
from model_matrix.expected import Expectation, read
from model_matrix.harness import SIZES, Case, Reference, run_case

EXPECTED = {sizes: read(sizes) for sizes in SIZES}


@pytest.mark.models
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_case(case: Case) -> None:
    if not case.is_installed:
        pytest.skip(f"{case.package} is not installed: make test-models")
    reference = Reference(case)
    differing = []
    for sizes in SIZES:
        expected = EXPECTED[sizes].get(case.name, Expectation("works"))
        result = run_case(case, sizes, reference)
        if not expected.fits(result.verdict, result.reason):
            wanted = f"{expected.verdict} ({expected.reason or 'nothing to say'})"
            differing.append(f"{sizes}: expected {wanted}, got {result.verdict}: {result.reason}")
    assert not differing, "\n".join(differing)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_every_expectation_is_of_a_case() -> None:
    assert {name for expected in EXPECTED.values() for name in expected} <= {case.name for case in CASES}
