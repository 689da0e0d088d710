"""Pages of the documentation's site that are made, not written: the start, and the reference of every public name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGES = ("sparsedp", "accounting", "convex", "nn", "models", "data", "audit", "integrations")
INTEGRATIONS = [
    "tensorboard.TensorBoard",
    "transformers.PrivateTrainer",
    "lightning.PrivacyCallback",
]  # each imports what its extra brings


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=start()))
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


def reference(package: str) -> str:
    """Every public name of the package."""
    dotted = "sparsedp" if package == "sparsedp" else f"sparsedp.{package}"
    names = public_names(package)
    lines = [f"# {dotted}", ""]
    for name in names:
        if package == "sparsedp" and name in PACKAGES:
            lines += [f"## `sparsedp.{name}`", "", f"[A package of its own]({name}.md).", ""]
        else:
            lines += [f"::: {dotted}.{name}", ""]
    return "\n".join(lines)


def public_names(package: str) -> list[str]:
    """Those in its `__all__`, which is read without importing anything."""
    if package == "integrations":
        return INTEGRATIONS
    folder = ROOT / "src" / "sparsedp"
    source = (folder if package == "sparsedp" else folder / package) / "__init__.py"
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise ValueError(f"{source} has no __all__")
