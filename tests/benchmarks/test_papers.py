"""The papers' tables: that the published data is complete and consistent, and that our counterparts are the right rows."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.speed.papers import published as papers
from benchmarks.speed.papers.page import _SETTINGS, ours, page, published
from benchmarks.speed.papers.published import ADAFEST_TABLE_4, COMPARISONS, EANA_TABLE_3, PAPERS, Value

MACHINE = {"threads": 3}


def line(paper: str, what: str) -> papers.Comparison:
    (found,) = [of for of in COMPARISONS if of.published.paper == paper and of.published.what == what]
    return found


# ------------------------------------------------------------------ published


def test_every_paper_and_figure_is_there() -> None:
    assert PAPERS == ("DP-AdaFEST", "LazyDP", "EANA", "DPFormer") == tuple(_SETTINGS)
    figures = {of.published.figure.split(",")[0] for of in COMPARISONS if of.published.paper == "LazyDP"}
    wanted = {f"Figure {number}" for number in ("3", "5", "10", "11", "13a", "13b", "13c", "13d", "14")}
    assert figures == wanted | {"abstract", "section 1"}
    names = [(of.published.paper, of.published.what) for of in COMPARISONS]
    assert len(set(names)) == len(names)
    for of in COMPARISONS:
        number = of.published
        assert number.stated and number.figure and of.differs and number.what == number.what.strip()
        for value in number.value if isinstance(number.value, tuple) else (number.value,):
            assert isinstance(value, str) or 0 < value < 2000
        assert not isinstance(number.value, tuple) or number.value[0] < number.value[1]


def test_published_numbers_are_in_what_is_stated() -> None:
    """Per cent of overhead or speedup become ratios; all other numbers are stated as they are."""
    for of in COMPARISONS:
        number = of.published
        if number.paper not in ("LazyDP", "DPFormer") or isinstance(number.value, str):
            continue
        values = number.value if isinstance(number.value, tuple) else (number.value,)
        stated = number.stated.replace(",", "")
        for value in values:
            assert f"{value:g}" in stated or f"{100 * value - 100:g} %" in stated, number


def test_adafest_table_4() -> None:
    for _, dense, sparse, factor in ADAFEST_TABLE_4:
        assert dense / sparse == pytest.approx(factor, rel=0.005)  # times are rounded
    assert [rows for rows, *_ in ADAFEST_TABLE_4] == [10**5, 2 * 10**5, 10**6, 2 * 10**6, 5 * 10**6, 10**7]
    assert line("DP-AdaFEST", "AdaFEST, 10,000,000 rows / 100,000").published.value == pytest.approx(1.09, abs=0.005)
    assert line("DP-AdaFEST", "DP-SGD, 10,000,000 rows / 100,000").published.value == pytest.approx(62.473 / 0.985)


def test_eana_table_3() -> None:
    """The text has 4.7 and 54 for EANA's speed over DP-SGD's."""
    value: Any = line("EANA", "DP-SGD / EANA, 100,000 items").published.value
    assert round(value, 1) == 4.7
    value = line("EANA", "DP-SGD / EANA, 5,000,000 items").published.value
    assert round(value) == 54
    assert line("EANA", "EANA / SGD, 27,278 items").published.value == pytest.approx(363 / 223)
    assert line("EANA", "EANA, 5,000,000 items / 100,000").published.value == 2.5
    assert all(speeds.sgd > speeds.eana > speeds.dpsgd for speeds in EANA_TABLE_3)


# ------------------------------------------------------------------ ours


def lazydp_result() -> dict[str, Any]:
    """Times that are products of primes, one for each variant and one for each value of a quantity."""
    variants = {
        "sgd": 2.0, "dpsgd_b": 31.0, "dpsgd_r": 29.0, "dpsgd_f": 23.0, "lazydp_unaggregated": 11.0, "lazydp": 3.0,
        "eana": 5.0, "adafest": 7.0,
    }  # fmt: skip
    base = {"gigabytes": 1.0, "batch": 2048, "pooling": 1, "skew": "uniform"}
    # The power of a variant's time that a value multiplies it with: ratios change from value to value.
    values = {
        "batch": {1024: 0.5, 2048: 1.0, 4096: 2.0},
        "gigabytes": {0.1: 0.25, 1.0: 1.0, 2.0: 1.5},
        "pooling": {1: 1.0, 30: 3.0},
        "skew": {"uniform": 1.0, "low": 0.5, "high": 2.0},
    }
    rows = []
    for quantity, powers in values.items():
        for value, power in powers.items():
            setting = {**base, quantity: value}
            if setting == base and quantity != "batch":
                continue
            for variant, seconds in variants.items():
                stages = {"forward": 1.0, "noise": 2.0, "update": 5.0}
                if variant == "dpsgd_f":
                    stages |= {"noise": 600.0 * power, "update": 100.0}
                if variant == "lazydp":
                    stages |= {"settling": 4.0 * power, "selection": 8.0}
                along = list(values) if setting == base else [quantity]
                rows.append(
                    {
                        "setting": setting, "base": setting == base, "varied": along, "variant": variant,
                        "best": seconds**power, "stages": stages, "table_rows": 2000, "rows_touched": 30,
                    }
                )  # fmt: skip
    return {"base": base, "machine": MACHINE, "rows": list(reversed(rows))}


LAZYDP: dict[str, Value | None] = {
    "rows that a batch touches, share": 1.5,
    "DP-SGD(R) / DP-SGD(F), smallest tables": (29 / 23) ** 0.25,
    "what DP-SGD(R) takes longer than DP-SGD(F), largest tables": 100 * ((29 / 23) ** 1.5 - 1),
    "DP-SGD(F): drawing noise and updating by it, of the model update": None,
    "the same, of the step, largest tables": 100 * 1000 / 1001,
    "DP-SGD(F) / SGD, over batch sizes": ((23 / 2) ** 0.5, (23 / 2) ** 2),
    "LazyDP without aggregation / SGD, over batch sizes": ((11 / 2) ** 0.5, (11 / 2) ** 2),
    "DP-SGD(F) / LazyDP without aggregation, mean over batch sizes": ((23 / 11) ** 0.5 + 23 / 11 + (23 / 11) ** 2) / 3,
    "DP-SGD(F) / LazyDP, over batch sizes": ((23 / 3) ** 0.5, (23 / 3) ** 2),
    "DP-SGD(F) / LazyDP, mean over batch sizes": ((23 / 3) ** 0.5 + 23 / 3 + (23 / 3) ** 2) / 3,
    "LazyDP / SGD, over batch sizes": (1.5**0.5, 1.5**2),
    "drawing noise, DP-SGD(F) / LazyDP": 600 / (2 + 4),
    "updating, DP-SGD(F) / LazyDP": 100 / 5,
    "LazyDP's bookkeeping, of its step": 100 * 12 / 20,
    "SGD, largest tables / smallest": 2**1.25,
    "LazyDP, largest tables / smallest": 3**1.25,
    "DP-SGD(F), largest tables / smallest": 23**1.25,
    "DP-SGD(F) / LazyDP, 30 ids per feature": (23 / 3) ** 3,
    "DP-SGD(F) / LazyDP, other DLRMs, mean": None,
    "DP-SGD(F) / LazyDP, skewed lookups, mean": ((23 / 3) ** 0.5 + (23 / 3) ** 2) / 2,
    "LazyDP's bookkeeping, of its step, skewed lookups": (100 * 10 / 18, 100 * 16 / 24),
    "LazyDP / EANA, over batch sizes": (0.6**2, 0.6**0.5),
}


def check(paper: str, results: dict[str, Any], wanted: dict[str, Value | None]) -> None:
    found = {of.published.what: of.ours(results) for of in COMPARISONS if of.published.paper == paper}
    assert list(found) == list(wanted)
    for what, value in found.items():
        assert value == (None if wanted[what] is None else pytest.approx(wanted[what])), what


def test_counterparts_of_lazydp() -> None:
    check("LazyDP", {"lazydp": lazydp_result()}, LAZYDP)


def test_one_setting_gives_no_range() -> None:
    result = lazydp_result()
    result["rows"] = [row for row in result["rows"] if row["base"]]
    results = {"lazydp": result}
    assert line("LazyDP", "LazyDP / SGD, over batch sizes").ours(results) == pytest.approx(1.5)
    assert line("LazyDP", "LazyDP, largest tables / smallest").ours(results) is None
    assert line("LazyDP", "DP-SGD(F) / LazyDP, skewed lookups, mean").ours(results) is None


def test_counterparts_of_adafest() -> None:
    times = {"dpsgd": {100_000: 6.0, 1_000_000: 30.0, 10_000_000: 420.0}, "adafest": {100_000: 2.0, 10_000_000: 3.0}}
    rows = [{"variant": name, "rows": n, "best": best} for name, own in times.items() for n, best in own.items()]
    wanted: dict[str, Value | None] = {f"DP-SGD / AdaFEST, {rows:,} rows": None for rows, *_ in ADAFEST_TABLE_4}
    wanted |= {"DP-SGD / AdaFEST, 100,000 rows": 3.0, "DP-SGD / AdaFEST, 10,000,000 rows": 140.0}
    wanted |= {"DP-SGD, 10,000,000 rows / 100,000": 70.0, "AdaFEST, 10,000,000 rows / 100,000": 1.5}
    check("DP-AdaFEST", {"vocabulary": {"rows": rows}}, wanted)


def dual_result() -> dict[str, Any]:
    """The smallest vocabulary is not measured. A larger batch is, and does not count."""
    times = {
        "sgd": {100_000: 2.0, 5_000_000: 4.0},
        "dpsgd": {100_000: 30.0, 5_000_000: 900.0},
        "eana": {100_000: 3.0, 5_000_000: 5.0},
    }
    rows = []
    for variant, own in times.items():
        for items, best in own.items():
            varied = ["items", "batch"] if items == 5_000_000 else ["items"]
            rows.append({"variant": variant, "setting": {"items": items, "batch": 64}, "varied": varied, "best": best})
        setting = {"items": 5_000_000, "batch": 1024}
        rows.append({"variant": variant, "setting": setting, "varied": ["batch"], "best": 1e6 * len(rows)})
    return {"base": {"items": 5_000_000, "batch": 64}, "machine": MACHINE, "rows": rows}


def test_counterparts_of_eana() -> None:
    wanted: dict[str, Value | None] = {}
    for items, values in ((27_278, (None,) * 3), (100_000, (1.5, 10.0, 15.0)), (5_000_000, (1.25, 180.0, 225.0))):
        names = (f"EANA / SGD, {items:,} items", f"DP-SGD / EANA, {items:,} items", f"DP-SGD / SGD, {items:,} items")
        wanted |= dict(zip(names, values))
    growths = {"SGD": 2.0, "DP-SGD": 30.0, "EANA": 5 / 3}
    wanted |= {f"{title}, 5,000,000 items / 100,000": growth for title, growth in growths.items()}
    check("EANA", {"dual": dual_result()}, wanted)


def tied_result() -> dict[str, Any]:
    times = {"plain": 3.0, "plain_chunked": 2.0, "logits": 4.0, "softmax": 5.0}
    setting = {"items": 3400, "length": 100, "batch": 64, "filled": 1.0}
    rows = [
        {
            "variant": name, "setting": {**setting, "items": items}, "base": items == 3400, "varied": ["items"],
            "best": seconds * items,
        }
        for items in (1000, 3400, 10_000)
        for name, seconds in times.items()
    ]  # fmt: skip
    for items in (1000, 3400):
        at = {**setting, "items": items}
        rows.append({"variant": "ghost", "setting": at, "base": items == 3400, "varied": ["items"], "best": items**2})
    largest = {"plain": 700, "plain_chunked": 900, "logits": 600, "softmax": 800, "ghost": 40, "lazydp": None}
    memory = [{"variant": name, "largest_batch": units} for name, units in largest.items()]
    return {"base": setting, "machine": MACHINE, "rows": rows, "largest": memory}


def test_counterparts_of_dpformer() -> None:
    wanted: dict[str, Value | None] = {}
    for loss, values in (
        ("full logits", (600 / 40, 600 / 700, (1000 / 4, 3400 / 4), 3 / 4)),
        ("`table_softmax_loss`", (800 / 40, 800 / 900, (1000 / 5, 3400 / 5), 2 / 5)),
    ):
        names = (
            "largest batch / ghost clipping's", "largest batch / non-private",
            "ghost clipping's step / this, over vocabularies", "non-private step / this",
        )  # fmt: skip
        wanted |= {f"{name}, {loss}": value for name, value in zip(names, values)}
    results = {"tied": tied_result()}
    check("DPFormer", results, wanted)
    results["tied"]["largest"][-2]["largest_batch"] = None  # a line that does not rise
    assert line("DPFormer", "largest batch / ghost clipping's, full logits").ours(results) is None


# ------------------------------------------------------------------ the section


def cells(text: str) -> list[list[str]]:
    """The lines of all tables, without their heads."""
    lines = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    return [row for row in lines if row[0] not in ("what", "---")]


def test_missing_parts_give_dashes() -> None:
    text = page({})
    assert text.startswith("# The papers' tables\n") and ".png" not in text
    assert [text.count(f"\n## {paper}\n") for paper in PAPERS] == [1] * 4
    assert len(cells(text)) == len(COMPARISONS) and {row[2] for row in cells(text)} == {"-"}
    for part in ("vocabulary", "lazydp", "dual", "tied"):
        assert f"`python -m benchmarks {part}` was not run" in text
    one = cells(page({"lazydp": {**lazydp_result(), "rows": []}}))
    assert {row[2] for row in one} == {"-"}


def test_the_section_shows_paper_and_ours() -> None:
    text = page({"lazydp": lazydp_result(), "dual": dual_result(), "tied": tied_result()})
    assert "on 3 threads of a CPU, 1 GB, batch 2048, pooling 1, uniform; tables of 0.1 to 2 GB." in text
    assert "on 3 threads of a CPU, 5,000,000 items, batch 64." in text
    shown = {row[0]: row[1:] for row in cells(text)}
    assert shown["LazyDP / SGD, over batch sizes (Figure 10, section 7.1)"][:2] == ["1.96 to 2.42", "1.22 to 2.25"]
    assert shown["LazyDP's bookkeeping, of its step (Figure 11, section 7.1)"][:2] == ["15 %", "60 %"]
    assert shown["SGD, largest tables / smallest (Figure 13a, section 7.3)"][:2] == ["almost constant", "2.38"]
    assert shown["DP-SGD / SGD, 5,000,000 items (Table 3)"][:2] == ["178", "225"]
    assert shown["DP-SGD / AdaFEST, 10,000,000 rows (Table 4, appendix D.2.1)"][:2] == ["177", "-"]
    assert sum(row[1] != "-" for row in shown.values()) == 20 + 9 + 8


def test_numbers_are_shown_with_their_bounds_and_units() -> None:
    number = papers.Published("LazyDP", "Figure 3", "0.3 %", "gap", 0.3, "below", " %")
    assert published(number) == "below 0.3 %"
    assert ours(1234.5, number) == "1,234 %" and ours((0.012345, 99.96), number) == "0.0123 to 100 %"
    assert ours(None, number) == "-"
