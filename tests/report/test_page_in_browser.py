"""The report as a browser shows it: at the width of a phone and of a desk, light and dark, with a pointer and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as browsers
from browser import Browser, browser
from report.runs import PLAN, STATEMENT, make_run, step_row, totals
from report.test_run_report import evaluation, hostile_run
from sparsedp.report.page import render
from sparsedp.report.run_record import read_run

# Pairs of labels on the same axis that lie on one another, and those that lie outside of the window.
LABELS = """
const all = [], open = [...document.querySelectorAll("details")].map((d) => d.open = true);
for (const axis of document.querySelectorAll(".x, .y")) {
  const boxes = [...axis.querySelectorAll("span")].map((s) => [s.textContent, s.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => {
    if (p.left < 0 || p.right > innerWidth) all.push(["outside", a]);
    boxes.slice(i + 1).forEach(([b, q]) => {
      if (p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom) all.push([a, b]);
    });
  });
}
return [all, document.documentElement.scrollWidth, innerWidth, document.querySelectorAll(".plot").length];
"""
COLORS = """
const of = (s) => getComputedStyle(document.querySelector(s));
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, of("path.line").stroke];
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browsers.skip_without_browser()
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    rows = [step_row(1000 * step, rows_touched=12_345_678 + step) for step in range(1, 201)]
    rows += [evaluation(1000 * step, auc=0.7 + step / 1e6, loss=10.0**step) for step in range(1, 200, 9)]
    long = {"statement": STATEMENT | {"steps": 200_000}, "plan": PLAN | {"steps": 200_000}}
    one = make_run(folder / "one", rows, totals=totals(200_000), **long)
    many = [make_run(folder / f"a-run-with-quite-a-long-name-{i}", rows[::7]) for i in range(9)]
    hostile = hostile_run(folder / "a<b>&'\"")
    pages = {"one": [one], "many": many, "hostile": [hostile]}
    for name, paths in pages.items():
        (folder / f"{name}.html").write_text(render([read_run(path) for path in paths]))
    return {name: folder / f"{name}.html" for name in pages}


def test_a_browser_that_is_missing_fails_in_ci_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsers, "CHROMIUM", None)
    monkeypatch.setenv("CI", "1")
    monkeypatch.delenv(browsers.WITHOUT, raising=False)
    with pytest.raises(pytest.fail.Exception, match="chromium-driver, or SPARSEDP_NO_BROWSER=1"):
        browsers.skip_without_browser()
    monkeypatch.setenv(browsers.WITHOUT, "1")
    with pytest.raises(pytest.skip.Exception):
        browsers.skip_without_browser()
    monkeypatch.delenv(browsers.WITHOUT)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception):
        browsers.skip_without_browser()


@pytest.mark.parametrize("width", [320, 390, 1280, 2000])
@pytest.mark.parametrize("name", ["one", "many", "hostile"])
def test_it_fits_the_window_and_no_label_lies_on_another(
    tab: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    tab.open(pages[name], width)
    overlaps, wide, window, plots = tab.run(LABELS)
    assert overlaps == [] and window == width and plots > 3
    assert wide <= width


LEGENDS = """
[...document.querySelectorAll("details")].map((d) => d.open = true);
return [...document.querySelectorAll(".legend")].map((legend) => {
  const figure = legend.closest("figure"), area = figure.querySelector(".area").getBoundingClientRect();
  const l = legend.getBoundingClientRect(), f = figure.getBoundingClientRect();
  const series = JSON.parse(figure.querySelector("script").textContent).series;
  const ends = series.map((s) => [s.at.filter((y) => y !== null).pop(), s.name]).sort((a, b) => b[0] - a[0]);
  const tops = [...legend.children].map((c) => c.getBoundingClientRect().top);
  const ascending = tops.every((top, i) => !i || top > tops[i - 1]);
  return {right: l.left - area.right, above: area.top - l.bottom, level: l.top < area.bottom && area.top < l.bottom,
    out: l.right - f.right, width: area.width, ascending, names: [...legend.children].map((c) => c.textContent.trim()), ends: ends};
});
"""


@pytest.mark.parametrize("width", [320, 390, 1280, 2000])
@pytest.mark.parametrize("name", ["one", "many"])
def test_names_stand_beside_the_ends_of_lines_and_on_a_phone_above_them(
    tab: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    tab.open(pages[name], width)
    legends = tab.run(LEGENDS)
    assert len(legends) > 1
    for legend in legends:
        assert legend["out"] <= 0.5 and legend["width"] > 180
        if width < 600:
            assert legend["above"] >= 0
        else:
            assert legend["right"] >= 0 and legend["level"] and legend["ascending"]
        place = {found: at for at, found in legend["ends"]}
        assert [place[found] for found in legend["names"]] == [at for at, _ in legend["ends"]]


def test_light_and_dark_and_text_that_can_be_read(tab: Browser, pages: dict[str, Path]) -> None:
    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(a: str, b: str) -> float:
        low, high = sorted([luminance(a), luminance(b)])
        return (high + 0.05) / (low + 0.05)

    seen = {}
    for dark in (False, True):
        tab.open(pages["one"], 1280, dark=dark)
        page, text, line = tab.run(COLORS)
        assert contrast(page, text) > 10 and contrast(page, line) > 3  # WCAG: 4.5 for text, 3 for drawings
        seen[dark] = luminance(page)
    assert seen[False] > 0.9 and seen[True] < 0.05


def test_nothing_is_loaded_and_nothing_hostile_runs(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["hostile"])
    loaded, hacked, images, scripts = tab.run(
        "return [performance.getEntriesByType('resource').length, typeof window.hacked, document.images.length,"
        " document.scripts.length - document.querySelectorAll('script.data').length]"
    )
    assert (loaded, hacked, images, scripts) == (0, "undefined", 0, 1)
    tab.run(  # what would have got in would not run either: the policy knows our script alone
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
    )
    assert tab.run("return typeof window.hacked") == "undefined"


def shown(tab: Browser, at: int = 0) -> Any:
    return tab.run(
        f"const t = document.querySelectorAll('.tip')[{at}]; return t.hidden ? null : t.innerText.split('\\n')"
    )


def hover(tab: Browser, share: float) -> None:
    """The pointer over the first chart, at a share of its width."""
    x, y = tab.run(
        "const a = document.querySelector('.area'); a.scrollIntoView({block: 'center'}); const b = a.getBoundingClientRect();"
        f"return [b.left + {share} * b.width, b.top + b.height / 2]"
    )
    tab.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_pointer_shows_the_values_under_it(tab: Browser, pages: dict[str, Path], width: int) -> None:
    tab.open(pages["one"], width)
    assert shown(tab) is None
    hover(tab, 0.999)
    assert shown(tab)[0] == "step 200,000" and re.fullmatch(r"epsilon: [\d.]+", shown(tab)[1])
    last = float(shown(tab)[1].split()[1])
    hover(tab, 0.5)
    step = int(shown(tab)[0].split()[1].replace(",", ""))
    assert abs(step - 100_000) < 5_000 and 0 < float(shown(tab)[1].split()[1]) < last
    box = tab.run(
        "const r = document.querySelector('.tip').getBoundingClientRect(); return [r.left, r.right, innerWidth]"
    )
    assert 0 <= box[0] < box[1] <= box[2]
    tab.command("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert shown(tab) is None


def test_arrow_keys_go_from_point_to_point(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["one"])
    tab.run("document.querySelector('.plot').focus()")
    steps = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.command("Input.dispatchKeyEvent", type="keyDown", key=key)
        steps.append(shown(tab)[0])
    assert steps[0] == "step 1" and steps[1] != steps[0] and steps[2] == steps[0]


def test_hostile_names_are_text_under_the_pointer(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["hostile"])
    tab.run("for (const d of document.querySelectorAll('details')) d.open = true")
    count = tab.run("return document.querySelectorAll('.plot').length")
    for i in range(count):
        tab.run(f"document.querySelectorAll('.plot')[{i}].focus()")
        tab.command("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert shown(tab, i) is not None
    assert tab.run("return [typeof window.hacked, document.images.length]") == ["undefined", 0]


def test_without_javascript_the_curves_are_there(tab: Browser, pages: dict[str, Path]) -> None:
    html = re.sub(r"<script>.*?</script>", "", pages["one"].read_text(), flags=re.DOTALL)
    page = pages["one"].with_name("still.html")
    page.write_text(html)
    tab.open(page)
    boxes = tab.run(
        "return [...document.querySelectorAll('path.line')].slice(0, 5).map((p) => p.getBoundingClientRect().width)"
    )
    assert len(boxes) == 5 and min(boxes) > 200


def test_it_can_be_printed(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["one"], dark=True)
    pdf = tab.printed()
    assert pdf.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 15
    tab.command(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    page, text, _ = tab.run(COLORS)
    tab.command("Emulation.setEmulatedMedia", media="")
    assert text == "rgb(27, 31, 36)" and page in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")  # ink on paper
