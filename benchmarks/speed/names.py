"""What variants of a step are called on pages and plots, and their colours."""

from __future__ import annotations

NAMES = {
    "plain": "PyTorch",
    "dpsgd": "DP-SGD",
    "lazydp": "LazyDP",
    "eana": "EANA",
    "fest": "FEST",
    "adafest": "AdaFEST",
    "adafest+": "AdaFEST+",
    "exponential": "exponential selection",
}
COLORS = {
    "plain": "0.35",
    "dpsgd": "#d55e00",
    "lazydp": "#0072b2",
    "eana": "#009e73",
    "fest": "#e69f00",
    "adafest": "#cc79a7",
    "adafest+": "#8c510a",
    "exponential": "#56b4e9",
}
