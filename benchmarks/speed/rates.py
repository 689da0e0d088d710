"""What this machine does in a second at best, on all threads: the rates that lower bounds are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.work import FLOAT, Product, Work
from sparsedp.kernels.loops import move_rows
from sparsedp.kernels.threads import on_all_cores, split
from sparsedp.noise import GaussianNoise, RandomKey

_FEWEST = 5  # repeats of anything
_SHORTEST = 1e-3  # seconds: what takes less is done several times in a row
_NUMBERS = 1 << 22  # normals that are drawn at a time
_CACHED = 1 << 18  # exponentials that are taken at a time: in the processor's cache, as in a chunk of a softmax
_LOOKED_UP = 1 << 24, 1 << 17  # bytes and rows that are looked up at a time, at most


class Rates:
    """Measures what it is asked for, once. `seconds` is how long each way of doing something is tried.

    `streams` are sizes in bytes at which reading and copying are measured: what fits into the cache moves faster.
    `table` is the size in bytes of the table that rows are looked up in, to be far larger than the cache.
    """

    def __init__(self, seconds: float, streams: tuple[int, ...], table: int) -> None:
        self._seconds, self._streams, self._table_bytes = seconds, tuple(sorted(streams)), table
        self._found: dict[tuple, float] = {}
        self._memory: Tensor | None = None

    # ------------------------------------------------------------------ times

    def compute(self, work: Work) -> float:
        """The least seconds for what is computed."""
        products = sum(count * product.flops / self.product(product) for product, count in work.products.items())
        normals = work.normals / self.normals() if work.normals else 0.0
        return products + normals + (work.exponentials / self.exponentials() if work.exponentials else 0.0)

    def move(self, work: Work) -> float:
        """The least seconds for what is read and written."""
        streamed = work.streamed / self.stream(work.streamed) if work.streamed else 0.0
        gathered = sum(FLOAT * width * rows / self.gather(width) for width, rows in work.gathered.items())
        scattered = sum(2 * FLOAT * width * rows / self.scatter(width) for width, rows in work.scattered.items())
        return streamed + gathered + scattered

    # ------------------------------------------------------------------ rates

    def product(self, product: Product) -> float:
        """Flops in a second, with the operands' layout that suits it best."""

        def measure() -> float:
            batch, m, k, n = product
            shape = (batch,) if batch > 1 else ()
            run = torch.bmm if batch > 1 else torch.mm
            out = torch.empty(*shape, m, n)
            best = float("inf")
            for turned_a in (False, True):
                a = torch.rand(*shape, k, m).mT if turned_a else torch.rand(*shape, m, k)
                for turned_b in (False, True):
                    b = torch.rand(*shape, n, k).mT if turned_b else torch.rand(*shape, k, n)
                    best = min(best, self._best(lambda a=a, b=b: run(a, b, out=out)))  # type: ignore[misc]
            return product.flops / best

        return self._once(("product", product), measure)

    def stream(self, size: int) -> float:
        """Bytes in a second, reading or copying, whichever is faster, if it is `size` bytes that are moved."""
        chosen = next((measured for measured in self._streams if measured >= size), self._streams[-1])
        return max(self.copy(chosen), self.read(chosen))

    def copy(self, size: int) -> float:
        """Bytes read and written in a second; `size` of both together."""

        def measure() -> float:
            source = torch.ones(size // (2 * FLOAT))
            target = torch.zeros_like(source)
            return size / self._best(lambda: target.copy_(source))

        return self._once(("copy", size), measure)

    def read(self, size: int) -> float:
        def measure() -> float:
            source = torch.ones(size // FLOAT)
            return size / self._best(source.sum)

        return self._once(("read", size), measure)

    def gather(self, width: int) -> float:
        """Bytes in a second, of rows anywhere in a table that are read into a new place."""
        width = _rounded(width)

        def measure() -> float:
            table = self._table(width)
            out = torch.empty(self._rows(table), width)
            ids = torch.empty(0, dtype=torch.long)

            def others() -> None:
                nonlocal ids
                ids = torch.randint(len(table), (len(out),))

            return FLOAT * out.numel() / self._best(lambda: torch.index_select(table, 0, ids, out=out), others)

        return self._once(("gather", width), measure)

    def scatter(self, width: int) -> float:
        """Bytes read and written in a second, of distinct rows, ascending, that are changed in place."""
        width = _rounded(width)

        def measure() -> float:
            table = self._table(width)
            values = torch.zeros(self._rows(table), width)
            rows = torch.empty(0, dtype=torch.long)

            def others() -> None:
                nonlocal rows
                rows = torch.unique(torch.randint(len(table), (len(values),)))

            def run() -> None:
                pieces = split(len(rows), width)
                on_all_cores(lambda part: move_rows(table, rows[part], values[part], 1.0), pieces)

            seconds = self._best(run, others)
            return 2 * FLOAT * len(rows) * width / seconds

        return self._once(("scatter", width), measure)

    def normals(self) -> float:
        """Normal numbers drawn in a second."""

        def measure() -> float:
            values, noise, steps = torch.empty(_NUMBERS), GaussianNoise(RandomKey.from_os()), iter(range(1 << 60))
            return _NUMBERS / self._best(lambda: noise.fill({0: values}, 1.0, next(steps)))

        return self._once(("normals",), measure)

    def exponentials(self) -> float:
        def measure() -> float:
            values = torch.rand(_CACHED)
            out = torch.empty_like(values)
            return _CACHED / self._best(lambda: torch.exp(values, out=out))

        return self._once(("exponentials",), measure)

    def to_dict(self) -> dict[str, Any]:
        """All that was measured: flops, bytes or numbers in a second."""

        def those(kind: str) -> dict[str, float]:
            return {str(key[1]): rate for key, rate in self._found.items() if key[0] == kind}

        for size in self._streams:
            self.stream(size)
        products = [
            {**key[1]._asdict(), "flops_per_second": rate} for key, rate in self._found.items() if key[0] == "product"
        ]
        return {
            "copy": those("copy"),
            "read": those("read"),
            "gather": those("gather"),
            "scatter": those("scatter"),
            "normals": self.normals(),
            "exponentials": self.exponentials(),
            "products": products,
            "table_bytes": self._table_bytes,
        }

    # ------------------------------------------------------------------ measuring

    def _once(self, key: tuple, measure: Callable[[], float]) -> float:
        if key not in self._found:
            self._found[key] = measure()
        return self._found[key]

    def _table(self, width: int) -> Tensor:
        """(rows, width): the same memory for all widths, filled once."""
        if self._memory is None:
            self._memory = torch.ones(self._table_bytes // FLOAT)
        rows = max(1, self._memory.numel() // width)
        return self._memory[: rows * width].view(rows, width)

    def _rows(self, table: Tensor) -> int:
        return max(1, min(_LOOKED_UP[0] // (FLOAT * table.shape[1]), _LOOKED_UP[1], len(table) // 2))

    def _best(self, run: Callable[[], Any], before: Callable[[], None] | None = None) -> float:
        """The least seconds of `run`. What is short is repeated without a pause, unless something comes `before` each."""
        if before is not None:
            before()
        run()  # whatever happens the first time
        times = 1
        if before is None:
            start = time.perf_counter()
            run()
            times = max(1, int(_SHORTEST / max(time.perf_counter() - start, 1e-9)))
        seconds: list[float] = []
        begin = time.perf_counter()
        while len(seconds) < _FEWEST or time.perf_counter() - begin < self._seconds:
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(times):
                run()
            seconds.append((time.perf_counter() - start) / times)
        return min(seconds)


def _rounded(width: int) -> int:
    """A width rounded up to a power of two: few widths are measured, and longer rows take less time for each byte."""
    return 1 << (width - 1).bit_length()
