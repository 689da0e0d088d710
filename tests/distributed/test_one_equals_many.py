"""One process and several give the same model, noise on, with every mechanism and sharding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
from launch import launch

pytestmark = pytest.mark.distributed
MECHANISMS = [
    "dpsgd", "lazydp", "lazydp by step", "eana", "fest", "fest, counted", "adafest", "adafest+", "exponential",
]  # fmt: skip
SHARDINGS = ["row_wise", "table_wise", "column_wise", "table_row_wise", "data_parallel"]
CLOSE = 1e-6


@cache
def compared(ranks: int, **settings: Any) -> list[dict]:
    return [ended.value for ended in launch(ranks, "compare", MECHANISMS, SHARDINGS, **settings)]


@cache
def compared_with(ranks: int, mechanisms: tuple[str, ...], shardings: tuple[str, ...], settings: tuple) -> list[dict]:
    return [ended.value for ended in launch(ranks, "compare", list(mechanisms), list(shardings), **dict(settings))]


def require_equal(results: list[dict], close: float = CLOSE) -> None:
    for rank, result in enumerate(results):
        for case, one in result.items():
            assert one["moved"] > 1e-3, case  # tables were trained, and noise was on
            assert one["distance"] <= close, (rank, case, one)
            assert one["ledger"] and one["statement"], (rank, case)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_model(ranks: int, mechanism: str, sharding: str) -> None:
    require_equal([{(mechanism, sharding): result[mechanism, sharding]} for result in compared(ranks)])


@pytest.mark.parametrize("ranks", [2, 3])
def test_most_runs_are_equal_bit_for_bit(ranks: int) -> None:
    """Others round sums of floating-point numbers in another order."""
    results = compared(ranks)
    exact = [case for case in results[0] if all(result[case]["distance"] == 0 for result in results)]
    assert len(exact) > len(results[0]) / 2, f"{len(exact)} of {len(results[0])}: {sorted(exact)}"


@pytest.mark.parametrize(
    ("settings", "close"),
    [
        ((("unit", "user"),), CLOSE),
        ((("max_physical_batch", 4),), CLOSE),
        ((("momentum", 0.9), ("mechanisms", ("lazydp", "dpsgd"))), 2e-6),
        ((("optimizer", "adagrad"), ("mechanisms", ("adafest", "fest"))), 1e-5),  # divides by roots of small sums
        ((("optimizer", "adagrad and adam"), ("mechanisms", ("adafest",))), 1e-5),
        ((("optimizer", "sgd and adam"), ("mechanisms", ("lazydp", "dpsgd"))), 1e-5),
        ((("optimizer", "sparse adam and sgd"), ("mechanisms", ("adafest", "eana"))), 1e-5),
        # TorchRec's own cannot be made on a rank that has nothing of a table.
        (
            (
                ("optimizer", "torchrec's row-wise adagrad and adam"),
                ("mechanisms", ("dpsgd",)),
                ("shardings", ("row_wise",)),
            ),
            1e-5,
        ),
        (
            (
                ("optimizer", "row-wise adagrad and adam"),
                ("mechanisms", ("adafest", "fest", "dpsgd")),
                ("shardings", ("row_wise", "table_wise")),
            ),
            1e-5,
        ),
        ((("kind", "sequences"), ("mechanisms", ("adafest", "lazydp", "dpsgd"))), CLOSE),
        ((("kind", "weighted"), ("mechanisms", ("adafest", "lazydp by step"))), CLOSE),
    ],
    ids=[
        "users",
        "physical batches",
        "momentum",
        "Adagrad",
        "Adagrad and Adam",
        "SGD and Adam",
        "SparseAdam and SGD",
        "TorchRec's RowWiseAdagrad and Adam",
        "RowWiseAdagrad and Adam",
        "sequences",
        "weighted",
    ],
)
def test_units_batches_optimizers_and_sequences(settings: tuple, close: float) -> None:
    options = dict(settings)
    mechanisms = options.pop("mechanisms", ("adafest", "lazydp", "eana"))
    divided = ("row_wise", "table_wise") if options.get("kind") else ("row_wise", "column_wise")
    shardings = options.pop("shardings", divided)
    require_equal(compared_with(2, mechanisms, shardings, tuple(options.items())), close)


def test_a_rank_that_owns_no_rows() -> None:
    """Two tables on three ranks, table by table."""
    results = [ended.value for ended in launch(3, "compare", ["adafest", "lazydp"], ["table_wise"], kind="sequences")]
    require_equal(results)


def test_ranks_without_examples() -> None:
    for ended in launch(3, "without_examples"):
        assert ended.value <= CLOSE


@pytest.mark.parametrize("mutant", ["not merged", "noise twice", "not added up"])
def test_mistakes_show(mutant: str) -> None:
    """Each of these would pass a comparison that is not close, or has no noise."""
    for ended in launch(2, "compare", ["adafest"], ["row_wise"], mutant=mutant):
        if ended.code == 0:
            assert ended.result["adafest", "row_wise"]["distance"] > 1e-4
        else:  # ranks that come apart are stopped
            assert "differs from rank 0" in ended.output


def test_torchrec_does_not_divide_gradients_here() -> None:
    """Its own backward pass, in which it would, never runs: with any message of it a run would fail."""
    shardings = ["row_wise", "table_wise", "column_wise"]
    divided, whole = (
        [ended.value for ended in launch(2, "compare", ["adafest"], shardings, mutant=mutant)]
        for mutant in ("gradient division", "no gradient division")
    )
    require_equal(divided)
    assert divided == whole
    for sharding in shardings:
        for ended in launch(2, "own_backward", sharding):
            assert "TorchRec sent gradients" in ended.value


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_collections_that_give_dtensors(sharding: str) -> None:
    for ended in launch(2, "as_dtensors", sharding):
        assert ended.value["distance"] <= CLOSE and "DTensor" in ended.value["kinds"]


def test_model_parallel_and_dlrm(tmp_path: Any) -> None:
    for ended in launch(2, "model_parallel", str(tmp_path)):
        assert ended.value["distance"] <= CLOSE
        assert ended.value["same object"] and ended.value["names"]


def test_one_key_for_all() -> None:
    """From the operating system of rank 0, and another one in every run."""
    first, second = ([ended.value for ended in launch(2, "keys")] for _ in range(2))
    assert first[0] == first[1] and second[0] == second[1]
    assert first[0] != second[0] and not first[0][1]


@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_the_optimizer_has_its_parameters_back_after_close(tmp_path: Path, kernel: str) -> None:
    """Fused tables then move by TorchRec's own optimizer again, and others by the user's."""
    for ended in launch(2, "after_close", kernel, str(tmp_path / "checkpoint")):
        assert ended.value["the module's"] and ended.value["state"]
        assert ended.value["checkpoint"] == "nothing was refused"
        assert all(ended.value["moved"].values())


@pytest.mark.parametrize("mechanism", ["adafest", "lazydp by step"])
def test_outputs_are_those_of_one_process_also_after_close(mechanism: str) -> None:
    """Rows that are owed noise are settled before an evaluation reads them."""
    for ended in launch(2, "evaluated", mechanism, "table_wise"):
        assert ended.value["private"] <= CLOSE and ended.value["closed"] <= CLOSE
        assert "not looked at in several processes" in ended.value["statistics"]


def test_tables_are_where_a_plan_puts_them() -> None:
    seen = set()
    for memory in (60e3, 200e3, None):
        for ended in launch(2, "planned_and_placed", "adafest", memory):
            assert ended.value["placed"], ended.value
            assert ended.value["kinds"]["odd.weight"] == "data_parallel", "its columns cannot be divided"
            seen |= set(ended.value["kinds"].values())
    assert len(seen) > 2, seen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"odd.weight": "row_wise"}, "multiples of 4"),
        ({"large.weight": "column_wise 0 1 2"}, "rank 2, and there are 2 processes"),
        ({"large.weight": "table_row_wise"}, 'expected "row_wise"'),
        ({"larger.weight": "row_wise"}, "is no table of the model"),
    ],
)
def test_places_that_are_refused(changes: dict[str, str], said: str) -> None:
    places = dict.fromkeys(["large.weight", "wide.weight", "bag.weight", "odd.weight"], "data_parallel") | changes
    for ended in launch(2, "places_refused", places):
        assert said in ended.value


@pytest.mark.parametrize("kind", ["bags", "sequences", "weighted"])
def test_a_model_is_checked_before_its_tables_are_sharded(kind: str) -> None:
    """On a batch with a KeyedJaggedTensor; sharded modules, TorchRec's and others, are refused by name."""
    for ended in launch(2, "checked", kind):
        assert ended.value["units"] == 4 and ended.value["difference"] < 1e-5, ended.value
        names = ["'tables'", "'country'", "'tables'", "'tables'"]
        for said, name in zip(ended.value["said"], names, strict=True):
            assert said.startswith(f"UnsupportedError: Module {name}") and "before sharding" in said, said
