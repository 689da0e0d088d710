"""Attacks through configurations and run folders: what somebody hands over must not decide what runs here."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparsedp.cli.config.trust import Code
from sparsedp.cli.main import main
from sparsedp.errors import ConfigError

CONFIG: dict[str, Any] = {
    "data": {"kind": "trust_mine:data"},
    "model": {"kind": "trust_mine:Model"},
    "loss": "trust_mine:loss",
    "optimizer": {"name": "SGD", "lr": 0.1},
    "training": {"epochs": 1, "batch_size": 20, "check": False, "threads": 1},
    "privacy": {"noise_multiplier": 1.0, "max_grad_norm": 1.0},
}
CODE = """
import os
import subprocess
import functools
from subprocess import check_output
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

open({trace!r}, "a").write("ran ")

def data(**options):
    ids = torch.arange(40)
    return TensorDataset(ids % 10, (ids % 2).float()), TensorDataset(ids[:10], (ids[:10] % 2).float())

class Model(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.table = nn.Embedding(10, 1)

    def forward(self, ids):
        return self.table(ids).squeeze(1)

    @classmethod
    def make(cls, training):
        return cls(training)

def loss(output, target):
    return (output - target).square().mean()

shell = functools.partial(subprocess.call, shell=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("trust_mine", "trust_other", "trust_package", "trust_package_evil"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    write(Path("mine.yaml"))


def write(path: Path, **changes: Any) -> Path:
    """A configuration with its code beside it; the code leaves a trace where it runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    code = CODE.replace("{trace!r}", repr(str(path.parent.absolute() / "trace")))
    (path.parent / "trust_mine.py").write_text(code)
    return path


def traces() -> list[str]:
    return sorted(str(path.relative_to(Path.cwd().parent)) for path in Path.cwd().parent.rglob("trace"))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """One line, exit code 2."""
    capsys.readouterr()
    quiet = ["--quiet"] if argv[0] == "plan" else []  # which tells what it does meanwhile
    assert main([*argv, *quiet]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sparsedp: error: ") and err.count("\n") == 1, err
    return err


# ------------------------------------------------------------------ what a configuration may name

ATTACKS = {
    "a module of Python": "subprocess:check_output",
    "os": "os:system",
    "builtins": "builtins:eval",
    "a module that the user's file imported": "trust_mine:os.system",
    "a function that the user's file imported": "trust_mine:check_output",
    "a harmless one that it imported": "trust_mine:mse_loss",
    "an instance around one": "trust_mine:shell",
    "its globals": "trust_mine:data.__globals__.get",
    "its builtins": "trust_mine:__builtins__.eval",
    "a class's own machinery": "trust_mine:Model.__subclasses__",
    "through a method": "trust_mine:Model.forward.__globals__.get",
    "the main module": "__main__:main",
    "SparseDP's own machinery": "sparsedp.cli.config.trust:importlib.import_module",
    "SparseDP's own files": "sparsedp.cli.files:write_text",
    "SparseDP's own writers": "sparsedp.data:write_click_log",
    "what SparseDP imported": "sparsedp.data.clicklog:os.system",
    "a name in SparseDP's package that is a module": "sparsedp.data:clicklog.os.system",
    "torch": "torch.hub:load",
    "an installed package": "yaml:unsafe_load",
}


@pytest.mark.parametrize("key", ["data", "model", "loss"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_from_elsewhere_is_refused(attack: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = ATTACKS[attack]
    write(Path("mine.yaml"), **{key: address if key == "loss" else {"kind": address}})
    err = refused(capsys, "plan", "mine.yaml")
    assert ("loss" if key == "loss" else f"{key}.kind") in err and address in err
    assert "--trust" in err or "has no" in err or "only a class" in err or "another module" in err
    assert not Path("runs").exists()


def test_what_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("mine.yaml"), model={"kind": "trust_mine:Model.make"})
    assert main(["train", "mine.yaml", "--run-dir", "run", "--quiet"]) == 0
    code = Code(Path("mine.yaml"))
    from sparsedp.models import PCTR

    assert code.find("sparsedp.models:PCTR", "model.kind") is PCTR
    # What a file beside the configuration takes from another one there is the user's own too.
    Path("trust_other.py").write_text("from trust_mine import loss")
    assert code.find("trust_other:loss", "loss").__module__ == "trust_mine"


@pytest.mark.parametrize(
    "address",
    ["../evil:f", "/tmp/evil:f", "..evil:f", "$HOME:f", "trust_mine:f()", "trust mine:f", ":f", "a:", "a:b:c"],
)
def test_an_address_is_no_path_and_no_expression(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("mine.yaml"), loss=address)
    assert "loss: expected" in refused(capsys, "plan", "mine.yaml")
    assert traces() == []


def test_trust_is_of_a_package_and_not_of_names_that_begin_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("trust_package", "trust_package_evil"):
        Path(name).mkdir()
        Path(name, "__init__.py").write_text("")
        Path(name, "parts.py").write_text("def loss(output, target):\n    return (output - target).square().mean()\n")
    outside = write(Path("../elsewhere/mine.yaml"), loss="trust_package.parts:loss")
    assert "--trust trust_package\n" in refused(capsys, "plan", str(outside))
    assert main(["plan", str(outside), "--trust", "trust_package", "--no-measure"]) == 0
    write(outside, loss="trust_package_evil.parts:loss")
    assert "--trust trust_package_evil" in refused(capsys, "plan", str(outside), "--trust", "trust_package")
    assert "trust_package_evil" not in sys.modules
    # A module within a package can be trusted alone.
    write(outside, loss="trust_package.parts:loss")
    assert main(["plan", str(outside), "--trust", "trust_package.parts", "--no-measure"]) == 0
    refused(capsys, "plan", str(outside), "--trust", "trust_package.part")
    with pytest.raises(SystemExit):
        main(["plan", str(outside), "--trust", "../evil"])


def test_the_current_directory_and_pythonpath_are_not_beside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration from elsewhere must not find code where the user happens to be, or what the environment names."""
    outside = write(Path("../elsewhere/mine.yaml"))
    Path("../elsewhere/trust_mine.py").unlink()
    assert "--trust trust_mine" in refused(capsys, "plan", str(outside))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setenv("SPARSEDP_TRUST", "trust_mine")
    assert "--trust trust_mine" in refused(capsys, "plan", str(outside))
    assert traces() == [] and "trust_mine" not in sys.modules


def test_a_link_beside_the_configuration_leads_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    Path("trust_other.py").symlink_to(os.__file__)
    write(Path("mine.yaml"), loss="trust_other:system")
    assert "leads out of the folder of mine.yaml" in refused(capsys, "plan", "mine.yaml")
    Path("trust_package").symlink_to(Path(json.__file__).parent)
    write(Path("mine.yaml"), loss="trust_package.tool:main")
    assert "leads out of the folder of mine.yaml" in refused(capsys, "plan", "mine.yaml")


def test_a_file_with_the_name_of_another_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the file, which would stand in for the module everywhere, nor the module, which is not the user's."""
    Path("subprocess.py").write_text("def check_output(*a, **k): return 1")
    write(Path("mine.yaml"), loss="subprocess:check_output")
    assert "another module has the name 'subprocess'" in refused(capsys, "plan", "mine.yaml")
    Path("os").mkdir()
    write(Path("mine.yaml"), loss="os:system")
    assert "another module has the name 'os'" in refused(capsys, "plan", "mine.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch trace']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/new:os.system ['touch trace']",
    ],
)
def test_tags_in_yaml_make_no_objects(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.yaml").write_text(f"data: {text}\n")
    assert "is not valid YAML" in refused(capsys, "plan", "evil.yaml")
    assert "is not valid YAML" in refused(capsys, "plan", "mine.yaml", "--set", f"loss={text}")
    assert "is not valid YAML" in refused(capsys, "sweep", "evil.yaml", "--list")
    assert traces() == []


@pytest.mark.parametrize("code", ["digests", "run", "code", "trusted"])
def test_a_configuration_cannot_say_what_it_may_name(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("mine.yaml"), loss="os:system", **{code: {"trusted": ["os"]}})
    assert f"{code}: unknown key" in refused(capsys, "plan", "mine.yaml")


# ------------------------------------------------------------------ sweeps


def test_sweeps_are_no_more_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = {"base": "mine.yaml", "reference": "dpsgd", "variants": {"dpsgd": {}}}

    def write_sweep(path: str, **changes: Any) -> None:
        Path(path).write_text(yaml.safe_dump({**sweep, **changes}))

    write_sweep("sweep.yaml", set={"loss": "os:system"})
    assert "--trust os" in refused(capsys, "sweep", "sweep.yaml", "--list")
    write_sweep("sweep.yaml", variants={"dpsgd": {"grid": {"loss": ["trust_mine:check_output"]}}})
    assert "--trust subprocess" in refused(capsys, "sweep", "sweep.yaml", "--list")
    write_sweep("sweep.yaml", name="..")
    assert "begin with a dot" in refused(capsys, "sweep", "sweep.yaml", "--list")
    # A base elsewhere brings its values, not its code.
    os.remove("trace")
    sys.modules.pop("trust_mine")
    write(Path("../elsewhere/mine.yaml"))
    Path("trust_mine.py").unlink()
    write_sweep("sweep.yaml", base="../elsewhere/mine.yaml")
    assert "--trust trust_mine" in refused(capsys, "sweep", "sweep.yaml", "--list")
    assert traces() == []


# ------------------------------------------------------------------ folders that somebody hands over


def handed_over(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """A folder of a run that was made elsewhere, stopped at its first step, with evil code wherever it can be put."""
    maker = Path("../maker")
    write(maker / "mine.yaml")
    with monkeypatch.context() as patch:
        patch.chdir(maker)
        from sparsedp.cli.config.load import load_config
        from sparsedp.cli.run import run_training

        run_training(load_config("mine.yaml"), Path("run"), should_stop=lambda step: step == 1)
    sys.modules.pop("trust_mine")
    sys.path[:] = [path for path in sys.path if "maker" not in path]
    target = Path("handed")
    (maker / "run").rename(target)
    for place in (target, target / "private", target / "release"):
        write(place / "unused.yaml")  # code beside
    if changes:
        path = target / "private/config.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    Path("../maker/trace").unlink()
    Path("trust_mine.py").unlink()
    return target


@pytest.mark.parametrize("command", [["train", "--resume"], ["evaluate"]], ids=lambda c: c[0])
def test_a_folder_runs_nothing_that_lies_in_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = handed_over(monkeypatch)
    err = refused(capsys, *command, str(run))
    assert "is not trusted to choose what runs here" in err and "--code" in err and "--trust trust_mine" in err
    # Not even if its record of where the code came from says so.
    record = run / "private/code.json"
    for configuration in (run / "private/unused.yaml", Path("../maker/mine.yaml")):
        values = {
            "configuration": str(configuration.absolute()),
            "trusted": ["trust_mine", "os"],
            "files": {},
            "sha256": {},
        }
        record.write_text(json.dumps(values))
        refused(capsys, *command, str(run))
    # Nor if a file in it is given as the configuration.
    for place in ("unused.yaml", "private/config.yaml", "private/unused.yaml", "release/unused.yaml"):
        refused(capsys, *command, str(run), "--code", str(run / place))
        refused(capsys, "plan", str(run / place))
    monkeypatch.chdir(run)  # nor from within it
    refused(capsys, *command, ".")
    assert traces() == [] and "trust_mine" not in sys.modules


@pytest.mark.parametrize("command", [["train", "--resume"], ["evaluate"]], ids=lambda c: c[0])
@pytest.mark.parametrize("address", ["subprocess:check_output", "os:system", "trust_mine:os.system"])
def test_a_folder_cannot_name_other_code(
    command: list[str], address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = handed_over(monkeypatch, loss=address, data={"kind": address, "options": {"args": "touch trace"}})
    refused(capsys, *command, str(run))
    assert traces() == []


@pytest.mark.filterwarnings("default::sparsedp.SparseDPWarning")
def test_a_run_goes_on_with_the_code_that_it_was_started_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = handed_over(monkeypatch)
    mine = write(Path("project/mine.yaml"))
    maker = Path("../maker/trust_mine.py")
    (Path("project") / "trust_mine.py").write_text(maker.read_text() + "\n# changed\n")
    err = refused(capsys, "train", "--resume", str(run), "--code", str(mine))
    assert "is not what handed was started with" in err and "--trust trust_mine" in err
    assert traces() == []
    (Path("project") / "trust_mine.py").write_text(maker.read_text())
    assert main(["train", "--resume", str(run), "--code", str(mine), "--quiet"]) == 0
    assert main(["evaluate", str(run), "--code", str(mine), "--quiet"]) == 0
    # Whoever says so may go on with changed code, and is told.
    (Path("project") / "trust_mine.py").write_text(maker.read_text() + "\n# changed\n")
    sys.modules.pop("trust_mine")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--code", str(mine), "--trust", "trust_mine", "--quiet"]) == 0
    assert capsys.readouterr().err.count("is not what handed was started with") == 1
    assert "--code is for --resume" in refused(capsys, "train", str(mine), "--code", str(mine))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch trace",)


def poisoned(original: bytes) -> bytes:
    """A file of torch's with another pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(original)) as source, zipfile.ZipFile(out, "w") as target:
        for record in source.infolist():
            content = pickle.dumps(Evil(), protocol=2) if record.filename.endswith("data.pkl") else source.read(record)
            target.writestr(record.filename, content)
    return out.getvalue()


def test_pickles_in_checkpoints_weights_and_counts_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("run")
    assert main(["train", "mine.yaml", "--run-dir", "run", "--quiet"]) == 0
    os.remove("trace")
    with pytest.raises(Exception):  # noqa: B017
        torch.load(io.BytesIO(poisoned((run / "release/model.pt").read_bytes())), weights_only=False)["x"]
    assert traces() == ["home/trace"], "the pickle is a live one"
    os.remove("trace")
    for file, command in (
        ("private/checkpoint.pt", ["train", "--resume", "run", "--code", "mine.yaml"]),
        ("release/model.pt", ["evaluate", "run", "--code", "mine.yaml"]),
    ):
        before = (run / file).read_bytes()
        (run / file).write_bytes(poisoned(before))
        refused(capsys, *command, "--quiet")
        (run / file).write_bytes(before)
    Path("counts.pt").write_bytes(poisoned((run / "release/model.pt").read_bytes()))
    refused(capsys, "plan", "mine.yaml", "--counts", "counts.pt")
    assert traces() == []


def test_a_refusal_names_the_place_and_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"loss: os:system is neither in a file beside mine.yaml .* give --trust os$"):
        Code(Path("mine.yaml")).find("os:system", "loss")
