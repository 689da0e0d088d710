"""The `sparsedp` command before torch is there: its help, its version, and what makes a shell complete it."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sparsedp
import sparsedp_command
from sparsedp.cli.main import main
from sparsedp_command import COMMANDS

ASK = """
import sys
sys.argv = ["sparsedp", *{arguments!r}]
import sparsedp_command
try:
    sparsedp_command.main()
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "numpy", "sparsedp", "importlib.metadata") if name in sys.modules]
print("ended", code, *heavy)
"""


@pytest.mark.parametrize(
    ("arguments", "ended"),
    [
        (["--help"], "0"),
        (["-h"], "0"),
        (["--version"], "0 importlib.metadata"),
        ([], "2"),
        (["trian"], "2"),
        (["--debug"], "2"),
    ],
)
def test_help_version_and_mistakes_need_no_torch(arguments: list[str], ended: str) -> None:
    # -S: what the environment's own start-up files import does not count.
    done = subprocess.run(
        [sys.executable, "-S", "-c", ASK.format(arguments=arguments)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(sparsedp.__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"ended {ended}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "demo"], "sparsedp: error: there is no command 'trian': did you mean 'train'?"),
        (["my.yaml"], "sparsedp: error: there is no command 'my.yaml': there are init, train, "),
    ],
)
def test_a_misspelt_command_is_told_the_nearest_one(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sparsedp", *words])
    with pytest.raises(SystemExit) as end:
        sparsedp_command.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_option_is_refused_beside_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["init", "clicks.csv", "--out", "x.yaml"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: sparsedp init ") and "--to CONFIG" in said
    assert said.endswith("sparsedp init: error: unrecognized arguments: --out x.yaml\n")


def test_ctrl_c_while_torch_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "sparsedp.cli.main":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["sparsedp", "train", "demo"])
    monkeypatch.delitem(sys.modules, "sparsedp.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert sparsedp_command.main() == 130
    assert capsys.readouterr().err == "sparsedp: interrupted\n"


def test_every_command_says_the_same_here_and_there() -> None:
    for name, description in COMMANDS.items():
        module = importlib.import_module(f"sparsedp.cli.commands.{name}")
        assert (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ") == description, name
    folder = Path(importlib.import_module("sparsedp.cli.commands").__path__[0])
    assert {path.stem for path in folder.iterdir() if not path.name.startswith("_")} == COMMANDS.keys()


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"sparsedp {sparsedp.__version__} (torch ")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_a_shell_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in (*COMMANDS, "secret-sharer", "epsilon"):
        assert re.search(rf"\b{word}\b", text), word
    for option in ("run-dir", "target-epsilon", "markdown"):
        assert option in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed: its script was not parsed")
    parsed = subprocess.run([program, "-n"], input=text, text=True, capture_output=True)
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sparsedp tra", {"train"}),
        ("sparsedp audit secret", {"secret-sharer"}),
        ("sparsedp report --mark", {"--markdown"}),
        ("sparsedp completion ", {"bash", "zsh", "fish"}),
        ("sparsedp train my", {"my.yaml"}),
    ],
)
def test_bash_completes(typed: str, offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").touch()
    words = typed.split(" ")
    ask = f"""{script("bash", capsys)}
COMP_WORDS=({" ".join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}
COMP_LINE={typed!r}; COMP_POINT={len(typed)}
function_name=$(complete -p sparsedp | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function_name sparsedp {words[-1]!r} {words[-2]!r} 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash"], input=ask, capture_output=True, text=True, cwd=tmp_path)
    assert {line.strip() for line in done.stdout.splitlines() if line.strip()} == offered
