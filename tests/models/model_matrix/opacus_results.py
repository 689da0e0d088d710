"""What became of the cases with Opacus, from opacus.tsv, which `python -m model_matrix.opacus_steps` writes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("opacus.tsv")
MODES = ("hooks", "ghost")
COLUMNS = ("case", *MODES, *(f"{mode}_reason" for mode in MODES))


@dataclass(frozen=True)
class OpacusResult:
    """By mode: 'works', 'wrong', 'refused' or 'unjudged', and why."""

    verdicts: Mapping[str, str]
    reasons: Mapping[str, str]


def read() -> dict[str, OpacusResult]:
    """By case."""
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {
        line["case"]: OpacusResult(
            {mode: line[mode] for mode in MODES}, {mode: line[f"{mode}_reason"] for mode in MODES}
        )
        for line in lines
    }


def write(results: Mapping[str, OpacusResult], order: Sequence[str]) -> None:
    lines = ["\t".join(COLUMNS)]
    for name in (name for name in order if name in results):
        result = results[name]
        lines.append(
            "\t".join((name, *(result.verdicts[mode] for mode in MODES), *(result.reasons[mode] for mode in MODES)))
        )
    FILE.write_text("\n".join(lines) + "\n")
