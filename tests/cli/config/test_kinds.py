"""Kinds of data set, model and loss: each is complete, and the schema offers all of them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import DatasetKind, GeneratedData, GeneratedSequencesData
from sparsedp.cli.config.losses import CANDIDATE_LOSSES, LOSSES, SEQUENCE_LOSSES
from sparsedp.cli.config.models import ModelKind, OwnModel, PctrModel, RecurrentModel, TransformerModel
from sparsedp.cli.config.trust import Code
from sparsedp.data import HeldOutItems
from sparsedp.models import PCTR, DPFormer, RecurrentRecommender

HINTS = get_type_hints(Config, include_extras=True)


def concrete(kind: type) -> set[type]:
    """The kinds that can be made, below an abstract one."""
    below = {sub for child in kind.__subclasses__() for sub in concrete(child)}
    return below or {kind}


@pytest.mark.parametrize(("section", "base"), [("data", DatasetKind), ("model", ModelKind)])
def test_every_kind_can_be_named(section: str, base: type) -> None:
    assert set(get_args(HINTS[section])) == concrete(base)
    assert not any(getattr(kind, "__abstractmethods__", None) for kind in concrete(base))


def test_every_loss_can_be_named() -> None:
    (names,) = (get_args(member) for member in get_args(HINTS["loss"]) if get_origin(member) is Literal)
    assert set(names) == set(LOSSES)
    assert SEQUENCE_LOSSES == ("softmax", "sampled_softmax", "binary_candidates")
    assert CANDIDATE_LOSSES == ("sampled_softmax", "binary_candidates")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_sum_is_the_mean_times_the_units(name: str) -> None:
    torch.manual_seed(0)
    batch: Any = {"history": torch.ones(5, 3), "candidates": torch.ones(5, 3, 4, dtype=torch.long)}
    output = torch.randn(5, 3, 4) if LOSSES[name].draws_negatives else torch.randn(5)
    target = batch if LOSSES[name].topic == "sequences" else torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    if LOSSES[name].topic == "text":
        output, target = torch.randn(5, 3), torch.tensor([0, 2, 1, 0, 2])
    mean, total = (LOSSES[name].make(reduction)(output, target) for reduction in ("mean", "sum"))
    torch.testing.assert_close(total, 5 * mean)


def test_clicks_are_loaded_and_modelled() -> None:
    data = GeneratedData("generated", rows=200, scale=0.001, held_out=0.25).load(Code())
    assert (len(data.training), len(data.held_out or ())) == (150, 50)
    assert isinstance(PctrModel("pctr", hidden=4, hidden_layers=1).make(data.training, Code()), PCTR)
    assert len(data.examples(3)[-1]) == 3 and not data.vocabulary_is_private


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_sequences_are_loaded_and_modelled(held_out: Any) -> None:
    data = GeneratedSequencesData("generated_sequences", users=40, items=20, length=6, held_out=held_out).load(Code())
    assert isinstance(data.held_out, HeldOutItems) and data.training.length == 6
    transformer, reattention = (TransformerModel(kind, dim=4, blocks=1) for kind in ("transformer", "dpformer"))
    assert isinstance(transformer.make(data.training, Code()), DPFormer)
    assert reattention.has_reattention and not transformer.has_reattention
    recurrent = RecurrentModel("gru", dim=4).make(data.training, Code())
    assert isinstance(recurrent, RecurrentRecommender)


def test_only_data_of_the_users_own_may_depend_on_the_global_generator() -> None:
    assert [kind.__name__ for kind in concrete(DatasetKind) if kind.may_use_torch_seed] == ["OwnData"]  # type: ignore[attr-defined]
    assert OwnModel("mine:model").topic is None  # type: ignore[arg-type]
