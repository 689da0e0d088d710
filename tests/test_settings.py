"""The settings of make_private: written once, shown by help, refused by name."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import sparsedp
from sparsedp.cli.config.sections import PrivacyConfig, TrainingConfig
from sparsedp.clipping import Clipping
from sparsedp.errors import UnsupportedError
from sparsedp.plan import PrivacyPlan
from sparsedp.settings import (
    ExecutionSettings,
    PlannedSettings,
    PrivacySettings,
    SettingsKeywords,
    read_settings,
    setting_names,
)
from support import Clicks, clicks, loader_of, make_private

ENGINE = sparsedp.PrivacyEngine
OWN = {
    "make_private": ["noise_multiplier"],
    "make_private_with_epsilon": ["target_epsilon", "target_delta", "epochs", "steps"],
}


@pytest.mark.parametrize("name", OWN)
def test_help_shows_every_setting(name: str) -> None:
    function = getattr(ENGINE, name)
    shown = inspect.signature(function).parameters
    assert list(shown)[: 4 + len(OWN[name])] == ["self", "module", "optimizer", "data_loader", *OWN[name]]
    assert list(shown)[4 + len(OWN[name]) :] == setting_names()
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in setting_names())
    assert shown["max_grad_norm"].default is inspect.Parameter.empty
    assert shown["mechanism"].default == sparsedp.DPSGD() and shown["unit"].default == "example"
    for setting in setting_names():
        assert f"\n{setting}: " in function.__doc__


def test_type_checkers_know_every_setting() -> None:
    assert set(get_type_hints(SettingsKeywords)) == set(setting_names())
    assert SettingsKeywords.__required_keys__ == {"max_grad_norm"}


def test_configurations_have_the_same_names_and_defaults() -> None:
    defaults = {
        setting.name: setting.default for kind in (PrivacySettings, ExecutionSettings) for setting in fields(kind)
    }
    made = {"mechanism", "frequencies"}  # of a mapping
    for kind in (PrivacyConfig, TrainingConfig):
        for key in fields(kind):
            if key.name in defaults and key.name not in made:
                assert key.default == defaults[key.name], key.name
    names = {key.name for kind in (PrivacyConfig, TrainingConfig) for key in fields(kind)}
    # The data bring users, and the configuration has sections for streams and for early stopping. Public inputs and
    # layers of torch that are to be replaced are named in Python alone, and so is how data are divided among processes.
    assert set(defaults) - names == {"users", "stream", "public_inputs", "replace_recurrent", "own_data", "validation"}


@pytest.mark.parametrize("name", OWN)
def test_unknown_and_missing_keywords(name: str) -> None:
    model = Clicks()
    given: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": loader_of(*clicks(64), batch_size=8),
        **({"noise_multiplier": 1.0} if name == "make_private" else {"target_epsilon": 1, "target_delta": 1e-5, "epochs": 1}),
    }  # fmt: skip
    function = getattr(ENGINE(), name)
    with pytest.raises(
        TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'mechansim'. Did you mean 'mechanism'"
    ):
        function(**given, max_grad_norm=1.0, mechansim=sparsedp.DPSGD())
    with pytest.raises(TypeError, match=rf"{name}\(\) is missing the required keyword argument 'max_grad_norm'"):
        function(**given)
    del given["data_loader"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'data_loader'"):
        function(**given, max_grad_norm=1.0)


def test_no_mechanism_is_the_default_one() -> None:
    assert read_settings({"max_grad_norm": 1.0, "mechanism": None}, "f")[0].mechanism == sparsedp.DPSGD()


def test_settings_are_frozen_and_speed_is_apart() -> None:
    privacy, speed = read_settings({"max_grad_norm": 1.0, "max_physical_batch": 3, "public_inputs": ["t"]}, "f")
    assert speed == ExecutionSettings(max_physical_batch=3) and privacy.public_inputs == ("t",)
    assert not {setting.name for setting in fields(ExecutionSettings)} & {
        setting.name for setting in fields(PrivacyPlan)
    }
    with pytest.raises(FrozenInstanceError):
        privacy.unit = "user"  # type: ignore[misc]


def test_the_plan_holds_what_was_given() -> None:
    given: dict[str, Any] = {
        "mechanism": sparsedp.AdaFEST(threshold=2.0), "unit": "user", "loss_reduction": "sum", "poisson_sampling": False,
        "max_examples_per_user": 2, "public_inputs": ("t",), "frequencies": sparsedp.FrequencyRelease(clip=2.0),
        "clipping": Clipping(7.0, "automatic", 0.5),
    }  # fmt: skip
    engine, *_ = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=8), users=np.arange(64) % 20, max_grad_norm=3, **given
    )
    plan = engine.plan
    assert plan.clipping == Clipping(3.0, "automatic", 0.5)
    assert {s.name for s in fields(PlannedSettings)} - set(given) == {
        "stream",
        "validation",
    }  # which tests of their own give
    for setting in fields(PlannedSettings):
        if setting.name in given:
            assert getattr(plan, setting.name) == given[setting.name]
    # Whose each example is, is no part of a plan: whoever sees it could try what fits.
    assert "users" not in plan.to_dict()


def test_a_plan_and_its_hash() -> None:
    """As a plan was written and hashed before settings were a class of their own."""
    plan = PrivacyPlan(
        dataset_size=240, batch_size=24, shuffled=True, noise_multiplier=1.0, clipping=Clipping(1.0),
        parameters=(("table.weight", (50, 6)),), seeded=True,
    )  # fmt: skip
    assert plan.to_dict() == {
        "dataset_size": 240, "batch_size": 24, "poisson_sampling": True, "shuffled": True, "noise_multiplier": 1.0,
        "clipping": {"max_norm": 1.0, "style": "flat", "gamma": 0.01}, "mechanism": {"name": "dpsgd"},
        "parameters": [["table.weight", [50, 6]]], "accountant": "pld", "unit": "example", "loss_reduction": "mean",
        "steps": None, "target_epsilon": None, "target_delta": None, "seeded": True, "public_inputs": [],
    }  # fmt: skip
    assert plan.hash == HASH


HASH = "55dbe64aece7178f17e1d991d52247043ef085c7a813929f9d4b191c2219b299"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"unit": "household"}, UnsupportedError, "unit='household'"),
        ({"mechanism": "dpsgd"}, TypeError, "mechanism must be"),
        ({"loss_reduction": "max"}, ValueError, "loss_reduction"),
        ({"clipping": "adaptive"}, ValueError, "clipping"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm"),
        ({"public_inputs": "t"}, TypeError, r"public_inputs must be a sequence of names, such as \('t',\)"),
        ({"stream": [1, 2]}, TypeError, "stream must be a sparsedp.Stream, not list"),
        ({"users": [1, 2]}, UnsupportedError, "users is for unit='user'"),
        ({"max_examples_per_user": 2}, UnsupportedError, "max_examples_per_user is for unit='user'"),
        ({"mechanism": sparsedp.FEST(k=3, frequencies="running")}, UnsupportedError, "needs data in periods"),
        (
            {"mechanism": sparsedp.FEST(k=3), "frequencies": sparsedp.FrequencyRelease()},
            UnsupportedError,
            "frequencies together with",
        ),
    ],
)
def test_what_a_setting_must_be(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PrivacySettings(**{"max_grad_norm": 1.0, **given})
