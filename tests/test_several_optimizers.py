"""Several optimizers in one private run: each takes the steps that it would take in a loop of the user's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import sparsedp
from sparsedp import DPSGD, FEST, AdaFEST, LazyDP, UnsupportedError, dense_parameters, table_parameters
from sparsedp.mechanisms import Mechanism
from support import Clicks, clicks, loader_of, make_private, train

Make = Callable[[nn.Module], list[Optimizer]]
WIDE = AdaFEST(threshold=1.0, noise_ratio=2.0)


def adagrad_and_adam(module: nn.Module) -> list[Optimizer]:
    return [Adagrad(table_parameters(module), lr=0.2), Adam(dense_parameters(module), lr=0.01)]


def sgd_and_adam(module: nn.Module) -> list[Optimizer]:
    return [SGD(table_parameters(module), lr=0.5), Adam(dense_parameters(module), lr=0.01)]


def momentum_and_adam(module: nn.Module) -> list[Optimizer]:
    tables = SGD(table_parameters(module), lr=0.5, momentum=0.9, weight_decay=0.01)
    return [Adam(dense_parameters(module), lr=0.01), tables]


def sparse_adam_and_adamw(module: nn.Module) -> list[Optimizer]:
    return [AdamW(dense_parameters(module), lr=0.01), SparseAdam(table_parameters(module), lr=0.05)]


def run(make: Make, mechanism: Mechanism = WIDE, epochs: int = 0, count: int = 64, **options: Any) -> Any:
    torch.manual_seed(0)
    return started(Clicks(), make, mechanism, epochs, count, **options)


def started(module: nn.Module, make: Make, mechanism: Mechanism, epochs: int, count: int, **options: Any) -> Any:
    loader = loader_of(*clicks(count), batch_size=16)
    parts = make_private(module, loader, optimizer=make(module), mechanism=mechanism, **options)  # type: ignore[arg-type]
    train(parts[1], parts[2], parts[3], epochs)
    return parts


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 5}, {"unit": "user"}], ids=["whole", "parts", "users"])
@pytest.mark.parametrize(
    ("make", "mechanism"),
    [
        (adagrad_and_adam, DPSGD()), (adagrad_and_adam, WIDE), (adagrad_and_adam, FEST(k=20)),
        (sparse_adam_and_adamw, WIDE), (sgd_and_adam, WIDE), (momentum_and_adam, DPSGD()),
    ],
)  # fmt: skip
def test_a_loop_with_both_on_the_same_gradients(make: Make, mechanism: Mechanism, steps: int, options: Any) -> None:
    """Bit for bit; with users, of up to three examples each."""
    options = dict(options)
    if options.get("unit") == "user":
        options["users"] = torch.arange(64) // 3
    torch.manual_seed(0)
    module = Clicks()
    plain, gradients = copy.deepcopy(module), []

    def watch(optimizer: Optimizer, *_: Any) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        gradients.append([p.grad.clone() for p in held])

    def watched(module: nn.Module) -> list[Optimizer]:
        parts = make(module)
        for part in parts:
            part.register_step_pre_hook(watch)
        return parts

    loader = loader_of(*clicks(64), batch_size=16)
    _, _, optimizer, private = make_private(module, loader, optimizer=watched(module), mechanism=mechanism, **options)  # type: ignore[arg-type]
    _, unwatched, other, others = run(make, mechanism, **options)

    def take(module: nn.Module, optimizer: Any, loader: Any) -> None:
        while True:
            for ids, x, y in loader:
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
                optimizer.step()
                if loader.current.last and loader.current.step + 1 == steps:
                    return

    start = weights(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sparsedp.SparseDPWarning)  # of loops that end early
        take(module, optimizer, private)
        take(unwatched, other, others)
    assert len(gradients) == 2 * steps and moved(start, weights(module))
    assert any(g.is_sparse for g in gradients[0] + gradients[1]) == mechanism.selects
    by_hand = make(plain)
    for step in range(steps):
        for place, part in enumerate(by_hand):
            held = [p for group in part.param_groups for p in group["params"]]
            for parameter, gradient in zip(held, gradients[2 * step + place]):
                parameter.grad = gradient
            part.step()
    assert_same(weights(plain), weights(module))
    assert_same(weights(plain), weights(unwatched))  # with whatever is faster if nobody watches


@pytest.mark.parametrize("same", [SGD, Adagrad])
def test_two_of_a_kind_are_two_groups_of_one(same: type[Optimizer]) -> None:
    def one(module: nn.Module) -> Any:
        return same([{"params": table_parameters(module), "lr": 0.3}, {"params": dense_parameters(module), "lr": 0.1}])

    def two(module: nn.Module) -> list[Optimizer]:
        return [same(table_parameters(module), lr=0.3), same(dense_parameters(module), lr=0.1)]  # type: ignore[call-arg]

    runs = [run(make, epochs=3) for make in (one, two)]
    assert_same(weights(runs[0][1]), weights(runs[1][1]))
    assert runs[0][0].plan == runs[1][0].plan


def test_lazydp_in_one_draw_has_the_same_law_with_both() -> None:
    """An untouched row's variance after n steps at rate lr is n (lr std)^2."""
    torch.manual_seed(0)
    module = Clicks(rows=4000)
    ids, x, y = clicks(64)  # of the first 50 rows
    engine, _, optimizer, loader = make_private(
        module,
        loader_of(ids, x, y, batch_size=16),
        optimizer=sgd_and_adam(module),
        mechanism=LazyDP(),  # type: ignore[arg-type]
    )
    before = module.table.weight.detach().clone()
    train(module, optimizer, loader, epochs=2)
    change = (module.table.weight.detach() - before)[100:]
    expected = 8**0.5 * 0.5 * 1.0 / 16
    assert abs(float(change.std()) / expected - 1) < 0.02


# ------------------------------------------------------------------ learning rates


def test_schedulers_of_the_private_optimizer_and_of_one_before() -> None:
    """One over all groups, and one that was made for an inner optimizer before it was wrapped."""
    for_all = run(adagrad_and_adam)
    scheduler = ExponentialLR(for_all[2], gamma=0.5)
    train(*for_all[1:], epochs=1)
    scheduler.step()
    assert [group["lr"] for group in for_all[2].param_groups] == [0.1, 0.005]
    train(*for_all[1:], epochs=1)

    schedulers: list[ExponentialLR] = []

    def make(module: nn.Module) -> list[Optimizer]:
        parts = adagrad_and_adam(module)
        schedulers.extend(ExponentialLR(part, gamma=0.5) for part in parts)
        return parts

    with_inner = run(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, that a scheduler stepped before its optimizer
        train(*with_inner[1:], epochs=1)
        for one in schedulers:
            one.step()
    assert [group["lr"] for group in with_inner[2].param_groups] == [0.1, 0.005]
    train(*with_inner[1:], epochs=1)
    assert_same(weights(for_all[1]), weights(with_inner[1]))


def test_a_scheduler_of_an_inner_optimizer_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    """Loading puts other groups into torch's optimizers: the scheduler moves these."""
    schedulers: list[ExponentialLR] = []

    def make(module: nn.Module) -> list[Optimizer]:
        parts = adagrad_and_adam(module)
        schedulers.append(ExponentialLR(parts[0], gamma=0.5))
        return parts

    engine, module, optimizer, loader = run(make, epochs=1)
    engine.save_checkpoint(tmp_path / "c.pt")
    engine.load_checkpoint(tmp_path / "c.pt")
    schedulers[0].step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_schedulers_that_cycle_momenta_are_told_whether_all_have_them() -> None:
    mixed, alike = (
        run(adagrad_and_adam),
        run(lambda m: [SGD(table_parameters(m), momentum=0.9), SGD(dense_parameters(m), momentum=0.5)]),
    )
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(mixed[2], max_lr=0.1, total_steps=8)
    OneCycleLR(mixed[2], max_lr=[0.1, 0.2], total_steps=8, cycle_momentum=False)
    OneCycleLR(alike[2], max_lr=0.1, total_steps=8)


# ------------------------------------------------------------------ state


@pytest.mark.parametrize(
    ("make", "mechanism"),
    [(adagrad_and_adam, WIDE), (sparse_adam_and_adamw, WIDE), (momentum_and_adam, LazyDP()), (momentum_and_adam, DPSGD())],
)  # fmt: skip
def test_resumed_runs_are_exact(make: Make, mechanism: Mechanism, tmp_path: Path) -> None:
    whole = run(make, mechanism, epochs=2)
    whole[0].save_checkpoint(tmp_path / "c.pt")
    train(*whole[1:], epochs=2)
    again = run(make, mechanism)
    again[0].load_checkpoint(tmp_path / "c.pt")
    train(*again[1:], epochs=2)
    assert_same(weights(whole[1]), weights(again[1]))
    states = [parts[2].named_state_dict()["state"] for parts in (whole, again)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert_same(states[0][name], states[1][name])
    assert whole[0].ledger.entries == again[0].ledger.entries


def test_state_by_names_and_by_numbers() -> None:
    first, second = run(adagrad_and_adam, epochs=1), run(adagrad_and_adam)
    named = first[2].named_state_dict()
    assert set(named["state"]) == {"table.weight", "hidden.weight", "hidden.bias", "out.weight", "out.bias"}
    assert set(named["state"]["table.weight"]) >= {"sum"} and set(named["state"]["out.bias"]) >= {"exp_avg"}
    second[2].load_named_state_dict(named)
    third = run(adagrad_and_adam)
    third[2].load_state_dict(first[2].state_dict())
    for other in (second, third):
        state = other[2].named_state_dict()["state"]
        for name in named["state"]:
            assert_same(named["state"][name], state[name])
    assert first[2].state_dict()["param_groups"][1]["params"] == [1, 2, 3, 4]


def test_parameters_of_a_group_in_another_order_keep_their_own_state(tmp_path: Path) -> None:
    """torch's load_state_dict goes by places: two parameters of one shape would change theirs."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).sum(1)

    def started_with(order: Sequence[str]) -> Any:
        torch.manual_seed(0)
        module = Two()
        loader = loader_of(torch.randn(64, 3), batch_size=16)
        optimizer = Adam([getattr(module, name).weight for name in order], lr=0.1)
        return make_private(module, loader, optimizer=optimizer)

    def go(parts: Any) -> None:
        _, module, optimizer, loader = parts
        for (x,) in loader:
            optimizer.zero_grad()
            module(x).mean().backward()
            optimizer.step()

    one, other, whole = started_with("ab"), started_with("ba"), started_with("ab")
    go(one)
    one[0].save_checkpoint(tmp_path / "c.pt")
    other[0].load_checkpoint(tmp_path / "c.pt")
    for parts in (other, whole, whole):
        go(parts)
    assert_same(weights(whole[1]), weights(other[1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: adagrad_and_adam(m)[::-1], "of the optimizers \\[Adagrad, Adam\\], and here the optimizers \\[Adam, Adagrad\\]"),
        (lambda m: [Adagrad(table_parameters(m)), AdamW(dense_parameters(m))], "Adagrad, AdamW"),
        (lambda m: SGD([{"params": table_parameters(m)}, {"params": dense_parameters(m)}]), "here one optimizer"),
        (lambda m: [Adagrad([*table_parameters(m), m.out.bias]), Adam([p for p in dense_parameters(m) if p is not m.out.bias])],
         "other parameter groups"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_optimizers_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    first = run(adagrad_and_adam, epochs=1)
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = run(make)
    before = weights(second[1])
    with pytest.raises(sparsedp.CheckpointError, match=message):
        second[0].load_checkpoint(tmp_path / "c.pt")
    assert_same(before, weights(second[1]))
    train(*second[1:], epochs=1)  # nothing changed
    one = run(lambda m: Adagrad(m.parameters()), epochs=1)  # type: ignore[arg-type,return-value]
    one[0].save_checkpoint(tmp_path / "one.pt")
    with pytest.raises(sparsedp.CheckpointError, match="of one optimizer, and here the optimizers"):
        first[0].load_checkpoint(tmp_path / "one.pt")


def test_a_state_that_fits_nothing_changes_nothing() -> None:
    optimizer = run(adagrad_and_adam, epochs=1)[2]
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    broken["param_groups"][1]["params"] = [4, 3, 2, 9]
    with pytest.raises(ValueError, match="other parameters than"):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number in before["state"]:
        assert_same(before["state"][number], after["state"][number])


# ------------------------------------------------------------------ torch.optim's surface


def test_hooks_are_called_once_a_step_and_see_private_gradients() -> None:
    called: list[str] = []
    engine, module, optimizer, loader = run(adagrad_and_adam)
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda self, state: {**state, "mine": 1})
    train(module, optimizer, loader)
    assert called == ["pre", "post"] * 4
    state = optimizer.state_dict()
    assert called[-1] == "saving" and state["mine"] == 1
    optimizer.register_load_state_dict_pre_hook(lambda self, state: called.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda self: called.append("loaded"))
    optimizer.load_state_dict(state)
    assert called[-2:] == ["loading", "loaded"]
    optimizer.register_step_pre_hook(lambda *_: ((), {}))
    with pytest.raises(UnsupportedError, match="hook cannot change"):
        train(module, optimizer, loader)


def test_closures_reports_and_callbacks() -> None:
    engine, module, optimizer, loader = run(adagrad_and_adam)
    told: list[dict[str, float]] = []

    class Callback:
        def on_step(self, step: int, values: dict[str, float]) -> None:
            told.append(values)

    engine.add_callback(Callback())
    calls = 0
    for ids, x, y in loader:

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(module(ids, x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).ndim == 0
    assert calls == len(told) == 4
    assert (told[0]["public/lr/0"], told[0]["public/lr/1"]) == (0.2, 0.01)
    plain = run(adagrad_and_adam, epochs=1)
    assert_same(weights(plain[1]), weights(module))
    assert "Adagrad" in repr(optimizer) and "Adam (" in repr(optimizer)


def test_states_groups_and_what_cannot_be_set() -> None:
    engine, module, optimizer, loader = run(adagrad_and_adam, epochs=1)
    assert optimizer.state[module.table.weight]["sum"].shape == (50, 6)
    assert len(optimizer.state) == 5 and optimizer.state.get(nn.Parameter(torch.zeros(1))) is None
    del optimizer.state[module.out.bias]
    assert len(optimizer.state) == 4
    with pytest.raises(UnsupportedError, match="set those of one of them"):
        optimizer.param_groups = []
    with pytest.raises(UnsupportedError, match="cannot join"):
        optimizer.add_param_group({"params": []})


def test_an_inner_optimizer_that_gains_a_parameter_is_seen() -> None:
    parts: list[Optimizer] = []

    def make(module: nn.Module) -> list[Optimizer]:
        parts.extend(adagrad_and_adam(module))
        return parts

    _, module, optimizer, loader = run(make)
    parts[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UnsupportedError, match="not those that make_private saw"):
        train(module, optimizer, loader)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "mechanism", "message"),
    [
        (lambda m: [Adagrad(table_parameters(m)), Adam(m.parameters())], DPSGD(), "'table.weight' are in several of the optimizers"),
        (lambda m: [Adam(m.parameters())] * 2, DPSGD(), "in several of the optimizers"),
        (lambda m: [Adagrad(table_parameters(m)), Adam(m.out.parameters())], WIDE, "'hidden.weight', 'hidden.bias' require a"),
        (lambda m: [Adagrad(table_parameters(m)), Adam([*dense_parameters(m), nn.Parameter(torch.zeros(1))])], WIDE, "do not belong"),
        (lambda m: [Adam(table_parameters(m)), SGD(dense_parameters(m))], WIDE, "row-sparse gradients for tables, which Adam"),
        (lambda m: [Adagrad(table_parameters(m), weight_decay=0.1), SGD(dense_parameters(m))], WIDE, "weight_decay changes every"),
        (lambda m: [Adagrad(table_parameters(m)), SparseAdam(dense_parameters(m))], WIDE, "SparseAdam takes row-sparse"),
        (lambda m: [SparseAdam(table_parameters(m)), SGD(dense_parameters(m))], DPSGD(), "SparseAdam takes row-sparse"),
        (lambda m: [Adagrad(table_parameters(m)), SGD(dense_parameters(m))], LazyDP(), "SGD, for the tables alone if you like"),
        (lambda m: [SGD(table_parameters(m), momentum=0.5, dampening=0.5), Adam(dense_parameters(m))], LazyDP(), "dampening"),
        (lambda m: [SGD(table_parameters(m)), torch.optim.LBFGS(dense_parameters(m))], DPSGD(), "LBFGS evaluates"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(make: Make, mechanism: Mechanism, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        run(make, mechanism)


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "a list of some"), ("SGD", "a list of some"), ([SGD], "optimizer\\[0\\] must be an optimizer")],
)
def test_what_is_no_optimizer(given: Any, message: str) -> None:
    module = Clicks()
    loader = loader_of(*clicks(64), batch_size=16)
    for kind in (sparsedp.PrivacyEngine().make_private, sparsedp.PrivacyEngine().make_private_with_epsilon):
        how = (
            {"noise_multiplier": 1.0}
            if kind.__name__ == "make_private"
            else {"target_epsilon": 3.0, "target_delta": 1e-4, "epochs": 1}
        )
        with pytest.raises(TypeError, match=message):
            kind(module=module, optimizer=given, data_loader=loader, max_grad_norm=1.0, **how)


def test_private_ones_and_lists_of_one() -> None:
    private = run(adagrad_and_adam)[2]
    with pytest.raises(UnsupportedError, match="private already"):
        run(lambda m: [private, Adam(dense_parameters(m))])
    one = run(lambda m: [Adagrad(m.parameters())], epochs=1)
    bare = run(lambda m: Adagrad(m.parameters()), epochs=1)  # type: ignore[arg-type,return-value]
    assert type(one[2].inner) is Adagrad
    assert_same(weights(one[1]), weights(bare[1]))


def test_a_table_in_the_wrong_one_is_refused_frozen_as_well() -> None:
    """It may be trained later."""

    def make(module: nn.Module) -> list[Optimizer]:
        module.table.weight.requires_grad_(False)
        module.more = nn.Embedding(3, 2)
        return [Adagrad([module.more.weight]), Adam([p for p in module.parameters() if p is not module.more.weight])]

    with pytest.raises(UnsupportedError, match="which Adam does not take"):
        run(make)


def test_advice_is_for_the_optimizers_that_are_given() -> None:
    torch.manual_seed(0)
    module = Clicks()
    advice = sparsedp.advise(
        module=module, optimizer=sgd_and_adam(module), data_loader=loader_of(*clicks(200), batch_size=40),
        target_epsilon=3.0, target_delta=1e-4, epochs=1, look_at="data", max_grad_norm=1.0,
        loss_fn=nn.functional.binary_cross_entropy_with_logits,
    )  # fmt: skip
    assert not [option.label for option in advice.options if option.refused]
    assert {option.label for option in advice.options if option.seconds_per_step} >= {"DPSGD", "LazyDP", "FEST k=5"}
    refused = sparsedp.advise(
        module=module, optimizer=adagrad_and_adam(module), data_loader=loader_of(*clicks(200), batch_size=40),
        target_epsilon=3.0, target_delta=1e-4, epochs=1, look_at="data", max_grad_norm=1.0,
    )  # fmt: skip
    assert [option.label for option in refused.options if option.refused] == ["LazyDP"]


def test_parameters_by_what_they_are() -> None:
    module = Clicks()
    module.tied = nn.Linear(6, 50, bias=False)
    module.tied.weight = module.table.weight
    assert [p is module.table.weight for p in table_parameters(module)] == [True]
    names = {id(p): name for name, p in module.named_parameters()}
    assert {names[id(p)] for p in dense_parameters(module)} == {
        "hidden.weight",
        "hidden.bias",
        "out.weight",
        "out.bias",
    }
