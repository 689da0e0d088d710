"""Do a library's clipped sums honour the bound? Judged against every unit's gradient in float64, one unit at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.speed.peers.problem import KINDS, Case, case
from benchmarks.speed.peers.torchmodels import case_loss, case_module

TITLES = {
    "model": "the benchmark's model",
    "module tie": "two layers share a table",
    "functional tie": "`F.linear(h, emb.weight)`",
    "bag": "repeated ids in a bag",
    "one": "batch of one",
    "positions": "broadcast positions",
}
TOLERANCE = 1e-3  # libraries compute in float32
assert tuple(TITLES) == KINDS


def clipped_gradients(given: Case) -> list[np.ndarray]:
    """Each unit's clipped gradient of all parameters, in the order of their names, as one vector."""
    module, loss = case_module(given).double(), case_loss(given)
    parameters = dict(sorted(module.named_parameters()))
    clipped = []
    for unit in range(len(given.ids)):
        ids, target = torch.from_numpy(given.ids[unit : unit + 1]), torch.from_numpy(given.target[unit : unit + 1])
        value = loss(module(ids), target.double() if target.is_floating_point() else target)
        gradient = np.concatenate([g.flatten().numpy() for g in torch.autograd.grad(value, list(parameters.values()))])
        clipped.append(gradient * min(1.0, given.clip / float(np.linalg.norm(gradient))))
    return clipped


def judge(event: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker found of a case: `outcome` is "honours", "exceeds", "wrong sum" or "refused".

    `part` is the largest norm that one unit adds to the clipped sum, over C: the sum with it less the sum without it. `error`
    is the distance of the clipped sum from the exact one, over the exact one's norm.
    """
    if "refused" in event:
        return {"outcome": "refused", "reason": event["refused"]}
    given = case(event["case"])
    total = _vector(event["all"])
    # Of a batch of one, nothing is left without it.
    parts = [total - _vector(rest) for rest in event["without"]] or [total]
    part = max(float(np.linalg.norm(one)) for one in parts) / given.clip
    exact = sum(clipped_gradients(given))
    error = float(np.linalg.norm(total - exact) / np.linalg.norm(exact))
    if not part <= 1 + TOLERANCE:
        outcome = "exceeds"
    else:
        outcome = "honours" if error <= TOLERANCE else "wrong sum"
    return {"outcome": outcome, "part": part, "error": error}


def _vector(weights: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(weights[name], np.float64).ravel() for name in sorted(weights)])
