"""SparseDP: differentially private training of PyTorch models with large embedding tables."""

from sparsedp import accounting, convex, nn
from sparsedp.check import CheckReport, check
from sparsedp.clipping import Clipping
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteGradientError,
    SparseDPError,
    SparseDPWarning,
    UnitsMixedError,
    UnsupportedError,
)
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, LazyDP, Mechanism
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import Stream
from sparsedp.statement import PrivacyStatement
from sparsedp.version import __version__

__all__ = [
    "DPSGD",
    "EANA",
    "FEST",
    "AdaFEST",
    "CheckReport",
    "CheckpointError",
    "Clipping",
    "ConfigError",
    "DataError",
    "ExponentialSelection",
    "FrequencyRelease",
    "LazyDP",
    "Mechanism",
    "NonFiniteGradientError",
    "PrivacyEngine",
    "PrivacyPlan",
    "PrivacyStatement",
    "SparseDPError",
    "SparseDPWarning",
    "Stream",
    "UnitsMixedError",
    "UnsupportedError",
    "__version__",
    "accounting",
    "check",
    "convex",
    "nn",
]
