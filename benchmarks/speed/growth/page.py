"""The result of `python -m benchmarks growth` as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.speed.growth.measure import MODELS, Click
from benchmarks.speed.markdown import images, markdown_table, megabytes, milliseconds
from benchmarks.speed.tied import measure as tied

Fits = dict[str, Mapping[str, Any]]  # by variant


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    network = "-".join(map(str, result["network"]))
    transformer = result["transformer"]
    parts = [
        "# How the cost of a step grows",
        f"One quantity is varied at a time: around {Click(**result['click'])} for a click model (pCTR's, network {network}), "
        f"and around {tied.Setting(**result['sequence'])} for the tied Transformer (dim {transformer['dim']}, "
        f"{transformer['blocks']} blocks, {transformer['negatives']} sampled negatives where there are candidates). "
        f"A step's best time of {result['repeats']} repeats ({result['slow_repeats']} of DP-SGD), all values of a quantity in "
        "turns, is fitted by least squares: time ~ x^b. The table has b with its standard error, and in brackets b over the "
        "upper half of the range alone, where what a step costs anyway hides less of the growth.",
    ]
    for model, kind in MODELS.items():
        lines = along(result, model)
        if lines:
            head = [kind.title.lower(), "range", *kind.variants.values()]
            parts.append(
                markdown_table(
                    head,
                    [
                        [kind.quantities[name].title, range_of(fits), *(exponent(fits.get(v)) for v in kind.variants)]
                        for name, fits in lines.items()
                    ],
                )
            )
    parts.append(
        "An exponent of 0 says that the quantity does not matter, 1 that time is in proportion to it. Below 1, fixed costs are "
        "left: of a step's operations one by one, and of DP-SGD's noise on every row where something else is varied. Along the "
        "rows of a table DP-SGD goes towards 1, and mechanisms that leave untouched rows alone stay at 0. Above 1, along the "
        "length of a sequence, are attention and norms in pairs of positions."
    )
    parts.append("Times, in ms: best (median ± spread). Under each table the peak memory beyond the tables, in MB.")
    for model, kind in MODELS.items():
        for name, quantity in kind.quantities.items():
            rows = rows_along(result, model, name)
            if rows:
                parts.append(markdown_table(*lines_along(quantity.title, rows, kind.variants, milliseconds)))
            if any("memory" in row for row in rows):
                parts.append(markdown_table(*lines_along("MB", rows, kind.variants, megabytes)))
    for gone in result["left_out"]:
        setting = (Click if gone["model"] == "click" else tied.Setting)(**gone["setting"])
        names = ", ".join(MODELS[gone["model"]].variants[name] for name in gone["variants"])
        parts.append(f"Not measured at {setting}, for want of memory: {names}.")
    if shown := images(plots, "growth_"):
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


def along(result: Mapping[str, Any], model: str) -> dict[str, Fits]:
    """For each quantity of a model, in its order, the fits by variant."""
    mine = [fit for fit in result["exponents"] if fit["model"] == model]
    return {
        name: fits
        for name in MODELS[model].quantities
        if (fits := {fit["variant"]: fit for fit in mine if fit["quantity"] == name})
    }


def range_of(fits: Fits) -> str:
    """The widest range of values among the variants."""
    return f"{min(fit['first'] for fit in fits.values()):,} to {max(fit['last'] for fit in fits.values()):,}"


def exponent(fit: Mapping[str, Any] | None) -> str:
    if fit is None:
        return "-"
    error = "" if fit["error"] is None else f" ± {fit['error']:.2f}"
    top = "" if fit["top"] is None else f" ({fit['top']['exponent']:.2f})"
    return f"{fit['exponent']:.2f}{error}{top}"


def rows_along(result: Mapping[str, Any], model: str, quantity: str) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["model"] == model and row["quantity"] == quantity]


def lines_along(
    title: str, rows: Iterable[Mapping[str, Any]], variants: Mapping[str, str], cell: Callable[[Mapping[str, Any]], str]
) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table: variants over the values of a quantity."""
    row_of = {(row["variant"], row["value"]): row for row in rows}
    values = sorted({value for _, value in row_of})
    lines = []
    for name, label in variants.items():
        cells = [row_of.get((name, value)) for value in values]
        if any(cells):
            lines.append([label, *("-" if row is None else cell(row) for row in cells)])
    return [title, *(f"{value:,}" for value in values)], lines
