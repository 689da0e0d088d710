"""Where randomness comes from: one secret key per purpose, and streams of the cipher derived from it.

A `RandomKey` holds 256 bits from the operating system (or a test's seed). Every random number on a private path is a pure
function of the key and a path of integers such as (step, parameter, place), by SHAKE-256 and ChaCha8, so a run has no
generator state to lose: position and key are the state. `torch.manual_seed` has no influence.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sparsedp.errors import SparseDPError
from sparsedp.generator import CipherGenerator, exponentials
from sparsedp.grid import grid_of, round_to
from sparsedp.kernels import cipher, normals, row_noise
from sparsedp.kernels.threads import on_all_cores

# Elements that one thread draws at a time.
CHUNK = 1 << 18
# Tensors smaller than this are drawn at once: another thread would take longer to begin.
_DRAWN_AT_ONCE = 1 << 15
_FIRST = np.zeros(1, np.int64)
# Where a mechanism's own randomness branches off, beyond any parameter's index; and the noise that LazyDP's rows wait for.
SELECTION, PREPARATION, WAITING = (1 << 30) + 1, (1 << 30) + 2, (1 << 30) + 3


@dataclass(frozen=True)
class RandomKey:
    """A secret from which generators are derived. `seeded` keys are reproducible and must not protect a release."""

    secret: bytes
    seeded: bool

    @staticmethod
    def from_os() -> RandomKey:
        return RandomKey(os.urandom(32), seeded=False)

    @staticmethod
    def from_seed(seed: int) -> RandomKey:
        return RandomKey(hashlib.shake_256(f"seed {int(seed)}".encode()).digest(32), seeded=True)

    def __repr__(self) -> str:  # the secret must not end up in a log
        return f"RandomKey(seeded={self.seeded})"

    def _derive(self, purpose: bytes, path: tuple[int, ...], size: int) -> bytes:
        """`size` bytes that only the key and the path decide (SHAKE-256)."""
        return hashlib.shake_256(self.secret + purpose + struct.pack(f"<{len(path)}Q", *path)).digest(size)

    def child(self, *path: int) -> RandomKey:
        """A key of its own for another purpose."""
        return RandomKey(self._derive(b"child", path, 32), self.seeded)

    def generator(self, *path: int) -> CipherGenerator:
        """Random numbers of any law, from a stream of their own."""
        return CipherGenerator(cipher.stream_key(self._derive(b"generator", path, 32)))

    def stream(self, *path: int) -> np.ndarray:
        """A key of its own for `kernels.cipher`, (8,) uint32."""
        return cipher.stream_key(self._derive(b"chacha", path, 32))


@dataclass(frozen=True)
class Sums:
    """A tensor that holds sums, and is to get noise."""

    values: torch.Tensor  # contiguous
    # The places along the first axis that hold sums, ascending, int64: all others count as zero. None: all do.
    rows: torch.Tensor | None = None
    # Of selected rows of a table, all of which hold sums: values[i] is its row numbers[i]. None: it is row first + i.
    numbers: torch.Tensor | None = None
    first: int = 0
    # The columns that `values` has of a table with `width` columns; None: all.
    columns: range | None = None
    width: int = 0


class GaussianNoise:
    """Independent normal noise for the tensors of one step, drawn on all cores.

    Every element's noise is a function of the key, the step, the tensor's index, the number of the row and the column alone,
    by ChaCha8 (`kernels.cipher`), so that it does not matter who draws it, nor for which rows besides. All rows of a tensor
    are one sequence; selected rows have streams of their own, so that those between them need not be drawn.
    It is drawn on the CPU in float32, or float64 for such tensors, and copied where that is not theirs.
    """

    def __init__(self, key: RandomKey) -> None:
        self.key = key
        self._process = os.getpid()

    def fill(self, tensors: Mapping[int, torch.Tensor], std: float, step: int) -> None:
        """Overwrites each tensor with N(0, std^2); `tensors` maps a parameter's index to a contiguous tensor."""
        self._require_own_process()
        large: list[Callable[[], None]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, tensor in tensors.items():
            if std == 0:
                tensor.zero_()
                continue
            drawn = tensor
            if not _in_place(tensor):
                drawn = torch.empty(tensor.shape, dtype=_drawn_dtype(tensor))
                copies.append((tensor, drawn))
            values, key = drawn.view(-1).numpy(), self.key.stream(step, index)
            for first in range(0, len(values), CHUNK):
                draw = functools.partial(normals.fill_normal, values[first : first + CHUNK], std, key, first)
                if len(values) < _DRAWN_AT_ONCE:
                    draw()
                else:
                    large.append(draw)
        on_all_cores(lambda task: task(), large)
        for tensor, drawn in copies:
            tensor.copy_(drawn)

    def add(self, tensors: Mapping[int, Sums], std: float, step: int) -> None:
        """Sums plus N(0, std^2), rounded together to multiples of `grid_of(std)`, in place.

        `tensors` maps a parameter's index to its sums. Nothing is rounded where there is no noise.
        """
        self._require_own_process()
        if std == 0:
            for sums in tensors.values():
                zero_others(sums)
            return
        grid = grid_of(std)
        large: list[Callable[[], None]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, sums in tensors.items():
            drawn = sums.values
            count = drawn.numel()
            if count == 0:
                continue
            if sums.columns is not None:
                _add_by_whole_rows(sums, std, grid, self.key.stream(step, index))
                continue
            if not _in_place(drawn):
                drawn = drawn.to("cpu", _drawn_dtype(drawn))
                copies.append((sums.values, drawn))
            draws = _additions(sums, drawn, std, grid, self.key.stream(step, index))
            if count < _DRAWN_AT_ONCE:
                for draw in draws:
                    draw()
            else:
                large += draws
        if large:
            on_all_cores(lambda task: task(), large)
        for tensor, drawn in copies:
            tensor.copy_(drawn)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise SparseDPError("This process was forked from the one that trains: both would draw the same noise.")


def _additions(sums: Sums, drawn: torch.Tensor, std: float, grid: float, key: np.ndarray) -> list[Callable[[], None]]:
    """Adds noise to sums, which `drawn`, not empty, has in memory that can be written to: the pieces of that work."""
    if sums.numbers is not None:
        table, rows = drawn.numpy().reshape(drawn.shape[0], -1), sums.numbers.cpu().numpy()
        size = max(1, CHUNK // table.shape[1])
        return [
            functools.partial(
                row_noise.add_rows, table[first : first + size], None, std, grid, key, rows=rows[first : first + size]
            )
            for first in range(0, len(rows), size)
        ]
    values = drawn.numpy().reshape(-1)
    width = len(values) // drawn.shape[0] if drawn.ndim else 1
    offset = sums.first * width
    rows = _FIRST
    if sums.rows is not None:
        rows = sums.rows.cpu().numpy() + sums.first
    else:  # all rows with sums are one long row, which begins before this part
        width = offset + len(values)
    return [
        functools.partial(
            normals.add_normal, values[first : first + CHUNK], std, grid, key, offset + first, width, rows
        )
        for first in range(0, len(values), CHUNK)
    ]


def _add_by_whole_rows(sums: Sums, std: float, grid: float, key: np.ndarray) -> None:
    """Noise on some columns of rows: it is drawn for whole rows, some at a time, of which these columns are kept."""
    zero_others(sums)
    columns = slice(sums.columns.start, sums.columns.stop) if sums.columns is not None else slice(None)
    size = max(1, CHUNK // sums.width)

    def draw(begin: int) -> None:
        part = sums.values[begin : begin + size]
        wide = torch.zeros(len(part), sums.width, dtype=_drawn_dtype(part))
        wide[:, columns] = part
        numbers = None if sums.numbers is None else sums.numbers[begin : begin + size]
        for addition in _additions(Sums(wide, numbers=numbers, first=sums.first + begin), wide, std, grid, key):
            addition()
        part.copy_(wide[:, columns])

    on_all_cores(draw, range(0, len(sums.values), size))


def _drawn_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What normals for a tensor are drawn in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def zero_others(sums: Sums) -> None:
    """Sets the rows to zero that hold no sums."""
    if sums.rows is not None and sums.rows.numel() == 0:
        sums.values.zero_()
    elif sums.rows is not None:
        held = sums.values[sums.rows]
        sums.values.zero_()
        sums.values[sums.rows] = held


# Row numbers that share a stream of `draw_rows`. Whoever owns some of the last rows of a block draws those before them, too,
# so a block may be large; but a stream costs a few microseconds, so blocks must not be many.
_BLOCK = 1 << 32


def draw_rows(key: RandomKey, first: int, end: int, log_p: float) -> np.ndarray:
    """Those of the rows `first` to `end` - 1 that are drawn, each with probability e^log_p, independently; ascending.

    A function of the key and the row's number alone. The cost is proportional to the rows that are drawn, and blocks.
    """
    return _draw_blocks(key, first, end, log_p)[0]


def draw_marked_rows(key: RandomKey, first: int, end: int, log_p: float) -> tuple[np.ndarray, np.ndarray]:
    """As `draw_rows`, and for each row that is drawn a uniform number on (0, 1), likewise its own."""
    return _draw_blocks(key, first, end, log_p, marked=True)


def _draw_blocks(
    key: RandomKey, first: int, end: int, log_p: float, marked: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    rows, marks = [np.empty(0, np.int64)], [np.empty(0)]
    for block in range(first // _BLOCK, -(-end // _BLOCK)):
        start = block * _BLOCK
        # A stream is read from its beginning, and so gives the same rows whatever the end is.
        places = key.generator(block, 0).ones(min(_BLOCK, end - start), log_p)
        skipped = int(places.searchsorted(first - start))
        rows.append(start + places[skipped:])
        if marked:
            marks.append(key.generator(block, 1).random(len(places))[skipped:] + 2.0**-54)
    return np.concatenate(rows), np.concatenate(marks)


def one_normal_each(key: RandomKey, rows: np.ndarray) -> np.ndarray:
    """A standard normal number for each row, float32 (n,): a function of the key and the row's number alone."""
    out = np.empty((len(rows), 1), np.float32)
    row_noise.fill_rows(out, rows, 1.0, key.stream())
    return out[:, 0]


def one_gumbel_each(key: RandomKey, rows: np.ndarray) -> np.ndarray:
    """A Gumbel number for each row, float64 (n,), likewise."""
    words = np.empty(len(rows), np.uint64)
    row_noise.fill_row_words(words, rows, key.stream())
    return -np.log(exponentials(words))


def row_normals(key: RandomKey, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Standard normals for rows of the table `like`, (n, ...): a function of the key, each row's number and the column."""
    out = torch.empty(rows.numel(), like.shape[1:].numel(), dtype=_drawn_dtype(like))
    row_noise.fill_rows(out.numpy(), rows.cpu().numpy(), 1.0, key.stream())
    return out.to(like).view(rows.numel(), *like.shape[1:])


def add_row_normals(
    key: RandomKey,
    table: torch.Tensor,
    rows: torch.Tensor,
    std: np.ndarray,
    grid: float,
    factor: np.ndarray | None = None,
    numbers: torch.Tensor | None = None,
) -> None:
    """table[rows[i]] = factor[i] table[rows[i]] + std[i] z, rounded to multiples of `grid`, in place.

    z is what `row_normals` draws for the row numbers[i] (None: rows[i]); `rows` are distinct; `factor` None: 1.
    """
    if _in_place(table):
        target, names = table.view(len(table), -1).numpy(), None if numbers is None else numbers.numpy()
        row_noise.add_rows(target, rows.numpy(), std, grid, key.stream(), factor, names)
        torch.autograd.graph.increment_version(table)
        return
    numbers = rows if numbers is None else numbers
    wide = table[rows].double() * _column(1.0 if factor is None else factor, table)
    table[rows] = round_to(wide + _wide_normals(key, numbers, table) * _column(std, table), grid).to(table)


def move_row_pairs(
    keys: tuple[RandomKey, RandomKey], table: torch.Tensor, other: torch.Tensor, rows: torch.Tensor, drift: np.ndarray,
    std: np.ndarray, grids: tuple[float, float], shift: torch.Tensor | None = None, numbers: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Rows of two tables of one shape, moved by noise that they share: see `row_noise.move_pairs`.

    The numbers of the rows are `numbers`; None: `rows`.
    """
    if _in_place(table) and _in_place(other):
        one, two = (tensor.view(len(tensor), -1).numpy() for tensor in (table, other))
        shifts = None if shift is None else shift.reshape(len(rows), -1).numpy()
        streams, names = (keys[0].stream(), keys[1].stream()), None if numbers is None else numbers.numpy()
        row_noise.move_pairs(one, two, rows.numpy(), drift, std, shifts, grids, streams, names)
        for tensor in (table, other):
            torch.autograd.graph.increment_version(tensor)
        return
    numbers = rows if numbers is None else numbers
    w, v = table[rows].double(), other[rows].double()
    z, rest = (_wide_normals(key, numbers, table) for key in keys)
    z = z if shift is None else z + shift
    ww, wv, vw, vv = (_column(part, table) for part in drift)
    for_table, for_other, alone = (_column(part, table) for part in std)
    table[rows] = round_to(ww * w + wv * v + for_table * z, grids[0]).to(table)
    other[rows] = round_to(vw * w + vv * v + for_other * z + alone * rest, grids[1]).to(other)


def move_rows_by_noise(
    key: RandomKey, table: torch.Tensor, rows: torch.Tensor, factor: float, std: float, values: torch.Tensor, step: float,
    grid: float, numbers: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """table[rows] = factor table[rows] + std z + step values, rounded as `add_row_normals` rounds, out of exact numbers.

    z is what `row_normals` draws for the rows `numbers` (None: `rows`); `values` are (n, ...), of the table's type. Rounded
    otherwise, by the same grid, these rows would show: ties between the table's numbers and the grid's fall in another way.
    """
    if _in_place(table):
        target, added = (tensor.reshape(len(tensor), -1).numpy() for tensor in (table, values))
        names = None if numbers is None else numbers.numpy()
        row_noise.move_rows(target, rows.numpy(), factor, std, added, step, grid, key.stream(), names)
        torch.autograd.graph.increment_version(table)
        return
    wide = table[rows].double()
    noisy = std * _wide_normals(key, rows if numbers is None else numbers, table) + step * values.double().view_as(wide)
    table[rows] = round_to(factor * wide + noisy, grid).to(table)


def _wide_normals(key: RandomKey, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What `row_normals` draws for a table of at least float32, in float64."""
    return row_normals(key, rows, table[:0].to(_drawn_dtype(table))).double()


def _in_place(table: torch.Tensor) -> bool:
    """Whether compiled loops can write to it."""
    return table.is_cpu and table.is_contiguous() and table.dtype in (torch.float32, torch.float64)


def _column(values: float | np.ndarray, table: torch.Tensor) -> torch.Tensor:
    """One number for each of some rows, float64, to be multiplied with them."""
    return torch.as_tensor(values, dtype=torch.float64, device=table.device).view(-1, *[1] * (table.ndim - 1))
