"""What is predicted of a step before training, against what steps then do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom, norm, poisson
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sparsedp
from sparsedp import prediction
from sparsedp.data import generated_click_log
from sparsedp.mechanisms import survivors
from sparsedp.mechanisms.expectation import RowCounts
from sparsedp.models import PCTR
from sparsedp.prediction import (
    Prediction,
    RowGroups,
    SpanStatistics,
    TouchStatistics,
    find_threshold,
    predict,
    predict_part,
)
from support import Apply, loader_of, make_private

AdaFEST, FEST = sparsedp.AdaFEST, sparsedp.FEST
BATCH, STEPS = 200, 12
# Criteo's tables, the large ones cut.
VOCABULARY = [1472, 577, 2741, 940, 305, 23, 1172, 633, 3, 909, 918, 643, 320]
VOCABULARY += [27, 155, 442, 10, 548, 216, 3, 564, 17, 15, 273, 104, 129]


def click_model(
    mechanism: sparsedp.Mechanism, *, examples: int = 2000, batch: int = BATCH, skew: float = 1.1, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    log = generated_click_log(examples, vocabulary_sizes=VOCABULARY, skew=skew)
    torch.manual_seed(0)
    model = PCTR(log.vocabulary_sizes, hidden=8, hidden_layers=1, dims=2)
    loader = DataLoader(log, batch_size=batch, shuffle=True, collate_fn=log.collate)
    return make_private(model, loader, mechanism=mechanism, **options)


class Bags(nn.Module):
    """A bag of ids, some of them repeated, some of it padding."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, 3, mode="sum", padding_idx=0)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.bag(ids)).squeeze(1)


def bag_model(
    mechanism: sparsedp.Mechanism, *, examples: int = 2000, rows: int = 3000, batch: int = BATCH, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    """Bags of 1, 2 or 40 ids: what a unit adds to AdaFEST's map differs by a factor of 6."""
    generator = np.random.default_rng(0)
    popularity = np.arange(1, rows) ** -1.0
    ids = 1 + generator.choice(rows - 1, size=(examples, 40), p=popularity / popularity.sum())
    ids[np.arange(40) >= generator.choice([1, 2, 40], size=(examples, 1))] = 0
    target = torch.from_numpy(generator.integers(0, 2, examples)).float()
    torch.manual_seed(0)
    loader = loader_of(torch.from_numpy(ids), target, batch_size=batch)
    return make_private(Bags(rows), loader, mechanism=mechanism, **options)


def what_happens(model: nn.Module, optimizer: Any, loader: Any, steps: int = STEPS) -> dict[str, float]:
    """Means over real steps."""
    reports: list[Any] = []
    while len(reports) < steps:
        for *inputs, target in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(*inputs), target).backward()
            optimizer.step()
            reports.append(optimizer.last_step)
            if len(reports) == steps:
                break
    tables = [[report.tables[name] for report in reports] for name in reports[0].tables]
    found = {"gradient_size": np.mean([report.gradient_size for report in reports])}
    for name in ("rows_touched", "rows_selected", "rows_false"):
        found[name] = sum(np.mean([getattr(table, name) for table in over]) for over in tables)
    return {name: float(value) for name, value in found.items()}


def assert_near(predicted: Prediction, happened: dict[str, float], steps: int = STEPS, factor: float = 1.05) -> None:
    """Within the factor, and three deviations of a mean over `steps` steps; where it is a handful of rows at least."""
    for name, value in happened.items():
        guess = getattr(predicted, name)
        limit = factor * (1 + 3 * math.sqrt((1 / max(value, 1) + 1 / BATCH) / steps))
        close = value / limit <= guess <= value * limit if value >= 5 else abs(guess - value) < 3
        assert close, f"{name}: predicted {guess:.4g}, was {value:.4g}"


ADAFEST = [
    AdaFEST(threshold=1.0, noise_ratio=1.0),  # most of what is selected is noise
    AdaFEST(threshold=3.0, noise_ratio=1.0),
    AdaFEST(threshold=6.0, noise_ratio=1.0),  # frequent rows alone
    AdaFEST(threshold=8.0, noise_ratio=5.0),
    AdaFEST(threshold=0.5, noise_ratio=0.3),
    AdaFEST(threshold=5.0, noise_ratio=1.0, map_clip=10.0),  # a unit touches 26 rows: no clipping
    AdaFEST(threshold=0.4, noise_ratio=1.0, map_clip=0.1),
    AdaFEST(threshold=2.0, noise_ratio=1.0, preselect=FEST(k=400, epsilon=2.0)),
]
OTHERS = [
    sparsedp.DPSGD(),
    sparsedp.EANA(),
    FEST(k=400, epsilon=0.5),
    FEST(k=400, epsilon=5.0, method="gumbel", split="tables"),
    sparsedp.ExponentialSelection(k=100, epsilon=1.0),
    sparsedp.ExponentialSelection(k=100, epsilon=100.0),
]


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")  # FEST leaves tables out
@pytest.mark.parametrize("mechanism", [*ADAFEST, *OTHERS], ids=str)
def test_click_logs(mechanism: sparsedp.Mechanism) -> None:
    engine, model, optimizer, loader = click_model(mechanism)
    predicted = predict(engine.plan, engine.touch_statistics())
    assert engine.get_epsilon(1e-5) == 0  # counting for oneself costs nothing
    # FEST chooses anew in training, with noise, so that its rows are not those of the prediction.
    assert_near(predicted, what_happens(model, optimizer, loader), factor=1.15 if mechanism.prepares else 1.05)
    assert predicted.dense_size == optimizer.last_step.dense_size and predicted.private


@pytest.mark.parametrize("skew", [0.3, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_other_tails_and_noise(skew: float, noise: float) -> None:
    mechanism = AdaFEST(threshold=2.0, noise_ratio=1.0, map_clip=10.0)
    engine, model, optimizer, loader = click_model(mechanism, skew=skew, noise_multiplier=noise)
    assert_near(predict(engine.plan, engine.touch_statistics()), what_happens(model, optimizer, loader))


@pytest.mark.parametrize(
    ("mechanism", "noise"),
    [
        (AdaFEST(threshold=1.0, noise_ratio=1.0), 1.0),
        (AdaFEST(threshold=3.0, noise_ratio=1.0), 0.6),
        (AdaFEST(threshold=1.0, noise_ratio=0.5), 0.3),
        (AdaFEST(threshold=3.0, noise_ratio=1.0, map_clip=20.0), 0.1),
        (sparsedp.EANA(), 1.0),
    ],
    ids=str,
)
def test_bags_of_very_different_sizes(mechanism: sparsedp.Mechanism, noise: float) -> None:
    engine, model, optimizer, loader = bag_model(mechanism, noise_multiplier=noise)
    assert_near(predict(engine.plan, engine.touch_statistics()), what_happens(model, optimizer, loader), factor=1.2)


@pytest.mark.parametrize(
    "mechanism",
    [AdaFEST(threshold=1.0, noise_ratio=1.0), AdaFEST(threshold=0.3, noise_ratio=0.3), sparsedp.EANA()],
    ids=str,
)
def test_a_sample_needs_no_correction(mechanism: sparsedp.Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,000 units 250 are looked at; most rows that batches touch are not among theirs."""
    monkeypatch.setattr(prediction, "_UNITS", 250)
    monkeypatch.setattr(prediction, "_FEW_BATCHES", 1)
    engine, model, optimizer, loader = bag_model(mechanism, examples=8000, rows=20_000, noise_multiplier=0.4)
    statistics = engine.touch_statistics()
    assert (
        statistics.source == "a random sample of 250 of the 8,000 training examples"
        and statistics.spans[0].units == 250
    )
    assert_near(predict(engine.plan, statistics), what_happens(model, optimizer, loader))


def test_a_look_serves_other_batch_sizes() -> None:
    """Up to all of the units, exactly as statistics for that batch size; beyond, roughly."""
    small, *_ = bag_model(AdaFEST(threshold=2.0, noise_ratio=1.0), batch=20)
    large, *_ = bag_model(AdaFEST(threshold=2.0, noise_ratio=1.0), batch=1500)
    statistics = small.touch_statistics()
    assert predict(large.plan, statistics).rows_selected == pytest.approx(
        predict(large.plan, large.touch_statistics()).rows_selected
    )
    sizes = [
        predict(dataclasses.replace(small.plan, batch_size=b), statistics).rows_touched
        for b in (1500, 2000, 2001, 4000)
    ]
    assert sizes[0] < sizes[1] and 0.6 * sizes[1] < sizes[2] < sizes[3] < 3000


def test_batches_that_are_all_of_the_data() -> None:
    engine, model, optimizer, loader = bag_model(AdaFEST(threshold=2.0, noise_ratio=1.0), examples=300, batch=300)
    predicted = predict(engine.plan, engine.touch_statistics())
    happened = what_happens(model, optimizer, loader)
    assert predicted.rows_touched == pytest.approx(happened["rows_touched"])  # nothing is left to chance
    assert_near(predicted, happened)


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")  # AdaFEST advises against it
def test_a_table_that_is_used_whole() -> None:
    def scores(own: Any, ids: Tensor) -> Tensor:
        return (own.table(ids) @ own.table.weight.T).tanh().sum(1)

    ids = torch.randint(30, (200,), generator=torch.Generator().manual_seed(0))
    engine, model, optimizer, loader = make_private(
        Apply(scores, table=nn.Embedding(30, 2)),
        loader_of(ids, (ids % 2).float(), batch_size=40),
        mechanism=AdaFEST(threshold=7.0, noise_ratio=1.0),
    )
    predicted = predict(engine.plan, engine.touch_statistics())
    assert predicted.rows_touched == pytest.approx(30)
    assert 10 < predicted.rows_selected < 20  # 40 units add 1 / sqrt(30) each: 7.3
    assert_near(predicted, what_happens(model, optimizer, loader, 40), 40)


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
@pytest.mark.parametrize("frequencies", ["all", "first", "running"])
def test_streams_are_predicted_span_by_span(frequencies: Any) -> None:
    """With drift 0.9, a day's batch touches other rows than a batch of all days."""
    log = generated_click_log(4000, vocabulary_sizes=VOCABULARY, days=4, drift=0.9)
    assert log.periods is not None
    torch.manual_seed(0)
    engine, model, optimizer, loader = make_private(
        PCTR(log.vocabulary_sizes, hidden=8, hidden_layers=1, dims=2),
        DataLoader(log, batch_size=BATCH, shuffle=True, collate_fn=log.collate),
        mechanism=AdaFEST(1.0, 0.5, preselect=FEST(k=400, epsilon=5.0, frequencies=frequencies)),
        stream=sparsedp.Stream(log.periods, "parallel"),
    )
    statistics = engine.touch_statistics()
    assert len(statistics.spans) == 4 and sum(span.share for span in statistics.spans) == pytest.approx(1)
    assert_near(predict(engine.plan, statistics), what_happens(model, optimizer, loader, 20), 20, factor=1.15)


def test_fallback_rows_are_touched_by_all_that_is_left_out() -> None:
    ids = torch.from_numpy(np.random.default_rng(0).zipf(1.3, 2000) % 500)
    model = Apply(
        lambda own, ids: own.out(own.table(ids)).squeeze(1),
        table=sparsedp.nn.FallbackEmbedding(500, 3),
        out=nn.Linear(3, 1),
    )
    engine, model, optimizer, loader = make_private(
        model, loader_of(ids, (ids % 2).float(), batch_size=BATCH), mechanism=FEST(k=50, epsilon=5.0)
    )
    before = model.table.kept.clone()
    predicted = predict(engine.plan, engine.touch_statistics())
    assert torch.equal(model.table.kept, before) and optimizer.prepared is None  # the draw left nothing behind
    engine.prepare()
    assert_near(predicted, what_happens(model, optimizer, loader), factor=1.15)
    assert predicted.kept_touches == pytest.approx(1)
    with pytest.raises(sparsedp.UnsupportedError, match="fallback"):
        engine.touch_statistics({"table.weight": torch.zeros(501)}, units=10)


# ------------------------------------------------------------------ from counts


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
@pytest.mark.parametrize(
    "mechanism",
    [AdaFEST(threshold=2.0, noise_ratio=1.0), ADAFEST[-1], FEST(k=400), sparsedp.EANA(), sparsedp.DPSGD()],
    ids=str,
)
def test_counts_say_what_a_look_says(mechanism: sparsedp.Mechanism) -> None:
    """All units touch 26 rows, so that the mean is all there is to know; FEST draws the same noise in both."""
    engine, model, _, loader = click_model(mechanism)
    examples = [loader.dataset[i] for i in range(len(loader.dataset))]
    columns = torch.stack([torch.as_tensor(example[1]) for example in examples]).T
    counts = {f"tables.{j}.weight": torch.bincount(c, minlength=VOCABULARY[j]) for j, c in enumerate(columns)}
    seen, told = (
        predict(engine.plan, engine.touch_statistics()),
        predict(engine.plan, engine.touch_statistics(counts, units=2000)),
    )
    frequencies = {name: count / 2000 for name, count in counts.items()}
    shares = predict(engine.plan, engine.touch_statistics(frequencies, units=1))
    preselects = isinstance(mechanism, AdaFEST) and mechanism.preselect is not None  # then units differ
    for name in ("rows_touched", "rows_selected", "rows_false", "gradient_size", "kept_touches"):
        value = getattr(seen, name)
        assert getattr(told, name) == pytest.approx(value, rel=0.05 if preselects else 1e-6, abs=1e-9)
        assert getattr(shares, name) == pytest.approx(value, rel=0.05, abs=1e-9)  # Poisson, not binomial
    assert seen.private and not told.private and told.source == "given counts"


def test_counts_that_do_not_fit_are_refused() -> None:
    engine, *_ = bag_model(AdaFEST(), rows=50, examples=300)
    right = torch.ones(50)
    for counts, units, words in [
        ({"bag.weight": torch.ones(49)}, 10, "the table has 50 rows"),
        ({"bag.weight": 11 * right}, 10, "between 0 and the number of units"),
        ({"bag.weight": -right}, 10, "between 0 and the number of units"),
        ({"bag.weight": right * math.nan}, 10, "between 0 and the number of units"),
        ({}, 10, "nothing for table 'bag.weight'"),
        ({"bag.weight": right, "gab.weight": right}, 10, "'gab.weight', which is no trained table"),
        ({"bag.weight": right}, 0, "must be positive"),
        ({"bag.weight": right}, None, "go together"),
        (None, 10, "go together"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.touch_statistics(counts, units)


# ------------------------------------------------------------------ the sums


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rate", [0.003, 0.4, 1.0])
@pytest.mark.parametrize("std", [0.0, 0.7, 9.0])
def test_survival_against_the_sum_over_all_numbers_of_units(whole: bool, rate: float, std: float) -> None:
    counts = np.array([0, 1, 2, 7, 90, 400, 1500])
    weights = np.array([1.0, 1.0, 0.3, 0.9, 0.2, 0.05, 0.01])
    threshold = 3.7
    rows = RowCounts(counts.astype(float), weights, np.ones(7, bool), rate, whole, 7.0)
    passed, kept = survivors.survival_of_counts(rows, threshold, std)
    for i, (count, weight) in enumerate(zip(counts, weights)):
        n = np.arange(5 * count + 60)
        masses = binom.pmf(n, count, rate) if whole else poisson.pmf(n, count * rate)
        survives = norm.sf((threshold - weight * n) / std) if std else (weight * n >= threshold).astype(float)
        normal = count * rate > survivors._EXACT
        assert passed[i] == pytest.approx(
            masses @ survives, rel=0.03 if normal else 1e-9, abs=0.02 if normal else 1e-15
        )
        assert kept[i] == pytest.approx(masses @ (n * survives), rel=0.03 if normal else 1e-9, abs=1e-12)


def test_groups_are_few_however_many_rows_there_are() -> None:
    rows = 300_000
    generator = np.random.default_rng(0)
    counts = np.bincount(generator.zipf(1.2, 1_000_000) % rows, minlength=rows)
    contributions = counts * generator.uniform(0.2, 0.25, rows)
    counted = prediction._SpanCounts(1_000_000, {"t": counts}, {"t": contributions}, None)
    groups = prediction._grouped(counted, "t", integral=True)
    assert len(groups.rows) < 20_000 and groups.rows.sum() == rows
    assert groups.rows @ groups.counts == pytest.approx(counts.sum(), rel=1e-3)
    assert groups.rows @ (groups.counts * groups.weights) == pytest.approx(contributions.sum(), rel=1e-3)
    rare = counts <= prediction._DISTINCT  # whose counts are kept as they are
    for count in (0, 1, 2, 100):
        assert groups.rows[groups.counts == count].sum() == (counts[rare] == count).sum()


def changed(engine: sparsedp.PrivacyEngine, **settings: Any) -> Any:
    assert isinstance(engine.plan.mechanism, AdaFEST)
    return dataclasses.replace(engine.plan, mechanism=dataclasses.replace(engine.plan.mechanism, **settings))


@pytest.mark.parametrize("size", [20, 500, 5000, 1e9])
def test_the_threshold_for_a_gradient_size(size: float) -> None:
    engine, *_ = click_model(AdaFEST(threshold=2.0, noise_ratio=1.0))
    statistics = engine.touch_statistics()
    sizes: Callable[[float], float] = lambda t: predict(changed(engine, threshold=t), statistics).gradient_size  # noqa: E731
    found = find_threshold(engine.plan, statistics, size)
    assert sizes(found) <= size
    assert found == 0 if size == 1e9 else sizes(0.998 * found) > size
    assert found == float(f"{found:.4g}")


def test_the_threshold_that_gives_a_gradient_size_gives_it() -> None:
    engine, *_ = click_model(AdaFEST(threshold=2.0, noise_ratio=1.0))
    threshold = find_threshold(engine.plan, engine.touch_statistics(), 400)
    _, model, optimizer, loader = click_model(AdaFEST(threshold=threshold, noise_ratio=1.0))
    assert what_happens(model, optimizer, loader)["gradient_size"] == pytest.approx(400, rel=0.1)


def test_what_cannot_be_predicted_is_refused() -> None:
    engine, *_ = click_model(AdaFEST(threshold=2.0, noise_ratio=1.0), examples=300)
    statistics = engine.touch_statistics()
    with pytest.raises(ValueError, match=r"map_clip=1\.0, not 2\.0: count again"):
        predict(changed(engine, map_clip=2.0), statistics)
    with pytest.raises(ValueError, match="positive"):
        find_threshold(engine.plan, statistics, 0)
    with pytest.raises(sparsedp.UnsupportedError, match="has no threshold"):
        find_threshold(dataclasses.replace(engine.plan, mechanism=sparsedp.EANA()), statistics, 10)

    other = type("Other", (sparsedp.Mechanism,), {"selects": True, "guarantee": "none"})
    other.name = "other"  # set later, so that it is not registered
    with pytest.raises(sparsedp.UnsupportedError, match="no rule yet to predict what mechanism 'other'"):
        predict(dataclasses.replace(engine.plan, mechanism=other()), statistics)


def test_a_prediction_as_a_dict() -> None:
    engine, *_ = click_model(sparsedp.ExponentialSelection(k=50), examples=300)
    statistics = engine.touch_statistics()
    assert isinstance(statistics, TouchStatistics) and statistics.clip is None and not statistics.drawn
    found = predict(engine.plan, statistics).to_dict()
    assert found["rows_selected"] == pytest.approx(50) and found["reduction"] == pytest.approx(sum(VOCABULARY) / 50)
    assert found["private"] and found["source"] == "all 300 training examples" and "favours" in found["notes"][0]
    table = found["tables"]["tables.2.weight"]
    assert table["rows"] == 2741 and table["gradient_size"] == pytest.approx(2 * 50 * 2741 / sum(VOCABULARY))


def test_part_of_a_batch_by_enumeration() -> None:
    """One of four processes' units: the law of what they touch and find selected by all, added up over all numbers of units."""
    engine, *_ = click_model(AdaFEST(threshold=2.0, noise_ratio=2.0), noise_multiplier=0.7)
    plan, counts = engine.plan, np.array([0, 1, 3, 9])
    units, share = 400, 0.25
    name = plan.parameters[0][0]
    groups = RowGroups(np.array([5.0, 4.0, 3.0, 2.0]), counts.astype(float), np.ones(4), np.ones(4, dtype=bool))
    statistics = TouchStatistics("", False, 1.0, False, (SpanStatistics(1.0, units, True, {name: groups}),))
    part = predict_part(plan, statistics, share)[name]
    std, touched, passed = plan.mechanism._map_std(plan.noise_multiplier), 0.0, 0.0
    for count, rows in zip(counts, groups.rows):
        for n in range(count + 1):
            seen = binom.pmf(n, count, plan.batch_size / units) * (1 - (1 - share) ** n)
            touched += rows * seen
            passed += rows * seen * norm.sf(2.0, loc=n, scale=std)
    assert part.touched == pytest.approx(touched) and part.passed == pytest.approx(passed)
    assert not part.whole
    every = predict_part(plan, statistics, 1.0)[name]
    total = predict(plan, statistics).tables[name]
    assert every.touched == pytest.approx(total.rows_touched)
    assert every.passed == pytest.approx(total.rows_selected - total.rows_false)
