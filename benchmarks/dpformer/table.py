"""The runs of movielens-sweep.yaml as the DPFormer paper's Table 1, with the paper's numbers beside them, and learning curves.

sparsedp sweep benchmarks/dpformer/movielens-sweep.yaml
python benchmarks/dpformer/table.py runs/dpformer-movielens --plot docs/img/dpformer_curves.png
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

# NDCG@10 and HIT@10 in percent at epsilon 5, 8 and 10: DPFormer, Table 1.
PAPER = {
    "gru": ((2.26, 4.58), (2.40, 4.75), (2.81, 5.53)),
    "lstm": ((2.65, 5.08), (2.76, 5.41), (2.95, 5.55)),
    "untied": ((2.33, 4.47), (2.56, 5.11), (2.74, 5.39)),
    "transformer": ((4.57, 8.69), (7.05, 13.17), (7.99, 14.82)),
    "dpformer": ((5.88, 11.13), (7.70, 14.31), (8.42, 15.40)),
}
EPSILONS = (5.0, 8.0, 10.0)
TITLES = {
    "gru": "GRU",
    "lstm": "LSTM",
    "untied": "Transformer, not tied",
    "transformer": "Transformer",
    "dpformer": "DPFormer",
    "less_noise": "Transformer, less noise",
    "clipped": "Transformer, clipped, no noise",
    "dropout": "Transformer, dropout 0.2",
    "dropout_non_private": "Transformer, dropout 0.2, not private",
    "non_private": "Transformer, not private",
    "frozen": "Transformer, table frozen at random",
}


class Run(NamedTuple):
    variant: str
    epsilon: float | None  # None for a run that is not at a target
    result: dict[str, Any]
    curve: list[tuple[float, float]]  # epoch, NDCG@10 in percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the sweep's folder")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the learning curves there; needs matplotlib")
    args = parser.parse_args()
    runs = [read(path.parents[1]) for path in sorted(args.folder.glob("*/private/result.json"))]
    if not runs:
        raise SystemExit(f"There is no finished run in {args.folder}.")
    runs = with_one_control(runs)
    print("\n".join(lines(runs)))
    if args.plot is not None:
        plot(runs, args.plot)


def read(folder: Path) -> Run:
    result = json.loads((folder / "private/result.json").read_text())
    epsilon = re.search(r"target_epsilon=([\d.]+)", folder.name)
    rows = [json.loads(line) for line in (folder / "private/metrics.jsonl").read_text().splitlines()]
    epochs = int(re.search(r"^  epochs: (\d+)", (folder / "private/config.yaml").read_text(), re.MULTILINE)[1])  # type: ignore[index]
    curve = [
        (epochs * row["step"] / result["planned_steps"], 100 * row["ndcg@10"])
        for row in rows
        if row["kind"] == "evaluation"
    ]
    return Run(folder.name.split(",")[0], float(epsilon[1]) if epsilon else None, result, curve)


def with_one_control(runs: list[Run]) -> list[Run]:
    """Of the control without privacy, which is tried at several rates, the run that is best on the validation half."""
    controls = [run for run in runs if run.variant == "non_private"]
    best = max(controls, key=lambda run: run.result["validation"]["ndcg@10"], default=None)
    return [run for run in runs if run.variant != "non_private" or run is best]


def _percent(result: dict[str, Any]) -> str:
    return f"{100 * result['ndcg@10']:.2f}, {100 * result['hit@10']:.2f}"


def lines(runs: list[Run]) -> list[str]:
    """Markdown: NDCG@10 and HIT@10 in percent, ours and the paper's."""
    cells_of: dict[tuple[str, float | None], list[str]] = {}
    for run in runs:
        cells_of.setdefault((run.variant, run.epsilon), []).append(_percent(run.result))
    heads = " | ".join(f"epsilon {epsilon:g} | paper" for epsilon in EPSILONS)
    table = [f"| NDCG@10, HIT@10, % | {heads} |", "| --- |" + " --- | --- |" * len(EPSILONS)]
    for variant, published in PAPER.items():
        cells = []
        for epsilon, paper in zip(EPSILONS, published):
            cells += ["; ".join(cells_of.get((variant, epsilon), ["-"])), f"{paper[0]:.2f}, {paper[1]:.2f}"]
        table.append(f"| {variant} | {' | '.join(cells)} |")
    first = runs[0].result
    table += ["", "| other runs | NDCG@10, HIT@10, % |", "| --- | --- |"]
    table.append(f"| popularity | {100 * first['popularity_ndcg@10']:.2f}, {100 * first['popularity_hit@10']:.2f} |")
    for run in runs:
        if run.variant not in PAPER:
            at = "" if run.epsilon is None else f", epsilon {run.epsilon:g}"
            table.append(f"| {run.variant}{at} | {_percent(run.result)} |")
    return table


def plot(runs: list[Run], path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot: it keeps global state

    from sparsedp.report.panels import legend_beside

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    # Each half with its own legend beside it: they show different runs.
    left, right = figure.subfigures(1, 2, squeeze=False)[0]
    models, noise = left.subplots(), right.subplots()
    colors = dict(zip(PAPER, ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00")))
    styles = dict(zip(EPSILONS, (":", "--", "-")))
    others = iter(map(colormaps["tab20"], range(20)))
    for run in sorted(runs, key=lambda run: -run.curve[-1][1]):  # the legend has the order of the ends of the curves
        if run.variant in PAPER and run.epsilon is not None:
            models.plot(
                *zip(*run.curve), styles[run.epsilon], marker=".", label=title(run), color=colors[run.variant]
            )  # fmt: skip
        if run.variant == "transformer" or run.variant not in PAPER:
            noise.plot(*zip(*run.curve), marker=".", label=title(run), color=next(others))
    for half, panel, heading in (
        (left, models, "The models of Table 1"),
        (right, noise, "The tied Transformer with less noise, and controls"),
    ):
        popularity = 100 * runs[0].result["popularity_ndcg@10"]
        panel.axhline(popularity, color="k", linewidth=0.8, label="most popular items to everybody")
        panel.set_title(heading, fontsize=9)
        panel.set_xlabel("epoch")
        panel.set_ylabel("NDCG@10, % (higher is better)")
        legend_beside(half)
    figure.savefig(path, dpi=130)


def title(run: Run) -> str:
    """The run in plain words."""
    name = TITLES.get(run.variant, run.variant)
    return name if run.epsilon is None else f"{name}, epsilon {run.epsilon:g}"


if __name__ == "__main__":
    main()
