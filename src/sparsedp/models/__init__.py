"""The models of the papers."""

from sparsedp.models.dlrm import DLRM, dlrm_table_sizes
from sparsedp.models.pctr import PCTR

__all__ = ["DLRM", "PCTR", "dlrm_table_sizes"]
