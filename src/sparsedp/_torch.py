"""Every name of torch's that it does not document, in one place: a new torch breaks this file, or none.

(Attributes of tensors and modules that start with an underscore, such as `_version` and `_backward_hooks`, are read where they
are needed.)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.module import _global_backward_hooks as module_backward_hooks
from torch.nn.modules.module import _global_backward_pre_hooks as module_backward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks

__all__ = [
    "BackwardCFunction",
    "BatchNormBase",
    "FunctionBase",
    "SingleLevelFunction",
    "StorageWeakRef",
    "compiler_callback",
    "current_backward",
    "default_store",
    "float32_precision",
    "function_mode_at",
    "function_mode_count",
    "functorch_interpreter",
    "get_timeout",
    "is_any_autocast_enabled",
    "is_functorch_tensor",
    "is_tracing",
    "make_sharded_tensor",
    "module_backward_hooks",
    "module_backward_pre_hooks",
    "optimizer_post_hooks",
    "optimizer_pre_hooks",
    "preserved_version",
    "rebuild_tensor",
    "saved_tensor_hooks",
    "set_timeout",
    "storage_type",
    "will_run",
    "without_functions",
    "without_subclasses",
]

# Contexts. Within the first, no subclass of Tensor hears of operations; within the second, no mode does either.
without_subclasses = torch._C.DisableTorchFunctionSubclass
without_functions = torch._C.DisableTorchFunction
# The stack of torch function modes: how many there are, and the one at a place, from 0.
function_mode_count = torch._C._len_torch_function_stack
function_mode_at = torch._C._get_function_stack_at

FunctionBase = torch._C._FunctionBase  # of custom functions of autograd
current_backward = torch._C._current_graph_task_id  # the number of the backward pass that runs; -1: none does
will_run = torch._C._will_engine_execute_node  # whether the backward pass that runs comes by a node
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

functorch_interpreter = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func's transforms
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor
compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None or False where nothing is compiled
is_tracing = torch._C._is_tracing
is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # on whatever device
# In which precision a backend multiplies float32 numbers: "none" (nothing was asked for), "ieee", "tf32" or "bf16".
float32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # None before torch 2.9


def default_store() -> Any:
    """What the processes of the default process group share numbers and texts through."""
    return torch.distributed.distributed_c10d._get_default_store()


def make_sharded_tensor(
    local: torch.Tensor | None, cuts: list[tuple[int, int]], shape: tuple[int, ...], rank: int, group: Any
) -> Any:
    """A tensor that is divided among the processes of a group: `local` is at `cuts`, (begin, end) along each axis."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards = []
    if local is not None:
        begin, sizes = [cut[0] for cut in cuts], [cut[1] - cut[0] for cut in cuts]
        shards.append(Shard(local, ShardMetadata(begin, sizes, f"rank:{rank}/{local.device}")))
    return init_from_local_shards(shards, *shape, process_group=group)


rebuild_tensor = torch._utils._rebuild_tensor_v2  # what a tensor's pickle calls


def storage_type(dtype: torch.dtype) -> Any:
    """What stands in a file for the type of a tensor's numbers."""
    return getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])


def get_timeout(group: Any) -> timedelta:
    """How long the processes of a group wait for each other, on CPUs."""
    return group._get_backend(torch.device("cpu")).options._timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """How long the processes of a group wait for each other."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def pad_packed(data: torch.Tensor, batch_sizes: torch.Tensor) -> torch.Tensor:
    """The rows of a packed sequence, padded with zeros: (sequences, steps, ...), in the order of the packed sequence."""
    padded, _ = torch._VF._pad_packed_sequence(data, batch_sizes, True, 0.0, len(batch_sizes))
    return padded
