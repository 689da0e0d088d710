"""Pictures: a legend beside the curves, and labels of an axis that do not lie on one another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dpformer.table import EPSILONS, PAPER, Run, plot
from benchmarks.speed.parts import PARTS, plots_of
from matplotlib.figure import Figure

from sparsedp.report import front
from sparsedp.report.panels import apart, legend_beside, log_axis
from sparsedp.report.plots import best_plot, front_plot, heat_plot

RESULTS = Path(__file__).parents[2] / "docs/speed/results.json"


def overlaps(figure: Figure) -> list[str]:
    """What lies on something else: a legend on a panel, and labels of ticks on each other."""
    figure.draw_without_rendering()
    found = []
    legends = [*figure.legends, *(legend for part in figure.subfigs for legend in part.legends)]
    for panel in figure.axes:
        assert panel.get_legend() is None, "a legend inside of the panel"
        found += ["a legend on a panel" for legend in legends if legend.get_window_extent().overlaps(panel.bbox)]
        title = panel.title.get_window_extent()
        found += ["a legend on a title" for legend in legends if legend.get_window_extent().overlaps(title)]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            labels = [label for t in ticks for label in (t.label1, t.label2) if low <= t.get_loc() <= high]
            texts = [label for label in labels if label.get_visible() and label.get_text()]
            for i, one in enumerate(texts):
                for other in texts[i + 1 :]:
                    if not one.get_rotation() and one.get_window_extent().overlaps(other.get_window_extent()):
                        found.append(f"{one.get_text()} on {other.get_text()}")
    return found


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are saved, by the names of their files, which are not written."""
    figures: dict[str, Figure] = {}

    def savefig(figure: Figure, path: Path, **_: Any) -> None:
        figures[Path(path).name] = figure

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


@pytest.mark.parametrize("part", PARTS)
def test_nothing_lies_on_another_in_the_pictures_of_the_speed_pages(
    drawn: dict[str, Figure], tmp_path: Path, part: str
) -> None:
    results = json.loads(RESULTS.read_text())
    if part not in results:
        pytest.skip(f"{part} is not part of docs/speed/results.json")
    assert plots_of(part).write_plots(results[part], tmp_path)
    assert {name: found for name, figure in drawn.items() if (found := overlaps(figure))} == {}


def test_the_learning_curves_have_plain_names_beside_them(drawn: dict[str, Figure], tmp_path: Path) -> None:
    result = {"popularity_ndcg@10": 0.02}
    curve = [(5.0, 1.0), (10.0, 2.0)]
    runs = [Run(variant, epsilon, result, curve) for variant in PAPER for epsilon in EPSILONS]
    runs.append(Run("dropout_non_private", None, result, curve))
    plot(runs, tmp_path / "curves.png")
    figure = drawn["curves.png"]
    assert overlaps(figure) == []
    names = [text.get_text() for part in figure.subfigs for text in part.legends[0].get_texts()]
    assert "Transformer, dropout 0.2, not private" in names and not any("_" in name for name in names)


def test_a_legend_has_each_name_once() -> None:
    figure = Figure(layout="constrained")
    for panel in figure.subplots(1, 2):
        panel.plot([1, 2], label="both")
        panel.plot([2, 1], label="a name that is so long that it stands in two lines of the legend")
    legend_beside(figure)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "both" and len(names) == 2 and "\n" in names[1]
    assert overlaps(figure) == []


@pytest.mark.parametrize("span", [1.5, 8, 90, 1e4, 1e9])
def test_a_logarithmic_axis_has_plain_numbers_apart(span: float) -> None:
    figure = Figure(figsize=(4, 3), layout="constrained")
    panel = figure.subplots()
    panel.plot([256, 256 * span], [3, 3 * span])
    log_axis(panel, "x")
    log_axis(panel, "y")
    assert overlaps(figure) == []
    low, high = panel.get_ylim()
    shown = [text.get_text() for text, at in zip(panel.get_yticklabels(), panel.get_yticks()) if low <= at <= high]
    assert len(shown) >= 2 and not any("$" in text for text in shown)


def test_places_that_would_lie_on_one_another_are_left_out() -> None:
    assert apart([1, 1.05, 2, 4, 1000]) == [1, 2, 4, 1000]
    assert apart([7]) == [7]


def summary_of_sizes(size: Callable[[float, float], float]) -> dict[str, Any]:
    """Of a sweep over thresholds and noise ratios, with a gradient size for each pair."""
    key = "privacy.mechanism."
    settings = [
        {
            "settings": {f"{key}threshold": t, f"{key}noise_ratio": r},
            "metric": {part: {"mean": 0.7 + 0.01 * t * r} for part in ("validation", "test")},
            "gradient_size": size(t, r),
        }
        for t in (1.0, 2.0, 5.0)
        for r in (1.0, 4.0)
    ]
    variants = {"dpsgd": {"settings": []}, "adafest": {"settings": settings}}
    point = {"point": {"privacy.target_epsilon": 3.0}, "tables_matter": True, "variants": variants}
    return {"points": [point], "metric": "auc", "more_is_better": True, "reference": "dpsgd"}


@pytest.mark.parametrize("size", [1000.0, 0.0])
def test_a_heat_map_of_sizes_that_are_all_the_same(size: float) -> None:
    figure = heat_plot(summary_of_sizes(lambda threshold, ratio: size))
    assert figure is not None
    figure.canvas.draw()


def test_a_note_above_one_panel_has_room() -> None:
    summary = front.summarise(
        [
            front.Run(group, group, {}, {}, 0, {
                **{part: {"auc": 0.7} for part in ("validation", "test")},
                "dense_gradient_size": 100, "gradient_size": size, "reduction": 100 / size, "epsilon": 1.0, "seconds": 1.0,
            })
            for group, size in (("dpsgd", 100), ("adafest", 10), ("frozen", 100))
        ],
        name="made", points=[{"privacy.target_epsilon": 1.0}], variants=["dpsgd", "adafest"], controls=["frozen"],
        reference="dpsgd", seeds=[0], losses=[0.01], margin=0.01,
    )  # fmt: skip
    assert summary["points"][0]["tables_matter"] is False
    for draw in (front_plot, best_plot):
        figure = draw(summary)
        assert figure is not None and overlaps(figure) == []
        assert "matter too little" in " ".join(panel.get_title().replace("\n", " ") for panel in figure.axes)


def test_a_heat_map_has_plain_names_and_says_which_end_is_better() -> None:
    figure = heat_plot(summary_of_sizes(lambda threshold, ratio: 10**threshold * ratio))
    assert figure is not None and overlaps(figure) == []
    panels, bars = figure.axes[:2], figure.axes[2:]
    assert all(panel.get_title().startswith("AdaFEST, epsilon = 3") for panel in panels)
    assert {(panel.get_ylabel(), panel.get_xlabel()) for panel in panels} == {("threshold", "noise ratio")}
    assert all(bar.get_ylabel() == "darker is better" for bar in bars)
    ticks = [text.get_text() for bar in bars for text in (*bar.get_yticklabels(), *bar.get_yticklabels(minor=True))]
    assert ticks and not any("$" in text for text in ticks)
