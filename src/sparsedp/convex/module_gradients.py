"""Gradients of a PyTorch module for bias-reduced SGD, by the same capture as everywhere: clipped sums, no gradient of one row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.capture import Capture, RowSparse
from sparsedp.capture.inputs import PublicInputs
from sparsedp.clipping import Clipping
from sparsedp.errors import ConfigError, NonFiniteGradientError, UnsupportedError
from sparsedp.refusals import refuse_module
from sparsedp.sampling import BatchInfo


class ModuleGradients:
    """The loss of a module on rows of tensors, as `BiasReducedSGD.minimise` takes it.

    `data` are tensors (n, ...): the module's inputs and, last, the target. `loss_fn(output, target)` is the mean over the rows of
    a batch, to each of which it must give a loss of its own: `sparsedp.check` finds out. The module is copied, to float64; its
    trained parameters, one after another, are the weights (d,).
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], data: Sequence[Tensor]) -> None:
        refuse_module(module)
        if len(data) < 2 or len({len(part) for part in data}) != 1:
            raise ConfigError("data must be the module's inputs and the target: tensors with as many rows each.")
        self._module = copy.deepcopy(module).cpu().double()
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._loss_fn = loss_fn
        self._data = [part.double() if part.is_floating_point() else part for part in data]

    @property
    def rows(self) -> int:
        return len(self._data[0])

    @property
    def columns(self) -> int:
        """d."""
        return sum(p.numel() for p in self._parameters.values())

    @property
    def start(self) -> np.ndarray:
        """The weights that the module has now, (d,)."""
        return np.concatenate([p.detach().reshape(-1).numpy() for p in self._parameters.values()])

    def load(self, weights: np.ndarray, module: nn.Module) -> None:
        """Gives the weights of a result to a module like the one that was copied."""
        trained = dict(module.named_parameters())
        with torch.no_grad():
            for name, part in self._split(weights).items():
                trained[name].copy_(part)

    def clipped_sums(
        self, w: np.ndarray, batch: np.ndarray, groups: Sequence[np.ndarray], bound: float
    ) -> list[np.ndarray]:
        """For each group, bool (b,), the sum over its rows of their gradients at w, each clipped to l2 norm `bound`; (d,)."""
        if len(batch) == 0:
            return [np.zeros(self.columns) for _ in groups]
        with torch.no_grad():
            for name, part in self._split(w).items():
                self._parameters[name].copy_(part)
        units = len(batch)
        info = BatchInfo(units, units, True, True, 0)
        capture = Capture(self._module, self._parameters, lambda: info, public=PublicInputs())
        capture.attach()
        try:
            *inputs, target = (part[torch.from_numpy(batch)] for part in self._data)
            self._loss_fn(self._module(*inputs), target).backward()
            captured = capture.collect()
        finally:
            capture.detach()
        if captured is None:
            raise UnsupportedError("The loss does not depend on any trained parameter of the module.")
        if captured.terms:
            raise UnsupportedError("The loss has a term that depends on parameters alone (a penalty?): take it out.")
        squares = torch.stack([captured.squared_norms(uses).double() for uses in captured.uses.values()]).sum(0)
        if not squares.isfinite().all():
            raise NonFiniteGradientError(
                "A row's gradient is NaN or infinite: the run ends here, and nothing is released."
            )
        # A row's own loss is the batch's mean times the number of rows.
        factors = Clipping(bound).factors(squares.sqrt() * units) * units
        sums = []
        for group in groups:
            weights = factors * torch.from_numpy(group)
            parts = []
            for name, parameter in self._parameters.items():
                total = torch.zeros_like(parameter)
                if name in captured.uses:
                    added = captured.uses[name].weighted_sum(weights, parameter.shape)
                    if isinstance(added, RowSparse):
                        total.index_add_(0, added.rows, added.values)
                    else:
                        total = added
                parts.append(total.detach().reshape(-1).double().numpy())
            sums.append(np.concatenate(parts))
        return sums

    def _split(self, w: np.ndarray) -> dict[str, Tensor]:
        sizes = [p.numel() for p in self._parameters.values()]
        parts = torch.from_numpy(np.array(w, np.float64)).split(sizes)
        return {name: part.view(p.shape) for (name, p), part in zip(self._parameters.items(), parts)}
