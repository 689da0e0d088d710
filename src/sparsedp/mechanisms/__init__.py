"""Rules for selection and noise on tables. One file each."""

from sparsedp.mechanisms.base import Mechanism, mechanism_from_dict
from sparsedp.mechanisms.dpsgd import DPSGD

__all__ = ["DPSGD", "Mechanism", "mechanism_from_dict"]
