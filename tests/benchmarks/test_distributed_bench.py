"""`python -m benchmarks distributed`: bytes are counted exactly, the model says what it is, and all of it ends on the page."""

from __future__ import annotations

import importlib.util
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from benchmarks.command import main, make_parser
from benchmarks.speed import budget
from benchmarks.speed.distributed import launch, options, scaling
from benchmarks.speed.distributed import measure as distributed
from benchmarks.speed.distributed.page import page
from benchmarks.speed.distributed.plots import write_plots
from benchmarks.speed.distributed.scaling import HOSTS, Constants
from benchmarks.speed.distributed.setting import VARIANTS, Setting
from benchmarks.speed.distributed.wire import WireMeter, bytes_sent
from rich.console import Console

from sparsedp.errors import SparseDPError

SETTING = {"model": "light", "sharding": "table_wise", "gigabytes": 0.01, "batch": 8, "ids": 1}
ROWS = {**SETTING, "sharding": "row_wise"}


def timing(best: float) -> dict[str, float]:
    return {"best": best, "median": 1.1 * best, "spread": 0.1 * best}


def row(variant: str, best: float, sent: float, setting: dict[str, Any] = SETTING) -> dict[str, Any]:
    return {
        "setting": setting, "ranks": 2, "variant": variant, **timing(best), "processor": timing(best), "rows_touched": 40.0,
        "stages": {"forward": best / 2}, "bytes": {"forward": sent / 2, "step": sent}, "dense_bytes": 100,
        "messages": {"all_to_all": 5, "all_reduce": 1}, "ratio_to_plain": {"best": best / 0.1, "median": best / 0.1},
        "processor_ratio_to_plain": {"best": best / 0.1, "median": best / 0.1}, "bytes_ratio_to_plain": sent / 1e6,
    }  # fmt: skip


def result(setting: dict[str, Any] = SETTING) -> dict[str, Any]:
    scaled = {
        "setting": setting, "variant": "adafest", "fixed": 0.1, "per_row": 1e-6, "rows_touched": 40.0,
        "measured": {"1": 0.1, "2": 0.123}, "model": {str(n): 0.1 + 0.001 * n for n in HOSTS},
        "model_bytes": {str(n): 1e6 * n for n in HOSTS},
    }  # fmt: skip
    ranks = [
        {"built_seconds": 1.0, "seconds": [0.9, 0.07, 0.06], "resident_bytes": 6e9, "peak_bytes": peak}
        for peak in (6.5e9, 6.6e9)
    ]
    ways = {name: {**timing(0.001), "share_of_step": 0.0125} for name in ("PyTorch", "TorchRec", "loop", "FBGEMM")}
    return {
        "benchmark": "distributed", "ranks": 2, "machine": {}, "libraries": {"torchrec": "1.8.0"},
        "rows": [row("plain", 0.1, 1e6, setting), row("adafest", 0.12, 1.05e6, setting), row("exponential", 0.3, 1.2e6, setting)],
        "scaling": {"latency": 5e-5, "bandwidth": 2e9, "messages": {}, "rows": [scaled]},
        "lookups": [{"model": "dlrm", "batch": 8, "tables": 26, "step": timing(0.5), "ways": ways}],
        "apart": [{
            "setting": {**ROWS, "model": "many"}, "collection": {**timing(0.02), "messages": 13}, "apart": {**timing(0.07), "messages": 88},
        }],
        "large": {
            "setting": {**ROWS, "model": "one", "gigabytes": 12}, "table_bytes": 12 * 10**9, "left_out": None,
            "rows": [{"variant": "lazydp", "ranks": ranks}],
        },
    }  # fmt: skip


# ---------------------------------------------------------------------- what is sent


def test_every_byte_that_is_written_is_counted_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = bytes_sent()
            for size in (1, 100_000):  # the second is more than is sent at once
                one.sendall(b"x" * size)
            assert bytes_sent() - before == 100_001  # whether it was received or not
            left = 100_001
            while left:
                left -= len(other.recv(1 << 20))
            assert bytes_sent() - before == 100_001
            other.sendall(b"x" * 7)  # those of both directions, as each was written here
            assert bytes_sent() - before == 100_008


def test_a_meter_gives_each_stage_what_is_sent_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0
    monkeypatch.setattr("benchmarks.speed.distributed.wire.bytes_sent", lambda: sent)
    meter = WireMeter()
    for _ in range(2):
        with meter("forward"):
            sent += 10
            with meter("settling"):
                sent += 4
        sent += 1  # between the stages
        meter.lap()
    assert meter.take() == {"forward": 10, "settling": 4, "step": 15}
    with pytest.raises(SparseDPError, match="No step"):
        WireMeter().take()


# ---------------------------------------------------------------------- the model of more hosts


def test_the_model_on_one_host_is_what_was_measured_there() -> None:
    one, double = row("eana", 0.1, 0.0), {**row("eana", 0.15, 0.0), "rows_touched": 70.0}
    for second in (double, {**double, "best": 0.9}, {**double, "best": 0.05}):  # as noise may have it
        work = scaling.work_of(one, second)
        assert min(work) >= 0
        assert scaling.seconds(1, row("eana", 0.2, 1e6), one, work, Constants(1e-4, 1e9), 100) == pytest.approx(0.1)


def test_the_model_on_two_hosts_sends_what_was_counted_there() -> None:
    for setting in (SETTING, ROWS):
        for variant in ("plain", "adafest"):
            assert scaling.wire_bytes(2, row(variant, 0.1, 1e6, setting), 100) == pytest.approx(1e6)
            assert scaling.wire_bytes(1, row(variant, 0.1, 1e6, setting), 100) == 0


def test_row_wise_sums_grow_with_the_hosts_and_the_rest_does_not() -> None:
    table_wise = scaling.wire_bytes(64, row("adafest", 0.1, 1e6), 100)
    assert table_wise == pytest.approx(2e6 * 63 / 64)
    by_rows = {"forward": 6e5, "backward": 4e5, "step": 1e6}
    private = scaling.wire_bytes(64, {**row("adafest", 0.1, 1e6, ROWS), "bytes": by_rows}, 100)
    assert private == pytest.approx(6e5 * 63 + 4e5 * 2 * 63 / 64)
    plain = scaling.wire_bytes(64, {**row("plain", 0.1, 1e6, ROWS), "bytes": by_rows}, 100_000)
    assert plain == pytest.approx(9e5 * 63 + 1e5 * 2 * 63 / 64)


def test_rounds_cost_latency_and_bytes_bandwidth() -> None:
    one = row("adafest", 0.1, 0.0)
    of = lambda constants: scaling.seconds(4, row("adafest", 0.1, 1e6), one, (0.1, 0.0), constants, 100)  # noqa: E731
    assert of(Constants(1e-3, 1e18)) == pytest.approx(0.1 + 1e-3 * 3 * (5 + 2))  # an all-reduce goes around twice
    assert of(Constants(0.0, 1e7)) == pytest.approx(0.1 + 1.5e6 / 1e7)
    found = scaling.constants_of({"1000": timing(1e-4), "2001000": timing(1.1e-3)})
    assert found == Constants(1e-4, pytest.approx(1e9))  # half of the bytes stay on their rank


# ---------------------------------------------------------------------- the page, the budget, the command


def test_the_page_says_all_of_it(tmp_path: Path) -> None:
    text = page(result(), ["distributed_ratios.png"])
    assert "| AdaFEST | 120 (132 ± 12) | 1.2 (1.2) | 1.2 (1.2) | 1,050 | 1.05 | 6 |" in text
    assert "a model, not a measurement" in text and "50 µs" in text and "2.00 GB a second" in text
    assert "it says 0.829 to 0.829 times what was measured" in text  # 0.102 / 0.123
    assert "| 132 | 164 | 0.829 | 64 |" in text, "beside the last hosts"
    assert "12 GB, divided among two processes" in text and "| LazyDP | 3 | 70 | 6.50 | 6.60 | 13.10 |" in text
    assert (
        "70 ms and 88 messages with 26 tables divided one by one" in text
        and "20 ms and 13 in a collection (3.5 times as long)" in text
    )
    assert "| dlrm, 26 tables | 550 | 1.10 (1.2 %) |" in text.replace("1.3 %", "1.2 %")
    assert "(distributed_ratios.png)" in text
    pytest.importorskip("matplotlib")
    assert write_plots(result(), tmp_path) == ["distributed_ratios.png", "distributed_scaling.png"]
    assert all(
        (tmp_path / name).stat().st_size > 1000 for name in ("distributed_ratios.png", "distributed_scaling.png")
    )


def test_the_page_names_the_stages_that_take_longer() -> None:
    plain = {**row("plain", 0.1, 1e6), "stages": {"forward": 0.04, "backward": 0.05, "update": 0.002}}
    stages = {
        "forward": 0.07,
        "settling": 0.03,
        "backward": 0.02,
        "sums": 0.03,
        "ranks": 0.01,
        "selection": 0.08,
        "noise": 0.001,
    }
    slow = {**row("exponential", 0.3, 1.2e6), "stages": stages}
    text = page({**result(), "rows": [plain, row("adafest", 0.12, 1.05e6), slow, row("eana", 0.2, 1e6)]}, [])
    assert (
        "1 id(s) a feature: exponential, EANA. exponential, 3 times TorchRec's 100 ms: selection +80.0 ms, forward +60.0 ms, "
        "the rest of the step +51.0 ms." in text
    )  # backward and sums together take 8 ms more, and noise 1 ms, of 200
    assert "More than 1.1 times as much is sent by exponential (light model, by tables" in text
    text = page({**result(), "rows": [plain, row("adafest", 0.12, 1.05e6)]}, [])
    assert "No private step takes more than 1.25 times as long." in text and "is sent by none." in text


def test_no_model_is_fitted_to_a_quick_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def on_ranks(ranks: int, name: str, **asked: Any) -> list[Any]:
        if name == "time_messages":
            return [{"1000": timing(1e-4), "2001000": timing(1.1e-3)}]
        measured.append((ranks, asked["setting"]["batch"]))
        return [{variant: row(variant, 0.1 * ranks, 1e6, asked["setting"]) for variant in asked["variants"]}]

    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(distributed, "on_ranks", on_ranks)
    monkeypatch.setattr(distributed, "require_torchrec", lambda: None)
    monkeypatch.setattr(distributed, "version", lambda name: "1")
    for full, expected in ((False, [(2, 8), (1, 8)]), (True, [(2, 8), (1, 8), (1, 16)])):
        measured.clear()
        found = distributed.bench_distributed(
            [Setting(**SETTING)], large=1, repeats=1, full=full, variants=["eana"], tasks=("steps", "scaling")
        )
        assert measured == expected, "what the steps have measured is not measured again"
        assert all(("model" in one) == full for one in found["scaling"]["rows"])
        assert ("fitted to a full run alone" in page(found, [])) != full
        options.show(Console(file=io.StringIO()), found)
        pytest.importorskip("matplotlib")
        assert ("distributed_scaling.png" in write_plots(found, tmp_path)) == full


def test_the_page_of_a_part_of_the_tasks(tmp_path: Path) -> None:
    nothing = {
        **result(),
        "rows": [],
        "scaling": None,
        "lookups": [],
        "apart": [],
        "large": {**result()["large"], "left_out": "too little"},
    }
    assert "Left out: too little." in page(nothing, [])
    pytest.importorskip("matplotlib")
    assert write_plots(nothing, tmp_path) == []


def test_the_budget_has_time_and_bytes() -> None:
    text = budget.page({"distributed": result()})
    assert (
        "| sharded, private / TorchRec, one id a feature | light table_wise adafest | at most 1.25 | 1.2 | yes |"
        in text
    )
    assert "| light table_wise exponential | at most 1.25 | 3 | no |" in text
    assert "| sharded, bytes sent, private / TorchRec | light table_wise adafest | at most 1.1 | 1.05 | yes |" in text
    assert "| light table_wise exponential | at most 1.1 | 1.2 | no |" in text
    more_ids = budget.page({"distributed": result({**SETTING, "ids": 10})})
    assert "sharded" not in more_ids


def test_options_choose_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def bench(settings: list[Setting], **others: Any) -> dict[str, Any]:
        asked.update(settings=settings, **others)
        return {}

    monkeypatch.setattr(options, "bench_distributed", bench)
    options.measure(make_parser().parse_args(["distributed"]))
    assert [(s.model, s.sharding, s.ids) for s in asked["settings"]] == [
        (model, sharding, 1) for model in ("dlrm", "light") for sharding in ("table_wise", "row_wise")
    ]
    assert list(asked["variants"]) == [name for name in VARIANTS if name != "plain"]
    argv = [
        "distributed",
        "--quick",
        "--task=large",
        "--large=12",
        "--sharding=column_wise",
        "--model=light",
        "--ids=10",
    ]
    options.measure(make_parser().parse_args(argv))
    assert asked["settings"] == [Setting("light", "column_wise", 0.01, 128, 10)]
    assert asked["tasks"] == ["large"] and asked["large"] == 12


def test_a_table_for_which_there_is_no_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.memory_lacking(12 * 10**9, 19 * 10**9) is None
    monkeypatch.setattr(distributed, "require_torchrec", lambda: None)
    monkeypatch.setattr(distributed, "version", lambda name: "1")
    monkeypatch.setattr(distributed, "available_memory", lambda: 17 * 10**9)
    found = distributed.bench_distributed([Setting(**SETTING)], large=12, repeats=1, tasks=("large",))
    assert found["large"]["left_out"] == "17.0 GB of memory are available and 18.6 GB are needed"
    assert found["large"]["rows"] == [] and "Left out" in page(found, [])


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is not None, reason="TorchRec is installed")
def test_without_torchrec_it_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distributed", "--quick"]) == 2
    assert "pip install" in capsys.readouterr().err


# ---------------------------------------------------------------------- real ranks


@pytest.mark.distributed
def test_a_real_run_ends_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchrec")
    file = tmp_path / "result.json"
    argv = ["distributed", "--model=light", "--sharding=table_wise", "--gigabytes=0.001", "--batch=16", "--repeats=1"]
    argv += ["--large=0.01", "--variant=eana", "--variant=adafest", "--task=steps", "--task=large", "--task=apart"]
    argv += [f"--json={file}"]
    assert main(argv) == 0
    found = json.loads(file.read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "eana", "adafest"]
    for name, one in rows.items():
        assert one["best"] > 0 and one["processor"]["best"] > 0
        assert sum(sent for stage, sent in one["bytes"].items() if stage != "step") <= one["bytes"]["step"]
        assert one["messages"]["all_to_all"] >= 5, name
    # Of AdaFEST's counts and mask, 9 bytes for each touched row, about half go to the other rank.
    counted = rows["adafest"]["bytes"]["selection"] - rows["eana"]["bytes"]["selection"]
    assert 3 < counted / rows["adafest"]["rows_touched"] < 9
    assert rows["plain"]["bytes"]["forward"] == pytest.approx(rows["eana"]["bytes"]["forward"], rel=0.02)
    assert [len(of["ranks"]) for of in found["large"]["rows"]] == [2, 2]
    (apart,) = found["apart"]  # what comes after the backward pass is not sent table by table
    assert apart["apart"]["messages"] > apart["collection"]["messages"] == sum(rows["eana"]["messages"].values())
    assert "light model, by tables" in capsys.readouterr().out
    assert "# Tables in several processes" in page(found, [])


@pytest.mark.distributed
def test_a_rank_that_fails_ends_the_others() -> None:
    pytest.importorskip("torchrec")
    wrong = {**SETTING, "sharding": "no such sharding"}
    with pytest.raises(SparseDPError, match=r"(?s)Rank \d of 2 failed in 'measure_steps'.*no such sharding"):
        launch.on_ranks(2, "measure_steps", setting=wrong, variants=["eana"], repeats=1)


def test_ranks_are_ended_before_the_machine_has_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "available_memory", lambda: 0)
    with pytest.raises(SparseDPError, match="GB of memory are left"):
        launch.on_ranks(1, "look_up", batch=8, repeats=1)
