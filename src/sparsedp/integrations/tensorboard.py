"""A callback that writes for TensorBoard (the extra `tensorboard`): `engine.add_callback(TensorBoard("runs/tb"))`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sparsedp.errors import ConfigError


class TensorBoard:
    """Every value is a curve; `public` and `private` are groups of their own. The folder is private, as most curves are."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard is missing: pip install 'sparsedp[tensorboard]'") from error
        self._writer = SummaryWriter(os.fspath(folder))
        self._step = 0

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"epochs/{name}", value, epoch)
        self._writer.flush()

    def on_end(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.close()
