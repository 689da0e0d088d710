"""SparseDP: differentially private training of PyTorch models with large embedding tables."""

from sparsedp import accounting, convex, nn
from sparsedp.advice import Advice, advise
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
    UtilityWarning,
)
from sparsedp.explain import Explanation, explain
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, LazyDP, Mechanism, PublicCounts
from sparsedp.plan import PrivacyPlan
from sparsedp.row_wise_adagrad import RowWiseAdagrad
from sparsedp.sampling import Stream
from sparsedp.settings import PrivacySettings
from sparsedp.statement import PrivacyStatement
from sparsedp.tables import dense_parameters, table_parameters
from sparsedp.validation import EarlyStopping, PrivateValidation
from sparsedp.version import __version__

__all__ = [
    "DPSGD",
    "EANA",
    "FEST",
    "AdaFEST",
    "Advice",
    "CheckReport",
    "CheckpointError",
    "Clipping",
    "ConfigError",
    "DataError",
    "EarlyStopping",
    "Explanation",
    "ExponentialSelection",
    "FrequencyRelease",
    "LazyDP",
    "Mechanism",
    "NonFiniteGradientError",
    "PrivacyEngine",
    "PrivacyPlan",
    "PrivacySettings",
    "PrivacyStatement",
    "PrivateValidation",
    "PublicCounts",
    "RowWiseAdagrad",
    "SparseDPError",
    "SparseDPWarning",
    "Stream",
    "UnitsMixedError",
    "UnsupportedError",
    "UtilityWarning",
    "__version__",
    "accounting",
    "advise",
    "check",
    "convex",
    "dense_parameters",
    "explain",
    "nn",
    "table_parameters",
]
