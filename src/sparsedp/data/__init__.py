"""Data sets: click logs in Criteo's format and users' sequences, read from text or generated, and metrics."""

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
from sparsedp.data.generatedsequences import GeneratedSequences, generated_sequences
from sparsedp.data.generatedtimelines import GeneratedTimelines, generated_timelines
from sparsedp.data.metrics import auc, log_loss
from sparsedp.data.ranking import Ranking, popularity_scorer, rank_held_out, ranks
from sparsedp.data.sequencefiles import Actions, read_actions
from sparsedp.data.sequences import (
    HeldOutItems,
    SequenceDataset,
    Sequences,
    SequenceSplit,
    make_sequences,
    open_sequences,
)
from sparsedp.data.timelines import (
    HeldOutLabels,
    LabelCollate,
    Timeline,
    TimelineDataset,
    TimelineSplit,
    split_timelines,
)
from sparsedp.data.titles import read_titles, title_rows, title_words
from sparsedp.data.vocabulary import CountVocabulary, GivenVocabulary, HashVocabulary

__all__ = [
    "CRITEO_VOCABULARY",
    "MISSING_INTEGER",
    "Actions",
    "ClickBatch",
    "ClickDataset",
    "ClickLog",
    "CountVocabulary",
    "GeneratedClickLog",
    "GeneratedSequences",
    "GeneratedTimelines",
    "GivenVocabulary",
    "HashVocabulary",
    "HeldOutItems",
    "HeldOutLabels",
    "LabelCollate",
    "MalformedLine",
    "Ranking",
    "ReadSummary",
    "SequenceDataset",
    "SequenceSplit",
    "Sequences",
    "Timeline",
    "TimelineDataset",
    "TimelineSplit",
    "auc",
    "collate_clicks",
    "generated_click_log",
    "generated_sequences",
    "generated_timelines",
    "log_loss",
    "make_sequences",
    "open_click_log",
    "open_sequences",
    "popularity_scorer",
    "rank_held_out",
    "ranks",
    "read_actions",
    "read_titles",
    "split_timelines",
    "title_rows",
    "title_words",
    "write_click_log",
]
