"""The registries of operations: what rules may import, and which rows a lookup reads."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp.capture.ops
from sparsedp.capture.ops.lookups import public_ids
from sparsedp.capture.ops.registry import AXIS_RULES, JOINT, SHAPE_IN_PLACE, VALUES_IN_PLACE, rows_read
from sparsedp.tables.guard import guard, looked_up

OPS = Path(sparsedp.capture.ops.__file__).parent
TABLE = torch.randn(10, 4)
IDS = torch.tensor([[3, 1], [3, 9]])


@pytest.mark.parametrize("path", sorted(OPS.glob("*.py")), ids=lambda path: path.stem)
def test_rules_know_the_protocol_and_not_the_capture(path: Path) -> None:
    allowed = ("sparsedp.capture.expressions", "sparsedp.capture.ids", "sparsedp.capture.units", "sparsedp.capture.uses",
               "sparsedp.capture.ops", "sparsedp.errors")  # fmt: skip
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparsedp"):
            assert str(node.module).startswith(allowed), f"{path.name} imports {node.module}"


def test_what_is_said_of_an_operation_goes_with_a_rule() -> None:
    assert set(AXIS_RULES) >= JOINT | VALUES_IN_PLACE | SHAPE_IN_PLACE


READ: list[tuple[Callable, Callable[[Tensor], tuple[tuple, dict[str, Any]]]]] = [
    (F.embedding, lambda table: ((IDS, table), {})),
    (F.embedding, lambda table: ((IDS,), {"weight": table})),
    (F.embedding_bag, lambda table: ((IDS, table), {"mode": "sum"})),
    (torch.embedding, lambda table: ((table, IDS), {})),
    (Tensor.__getitem__, lambda table: ((table, IDS), {})),
    (Tensor.__getitem__, lambda table: ((table, (IDS, slice(None))), {})),
    (Tensor.__getitem__, lambda table: ((table, (IDS, ...)), {})),
    (torch.index_select, lambda table: ((table, 0, IDS.flatten()), {})),
    (Tensor.index_select, lambda table: ((table,), {"dim": 0, "index": IDS.flatten()})),
]
NOT_READ: list[tuple[Callable, Callable[[Tensor], tuple[tuple, dict[str, Any]]]]] = [
    (F.embedding, lambda table: ((table, IDS), {})),  # the arguments in the wrong order
    (Tensor.__getitem__, lambda table: ((table, slice(3)), {})),
    (Tensor.__getitem__, lambda table: ((table, (IDS, 0)), {})),
    (Tensor.__getitem__, lambda table: ((table, (IDS, slice(2))), {})),
    (Tensor.__getitem__, lambda table: ((table, (slice(None), IDS[:, 1] % 4)), {})),
    (Tensor.__getitem__, lambda table: ((table, TABLE[:, 0] > 0), {})),
    (torch.index_select, lambda table: ((table, 1, IDS[0]), {})),
    (torch.add, lambda table: ((table, IDS), {})),
]


class _Owner:
    def before_read(self, name: str, ids: Tensor | None) -> None:
        raise AssertionError("nothing reads the values")


def _guarded() -> nn.Parameter:
    table = nn.Parameter(TABLE.clone())
    guard(table, _Owner(), "table")  # type: ignore[arg-type]
    return table


@pytest.mark.parametrize(("function", "arguments"), READ)
def test_the_rows_that_a_lookup_reads(function: Callable, arguments: Callable) -> None:
    rows = rows_read(function, *arguments(TABLE))
    assert rows is not None and rows.table is TABLE and rows.ids.flatten().tolist() == [3, 1, 3, 9]
    table = _guarded()
    ids = looked_up(function, *arguments(table), table)
    assert ids is not None and ids.flatten().tolist() == [3, 1, 3, 9]
    assert looked_up(function, *arguments(TABLE), table) is None  # a lookup in another one


@pytest.mark.parametrize(("function", "arguments"), NOT_READ)
def test_others_may_read_all_rows(function: Callable, arguments: Callable) -> None:
    table = _guarded()
    assert looked_up(function, *arguments(table), table) is None
    assert public_ids(function, *arguments(TABLE)) is None


def test_public_ids_count_from_the_end_and_leave_out_padding() -> None:
    ids = torch.tensor([0, 3, 9], dtype=torch.int32)
    assert public_ids(F.embedding, (ids, TABLE), {"padding_idx": -1}).tolist() == [0, 3, -1]  # type: ignore[union-attr]
    assert public_ids(F.embedding, (ids, TABLE, 3), {}).tolist() == [0, -1, 9]  # type: ignore[union-attr]
    assert public_ids(Tensor.__getitem__, (TABLE, ids - 1), {}).tolist() == [9, 2, 8]  # type: ignore[union-attr]


def test_a_result_that_is_not_the_rows_themselves_has_no_public_ids() -> None:
    assert public_ids(F.embedding_bag, (IDS, TABLE), {}) is None
    assert public_ids(torch.embedding, (TABLE, IDS), {}) is None  # whose padding is another argument
