"""Checkpoint and resume: the same ledger and, with a seed, the same weights; anything foreign is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsedp
from sparsedp import CheckpointError
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
    assert said.endswith("and 9 more.") and "'0.weight'" not in said and len(said) < 400
    with pytest.raises(CheckpointError, match=r"plan: parameters: '0\.weight' is \[5, 2\] there, \[6, 2\] here\.$"):
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
