"""Data sets: tables, click logs and users' sequences, read from files and frames or generated, and metrics."""

from sparsedp.data.arrays import ArrayDataset
from sparsedp.data.clicklog import CRITEO, CRITEO_VOCABULARY, ClickLog, open_click_log
from sparsedp.data.codes import Form
from sparsedp.data.generated import GeneratedClickLog, generated_click_log, write_click_log
from sparsedp.data.generatedsequences import GeneratedSequences, generated_sequences
from sparsedp.data.generatedtimelines import GeneratedTimelines, generated_timelines
from sparsedp.data.metrics import auc, brier_score, calibration_error, calibration_ratio, class_scores, log_loss
from sparsedp.data.ranking import Ranking, popularity_scorer, rank_held_out, ranks
from sparsedp.data.sequencefiles import Actions, read_action_columns, read_actions
from sparsedp.data.sequences import (
    HeldOutItems,
    SequenceDataset,
    Sequences,
    SequenceSplit,
    make_sequences,
    open_sequences,
)
from sparsedp.data.table import Bag, Table, TableBatch, TableDataset, encode_rows, open_table
from sparsedp.data.tablecache import MalformedLine, ReadSummary
from sparsedp.data.tablecolumns import MISSING_INTEGER
from sparsedp.data.tableschema import (
    CategoricalColumn,
    NumericColumn,
    SequenceColumn,
    TableSchema,
    TextColumn,
)
from sparsedp.data.texts import TextColumns, TextDataset, open_texts
from sparsedp.data.timelines import (
    HeldOutLabels,
    LabelCollate,
    Timeline,
    TimelineDataset,
    TimelineSplit,
    split_timelines,
)
from sparsedp.data.titles import read_titles, title_rows, title_words
from sparsedp.data.tokens import HashedWords, TokenizerFolder, WordList
from sparsedp.data.vocabulary import CountVocabulary, GivenVocabulary, HashVocabulary

__all__ = [
    "CRITEO",
    "CRITEO_VOCABULARY",
    "MISSING_INTEGER",
    "Actions",
    "ArrayDataset",
    "Bag",
    "CategoricalColumn",
    "ClickLog",
    "CountVocabulary",
    "Form",
    "GeneratedClickLog",
    "GeneratedSequences",
    "GeneratedTimelines",
    "GivenVocabulary",
    "HashVocabulary",
    "HashedWords",
    "HeldOutItems",
    "HeldOutLabels",
    "LabelCollate",
    "MalformedLine",
    "NumericColumn",
    "Ranking",
    "ReadSummary",
    "SequenceColumn",
    "SequenceDataset",
    "SequenceSplit",
    "Sequences",
    "Table",
    "TableBatch",
    "TableDataset",
    "TableSchema",
    "TextColumn",
    "TextColumns",
    "TextDataset",
    "Timeline",
    "TimelineDataset",
    "TimelineSplit",
    "TokenizerFolder",
    "WordList",
    "auc",
    "brier_score",
    "calibration_error",
    "calibration_ratio",
    "class_scores",
    "encode_rows",
    "generated_click_log",
    "generated_sequences",
    "generated_timelines",
    "log_loss",
    "make_sequences",
    "open_click_log",
    "open_sequences",
    "open_table",
    "open_texts",
    "popularity_scorer",
    "rank_held_out",
    "ranks",
    "read_action_columns",
    "read_actions",
    "read_titles",
    "split_timelines",
    "title_rows",
    "title_words",
    "write_click_log",
]
