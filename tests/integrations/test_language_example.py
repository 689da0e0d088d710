"""examples/fine_tune_language_model.py, with a tiny random model: end to end, with canaries."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

pytestmark = pytest.mark.models

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune_language_model.py"


@pytest.mark.filterwarnings("ignore::sparsedp.UtilityWarning")
def test_it_trains_and_says_what_came_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--tiny", "--steps=2", "--epsilon=5"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    before, after = (float(re.search(rf"perplexity {when}: ([\d.]+)", out).group(1)) for when in ("before", "after"))  # type: ignore[union-attr]
    assert 200 < before < 320 and before != after  # a random model of 260 tokens
    assert "168 texts, of which 18 are canaries" in out and "canaries: " in out
    epsilon = float(re.search(r"epsilon = ([\d.]+) at", out).group(1))  # type: ignore[union-attr]
    assert 4 < epsilon <= 5
    assert "accounting:   2 steps" in out


def test_texts_are_cut_and_padded_to_one_width() -> None:
    names = runpy.run_path(str(EXAMPLE))
    texts = names["docstrings"](5)
    assert len(set(texts)) == 5 and min(map(len, texts)) >= 40 and texts == names["docstrings"](5)
    rows = names["Texts"](texts, lambda text: list(text.encode()), 8)
    batch = names["collate"]([rows[0], rows.row("abc")], 8)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (2, 8)
    assert batch["labels"][1].tolist() == [97, 98, 99, *[-100] * 5] and batch["attention_mask"][1].sum() == 3
    assert names["collate"]([], 8)["input_ids"].shape == (0, 8)
