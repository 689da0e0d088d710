"""What the documentation refers to is there: pages and their sections, files, and names of the package."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

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


# Every link of the documentation that leads out of it. Nothing of a network is asked for in tests: whether they lead somewhere is
# for a person to look at, here in one place.
EXTERNAL_LINKS = {
    "https://arxiv.org/abs/1605.08294",
    "https://arxiv.org/abs/2110.03620",
    "https://docs.pytorch.org/docs/stable/elastic/run.html",
    "https://github.com/meta-pytorch/torchrec",
}


def test_external_links_are_listed_and_have_the_form_of_links() -> None:
    pages = [*PAGES, *sorted((DOCS / "tutorials").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
    links = {link for page in pages for link in re.findall(r"[a-z]+://[^\s)\]>\"'`]+", page.read_text())}
    assert {link for link in links if not re.match(r"http://(127\.0\.0\.1|localhost)\b", link)} == EXTERNAL_LINKS
    for link in EXTERNAL_LINKS:
        parts = urlsplit(link)
        assert parts.scheme == "https" and parts.path and not link.endswith((".", ",")), link
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]+", parts.netloc), link


@pages
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert not re.findall(r"\b(?:MEASURED|APART|TODO|FIXME|[A-Z]+_FIGURES)\b", page.read_text(encoding="utf-8"))


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


class ModelOfReadme(torch.nn.Module):
    """What README.md calls MyModel: a mix of tables and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.site, self.ad = torch.nn.Embedding(50, 4), torch.nn.Embedding(30, 4)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, site: torch.Tensor, ad: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.site(site), self.ad(ad)], 1)).squeeze(1)


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")  # the delta of the README is for more data
def test_the_loop_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text().split("## Your own model\n")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(rows, (4096,), generator=generator) for rows in (50, 30)]
    dataset = torch.utils.data.TensorDataset(*ids, torch.rand(4096, generator=generator).round())
    exec(compile(block[1], "README.md", "exec", dont_inherit=True), {"MyModel": ModelOfReadme, "dataset": dataset})
    assert "Privacy statement: epsilon" in capsys.readouterr().out


# ------------------------------------------------------------------ the reference and the tutorials


def pages_module() -> Any:
    spec = importlib.util.spec_from_file_location("mkdocs_pages", DOCS / "mkdocs_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name() -> None:
    """All of `__all__`, of the package and of those below it that users import from."""
    made = pages_module()
    nav = (ROOT / "mkdocs.yml").read_text()
    internal = {"capture", "sampling", "tables"}  # for those who extend it: docs/extending.md
    for init in sorted((ROOT / "src" / "sparsedp").glob("*/__init__.py")):
        package = init.parent.name
        if "__all__" in init.read_text() and package not in internal:
            assert package in made.PACKAGES, package
    for package in made.PACKAGES:
        assert f"reference/{package}.md" in nav
        dotted = "sparsedp" if package in ("sparsedp", "further") else f"sparsedp.{package}"
        page = made.reference(package)
        names = made.LISTED.get(package) or importlib.import_module(dotted).__all__
        for name in names:
            assert f"::: {dotted}.{name}\n" in page or f"## `sparsedp.{name}`" in page, f"{dotted}.{name}"


@pages
def test_names_in_the_guide_are_in_the_reference(page: Path) -> None:
    made = pages_module()
    listed = {
        f"sparsedp.{name}" if package in ("sparsedp", "further") else f"sparsedp.{package}.{name}"
        for package in made.PACKAGES
        for name in made.public_names(package)
    }
    for dotted in re.findall(r"\bsparsedp(?:\.\w+)+", page.read_text()):
        parts = dotted.split(".")
        if parts[-1] in ("py", "pt", "json", "yaml") or parts[1] in ("capture", "cli"):
            continue
        if (ROOT / "src" / Path(*parts)).with_suffix(".py").exists() or (ROOT / "src" / Path(*parts)).is_dir():
            continue  # a module
        known = any(dotted == name or dotted.startswith(f"{name}.") for name in listed)
        assert known, f"{dotted} in {page.name} is in no page of the reference"
    for dotted in imported_names(page.read_text()):
        assert dotted in listed or is_package(dotted), (
            f"{dotted}, imported in {page.name}, is in no page of the reference"
        )


def imported_names(text: str) -> set[str]:
    """What code of a page imports of the package: sparsedp.x.y for `from sparsedp.x import y, z as w`, over several lines too."""
    names = set()
    for module, several, one in re.findall(
        r"^\s*(?:>>> )?from (sparsedp(?:\.\w+)*) import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE
    ):
        for name in re.split(r"[,\n]", re.sub(r"#.*", "", several or one)):
            if name.strip():
                names.add(f"{module}.{name.split()[0]}")
    return names


def is_package(dotted: str) -> bool:
    return (ROOT / "src" / Path(*dotted.split("."))).is_dir()


def test_imports_of_a_page_are_found_in_every_form() -> None:
    text = "from sparsedp.a import b, c as d  # e\n    from sparsedp import (\n    f,  # g\n    h,\n)\nfrom sparsedpx import y\n"
    assert imported_names(text) == {"sparsedp.a.b", "sparsedp.a.c", "sparsedp.f", "sparsedp.h"}


def tutorial_runner() -> Any:
    spec = importlib.util.spec_from_file_location("run_tutorial", DOCS / "run_tutorial.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TUTORIAL = """# %% [markdown]
# # Title
#
# Text.

# %%
import warnings

x = 20
print("printed")
warnings.warn("careful")
x + 1

# %%
y = x

# %%
# !echo shell && pwd
"""


def test_a_tutorial_is_run_cell_by_cell() -> None:
    cells = tutorial_runner().run(TUTORIAL)
    assert [cell["kind"] for cell in cells] == ["markdown", "code", "code", "shell"]
    assert cells[0]["text"] == "# Title\n\nText."
    assert cells[1]["output"] == "UserWarning: careful\nprinted\n21\n" and cells[2]["output"] == ""
    assert cells[3]["output"].startswith("shell\n/")


@pytest.mark.parametrize("last", ["1 / 0", "# !false", "undefined", "# !sparsedp_no_such_command"])
def test_a_tutorial_that_fails_says_so(last: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        tutorial_runner().run(f"# %%\n1\n\n# %%\n{last}\n")


def test_each_tutorial_is_in_the_navigation() -> None:
    nav, tutorials = (ROOT / "mkdocs.yml").read_text(), sorted((DOCS / "tutorials").glob("*.py"))
    assert tutorials
    for script in tutorials:
        assert f"tutorials/{script.stem}.md" in nav
        compile(script.read_text(), script.name, "exec")
        for target in re.findall(r"\]\(\.\./([^)#]+)", script.read_text()):
            assert (DOCS / target).is_file(), target


def test_the_readmes_speed_is_what_was_measured() -> None:
    claim = re.search(
        r"takes ([\d.]+) times as long as plain PyTorch's with AdaFEST, and ([\d.]+) times with LazyDP",
        " ".join((ROOT / "README.md").read_text().split()),
    )
    budget = (DOCS / "speed" / "budget.md").read_text()
    rows = dict(
        re.findall(
            r"^\| private step / plain PyTorch, pCTR and DLRM \| pCTR (\w+) \| [^|]* \| ([\d.]+) \|", budget, re.M
        )
    )
    assert claim is not None and claim.groups() == (rows["adafest"], rows["lazydp"])


def test_constraints_pin_each_package_once_for_every_python() -> None:
    """Two lines of a package are for Python 3.10 and for newer ones: pip would take neither otherwise."""
    lines: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin, _, marker = line.partition(";")
            lines.setdefault(re.split("==", pin)[0].lower(), []).append(marker.strip())
    for name, markers in lines.items():
        both = ['python_version < "3.11"', 'python_version >= "3.11"']
        assert markers == [""] or sorted(markers) == both or len(markers) == 1, f"{name}: {markers}"
