"""unit="user" in click logs and on the command line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp import ConfigError, DataError
from sparsedp.cli.main import main
from sparsedp.data import generated_click_log, open_click_log, write_click_log
from sparsedp.data.clicklog import COLUMNS
from sparsedp.plan import default_delta

USER_FIELDS = ["0", "7", "123456789012345678", "1234567890123456789", "", "-1", "1.0", "a", " 3", "00", "é"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(USER_FIELDS), st.sampled_from(["\n", "\r\n"])), max_size=6))
def test_user_fields(tmp_path_factory: pytest.TempPathFactory, fields: list[tuple[str, str]]) -> None:
    """A user is a whole number of at most 18 digits; a line without one is malformed, and nobody is taken for user 0."""
    fields = [*fields, ("5", "\n")]  # a log without rows is refused
    rows = [",".join(["1"] + ["2"] * 13 + ["a"] * 26 + [user, "4"]) + end for user, end in fields]
    folder = tmp_path_factory.mktemp("users")
    (folder / "log.csv").write_bytes((",".join([*COLUMNS, "Uid", "day"]) + "\n" + "".join(rows)).encode())
    log = open_click_log(folder / "log.csv", cache_dir=folder, user_column="uid", max_malformed=1)
    wanted = [int(user) for user, _ in fields if user.isdigit() and len(user) <= 18]
    assert log.users is not None and log.users.tolist() == wanted
    assert log.summary.malformed == len(fields) - len(wanted)


def test_click_logs_with_a_user_column(tmp_path: Path) -> None:
    log = generated_click_log(300, scale=0.01, users=40, days=2)
    assert log.users is not None and log.users.dtype == np.int64 and 20 < len(np.unique(log.users)) <= 40
    without = generated_click_log(300, scale=0.01, days=2)
    assert without.users is None and (without.labels == log.labels).all()  # users change nothing else
    write_click_log(log, tmp_path / "{day}.tsv", header=True)
    read = open_click_log(tmp_path / "*.tsv", cache_dir=tmp_path / "cache", user_column="User")
    assert read.users is not None and np.array_equal(read.users, log.users)
    training, held_out = read.split(0.25)
    assert np.array_equal(training.users, log.users[:225]) and np.array_equal(held_out.users, log.users[225:])  # type: ignore[arg-type]
    assert np.array_equal(pickle.loads(pickle.dumps(training)).users, training.users)  # type: ignore[arg-type]
    assert open_click_log(tmp_path / "*.tsv", cache_dir=tmp_path / "cache").users is None  # a cache of its own
    with pytest.raises(ConfigError, match="header=True"):
        write_click_log(log, tmp_path / "plain_{day}.tsv")
    for column in ("visitor", "C3", "label"):
        with pytest.raises(DataError, match=f"user column '{column}'"):
            open_click_log(tmp_path / "*.tsv", cache_dir=tmp_path / "cache", user_column=column)
    write_click_log(without, tmp_path / "bare_{day}.csv", separator=",")
    with pytest.raises(DataError, match="there is no header"):
        open_click_log(tmp_path / "bare_0.csv", cache_dir=tmp_path / "cache", user_column="user")
    with pytest.raises(ConfigError, match="at least one user"):
        generated_click_log(300, users=0)


CONFIG = """
data: {kind: generated, rows: 1000, scale: 0.01, users: 300}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 40, log_every: 1}
privacy: {target_epsilon: 5, max_grad_norm: 2, unit: user, max_examples_per_user: 3}
"""


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("c.yaml").write_text(CONFIG)
    users = len(np.unique(generated_click_log(1000, scale=0.01, users=300).split(0.1)[0].users))  # type: ignore[arg-type]
    assert main(["plan", "c.yaml", "--no-measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["unit"], report["dataset_size"], report["examples"]) == ("user", users, 900)
    assert report["steps"] == -(-users // 40) and report["sample_rate"] == 40 / users
    assert report["delta"] == default_delta(users) and report["expected_examples"] < 3 * 40
    assert report["predicted"]["source"] == f"all {users} training users"
    assert main(["plan", "c.yaml", "--no-measure"]) == 0
    shown = capsys.readouterr().out
    assert f"users{'':16}{users}" in shown and "40 users with" in shown and "at most 3 of a user's" in shown
    assert main(["train", "c.yaml", "--run-dir", "run"]) == 0
    shown = capsys.readouterr().out
    assert "steps of 40 users" in shown and "protects:     one user" in shown and "for each user" in shown
    assert json.loads(Path("run/release/plan.json").read_text())["max_examples_per_user"] == 3
    logged = [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]
    taken = [row for row in logged if row["kind"] == "step"]
    assert all(row["units"] <= row["examples"] <= 3 * row["units"] for row in taken)
    assert sum(row["examples"] for row in taken) > sum(row["units"] for row in taken)
    assert all(0.3 < row["loss"] < 2 for row in taken)  # a mean over examples
    assert main(["plan", "c.yaml", "--no-measure", "--set", "data.users=null"]) != 0
    assert "needs to know whose each example is" in capsys.readouterr().err
    assert main(["plan", "c.yaml", "--no-measure", "--set", "privacy.unit=example"]) != 0
    assert "privacy.max_examples_per_user" in capsys.readouterr().err
