"""Files and folders that cannot be read, written or understood: the message names them, and says what to do."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

import sparsedp.cli.files
from sparsedp.cli.files import require_writable, write_text
from sparsedp.cli.main import main
from sparsedp.errors import SparseDPError, one_line

CONFIG = """
data: {kind: table, paths: clicks.csv, label: ja, categorical: {Gerät: {buckets: 10}}, held_out: 0.2}
model: {kind: pctr, hidden: 4, hidden_layers: 1, dim: 2}
optimizer: {name: SGD, lr: 0.1}
training: {epochs: 4, batch_size: 20, threads: 1, init_seed: 0, check: false}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = [f"{draw.randrange(2)},g{draw.randrange(5)}\n" for _ in range(100)]
    Path("clicks.csv").write_text("ja,Gerät\n" + "".join(rows), encoding="utf-8")
    Path("clicks.yaml").write_text(CONFIG, encoding="utf-8")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("sparsedp: error: ")
    return lines[-1].removeprefix("sparsedp: error: ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a.csv"),
         "a.csv: Permission denied. Look who may read and write it, and its folder"),
        (OSError(errno.EROFS, "Read-only file system", "r"), "r: Read-only file system. Name a folder on another disk"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Make room on its disk"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", b"r"), "r: No such file or directory"),
        (OSError("no network"), "no network"),
    ],
)  # fmt: skip
def test_what_the_operating_system_says_is_told_with_the_file_and_what_to_do(error: OSError, said: str) -> None:
    assert one_line(error) == said


@pytest.mark.parametrize("told", [True, False])
def test_a_file_that_cannot_be_written_is_named_and_not_the_one_beside_it(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        beside = next(Path.cwd().glob(".report.html.*"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(beside)] if told else []))

    monkeypatch.setattr(sparsedp.cli.files.os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_text(Path.cwd() / "report.html", "text")
    assert one_line(caught.value) == f"{Path.cwd() / 'report.html'}: No space left on device. Make room on its disk"
    assert not list(Path.cwd().glob("*report.html*"))


def test_a_run_folder_that_cannot_be_written_is_refused_before_the_data_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    monkeypatch.setattr("sparsedp.cli.run.load_data", None)
    assert refused(capsys, "train", "clicks.yaml", "--run-dir", "file/run") == (
        f"file/run: nothing can be written there: {Path.cwd() / 'file'} is no folder that you may write to. Name another folder "
        "with --run-dir."
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a disk that can only be read
    assert "nothing can be written there" in refused(capsys, "train", "clicks.yaml")
    with pytest.raises(
        SparseDPError, match=r"^\.: nothing can be written there: it is no folder that you may write to"
    ):
        require_writable(Path(), "Name another")


def test_a_file_with_data_is_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "train", "clicks.csv").endswith(". Of a file with data: sparsedp init clicks.csv")
    Path("clicks.parquet").write_bytes(b"PAR1\xff\xfe")
    assert refused(capsys, "train", "clicks.parquet") == (
        "clicks.parquet is no configuration, which is YAML in UTF-8. Of a file with data: sparsedp init clicks.parquet"
    )
    Path("list.yaml").write_text("- 1")
    assert "sparsedp init" not in refused(capsys, "train", "list.yaml")


def test_what_is_wrong_with_yaml_has_a_line_and_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    Path("clicks.yaml").write_text(CONFIG.replace("\noptimizer:", "\n optimizer:"))
    assert refused(capsys, "train", "clicks.yaml") == (
        "clicks.yaml, line 4, column 2, is not valid YAML: expected <block end>, but found '<block mapping start>'. Look at how "
        "far the lines there are indented"
    )


def test_names_of_columns_stand_in_what_leaves_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "clicks.yaml", "--run-dir", "run", "--quiet"]) == 0
    assert "Gerät" in Path("run/release/config.yaml").read_text(encoding="utf-8")
    assert main(["evaluate", "run"]) == 0


@pytest.mark.filterwarnings("always::sparsedp.SparseDPWarning")
def test_a_run_that_goes_on_with_other_data_warns(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(run: str, *more: str) -> list[Any]:
        capsys.readouterr()
        assert main(["train", "--resume", run, *more]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "other data" in line]
        rows = map(json.loads, Path(run, "private/metrics.jsonl").read_text().splitlines())
        return [said, [row["message"] for row in rows if row["kind"] == "warning" and "other data" in row["message"]]]

    assert main(["train", "clicks.yaml", "--run-dir", "run", "--quiet"]) == 0
    assert stopped("run") == [[], []]
    text = Path("clicks.csv").read_text(encoding="utf-8")
    Path("clicks.csv").write_text(text.replace("g1", "g9"), encoding="utf-8")
    [said], [noted] = stopped("run")
    assert said == f"sparsedp: warning: {noted}"
    assert f"{Path('clicks.csv').absolute()} changed since" in noted
