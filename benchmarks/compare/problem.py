"""What is compared: a part of the benchmark, its sizes, and some of its variants."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "plain"  # PyTorch alone: the same in both processes, so its ratio shows how far the machine can be trusted
VARIANTS = {
    "step": (PLAIN, "dpsgd", "adafest", "eana", "lazydp"),
    "vocabulary": (PLAIN, "dpsgd", "adafest", "fest", "eana", "exponential", "lazydp"),
    "tied": (PLAIN, "logits", "softmax", "adafest", "lazydp"),
}


@dataclass(frozen=True)
class Problem:
    part: str
    variants: tuple[str, ...]
    batch: int
    rows: int = 0  # of the table, or the items of the tied model
    scale: float = 0.0  # of pCTR's vocabularies
    length: int = 0  # of the tied model's sequences

    def __str__(self) -> str:
        sizes = {
            "step": f"pCTR, vocabularies times {self.scale:g}",
            "vocabulary": f"one table of {self.rows:,} rows",
            "tied": f"tied model, {self.rows:,} items, length {self.length}",
        }
        return f"{sizes[self.part]}, batch {self.batch}"
