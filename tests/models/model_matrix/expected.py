"""What does not work, by case, from expected.tsv: a verdict, whether rightly, and words of the reason."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from model_matrix.harness import SMALL_VARIABLE, Result

FILE = Path(__file__).with_name("expected.tsv")
COLUMNS = ("case", "sizes", "verdict", "rightly", "reason")


@dataclass(frozen=True)
class Expectation:
    """Of a case. `rightly`: it mixes units, keeps private data, or fails without us; nothing is to be mended."""

    verdict: str
    rightly: bool = False
    reason: str = ""

    def fits(self, result: Result) -> bool:
        return result.verdict == self.verdict and self.reason in result.reason


def read(sizes: str) -> dict[str, Expectation]:
    """The lines for `sizes`: 'tiny', as the cases are, or 'large', with the limit for small parameters lowered."""
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {
        line["case"]: Expectation(line["verdict"], line["rightly"] == "rightly", line["reason"])
        for line in lines
        if line["sizes"] in ("both", sizes)
    }


EXPECTED = read("large" if SMALL_VARIABLE in os.environ else "tiny")
