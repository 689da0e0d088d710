"""`python -m benchmarks language`: all rows and fields, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks.command import main
from benchmarks.speed import budget
from benchmarks.speed.language import measure as language
from benchmarks.speed.language.models import SMALL, SMALL_CAUSAL, encoder
from benchmarks.speed.language.opacus_steps import why_not
from benchmarks.speed.language.page import page
from benchmarks.speed.peaks import Peak

pytestmark = pytest.mark.models


def test_all_rows_and_fields(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(language, "peaks", lambda make, args, small: {name: Peak(3, 2) for name in make(*small)})
    result = language.bench_language(["minilm"], repeats={"minilm": 1, "opacus": 1, "tables": 1}, small=True)
    assert {(row["way"], row["variant"]) for row in result["rows"]} >= {
        (way, variant) for way in ("lora", "full") for variant in ("plain", "dpsgd", "adafest")
    }
    gone = {(row["way"], row["variant"]) for row in result["left_out"]}
    ran = {(row["way"], row["variant"]) for row in result["rows"]}
    assert gone | ran >= {(way, mode) for way in ("lora", "full") for mode in language.MODES} and not gone & ran
    for row in result["rows"] + result["tables"] + result["causal"]:
        assert 0 < row["best"] <= row["median"] and row["memory"] == 2 and row["memory_ratio"] == 1
        if row["variant"] == "plain":
            assert row["ratio_to_plain"] == {"best": 1.0, "median": 1.0}
    assert [row["variant"] for row in result["causal"]] == ["plain_logits", "plain", "adafest", "lazydp", "dpsgd_tied"]
    fewest = result["tables"][0]["rows"]
    assert all((row["ratio_to_fewest"]["best"] == 1) for row in result["tables"] if row["rows"] == fewest)
    text = page(json.loads(json.dumps(result)), [])
    assert "| MiniLM-L6, LoRA and word embeddings | AdaFEST |" in text and "## A table alone" in text
    found = {line.what for line in budget.LINES for _ in line.find({"language": result})}
    assert len([what for what in found if "language" in what]) == 4


def test_what_is_trained() -> None:
    """LoRA trains its adapters, the class and the words; in full, everything is trained."""
    for model in SMALL:
        for way in ("lora", "full"):
            module = encoder(SMALL[model], way).make(True)
            trained = {name for name, p in module.named_parameters() if p.requires_grad}
            frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
            assert module.get_input_embeddings().weight.requires_grad and module.training
            assert bool(frozen) == (way == "lora")
            if way == "lora":
                kinds = ("lora_", "word_embeddings", "classifier.modules_to_save")
                assert all(any(kind in name for kind in kinds) for name in trained)
                assert any("lora_A" in name for name in trained)


def test_tied_words_are_one_table_and_others_two() -> None:
    for variant, tied in (("adafest", False), ("dpsgd_tied", True)):
        module = language.causal_work(variant, SMALL_CAUSAL).make(False)
        words, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        assert (words is head) == tied and words.requires_grad and head.requires_grad == tied


def test_hooks_without_room_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.speed.language.opacus_steps._ROOM", 10)
    work = encoder(SMALL["minilm"], "lora")
    said = why_not(work, work, "hooks")
    assert said is not None and "would take" in said


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["language", "--quick", "--model=minilm", f"--json={out}", f"--plots={tmp_path / 'plots'}"]) == 0
    assert list(json.loads(out.read_text())["sizes"]) == ["minilm"]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "language_minilm_lora.png",
        "language_minilm_full.png",
    }
