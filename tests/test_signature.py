"""Ledgers that were cut short or edited, and branches of a run: what is found, what is counted, what is said."""

from __future__ import annotations

import copy
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparsedp
from sparsedp import CheckpointError, ConfigError
from sparsedp.accounting.ledger import Ledger, _digest
from sparsedp.cli.main import main
from sparsedp.signature import read_key, sign
from support import Clicks, clicks, loader_of, train

KEY = bytes(range(32))


def start(key: Any = KEY, **options: Any) -> tuple[sparsedp.PrivacyEngine, Any, Any, Any]:
    torch.manual_seed(0)
    module = Clicks()
    engine = sparsedp.PrivacyEngine(ledger_key=key)
    data = loader_of(*clicks(64), batch_size=options.pop("batch_size", 8))
    made = engine.make_private(
        module=module, optimizer=torch.optim.Adam(module.parameters(), lr=0.01), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0, **options,
    )  # fmt: skip
    return engine, *made


def trained(path: Path, key: Any = KEY, epochs: int = 1, **options: Any) -> sparsedp.PrivacyEngine:
    engine, module, optimizer, loader = start(key, **options)
    for _ in range(epochs):
        train(module, optimizer, loader)
        engine.save_checkpoint(path)
    return engine


def rewrite(path: Path, change: Callable[[dict], Any]) -> None:
    """As somebody would who edits a checkpoint, and takes care of checksums and plain digests."""
    content = torch.load(path, weights_only=True)
    change(content)
    for state in (content["ledger"], *content["lineage"].values()):
        ledger = Ledger()
        state["digest"] = _digest(state["composition"], state["entries"])
        ledger.load_state_dict(state)
    torch.save(content, path)


def _fewer(content: dict) -> None:
    content["ledger"]["entries"][0]["count"] = 1


def _fewer_everywhere(content: dict) -> None:
    for state in (content["ledger"], *content["lineage"].values()):
        state["entries"][0]["count"] = 1


def _more_noise(content: dict) -> None:
    for state in (content["ledger"], *content["lineage"].values()):
        state["entries"][0]["event"]["event"]["noise_multiplier"] = 100.0


def _empty(content: dict) -> None:
    for state in (content["ledger"], *content["lineage"].values()):
        state["entries"].clear()


def _no_ancestors(content: dict) -> None:
    content["lineage"] = {content["mark"]: content["ledger"]}
    _fewer_everywhere(content)


def _weights(content: dict) -> None:
    content["model"]["out.bias"] += 1


EDITS = {
    "fewer steps": _fewer_everywhere,
    "more noise": _more_noise,
    "empty": _empty,
    "no ancestors": _no_ancestors,
    "other weights": _weights,
    "another position": lambda content: content["loader"].update(step=0),
    "a note": lambda content: content["notes"].append("x"),
    "extra": lambda content: content["extra"].update(a=1),
    "no signature": lambda content: content.update(signature=None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_checkpoints_are_refused_with_a_key(tmp_path: Path, edit: str) -> None:
    path = tmp_path / "c.pt"
    engine = trained(path, epochs=2)
    other = start()[0]
    other.load_checkpoint(path)
    assert other.ledger == engine.ledger
    rewrite(path, EDITS[edit])
    fresh = start()
    before = copy.deepcopy(fresh[1].state_dict())
    with pytest.raises(CheckpointError, match=r"changed after it was written|is not signed"):
        fresh[0].load_checkpoint(path)
    assert not fresh[0].ledger.entries
    assert all(torch.equal(value, before[name]) for name, value in fresh[1].state_dict().items())


def test_an_honest_ledger_of_earlier_weights_is_refused_with_a_key(tmp_path: Path) -> None:
    """Both parts were signed, but not together."""
    early, late = tmp_path / "a.pt", tmp_path / "b.pt"
    engine, module, optimizer, loader = start()
    train(module, optimizer, loader)
    engine.save_checkpoint(early)
    train(module, optimizer, loader)
    engine.save_checkpoint(late)
    old = torch.load(early, weights_only=True)
    rewrite(late, lambda content: content.update({k: old[k] for k in ("ledger", "lineage", "mark", "signature")}))
    with pytest.raises(CheckpointError, match="changed after"):
        start()[0].load_checkpoint(late)


def test_keys_have_to_agree(tmp_path: Path) -> None:
    signed, unsigned = tmp_path / "a.pt", tmp_path / "b.pt"
    trained(signed), trained(unsigned, key=None)
    for key, path, words in (
        (KEY[::-1], signed, "another ledger_key"),
        (None, signed, "is signed. Give this engine"),
        (KEY, unsigned, "is not signed"),
    ):
        with pytest.raises(CheckpointError, match=words):
            start(key)[0].load_checkpoint(path)
    start(None)[0].load_checkpoint(unsigned)


def test_keys_of_files(tmp_path: Path) -> None:
    file = tmp_path / "ledger.key"
    key = read_key(file)
    assert len(key) == 32 and read_key(str(file)) == key and key != read_key(tmp_path / "other.key")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    trained(tmp_path / "c.pt", key=file)
    assert key not in (tmp_path / "c.pt").read_bytes() and key.hex().encode() not in (tmp_path / "c.pt").read_bytes()
    start(key)[0].load_checkpoint(tmp_path / "c.pt")
    for short in (b"", b"short"):
        with pytest.raises(ConfigError, match="at least 16 bytes"):
            sparsedp.PrivacyEngine(ledger_key=short)


def test_no_two_contents_have_one_signature() -> None:
    values: list[Any] = [
        None, 0, 0.0, False, "", "0", b"", b"0", [], {}, [[]], [[], []], [None], ["", ""], ["0", ""], ["", "0"], {"a": 1},
        {"a": "1"}, {"a": {}}, {"b": 1}, {"a": 1, "b": 2}, {"a": [1, "b", 2]}, torch.zeros(2), torch.zeros(1, 2),
        torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(()), torch.ones(2),
        [torch.zeros(1), torch.zeros(1)],
    ]  # fmt: skip
    assert len({sign(KEY, {"x": value}) for value in values}) == len(values)
    assert sign(KEY, {"x": torch.arange(6).view(2, 3).T}) == sign(KEY, {"x": torch.arange(6).view(2, 3).T.contiguous()})
    with pytest.raises(CheckpointError, match="not object"):
        sign(KEY, {"x": object()})


# ---------------------------------------------------------------------- without a key


def test_a_ledger_that_was_cut_short_is_found_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    trained(path, key=None, epochs=2)
    whole = path.read_bytes()
    content = torch.load(path, weights_only=True)
    content["ledger"]["entries"].pop()  # by accident: its digest is left
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="digest"):
        start(None)[0].load_checkpoint(path)
    path.write_bytes(whole)
    rewrite(path, _fewer)  # on purpose, but the checkpoints before it are on record
    with pytest.raises(CheckpointError, match="lacks steps that the checkpoints before it had"):
        start(None)[0].load_checkpoint(path)


def test_what_cannot_be_found_without_a_key_is_in_the_statement(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    trained(path, key=None, epochs=2)
    rewrite(path, _fewer_everywhere)
    engine = start(None)[0]
    engine.load_checkpoint(path)
    assert engine.ledger.steps == 1  # believed
    assert "Nobody edited them: without a ledger_key only accidental changes are found." in str(engine.statement())


# ---------------------------------------------------------------------- which examples belong together


def test_periods_and_users_are_signed(tmp_path: Path) -> None:
    periods = np.random.default_rng(0).permutation(np.repeat([0, 1], 32))
    moved = periods.copy()
    moved[[int(np.flatnonzero(periods == 0)[0]), int(np.flatnonzero(periods == 1)[0])]] = [1, 0]
    users = np.arange(64) // 4
    shifted = np.roll(users, 1)
    cases: list[tuple[dict, dict]] = [
        ({"stream": sparsedp.Stream(p, "parallel")} for p in (periods, moved)),  # type: ignore[list-item]
        ({"unit": "user", "users": u, "batch_size": 4} for u in (users, shifted)),  # type: ignore[list-item]
    ]
    for mine, other in cases:
        path = tmp_path / "c.pt"
        engine = trained(path, **mine)
        start(**mine)[0].load_checkpoint(path)
        assert start(**other)[0].plan == engine.plan  # nothing of it tells them apart
        with pytest.raises(CheckpointError, match="other periods, or other users"):
            start(**other)[0].load_checkpoint(path)


def test_nothing_that_leaves_is_a_digest_of_periods(tmp_path: Path) -> None:
    """Whoever knows all periods but one could try both: plan and checkpoint are the same for either."""
    contents = []
    for first in (0, 1):
        periods = np.array([first, 1 - first] + [0, 1] * 31)
        engine = trained(tmp_path / "c.pt", key=None, stream=sparsedp.Stream(periods, "parallel"))
        content = torch.load(tmp_path / "c.pt", weights_only=True)
        for private in ("model", "optimizer", "mark", "lineage"):  # noisy, or random
            del content[private]
        contents.append((content, engine.plan.to_dict(), engine.plan.hash, str(engine.statement())))
    assert contents[0] == contents[1]


# ---------------------------------------------------------------------- branches


def test_branches_that_are_read_are_counted(tmp_path: Path) -> None:
    root, a, b = tmp_path / "root.pt", tmp_path / "a.pt", tmp_path / "b.pt"
    trained(root)
    for path in (a, b):
        engine, module, optimizer, loader = start()
        engine.load_checkpoint(root)
        train(module, optimizer, loader)
        engine.save_checkpoint(path)
        alone = engine.statement()
        assert (alone.steps, alone.abandoned_steps) == (16, 0)
    assert any("nor did other runs go on from them" in line for line in alone.assumptions)
    both = start()[0]
    for path in (a, b):
        both.load_checkpoint(path)
    statement = both.statement()
    assert (statement.steps, statement.abandoned_steps) == (16, 8)
    assert statement.epsilon > alone.epsilon
    assert "8 more that ran and are not part of this model" in str(statement)


def test_a_run_that_was_never_resumed_says_nothing_of_checkpoints(tmp_path: Path) -> None:
    engine = trained(tmp_path / "c.pt")
    assert "checkpoint" not in str(engine.statement())
    again = start()[0]
    again.load_checkpoint(tmp_path / "c.pt")
    assert "checkpoint" in str(again.statement()) and "edited" not in str(again.statement())


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("""
data: {kind: generated, rows: 600, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 100, check: false}
privacy: {noise_multiplier: 1.0, max_grad_norm: 2, ledger_key: secret.key}
""")
    assert main(["train", "c.yaml", "--run-dir", "run"]) == 0
    checkpoint = next(Path("run").rglob("checkpoint.pt"))
    assert len(Path("secret.key").read_bytes()) == 32
    assert torch.load(checkpoint, weights_only=True)["signature"] is not None
    rewrite(checkpoint, _fewer_everywhere)
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) != 0
    assert "changed after it was written" in capsys.readouterr().err
