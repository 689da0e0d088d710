"""What leaves a module beside its weights: only what has not changed since make_private, or by an error that names it."""

from __future__ import annotations

import array
import copy
import dataclasses
import datetime
import decimal
import fractions
import functools
import io
import pickle
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import sparsedp
from sparsedp import UnsupportedError
from sparsedp.fingerprint import fingerprint
from support import Clicks, clicks, loader_of, make_private, train


class Keeper(nn.Module):
    """A part of the model in which something counts. `count` is what must not leave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += len(x)
        return self.linear(x)


class ByExtraState(Keeper):
    def get_extra_state(self) -> dict[str, Any]:
        return {"count": torch.tensor(self.count)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


class ByStateDict(Keeper):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        found[kwargs.get("prefix", "") + "seen"] = self.count
        return found


class BySaving(Keeper):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = torch.full((2,), float(self.count))


class ByMetadata(Keeper):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination._metadata[prefix[:-1]]["seen"] = self.count


class ByShape(Keeper):
    """A view of a weight, whose shape tells."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "view"] = self.linear.weight.detach().as_strided((self.count, 1), (0, 0))


class ByAbsence(Keeper):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.linear._save_to_state_dict(destination, prefix + "x.", keep_vars)
        if self.count:
            del destination[prefix + "x.bias"]


def _hooked(register: str) -> Callable[[], Keeper]:
    def make() -> Keeper:
        keeper = Keeper()

        def after(module: Any, state: Any, prefix: str, metadata: Any) -> None:
            state[prefix + "seen"] = [module.count]

        def before(module: Any, prefix: str, keep_vars: bool) -> None:
            if "seen" not in module._buffers:
                module.register_buffer("seen", None)
            module.seen_copy = module.count

        getattr(keeper, register)(before if "pre" in register else after)
        return keeper

    return make


def _replaced() -> Keeper:
    keeper = Keeper()

    def own(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = nn.Module.state_dict(keeper, *args, **kwargs)
        found[kwargs.get("prefix", "") + "seen"] = keeper.count
        return found

    keeper.state_dict = own  # type: ignore[assignment]
    return keeper


CARRIERS: dict[str, Callable[[], Keeper]] = {
    "get_extra_state": ByExtraState,
    "state_dict": ByStateDict,
    "_save_to_state_dict": BySaving,
    "metadata": ByMetadata,
    "the shape of a view": ByShape,
    "a missing entry": ByAbsence,
    "a post hook": _hooked("register_state_dict_post_hook"),
    "an old hook": _hooked("_register_state_dict_hook"),
    "a function in its place": _replaced,
}


class Model(nn.Module):
    def __init__(self, keeper: nn.Module) -> None:
        super().__init__()
        self.clicks = Clicks()
        self.inner = nn.Sequential(keeper)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.clicks(ids, self.inner(x))


def private(module: nn.Module, **options: Any) -> tuple[Any, Any, Any, Any]:
    return make_private(module, loader_of(*clicks(64), batch_size=8), **options)


def _under_another(module: nn.Module) -> None:
    engine = private(module)[0]
    try:
        module.state_dict()
    finally:
        engine.close()


WAYS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "state_dict": lambda engine, module, path: module.state_dict(),
    "of a part": lambda engine, module, path: module.inner[0].state_dict(),
    "of a parent": lambda engine, module, path: module.inner.state_dict(prefix="p."),
    "torch.save": lambda engine, module, path: torch.save(module.state_dict(), path / "w.pt"),
    "checkpoint": lambda engine, module, path: engine.save_checkpoint(path / "c.pt"),
    "a copy": lambda engine, module, path: copy.deepcopy(module).state_dict(),
    "a copied part": lambda engine, module, path: copy.deepcopy(module.inner).state_dict(),
    "after close": lambda engine, module, path: (engine.close(), module.state_dict()),
    "the next engine": lambda engine, module, path: (engine.close(), _under_another(module)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_forward_counts_does_not_leave_by_state_dict(tmp_path: Path, carrier: str, way: str) -> None:
    if way in ("a copy", "a copied part") and carrier == "a function in its place":
        carrier = "state_dict"  # the function stays that of the module that was copied
    module = Model(CARRIERS[carrier]())
    engine, module, optimizer, loader = private(module)
    before = set(module.state_dict())  # nothing has changed yet
    assert {name for name, _ in module.clicks.named_parameters(prefix="clicks")} <= before
    train(module, optimizer, loader)
    with pytest.raises(UnsupportedError, match=r"neither a parameter nor a buffer.*changed since make_private"):
        WAYS[way](engine, module, tmp_path)
    assert not any(tmp_path.iterdir())
    module.inner[0].count = 0
    WAYS[way](engine, module, tmp_path)  # what is as before may leave


def test_a_hook_that_is_added_later() -> None:
    engine, module, optimizer, loader = private(Model(Keeper()))
    module.clicks.table.register_state_dict_post_hook(
        lambda part, state, prefix, metadata: state.update({prefix + "n": 3})
    )
    with pytest.raises(UnsupportedError, match=r"state_dict of module 'clicks.table' \(Embedding\) holds 'n'"):
        module.state_dict()


class Box:
    def __init__(self) -> None:
        self.inside = {"n": [0]}

    def add(self, count: int) -> Box:
        self.inside["n"][0] += count
        return self


ATTRIBUTES: dict[str, tuple[Any, Callable[[Any, torch.Tensor], Any]]] = {
    "number": (0, lambda value, x: value + len(x)),
    "new": (None, lambda value, x: x.detach().clone()),
    "tensor in place": (torch.zeros(3), lambda value, x: value.add_(x.detach().sum(0))),
    "array": (np.zeros(3), lambda value, x: value + x.detach().sum(0).numpy()),
    "list": ([], lambda value, x: [*value, len(x)]),
    "dict": ({"n": {}}, lambda value, x: {"n": {"a": len(x)}}),
    "set": (set(), lambda value, x: value | {len(x)}),
    "counter": (Counter(), lambda value, x: Counter(a=len(x))),
    "deque": (deque(), lambda value, x: deque([x.detach()])),
    "object": (np.random.RandomState(0), lambda value, x: OrderedDict(a=len(x))),
    "inside of an object": (Box(), lambda value, x: value.add(len(x))),
    "sparse": (torch.eye(3).to_sparse(), lambda value, x: torch.diag(x.detach().sum(0)).to_sparse()),
}


class Noting(nn.Module):
    def __init__(self, start: Any, note: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 3), start
        self.note = _Call(note)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.note.function(self.kept, x)
        return self.linear(x)


class _Call:
    """Holds a function and is pickled without it."""

    def __init__(self, function: Any = None) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return _Call, ()


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_what_forward_keeps_does_not_leave_by_pickling(kind: str) -> None:
    engine, module, optimizer, loader = private(Model(Noting(*copy.deepcopy(ATTRIBUTES[kind]))))
    pickle.dumps(module)  # nothing has changed yet
    train(module, optimizer, loader)
    torch.save(module.state_dict(), io.BytesIO())  # it is no part of it
    for part in (module, module.inner, module.inner[0]):
        with pytest.raises(UnsupportedError, match=r"Attribute 'kept' of module 'inner.0' \(Noting\) has changed"):
            torch.save(part, io.BytesIO())
    torch.save(module.clicks, io.BytesIO())


class Buffering(nn.Module):
    def __init__(self, persistent: bool, write: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(3, 3), write
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self.register_buffer("whole", torch.zeros(5, dtype=torch.int32), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return self.linear(x)


def _parameter(module: nn.Module, x: torch.Tensor) -> None:
    module.register_parameter("fresh", nn.Parameter(x.detach().sum(0), requires_grad=False))


BUFFERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "in place": lambda module, x: module.seen.add_(x.detach().sum()),
    "another": lambda module, x: setattr(module, "seen", x.detach().sum()),
    "python number": lambda module, x: module.seen.fill_(float(x.detach().sum())),
    "of units": lambda module, x: module.seen.add_(len(x)),
    "of units, by a tensor": lambda module, x: module.seen.add_(torch.tensor(len(x))),
    "of units, whole numbers": lambda module, x: module.whole[1:].add_(len(x)),
    "registered": lambda module, x: module.register_buffer("fresh", x.detach().sum()),
    "registered, not persistent": lambda module, x: module.register_buffer("fresh", x.detach().sum(), persistent=False),
    "a parameter": _parameter,
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_that_forward_writes(kind: str, persistent: bool) -> None:
    engine, module, optimizer, loader = private(Model(Buffering(persistent, BUFFERS[kind])))
    with pytest.raises(UnsupportedError, match=r"'inner\.0\.(seen|whole|fresh)' was changed during forward"):
        train(module, optimizer, loader)


def test_a_trained_scale_may_be_kept_within_limits() -> None:
    def clamp(module: Any, x: torch.Tensor) -> None:
        module.linear.bias.data.clamp_(-0.001, 0.001)

    module = Model(nn.Sequential(Buffering(True, clamp), nn.Linear(1, 3)))
    module.inner[0][0].linear = nn.Linear(3, 1)  # its bias is one number
    engine, module, optimizer, loader = private(module)
    train(module, optimizer, loader)


def test_what_collate_counted_is_data_too() -> None:
    module = nn.ModuleDict({"inner": Buffering(True, lambda module, x: None)})
    engine, module, optimizer, loader = private(module)
    next(iter(loader))
    module["inner"].forward = lambda x, count: module["inner"].seen.copy_(count)
    with pytest.raises(UnsupportedError, match=r"'inner\.seen' was changed during forward"):
        module["inner"](torch.zeros(8, 3), torch.tensor(5.0))


def test_counters_of_passes_may_stay() -> None:
    for write in (lambda module, x: module.seen.add_(1), lambda module, x: module.seen.fill_(7.0)):
        engine, module, optimizer, loader = private(Model(Buffering(True, write)))
        train(module, optimizer, loader)


# ---------------------------------------------------------------------- what must go on working


def test_what_does_not_change_may_leave(tmp_path: Path) -> None:
    """Extra state, hooks that rename, views under a second name, tables under LazyDP."""
    module = Model(ByExtraState())
    module.inner[0].forward = module.inner[0].linear.forward  # does not count

    def again(part: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "again"] = part.clicks.out.weight.detach()

    module.register_state_dict_post_hook(again)
    module._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.pop(prefix + "again"))
    wanted = list(module.state_dict())
    for mechanism in (sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.AdaFEST()):
        engine, module, optimizer, loader = private(module, mechanism=mechanism, noise_multiplier=2.0)
        train(module, optimizer, loader)
        assert list(module.state_dict()) == wanted
        engine.save_checkpoint(tmp_path / "c.pt")
        engine.load_checkpoint(tmp_path / "c.pt")
        assert list(module.state_dict()) == wanted
        engine.close()
        assert not any("state_dict" in vars(part) for part in module.modules())


def test_stock_modules_whose_state_dict_has_hooks() -> None:
    model = Model(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    old = Model(nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.LayerNorm(3)))
    for module in (model, old):
        wanted = list(module.state_dict())
        engine, module, optimizer, loader = private(module)
        train(module, optimizer, loader)
        assert list(module.state_dict()) == wanted


def test_a_part_that_is_used_twice_and_a_part_of_its_own_name() -> None:
    module = Model(nn.Linear(3, 3))
    module.same = module.inner[0]  # type: ignore[assignment]
    wanted = list(module.state_dict())
    engine, module, optimizer, loader = private(module)
    train(module, optimizer, loader)
    assert list(module.state_dict()) == wanted and list(module.same.state_dict()) == ["weight", "bias"]


def test_state_that_a_checkpoint_brings(tmp_path: Path) -> None:
    """It was written under watch. What had changed here before is not excused by it."""
    first, second = Model(ByExtraState()), Model(ByExtraState())
    first.inner[0].count = 5  # before training
    for module in (first, second):
        module.inner[0].forward = module.inner[0].linear.forward
    a = private(first)
    train(a[1], a[2], a[3])
    a[0].save_checkpoint(tmp_path / "c.pt")
    b = private(second)
    b[0].load_checkpoint(tmp_path / "c.pt")
    assert second.inner[0].count == 5 and "inner.0._extra_state" in second.state_dict()
    second.inner[0].count = 6
    with pytest.raises(UnsupportedError, match="_extra_state"):
        second.state_dict()
    with pytest.raises(UnsupportedError, match="_extra_state"):
        b[0].load_checkpoint(tmp_path / "c.pt")
    noting = Model(Noting(0, ATTRIBUTES["number"][1]))
    engine, module, optimizer, loader = private(noting)
    engine.save_checkpoint(tmp_path / "d.pt")
    train(module, optimizer, loader)
    engine.load_checkpoint(tmp_path / "d.pt")
    with pytest.raises(UnsupportedError, match="'kept'"):
        pickle.dumps(module)


def test_large_attributes_are_not_read() -> None:
    class Endless:
        def __len__(self) -> int:
            return 1 << 40

        def __iter__(self) -> Any:
            raise AssertionError

    module = Model(nn.Linear(3, 3))
    module.data = Endless()  # type: ignore[assignment]
    module.graph = torch.sparse_coo_tensor([[0], [1]], [1.0], (1 << 30, 1 << 30))  # type: ignore[assignment]
    module.big = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,))  # type: ignore[assignment]
    module.cycle = [module]  # type: ignore[assignment]
    engine, module, optimizer, loader = private(module)
    train(module, optimizer, loader)
    module.state_dict()
    engine.close()


# ---------------------------------------------------------------------- values of any type


@dataclasses.dataclass(slots=True)
class Slotted:
    value: float


class Counted(int):
    """A number with attributes, which `repr` does not show."""

    largest: float

    @classmethod
    def of(cls, value: float) -> Counted:
        found = cls(3)
        found.largest = value
        return found


class Pair(NamedTuple):
    first: float
    second: int


def _generator(value: float) -> torch.Generator:
    return torch.Generator().manual_seed(int(value))


def _masked(value: float) -> np.ma.MaskedArray:
    return np.ma.masked_array([1.0, 2.0], mask=[False, value > 5.5])


def _beside(value: float) -> torch.Tensor:
    """Pickle writes all of its memory."""
    return torch.tensor([0.0, value])[:1]


def _with_attribute(value: float) -> torch.Tensor:
    found = torch.zeros(2)
    found.largest = value  # type: ignore[attr-defined]
    return found


KINDS: dict[str, Callable[[float], Any]] = {
    "np.int64": np.int64,
    "np.float32": np.float32,
    "np.float64": np.float64,
    "np.str_": lambda value: np.str_(value),
    "np.datetime64": lambda value: np.datetime64(int(value), "s"),
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "timedelta": lambda value: datetime.timedelta(seconds=value),
    "range": lambda value: range(int(value)),
    "slice": lambda value: slice(int(value)),
    "bytearray": lambda value: bytearray(str(value).encode()),
    "array": lambda value: array.array("d", [value]),
    "slots": Slotted,
    "a subclass of int": Counted.of,
    "namedtuple": lambda value: Pair(value, 1),
    "partial": lambda value: functools.partial(print, value),
    "torch.Size": lambda value: torch.Size([int(value)]),
    "torch.Generator": _generator,
    "numpy's generator": lambda value: np.random.default_rng(int(value)),
    "UserDict": lambda value: UserDict(a=value),
    "defaultdict": lambda value: defaultdict(list, a=[value]),
    "a set of tuples": lambda value: {(1, "a"), (2, value)},
    "an array of objects": lambda value: np.array([None, Slotted(value)], dtype=object),
    "a masked array": _masked,
    "metadata of a dtype": lambda value: np.zeros(2, np.dtype("f4", metadata={"largest": value})),
    "memory beside a view": _beside,
    "an attribute of a tensor": _with_attribute,
    "a very large number": lambda value: 10**5000 + int(value),
}


class Holder(nn.Module):
    """Keeps a number of the batch in a value of some type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(3, 3), kind
        self.put_back()

    def put_back(self) -> None:
        self.kept = KINDS[self.kind](0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = KINDS[self.kind](float(x.detach().abs().sum()) + 7)
        return self.linear(x)


class ExtraHolder(Holder):
    def get_extra_state(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_type_do_not_leave(tmp_path: Path, kind: str) -> None:
    engine, module, optimizer, loader = private(Model(ExtraHolder(kind)))
    module.state_dict()
    pickle.dumps(module)
    train(module, optimizer, loader)
    with pytest.raises(UnsupportedError, match=r"_extra_state', which is neither.*changed since make_private"):
        module.state_dict()
    with pytest.raises(UnsupportedError, match="_extra_state"):
        engine.save_checkpoint(tmp_path / "c.pt")
    assert not any(tmp_path.iterdir())
    with pytest.raises(UnsupportedError, match=r"Attribute 'kept' of module 'inner.0' \(ExtraHolder\) has changed"):
        pickle.dumps(module)
    module.inner[0].put_back()  # another object of the same value
    module.state_dict()
    pickle.dumps(module)
    engine.close()
    assert not any("state_dict" in vars(part) for part in module.modules())


def test_extra_state_that_cannot_be_compared_is_refused_at_once() -> None:
    module = Model(ExtraHolder("range"))
    module.inner[0].kept = threading.Lock()
    with pytest.raises(UnsupportedError, match=r"'_extra_state'.*cannot be pickled"):
        private(module)
    assert not any("state_dict" in vars(part) for part in module.modules())
    module.inner[0].put_back()
    engine, module, optimizer, loader = private(module)
    module.inner[0].kept = threading.Lock()
    with pytest.raises(UnsupportedError, match="_extra_state"):
        module.state_dict()


def test_attributes_that_pickle_cannot_write_do_no_harm() -> None:
    module = Model(nn.Linear(3, 3))
    module.lock, module.function = threading.Lock(), lambda x: x  # type: ignore[assignment]
    engine, module, optimizer, loader = private(module)
    train(module, optimizer, loader)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(module)
    engine.close()
    assert not any("state_dict" in vars(part) for part in module.modules())


# ---------------------------------------------------------------------- whatever pickle writes


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(float(x.detach().abs().sum()) + 7)
        return self.linear(x) * self.scale

    def note(self, value: float) -> None: ...


class OnParameter(Linear):
    def note(self, value: float) -> None:
        self.linear.weight.largest = value  # type: ignore[assignment]


class OnBuffer(Linear):
    def note(self, value: float) -> None:
        self.scale.largest = value  # type: ignore[assignment]


class Hook:
    def __init__(self) -> None:
        self.largest = 0.0

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.largest = max(self.largest, float(args[0].detach().max()))


class InHook(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(Hook())


class InPreHook(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_pre_hook(Hook())


class InAFreshPart(Linear):
    def note(self, value: float) -> None:
        if not hasattr(self, "log"):
            self.log = nn.Identity()
        self.log.largest = value  # type: ignore[assignment]


class InAHiddenPart(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Identity()]

    def note(self, value: float) -> None:
        self.hidden[0].largest = value  # type: ignore[assignment]


_seen: list[float] = []


class InGetstate(Linear):
    def note(self, value: float) -> None:
        _seen.append(value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "largest": _seen[-1]}


class InGetstateAlone(InGetstate):
    """Leaves out by what it would be watched."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_modules": self._modules, "largest": _seen[-1:]}


class InReduce(InGetstate):
    def __reduce__(self) -> Any:
        return Linear, (), {"largest": _seen[-1:]}


class UnderTheNameOfAPart(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._modules["linear"](x)
        vars(self)["scale"] = float(x.detach().abs().sum()) + 7
        return out


class InTraining(Linear):
    def note(self, value: float) -> None:
        self.linear.training = value  # type: ignore[assignment]


class InSwitches(Linear):
    """A pattern of training modes."""

    def note(self, value: float) -> None:
        self.linear.training = False


class InRequiresGrad(Linear):
    def note(self, value: float) -> None:
        self.linear.bias.requires_grad_(False)


class InAChoice(Linear):
    """Which part it is tells."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.chosen = [self.parts[0]]

    def note(self, value: float) -> None:
        self.chosen[0] = self.parts[1]


class InTheOrder(Linear):
    def note(self, value: float) -> None:
        self.linear._parameters["weight"] = self.linear._parameters.pop("weight")


class InAClass(Linear):
    def note(self, value: float) -> None:
        self.linear.__class__ = Other


class Other(nn.Linear):
    pass


PICKLED = [
    OnParameter, OnBuffer, InHook, InPreHook, InAFreshPart, InAHiddenPart, InGetstate, InGetstateAlone, InReduce, UnderTheNameOfAPart, InTraining,
    InSwitches, InRequiresGrad, InAChoice, InTheOrder, InAClass,
]  # fmt: skip


@pytest.mark.parametrize("kind", PICKLED)
def test_whatever_pickle_writes_is_what_it_was(kind: type[Linear]) -> None:
    _seen[:] = []
    engine, module, optimizer, loader = private(Model(kind()))
    if not issubclass(kind, InGetstate):
        pickle.dumps(module)  # nothing has changed yet
    train(module, optimizer, loader)
    for part in (module, module.inner):
        with pytest.raises(UnsupportedError, match=r"^Attribute .* has changed since make_private"):
            pickle.dumps(part)
        with pytest.raises(UnsupportedError, match=r"^Attribute .* has changed since make_private"):
            torch.save(part, io.BytesIO())
    pickle.dumps(module.clicks)
    engine.close()
    with pytest.raises(UnsupportedError, match=r"^Attribute .* has changed since make_private"):
        pickle.dumps(module)


class Marked(Linear):
    """Hooks and attributes that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(_return_nothing)
        self.linear.weight.no_decay = True  # type: ignore[assignment]
        self.generator, self.kinds = torch.Generator().manual_seed(3), {k: make(2.0) for k, make in KINDS.items()}
        self.linear.eval()


def _return_nothing(*_: Any) -> None: ...


@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP()], ids=lambda mechanism: mechanism.name)
def test_modules_that_stay_as_they_are_may_be_pickled(mechanism: Any) -> None:
    engine, module, optimizer, loader = private(Model(Marked()), mechanism=mechanism, noise_multiplier=1.0)
    x = torch.randn(4, 3)
    train(module, optimizer, loader)
    state = module.state_dict(keep_vars=True)
    assert state["inner.0.linear.weight"].no_decay
    changes: list[Callable[[], Any]] = [
        lambda: module.eval(),
        lambda: module.train(),
        lambda: module.requires_grad_(False),
    ]
    for change in changes:
        change()
        found = pickle.loads(pickle.dumps(module))
        copied = copy.deepcopy(module)
        with torch.no_grad():
            assert torch.equal(found.inner[0](x), module.inner[0](x))
        pickle.dumps(copied)
    module.requires_grad_(True)
    engine.close()
    assert not any("state_dict" in vars(part) for part in module.modules())


class WithGetstate(Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "version": 2}


class WithAGetstateOfItsOwn(Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "state_dict"}


@pytest.mark.parametrize("kind", [Linear, WithGetstate, WithAGetstateOfItsOwn])
def test_what_was_pickled_is_an_ordinary_module(kind: type[Linear]) -> None:
    engine, module, optimizer, loader = private(Model(kind()))
    assert ("__reduce_ex__" in vars(module.inner[0])) == (kind is not Linear)
    train(module, optimizer, loader)
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(module))))
    other = copy.deepcopy(copy.deepcopy(module))
    for found in (again, other):
        for name, value in module.state_dict().items():
            assert torch.equal(found.state_dict()[name], value)
    again.inner[0].linear.weight.largest = again.inner[0].largest = 5
    assert pickle.loads(pickle.dumps(again)).inner[0].largest == 5
    engine.close()
    assert not any({"state_dict", "__reduce_ex__"} & vars(part).keys() for part in module.modules())


class Unreadable:
    """Fails when its items are read."""

    def __reduce__(self) -> Any:
        return list, (), None, map(len, [3])


def test_views_of_weights_may_be_pickled_but_not_their_attributes() -> None:
    module = Model(Linear())
    module.views = [module.inner[0].linear.weight.detach(), module.inner[0].linear.weight.detach()[:1]]  # type: ignore[assignment]
    engine, module, optimizer, loader = private(module)
    train(module, optimizer, loader)
    pickle.dumps(module)
    for view in list(module.views):
        view.largest = 5.0
        with pytest.raises(UnsupportedError, match="'views'"):
            pickle.dumps(module)
        del view.largest
    module.views[1] = module.inner[0].linear.weight.detach()[:2]
    with pytest.raises(UnsupportedError, match="'views'"):
        pickle.dumps(module)


def test_attributes_of_parameters_do_not_leave_by_state_dict() -> None:
    engine, module, optimizer, loader = private(Model(OnParameter()))
    module.state_dict(keep_vars=True)
    train(module, optimizer, loader)
    module.state_dict()  # they are not in it
    with pytest.raises(UnsupportedError, match=r"'(linear\.)?weight \(attributes\)'"):
        module.state_dict(keep_vars=True)
    del module.inner[0].linear.weight.largest
    module.state_dict(keep_vars=True)


def test_attributes_of_a_state_dict_and_names_outside_of_its_prefix() -> None:
    for write in (
        lambda state, value: setattr(state, "largest", value),
        lambda state, value: state.update(largest=value),
    ):
        module = Model(Linear())
        seen = [0]
        module.register_state_dict_post_hook(lambda part, state, prefix, metadata, write=write: write(state, seen[0]))
        engine, module, optimizer, loader = private(module)
        module.state_dict()
        seen[0] = 5
        for prefix in ("", "p."):
            with pytest.raises(UnsupportedError, match="largest"):
                module.state_dict(prefix=prefix)
        engine.close()


def test_digests_tell_values_apart_and_nothing_else() -> None:
    def digest(value: Any) -> str:
        return fingerprint(value, {}, lambda module: None)

    for make in KINDS.values():
        assert digest(make(5.0)) == digest(make(5.0)) != digest(make(6.0))
        assert digest([make(5.0), {"a": (make(5.0),)}]) == digest([make(5.0), {"a": (make(5.0),)}])
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    other: list[Any] = [1]
    other.append({"again": [1]})
    assert digest(cycle) != digest(other)
    assert digest([[], []]) != digest([[]] * 2)  # pickle keeps that
    assert digest({"a", "b", ("c", 1)}) == digest({("c", 1), "b", "a"})
    deep: Any = frozenset()
    for _ in range(5000):
        deep = frozenset([deep])
    assert digest(deep) == digest(deep)
    nested: list[Any] = []
    for _ in range(50_000):
        nested = [nested]
    assert digest(nested) != digest([nested])
    assert digest("\ud800") != digest("\ud801") and digest(b"1") != digest("1") != digest(1)
    assert digest(b"0" * (1 << 27)) != digest(b"0" * (1 << 27) + b"0")
    assert digest([threading.Lock()]).endswith("?")
    assert digest(one := Unreadable()) != digest(one)
