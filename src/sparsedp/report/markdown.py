"""A sweep's summary (`front.summarise`) as a page of tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TABLES_DO_NOT_MATTER = "the tables matter too little here for a trade-off to mean something"
METRIC_NAMES = {
    "auc": "AUC", "accuracy": "accuracy", "log_loss": "log loss", "ndcg@10": "NDCG@10", "hit@10": "HIT@10",
    "precision@10": "precision@10",
    "recall@10": "recall@10", "loss": "loss", "mrr": "MRR", "mse": "mean squared error", "brier_score": "Brier score",
    "calibration_error": "calibration error",
}  # fmt: skip
CONTROL_NAMES = {"non_private": "not private", "frozen": "tables frozen"}


def report(
    summary: Mapping[str, Any],
    *,
    base: str,
    done: int,
    total: int,
    failed: Mapping[str, str],
    warnings: Mapping[str, int],
    left_over: int,
    plots: Sequence[str],
) -> str:
    """`failed`: errors by run. `warnings`: how many runs gave each.

    `left_over`: finished runs in the folder that the sweep no longer has.
    """
    metric = METRIC_NAMES[summary["metric"]]
    seeds = summary["seeds"]
    lines = [f"# Sweep {summary['name']}", ""]
    missing = "" if done == total else f" **{total - done} are missing**: what follows is not final."
    lines.append(f"{done} of {total} runs, on top of the configuration `{base}`.{missing}")
    lines.append(
        f"Means over {len(seeds)} seeds, ± their standard error; ranges are the smallest and the largest of a seed."
        if len(seeds) > 1
        else "One seed: there is no spread, and small differences may be chance."
    )
    lines += [
        "",
        f"Settings were chosen on one half of the held-out data (validation); every {metric} and loss below is of the other half "
        f"(test). A loss is against `{summary['reference']}` at the same point, seed by seed. A reduction is the gradient size "
        "of all tables over that of the rows that a step may change.",
        "",
        "Each epsilon is that of one run. Choosing between runs looks at private data again, which no epsilon here covers, and "
        "all metrics are exact: for you, not for release.",
    ]
    for at in summary["points"]:
        lines += _point(at, summary, metric)
    if plots:
        lines += ["", "## Plots", "", *(f"![{name}]({name})" for name in plots)]
    if failed or summary["without_utility"] or left_over:
        lines += ["", "## Runs that are not in the tables", ""]
        lines += [f"- `{id}` failed: {error}" for id, error in failed.items()]
        lines += [f"- `{id}` has no {metric} on one of the halves" for id in summary["without_utility"]]
        if left_over:
            lines.append(f"- {left_over} finished runs in this folder are of settings that the sweep no longer has")
    if warnings:
        lines += ["", "## Warnings", "", *(f"- of {count} runs: {text}" for text, count in warnings.items())]
    return "\n".join(lines) + "\n"


def _point(at: Mapping[str, Any], summary: Mapping[str, Any], metric: str) -> list[str]:
    lines = ["", f"## {describe_settings(at['point']) or 'All runs'}", ""]
    reference = at["reference"]
    if reference is None:
        lines.append(f"No run of the reference `{summary['reference']}` is finished, so that there is no loss yet.")
    if at["tables_matter"] is False:
        gain = _plus_minus(at["gain_of_tables"])
        lines += [
            f"**Training the tables gains {gain} over leaving them frozen, less than {summary['margin']:g}: "
            f"{TABLES_DO_NOT_MATTER}.**",
            "",
        ]
    elif at["tables_matter"] is None:
        lines += ["There is no finished control with frozen tables: nothing shows that the tables matter.", ""]
    rows = []
    for name, control in at["controls"].items():
        rows.append([CONTROL_NAMES[name], *_utility(control, name == "frozen")])
    rows.append([f"reference: {summary['reference']}", *_utility(reference, False)])
    if at["planted_auc"] is not None:
        rows.append(["the model that drew the clicks", f"{at['planted_auc']:.4f} (all held out)", "", "", "", "", ""])
    header = ["", metric, "loss", "epsilon", "clipped", "seeds", "settings"]
    lines += _table(header, rows)
    if below := at.get("control_below"):
        lines += [
            "",
            f"**The best run without privacy is below {', '.join(f'`{name}`' for name in below)}: it is no measure of what "
            "privacy costs. Clipping and noise regularise; give the control other rates (`control_rates`), fewer epochs or "
            "weight decay (`controls.non_private.set` and `grid`).**",
        ]
    lines += _all_settings(at, metric)
    others = {name: variant for name, variant in at["variants"].items() if name != summary["reference"]}
    if not others:
        return lines
    lines += ["", "Best gradient-size reduction at a utility loss of at most (on the validation half):", ""]
    header = ["", *(f"{loss:g}" for loss in summary["losses"])]
    rows = [
        [name, *(_times(entry["choice"]) for entry in variant["best_reduction"])] for name, variant in others.items()
    ]
    lines += _table(header, rows)
    lines += ["", "What these settings are, and what they lose on the test half:", ""]
    rows = []
    for name, variant in others.items():
        for entry in variant["best_reduction"]:
            choice = entry["choice"]
            if choice is not None:
                rows.append([name, f"{entry['loss']:g}", *_numbers(choice)])
    header = ["", "at most", "reduction", "range", metric, "loss", "kept mass", "clipped", "seeds", "settings"]
    lines += _table(header, rows) if rows else ["No setting loses so little."]
    lines += ["", "Fronts: settings that no other of the variant beats in both (on the validation half):", ""]
    rows = [[name, *_numbers(entry)] for name, variant in others.items() for entry in variant["front"]]
    lines += _table(["", *header[2:]], rows) if rows else ["No run of these variants is finished."]
    open_ended = [
        name for name, variant in others.items() if variant["best"] and math.isinf(variant["best"]["epsilon"])
    ]
    if open_ended:
        lines += ["", f"Without any privacy guarantee (epsilon is infinite): {', '.join(open_ended)}."]
    return lines


def _all_settings(at: Mapping[str, Any], metric: str) -> list[str]:
    """Each setting that was run, with both halves: one chooses, the other reports."""
    groups = {CONTROL_NAMES[name]: entries for name, entries in at.get("control_settings", {}).items()}
    groups |= {name: variant["settings"] for name, variant in at["variants"].items()}
    rows = [
        [
            name,
            describe_settings(entry["settings"]),
            _plus_minus(entry["metric"]["validation"]),
            _plus_minus(entry["metric"]["test"]),
            _plus_minus(entry["loss"]["test"]),
            _percent(entry["kept_mass"]),
            _percent(entry["clipped_share"]),
            str(len(entry["seeds"])),
        ]
        for name, entries in groups.items()
        for entry in entries
    ]
    header = [
        "",
        "settings",
        f"{metric} (validation, chooses)",
        f"{metric} (test, reports)",
        "loss",
        "kept mass",
        "clipped",
        "seeds",
    ]
    return ["", "Every setting:", "", *_table(header, rows)] if rows else []


def _utility(entry: Mapping[str, Any] | None, frozen: bool) -> list[str]:
    if entry is None:
        return ["not run yet", "", "", "", "", ""]
    epsilon = "infinite" if math.isinf(entry["epsilon"]) else f"{entry['epsilon']:.3g}"
    return [
        _plus_minus(entry["metric"]["test"]),
        _plus_minus(entry["loss"]["test"]),
        epsilon,
        _percent(entry["clipped_share"]),
        str(len(entry["seeds"])),
        describe_settings(entry["settings"]),
    ]


def _numbers(entry: Mapping[str, Any]) -> list[str]:
    low, high = entry["reduction_range"]
    return [
        _times(entry),
        f"{low:,.4g}..{high:,.4g}" if len(entry["seeds"]) > 1 else "",
        _plus_minus(entry["metric"]["test"]),
        _plus_minus(entry["loss"]["test"]),
        _percent(entry["kept_mass"]),
        _percent(entry["clipped_share"]),
        str(len(entry["seeds"])),
        describe_settings(entry["settings"]),
    ]


def _times(entry: Mapping[str, Any] | None) -> str:
    return "none" if entry is None else f"{entry['reduction']:,.4g}x"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g} %"


def _plus_minus(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return ""
    error = estimate["error"]
    return f"{estimate['mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def describe_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}" for key, value in settings.items()
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
