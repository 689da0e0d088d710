"""Attacks on the guarantee of several processes: neighbours, ways around the private step, ranks that come apart."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
from attacks import GRACE, TIMEOUT
from launch import launch
from test_lost_ranks import SLACK, whole

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kind", "weighted", "pooling"),
    [("row_wise", True, "SUM"), ("table_wise", False, "MEAN"), ("column_wise", True, "SUM")],
)
def test_no_unit_adds_more_than_the_bound(kind: str, weighted: bool, pooling: str) -> None:
    for ended in launch(2, "attacks.contributions", kind, weighted, pooling):
        for name, added in ended.value.items():
            assert 0 < added <= 1 + 1e-4, (name, added)


@pytest.mark.parametrize(
    ("norms", "beyond"),
    [
        ("as they are", set()),
        ("an example's rows not merged", {"one id twenty times", "the same id in all features"}),
        ("features not merged", {"one id twenty times", "the same id in all features"}),
    ],
)
def test_rows_of_a_unit_are_merged_before_squaring(norms: str, beyond: set[str]) -> None:
    """Also across features that share a table: otherwise a unit counts for more than the bound, and this shows it."""
    for ended in launch(2, "attacks.contributions_with", norms):
        found = {name for name, added in ended.value.items() if added > 1 + 1e-4}
        assert found == beyond, ended.value
        assert all(added > 0.5 for added in ended.value.values())


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
        assert "RuntimeError: PytorchStreamWriter failed" in said["a full disk"]  # and no rank is said to be lost
        assert said["a full disk"].startswith("RuntimeError" if rank == 0 else "SparseDPError: On rank 0")
        assert "differs from rank 0 in its number of steps" in said["another ledger"] and not said["written"]


def test_capture_and_the_owners_look_up_the_same_ids() -> None:
    """Parts that a batch keeps of its features may be of other ids: units would meet each other's rows unseen (1.15 C)."""
    for ended in launch(2, "attacks.other_parts"):
        assert "put together across the units of the batch by 'roll'" in ended.value


@pytest.mark.parametrize("mechanism", ["adafest", "lazydp"])
@pytest.mark.parametrize("how", ["step twice", "no backward", "NaN in weights", "NaN in a batch"])
def test_one_rank_does_something_else(how: str, mechanism: str) -> None:
    """All end with an error after the same number of steps, and nothing was written."""
    first, second = (ended.value for ended in launch(2, "attacks.out_of_step", how, mechanism))
    if how == "NaN in weights":
        assert "NonFiniteGradientError" in first["said"] and "NonFiniteGradientError" in second["said"]
        assert "diverged" in second["said"] + first["said"]
    elif how == "NaN in a batch":
        assert "NonFiniteGradientError: On rank 1" in first["said"] and "look for NaN" in second["said"]
    else:
        assert "RankLostError: Rank(s) 1 of 2" in first["said"], first
        wrong = "already had its step" if how == "step twice" else "backward"
        assert "SparseDPError" in second["said"] and wrong in second["said"], second
    assert first["steps"] == second["steps"] == (3 if how == "step twice" else 2)
    assert how == "step twice" or (first["same"] and second["same"])


# ---------------------------------------------------------------------- checkpoints that are not whole


@cache
def five_steps() -> dict[str, Any]:
    (reference,) = launch(1, "resume", "lazydp by step", "none", 5, None, None, momentum=0.9)
    return reference.value


@pytest.mark.parametrize(
    ("moment", "killed"),
    [
        *((moment, killed) for moment in ("before the files", "within a file", "after the files") for killed in (0, 1)),
        ("before the rename", 0), ("after the rename", 0), ("while the last one is removed", 0),
        ("stopped within a file", 0), ("stopped within a file", 1),
    ],
)  # fmt: skip
def test_a_kill_in_a_save_leaves_a_whole_checkpoint(tmp_path: Path, moment: str, killed: int) -> None:
    """That of step 2, or that of step 4: with either, a seeded run ends as if nobody had been killed."""
    path = str(tmp_path / "checkpoint")
    ended = launch(
        2, "attacks.killed_in_save", path, moment, killed, lost=killed if moment.startswith("stopped") else None
    )
    assert ended[killed].code == -9, ended[killed].output
    said, seconds = ended[1 - killed].value
    assert f"RankLostError: Rank(s) {killed} of 2" in said
    assert seconds <= TIMEOUT + GRACE + SLACK
    resumed = [
        ended.value for ended in launch(2, "resume", "lazydp by step", "table_wise", 5, path, path, momentum=0.9)
    ]
    assert resumed[0]["loaded"] == (4 if moment in ("after the rename", "while the last one is removed") else 2)
    expected, reached = whole([five_steps()]), whole(resumed)
    assert all((expected[name] - reached[name]).abs().max() <= 1e-6 for name in expected)
    assert resumed[0]["ledger"]["entries"] == five_steps()["ledger"]["entries"]
    assert len([place for place in Path(path).iterdir() if place.is_dir()]) == 1  # the next save removed what was left


def test_files_of_two_saves_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    """A size alone does not tell two saves apart."""
    assert all(ended.code == 0 for ended in launch(2, "attacks.two_saves", str(tmp_path)))
    one, two = (next(path for path in (tmp_path / name).iterdir() if path.is_dir()) for name in ("one", "two"))
    assert (one / "__1_0.distcp").stat().st_size == (two / "__1_0.distcp").stat().st_size

    def damaged(name: str) -> Path:
        shutil.copytree(tmp_path / "two", tmp_path / name)
        return tmp_path / name / two.name

    shutil.copy(one / "__1_0.distcp", damaged("a shard of another save"))
    shutil.copy(one / ".metadata", damaged("metadata of another save"))
    (damaged("a missing shard") / "__0_0.distcp").unlink()
    (damaged("no metadata") / ".metadata").unlink()
    cut = damaged("a truncated shard") / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-100])
    flipped = damaged("a flipped bit") / "__1_0.distcp"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    shutil.copy(tmp_path / "one" / "state.pt", damaged("the state of another save").parent)
    names = [path.name for path in tmp_path.iterdir() if path.name not in ("one", "two")]
    assert len(names) == 7
    for ended in launch(2, "attacks.loads", [str(tmp_path / name) for name in [*names, "two"]]):
        for name in names:
            assert "CheckpointError" in ended.value[name] and "not as it was written" in ended.value[name], name
        assert ended.value["two"] == "nothing was refused" and ended.value["steps"] == 4
