"""The result of `python -m benchmarks distributed` as plots; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.distributed.setting import MODELS, SHARDINGS, VARIANTS, Setting
from benchmarks.speed.names import COLORS
from sparsedp.report.panels import legend_beside, log_axis


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """distributed_ratios.png: steps and bytes over TorchRec's; distributed_scaling.png: measured and modelled steps."""
    written = {}
    if result["rows"]:
        written["distributed_ratios.png"] = _ratios(result)
    if result["scaling"] is not None and any("model" in row for row in result["scaling"]["rows"]):
        written["distributed_scaling.png"] = _scaling(result["scaling"])
    for name, figure in written.items():
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
    return list(written)


def _label(setting: Setting) -> str:
    return f"{MODELS[setting.model]}, {SHARDINGS[setting.sharding]}" + (
        f", {setting.ids} ids" if setting.ids > 1 else ""
    )


def _ratios(result: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(10.5, 4), layout="constrained")
    sparse = [row for row in result["rows"] if row["variant"] not in ("plain", "dpsgd")]
    names = [name for name in VARIANTS if any(row["variant"] == name for row in sparse)]
    titles = {"ratio_to_plain": "time of a step / TorchRec's, best", "bytes_ratio_to_plain": "bytes sent / TorchRec's"}
    for panel, (key, title) in zip(figure.subplots(1, 2), titles.items()):
        for setting in dict.fromkeys(Setting(**row["setting"]) for row in sparse):
            mine = {row["variant"]: row[key] for row in sparse if Setting(**row["setting"]) == setting}
            heights = [mine[name]["best"] if key == "ratio_to_plain" else mine[name] for name in mine]
            panel.plot([names.index(name) for name in mine], heights, "o", label=_label(setting))
        panel.axhline(1, color="0.6", linewidth=0.8)
        panel.set_xticks(range(len(names)), [VARIANTS[name] for name in names], rotation=30, ha="right")
        panel.set_xlim(-0.5, len(names) - 0.5)
        panel.grid(axis="x", alpha=0.25)
        panel.tick_params(axis="x", labelsize=7)
        panel.set_ylim(bottom=0)
        panel.set_title(f"{title} (lower is better)", fontsize=9)
    legend_beside(figure)
    return figure


def _scaling(scaling: Mapping[str, Any]) -> Figure:
    settings = list(dict.fromkeys(Setting(**row["setting"]) for row in scaling["rows"]))
    figure = Figure(figsize=(2 + 3.2 * len(settings), 3.6), layout="constrained")
    for panel, setting in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings):
        for row in (row for row in scaling["rows"] if Setting(**row["setting"]) == setting):
            hosts = sorted(map(int, row["model"]))
            (line,) = panel.plot(
                hosts,
                [1e3 * row["model"][str(n)] for n in hosts],
                "--",
                color=COLORS[row["variant"]],
                label=VARIANTS[row["variant"]],
            )
            panel.plot([1, 2], [1e3 * row["measured"][n] for n in ("1", "2")], "o", color=line.get_color())
        log_axis(panel, "x", hosts)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("hosts (dots: measured; lines: a model)", fontsize=8)
        panel.set_title(_label(setting), fontsize=9)
    figure.supylabel("ms of a step (lower is better)", fontsize=8)
    legend_beside(figure)
    return figure
