"""What does not work, by case, from expected.tsv: a verdict, whether rightly, and words of the reason.

A case has a line for its tiny sizes and one for large ones (the limit for small parameters lowered), or one for both.
`python -m model_matrix --update` writes the lines of the cases that it ran anew.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_matrix.harness import SIZES, Sizes

FILE = Path(__file__).with_name("expected.tsv")
COLUMNS = ("case", "sizes", "verdict", "rightly", "reason")
# Where words that name the cause end: what follows are names and shapes of the case.
_ENDS = re.compile(
    r" in module '| on parameter '|: (its|the|units|it) | combines | into shape | because |, which|(?<=\w)\. |; \["
)


@dataclass(frozen=True)
class Expectation:
    """Of a case. `rightly`: it mixes units, keeps private data, or fails without us; nothing is to be mended."""

    verdict: str
    rightly: bool = False
    reason: str = ""

    def fits(self, verdict: str, reason: str) -> bool:
        return verdict == self.verdict and self.reason in reason


def read(sizes: Sizes) -> dict[str, Expectation]:
    """The cases that are expected to do anything else than to work."""
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {
        line["case"]: Expectation(line["verdict"], line["rightly"] == "rightly", line["reason"])
        for line in lines
        if line["sizes"] in ("both", sizes)
    }


def update(results: Mapping[str, tuple[str, str]], order: Sequence[str], sizes: Sizes) -> None:
    """Writes the verdicts and reasons of `results`, by case, for `sizes`; whether rightly stays as it was."""
    tables = {each: read(each) for each in SIZES}
    for name, (verdict, reason) in results.items():
        before = tables[sizes].pop(name, Expectation("works"))
        if before.fits(verdict, reason) and verdict != "works":
            tables[sizes][name] = before
        elif verdict != "works":
            tables[sizes][name] = Expectation(verdict, before.rightly, words_of(reason))
    lines = ["\t".join(COLUMNS)]
    for name in order:
        tiny, large = tables["tiny"].get(name), tables["large"].get(name)
        for which, expectation in (("both", tiny),) if tiny == large else (("tiny", tiny), ("large", large)):
            if expectation is not None:
                rightly = "rightly" if expectation.rightly else ""
                lines.append("\t".join((name, which, expectation.verdict, rightly, expectation.reason)))
    FILE.write_text("\n".join(lines) + "\n")


def words_of(reason: str) -> str:
    """The words of a case's reason by which it is known again, those of its first stage."""
    said = re.sub(r"^\[[^]]*\] \w+: ((batch of \d+|make_private): )?", "", reason)
    end = _ENDS.search(said, 12)
    said = said[: end.start()] if end else said
    return re.sub(r"^Module '[^']*' ", "", said)[:90].strip()
