"""Modules and optimizers that cannot be trained privately, refused by name before training starts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from sparsedp._torch import BatchNormBase
from sparsedp.capture.refused import risk_of
from sparsedp.errors import Refusal, SparseDPWarning, UnsupportedError
from sparsedp.fused import is_replaced
from sparsedp.mechanisms import Mechanism
from sparsedp.mechanisms.optimizers import refuse_for_dense_gradients
from sparsedp.several_optimizers import parts_of
from sparsedp.tables import find_tables

_NOTHING_HELD: Mapping[str, nn.Parameter] = MappingProxyType({})
_RECURRENT = {nn.LSTM: "LSTM", nn.GRU: "GRU", nn.RNN: "RNN"}


def refuse_module(module: nn.Module) -> None:
    """Raises for whatever is known to mix units or to hide its parameters from capture."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UnsupportedError(
            f"{type(module).__name__} splits batches over processes. Pass the wrapped module itself."
        )
    if _is_compiled(module):
        raise UnsupportedError(
            f"{type(module).__name__}: torch.compile of the whole module hides its operations. Pass the module from before "
            "compilation. Parts of it may be compiled; they run uncompiled while the module is private."
        )
    for refused in refused_parts(module):
        raise refused.error


class RefusedPart(NamedTuple):
    """A part of a module that cannot be trained privately."""

    name: str
    error: UnsupportedError


def refused_parts(module: nn.Module) -> Iterator[RefusedPart]:
    """Every part of a module that is known to mix units or to hide its parameters from capture."""
    for name, part in module.named_modules():
        reason = _why_not(part)
        if reason is not None:
            error = UnsupportedError(f"Module '{name}' ({type(part).__name__}): {reason}")
            suggestion = _replacement(name, part)
            error.locate(Refusal(type(error).__name__, str(error), risk_of(error), module=name, suggestion=suggestion))
            yield RefusedPart(name, error)


def _replacement(name: str, part: nn.Module) -> tuple[str, ...]:
    """A layer as its class makes it, and what to make instead; nothing where that depends on what it is for."""
    kind, last, text = type(part).__name__, name.rpartition(".")[2], str(part)
    if type(part) in _RECURRENT:
        old, new = f"nn.{text}", f"sparsedp.nn.{text}"
    elif isinstance(part, BatchNormBase) and type(part) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        features = part.num_features
        most = 1 if kind == "BatchNorm1d" else max(1, min(32, features // 2))  # several numbers in each group
        groups = max(count for count in range(1, most + 1) if features % count == 0)
        old, new = f"nn.{kind}({features})", f"nn.GroupNorm({groups}, {features})"
    elif type(part) in (nn.Embedding, nn.EmbeddingBag):
        old, new = f"nn.{text}", "nn." + re.sub(r", (max_norm=[^,)]*|scale_grad_by_freq=True)", "", text)
    else:
        return ()
    if old == new:
        return ()
    target = f"self.{last} = " if last.isidentifier() else ""
    return f"- {target}{old}", f"+ {target}{new}"


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module) or module.compile()."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def warn_of_compiled_parts(module: nn.Module) -> None:
    """Says that they gain nothing from it."""
    names = [name for name, part in module.named_modules() if _is_compiled(part)]
    if names:
        warnings.warn(
            f"Module '{names[0]}' was compiled by torch.compile. Compiled code hides its operations, so it runs uncompiled while "
            "the module is private.",
            SparseDPWarning,
            stacklevel=3,
        )


def _why_not(module: nn.Module) -> str | None:
    trained = any(p.requires_grad for p in module.parameters(recurse=False))
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module hides its operations. Use the module from before."
    if isinstance(module, BatchNormBase) and module.training:
        return (
            "batch statistics mix the units of a batch. Use GroupNorm or LayerNorm, or freeze the layer "
            "with eval() and "
            "keep it there."
        )
    if isinstance(module, nn.RNNBase) and not is_replaced(module) and trained:
        name = next((name for kind, name in _RECURRENT.items() if isinstance(module, kind)), "RNN")
        return (
            f"torch's {name} is fused and hides its uses. Pass replace_recurrent=True, which lets it run as sparsedp.nn.{name} "
            "until close(), or use that, which has the same weights."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and trained:
        if module.max_norm is not None:
            return "max_norm rewrites rows of the table during forward. Remove it."
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides by how often the whole batch uses a row. Remove it."
    for parameter in module.parameters(recurse=False):
        if is_lazy(parameter):
            return "its parameters are not initialised yet. Run one batch through the module first."
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            return f"its parameters are {parameter.dtype}. Train in float32 or float64."
        if parameter.requires_grad and not parameter.is_contiguous():
            return "its parameter is not contiguous. Replace it by parameter.contiguous()."
    return None


def private_parameters(
    module: nn.Module, optimizer: Optimizer, held: Mapping[str, nn.Parameter] = _NOTHING_HELD
) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer trains, by their names in the module.

    `held` are those that the optimizer has in place of the module's: shards of tables that the module has no memory of.
    """
    of_optimizer = {name: held.get(name, parameter) for name, parameter in module.named_parameters()}
    names = {id(parameter): name for name, parameter in of_optimizer.items()}
    held_by = [
        {id(parameter) for group in part.param_groups for parameter in group["params"]} for part in parts_of(optimizer)
    ]
    ids = set().union(*held_by)
    if twice := [name for name, p in of_optimizer.items() if sum(id(p) in mine for mine in held_by) > 1]:
        raise UnsupportedError(
            f"Parameter(s) {', '.join(map(repr, twice[:5]))} are in several of the optimizers, each of which would move them. "
            "Give every parameter to one."
        )
    if foreign := len(ids - names.keys()):
        raise UnsupportedError(f"{foreign} parameter(s) of the optimizer do not belong to the module.")
    missing = [n for n, p in module.named_parameters() if p.requires_grad and id(of_optimizer[n]) not in ids]
    if missing:
        raise UnsupportedError(
            f"Parameter(s) {', '.join(map(repr, missing[:5]))} require a gradient but are not in the optimizer. "
            "Freeze them with requires_grad_(False) or give them to the optimizer."
        )
    private = {name: p for name, p in module.named_parameters() if id(of_optimizer[name]) in ids}
    if not any(p.requires_grad for p in private.values()):
        raise UnsupportedError("The optimizer has no parameter that requires a gradient: there is nothing to train.")
    if len({p.dtype for p in private.values() if p.requires_grad}) > 1:
        raise UnsupportedError("The trained parameters have different dtypes. Use one.")
    return private


def refuse_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    mechanism: Mechanism,
    held: Mapping[str, nn.Parameter] = _NOTHING_HELD,
) -> None:
    """Raises for optimizers that cannot take the gradients that a mechanism leaves; `held` as in `private_parameters`."""
    parts = parts_of(optimizer)
    if any(isinstance(part, torch.optim.LBFGS) for part in parts):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times in a step. Use SGD, Adam or another first-order one."
        )
    tables, parameters = find_tables(module), {**dict(module.named_parameters()), **held}
    for part in parts:
        moved = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        mine = {name for name in tables if id(parameters[name]) in moved}
        if mine or len(parts) == 1:
            mechanism.refuse_optimizer(part, tables, parameters)
        else:  # whatever the mechanism does to tables, dense parameters get dense gradients
            refuse_for_dense_gradients(part)
