"""TorchRec's optimizers, which private training cannot use, refused with the optimizers to pass in their place."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsedp.distributed.placement import PlacedShard
from sparsedp.errors import UnsupportedError
from sparsedp.row_wise_adagrad import RowWiseAdagrad
from sparsedp.several_optimizers import parts_of

# The optimizer of the same kind as one that FBGEMM fuses into the backward pass, by words in the name of that.
_INSTEAD = {
    "row_wise_adagrad": "sparsedp.RowWiseAdagrad", "rowwiseadagrad": "sparsedp.RowWiseAdagrad",
    "adagrad": "torch.optim.Adagrad", "adam": "torch.optim.SparseAdam", "lamb": "torch.optim.SparseAdam",
}  # fmt: skip


def refuse_optimizers_of_torchrec(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises for optimizers that work in TorchRec's own backward pass, or by names of parameters."""
    for name, parameter in module.named_parameters():
        # What stands at the tables of sharded collections is empty: FBGEMM has the optimizer.
        others = [o for o in getattr(parameter, "_in_backward_optimizers", []) if not _is_fused(o)]
        if others:
            line = _line([f"{_kind(others[0])}(sparsedp.table_parameters(module), lr={_rate(others[0])})"])
            raise UnsupportedError(
                f"Parameter '{name}' is moved in the backward pass (apply_optimizer_in_backward), before anything could be "
                f"clipped. Leave that out and {line}"
            )
    for part in parts_of(optimizer):
        if _is_of(part, "torchrec.optim.keyed", "KeyedOptimizer"):
            raise UnsupportedError(
                f"{type(part).__name__} is TorchRec's, which moves tables in its own backward pass. That never runs in private "
                f"training: rows move in step(), by torch's optimizers. For it, {_line(_instead_of(part))}"
            )


def refuse_means_over_columns(
    optimizer: Optimizer,
    placement: Mapping[str, Collection[PlacedShard]],
    held: Mapping[str, nn.Parameter],
) -> None:
    """Raises for row-wise optimizers of tables whose columns are on several ranks."""
    moved = {
        id(parameter)
        for part in parts_of(optimizer)
        if isinstance(part, RowWiseAdagrad) or _is_of(part, "torchrec.optim.rowwise_adagrad", "RowWiseAdagrad")
        for group in part.param_groups
        for parameter in group["params"]
    }
    for name, parts in placement.items():
        if id(held.get(name)) in moved and len({part.shard.columns for part in parts}) > 1:
            raise UnsupportedError(
                f"RowWiseAdagrad keeps a mean over all columns of a row, and those of table '{name}' are on several ranks: each "
                "would take another. Divide it by rows, or use torch.optim.Adagrad."
            )


def _is_fused(optimizer: Any) -> bool:
    return _is_of(optimizer, "torchrec.optim.fused", "FusedOptimizer")


def _is_of(optimizer: Any, module: str, kind: str) -> bool:
    """Whether it is of a class of TorchRec's, which nothing is before its module was imported."""
    imported = sys.modules.get(module)
    return imported is not None and isinstance(optimizer, getattr(imported, kind))


def _instead_of(optimizer: Any) -> list[str]:
    """Calls that make torch's optimizers, of the tables and of the dense parameters."""
    parts = list(_leaves(optimizer))
    tables = next((part for part in parts if _is_fused(part)), None)
    dense = next((part for part in parts if not _is_fused(part)), None)
    calls = [f"{_kind(tables)}(sparsedp.table_parameters(module), lr={_rate(tables)})"]
    return [*calls, f"{_kind(dense)}(sparsedp.dense_parameters(module), lr={_rate(dense)})"]


def _leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers that a combined or wrapped one stands for."""
    if hasattr(optimizer, "_optims"):
        for _, part in optimizer._optims:
            yield from _leaves(part)
    elif hasattr(optimizer, "_optimizer"):
        yield from _leaves(optimizer._optimizer)
    else:
        yield optimizer


def _kind(optimizer: Any) -> str:
    """The optimizer that is most like another, of torch's and ours."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return f"torch.optim.{type(optimizer).__name__}"
    fused = getattr(getattr(optimizer, "_emb_module", None), "optimizer", None)  # of FBGEMM
    name = f"{fused} {type(optimizer).__name__}".lower()
    return next((kind for word, kind in _INSTEAD.items() if word in name), "torch.optim.SGD")


def _rate(optimizer: Any) -> str:
    groups = [] if optimizer is None else list(optimizer.param_groups)
    return format(float(groups[0]["lr"]), "g") if groups and "lr" in groups[0] else "..."


def _line(calls: list[str]) -> str:
    return f"pass optimizer={calls[0] if len(calls) == 1 else '[' + ', '.join(calls) + ']'}."
