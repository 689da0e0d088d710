"""What is to be trained is in the optimizer and moves, and nothing else does: looked at in the first steps of every loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.errors import SparseDPError, UnsupportedError, UtilityWarning


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(30, 4), nn.Linear(4, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.spare = nn.Linear(4, 1)  # not used

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.frozen(self.table(ids))).squeeze(1)


def without_spare() -> Model:
    model = Model()
    model.spare.requires_grad_(False)
    return model


def run(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    model: Model | None = None,
    steps: int = 12,
    between: Callable[[Model], None] | None = None,
    schedule: Callable[[int], float] | None = None,
    **settings: Any,
) -> tuple[Model, sparsedp.PrivacyEngine]:
    torch.manual_seed(0)
    model = without_spare() if model is None else model
    parameters: Any = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if make is None else make(parameters)
    data = TensorDataset(torch.randint(30, (60, 3)), torch.randint(2, (60,)).float())
    engine = sparsedp.PrivacyEngine(seed=0)
    _, private, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=20),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **settings},
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    if between is not None:
        between(model)
    while engine.ledger.steps < steps:
        for ids, target in loader:
            private.zero_grad()
            binary_cross_entropy_with_logits(model(ids), target).backward()
            private.step()
            if scheduler is not None:
                scheduler.step()
    return model, engine


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_optimizers_that_train_all_of_it_pass(name: str, noise_multiplier: float) -> None:
    run(OPTIMIZERS[name], noise_multiplier=noise_multiplier)


MECHANISMS = {
    "AdaFEST": sparsedp.AdaFEST(threshold=1.0),
    "AdaFEST that selects nothing": sparsedp.AdaFEST(threshold=1e6),
    "FEST": sparsedp.FEST(k=3, epsilon=1.0),
    "EANA": sparsedp.EANA(),
    "LazyDP": sparsedp.LazyDP(),
    "exponential": sparsedp.ExponentialSelection(k=2, epsilon=1.0),
}


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "momentum"])
def test_tables_move_on_their_selection_alone(mechanism: sparsedp.Mechanism, optimizer: str) -> None:
    if optimizer == "Adagrad" and mechanism.name == "lazydp":
        pytest.skip("LazyDP takes SGD")
    try:
        run(OPTIMIZERS[optimizer], mechanism=mechanism)
    except UnsupportedError as error:
        assert "moved" not in str(error) and "momentum" in optimizer, error


def test_a_rate_of_zero_in_a_warm_up_passes() -> None:
    run(schedule=lambda step: max(0, step - 11) / 10, steps=24)


def test_one_side_of_an_adapter_whose_other_side_is_zero_passes() -> None:
    """LoRA's A has no gradient while B is zero."""

    class Adapted(Model):
        def __init__(self) -> None:
            super().__init__()
            self.spare.requires_grad_(False)
            self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return (self.out(x) + self.b(self.a(x))).squeeze(1)

    for noise_multiplier in (0.0, 1.0):
        model = Adapted()
        before = model.a.weight.detach().clone()
        run(model=model, noise_multiplier=noise_multiplier)
        assert not torch.equal(model.a.weight, before)


class Forgetful(torch.optim.SGD):
    """Leaves out what has one dimension, by a rule of its own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])  # behind the version counter


def test_a_parameter_that_the_optimizer_leaves_out_is_named() -> None:
    with pytest.raises(SparseDPError, match=r"'out.bias' is to be trained, and Forgetful .* has not moved"):
        run(lambda p: Forgetful(p, lr=0.1))


def test_an_optimizer_that_writes_behind_the_version_counters_passes() -> None:
    class Behind(Forgetful):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-group["lr"])

    run(lambda p: Behind(p, lr=0.1))


@pytest.mark.parametrize("behind", [False, True], ids=["counted", "behind the counters"])
def test_a_frozen_parameter_that_the_optimizer_moves_is_named(behind: bool) -> None:
    class Decays(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    (parameter.data if behind else parameter).mul_(0.99)

    with pytest.raises(SparseDPError, match=r"wrote to parameter 'frozen\.weight', which has no gradient"):
        run(lambda p: Decays(p, lr=0.1))


def test_a_hook_that_moves_what_the_optimizer_does_not_have_is_named() -> None:
    model = without_spare()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)
        optimizer.register_step_post_hook(lambda *_: model.frozen.weight.data.add_(1.0))
        return optimizer

    with pytest.raises(SparseDPError, match=r"frozen\.weight"):
        run(make, model)


def test_a_hook_that_takes_gradients_away_is_named() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def drop(*_: Any) -> None:
            for parameter in parameters:
                if parameter.ndim == 1:
                    parameter.grad = None

        optimizer.register_step_pre_hook(drop)
        return optimizer

    with pytest.raises(SparseDPError, match=r"'out.bias' is to be trained"):
        run(make)


def replace(model: Model) -> None:
    model.out.weight = nn.Parameter(model.out.weight.detach().clone())


def freeze_another(model: Model) -> None:
    model.out.weight = nn.Parameter(torch.ones(1, 4), requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "unfrozen, without a place in the optimizer": (lambda m: m.spare.requires_grad_(True), "'spare.weight' requires"),
    "added": (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "'extra.weight' requires a gradient"),
    "replaced by another that is trained": (replace, "'out.weight' has an ordinary gradient"),
    "replaced by one that is frozen": (
        freeze_another,
        "'out.weight' of make_private, which is not in the module any more",
    ),
    "taken away": (lambda m: delattr(m, "frozen"), "'frozen.weight' of make_private|has no attribute"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_changed_after_make_private_is_refused(change: str) -> None:
    def only_trained(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    between, message = CHANGES[change]
    before = {}

    def changed(model: Model) -> None:
        between(model)
        before.update({name: p.detach().clone() for name, p in model.named_parameters()})

    model = without_spare()
    with pytest.raises((SparseDPError, AttributeError), match=message):
        run(only_trained if "unfrozen" in change else None, model, between=changed)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())  # nothing was written


def test_a_move_of_the_whole_module_passes() -> None:
    run(between=lambda m: m.to("cpu", torch.float32))


def test_parameters_of_the_optimizer_may_be_unfrozen_and_frozen() -> None:
    def unfreeze(model: Model) -> None:
        model.frozen.requires_grad_(True)
        model.out.requires_grad_(False)

    model, _ = run(between=unfreeze)
    assert model.frozen.weight.requires_grad


def test_what_noise_alone_moves_is_named() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model=Model(), steps=30)
    texts = [str(w.message) for w in caught if issubclass(w.category, UtilityWarning)]
    assert sum("no gradient came to parameter 'spare.weight', 'spare.bias'" in text for text in texts) == 1, texts


class Adapted(Model):
    """Adapters as peft names them, of which none, some or all take part."""

    def __init__(self, kind: str, used: int) -> None:
        super().__init__()
        self.spare.requires_grad_(False)
        self.used = used
        for i in range(2):
            setattr(self, f"{kind}_A{i}", nn.Linear(3, 1))
        self.adapters = [getattr(self, f"{kind}_A{i}") for i in range(2)]

    def forward(self, ids: Tensor) -> Tensor:
        beside = [adapter(ids.float()).squeeze(1) for adapter in self.adapters[: self.used]]
        return torch.stack([super().forward(ids), *beside]).sum(0)


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_an_adapter_that_takes_no_part_at_all_is_refused(kind: str) -> None:
    model = Adapted(kind, used=0)
    with pytest.raises(SparseDPError, match=rf"first 3 steps no gradient came to any of the 4 .* '{kind}_A0.weight'"):
        run(model=model, steps=30)
    model = Adapted(kind, used=0)
    for adapter in model.adapters:
        adapter.requires_grad_(False)
    run(model=model, steps=30)


@pytest.mark.parametrize("used", [1, 2])
def test_an_adapter_that_takes_part_somewhere_is_not(used: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model=Adapted("lora", used), steps=30)
    assert any("'lora_A1.weight'" in str(w.message) for w in caught) == (used == 1)


def test_names_that_only_look_like_an_adapters_are_layers() -> None:
    with pytest.warns(UtilityWarning, match="no gradient came to parameter 'floral_A0.weight'"):
        run(model=Adapted("floral", used=0), steps=30)
