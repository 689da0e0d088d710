"""One case of the matrix: private steps of somebody else's model against each example alone in float64.

A case is judged by stages. `dpsgd`, `adafest` and `lazydp` take private steps without noise on Poisson batches of 6, 4, 2 and 1
examples and compare every update with the reference; `empty` is the step of each of them on a batch of no examples; `check` asks
`sparsedp.check` about the same model. The verdict is made of all of them.

Models are judged at two sizes. "tiny" is what they are built with. "large" shows what real sizes would meet: the number of elements
below which a parameter may pass through any operation is lowered to `LARGE_FROM`, for one step of DP-SGD on 6 examples and for
`check`; other mechanisms and sizes of batches see the same uses.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import sparsedp

# A batch as `sparsedp.check` takes it: a dict, for loss(model(**batch), batch), or a tuple, for loss(model(*batch[:-1]), batch[-1]).
# Tensors have the examples on axis 0.
Batch = Any
Weights = dict[str, Tensor]

DATA = 20
EXPECTED_BATCH = 4
# The examples of each step: 6, 4, 2, 1 and none of them.
DRAWN = ([0, 3, 4, 8, 11, 15], [1, 3, 7, 19], [2, 16], [5], [])
RATE = 0.5
# Of the update, relative to the size of the whole update: float32 against float64.
TOLERANCE = 1e-5
# Where the uses of a parameter can cancel, rounding is added to a unit's norm, so that it is clipped a little shorter; never longer.
SHORTER, LONGER = 1e-4, 1e-6
# What float32 may lose of an update in a model that loses much by ordinary autograd, too.
MOST_LOST = 1e-3
# Of one parameter's update, relative to its own size, and a floor relative to the whole update's below which rounding hides it.
TOLERANCE_ALONE, FLOOR_ALONE = 1e-2, 1e-5
# At size "large", parameters of so many elements count as large.
LARGE_FROM = 100
Sizes = Literal["tiny", "large"]
SIZES: tuple[Sizes, ...] = ("tiny", "large")

MECHANISMS: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "dpsgd": sparsedp.DPSGD,
    # Without noise every row that a unit touches is above it, and no other.
    "adafest": lambda: sparsedp.AdaFEST(threshold=1e-12, noise_ratio=1.0, map_clip=1.0),
    "lazydp": sparsedp.LazyDP,
}


@dataclass(frozen=True)
class Case:
    """A model of another package, tiny, with random weights.

    `batch(n)` makes n examples. `collate` joins examples, dicts or tuples of one row each, where torch's own does not.
    `penalty(module)` is the part of the loss that depends on parameters alone: it is nobody's, so that its gradient is neither
    clipped nor divided, and is there for a batch of none, too.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor]
    collate: Callable[[list[Any]], Batch] | None = None
    penalty: Callable[[nn.Module], Tensor] | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


@dataclass(frozen=True)
class Outcome:
    """Of a stage: 'works', 'wrong', 'refused' or 'crash', and why."""

    verdict: str
    reason: str = ""


@dataclass
class Result:
    """Of a case: what every stage said."""

    stages: dict[str, Outcome] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """'works', or the worst of it: 'wrong', 'crash', 'check_disagrees', 'refused'."""
        verdicts = {stage: outcome.verdict for stage, outcome in self.stages.items()}
        steps = {stage: verdict for stage, verdict in verdicts.items() if stage != "check"}
        if "wrong" in steps.values():
            return "wrong"
        if "crash" in steps.values():
            return "crash"
        if "check" in verdicts and (verdicts["dpsgd"] == "works") != (verdicts["check"] == "works"):
            return "check_disagrees"
        return "refused" if "refused" in steps.values() else "works"

    @property
    def reason(self) -> str:
        """What the stages said that did not work, each once."""
        said: dict[str, list[str]] = {}
        for stage, outcome in self.stages.items():
            if outcome.verdict != "works":
                said.setdefault(f"{outcome.verdict}: {outcome.reason}", []).append(stage)
        return "; ".join(f"[{', '.join(stages)}] {text}" for text, stages in said.items())


def run_case(case: Case, sizes: Sizes = "tiny", reference: Reference | None = None) -> Result:
    """All stages of a case. A model whose step is refused goes through no more than `check`.

    `reference` is of the same case; None: a new one.
    """
    result = Result()
    reference = reference or Reference(case)
    with warnings.catch_warnings(), lowered_limit() if sizes == "large" else nullcontext():
        warnings.simplefilter("ignore")
        built(case)  # what goes wrong here is the case's fault
        result.stages["dpsgd"], empty = _steps(case, reference, "dpsgd", sizes)
        result.stages["check"] = _check(case, reference.rows)
        others = ("adafest", "lazydp") if sizes == "tiny" else ()
        for name in others if result.stages["dpsgd"].verdict == "works" else ():
            result.stages[name], of_none = _steps(case, reference, name, sizes)
            empty = of_none if empty is None or empty.verdict == "works" else empty
        if empty is not None:
            result.stages["empty"] = empty
    return result


@contextmanager
def lowered_limit() -> Iterator[None]:
    """Parameters of `LARGE_FROM` elements count as large."""
    holders = [
        module
        for name, module in sys.modules.items()
        if name.startswith("sparsedp.capture") and hasattr(module, "SMALL")
    ]
    assert holders, "no module of sparsedp.capture has the limit SMALL any more"
    with ExitStack() as patches:
        for module in holders:
            patches.enter_context(mock.patch.object(module, "SMALL", LARGE_FROM))
        yield


# ---------------------------------------------------------------------- examples and batches


class Examples(Dataset[Any]):
    """A list of examples, each a dict or a tuple without the axis of examples."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def _rows(case: Case) -> list[Any]:
    batch = case.batch(DATA)
    if case.collate is not None:
        return batch
    if isinstance(batch, Mapping):
        return [{key: value[i] for key, value in batch.items()} for i in range(DATA)]
    return [tuple(value[i] for value in batch) for i in range(DATA)]


def loader_of(case: Case, rows: list[Any]) -> DataLoader:
    return DataLoader(
        Examples(rows), batch_size=EXPECTED_BATCH, shuffle=True, collate_fn=case.collate or default_collate
    )


def forward(case: Case, module: nn.Module, batch: Batch) -> Tensor:
    if isinstance(batch, Mapping):
        return case.loss(module(**batch), batch)
    return case.loss(module(*batch[:-1]), batch[-1])


def _to(batch: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a batch in `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _to(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_to(value, dtype) for value in batch)
    return batch


def built(case: Case) -> nn.Module:
    """The module in training mode and without dropout, with the same weights each time."""
    seed = zlib.crc32(case.name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    module = case.build().train()
    torch.autograd.set_detect_anomaly(False)  # a file of RecBole's turns it on
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return module


def _apart(case: Case) -> nn.Module:
    """The module built anew, or copied where a package keeps one activation for all of its models.

    Not always copied: what a lambda in a module refers to stays the original's.
    """
    one, other = built(case), built(case)
    shared = {id(part) for part in one.modules()} & {id(part) for part in other.modules()}
    return copy.deepcopy(one) if shared else one


# ---------------------------------------------------------------------- the reference


class Reference:
    """Each example's gradient by ordinary autograd on that example alone, in float64 where the model can.

    `added_to_norms` is what a library adds to a norm before it divides by it.
    """

    def __init__(self, case: Case, added_to_norms: float = 0.0) -> None:
        self._case, self.rows, self._added = case, _rows(case), added_to_norms
        self._module: nn.Module | None = None
        self._dtype = torch.float64
        self._shares: dict[int, tuple[Weights, list[Weights]]] = {}  # by step: at which weights, and the units' shares
        self.max_norm = 0.0

    def prepare(self) -> None:
        """Sets the bound so that about half of the examples are clipped; raises each time if the model cannot."""
        if self.max_norm:
            return
        failure: Exception | None = None
        for dtype in (torch.float64, torch.float32):
            self._dtype, self._module = dtype, _apart(self._case).to(dtype)
            try:
                norm = float(np.median([_norm(self.gradient(index)) for index in DRAWN[0]]))
            except RuntimeError as error:
                failure = error
                continue
            if np.isfinite(norm):
                self.max_norm = norm or 1.0
                return
            failure = ArithmeticError("the gradient of an example alone is NaN or infinite")
        assert failure is not None
        raise failure

    def in_float32(self) -> Reference:
        """The same in float32: how far it is off tells what rounding does to this model."""
        single = Reference(self._case, self._added)
        single._module, single._dtype, single.max_norm = _apart(self._case), torch.float32, self.max_norm
        return single

    def gradient(self, index: int) -> Weights:
        """Of an example alone, without the penalty."""
        assert self._module is not None
        collate = self._case.collate or default_collate
        batch = _to(collate([self.rows[index]]), self._dtype)
        penalty = 0.0 if self._case.penalty is None else self._case.penalty(self._module)
        return self._derived(forward(self._case, self._module, batch) - penalty)

    def penalty(self, weights: Weights) -> Weights:
        """The gradient of what depends on parameters alone, at `weights`."""
        if self._case.penalty is None:
            return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
        self._set(weights)
        assert self._module is not None
        return self._derived(self._case.penalty(self._module))

    def _derived(self, loss: Tensor) -> Weights:
        assert self._module is not None
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {
            name: (torch.zeros_like(p) if grad is None else grad.to_dense()).double()
            for (name, p), grad in zip(named.items(), grads)
        }

    def _set(self, weights: Weights) -> None:
        assert self._module is not None
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])

    def shares(self, step: int, weights: Weights) -> list[Weights]:
        """The clipped gradient of each of the step's examples at `weights`; of a mean, over the expected batch size."""
        earlier = self._shares.get(step)
        if earlier is not None and all(_close(weights[name], value) for name, value in earlier[0].items()):
            return earlier[1]
        self._set(weights)
        shares = []
        divisor = EXPECTED_BATCH if self._case.loss_reduction == "mean" else 1
        for index in DRAWN[step]:
            gradient = self.gradient(index)
            factor = self.max_norm / max(_norm(gradient) + self._added, self.max_norm) / divisor
            shares.append({name: factor * value for name, value in gradient.items()})
        self._shares[step] = (weights, shares)
        return shares


def _norm(gradient: Weights) -> float:
    return sum(float(value.double().square().sum()) for value in gradient.values()) ** 0.5


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-7 * other.norm())


def trained(module: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


# ---------------------------------------------------------------------- the stages


def _steps(case: Case, reference: Reference, name: str, sizes: Sizes) -> tuple[Outcome, Outcome | None]:
    """The outcome of steps on examples, and that of a step on none, if it came to it."""
    place = "make_private"
    engine = sparsedp.PrivacyEngine(seed=1)
    try:
        module = built(case)
        drawn = iter(DRAWN)
        try:
            reference.prepare()
        except Exception:
            max_norm = (
                1.0  # a model that cannot take an example alone may be refused, rightly; else this comes up again
            )
        else:
            max_norm = reference.max_norm
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=RATE)
        with mock.patch("sparsedp.sampling.draws.poisson_indices", lambda *_: np.array(next(drawn), dtype=np.int64)):
            module, private, loader = engine.make_private(
                module=module, optimizer=optimizer, data_loader=loader_of(case, reference.rows), noise_multiplier=0.0,
                max_grad_norm=max_norm, mechanism=MECHANISMS[name](), loss_reduction=case.loss_reduction,
                replace_recurrent=True,
            )  # fmt: skip
            for step, batch in enumerate(loader):
                place = f"batch of {len(DRAWN[step])}"
                before = trained(module)
                private.zero_grad()
                forward(case, module, batch).backward()
                private.step()
                place = f"reference of a batch of {len(DRAWN[step])}"
                reference.prepare()
                wrong = difference(before, trained(module), reference, step)
                if wrong:
                    outcome = Outcome("wrong", f"batch of {len(DRAWN[step])}: {wrong}")
                    return (Outcome("works"), outcome) if not DRAWN[step] else (outcome, None)
                if sizes == "large":
                    return Outcome("works"), None
                place = f"batch of {len(DRAWN[min(step + 1, len(DRAWN) - 1)])}"
    except sparsedp.SparseDPError as error:
        outcome = Outcome("refused", f"{place}: {one_line(error)}")
    except Exception as error:
        outcome = Outcome("crash", f"{place}: {type(error).__name__}: {one_line(error)}")
    else:
        return Outcome("works"), Outcome("works")
    finally:
        engine.close()
    return (Outcome("works"), outcome) if place.endswith("of 0") else (outcome, None)


def difference(before: Weights, after: Weights, reference: Reference, step: int) -> str:
    """What is wrong with a step; empty if nothing is."""
    shares = reference.shares(step, before)
    penalty = reference.penalty(before)
    changes = {name: (before[name].double() - after[name].double()) / RATE - penalty[name] for name in before}
    size = _norm(_sum(shares, changes))
    # Rounding of the weights themselves when they are written.
    rounding = 4 * torch.finfo(torch.float32).eps * (_norm(before) / RATE + _norm(penalty))
    if size == 0:
        allowed = rounding if any(value.any() for value in penalty.values()) else 0.0
        return "a step on nothing changes weights" if _norm(changes) > allowed else ""
    gaps = _gaps(changes, _sum(shares, changes))
    if not _whole(gaps) <= TOLERANCE * size + rounding:
        factors = _factors(shares, changes)
        if all(1 - SHORTER <= factor <= 1 + LONGER for factor in factors):
            shares = [{name: factor * value for name, value in share.items()} for factor, share in zip(factors, shares)]
            gaps = _gaps(changes, _sum(shares, changes))
    if not _whole(gaps) <= TOLERANCE * size + rounding:
        # Some models lose that much in float32 by ordinary autograd.
        single = reference.in_float32().shares(step, before)
        if _whole(_gaps(changes, _sum(single, changes))) <= TOLERANCE * size + rounding:
            return ""  # at a bound of a clamp, say, float32 may have no gradient where float64 has one
        lost = _whole(_gaps(_sum(single, changes), _sum(reference.shares(step, before), changes)))
        rounding += min(4 * lost, MOST_LOST * size)  # a model that draws at random would seem to lose everything
    if not _whole(gaps) <= TOLERANCE * size + rounding:
        worst = max(gaps, key=lambda name: gaps[name])
        return f"the update is off by {_whole(gaps) / size:.1e} of its size, most in '{worst}'"
    for name, wanted in _sum(shares, changes).items():
        own = float(wanted.norm())
        if not gaps[name] <= TOLERANCE_ALONE * own + FLOOR_ALONE * size + rounding:
            return f"the update of '{name}' is off by {gaps[name] / own:.1e} of its own size"
    return ""


def _sum(shares: list[Weights], like: Weights) -> Weights:
    return {name: sum((share[name] for share in shares), torch.zeros_like(value)) for name, value in like.items()}


def _gaps(one: Weights, other: Weights) -> dict[str, float]:
    return {name: float((one[name] - other[name]).norm()) for name in other}


def _whole(gaps: dict[str, float]) -> float:
    return sum(gap**2 for gap in gaps.values()) ** 0.5


def _factors(shares: list[Weights], changes: Weights) -> list[float]:
    """What each unit's share was multiplied by, if the change is a sum of multiples of them."""
    columns = torch.stack([torch.cat([share[name].flatten() for name in changes]) for share in shares], 1)
    change = torch.cat([value.flatten() for value in changes.values()])
    return torch.linalg.lstsq(columns, change[:, None], driver="gelsd").solution[:, 0].tolist()


def _check(case: Case, rows: list[Any]) -> Outcome:
    settings: dict[str, Any] = {"units": 3, "loss_reduction": case.loss_reduction, "replace_recurrent": True}
    try:
        module = built(case)
        if case.collate is None:
            batch = default_collate([rows[index] for index in DRAWN[0]])
            sparsedp.check(module, case.loss, batch, **settings)
        else:
            sparsedp.check(module, case.loss, data_loader=loader_of(case, rows), **settings)
    except sparsedp.SparseDPError as error:
        return Outcome("refused", one_line(error))
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {one_line(error)}")
    return Outcome("works")


def one_line(error: BaseException) -> str:
    text = error.message if isinstance(error, sparsedp.SparseDPError) else str(error)  # without places on this machine
    return " ".join(text.split())
