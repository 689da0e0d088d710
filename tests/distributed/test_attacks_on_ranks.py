"""Attacks on the guarantee of several processes: neighbours, ways around the private step, ranks that come apart."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")
from launch import launch

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kind", "weighted", "pooling"),
    [("row_wise", True, "SUM"), ("table_wise", False, "MEAN"), ("column_wise", True, "SUM")],
)
def test_no_unit_adds_more_than_the_bound(kind: str, weighted: bool, pooling: str) -> None:
    for ended in launch(2, "attacks.contributions", kind, weighted, pooling):
        for name, added in ended.value.items():
            assert 0 < added <= 1 + 1e-4, (name, added)


def test_nothing_goes_around_the_private_step() -> None:
    for ended in launch(2, "attacks.around"):
        said = ended.value
        for name in said:
            if name.startswith("gradient at a shard"):
                assert said[name].startswith("SparseDPError: Parameter 'tables.embedding_bags"), (name, said[name])
        kept = said["kept"]
        assert "was called itself" in kept["called"] and kept["called after close"] == "nothing was refused"
        again = said["after a failure"]
        assert "exceeds the data set's 200 examples" in again["refused"] and again["optimizer as it was"]
        assert kept["owed before"] > 0 and kept["owed in its state_dict"] == 0
        assert again["owed before"] > 0 and again["owed in a state_dict"] == 0


def test_ranks_that_come_apart_are_stopped_before_a_step() -> None:
    for ended in launch(2, "attacks.apart"):
        said = ended.value
        for name in ("the optimizer", "momentum"):
            assert "in the optimizer's options for 'tables.embedding_bags.t0.weight'" in said[name], said[name]
        assert "in what belongs together in the data" in said["users"]
        assert "Ranks 0 and 1 have the same examples" in said["own data that all have"]
        assert "in own_data: True there, False on rank 0" in said["own data on one"]
        assert "in parameter 'over.0.bias': '(12,), torch.float32, not trained' there" in said["frozen"]
        assert "in buffer 'over.extra'" in said["a buffer"]
        for mechanism in ("adafest", "lazydp"):
            assert "in the optimizer's options for" in said[f"learning rate, {mechanism}"]
            assert "in whether 'tables.embedding_bags.t1.weight' is trained" in said[f"frozen table, {mechanism}"]
            assert "in whether 'over.0.bias' is trained" in said[f"frozen bias, {mechanism}"]
            for name in ("learning rate", "frozen table", "frozen bias"):
                assert said[f"{name}, {mechanism}"].startswith("2 steps; SparseDPError: Rank 1 differs")


def test_copies_of_a_table_start_alike() -> None:
    first, second = (ended.value for ended in launch(2, "attacks.copies_that_start_otherwise"))
    assert first == second


def test_a_step_that_some_rank_took_is_in_every_ledger() -> None:
    first, second = (ended.value for ended in launch(2, "attacks.half_a_step"))
    assert "MemoryError" in first["said"] and first["moved"] == 0 and second["moved"] > 0
    assert first["steps"] == second["steps"] == 3


def test_checkpoints_are_of_one_run(tmp_path: Path) -> None:
    for rank, ended in enumerate(launch(2, "attacks.checkpoints", str(tmp_path))):
        said = ended.value
        assert said["a"] == [len("logs"), len("state.pt"), 32]  # one folder of tensors, and what was there before
        assert "differs from rank 0 in the checkpoint that it loads" in said["two"]
        assert "There is no checkpoint at" in said["missing on one"]
        assert said["steps then"] == 0 and said["steps after"] == 4
        assert "is a file" in said["a file"] and ("On rank 0" in said["a file"]) == (rank == 1)
        assert "differs from rank 0 in its number of steps" in said["another ledger"] and not said["written"]


def test_capture_and_the_owners_look_up_the_same_ids() -> None:
    """Parts that a batch keeps of its features may be of other ids: units would meet each other's rows unseen (1.15 C)."""
    for ended in launch(2, "attacks.other_parts"):
        assert "put together across the units of the batch by 'roll'" in ended.value
