"""Click logs in Criteo's format: 13 integers, 26 categories and a click, as a schema of the reader of tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from sparsedp.data.codes import Form
from sparsedp.data.table import Table, _open
from sparsedp.data.tablefiles import Paths
from sparsedp.data.tableschema import CategoricalColumn, NumericColumn, TableSchema
from sparsedp.data.vocabulary import GivenVocabulary, HashVocabulary, Vocabulary
from sparsedp.errors import DataError

INTEGERS = 13
CATEGORIES = 26
COLUMNS = ["label", *(f"I{i + 1}" for i in range(INTEGERS)), *(f"C{i + 1}" for i in range(CATEGORIES))]
PERIOD_COLUMNS = ("period", "day", "block")

# Vocabulary sizes of Criteo's categorical features 14 to 39 (DP-AdaFEST, Table 3).
# fmt: off
CRITEO_VOCABULARY = (
    1472, 577, 82741, 18940, 305, 23, 1172, 633, 3, 9090, 5918, 64300, 3207,
    27, 1550, 44262, 10, 5485, 2161, 3, 56473, 17, 15, 27360, 104, 12934,
)
# fmt: on

CRITEO = TableSchema(
    label="label",
    numeric=tuple(NumericColumn(name, "whole") for name in COLUMNS[1 : 1 + INTEGERS]),
    categorical=tuple(CategoricalColumn(name, form=Form.HEX) for name in COLUMNS[1 + INTEGERS :]),
    columns=tuple(COLUMNS),
    quotes=False,
    optional_periods=PERIOD_COLUMNS,
    whole_users=True,
)


class ClickLog(Table):
    """A click log in Criteo's format; `open_click_log` makes it."""

    @property
    def vocabulary(self) -> HashVocabulary | GivenVocabulary:
        """What to read another log with, so that rows mean the same there."""
        found = self.vocabularies
        entries = {name: one.as_dict()[name] for name, one in found.items() if isinstance(one, GivenVocabulary)}
        if entries:
            return GivenVocabulary(entries, private=self.vocabulary_is_private)
        return HashVocabulary(self.vocabulary_sizes)


def open_click_log(
    paths: Paths,
    *,
    cache_dir: str | os.PathLike[str],
    vocabulary: Vocabulary | None = None,
    max_malformed: float = 0.001,
    progress: Callable[[int], None] | None = None,
    user_column: str | None = None,
) -> ClickLog:
    """Reads a click log in Criteo's text format (`sparsedp.data.open_table` with the schema `CRITEO`).

    Without a header the columns are label, I1..I13, C1..C26; with one they are found by these names,
    and a column `period`, `day` or `block` gives the periods. Otherwise the period is the number of the file,
    if there are several. `vocabulary` is `HashVocabulary()` unless given. `user_column` names a further column of the
    header, of whole numbers with at most 18 digits: the users of the rows, for `unit="user"`.
    """
    if user_column is not None and user_column.casefold() in map(str.casefold, COLUMNS):
        raise DataError(f"the user column {user_column!r} is read as something else")
    schema = replace(CRITEO, user=user_column, vocabulary=HashVocabulary() if vocabulary is None else vocabulary)
    return _open(ClickLog, paths, schema, cache_dir, None, max_malformed, progress)
