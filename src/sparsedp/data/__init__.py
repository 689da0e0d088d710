"""Data sets: click logs in Criteo's format, read from text or generated, and metrics."""

from sparsedp.data.clickcache import MalformedLine, ReadSummary
from sparsedp.data.clicklog import (
    CRITEO_VOCABULARY,
    ClickBatch,
    ClickDataset,
    ClickLog,
    collate_clicks,
    open_click_log,
)
from sparsedp.data.clickparse import MISSING_INTEGER
from sparsedp.data.generated import GeneratedClickLog, generated_click_log, write_click_log
from sparsedp.data.metrics import auc, log_loss
from sparsedp.data.vocabulary import CountVocabulary, GivenVocabulary, HashVocabulary

__all__ = [
    "CRITEO_VOCABULARY",
    "MISSING_INTEGER",
    "ClickBatch",
    "ClickDataset",
    "ClickLog",
    "CountVocabulary",
    "GeneratedClickLog",
    "GivenVocabulary",
    "HashVocabulary",
    "MalformedLine",
    "ReadSummary",
    "auc",
    "collate_clicks",
    "generated_click_log",
    "log_loss",
    "open_click_log",
    "write_click_log",
]
