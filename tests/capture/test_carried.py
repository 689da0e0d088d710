"""Large parameters that are used through computed copies: every operation again, with nothing taken for small."""

from __future__ import annotations

import pytest
import torch

from cases import CASES
from sparsedp.capture import expressions
from support import assert_exact


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed from parameters is carried one unit at a time. Operations without a rule stay as they are."""
    monkeypatch.setattr(expressions, "SMALL", 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_exact(case: str) -> None:
    torch.manual_seed(0)
    assert_exact(*CASES[case]())
