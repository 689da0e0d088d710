"""unit="user": steps, counts, resuming, plan and statement are about users."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.capture import Captured, RowSpace
from sparsedp.counting import count_rows
from sparsedp.frequencies import count_lookups
from sparsedp.grid import grid_of
from sparsedp.noise import zero_others
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import predict
from sparsedp.tables import find_tables
from support import Clicks, Gradients, clicks, make_private
from users import CLIP, MECHANISMS, Tables, batch_of_users, capture_users, start, steps, with_users


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("most", [None, 12])
def test_a_step_by_hand(reduction: str, most: int | None) -> None:
    """w - lr / B * sum over users of the clipped sum of their examples' gradients, from the data set's own labels."""
    run = start(module=Clicks().double(), noise_multiplier=0.0, loss_reduction=reduction, max_physical_batch=most)
    _, module, optimizer, loader = run
    users = loader.dataset.users
    whole = list(zip(*loader.dataset.tensors))
    by_ids = {tuple(x.tolist()): user for (_, x, _), user in zip(whole, users)}  # features tell examples apart
    before, seen = None, []
    copy_of = Clicks().double()
    taken = 0
    for ids, x, y in loader:
        if loader.current.first:
            before, seen = {n: p.detach().clone() for n, p in module.named_parameters()}, []
        seen += list(zip(ids, x, y))
        optimizer.zero_grad()
        out = module(ids, x.double())
        nn.functional.binary_cross_entropy_with_logits(out, y.double(), reduction=reduction).backward()
        optimizer.step()
        if not loader.current.last:
            continue
        copy_of.load_state_dict(before)
        totals: dict[int, Gradients] = {}
        for i, features, label in seen:
            loss = nn.functional.binary_cross_entropy_with_logits(
                copy_of(i[None], features[None].double()), label[None].double()
            )
            grads = torch.autograd.grad(loss, list(copy_of.parameters()))
            mine = totals.setdefault(int(by_ids[tuple(features.tolist())]), {})
            for (name, _), grad in zip(copy_of.named_parameters(), grads):
                mine[name] = mine.get(name, 0) + grad
        report = optimizer.last_step
        assert (report.units, report.examples) == (len(totals), len(seen))
        for name, parameter in module.named_parameters():
            wanted = before[name].clone()
            for mine in totals.values():
                norm = torch.stack([grad.square().sum() for grad in mine.values()]).sum().sqrt()
                divisor = 4 if reduction == "mean" else 1
                wanted -= 0.1 / divisor * mine[name] / max(1.0, float(norm))
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-9)
        taken += 1
    assert taken == 3


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_neighbours_of_a_private_step(mechanism: str, reduction: str) -> None:
    """The same selection and noise, with and without each of the users: the sums differ by at most C. In float32.

    With their noise they are rounded, by no more than half a step of the grid.
    """
    run = start(mechanism, loss_reduction=reduction, max_grad_norm=CLIP)
    engine, module, optimizer, loader = run
    engine.prepare()
    ids, x, y = clicks(9, seed=4)
    owners = torch.tensor([0, 1, 0, 2, 2, 2, 3, 0, 1])

    def captured(keep: Tensor) -> Captured:
        left, numbers = owners[keep].unique(return_inverse=True)
        loader.current = batch_of_users(numbers, len(left))
        out = module(ids[keep], x[keep])
        (50 * nn.functional.binary_cross_entropy_with_logits(out, y[keep], reduction=reduction)).backward()
        found = optimizer._capture.collect()
        assert found is not None and found.units == len(left)
        return found

    def released(keep: Tensor, noise: bool) -> Tensor:
        gradient = optimizer.private_step.begin(selection)
        optimizer.private_step.add(captured(keep), gradient)
        if noise:
            optimizer.private_step.add_noise(gradient, optimizer.ledger.steps)
        else:
            for sums in gradient.sums.values():
                zero_others(sums)
        return torch.cat([value.flatten() for value in gradient.values.values()]).double() * optimizer.plan.divisor

    def moves(noise: bool) -> list[float]:
        whole = released(everyone, noise)
        return [float((whole - released(owners != user, noise)).norm()) for user in range(4)]

    everyone = torch.ones(9, dtype=torch.bool)
    tables = optimizer.private_step.trained_tables()
    with torch.no_grad():
        selection = engine.plan.mechanism.select(
            [torch.enable_grad()(captured)(everyone)], optimizer.private_step.context(0, tables)
        )
    with torch.enable_grad():
        if selection is not None:
            assert any(rows.numel() for rows in selection.values())
        moved, moved_with_noise = moves(False), moves(True)
        size = released(everyone, True).numel()
    plan = engine.plan
    grid = grid_of(plan.mechanism.gradient_noise(plan.noise_multiplier) * CLIP / plan.divisor) * plan.divisor
    assert max(moved_with_noise) <= CLIP * (1 + 1e-4) + grid * size**0.5
    assert max(moved) <= CLIP * (1 + 1e-4)
    assert min(moved) > 0.9 * CLIP  # the loss is so steep that everybody is clipped


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("limit", [None, 2])
def test_counts_are_of_users(clip: float | None, limit: int | None) -> None:
    """FEST's counts: a row counts once for each user that touches it, whatever the chunks."""
    engine, module, _, loader = start("fest", max_examples_per_user=limit)
    counted = []
    for most in (8192, 5):
        loader.max_physical_batch = most
        found = count_rows(module, engine._capture, loader, find_tables(module), None, clip)["table.weight"]
        counted.append(found)
    torch.testing.assert_close(*counted)
    ids, users = loader.dataset.tensors[0].numpy(), loader.dataset.users
    ((examples, sizes),) = loader.counted_users(np.arange(12))
    assert sizes.tolist() == [min((users == u).sum(), limit or 100) for u in range(12)]
    wanted = np.zeros(50)
    for user in range(12):
        own = np.unique(ids[examples[users[examples] == user]])
        wanted[own] += 1 if clip is None else min(1.0, clip / len(own) ** 0.5)
    np.testing.assert_allclose(counted[0].numpy(), wanted)
    if limit is None:
        assert float(counted[0].max()) <= 12 < torch.bincount(loader.dataset.tensors[0]).sum()


def test_released_frequencies_are_of_users() -> None:
    """Each user counts once for a row, and adds a vector of norm at most the clip."""
    module, ids, owners = Tables(tied=True), torch.tensor([[0, 0, 1], [0, 2, 3], [5, 5, 5]]), torch.tensor([1, 1, 0])
    space = RowSpace.of(dict(module.named_parameters()))
    found = count_lookups(iter([capture_users(module, [ids], owners, 2)]), space, 100.0)
    assert found["a.weight"].tolist() == [1, 1, 1, 1, 0, 1] and found["b.weight"].tolist() == [2, 0, 0, 0, 0]
    clipped = count_lookups(iter([capture_users(module, [ids[:2]], owners[:2] - 1, 1)]), space, 0.5)
    assert float(torch.cat(list(clipped.values())).norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_physical_batches_train_the_same(mechanism: str) -> None:
    one, parts = start(mechanism), start(mechanism, max_physical_batch=8)
    steps(one, 6)
    steps(parts, 6)
    assert one[2].last_step.units == parts[2].last_step.units
    assert one[2].last_step.examples == parts[2].last_step.examples
    for name, value in one[1].state_dict().items():
        torch.testing.assert_close(parts[1].state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_one_example_per_user_trains_as_examples_do(mechanism: str) -> None:
    """The same noise and the same sample: users with one example each are examples."""
    runs = []
    for options in ({}, {"unit": "user", "users": torch.arange(40)}):
        torch.manual_seed(0)
        run = make_private(Clicks(), with_users(8), mechanism=MECHANISMS[mechanism](), **options)
        steps(run, 5)
        runs.append(run)
    assert runs[0][0].ledger == runs[1][0].ledger
    for name, value in runs[0][1].state_dict().items():
        torch.testing.assert_close(runs[1][1].state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"max_physical_batch": 8}, {"poisson_sampling": False},
                                     {"max_examples_per_user": 2}, {"mechanism": "adafest+"}],
                         ids=lambda o: next(iter(o), "plain"))  # fmt: skip
def test_resumed_equals_uninterrupted(options: dict, tmp_path: Path) -> None:
    whole = start(**options)
    steps(whole, 8)
    first = start(**options)
    steps(first, 4)  # in the middle of the second epoch
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = start(**options)
    second[0].load_checkpoint(tmp_path / "c.pt")
    steps(second, 4)
    assert second[0].ledger == whole[0].ledger
    for name, value in whole[1].state_dict().items():
        assert torch.equal(second[1].state_dict()[name], value), name


def test_empty_batches_are_steps() -> None:
    run = start(batch_size=1)
    steps(run, 30)
    assert run[0].ledger.steps == 30


def test_predictions_are_about_users() -> None:
    """Without noise and with a batch of everybody, a step does what was predicted."""
    predictions = []
    for seed in range(20):  # each with the examples that its users happen to bring
        engine, module, optimizer, loader = start(
            module=Clicks(rows=400),
            mechanism="adafest",
            noise_multiplier=0.0,
            batch_size=12,
            max_examples_per_user=2,
            seed=seed,
        )
        predicted = predict(engine.plan, engine.touch_statistics())
        assert predicted.source == "all 12 training users"
        predictions.append(predicted.rows_touched)
    touched = []
    for _ in range(40):
        steps((engine, module, optimizer, loader), 1)
        touched.append(optimizer.last_step.rows_touched)
    assert np.mean(predictions) == pytest.approx(np.mean(touched), rel=0.04)


# ------------------------------------------------------------------ the promise


def test_plan_statement_and_ledger_count_users(tmp_path: Path) -> None:
    run = start(max_examples_per_user=3)
    engine, _, _, loader = run
    plan = engine.plan
    assert (plan.unit, plan.dataset_size, plan.batch_size, plan.sample_rate) == ("user", 12, 4, 4 / 12)
    assert len(loader) == 3 and plan.divisor == 4
    steps(run, 5)
    assert engine.ledger == plan.ledger(5)
    example = make_private(Clicks(), DataLoader(TensorDataset(*clicks(12)), batch_size=4, shuffle=True))[0]
    assert plan.step_event() == example.plan.step_event()
    assert engine.get_epsilon() == pytest.approx(example.plan.epsilon(5, 0.008))  # the default delta: 0.1 / 12
    said = engine.statement()
    assert said.unit == "user" and json.loads(said.to_json())["unit"] == "user"
    text = str(said)
    for words in (
        "protects:     one user; neighbouring data sets differ by adding or removing one user, with all of their examples",
        "Poisson of users, rate 4/12",
        "each with at most 3 of their examples",
        "The number of users, 12, is public.",
    ):
        assert words in text
    assert "40" not in text  # how many examples there are is private now
    assert "all of their examples" in str(start()[0].statement())
    shuffled = str(start(poisson_sampling=False)[0].statement())
    assert "did NOT happen" in shuffled and "batches of users" in shuffled


def test_plan_as_a_dict() -> None:
    plan = start(max_examples_per_user=3)[0].plan
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["unit"] == "user" and plan.to_dict()["max_examples_per_user"] == 3
    hashes = {start()[0].plan.hash, plan.hash, start(max_examples_per_user=2)[0].plan.hash}
    assert len(hashes) == 3
    example = make_private(Clicks(), with_users())[0].plan
    assert "max_examples_per_user" not in example.to_dict()  # checkpoints from before there were users stay readable


def test_calibration_counts_users() -> None:
    module = Clicks()
    engine = sparsedp.PrivacyEngine()
    _, _, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=with_users(), unit="user",
        target_epsilon=2.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0, max_examples_per_user=4,
    )  # fmt: skip
    assert engine.plan.steps == 6 and len(loader) == 3
    assert 1.9 < engine.plan.epsilon(6, 1e-3) <= 2.0
