"""What the documentation refers to is there: pages and their sections, files, and names of the package."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from documentation import DOCS

ROOT = DOCS.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FOLDERS = [ROOT, ROOT / "src", ROOT / "src" / "sparsedp"]  # where files are named from
pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{target} in {page.name}"
        assert not anchor or anchor in anchors(there), f"{target} in {page.name}"


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    """`capture/x.py` and its like, written with a folder; tests/x.py and the like also within commands."""
    text = page.read_text()
    named = re.findall(r"`([\w./-]+/[\w./-]*)`", without_code(text))
    named += re.findall(r"(?<![\w/.-])(?:tests|src|benchmarks|examples)/[\w/-]+\.\w+", text)
    for name in named:
        if name.startswith((".", "/", "runs/", "ml-1m", "release/", "private/", "$")):
            continue  # of a user, not of the repository
        assert any((folder / name).exists() for folder in FOLDERS), f"{name} in {page.name}"


@pages
def test_names_of_the_package_exist(page: Path) -> None:
    for dotted in re.findall(r"\bsparsedp(?:\.\w+)+", page.read_text()):
        _, *parts = dotted.split(".")
        if parts[-1] in ("py", "pt", "json", "yaml"):
            continue
        found = importlib.import_module("sparsedp")
        for at, part in enumerate(parts):
            if not hasattr(found, part):
                module = ".".join(["sparsedp", *parts[: at + 1]])
                if parts[0] == "integrations" and at == 1 and not is_installed(part):
                    assert all(re.search(rf"^(class|def) {name}\b", source_of(module), re.M) for name in parts[2:])
                    break
                importlib.import_module(module)
            found = getattr(found, part)


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def source_of(module: str) -> str:
    """Of an integration with a package that is not installed here."""
    return (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
