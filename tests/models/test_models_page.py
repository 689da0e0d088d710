"""docs/models.md says what expected.tsv and opacus.tsv hold."""

from __future__ import annotations

import pytest
from model_matrix import page
from model_matrix.cases import CASES
from model_matrix.opacus_results import MODES, read


def test_the_page_on_disk_is_what_the_results_give() -> None:
    assert page.FILE.read_text() == page.page(), "python -m model_matrix.page, in tests/models, writes it anew"


def test_opacus_ran_every_case() -> None:
    results = read()
    assert set(results) == {case.name for case in CASES}
    assert {verdict for result in results.values() for verdict in result.verdicts.values()} <= {
        "works", "wrong", "refused", "unjudged",
    }  # fmt: skip


def test_the_page_counts_every_model_once() -> None:
    text = page.page()
    apart, mixing = text.split("## Models that do not")
    models = int(next(line for line in apart.splitlines() if line.startswith("| **all**")).split("|")[2])
    ours = next(line for line in mixing.splitlines() if line.startswith("| SparseDP")).split("|")
    assert models + sum(map(int, ours[2:5])) == len(CASES)


@pytest.mark.parametrize("mode", MODES)
def test_opacus_judgements_are_of_both_kinds(mode: str) -> None:
    verdicts = {result.verdicts[mode] for result in read().values()}
    assert {"works", "wrong", "refused"} <= verdicts
