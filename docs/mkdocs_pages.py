"""Pages of the documentation's site that are made, not written: the start, tutorials as they ran, every public name."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "sparsedp", "accounting", "convex", "nn", "models", "data", "audit", "mechanisms", "distributed", "integrations", "further",
)  # fmt: skip
# Public names that no package lists: each integration imports what its extra brings, and the others are for few.
LISTED = {
    "integrations": [
        "tensorboard.TensorBoard",
        "transformers.PrivateTrainer",
        "transformers.softmax_over_table",
        "lightning.PrivacyCallback",
    ],
    "further": [
        "prediction.predict",
        "prediction.find_threshold",
        "prediction.TouchStatistics",
        "accounting.search.search_epsilon",
        "errors.Refusal",
        "errors.UnsupportedError",
        "capture.units.Mixed",
        "capture.expressions.place_linear",
        "capture.ops.helpers.positions",
        "capture.ops.registry.NotThisForm",
        "capture.ops.registry.axis_rule",
        "capture.ops.registry.use_rule",
    ],
}


def on_files(files: Files, config: Any) -> Files:
    from mkdocs.structure.files import File  # what is below is tested without mkdocs

    files.append(File.generated(config, "index.md", content=start()))
    for script in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        cells = run_tutorial(script)
        files.append(File.generated(config, f"tutorials/{script.stem}.md", content=tutorial(script.stem, cells)))
        files.append(File.generated(config, f"tutorials/{script.stem}.ipynb", content=notebook(cells)))
    for name in PACKAGES:
        files.append(File.generated(config, f"reference/{name}.md", content=reference(name)))
    return files


def start() -> str:
    """The README, whose links lead from the folder above. Files that are no pages have no links here."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+?)\)", _link_to_page, text)


def _link_to_page(link: re.Match[str]) -> str:
    page = link[2].partition("#")[0]
    return link[0] if (ROOT / "docs" / page).is_file() else link[1]


def run_tutorial(script: Path) -> list[dict[str, str]]:
    """Its cells with what they gave, run in an empty folder. One that fails ends the build."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    code = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "docs" / "run_tutorial.py"), str(script)],
            cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": code}, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"The tutorial {script.name} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def tutorial(name: str, cells: list[dict[str, str]]) -> str:
    """The page of a tutorial that ran."""
    parts = []
    for cell in cells:
        if cell["kind"] == "markdown":
            parts.append(cell["text"])
            continue
        language = "bash" if cell["kind"] == "shell" else "python"
        parts.append(f"```{language}\n{cell['text']}\n```")
        if output := "\n".join(line.rstrip() for line in cell["output"].splitlines()).strip("\n"):
            parts.append(f"```text\n{output}\n```")
    parts.append(f"This page was run when it was built. [It as a notebook]({name}.ipynb).")
    return "\n\n".join(parts) + "\n"


def notebook(cells: list[dict[str, str]]) -> str:
    """The same for Jupyter."""
    made: list[dict[str, Any]] = []
    for i, cell in enumerate(cells):
        kind = "markdown" if cell["kind"] == "markdown" else "code"
        text = re.sub("^", "!", cell["text"], flags=re.MULTILINE) if cell["kind"] == "shell" else cell["text"]
        one: dict[str, Any] = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": text}
        if kind == "code":
            output = {"output_type": "stream", "name": "stdout", "text": cell["output"]}
            one |= {"execution_count": None, "outputs": [output] if cell["output"] else []}
        made.append(one)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def reference(package: str) -> str:
    """Every public name of the package."""
    dotted = "sparsedp" if package in ("sparsedp", "further") else f"sparsedp.{package}"
    names = public_names(package)
    lines = ["# Further names" if package == "further" else f"# {dotted}", ""]
    for name in names:
        if package == "sparsedp" and name in PACKAGES:
            lines += [f"## `sparsedp.{name}`", "", f"[A package of its own]({name}.md).", ""]
        else:
            lines += [f"::: {dotted}.{name}", ""]
    return "\n".join(lines)


def public_names(package: str) -> list[str]:
    """Those in its `__all__`, which is read without importing anything."""
    if package in LISTED:
        return LISTED[package]
    folder = ROOT / "src" / "sparsedp"
    source = (folder if package == "sparsedp" else folder / package) / "__init__.py"
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise ValueError(f"{source} has no __all__")
