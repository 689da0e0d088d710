"""What the panels of all pictures have in common: a legend beside the curves, and ticks that can be read; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: it keeps global state
from matplotlib.ticker import LogLocator, NullLocator

from sparsedp.report.chart import short

_MOST_TICKS = 12
_NAME_WIDTH = 44  # letters in a line of a legend
# The wider an axis, the fewer ticks in a power of ten: (powers of ten, what the ticks are times one).
_TICKS_IN_A_POWER = ((1.0, (1, 1.5, 2, 3, 5, 7)), (3.0, (1, 2, 5)), (math.inf, (1,)))


def legend_beside(figure: Figure) -> None:
    """One legend for all panels of a figure, to the right of them: each name once, in the order of drawing."""
    entries: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, name in zip(*panel.get_legend_handles_labels()):
            entries.setdefault(fill(name, _NAME_WIDTH), handle)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize=8, frameon=False)


def log_axis(panel: Axes, which: Literal["x", "y"], places: Sequence[float] = ()) -> None:
    """Makes an axis logarithmic, with plain numbers as ticks of which none lies on another.

    They stand at `places`, where something was measured, or else at round numbers of what is drawn by now.
    """
    panel.set(**{f"{which}scale": "log"})
    axis = panel.xaxis if which == "x" else panel.yaxis
    if places:
        axis.set_ticks(apart(sorted(set(places))))
    else:
        low, high = axis.get_view_interval()
        times = next(times for powers, times in _TICKS_IN_A_POWER if math.log10(high / low) <= powers)
        axis.set_major_locator(LogLocator(subs=times))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value in range(10_000) else short(value, 3))


def apart(places: Sequence[float]) -> list[float]:
    """Those of ascending places whose numbers do not lie on one another on a logarithmic axis."""
    least = (places[-1] / places[0]) ** (1 / _MOST_TICKS)
    shown: list[float] = []
    for place in places:
        if not shown or place >= shown[-1] * least:
            shown.append(place)
    return shown
