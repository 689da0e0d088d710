"""`python -m model_matrix.opacus_steps [PATTERN ...]`: the matrix with Opacus, into opacus.tsv.

Opacus takes one step without noise on 4 examples of each case, with hooks and with ghost clipping, and its update is held against
the same examples, each alone in float64. 'works' is one that agrees, 'wrong' one that does not and of which nothing was said,
'refused' any error, and 'unjudged' a case whose reference does not run. Recurrent and attention layers that Opacus has its own of
are replaced by `ModuleValidator.fix`, in the reference too; batch normalisation is left in, as it makes another model.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, NamedTuple
from unittest import mock

import opacus
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import default_collate

from model_matrix.cases import CASES
from model_matrix.harness import DRAWN, RATE, Case, Reference, built, difference, forward, loader_of, one_line, trained
from model_matrix.opacus_results import FILE, MODES, OpacusResult, read, write

STEP = 1  # of the harness's steps, the one on as many examples as are expected
# Opacus clips by max_norm / (norm + 1e-6).
ADDED_TO_NORMS = 1e-6


class Verdict(NamedTuple):
    """'works', 'wrong', 'refused' or 'unjudged', and why."""

    verdict: str
    reason: str = ""


ONE_LOSS = "the model gives one loss for the whole batch, and ghost clipping takes one for each example"


class OneLossOfTheBatch(Exception):
    """The model or its loss gives one number for the whole batch, and ghost clipping needs one for each example."""


class LossesOfEach:
    """The criterion of a case as ghost clipping takes it: (n,) losses while `reduction` is 'none'."""

    def __init__(self, case: Case) -> None:
        self._loss, self.reduction = case.loss, case.loss_reduction

    def __call__(self, output: Any, target: Any) -> Tensor:
        together = self._loss(output, target)
        losses = _label_losses(output, target) if isinstance(output, Mapping) else None
        if losses is None or not torch.allclose(losses.mean(), together, rtol=1e-4):
            if isinstance(output, Mapping) and output.get("loss") is together:
                raise OneLossOfTheBatch(ONE_LOSS)
            n = len(target) if isinstance(target, Tensor) else len(next(iter(target.values())))
            each = [self._loss(_part(output, i, n), _part(target, i, n)) for i in range(n)]
            losses = torch.stack([loss.reshape(()) for loss in each])
        return losses


def _label_losses(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor | None:
    """Of a model of transformers, which returns logits beside its loss: the mean over each example's own labels."""
    pairs = {"logits": "labels", "start_logits": "start_positions", "end_logits": "end_positions"}
    losses = []
    for logits, labels in ((output[name], batch.get(label)) for name, label in pairs.items() if name in output):
        if labels is None or logits.dim() > 3 or logits.shape[:-1] != labels.shape:
            return None
        of_labels = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        losses.append(of_labels.reshape(len(labels), -1).mean(1))
    return torch.stack(losses).mean(0) if losses else None


def _part(value: Any, i: int, n: int) -> Any:
    """Of the n examples in tensors, and in tuples and dicts of them, the one at i."""
    if isinstance(value, Tensor):
        if value.dim() == 0 or len(value) != n:
            raise OneLossOfTheBatch(ONE_LOSS)
        return value[i : i + 1]
    if isinstance(value, Mapping):  # a model's output may hold more than the loss needs
        parts = {
            name: item[i : i + 1] if isinstance(item, Tensor) and item.dim() and len(item) == n else item
            for name, item in value.items()
        }
        return type(value)(**parts)
    if isinstance(value, (tuple, list)):
        return type(value)(_part(item, i, n) for item in value)
    return value


def _fixed(case: Case) -> Case:
    """The case with Opacus' own layers in the places of torch's, where that leaves the model what it is."""

    def build() -> nn.Module:
        module = case.build().train()
        is_normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        if is_normalised or ModuleValidator.is_valid(module):
            return module
        # Its copy by pickle, which not every case survives, is not needed: the module is new.
        with mock.patch("opacus.validators.module_validator.clone_module", lambda module: module):
            return ModuleValidator.fix(module)

    return replace(case, build=build)


def run_case(case: Case, mode: str, reference: Reference) -> Verdict:
    """One step of Opacus on the case, in a mode of its per-example gradients."""
    try:
        module = built(case)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        criterion = LossesOfEach(case)
        made = opacus.PrivacyEngine().make_private(
            module=module, optimizer=torch.optim.SGD(trainable, lr=RATE), data_loader=loader_of(case, reference.rows),
            criterion=criterion, noise_multiplier=0.0, max_grad_norm=reference.max_norm or 1.0, poisson_sampling=False,
            loss_reduction=case.loss_reduction, grad_sample_mode=mode,
        )  # fmt: skip
        private, optimizer = made[0], made[1]
        before = trained(module)
        batch = (case.collate or default_collate)([reference.rows[index] for index in DRAWN[STEP]])
        optimizer.zero_grad()
        forward(case if mode == "hooks" else replace(case, loss=made[2]), private, batch).backward()
        optimizer.step()
    except Exception as error:
        return Verdict("refused", f"{type(error).__name__}: {one_line(error)}")
    try:
        reference.prepare()
        after = trained(module)
        wrong = difference(before, after, reference, STEP)
        if wrong and case.penalty is not None:
            with mock.patch.object(reference, "penalty", _no_penalty):
                wrong = difference(before, after, reference, STEP) or "the penalty on parameters is left out"
    except Exception as error:
        return Verdict("unjudged", f"{type(error).__name__}: {one_line(error)}")
    return Verdict("wrong", wrong) if wrong else Verdict("works")


def _no_penalty(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}


def run_both(case: Case) -> dict[str, Verdict]:
    """The case's verdicts, by mode."""
    fixed = _fixed(case)
    reference = Reference(fixed, ADDED_TO_NORMS)
    with suppress(
        Exception
    ):  # of a model that does not take one example alone: Opacus may refuse it, else this comes up again
        reference.prepare()
    return {mode: run_case(fixed, mode, reference) for mode in MODES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the matrix of models with Opacus, and writes opacus.tsv.")
    parser.add_argument("pattern", nargs="*", default=["*"], help="shell patterns of names of cases")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = read() if FILE.exists() else {}
    for case in CASES:
        if not case.is_installed or not any(fnmatch(case.name, pattern) for pattern in options.pattern):
            continue
        verdicts = run_both(case)
        results[case.name] = OpacusResult(
            {mode: verdict.verdict for mode, verdict in verdicts.items()},
            {mode: verdict.reason.replace("\t", " ")[:100].strip() for mode, verdict in verdicts.items()},
        )
        print(case.name, *verdicts.values(), sep="\t", flush=True)
        write(results, [case.name for case in CASES])


if __name__ == "__main__":
    main()
