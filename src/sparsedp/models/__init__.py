"""The models of the papers, and classifiers of texts."""

from sparsedp.models.dlrm import DLRM, dlrm_table_sizes
from sparsedp.models.dpformer import DPFormer
from sparsedp.models.dual import DualEncoder
from sparsedp.models.dual_features import FeatureDualEncoder
from sparsedp.models.pctr import PCTR
from sparsedp.models.recurrent import RecurrentRecommender
from sparsedp.models.sequence import SequenceModel
from sparsedp.models.text_bag import TextBag
from sparsedp.models.text_encoder import Lora, TextEncoder, read_encoder

__all__ = [
    "DLRM",
    "PCTR",
    "DPFormer",
    "DualEncoder",
    "FeatureDualEncoder",
    "Lora",
    "RecurrentRecommender",
    "SequenceModel",
    "TextBag",
    "TextEncoder",
    "dlrm_table_sizes",
    "read_encoder",
]
