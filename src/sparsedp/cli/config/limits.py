"""Numbers with limits, as the annotations of configurations' keys."""

from __future__ import annotations

from typing import Annotated

from sparsedp.cli.config.schema import Range

Count = Annotated[int, Range(1)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Share = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, low_open=True)]
NotNegative = Annotated[float, Range(0)]
Dropout = Annotated[float, Range(0, 1, high_open=True)]
Probability = Annotated[float, Range(0, 1, low_open=True, high_open=True)]
HeldOutShare = Annotated[float, Range(0, 1, high_open=True)]
# A share of the rows, the last ones, or the periods (days) that are held out.
HeldOut = HeldOutShare | list[int]
