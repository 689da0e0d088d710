"""What the papers published about speed, and where to find our counterpart in the results of the benchmark's parts.

Only numbers that the papers print, in a table or in their text, or ratios of such; what can only be read off a figure's
bars is not here. Results are the parts' JSON by name: {"lazydp": ..., "vocabulary": ..., "dual": ..., "tied": ...}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
Value = float | tuple[float, float]  # or the lowest and the highest
Ours = Callable[[Results], Value | None]  # in the published number's unit; None if it was not measured
Along = dict[Any, float]  # by the values of a quantity that was varied, in their order


@dataclass(frozen=True)
class Published:
    """A number as a paper has it."""

    paper: str
    figure: str  # or table, and section
    stated: str  # in what words, or which of the table's numbers it comes from
    what: str
    value: Value | str  # words where the paper has no number
    bound: str = ""  # what stands before the number
    unit: str = ""  # and behind it


@dataclass(frozen=True)
class Comparison:
    """A published number, our counterpart, and what is different in ours."""

    published: Published
    ours: Ours
    differs: str


# ---------------------------------------------------------------------- tables, as printed

# DP-AdaFEST, Table 4: rows, seconds of 100 steps of DP-SGD and of DP-AdaFEST, and their ratio.
ADAFEST_TABLE_4 = (
    (100_000, 0.985, 0.324, 3.045),
    (200_000, 1.676, 0.312, 5.376),
    (1_000_000, 6.607, 0.318, 20.746),
    (2_000_000, 13.09, 0.323, 40.515),
    (5_000_000, 31.326, 0.332, 94.340),
    (10_000_000, 62.473, 0.353, 176.760),
)


@dataclass(frozen=True)
class Speeds:
    """Steps a second."""

    data: str
    items: int
    sgd: float
    dpsgd: float
    eana: float


EANA_TABLE_3 = (
    Speeds("MovieLens 20M", 27_278, sgd=363, dpsgd=78, eana=223),
    Speeds("Industry-100K", 100_000, sgd=236, dpsgd=37, eana=175),
    Speeds("Industry-5M", 5_000_000, sgd=232, dpsgd=1.3, eana=70),
)


# ---------------------------------------------------------------------- finding ours


def rows_along(results: Results, part: str, variant: str, quantity: str | None) -> dict[Any, Mapping[str, Any]]:
    """A variant's rows where a quantity was varied, by its values in order; without a quantity, at the base setting."""
    rows = [row for row in results.get(part, {}).get("rows", ()) if row["variant"] == variant]
    if quantity is None:
        base = [row for row in rows if row["base"]]
        return {None: base[0]} if base else {}
    row_at = {row["setting"][quantity]: row for row in rows if quantity in row["varied"]}
    return row_at if quantity == "skew" else dict(sorted(row_at.items()))


def ratios(results: Results, part: str, upper: str, lower: str, quantity: str | None) -> Along:
    """Best times of one variant over those of another, wherever both were measured."""
    above, below = (rows_along(results, part, variant, quantity) for variant in (upper, lower))
    return {value: row["best"] / below[value]["best"] for value, row in above.items() if value in below}


def stage_shares(results: Results, variant: str, stages: Sequence[str], quantity: str | None) -> Along:
    """Time of some stages of a step of the part `lazydp`, in per cent of that of all stages."""
    return {
        value: 100 * sum(row["stages"].get(stage, 0.0) for stage in stages) / sum(row["stages"].values())
        for value, row in rows_along(results, "lazydp", variant, quantity).items()
    }


def span(values: Along) -> Value | None:
    return (min(values.values()), max(values.values())) if len(values) > 1 else first(values)


def first(values: Along) -> float | None:
    return next(iter(values.values()), None)


def last(values: Along) -> float | None:
    return next(reversed(values.values()), None)


def last_excess(values: Along) -> float | None:
    """What the last ratio has above 1, in per cent."""
    return 100 * (next(reversed(values.values())) - 1) if values else None


def at(value: Any) -> Callable[[Along], float | None]:
    return lambda values: values.get(value)


def mean(values: Along) -> float | None:
    return sum(values.values()) / len(values) if values else None


def skewed(values: Along) -> Along:
    """The LazyDP paper's three data sets; uniform lookups are its default."""
    return {skew: value for skew, value in values.items() if skew != "uniform"}


def _ratio(part: str, upper: str, lower: str, quantity: str | None, pick: Callable[[Along], Value | None]) -> Ours:
    return lambda results: pick(ratios(results, part, upper, lower, quantity))


def _share(variant: str, stages: Sequence[str], quantity: str | None, pick: Callable[[Along], Value | None]) -> Ours:
    return lambda results: pick(stage_shares(results, variant, stages, quantity))


def _growth(part: str, variant: str, quantity: str, ends: tuple[Any, Any] | None = None) -> Ours:
    """A variant's best time at the largest value of a quantity over that at the smallest, or at two given values."""

    def ours(results: Results) -> float | None:
        best = {value: row["best"] for value, row in rows_along(results, part, variant, quantity).items()}
        low, high = ends or (min(best, default=None), max(best, default=None))
        return best[high] / best[low] if low != high and {low, high} <= set(best) else None

    return ours


def _stages_over(of_dense: Sequence[str], of_lazy: Sequence[str]) -> Ours:
    """Time of stages of DP-SGD(F) over that of stages of LazyDP, at the base setting."""

    def ours(results: Results) -> float | None:
        dense, lazy = (rows_along(results, "lazydp", variant, None).get(None) for variant in ("dpsgd_f", "lazydp"))
        if dense is None or lazy is None:
            return None
        return sum(dense["stages"].get(s, 0.0) for s in of_dense) / sum(lazy["stages"].get(s, 0.0) for s in of_lazy)

    return ours


def _touched(results: Results) -> float | None:
    row = rows_along(results, "lazydp", "sgd", None).get(None)
    return None if row is None else 100 * row["rows_touched"] / row["table_rows"]


def _rows_over(upper: tuple[str, int], lower: tuple[str, int]) -> Ours:
    """Of the part `vocabulary`, the best time of a variant at a number of rows over that of another."""

    def ours(results: Results) -> float | None:
        rows = results.get("vocabulary", {}).get("rows", ())
        best = {(row["variant"], row["rows"]): row["best"] for row in rows}
        return best[upper] / best[lower] if {upper, lower} <= set(best) else None

    return ours


def _batch_over(upper: str, lower: str) -> Ours:
    """Of the part `tied`, a variant's largest batch over another's."""

    def ours(results: Results) -> float | None:
        largest = {row["variant"]: row["largest_batch"] for row in results.get("tied", {}).get("largest", ())}
        above, below = largest.get(upper), largest.get(lower)
        return above / below if above and below else None

    return ours


def _not_measured(results: Results) -> None:
    return None


# ---------------------------------------------------------------------- DP-AdaFEST


def _adafest() -> list[Comparison]:
    table = "Table 4, appendix D.2.1"
    comparisons = [
        Comparison(
            Published("DP-AdaFEST", table, f"{dense:g} s and {sparse:g} s", f"DP-SGD / AdaFEST, {rows:,} rows", factor),
            _rows_over(("dpsgd", rows), ("adafest", rows)),
            "DP-SGD's noise is drawn by compiled code on all cores",
        )
        for rows, dense, sparse, factor in ADAFEST_TABLE_4
    ]
    (few, *small, _), (many, *large, _) = ADAFEST_TABLE_4[0], ADAFEST_TABLE_4[-1]
    for variant, title, low, high in zip(("dpsgd", "adafest"), ("DP-SGD", "AdaFEST"), small, large):
        what = f"{title}, {many:,} rows / {few:,}"
        comparisons.append(
            Comparison(
                Published("DP-AdaFEST", table, f"{low:g} s and {high:g} s", what, high / low),
                _rows_over((variant, int(many)), (variant, int(few))),
                "what does not depend on the rows is another part of the step",
            )
        )
    return comparisons


# ---------------------------------------------------------------------- LazyDP

_SMALLER = "smaller tables, so less noise; networks on the CPU, so a slower SGD"
_OWN = ("settling", "selection")
_BOOKKEEPING = "with drawing the noise and adding it, which are not told apart from the bookkeeping"
_CACHED = "other sizes; small tables stay in the processor's cache"


def _lazydp(
    figure: str, stated: str, what: str, value: Value | str, ours: Ours, differs: str, bound: str = "", unit: str = ""
) -> Comparison:
    return Comparison(Published("LazyDP", figure, stated, what, value, bound, unit), ours, differs)


_LAZYDP = (
    _lazydp(
        "section 1", "accesses only 0.03 % of the table content", "rows that a batch touches, share", 0.03,
        _touched, "smaller tables, so a larger share: the ratios below hang on it", unit=" %",
    ),
    _lazydp(
        "Figure 3, section 4.1", "1.5x higher performance at 96 MB", "DP-SGD(R) / DP-SGD(F), smallest tables", 1.5,
        _ratio("lazydp", "dpsgd_r", "dpsgd_f", "gigabytes", first), "(F) needs no second backward pass here",
    ),
    _lazydp(
        "Figure 3, section 4.1", "a gap of less than 0.3 % at 96 GB",
        "what DP-SGD(R) takes longer than DP-SGD(F), largest tables", 0.3,
        _ratio("lazydp", "dpsgd_r", "dpsgd_f", "gigabytes", last_excess), _SMALLER, "below", " %",
    ),
    _lazydp(
        "Figure 5, section 4.2", "83.1 % of the model update stage",
        "DP-SGD(F): drawing noise and updating by it, of the model update", 83.1,
        _not_measured, "there is nothing else in it: clipped sums go straight onto the noise", unit=" %",
    ),
    _lazydp(
        "Figure 5, section 4.2", "82.8 % of its end-to-end training time", "the same, of the step, largest tables", 82.8,
        _share("dpsgd_f", ("noise", "update"), "gigabytes", last), _SMALLER, unit=" %",
    ),
    _lazydp(
        "Figure 10, section 7.1", "166-375x slowdown vs. non-private SGD", "DP-SGD(F) / SGD, over batch sizes", (166, 375),
        _ratio("lazydp", "dpsgd_f", "sgd", "batch", span), _SMALLER,
    ),
    _lazydp(
        "Figure 10, section 7.1", "fall behind SGD by 97-218x", "LazyDP without aggregation / SGD, over batch sizes",
        (97, 218), _ratio("lazydp", "lazydp_unaggregated", "sgd", "batch", span), _SMALLER,
    ),
    _lazydp(
        "Figure 10, section 7.1", "an average 72 % speedup on top of DP-SGD(F)",
        "DP-SGD(F) / LazyDP without aggregation, mean over batch sizes", 1.72,
        _ratio("lazydp", "dpsgd_f", "lazydp_unaggregated", "batch", mean),
        "as many numbers, but each row's of each step apart; DP-SGD draws them in one go",
    ),
    _lazydp(
        "Figure 10, section 7.1", "85-155x speedup", "DP-SGD(F) / LazyDP, over batch sizes", (85, 155),
        _ratio("lazydp", "dpsgd_f", "lazydp", "batch", span), _SMALLER,
    ),
    _lazydp(
        "abstract", "an average 119x throughput improvement", "DP-SGD(F) / LazyDP, mean over batch sizes", 119,
        _ratio("lazydp", "dpsgd_f", "lazydp", "batch", mean), _SMALLER,
    ),
    _lazydp(
        "Figure 10, section 7.1", "1.96x to 2.42x slowdown over the non-private SGD", "LazyDP / SGD, over batch sizes",
        (1.96, 2.42), _ratio("lazydp", "lazydp", "sgd", "batch", span),
        "networks on the CPU, so tables are less of a step",
    ),
    _lazydp(
        "Figure 11, section 7.1", "noise sampling by 1,081x", "drawing noise, DP-SGD(F) / LazyDP", 1081,
        _stages_over(("noise",), ("settling", "noise")), "smaller tables; LazyDP's time is with adding the noise",
    ),
    _lazydp(
        "Figure 11, section 7.1", "noisy gradient update by 418x", "updating, DP-SGD(F) / LazyDP", 418,
        _stages_over(("update",), ("update",)), "smaller tables; both update the networks as well",
    ),
    _lazydp(
        "Figure 11, section 7.1", "only account for 15 % of the training time", "LazyDP's bookkeeping, of its step", 15,
        _share("lazydp", _OWN, None, first), _BOOKKEEPING, unit=" %",
    ),
    _lazydp(
        "Figure 13a, section 7.3", "remains almost constant", "SGD, largest tables / smallest", "almost constant",
        _growth("lazydp", "sgd", "gigabytes"), _CACHED,
    ),
    _lazydp(
        "Figure 13a, section 7.3", "remains almost constant", "LazyDP, largest tables / smallest", "almost constant",
        _growth("lazydp", "lazydp", "gigabytes"), _CACHED,
    ),
    _lazydp(
        "Figure 13a, section 7.3", "scales proportional to the table size", "DP-SGD(F), largest tables / smallest",
        "as the sizes", _growth("lazydp", "dpsgd_f", "gigabytes"), "other sizes, at which the networks count as well",
    ),
    _lazydp(
        "Figure 13b, section 7.3", "16.7x speedup with pooling value of 30", "DP-SGD(F) / LazyDP, 30 ids per feature", 16.7,
        _ratio("lazydp", "dpsgd_f", "lazydp", "pooling", at(30)),
        "smaller tables, of which so many ids touch a large part",
    ),
    _lazydp(
        "Figure 13c, section 7.3", "52.7x average speedup", "DP-SGD(F) / LazyDP, other DLRMs, mean", 52.7,
        _not_measured, "one model's shape is measured",
    ),
    _lazydp(
        "Figure 13d, section 7.3", "an average 129.03x speedup", "DP-SGD(F) / LazyDP, skewed lookups, mean", 129.03,
        _ratio("lazydp", "dpsgd_f", "lazydp", "skew", lambda values: mean(skewed(values))), _SMALLER,
    ),
    _lazydp(
        "Figure 13d, section 7.3", "always below 14 %", "LazyDP's bookkeeping, of its step, skewed lookups", 14,
        _share("lazydp", _OWN, "skew", lambda values: span(skewed(values))), _BOOKKEEPING, "below", " %",
    ),
    _lazydp(
        "Figure 14, section 7.4", "27 % to 37 % overhead over EANA", "LazyDP / EANA, over batch sizes", (1.27, 1.37),
        _ratio("lazydp", "lazydp", "eana", "batch", span),
        "rows are settled when they are read, without a look at the next batch",
    ),
)  # fmt: skip


# ---------------------------------------------------------------------- EANA

_TITLES = {"sgd": "SGD", "dpsgd": "DP-SGD", "eana": "EANA"}


def _eana() -> list[Comparison]:
    """Ratios of times: the speed of the lower variant over that of the upper."""
    movies, few, many = EANA_TABLE_3
    unit_negatives = "one machine; negatives are each unit's own"
    industry = "one machine; a bag of one feature, not a transformer over three"
    comparisons = []
    for speeds in EANA_TABLE_3:
        for upper, lower in (("eana", "sgd"), ("dpsgd", "eana"), ("dpsgd", "sgd")):
            fast, slow = getattr(speeds, lower), getattr(speeds, upper)
            what = f"{_TITLES[upper]} / {_TITLES[lower]}, {speeds.items:,} items"
            stated = f"{speeds.data}: {fast:g} and {slow:g} steps/s"
            comparisons.append(
                Comparison(
                    Published("EANA", "Table 3", stated, what, fast / slow),
                    _ratio("dual", upper, lower, "items", at(speeds.items)),
                    unit_negatives if speeds is movies else industry,
                )
            )
    for variant, title in _TITLES.items():
        fast, slow = getattr(few, variant), getattr(many, variant)
        what = f"{title}, {many.items:,} items / {few.items:,}"
        comparisons.append(
            Comparison(
                Published("EANA", "Table 3", f"{fast:g} and {slow:g} steps/s", what, fast / slow),
                _growth("dual", variant, "items", (few.items, many.items)),
                industry,
            )
        )
    return comparisons


# ---------------------------------------------------------------------- DPFormer


def _dpformer() -> list[Comparison]:
    """For the logits written out, as in the paper, and for those that are never kept; each against its own loss."""
    comparisons = []
    for variant, plain, loss in (
        ("logits", "plain", "full logits"),
        ("softmax", "plain_chunked", "`table_softmax_loss`"),
    ):
        lines: tuple[tuple[str, str, Value | str, Ours, str], ...] = (
            (
                "10-400x in the caption, up to 450x in the text", "largest batch / ghost clipping's", (10, 400),
                _batch_over(variant, "ghost"), "a process's memory, by a linear fit; other data",
            ),
            (
                "almost as large as those in non-private training", "largest batch / non-private", "almost as large",
                _batch_over(variant, plain), "a process's memory, by a linear fit; other data",
            ),
            (
                "4-100x faster than Ghost Clipping", "ghost clipping's step / this, over vocabularies", (4, 100),
                _ratio("tied", "ghost", variant, "items", span), "on a CPU; without vocabularies too large for ghost clipping",
            ),
            (
                "0.68x training speed of the non-private version", "non-private step / this", 0.68,
                _ratio("tied", plain, variant, None, first), "on a CPU; both with the same loss",
            ),
        )  # fmt: skip
        for stated, what, value, ours, differs in lines:
            published = Published("DPFormer", "Figure 3, section 4.2", stated, f"{what}, {loss}", value)
            comparisons.append(Comparison(published, ours, differs))
    return comparisons


COMPARISONS: tuple[Comparison, ...] = (*_adafest(), *_LAZYDP, *_eana(), *_dpformer())
PAPERS = tuple(dict.fromkeys(comparison.published.paper for comparison in COMPARISONS))
