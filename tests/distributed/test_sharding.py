"""Tables are placed without TorchRec and without starting anything: completely, within memory, and with a way out."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsedp
from sparsedp.distributed import sizes
from sparsedp.distributed.placement import read_place
from sparsedp.distributed.sharding import Sharding, choose_sharding, in_bytes, parse_bytes
from sparsedp.distributed.sizes import Cluster, Held, TableUse, Work, sent_in_step
from sparsedp.errors import UnsupportedError

GB = 10**9


def kinds(chosen: Sharding) -> dict[str, str]:
    return {name: choice.kind for name, choice in chosen.tables.items()}


tables = st.lists(
    st.builds(
        TableUse, st.sampled_from("abcdefgh"), st.integers(1, 3000), st.sampled_from([1, 2, 6, 8, 16, 24, 64]),
        pooled=st.booleans(), whole=st.sampled_from([False, False, False, True]), lookups=st.floats(0.1, 5),
    ), min_size=1, max_size=8, unique_by=lambda table: table.name,
)  # fmt: skip
mechanisms = st.sampled_from(
    [
        sparsedp.DPSGD(),
        sparsedp.LazyDP(),
        sparsedp.AdaFEST(),
        sparsedp.EANA(),
        sparsedp.FEST(k=5),
        sparsedp.ExponentialSelection(k=3),
    ]
)


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(1, 3), st.integers(1, 4), st.none() | st.floats(1e3, 3e6), mechanisms, st.booleans())
def test_every_cell_has_an_owner_and_memory_is_kept(
    some: list[TableUse], hosts: int, local: int, memory: float | None, mechanism: sparsedp.Mechanism, shards: bool
) -> None:
    work, ranks = Work(10.0, mechanism, dense=7), hosts * local
    chosen = choose_sharding(some, ranks, hosts, memory, work=work, held=Held(state_share=1.0), by_shard_tables=shards)
    if shards:
        for table in some:
            choice = chosen.tables[table.name]
            assert read_place(choice.place)[0] == choice.kind, "shard_tables can do it"
            assert choice.kind == "data_parallel" or choice.kernel == "fused"
    held = np.zeros(ranks)
    for table in some:
        choice = chosen.tables[table.name]
        cells = np.zeros((table.rows, table.dim), dtype=int)
        assert len({part.rank for part in choice.parts}) == len(choice.parts), "one shard of a table on a rank"
        for part in choice.parts:
            rows, columns = part.shard.rows, part.shard.columns
            cells[rows.start : rows.stop, columns.start : columns.stop] += 1
            held[part.rank] += len(rows) * len(columns) * 4 * (
                2 + (not mechanism.selects)
            ) + 4 * mechanism.noise_waits * len(rows)
        assert (cells == (ranks if choice.kind == "data_parallel" else 1)).all()
        assert choice.kind == "data_parallel" or not table.whole
        if choice.kind == "table_row_wise":
            assert {rank // local for rank in choice.ranks} == {choice.host}
    np.testing.assert_allclose(chosen.memory["tables"], held)
    if memory is None:
        assert chosen.fits
    else:
        assert chosen.fits == (chosen.memory_of_ranks.max() <= 0.9 * memory / local)
    assert (chosen.sent.total >= 0).all() and (ranks > 1 or chosen.sent.total.sum() == 0)


def test_a_table_goes_where_it_fits() -> None:
    """On one rank, else by columns, else over the ranks of a host, else over all."""
    table = TableUse("t", 10_000_000, 64)  # 2.56 GB; with DP-SGD's gradient twice that

    def kind(memory: float, **more: Any) -> str:
        chosen = choose_sharding([TableUse("t", 10_000_000, **{"dim": 64, **more})], 16, 4, memory)
        assert chosen.fits, chosen.advice
        return chosen.tables["t"].kind

    assert kind(24 * GB) == "table_wise"
    assert kind(13 * GB) == "column_wise"
    assert kind(7 * GB, dim=66) == "table_row_wise"
    assert kind(7 * GB, dim=66, pooled=False) == "row_wise", "TorchRec has table_row_wise for bags alone"
    assert kind(2 * GB, dim=66) == "row_wise"
    assert not choose_sharding([table], 16, 4, 0.3 * GB).fits


def test_tables_are_spread_and_tiny_ones_copied() -> None:
    chosen = choose_sharding([TableUse(f"t{i}", 100_000, 16) for i in range(8)], 4)
    ranks = [choice.ranks[0] for choice in chosen.tables.values()]
    assert set(kinds(chosen).values()) == {"table_wise"} and sorted(ranks) == [0, 0, 1, 1, 2, 2, 3, 3]
    # A copy costs what its touched rows cost, and spares the lookups of all examples.
    work = Work(1000.0, sparsedp.AdaFEST())
    assert choose_sharding([TableUse("t", 3, 16)], 2, work=work).tables["t"].kind == "data_parallel"
    assert choose_sharding([TableUse("t", 100_000, 16)], 2, work=work).tables["t"].kind == "table_wise"


def test_no_other_single_placement_sends_less() -> None:
    table, cluster = TableUse("t", 5000, 32, lookups=3.0, touched=150.0, passed=40.0), Cluster(4, 2)
    work = Work(100.0, sparsedp.AdaFEST(), dense=1000)
    chosen = choose_sharding([table], 4, 2, work=work)
    from sparsedp.distributed.sharding import _by_rows

    others = {"row_wise": _by_rows(table, range(4)), "table_row_wise": _by_rows(table, range(2))}
    for kind, parts in others.items():
        assert sent_in_step([table], {"t": (kind, parts)}, cluster, work).total.sum() > chosen.sent.total.sum()  # type: ignore[dict-item]


def test_what_does_not_fit_is_said_with_what_would() -> None:
    some = [TableUse("big", 50_000_000, 64), TableUse("small", 1000, 64)]
    held = Held(process=GB // 2, state_share=1.0)
    chosen = choose_sharding(some, 8, 2, 16 * GB, held=held)
    assert not chosen.fits and chosen.advice is not None
    with pytest.raises(UnsupportedError, match="does not fit"):
        chosen.require_fits()
    assert "a smaller dim: 'big' has 64" in chosen.advice
    hosts, ranks = map(int, re.search(r"--hosts (\d+) --nproc (\d+)", chosen.advice).groups())  # type: ignore[union-attr]
    assert hosts > 2 and choose_sharding(some, ranks, hosts, 16 * GB, held=held).fits, "what it proposes must fit"


def test_more_hosts_are_not_proposed_where_they_do_not_help() -> None:
    """FEST counts the rows of all tables on every rank, and a table that is used whole is copied to every rank."""
    some = [TableUse("big", 500_000_000, 8)]
    work = Work(64.0, sparsedp.FEST(k=100, epsilon=1.0, delta=1e-6))
    advice = choose_sharding(some, 8, 2, 64 * GB, work=work).advice
    assert advice is not None and "--hosts" not in advice and "more hosts alone do not help" in advice
    assert "rows chosen beforehand" in advice and "fest counts all on every rank" in advice
    assert choose_sharding(some, 8, 2, 64 * GB, work=Work(64.0, sparsedp.AdaFEST())).fits
    whole = choose_sharding([TableUse("softmax", 500_000_000, 8, whole=True)], 8, 2, 64 * GB)
    assert whole.advice is not None and "more hosts alone do not help" in whole.advice


def test_mechanisms_send_what_they_need() -> None:
    table = TableUse("t", 1000, 8, touched=63.0, passed=20.0, lookups=0.5)
    purposes = {}
    for mechanism in (sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.AdaFEST(), sparsedp.ExponentialSelection(k=5)):
        sent = choose_sharding([table], 4, work=Work(64.0, mechanism, dense=10)).sent
        purposes[mechanism.name] = {name for name, values in sent.by_purpose().items() if values.any()}
    always = {"ids", "lookups", "rows", "clipped_rows", "dense", "agreement", "headers"}
    assert purposes == {
        "dpsgd": always, "lazydp": always | {"settling", "mask"}, "adafest": always | {"counts", "mask"},
        "exponential": always | {"picks", "mask"},
    }  # fmt: skip
    assert sizes.sent_once([table], 2, sparsedp.FEST(k=5)) == 8000
    assert sizes.sent_once([table], 2, sparsedp.AdaFEST()) == 0


def test_ranks_that_hosts_cannot_share() -> None:
    with pytest.raises(UnsupportedError, match="7 ranks cannot be divided evenly among 2 hosts"):
        choose_sharding([TableUse("t", 10, 8)], 7, 2)


def test_torchrec_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    assert choose_sharding([TableUse("t", 10, 8)], 2).fits


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256GB", 256 * GB),
        ("256GiB", 256 * 2**30),
        ("1.5 TB", 1.5e12),
        ("512 mib", 2**29),
        ("1000", 1000),
        ("3kB", 3000),
    ],
)
def test_amounts_of_memory(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "256G", "-3GB", "many", "0GB", "1e400GB", "nanGB", "12 parsecs"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="256GB or 256GiB"):
        parse_bytes(text)


def test_amounts_are_read_by_people() -> None:
    assert [in_bytes(count) for count in (12, 1500, 2.5e6, 3 * GB, 4e12)] == [
        "12 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]
    assert math.isclose(parse_bytes(in_bytes(2.5e6)), 2.5e6)


def test_noise_that_waits_has_no_copies_outside_of_collections() -> None:
    lazy = Work(64.0, sparsedp.LazyDP())
    tiny = TableUse("tiny", 9, 8, pooled=False, apart=True)
    assert kinds(choose_sharding([tiny], 2, work=lazy)) == {"tiny": "data_parallel"}
    assert kinds(choose_sharding([tiny], 2, work=lazy, by_shard_tables=True)) != {"tiny": "data_parallel"}
    with pytest.raises(UnsupportedError, match=r"6 columns.*lazydp cannot train copies"):
        choose_sharding([TableUse("odd", 9, 6, pooled=False, apart=True)], 2, work=lazy, by_shard_tables=True)


def test_tables_apart_have_messages_of_their_own() -> None:
    def headers(apart: bool) -> float:
        some = [TableUse(name, 100, 8, pooled=False, apart=apart) for name in "abc"]
        chosen = choose_sharding(some, 2, memory=3e3, work=Work(10.0, sparsedp.EANA()))
        assert set(kinds(chosen).values()) == {"row_wise"}
        return float(chosen.sent.headers[0])

    assert headers(True) == headers(False) + 2 * 4 * 144  # two more lookups of four messages
