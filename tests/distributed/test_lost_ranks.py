"""Checkpoints of several processes, ranks that are lost, and what ranks must have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
import torch
from launch import launch
from programs import GRACE

pytestmark = pytest.mark.distributed
SLACK = 10.0  # seconds on a busy machine, beyond those in which a lost rank has to be named


def whole(results: list[dict]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks together."""
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for result in results:
        for name, part, where in result["parts"]:
            ends = [cut.stop for cut in where] or list(part.shape)
            shapes[name] = [max(pair) for pair in zip(shapes.get(name, ends), ends)]
    for result in results:
        for name, part, where in result["parts"]:
            tensors.setdefault(name, torch.zeros(shapes[name]))[where] = part
    return tensors


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("adafest", {}), ("lazydp by step", {"momentum": 0.9}), ("adafest", {"optimizer": "adagrad"}),
        ("adafest", {"optimizer": "adagrad and adam"}),
    ],
    ids=["SGD", "LazyDP with momentum", "Adagrad", "Adagrad and Adam"],
)  # fmt: skip
def test_another_number_of_ranks_goes_on_alike(tmp_path: Path, mechanism: str, settings: dict[str, Any]) -> None:
    """Two ranks by rows, three by tables, one process, two by columns: the run of one process, bit for bit or nearly."""
    (reference,) = launch(1, "resume", mechanism, "none", 20, None, None, **settings)
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three.pt"))
    assert launch(2, "resume", mechanism, "row_wise", 9, None, one, **settings)[0].value
    assert launch(3, "resume", mechanism, "table_wise", 14, one, two, **settings)[0].value
    assert launch(1, "resume", mechanism, "none", 17, two, three, **settings)[0].value
    last = [ended.value for ended in launch(2, "resume", mechanism, "column_wise", 20, three, None, **settings)]
    expected, reached = whole([reference.value]), whole(last)
    # Sums that are added up in another order may be released as the next point of the noise's grid, 2^-10 of its deviation
    # away. Adam makes that as large a part of its rate, 0.01, or some times as much.
    close = 0.01 * 2**-8 if settings.get("optimizer") == "adagrad and adam" else 1e-6
    assert expected.keys() == reached.keys()
    for name in expected:
        assert (expected[name] - reached[name]).abs().max() <= close, name
    for result in last:
        assert result["ledger"]["entries"] == reference.value["ledger"]["entries"]
        assert result["epsilon"] == reference.value["epsilon"]


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("lazydp", {"unit": "user"}),
        ("lazydp by step", {"max_physical_batch": 8}),
        ("adafest+", {"unit": "user", "optimizer": "adagrad"}),
        ("adafest", {"unit": "user", "optimizer": "row-wise adagrad and adam"}),
    ],
    ids=[
        "LazyDP, users",
        "LazyDP, physical batches",
        "AdaFEST+, users, Adagrad",
        "AdaFEST, users, RowWiseAdagrad and Adam",
    ],
)
def test_one_process_three_ranks_two_ranks_within_epochs(
    tmp_path: Path, mechanism: str, settings: dict[str, Any]
) -> None:
    # A save settles: what LazyDP then owes, it draws at once, so that the run beside this one saves at the same steps.
    other = str(tmp_path / "other.pt")
    (reference,) = launch(1, "resume", mechanism, "none", 12, None, other, saves=(3, 9), **settings)
    one, two = (str(tmp_path / name) for name in ("one.pt", "two"))
    first = launch(1, "resume", mechanism, "none", 3, None, one, **settings)
    second = launch(3, "resume", mechanism, "row_wise", 9, one, two, **settings)
    last = [ended.value for ended in launch(2, "resume", mechanism, "table_wise", 12, two, None, **settings)]
    assert first[0].value["within an epoch"] and second[0].value["within an epoch"]
    assert last[0]["loaded"] == 9
    expected, reached = whole([reference.value]), whole(last)
    close = 1e-5 if settings.get("optimizer") else 1e-6  # Adagrad divides by roots of small sums
    assert expected.keys() == reached.keys()
    for name in expected:
        assert (expected[name] - reached[name]).abs().max() <= close, name
    for result in last:
        assert result["ledger"]["entries"] == reference.value["ledger"]["entries"]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_is_named_and_the_checkpoint_is_whole(tmp_path: Path, how: str) -> None:
    path = str(tmp_path / "checkpoint")
    timeout = 60.0 if how == "SIGKILL" else 10.0
    ended = launch(3, "lose", path, 7, how, timeout=timeout, lost=1)
    for rank in (0, 2):
        said, seconds = ended[rank].value
        assert "RankLostError: Rank(s) 1 of 3 did not answer" in said
        assert seconds <= timeout + GRACE + SLACK
    resumed = launch(2, "resume", "adafest", "table_wise", 12, path, None, seed=None)
    for result in resumed:
        steps = result.value["ledger"]["entries"]
        assert sum(entry["count"] for entry in steps) == 12


def test_what_takes_long_on_one_rank_is_waited_for(tmp_path: Path) -> None:
    """A trained model must not be lost to a slow disk: in long work nobody fails who lives."""
    for rank, ended in enumerate(launch(2, "slow", str(tmp_path))):
        assert ended.value["steps"] >= 8 and ended.value["slept"] == (rank == 0)
        before, within, after = ended.value["timeouts"]
        assert within.total_seconds() == 2 and after == before != within
        assert "no space left" in ended.value["failed"] and ("On rank 1" in ended.value["failed"]) == (rank == 0)


def test_a_rank_that_skips_its_batch_stops_all() -> None:
    """As a loop does that skips batches without examples, which the loader gives a stand-in."""
    for rank, ended in enumerate(launch(2, "skip_empty")):
        said, skipped = ended.value
        assert "differs from rank 0 in its batch" in said and skipped == [0] * rank


def test_what_is_refused(tmp_path: Path) -> None:
    for rank, ended in enumerate(launch(2, "refusals", str(tmp_path))):
        said = ended.value
        assert "differs from rank 0 in the plan" in said["another plan"]
        assert "differs from rank 0 in the data" in said["other data"]
        assert "Rank 1 differs from rank 0 in" in said["another torch"] and "2.99.0" in said["another torch"]
        assert "user(s) have examples on rank 0 and on rank 1" in said["users on two ranks"]
        assert "exceeds the data set's 20 examples" in said["only rank 1 fails"]
        assert "DistributedDataParallel" in said["DDP"] and "'over'" in said["DDP"]
        assert "under FSDP" in said["FSDP"] and "'over'" in said["FSDP"]
        assert "before any example's is clipped" in said["FSDP"] and "without fully_shard" in said["FSDP"]
        assert "'country.weight' is on every rank" in said["a copied table"]
        assert "id 999 is not a row of table" in said["a wrong id"]
        assert "NonFiniteGradientError" in said["NaN on one rank"]
        assert ("On rank 1" in said["NaN on one rank"]) == (rank == 0)
        assert "differs from rank 0 in its dense parameters" in said["parted"]
        of_features = said["another batch for each feature"]
        assert "another batch for each feature" in of_features and "of the same example" in of_features
        assert "a length for each example" in of_features
        assert "'tables' looks each id of a batch up once" in said["index dedup"]


def test_optimizers_of_torchrec_are_refused_with_torchs_own() -> None:
    for ended in launch(2, "of_torchrec"):
        said = ended.value
        tables = "sparsedp.RowWiseAdagrad(sparsedp.table_parameters(module), lr=0.02)"
        dense = "torch.optim.Adam(sparsedp.dense_parameters(module), lr=0.001)"
        assert f"pass optimizer=[{tables}, {dense}]" in said["combined"] and "CombinedOptimizer" in said["combined"]
        assert "KeyedOptimizerWrapper" in said["wrapped"] and dense in said["wrapped"]
        assert tables in said["in a list"]
        assert said["instead"] == "nothing was refused"
        assert "torch.optim.SGD(sparsedp.table_parameters(module), lr=0.02)" in said["in the backward pass"]
        assert "apply_optimizer_in_backward" in said["in the backward pass"]
        assert "RowWiseAdagrad does not take" in said["row-wise"]
        assert "sparsedp.RowWiseAdagrad" in said["row-wise"] and said["ours"] == "nothing was refused"
        assert "mean over all columns" in said["row-wise by columns"]
        assert "mean over all columns" in said["ours by columns"]


def test_parameters_of_any_type_are_compared() -> None:
    for ended in launch(2, "odd_parameters"):
        assert all(ended.value["told apart"])
        assert "differs from rank 0 in its dense parameters" in ended.value["parted"]


@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_rank_without_any_data_is_refused_on_all(unit: str) -> None:
    """Where none of its units is drawn it would have nothing to call the model with."""
    for ended in launch(3, "own_data", unit, empty=1):
        assert ended.code == 1 and "UnsupportedError" in ended.output, ended.output
        assert "Rank 2 has no data of its own" in ended.output and "train with fewer ranks" in ended.output


@pytest.mark.parametrize("unit", ["example", "user"])
def test_each_rank_has_its_own_part_of_the_data(unit: str) -> None:
    """The sample is over all of them, each rank reads its own, and all end with the same dense parameters."""
    results = [ended.value for ended in launch(3, "own_data", unit)]
    units = sum(result["here"] for result in results) if unit == "example" else results[0]["units"]
    for result in results:
        assert result["units"] == units and result["rate"] == 32 / units
        assert all(torch.equal(a[1], b[1]) for a, b in zip(result["dense"], results[0]["dense"]))
    for step in zip(*(result["sizes"] for result in results)):
        assert sum(mine for mine, _ in step) == step[0][1]
        assert len({together for _, together in step}) == 1
