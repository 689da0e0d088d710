"""Checkpoint and resume: the same ledger and, with a seed, the same weights; anything foreign is refused."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsedp
from sparsedp import CheckpointError, SparseDPError, checkpoint
from sparsedp.kernels import mapped
from support import Clicks, clicks, loader_of, make_private


class Dropped(Clicks):
    """With dropout, whose random numbers must continue as well."""

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, nn.functional.dropout(features, 0.2, self.training))


def start(seed: int | None = 7, **options: Any) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    module = Dropped()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    engine, module, private, loader = make_private(
        module, loader_of(*clicks(64), batch_size=8, num_workers=options.pop("workers", 0)), seed=seed, optimizer=optimizer,
        **options,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(private, 0.9)
    return engine, module, private, loader, scheduler


def steps(run: tuple, count: int, epochs: int = 3) -> None:
    """Takes up to `count` steps of the rest of `epochs` epochs; then stops in the middle, as a killed run would."""
    engine, module, optimizer, loader, scheduler = run
    while engine.ledger.steps < epochs * len(loader):
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
            optimizer.step()
            if loader.current.last:
                scheduler.step()
                count -= 1
                if count == 0:
                    return


@pytest.mark.parametrize(
    "options",
    [{}, {"workers": 2}, {"max_physical_batch": 3}, {"poisson_sampling": False}],
    ids=lambda o: next(iter(o), "plain"),
)
@pytest.mark.parametrize("at", [3, 8, 13])
def test_resumed_equals_uninterrupted(tmp_path: Path, at: int, options: dict) -> None:
    whole = start(**options)
    steps(whole, 24)
    first = start(**options)
    steps(first, at)
    first[0].save_checkpoint(tmp_path / "c.pt", extra={"scheduler": first[4].state_dict()})
    torch.manual_seed(99)
    second = start(**options)
    extra = second[0].load_checkpoint(tmp_path / "c.pt")
    second[4].load_state_dict(extra["scheduler"])
    assert second[0].ledger == first[0].ledger
    steps(second, 24 - at)
    assert second[0].ledger == whole[0].ledger
    assert second[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)
    for name, value in whole[1].state_dict().items():
        assert torch.equal(second[1].state_dict()[name], value), name


def test_unseeded_checkpoint_holds_no_randomness_and_resumes_with_fresh(tmp_path: Path) -> None:
    """Neither noise nor sample can be rebuilt from the file; going back does not reuse noise."""
    run = start(seed=None)
    steps(run, 4)
    engine, module, optimizer, loader, _ = run
    engine.save_checkpoint(tmp_path / "c.pt")
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    assert content["seed"] is None and content["torch_generator"] is None
    assert engine._key.secret not in (tmp_path / "c.pt").read_bytes()
    before = copy.deepcopy(module.state_dict())
    moves = []
    for _ in range(2):
        engine.load_checkpoint(tmp_path / "c.pt")
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert engine.ledger.steps == 4
        steps(run, 1)
        moves.append(module.table.weight.detach() - before["table.weight"])
    assert not torch.equal(*moves)


def test_other_plans_are_refused_by_name(tmp_path: Path) -> None:
    first = start()
    steps(first, 3)
    first[0].save_checkpoint(tmp_path / "c.pt")
    for options, word in (
        ({"noise_multiplier": 0.5}, "noise_multiplier"),
        ({"max_grad_norm": 2.0}, "clipping"),
    ):
        _refused(tmp_path / "c.pt", start(**options), word)
    _refused(tmp_path / "c.pt", start(seed=8), "seed")


def test_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    """The first few parameters, not the shapes of all."""

    def model(count: int, rows: int = 5) -> Any:
        module = nn.ModuleList([nn.Embedding(rows, 2), *(nn.Linear(2, 2) for _ in range(count))])
        return make_private(module, loader_of(*clicks(64), batch_size=8))[0]

    path = tmp_path / "c.pt"
    model(3).save_checkpoint(path)
    with pytest.raises(CheckpointError) as caught:
        model(9).load_checkpoint(path)
    said = str(caught.value)
    assert "parameters: '4.weight' is missing there, [2, 2] here, '4.bias' is missing there, [2] here, " in said
    assert (
        said.endswith("and 9 more. Take the model, settings and data of its run, or start anew.")
        and "'0.weight'" not in said
        and len(said) < 400
    )
    with pytest.raises(
        CheckpointError,
        match=r"plan: parameters: '0\.weight' is \[5, 2\] there, \[6, 2\] here\. Take the model, [^.]*\.$",
    ):
        model(3, rows=6).load_checkpoint(path)


def _refused(path: Path, run: tuple, word: str) -> None:
    engine, module, optimizer, loader, _ = run
    before = copy.deepcopy(module.state_dict())
    states = copy.deepcopy((optimizer.state_dict(), loader.state_dict(), engine.ledger.state_dict()))
    with pytest.raises(CheckpointError, match=word):
        engine.load_checkpoint(path)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert str(states) == str((optimizer.state_dict(), loader.state_dict(), engine.ledger.state_dict()))


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    run = start()
    steps(run, 2)
    path = tmp_path / "c.pt"
    run[0].save_checkpoint(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:cut])
        _refused(path, start(), "not a complete")
    path.write_bytes(b"hello" * 100)
    _refused(path, start(), "not a complete")
    torch.save({"model": {}}, path)
    _refused(path, start(), "not a SparseDP checkpoint")
    _refused(tmp_path / "none.pt", start(), "no checkpoint")
    content = torch.load(_written(tmp_path, whole), weights_only=True)
    del content["ledger"]
    torch.save(content, path)
    _refused(path, start(), "lacks ledger")


def _written(folder: Path, content: bytes) -> Path:
    (folder / "whole.pt").write_bytes(content)
    return folder / "whole.pt"


@pytest.mark.parametrize("part", ["ledger", "loader", "optimizer", "model"])
def test_parts_that_do_not_fit(tmp_path: Path, part: str) -> None:
    run = start()
    steps(run, 2)
    run[0].save_checkpoint(tmp_path / "c.pt")
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    if part == "model":
        content["model"]["table.weight"] = torch.zeros(3, 3)
    else:
        content[part] = {"nonsense": 1}
    torch.save(content, tmp_path / "c.pt")
    _refused(tmp_path / "c.pt", start(), "fit|shape|ledger")


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    steps(run, 2)
    path = tmp_path / "c.pt"
    run[0].save_checkpoint(path)
    old = path.read_bytes()

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        run[0].save_checkpoint(path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------ damage, and reading in pieces


def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors then go the way of large ones."""
    monkeypatch.setattr(checkpoint, "PIECE", 0)
    monkeypatch.setattr(mapped, "PIECE", 100)


def _perturb(run: tuple) -> None:
    with torch.no_grad():
        for parameter in run[1].parameters():
            parameter.add_(1)


def _written_after(count: int, path: Path, **options: Any) -> tuple:
    run = start(**options)
    steps(run, count)
    run[0].save_checkpoint(path)
    return run


def test_a_flipped_bit_of_the_table_is_refused(tmp_path: Path) -> None:
    """`torch.load` takes it without a word."""
    path = tmp_path / "c.pt"
    run = _written_after(2, path)
    whole = bytearray(path.read_bytes())
    table = run[1].table.weight.detach().numpy().tobytes()
    assert whole.count(table) == 1
    whole[whole.index(table) + len(table) // 2] ^= 1
    path.write_bytes(whole)
    assert not torch.equal(torch.load(path)["model"]["table.weight"], run[1].table.weight)
    _refused(path, start(), r"not a complete SparseDP checkpoint: its part .*/data/\d+ is damaged")


def test_a_damaged_byte_anywhere_is_refused_or_harmless(tmp_path: Path) -> None:
    """Refused with nothing changed, or, where it is none of the content, such as padding, everything is as it was."""
    path = tmp_path / "c.pt"
    first = _written_after(2, path)
    whole, saved = path.read_bytes(), copy.deepcopy(first[1].state_dict())
    run, refused = start(), 0
    for at in range(3, len(whole), len(whole) // 120):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        _perturb(run)
        before = copy.deepcopy(run[1].state_dict())
        try:
            run[0].load_checkpoint(path)
            wanted = saved
        except CheckpointError:
            wanted, refused = before, refused + 1
        assert all(torch.equal(value, wanted[name]) for name, value in run[1].state_dict().items()), at
    assert refused > 30


def test_checksums_whatever_torch_is_told(tmp_path: Path) -> None:
    """A new checkpoint has them; one from before, without any, can be read still."""
    path = tmp_path / "c.pt"
    torch.serialization.set_crc32_options(False)
    try:
        first = _written_after(2, path)
        assert not torch.serialization.get_crc32_options()
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        torch.save(torch.load(path), tmp_path / "old.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "old.pt") as archive:
        assert archive.testzip() is not None
    second = start()
    _perturb(second)
    second[0].load_checkpoint(tmp_path / "old.pt")
    assert torch.equal(second[1].table.weight, first[1].table.weight)


@pytest.mark.parametrize("mechanism", ["dpsgd", "lazydp"])
def test_restored_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    _in_small_pieces(monkeypatch)

    def begin() -> tuple:
        if mechanism == "dpsgd":
            return start()
        torch.manual_seed(0)
        module = Dropped()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        made = make_private(
            module, loader_of(*clicks(64), batch_size=8), seed=7, optimizer=optimizer, mechanism=sparsedp.LazyDP()
        )
        return (*made, torch.optim.lr_scheduler.ExponentialLR(made[2], 0.9))

    whole = begin()
    steps(whole, 5)
    whole[0].save_checkpoint(tmp_path / "c.pt", extra={"scheduler": whole[4].state_dict()})
    saved = copy.deepcopy((whole[1].state_dict(), whole[2].state_dict()))
    steps(whole, 6)
    again = begin()  # without momentum of its own yet
    again[4].load_state_dict(again[0].load_checkpoint(tmp_path / "c.pt")["scheduler"])
    steps(again, 6)
    for name, value in whole[1].state_dict().items():
        assert torch.equal(again[1].state_dict()[name], value), name
    whole[0].load_checkpoint(tmp_path / "c.pt")
    assert str(saved) == str(copy.deepcopy((whole[1].state_dict(), whole[2].state_dict())))
    assert torch.equal(whole[1].table.weight, saved[0]["table.weight"])


class Remembering(Clicks):
    """With a state of its own beside parameters and buffers, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.loads = torch.zeros(3), 0
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "loads", module.loads + 1))

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.seen = state["seen"]


def test_nothing_that_was_loaded_is_a_part_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes into it afterwards changes nothing here."""
    _in_small_pieces(monkeypatch)

    def begin(seen: torch.Tensor) -> tuple:
        module = Remembering()
        module.seen = seen
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        made = make_private(module, loader_of(*clicks(64), batch_size=8), optimizer=optimizer)
        return (*made, torch.optim.lr_scheduler.ExponentialLR(made[2], 0.9))

    first = begin(torch.arange(3.0))
    steps(first, 3)
    path = tmp_path / "c.pt"
    first[0].save_checkpoint(path, extra={"mine": torch.arange(4.0)})
    run = begin(torch.zeros(3))
    extra = run[0].load_checkpoint(path)
    assert run[1].loads == 1 and torch.equal(run[1].seen, torch.arange(3.0))
    states = extra, run[1].state_dict(), run[2].state_dict(), run[3].state_dict(), run[2].preparation.state.to_dict()
    before = copy.deepcopy(states)
    with path.open("r+b") as file:  # in place: the memory of a mapped tensor would change
        file.write(b"\x55" * path.stat().st_size)
    assert str(before) == str(states)
    assert torch.equal(extra["mine"], torch.arange(4.0)) and torch.equal(run[1].seen, torch.arange(3.0))
    steps(run, 3)


def test_an_interrupted_copy_is_refused_until_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    first = _written_after(3, path, seed=None)
    run = start(seed=None)
    steps(run, 1)
    _in_small_pieces(monkeypatch)
    copied = []

    def interrupted(target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(target)
        if len(copied) == 4:
            raise KeyboardInterrupt
        mapped.copy_mapped(target, source)

    key = run[0]._key
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "copy_mapped", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run[0].load_checkpoint(path)
    paid = [entry.count for entry in run[0].ledger.entries]
    assert sum(paid) == 4  # its own step and the checkpoint's: there are weights of both
    assert run[0]._key is not key
    with pytest.raises(SparseDPError, match="was interrupted"):
        steps(run, 1)
    with pytest.raises(SparseDPError, match="was interrupted"):
        run[0].save_checkpoint(tmp_path / "other.pt")
    run[0].load_checkpoint(path)
    assert [entry.count for entry in run[0].ledger.entries] == paid  # not twice
    assert all(torch.equal(value, first[1].state_dict()[name]) for name, value in run[1].state_dict().items())
    steps(run, 1)


def test_notes_of_the_statement_are_kept(tmp_path: Path) -> None:
    run = start()
    run[0].add_note("the vocabulary was counted on private data")
    run[0].save_checkpoint(tmp_path / "c.pt")
    other = start()
    other[0].add_note("and this")
    for _ in range(2):
        other[0].load_checkpoint(tmp_path / "c.pt")
    text = str(other[0].statement(1e-5))
    assert text.count("counted on private data") == 1 and "and this" in text
