"""What is asked of a collate function: a stand-in for an empty batch, and that examples stay apart and in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from sparsedp.capture import jagged_inputs
from sparsedp.errors import SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.sampling.layout import BatchLayout, are_offsets, as_rows, counted_rows, equal_batches, layout_of, same

_TRIED = 32  # examples on which a collate function is tried
_BESIDE = 8  # likewise, where all but one stay the same


def stand_in(dataset: Any, collate: Callable[[Any], Any]) -> Any:
    """What the loop is given in place of a batch of no units: a batch of one example, whose gradient is thrown away.

    Few models run on no example at all, and few collate functions make a batch of none. It is the data set's first example,
    because nothing else is sure to have ids that exist and lengths that are allowed.
    """
    return collate(_fetch(dataset, [0]))


def examine(dataset: Any, collate: Callable[[Any], Any], public: Sequence[str] = ()) -> BatchLayout:
    """How `collate` lays out a batch; raises if it is seen to let examples depend on each other.

    - In what has one row per example, exchanging one of some examples for others may change no more than one row, and
      leaving one out may take no more than one away: in-batch negatives, batch statistics.
    - What has no axis of examples must be the same in all of these batches, or be declared `public` (`layout_of`).

    What cannot be judged passes: a collate function or a data set that makes other rows each time, or that fails here (with
    a warning), and rows that change their shape. Batches of default_collate have nothing but rows of examples, if these are
    read one by one; `__getitems__`, which reads those of a batch together, may mix them.
    """
    if collate is default_collate and not getattr(dataset, "__getitems__", None):
        return BatchLayout(is_rows=True)
    places, others = _places(len(dataset))
    exchanged = [[*places[:-1], other] for other in others[:3]]
    tried = [places, places, *exchanged, places[1:], (others + places[::-1])[: len(places) - 2]]
    try:
        with torch.random.fork_rng(devices=[]):
            batches = [collate(_fetch(dataset, chosen)) for chosen in tried]
    except Exception as error:  # such as of a data set that only workers can read
        warnings.warn(
            f"Whether collate_fn keeps examples apart was not seen, because it could not be tried here: {error!r}",
            SparseDPWarning,
            stacklevel=2,
        )
        return BatchLayout()
    sizes = [len(chosen) for chosen in tried]
    entries, constants, elsewhere = layout_of(batches, sizes, public)
    offsets = []
    for entry in entries:
        arrays = [array for array in map(as_rows, entry.values) if array is not None]
        if len(arrays) != len(tried) or not same(arrays[0], arrays[1]):
            continue
        before, _, *changed, without, _ = arrays
        moved = before.shape[1:] == without.shape[1:] and not same(before[1:], without)
        lost = (counted_rows(before) - counted_rows(without)).total() if moved else 0
        fixed = bool(changed) and all(same(before, other) for other in changed)
        if moved and (lost > 1 or fixed) and all(are_offsets(array) and not array[:1].any() for array in arrays):
            offsets.append(entry)
        elif lost > 1 or any(
            before.shape == other.shape and (counted_rows(before) - counted_rows(other)).total() > 1
            for other in changed
        ):
            raise UnsupportedError(
                f"{_maker(dataset)} makes rows of an example from other examples of the batch (in-batch negatives?): with one "
                f"example exchanged or left out, rows of others changed in {entry.path}. A unit's gradient would then depend on "
                "other units, and clipping would not bound what one of them does. Make each row of its own example alone; "
                "sparsedp.nn.CandidateSampler draws negatives from the vocabulary."
            )
    _refuse_mixed_rows(dataset, batches, sizes)
    axes = tuple((entry, entry.axis_of_units(sizes)) for entry in (*entries, *elsewhere))
    return BatchLayout(tuple(constants), tuple(offsets), axes)


def _refuse_mixed_rows(dataset: Any, batches: Sequence[Any], sizes: Sequence[int]) -> None:
    """Of jagged tensors, as `examine`: raises if an example has other rows because another one was exchanged or left out."""
    before, again, *changed, without, _ = [list(jagged_inputs(batch, size)) for batch, size in zip(batches, sizes)]
    for place, jagged in enumerate(before):
        rows = [jagged.of_unit(unit) for unit in range(jagged.units)]
        others = [several[place] for several in (again, *changed, without) if len(several) > place]
        if len(others) < len(changed) + 2 or [others[0].of_unit(unit) for unit in range(jagged.units)] != rows:
            continue  # it makes other rows each time
        stayed = all([other.of_unit(unit) for unit in range(jagged.units - 1)] == rows[:-1] for other in others[1:-1])
        if not stayed or [others[-1].of_unit(unit) for unit in range(jagged.units - 1)] != rows[1:]:
            raise UnsupportedError(
                f"{_maker(dataset)} gives an example other rows of a jagged tensor if another example is exchanged or left out: "
                "its lengths are not those of the same examples as its values, or rows are made of the whole batch. A unit's "
                "gradient would then depend on other units, and clipping would not bound what one of them does."
            )


def _maker(dataset: Any) -> str:
    is_batched = getattr(dataset, "__getitems__", None) is not None
    return f"collate_fn, or __getitems__ of {type(dataset).__name__}," if is_batched else "collate_fn"


def _places(size: int) -> tuple[list[int], list[int]]:
    """Places of some examples, at least three, repeated if there are fewer; and places of up to three others."""
    places = np.unique(np.linspace(0, size - 1, min(size, _BESIDE)).astype(int)).tolist()
    others = list(islice((place for place in range(size) if place not in places), 3))
    return [places[i % len(places)] for i in range(max(3, len(places)))], others


def is_repeatable(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Whether collating the same examples again gives the same batch: nothing in it is drawn at random."""
    places, _ = _places(len(dataset))
    with torch.random.fork_rng(devices=[]):
        one, other = (collate(_fetch(dataset, places)) for _ in range(2))
    return equal_batches(one, other)


def collate_anew(loader: DataLoader, count: int, examined: bool) -> tuple[Any, int, Callable[[int, int], Any]]:
    """A batch of at most `count` examples, from all over the loader's data set, how many, and what makes others of them.

    The last gives a batch of so many copies of one of them, `(place, copies)`.

    Raises as `examine` does, which it calls unless that was done before.
    """
    data: Any = list(islice(loader.dataset, count)) if isinstance(loader.dataset, IterableDataset) else loader.dataset
    if len(data) < 2:
        raise SparseDPError(f"At least 2 examples are needed to see whether units mix; data_loader= has {len(data)}.")
    if not examined:
        examine(data, loader.collate_fn)
    if not is_repeatable(data, loader.collate_fn):
        raise SparseDPError(
            "The data set or collate_fn makes other values each time (negatives that are drawn, or masks?), so that a unit "
            "alone cannot be compared with the same unit among others. Give check a batch instead of data_loader=."
        )
    places = np.unique(np.linspace(0, len(data) - 1, min(len(data), count)).astype(int)).tolist()

    def copies_of(place: int, copies: int) -> Any:
        return loader.collate_fn(_fetch(data, [places[place]] * copies))

    return loader.collate_fn(_fetch(data, places)), len(places), copies_of


def refuse_reordering(dataset: Any, collate: Callable[[Any], Any]) -> None:
    """Raises if `collate` is seen to sort its examples: whose example is where would then not be known.

    Some examples are collated in order and in reverse. What has one row per example must come out reversed; if the same
    rows come out in any other order, they were sorted. A collate function that makes other rows each time cannot be judged
    like that, and passes.
    """
    size = len(dataset)
    places = np.unique(np.linspace(0, size - 1, min(size, _TRIED)).astype(int)).tolist()
    ahead = list(_arrays(collate(_fetch(dataset, places))))
    back = list(_arrays(collate(_fetch(dataset, places[::-1]))))
    pairs = [
        (one, other)
        for one, other in zip(ahead, back)
        if one.shape[:1] == (len(places),) and one.shape == other.shape and not are_offsets(one)
    ]
    if any(not same(one[::-1], other) and counted_rows(one) == counted_rows(other) for one, other in pairs):
        raise UnsupportedError(
            "collate_fn changes the order of its examples (it sorts them?), so that it is not known which example of a batch "
            "is which user's. Keep them in order, and mask what is padded instead."
        )


def _arrays(batch: Any) -> Iterator[np.ndarray]:
    """The tensors and arrays of a batch, always in the same order."""
    if isinstance(batch, torch.Tensor):
        if not batch.is_nested and batch.layout == torch.strided:
            yield batch.detach().cpu().numpy()
    elif isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield from _arrays(batch[key])
    elif isinstance(batch, (tuple, list)):
        if batch and all(isinstance(item, (int, float, str, bytes)) for item in batch):
            yield np.asarray(batch)
        else:
            for item in batch:
                yield from _arrays(item)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for f in fields(batch):
            yield from _arrays(getattr(batch, f.name))


def _fetch(dataset: Any, places: Sequence[int]) -> Any:
    """The examples at `places`, in the way torch's loader fetches a batch."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(list(places))
    return [dataset[place] for place in places]
