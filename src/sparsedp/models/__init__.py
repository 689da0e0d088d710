"""The models of the papers."""

from sparsedp.models.dlrm import DLRM, dlrm_table_sizes
from sparsedp.models.dpformer import DPFormer
from sparsedp.models.dual import DualEncoder
from sparsedp.models.dual_features import FeatureDualEncoder
from sparsedp.models.pctr import PCTR
from sparsedp.models.recurrent import RecurrentRecommender
from sparsedp.models.sequence import SequenceModel

__all__ = [
    "DLRM",
    "PCTR",
    "DPFormer",
    "DualEncoder",
    "FeatureDualEncoder",
    "RecurrentRecommender",
    "SequenceModel",
    "dlrm_table_sizes",
]
