"""The larger dual encoder of the EANA paper (Ning et al. 2022, section 4.2.2): several context features, a Transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsedp.models.dpformer import Block
from sparsedp.models.dual import TwoTowers, make_table


class FeatureDualEncoder(TwoTowers):
    """A dual encoder whose context has, beside or instead of the items, features of the items such as words of their titles.

    `features` maps a name to the rows that each item has in that feature's table, int64 [items + 1, n], 0 where there are
    fewer: public knowledge about items, which stays out of the state_dict. Each feature has a table of `buckets` rows behind
    row 0, `tables.<name>`; with `use_items`, `context_table` is one of the items. A position of a history is the sum over
    features of the mean of their rows, times sqrt(dim / number of features).

    context "bag": the mean over the history. "transformer": learned positions and `blocks` Transformer blocks in which every
    item sees every other, then the mean. Then comes `network`, as in `DualEncoder`. The paper says neither how features are
    joined nor how the Transformer's output becomes one vector.
    """

    def __init__(
        self,
        items: int,
        features: Mapping[str, Tensor],
        buckets: int,
        length: int,
        dim: int = 128,
        hidden: Sequence[int] = (128,),
        tied: bool = False,
        use_items: bool = True,
        context: str = "bag",
        blocks: int = 1,
        heads: int = 4,
        sparse: bool = False,
    ) -> None:
        if context not in ("bag", "transformer"):
            raise ValueError(f"context must be bag or transformer, not {context!r}")
        if not use_items and (tied or not features):
            raise ValueError("without use_items there must be other features, and no tied table")
        if context == "transformer" and (min(blocks, heads) < 1 or dim % heads):
            raise ValueError(f"{blocks=} and {heads=} must be at least 1, and heads divide dim, {dim}")
        super().__init__(items, dim, hidden)
        self.length, self.tied = length, tied
        self.context_table = make_table(items, dim, sparse) if use_items else None
        self.tables = nn.ModuleDict()
        for name, rows in features.items():
            if rows.ndim != 2 or len(rows) != items + 1 or int(rows.max()) > buckets or int(rows.min()) < 0:
                raise ValueError(f"features[{name!r}] must be [{items + 1}, n], of numbers from 0 to {buckets}")
            self.tables[name] = make_table(buckets, dim, sparse)
            self.register_buffer(f"rows_of_{name}", rows.long(), persistent=False)
        shared = self.context_table.weight if tied and self.context_table is not None else None
        self._add_label_tower(hidden, shared, sparse)
        self.blocks = nn.ModuleList()
        if context == "transformer":
            # A dense parameter and not a table: every unit uses these rows.
            self.positions = nn.Parameter(torch.empty(length, dim))
            nn.init.normal_(self.positions, std=0.02)
            self.blocks.extend(Block(dim, heads) for _ in range(blocks))
            self.norm = nn.LayerNorm(dim)

    def encode(self, history: Tensor) -> Tensor:
        if history.ndim != 2 or history.shape[1] > self.length:
            raise ValueError(f"histories must be [B, L] with L up to {self.length}, not {tuple(history.shape)}")
        real = history != 0
        x = self._embed(history)
        if len(self.blocks):
            x = x + self.positions[: history.shape[1]]
            # Padding is not attended to. The first place always is: a history of padding alone would attend to nothing.
            first = torch.arange(history.shape[1], device=history.device) == 0
            hidden = ~(real | first)[:, None, None]
            for block in self.blocks:
                x = block(x, hidden)
            x = self.norm(x)
        return self.network(_masked_mean(x, real))

    def _embed(self, history: Tensor) -> Tensor:
        """The sum over features of the means of their rows, scaled, [B, L, dim]."""
        parts = [] if self.context_table is None else [self.context_table(history)]
        for name, table in self.tables.items():
            rows = self.get_buffer(f"rows_of_{name}")[history]
            parts.append(_masked_mean(table(rows), rows != 0))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total * math.sqrt(self.dim / len(parts))


def _masked_mean(x: Tensor, real: Tensor) -> Tensor:
    """The mean over the last axis but one of x (..., n, dim), where `real` (..., n) is true; zeros where it never is."""
    weights = real.to(x.dtype)
    return (x * weights[..., None]).sum(-2) / weights.sum(-1, keepdim=True).clamp_min(1)
