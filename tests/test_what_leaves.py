"""Every value that a checkpoint or a plan holds is in the table of docs/guarantee.md, which says why it may leave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparsedp
from sparsedp import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, FrequencyRelease, LazyDP, Stream
from support import Clicks, clicks, loader_of, train

PAGE = Path(__file__).parents[1] / "docs" / "guarantee.md"


def patterns(title: str) -> dict[str, re.Pattern[str]]:
    """Of the table in the docs whose first column has this title."""
    table = PAGE.read_text().split(f"| in a {title} |")[1].split("\n\n")[0]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    found = {}
    for name in names:  # names of parameters contain dots
        found[name] = re.compile(re.escape(name).replace(r"\*\*", ".+").replace(r"\*", ".+"))
    return found


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Where the values are that are no dicts or lists."""
    if not isinstance(value, (dict, list, tuple)):
        yield path
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{path}.{key}" if path else str(key))


STREAM = Stream(np.arange(64) % 2, "parallel")
RUNS: dict[str, dict[str, Any]] = {
    "dpsgd": {"mechanism": DPSGD()},
    "lazydp": {"mechanism": LazyDP(), "optimizer": torch.optim.SGD},
    "eana": {"mechanism": EANA()},
    "fest": {"mechanism": FEST(k=5, epsilon=1.0)},
    "fest, public": {"mechanism": FEST(k=5, counts={"table.weight": torch.arange(50.0)})},
    "adafest": {"mechanism": AdaFEST(threshold=2.0)},
    "adafest+": {"mechanism": AdaFEST(threshold=2.0, preselect=FEST(k=5, epsilon=1.0))},
    "exponential": {"mechanism": ExponentialSelection(k=3, epsilon=1.0)},
    "running": {"mechanism": FEST(k=5, epsilon=1.0, frequencies="running"), "stream": STREAM},
    "stream": {"stream": STREAM, "ledger_key": bytes(32)},
    "users": {"unit": "user", "users": np.arange(64) // 4, "max_examples_per_user": 2, "ledger_key": bytes(32)},
    "frequencies": {"frequencies": FrequencyRelease()},
    "seeded": {"seed": 3},
    "not begun": {"begun": False},
    "adam": {"optimizer": torch.optim.Adam},
}


def content_of(options: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    options = dict(options)
    begun = options.pop("begun", True)
    engine = sparsedp.PrivacyEngine(seed=options.pop("seed", None), ledger_key=options.pop("ledger_key", None))
    engine.add_note("a note")
    module = Clicks()
    optimizer = options.pop("optimizer", torch.optim.Adagrad)(module.parameters(), lr=0.1)
    module, private, loader = engine.make_private(  # type: ignore[assignment]
        module=module, optimizer=optimizer, data_loader=loader_of(*clicks(64), batch_size=8), noise_multiplier=1.0,
        max_grad_norm=1.0, **options,
    )  # fmt: skip
    if "frequencies" in options:
        engine.release_frequencies()
    if begun:
        train(module, private, loader)
    engine.save_checkpoint(path, extra={"mine": 1})
    engine.save_checkpoint(path, extra={"mine": 1})
    plan = json.loads(json.dumps(engine.plan.to_dict()))
    return torch.load(path, weights_only=True), plan


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    path = tmp_path_factory.mktemp("runs") / "c.pt"
    return {name: content_of(options, path) for name, options in RUNS.items()}


@pytest.mark.parametrize("title", ["checkpoint", "plan"])
def test_everything_that_leaves_is_in_the_table(contents: dict, title: str) -> None:
    known = patterns(title)
    met: set[str] = set()
    for run, (checkpoint, plan) in contents.items():
        for leaf in leaves(checkpoint if title == "checkpoint" else plan):
            fits = {name for name, pattern in known.items() if pattern.fullmatch(leaf)}
            assert fits, f"{run}: '{leaf}' is not in the table of {PAGE.name}"
            met |= fits
    assert met == known.keys(), "the table names what no checkpoint or plan has"


def test_the_table_would_miss_something_new(contents: dict) -> None:
    checkpoint, plan = contents["dpsgd"]
    for title, content in (("checkpoint", checkpoint), ("plan", plan)):
        for more in (
            {"totals": {"units": 3}},
            {"loader": {**checkpoint["loader"], "seen": 1}},
            {"stream": {"digest": "ab"}},
        ):
            new = set(leaves({**content, **more})) - set(leaves(content))
            assert not all(any(pattern.fullmatch(leaf) for pattern in patterns(title).values()) for leaf in new)


def test_what_the_table_calls_of_a_seeded_run_only(contents: dict) -> None:
    for name, (checkpoint, _) in contents.items():
        secret = checkpoint["seed"] is not None, checkpoint["torch_generator"] is not None
        assert secret == ((True, True) if name == "seeded" else (False, False))
        assert (
            (checkpoint["order"] is not None) == (checkpoint["signature"] is not None) == ("ledger_key" in RUNS[name])
        )
