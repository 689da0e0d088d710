"""Low-rank adapters beside tables, as peft makes them: what their gradients count."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class TableAdapters:
    """Sums over the adapters that are trained, A of rank x rows and B of dim x rank beside a table of rows x dim."""

    gradient_size: int = 0  # (rows + dim) rank: every coordinate of A and B gets noise in each step
    dense_size: int = 0  # rows dim: what training the table itself would change


def table_adapters(model: nn.Module) -> TableAdapters:
    """The adapters of a module that stand beside a frozen table. A table that is trained too counts by itself."""
    gradient_size = dense_size = 0
    for module in model.modules():
        factors = [
            parameter
            for name in ("lora_embedding_A", "lora_embedding_B")
            for parameter in getattr(module, name, nn.ParameterDict()).values()
            if parameter.requires_grad
        ]
        if not factors:
            continue
        gradient_size += sum(parameter.numel() for parameter in factors)
        table = module.get_parameter("base_layer.weight")
        dense_size += 0 if table.requires_grad else table.numel()
    return TableAdapters(gradient_size, dense_size)
