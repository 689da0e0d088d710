"""The gradient of one step: noise on the selection, to which the clipped sums of the physical batches are added."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsedp.capture import Captured, RowSpace, TouchedRows


class NoisyGradient:
    """A buffer for each parameter that is not frozen: of its shape, or with the selected rows of a table alone.

    The noise comes first and the sums are added to it, which saves a pass over everything. Selected rows of all tables
    lie in one piece of memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        space: RowSpace,
        selection: Mapping[str, Tensor] | None,
        dense: dict[str, Tensor],
        noise_on_rows: bool = True,
    ) -> None:
        """`dense` keeps the buffers of parameters that change as a whole from step to step.

        Without `noise_on_rows`, selected rows begin with zeros: LazyDP gives them their noise later.
        """
        self.space = space
        self.selection = selection
        self.values: dict[str, Tensor] = {}
        self._parameters = parameters
        self._noisy: dict[int, Tensor] = {}  # what the noise is drawn into, each under an index of its own
        rows = selection or {}
        for index, (name, parameter) in enumerate(parameters.items()):
            if name not in rows and parameter.requires_grad:
                self.values[name] = self._noisy[index] = _kept_buffer(dense, name, parameter)
        kinds = dict.fromkeys((parameters[name].dtype, parameters[name].device) for name in rows)
        for number, (dtype, device) in enumerate(kinds):
            alike = [name for name in rows if (parameters[name].dtype, parameters[name].device) == (dtype, device)]
            sizes = [rows[name].numel() * parameters[name][:1].numel() for name in alike]
            make = torch.empty if noise_on_rows else torch.zeros
            flat = make(sum(sizes), dtype=dtype, device=device)
            if noise_on_rows:
                self._noisy[len(parameters) + number] = flat
            for name, part in zip(alike, flat.split(sizes)):
                self.values[name] = part.view(rows[name].numel(), *parameters[name].shape[1:])

    @property
    def noisy(self) -> Mapping[int, Tensor]:
        """The tensors to fill with noise, before anything is added."""
        return self._noisy

    def add(self, captured: Captured, touched: TouchedRows, slots: Tensor | None, weights: Tensor) -> None:
        """Adds the sum over examples of weight times gradient.

        `weights` (examples,) are the clip factors of their units, over the divisor.

        `slots` are the places of the touched rows in the selection; the other uses must be restricted to it already.
        """
        trained = {
            name: uses for name, uses in captured.uses.items() if name in self.values
        }  # not frozen since forward
        looked_up = {name: self.values[name] for name in trained if name in touched.lookups}
        touched.add_weighted_sums(looked_up, slots, weights)
        for name, uses in trained.items():
            if name in looked_up:
                continue
            out = self.values[name]
            mine = weights.to(out.dtype)
            rows = None if self.selection is None else self.selection.get(name)
            if rows is None:
                uses.add_weighted_sum(out, mine)
            else:
                total = uses.weighted_sum(mine, self._parameters[name].shape)
                assert isinstance(total, Tensor)  # uses by lookups alone are in `touched`
                out.add_(total[rows])

    def as_sparse(self, name: str) -> Tensor:
        """What the parameter's `grad` is to be: dense, or sparse and coalesced."""
        rows = None if self.selection is None else self.selection.get(name)
        if rows is None:
            return self.values[name]
        shape = self._parameters[name].shape
        return torch.sparse_coo_tensor(rows[None], self.values[name], shape, is_coalesced=True, check_invariants=False)


def _kept_buffer(kept: dict[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    known = kept.get(name)
    if known is None or known.shape != parameter.shape or known.device != parameter.device:
        known = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        kept[name] = known
    return known
