"""What a step has to do, counted by watching a model run once: nothing here knows a model's sizes.

Matrix products and exponentials are what torch is asked for: in the forward pass, in the backward pass (which goes to
activations alone when parameters are captured), and from the captured uses for norms and weight gradients. Bytes are those of
what is looked up, read again or changed. What an implementation could leave out, such as copies, activation functions or
gradients that are written to memory on the way, is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.speed.steps import Workload
from sparsedp.capture import Capture, Captured, RowNorms
from sparsedp.kernels import loops
from sparsedp.mechanisms import Mechanism
from sparsedp.sampling import BatchInfo

FLOAT, ID = 4, 8  # bytes


class Product(NamedTuple):
    """(m, k) times (k, n), so many at a time. A product and its transpose are the same one: m is at most n."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    @staticmethod
    def of(a: Tensor, b: Tensor) -> Product:
        """Of two matrices, or of two batches of them."""
        m, n = sorted((a.shape[-2], b.shape[-1]))
        return Product(a.shape[0] if a.ndim == 3 else 1, m, a.shape[-1], n)


@dataclass(frozen=True)
class Work:
    """What some stage cannot do without."""

    products: Counter[Product] = field(default_factory=Counter)
    gathered: Counter[int] = field(default_factory=Counter)  # rows that are read anywhere in a table, by their width
    scattered: Counter[int] = field(default_factory=Counter)  # rows that are read and written, likewise
    streamed: int = 0  # bytes that are read or written in order
    normals: int = 0
    exponentials: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products, self.gathered + other.gathered, self.scattered + other.scattered,
            self.streamed + other.streamed, self.normals + other.normals, self.exponentials + other.exponentials,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        return sum(count * product.flops for product, count in self.products.items())

    @property
    def bytes(self) -> int:
        """That are read or written. The operands of products are not among them: their rate is measured with them."""
        return self.streamed + FLOAT * (_elements(self.gathered) + 2 * _elements(self.scattered))


def _elements(rows: Mapping[int, int]) -> int:
    return sum(width * count for width, count in rows.items())


# ---------------------------------------------------------------------- watching

# Where the first factor of a product is among the arguments.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
# These take an exponential of each element of their first argument.
_EXPONENTIALS = {
    "exp", "logsumexp", "softmax", "_softmax", "log_softmax", "_log_softmax", "_log_softmax_backward_data"
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts the matrix products and exponentials of what runs within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[Product] = Counter()
        self.exponentials = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        name = name.removesuffix("_")  # in place
        if name in _PRODUCTS:
            at = _PRODUCTS[name]
            self.products[Product.of(args[at], args[at + 1])] += 1
        elif name in _EXPONENTIALS:
            self.exponentials += args[0].numel()
        return func(*args, **(kwargs or {}))

    @property
    def work(self) -> Work:
        return Work(products=self.products, exponentials=self.exponentials)


# ---------------------------------------------------------------------- a batch


@dataclass(frozen=True)
class Reading:
    """The lookups of a batch in one table."""

    rows: int  # distinct ones
    width: int
    ids: int
    outputs: int  # vectors that come out: for bags, fewer than ids


@dataclass(frozen=True)
class Counted:
    """What a batch takes, whatever the mechanism."""

    stages: dict[str, Work]  # forward, backward, collect, norms, sums
    readings: dict[str, Reading]
    sizes: dict[str, int]  # elements of each parameter

    @property
    def touched(self) -> int:
        return sum(reading.rows for reading in self.readings.values())

    @property
    def rows(self) -> int:
        """Of the tables that were read."""
        return sum(self.sizes[name] // reading.width for name, reading in self.readings.items())

    @property
    def lookups(self) -> Work:
        """Every distinct row is read once, wherever it is, and what comes out is written."""
        return Work(
            gathered=_by_width((reading.width, reading.rows) for reading in self.readings.values()),
            streamed=FLOAT * self._outputs,
        )

    @property
    def row_sums(self) -> Work:
        """What was handed back to lookups is read, and added to the touched rows' sums."""
        rows = sum(reading.rows * reading.width for reading in self.readings.values())
        return Work(streamed=FLOAT * (self._outputs + 2 * rows))

    @property
    def _outputs(self) -> int:
        return sum(reading.outputs * reading.width for reading in self.readings.values())


def _by_width(pairs: Iterable[tuple[int, int]]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for width, rows in pairs:
        counts[width] += rows
    return counts


def count(workload: Workload) -> Counted:
    """Runs a captured forward and backward pass, norms and sums, and watches them."""
    module = workload.make(True)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    units = len(workload.batch[-1])
    info = BatchInfo(units, units, True, True, 0)
    capture = Capture(module, parameters, lambda: info)
    forward, backward, collect, norms, sums = (Counting() for _ in range(5))
    capture.attach()
    try:
        with forward:
            loss = workload.loss(module, workload.batch)
        with backward:
            loss.backward()
        with collect:  # some unit gradients are written out here
            captured = capture.collect()
    finally:
        capture.detach()
    assert captured is not None
    readings = _readings(captured)
    with torch.no_grad():
        row_norms = RowNorms()
        with norms:
            for uses in captured.uses.values():
                captured.squared_norms(uses, row_norms)
        # By torch alone, which is watched: small products are added up in a compiled loop otherwise.
        with mock.patch.object(loops, "compiled", lambda *tensors: False), sums:
            for name, uses in captured.uses.items():
                if uses.is_used_in_full:
                    uses.add_weighted_sum(torch.zeros_like(parameters[name]), torch.ones(units))
    built = FLOAT * sum(built.values.numel() for uses in captured.uses.values() for built in uses.builts)
    counted = Counted({}, readings, {name: p.numel() for name, p in parameters.items()})
    counted.stages.update(
        forward=forward.work + counted.lookups,
        backward=backward.work,
        collect=collect.work,
        norms=norms.work + Work(streamed=_kept_bytes(captured)),
        sums=sums.work + counted.row_sums + Work(streamed=built),
    )
    return counted


def _readings(captured: Captured) -> dict[str, Reading]:
    readings = {}
    for name, uses in captured.uses.items():
        if uses.lookups:
            ids = torch.cat([lookup.ids for lookup in uses.lookups])
            rows = torch.unique(ids[ids >= 0]).numel()
            outputs = sum(lookup.grad.shape[0] for lookup in uses.lookups)
            readings[name] = Reading(rows, uses.lookups[0].grad.shape[1], ids.numel(), outputs)
    return readings


def _kept_bytes(captured: Captured) -> int:
    """All activations and gradients that are kept of the uses, each once."""
    kept: dict[tuple[int, int], int] = {}
    for uses in captured.uses.values():
        tensors = [tensor for linear in uses.linears for tensor in (linear.inputs, linear.grad)]
        tensors += [lookup.grad for lookup in uses.lookups] + [built.values for built in uses.builts]
        tensors += [softmax.hidden for softmax in uses.softmaxes]
        for tensor in tensors:
            kept[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(kept.values())


# ---------------------------------------------------------------------- steps


def plain_stages(workload: Workload, readings: Mapping[str, Reading]) -> dict[str, Work]:
    """Forward, backward and update of a plain step; `readings` are those of the same batch."""
    module = workload.make(True)
    forward, backward = Counting(), Counting()
    with forward:
        loss = workload.loss(module, workload.batch)
    with backward:
        loss.backward()
    counted = Counted({}, dict(readings), {})
    back, update = backward.work, Work()
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            reading = readings[name]
            values = FLOAT * reading.outputs * reading.width
            update += Work(scattered=Counter({reading.width: reading.rows}), streamed=values)
        else:
            update += _dense_update(parameter.numel())
            if name in readings:
                back += Work(streamed=FLOAT * (readings[name].outputs * readings[name].width + parameter.numel()))
    return {"forward": forward.work + counted.lookups, "backward": back, "update": update}


def private_stages(counted: Counted, mechanism: Mechanism, selected: Mapping[str, int]) -> dict[str, Work]:
    """The stages of a private step; `selected` are the rows of each table that get noise with their gradient.

    Lazily these are the touched ones, whose noise is drawn when they are settled. Without selection, tables change as a
    whole, like all other parameters.
    """
    rows = dict(selected) if mechanism.selects else {}
    widths = {name: reading.width for name, reading in counted.readings.items()}
    dense = sum(size for name, size in counted.sizes.items() if name not in rows)
    of_rows = _by_width((widths[name], count) for name, count in rows.items())
    elements = _elements(of_rows)
    stages = dict(counted.stages)
    drawn = dense if mechanism.noise_waits else dense + elements
    stages["noise"] = Work(normals=drawn, streamed=FLOAT * drawn)
    stages["update"] = _dense_update(dense) + Work(scattered=of_rows, streamed=FLOAT * elements)
    if mechanism.selects:
        ids = sum(reading.ids for reading in counted.readings.values())
        # A map of contributions has noise on every touched row.
        noisy = counted.touched if mechanism.contribution_clip is not None else 0
        stages["selection"] = Work(streamed=ID * ids, normals=noisy)
    if mechanism.noise_waits:
        stages["settling"] = Work(scattered=of_rows, normals=elements)
    return stages


def _dense_update(elements: int) -> Work:
    """Gradients are read, weights are read and written."""
    return Work(streamed=3 * FLOAT * elements)
