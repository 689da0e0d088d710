"""Periods of time by their numbers: hours, days or weeks since 1970, in UTC."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

SECONDS = {"hour": 3600, "day": 86_400, "week": 604_800}
Every = Literal["hour", "day", "week"]


def period_name(number: int, every: Every | None) -> str:
    """As in 2026-03-01, or 2026-03-01T13:00 for an hour; a week has the name of its first day. None: the number itself."""
    if every is None:
        return str(number)
    try:
        start = datetime(1970, 1, 1) + timedelta(seconds=number * SECONDS[every])
    except OverflowError:  # before the year 1, or after 9999
        return str(number)
    return start.strftime("%Y-%m-%dT%H:%M" if every == "hour" else "%Y-%m-%d")
