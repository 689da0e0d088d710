"""Rules for selection and noise on tables. One file each."""

from sparsedp.mechanisms.adafest import AdaFEST
from sparsedp.mechanisms.base import Mechanism, Step, mechanism_from_dict
from sparsedp.mechanisms.dpsgd import DPSGD
from sparsedp.mechanisms.eana import (
    EANA,
    eana_advisory_epsilon,
    eana_renyi_bound,
    eana_renyi_bound_as_printed,
    eana_renyi_bound_by_row,
    eana_renyi_bound_of_unit,
    eana_renyi_divergences,
)
from sparsedp.mechanisms.exponential import ExponentialSelection
from sparsedp.mechanisms.fest import FEST
from sparsedp.mechanisms.lazydp import LazyDP
from sparsedp.mechanisms.look import Look, PublicCounts

__all__ = [
    "DPSGD",
    "EANA",
    "FEST",
    "AdaFEST",
    "ExponentialSelection",
    "LazyDP",
    "Look",
    "Mechanism",
    "PublicCounts",
    "Step",
    "eana_advisory_epsilon",
    "eana_renyi_bound",
    "eana_renyi_bound_as_printed",
    "eana_renyi_bound_by_row",
    "eana_renyi_bound_of_unit",
    "eana_renyi_divergences",
    "mechanism_from_dict",
]
