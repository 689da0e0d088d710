"""What is wrong with the ids of a lookup that torch could not carry out, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsedp.errors import DataError

_NAMED = 3  # ids and examples that a message names


@contextmanager
def explained_ids(table: str, rows: int, ids: Tensor) -> Iterator[None]:
    """Within it a lookup of `ids` in a table is tried. If that fails, its ids are looked at: not before, for speed."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        refuse_ids(table, rows, ids, error)
        raise


def refuse_ids(table: str, rows: int, ids: Tensor, error: BaseException) -> None:
    """Raises a `DataError` if `ids` are no whole numbers, or some of them no rows of `table` (its name, in quotes)."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"Table {table} was given ids of type {str(ids.dtype).removeprefix('torch.')}; rows are looked up by whole "
            "numbers: make them so with ids.long(), in the data set or before they get to the model."
        ) from error
    values = ids.detach().values() if ids.is_nested else ids.detach()
    wrong = (values < 0) | (values >= rows)
    if not wrong.any():
        return
    named = torch.unique(values[wrong])
    numbers = ", ".join(map(str, named[:_NAMED].tolist())) + (", ..." if len(named) > _NAMED else "")
    places = torch.unique(wrong.nonzero()[:, 0])
    where = (
        f"at place{'s' if len(places) > 1 else ''} {', '.join(map(str, places[:_NAMED].tolist()))} of the batch's ids"
    )
    refused = DataError(
        f"Table {table} has rows 0 to {rows - 1}, and was asked for row{'s' if len(named) > 1 else ''} {numbers} ({where}"
        f"{', ...' if len(places) > _NAMED else ''}). Make the table as large as the largest id, plus one, or map ids that it "
        "does not have to a row that is kept for them."
    )
    if not ids.is_nested:
        refused.places, refused.places_of = tuple(places[:_NAMED].tolist()), len(values)
    raise refused from error
