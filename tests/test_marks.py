"""Tests that need a package of the extra `models` carry its mark: no make target runs them otherwise."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
# Packages that `make test` has not, and `make test-models` has.
PACKAGES = {
    "transformers", "peft", "tokenizers", "safetensors", "datasets", "accelerate", "pytorch_lightning", "huggingface_hub", "gguf",
    "torchmetrics",
}  # fmt: skip


def marked(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "models" for part in ast.walk(node))


def needs(node: ast.AST) -> set[str]:
    """Which of the packages it is skipped without."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "importorskip":
            name = part.args[0]
            assert isinstance(name, ast.Constant)
            names |= {str(name.value).partition(".")[0]} & PACKAGES
    return names


def test_whatever_needs_a_package_of_the_extra_is_marked() -> None:
    unmarked = []
    skipping = 0
    for path in sorted(TESTS.rglob("test_*.py")):
        if TESTS / "distributed" in path.parents:
            continue
        module = ast.parse(path.read_text())
        whole = [
            node
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and marked(node.value)
        ]
        for node in module.body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if not needs(node) or (isinstance(node, ast.FunctionDef) and not is_test):  # helpers are used by tests
                continue
            skipping += 1
            if not whole and not (is_test and any(marked(decorator) for decorator in node.decorator_list)):
                unmarked.append(f"{path.relative_to(TESTS)}:{node.lineno}")
    assert skipping > 20
    assert not unmarked


def test_the_make_target_runs_all_that_is_marked() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    assert "\n\t$(PYTEST) -m models $(PYTEST_ARGS)\n" in makefile
