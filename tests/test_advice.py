"""The comparison of mechanisms, what it recommends, what it looks at, and who pays for that."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.advice import NOTE_OF_DATA, Option, recommend
from sparsedp.prediction import Prediction, TablePrediction

EXAMPLES = 2000


class Items(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items, self.out = nn.Embedding(rows, 4), nn.Linear(4, 1)

    def forward(self, items: Tensor) -> Tensor:
        return self.out(self.items(items)).squeeze(1)


def log(rows: int, skew: float = 1.0) -> TensorDataset:
    random = np.random.default_rng(0)
    popularity = np.arange(1, rows + 1) ** -skew
    items = torch.from_numpy(random.choice(rows, EXAMPLES, p=popularity / popularity.sum()))
    return TensorDataset(items, torch.from_numpy(random.integers(0, 2, EXAMPLES)).float())


def arguments(rows: int, optimizer: Any = torch.optim.SGD, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Items(rows)
    return {
        "module": model,
        "optimizer": optimizer(model.parameters(), lr=0.1),
        "data_loader": DataLoader(log(rows), batch_size=200, shuffle=True),
        "target_epsilon": 3.0,
        "target_delta": 1e-4,
        "epochs": 2,
        "max_grad_norm": 1.0,
        **more,
    }


def by_label(advice: sparsedp.Advice) -> dict[str, Option]:
    return {option.label.split(" ")[0].split(":")[0]: option for option in advice.options}


def test_all_mechanisms_stand_in_the_table_at_the_same_epsilon() -> None:
    given = arguments(300_000, mechanism=sparsedp.AdaFEST(threshold=10.0))
    before = [p.detach().clone() for p in given["module"].parameters()]
    advice = sparsedp.advise(**given, look_at="data")
    options = by_label(advice)
    assert options.keys() == {"yours", "DPSGD", "LazyDP", "AdaFEST", "FEST", "exponential", "EANA"}
    assert options["DPSGD"].kept_touches == options["LazyDP"].kept_touches == pytest.approx(1.0)
    assert options["LazyDP"].step_size < options["DPSGD"].step_size / 100
    assert not options["EANA"].private and options["EANA"].false_share == pytest.approx(0.0)
    assert options["yours"].kept_touches < 0.5
    assert any("the tables will learn little" in text for text in options["yours"].concerns)
    assert advice.recommended.label == "LazyDP" and "noise" in advice.reason
    text = str(advice)
    assert all(option.label in text for option in advice.options) and advice.reason in text
    assert json.loads(json.dumps(advice.to_dict()))["recommended"] == "LazyDP"
    assert all(torch.equal(a, b) for a, b in zip(before, given["module"].parameters()))
    given["module"](torch.arange(3)).sum().backward()  # an ordinary module again


def test_the_recommended_settings_start_the_run_and_the_note_is_in_its_statement() -> None:
    given = arguments(300_000, torch.optim.Adagrad)
    advice = sparsedp.advise(**given, look_at="data")
    assert by_label(advice)["LazyDP"].refused is not None
    engine = sparsedp.PrivacyEngine(seed=0)
    engine.make_private_with_epsilon(**given, **advice.settings)
    engine.add_advice(advice)
    assert NOTE_OF_DATA in engine.statement().not_covered
    assert engine.plan.noise_multiplier == pytest.approx(advice.recommended.noise_multiplier)


def test_public_counts_are_all_that_is_looked_at() -> None:
    given = arguments(500)
    counts = torch.bincount(log(500).tensors[0], minlength=500)
    given["module"].register_forward_pre_hook(lambda *_: pytest.fail("the data were looked at"))
    advice = sparsedp.advise(**given, look_at=sparsedp.PublicCounts({"items.weight": counts}, EXAMPLES))
    assert advice.note is None and not advice.private and advice.source == "given counts"
    assert advice.recommended.label == "DPSGD"  # noise on 500 rows costs nothing


def test_a_release_enters_the_ledger_of_the_run_that_follows() -> None:
    given = arguments(2000)
    advice = sparsedp.advise(**given, look_at="release")
    assert advice.note is None and advice.release is not None and advice.release.epsilon <= 0.3
    assert "released" in advice.source
    engine = sparsedp.PrivacyEngine(seed=0)
    _, optimizer, loader = engine.make_private_with_epsilon(**given, **advice.settings)
    with_release = engine.plan.noise_multiplier
    items, target = next(iter(loader))
    F.binary_cross_entropy_with_logits(given["module"](items), target).backward()
    optimizer.step()
    assert engine.ledger.setups(None) == 1
    assert torch.equal(engine.release_frequencies()["items.weight"], advice.release.drawn["items.weight"])
    assert engine.plan.epsilon(engine.plan.steps, 1e-4) <= 3.0
    engine.close()
    without = sparsedp.PrivacyEngine(seed=0)
    without.make_private_with_epsilon(**given, mechanism=advice.mechanism)
    assert without.plan.noise_multiplier < with_release


def test_times_are_of_copies_that_spend_nothing() -> None:
    given = arguments(500)
    before = [p.detach().clone() for p in given["module"].parameters()]
    advice = sparsedp.advise(**given, look_at="data", loss_fn=F.binary_cross_entropy_with_logits)
    timed = [option for option in advice.options if option.refused is None and option.private]
    assert timed and all(option.seconds_of_run > option.seconds_per_step > 0 for option in timed)
    assert all(torch.equal(a, b) for a, b in zip(before, given["module"].parameters()))


def test_what_may_be_looked_at_has_to_be_said() -> None:
    with pytest.raises(TypeError, match="look_at"):
        sparsedp.advise(**arguments(50))
    with pytest.raises(ValueError, match="what may be looked at"):
        sparsedp.advise(**arguments(50), look_at="anything")


def test_an_optimizer_that_takes_dense_gradients_alone_leaves_dpsgd() -> None:
    advice = sparsedp.advise(**arguments(50, torch.optim.Adam), look_at="data")
    assert advice.recommended.label == "DPSGD"
    assert all(option.refused for option in advice.options if option.label != "DPSGD")
    assert str(advice).count("leaves row-sparse gradients") == 1  # of all mechanisms together
    assert "FEST k=" in next(line for line in str(advice).splitlines() if "leaves row-sparse gradients" in line)


# ------------------------------------------------------------------ the rule


def option(
    mechanism: sparsedp.Mechanism, kept: float, selected: float, noise: float = 1.0, rows: int = 10**6, **more: Any
) -> Option:
    table = TablePrediction(rows, 4, 1000.0, selected, 0.0, 1000.0, 1000.0 * kept)
    size = 4000.0 if mechanism.noise_waits else 4 * selected
    return Option(
        mechanism.name, mechanism, "", more.pop("private", True), gradient_noise=noise, step_size=size,
        prediction=Prediction({"items": table}, "", False), **more,
    )  # fmt: skip


DENSE = option(sparsedp.DPSGD(), 1.0, 10**6)


def test_cheapest_of_those_that_keep_enough() -> None:
    ada, fest = option(sparsedp.AdaFEST(), 0.8, 900), option(sparsedp.FEST(), 0.9, 5000)
    assert recommend([DENSE, ada, fest])[0] is ada
    assert recommend([DENSE, option(sparsedp.AdaFEST(), 0.3, 900), fest])[0] is fest
    assert recommend([DENSE, option(sparsedp.AdaFEST(), 0.8, 900, noise=1.5), fest])[0] is fest
    assert recommend([DENSE, option(sparsedp.EANA(), 1.0, 900, private=False), fest])[0] is fest
    assert recommend([DENSE, dataclasses.replace(ada, refused="why"), fest])[0] is fest


def test_small_tables_take_dpsgd_and_where_nothing_keeps_enough_the_most() -> None:
    small = option(sparsedp.DPSGD(), 1.0, 1000, rows=1000)
    assert recommend([small, option(sparsedp.LazyDP(), 1.0, 1000, rows=1000)])[0] is small
    few = [option(sparsedp.AdaFEST(), 0.2, 900), option(sparsedp.FEST(), 0.4, 900)]
    chosen, reason = recommend(few)
    assert chosen is few[1] and "No mechanism keeps" in reason
    with pytest.raises(sparsedp.SparseDPError, match="No mechanism can train"):
        recommend([dataclasses.replace(few[0], refused="why")])


def test_the_data_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FEST alone looks again, as it draws its rows; nothing changes by sharing the look."""
    looks: list[str] = []
    look = sparsedp.PrivacyEngine.touch_statistics

    def noted(engine: Any, *arguments: Any, plan: Any, **more: Any) -> Any:
        looks.append(plan.mechanism.name)
        return look(engine, *arguments, plan=plan, **more)

    monkeypatch.setattr(sparsedp.PrivacyEngine, "touch_statistics", noted)
    shared = by_label(sparsedp.advise(**arguments(20_000), look_at="data"))
    assert sorted(looks) == ["adafest", "fest"]
    monkeypatch.setattr("sparsedp.advice._Looked.statistics", lambda looked, plan: noted(looked._engine, plan=plan))
    alone = by_label(sparsedp.advise(**arguments(20_000), look_at="data"))
    assert len(looks) > 6
    for label, option in alone.items():
        assert option.refused == shared[label].refused
        assert option.prediction == shared[label].prediction, label


def test_what_takes_long_is_told() -> None:
    told: list[str] = []

    @contextmanager
    def progress(title: str, total: int) -> Any:
        told.append(title)
        yield lambda count: None

    loss = F.binary_cross_entropy_with_logits
    advice = sparsedp.advise(**arguments(2_000), look_at="data", loss_fn=loss, progress=progress)
    for title in ("counting rows", "predicting LazyDP", "timing steps of EANA"):
        assert title in told
    assert all(option.seconds_per_step for option in advice.options if option.refused is None)
