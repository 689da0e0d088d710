"""Which of torch's optimizers can take the gradients that a mechanism leaves for tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from sparsedp.errors import UnsupportedError


def refuse_for_dense_gradients(optimizer: Optimizer) -> None:
    """Raises for optimizers that do not take noise on every row of a table."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam takes row-sparse gradients only; this mechanism puts noise on every row of a table, and dense parameters "
            "have dense gradients. Use Adam for these."
        )


def refuse_for_sparse_gradients(
    optimizer: Optimizer, tables: Collection[str], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raises for optimizers, or settings of them, that do not take noise on the selected rows of a table alone."""
    kind = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and kind not in ("SGD", "Adagrad", "SparseAdam"):
        raise UnsupportedError(
            f"This mechanism leaves row-sparse gradients for tables, which {kind} does not take. Use SGD, Adagrad or "
            "sparsedp.RowWiseAdagrad, or have both: "
            f"optimizer=[Adagrad(sparsedp.table_parameters(module)), {kind}(sparsedp.dense_parameters(module))], in a "
            "configuration optimizer.tables."
        )
    if kind == "RowWiseAdagrad" and type(optimizer).__module__.startswith("torchrec."):
        raise UnsupportedError(
            "This mechanism leaves row-sparse gradients for tables, which TorchRec's RowWiseAdagrad does not take. Use "
            "sparsedp.RowWiseAdagrad, which has the same rule and state, or DPSGD(), whose gradients of tables are dense."
        )
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, p in parameters.items() if p.requires_grad and id(p) in held]
    dense = [name for name in trained if name not in tables]
    if kind == "SparseAdam" and dense:
        raise UnsupportedError(
            f"SparseAdam cannot train dense parameters such as '{dense[0]}', and only tables get row-sparse gradients here. "
            "Use SGD or Adagrad, or another optimizer beside it for them: optimizer=[SparseAdam(tables), Adam(others)], "
            "in a configuration optimizer.tables."
        )
    decayed = [n for n in trained if n in tables and held[id(parameters[n])].get("weight_decay", 0)]
    if decayed:
        raise UnsupportedError(
            f"weight_decay changes every row of table '{decayed[0]}', which a row-sparse gradient cannot. Put tables into a "
            "parameter group with weight_decay=0."
        )
