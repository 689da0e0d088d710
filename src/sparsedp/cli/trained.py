"""The model of a run, out of its folder."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.prepare import make_model
from sparsedp.cli.runfolder import RunFolder
from sparsedp.distributed.checkpoint import read_weights as read_weights_of_several
from sparsedp.errors import SparseDPError, one_line


def trained_model(config: Config, folder: RunFolder, data: Data, weights: dict[str, Any]) -> nn.Module:
    """The model that the configuration makes for these data, with the run's weights (`read_weights`)."""
    model = make_model(config, data.training)
    first: dict[int, str] = {}  # a checkpoint of several processes has the first name of a weight that has more
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (before := first.setdefault(id(parameter), name)) in weights:
            weights.setdefault(name, weights[before])
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise SparseDPError(
            f"The weights of {folder.path} do not fit the model that these data and this configuration make: "
            f"{one_line(error)}"
        ) from error
    return model


def read_weights(folder: RunFolder) -> tuple[int, dict[str, Any]]:
    """The step of the model and its weights: the released ones, or else the checkpoint's. Nothing in the files is run."""
    released = folder.is_released
    path = folder.weights if released else folder.checkpoint
    if not path.exists():
        raise SparseDPError(f"{folder.path} has no model yet: {path} is missing. Train it: sparsedp train --resume")
    try:
        if path.is_dir():
            return read_weights_of_several(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if released:
            return int(json.loads((folder.release / "statement.json").read_text())["steps"]), content
        return int(content["loader"]["step"]), content["model"]
    except Exception as error:  # torch has many
        raise SparseDPError(f"{path} cannot be read as weights: {one_line(error)}") from error
