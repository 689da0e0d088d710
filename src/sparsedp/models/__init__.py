"""The models of the papers."""

from sparsedp.models.pctr import PCTR

__all__ = ["PCTR"]
