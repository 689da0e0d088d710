"""Builds the source distribution and the wheel into dist/, installs the wheel into an empty environment and tries it there.

Run: make wheel
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
DIST = ROOT / "dist"

TYPED = """\
import sparsedp

epsilon: str = sparsedp.PrivacyEngine().get_epsilon(1e-6)  # of which a type checker has to complain
"""


def main() -> None:
    wheel = build()
    require_same_files(wheel)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        programs = install(wheel, elsewhere / "environment")
        try_commands(programs, elsewhere)
        require_types(programs / "python", elsewhere)
    print(f"{wheel.name} installs and works")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What the command prints. What Python was told of this repository, it forgets."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    print("$", *command, flush=True)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**inherited, **environment}, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        print(done.stdout)
        sys.exit(f"exit code {done.returncode}")
    return done.stdout


def build() -> Path:
    """The wheel, which is built out of the source distribution."""
    for old in (*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST, PIP_CONSTRAINT=str(CONSTRAINTS))
    (wheel,) = DIST.glob("*.whl")
    return wheel


def require_same_files(wheel: Path) -> None:
    """The wheel has every file of src that git knows, and nothing else: modules, configurations, py.typed, the command."""
    tracked = {Path(name).relative_to("src").as_posix() for name in run("git", "ls-files", "src").splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    if packed != tracked:
        missing, more = sorted(tracked - packed), sorted(packed - tracked)
        sys.exit(f"Missing in the wheel: {missing}. In the wheel, but not in git: {more}")


def install(wheel: Path, environment: Path) -> Path:
    """Where the programs of a new environment are that holds the wheel and what it asks for, and nothing else."""
    venv.create(environment, with_pip=True)
    programs = environment / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, wheel)
    run(programs / "python", "-m", "pip", "check")
    return programs


def try_commands(programs: Path, folder: Path) -> None:
    sparsedp = programs / "sparsedp"
    version = run(sparsedp, "--version", cwd=folder)
    assert version.startswith("sparsedp "), version
    small = "data.rows=4000", "data.scale=0.01", "training.epochs=1", "training.batch_size=400"
    settings = [word for setting in small for word in ("--set", setting)]
    run(sparsedp, "train", "demo", *settings, "--run-dir", "run", cwd=folder)
    shown = run(sparsedp, "export", "run", "--to", "released", cwd=folder)
    assert shown.startswith("Privacy statement: "), shown
    run(sparsedp, "sweep", "demo", "--list", cwd=folder)


def require_types(python: Path, folder: Path) -> None:
    """A type checker that looks into the environment knows the types of the package."""
    script = folder / "typed.py"
    script.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--python-executable={python}", script.name]
    found = subprocess.run(command, cwd=folder, text=True, capture_output=True).stdout
    assert 'expression has type "float", variable has type "str"' in found, found


if __name__ == "__main__":
    main()
