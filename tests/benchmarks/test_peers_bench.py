"""`python -m benchmarks peers`: the judge of clip bounds, workers that die, hang or are not there, and a small real run."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.command import main, make_parser
from benchmarks.speed.peers import bounds, options
from benchmarks.speed.peers import measure as compare
from benchmarks.speed.peers.measure import Outcome, Peer, bench_peers, run_worker, take
from benchmarks.speed.peers.page import page
from benchmarks.speed.peers.problem import BATCHES, KINDS, Case, Problem, case

FOLDER = Path(compare.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")

# ------------------------------------------------------------------ the problem


def test_everyone_gets_the_same_data() -> None:
    problem = Problem(rows=1000, batch=64)
    batches = problem.batches()
    assert len(batches) == BATCHES
    for (ids, target), (again, _) in zip(batches, Problem(rows=1000, batch=64).batches()):
        assert ids.shape == (64, 8) and target.shape == (64,) and set(np.unique(target)) <= {0.0, 1.0}
        assert ids.min() >= 0 and ids.max() < 1000
        assert np.array_equal(ids, again)
    every = np.concatenate([ids.ravel() for ids, _ in batches])
    counts = np.sort(np.bincount(every, minlength=1000))[::-1]
    assert counts[0] > 10 * counts[100] > 0  # as popular as rank^-1.1
    table = np.empty((2500, 4), np.float32)
    Problem(rows=2500, dim=4).fill(table)
    assert np.array_equal(table[:1000], table[1000:2000]) and np.array_equal(table[:500], table[2000:])
    assert table.std() == pytest.approx(0.05, rel=0.1)


def test_the_threshold_selects_as_many_untouched_rows_as_are_touched() -> None:
    problem = Problem(rows=100_000)
    touched = len(np.unique(problem.batches()[0][0]))
    noise = np.random.default_rng(0).standard_normal(100_000) * np.sqrt(26)
    assert (noise > problem.threshold()).sum() == pytest.approx(touched, rel=0.15)


def test_parts_of_a_batch_fit_and_divide_it() -> None:
    assert Problem(rows=1000).units_at_a_time() == 1024
    assert Problem(rows=10_000).units_at_a_time() == 256
    assert Problem(rows=100_000_000).units_at_a_time() == 1


# ------------------------------------------------------------------ the judge


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_tells_right_from_wrong(kind: str) -> None:
    units = bounds.clipped_gradients(case(kind))
    # Every unit is clipped, so that whoever clips too little shows.
    assert [float(np.linalg.norm(unit)) for unit in units] == pytest.approx([case(kind).clip] * len(units))

    def found(parts: list[np.ndarray]) -> dict[str, Any]:
        total = sum(parts)
        without = [{"all": (total - part).tolist()} for part in parts] if len(parts) > 1 else []
        return bounds.judge({"case": kind, "all": {"all": total.tolist()}, "without": without})

    assert found(units)["outcome"] == "honours"
    longer = found([*units[:-1], 1.7 * units[-1]])
    assert longer["outcome"] == "exceeds" and longer["part"] == pytest.approx(1.7)
    assert found([0.9 * unit for unit in units])["outcome"] == "wrong sum"
    assert found([float("nan") * unit for unit in units])["outcome"] == "exceeds"
    assert bounds.judge({"case": kind, "refused": "no"}) == {"outcome": "refused", "reason": "no"}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A worker's script as a module: it imports its neighbours by their files, and reads its argument."""
    monkeypatch.setattr(sys, "argv", [name, json.dumps({"variant": "", "memory": None, "threads": 1 << 20})])
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(name)


def outcome(worker: ModuleType, variant: str, kind: str) -> dict[str, Any]:
    shared = sys.modules["worker"]
    return bounds.judge({"case": kind, **shared._clipped(worker.clipped_sum, variant, case(kind))})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["dpsgd", "lazydp", "adafest", "eana"])
def test_sparsedp_honours_the_bound(variant: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(load("worker_sparsedp", monkeypatch), variant, kind)["outcome"] == "honours"


@pytest.mark.parametrize(
    ("variant", "kind", "expected"),
    [
        ("hooks", "model", "honours"),
        ("hooks", "functional tie", "wrong sum"),
        ("hooks", "bag", "wrong sum"),
        ("ghost", "model", "honours"),
        ("ghost", "module tie", "refused"),
        ("ghost", "functional tie", "exceeds"),
        ("ghost", "bag", "exceeds"),
    ],
)
def test_opacus_failures_are_seen(variant: str, kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    found = outcome(load("worker_opacus", monkeypatch), variant, kind)
    assert found["outcome"] == expected
    assert expected != "exceeds" or found["part"] > 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_jax_privacy_honours_the_bound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax_privacy")
    assert outcome(load("worker_jax", monkeypatch), "", kind)["outcome"] == "honours"


def weights_after(worker: ModuleType, variant: str, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """All parameters after two steps."""
    nets = []
    make = worker.make_net
    monkeypatch.setattr(worker, "make_net", lambda *args, **options: nets.append(make(*args, **options)) or nets[-1])
    step = worker.make_step(variant, problem)
    step(0), step(1)
    monkeypatch.setattr(worker, "make_net", make)
    return torch.cat([parameter.detach().flatten() for parameter in nets[0].parameters()])


def test_steps_of_all_torch_peers_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, and with units that are not clipped, for plain PyTorch too; in parts or not."""
    pytest.importorskip("opacus")
    problem = Problem(rows=30, dim=4, hidden=5, batch=8, examples=80, noise_multiplier=0.0, clip=1e6, lr=1.0)
    opacus, mine = load("worker_opacus", monkeypatch), load("worker_sparsedp", monkeypatch)
    plain = weights_after(load("worker_torch", monkeypatch), "", problem, monkeypatch)
    start = torch.cat([p.detach().flatten() for p in mine.make_net(problem).parameters()])
    assert float((plain - start).norm()) > 0.01
    for variant in ("dpsgd", "lazydp", "eana"):
        torch.testing.assert_close(weights_after(mine, variant, problem, monkeypatch), plain, rtol=0, atol=1e-5)
    for variant in ("hooks", "ghost"):
        torch.testing.assert_close(weights_after(opacus, variant, problem, monkeypatch), plain, rtol=0, atol=1e-5)
    monkeypatch.setattr(Problem, "units_at_a_time", lambda self: 2)
    torch.testing.assert_close(weights_after(opacus, "hooks", problem, monkeypatch), plain, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ workers that fail

FAKE = """
import sys, time
sys.path.insert(0, {folder!r})
import numpy as np
from worker import Peer, importing, job, main
variant = job()["variant"]
with importing():
    if variant == "missing":
        import a_library_that_is_not_there
print("libraries print what they like")
def make_step(variant, problem):
    table, room = np.zeros((problem.rows, problem.dim), np.float32), []
    def step(number):
        time.sleep(0.001)
        if problem.rows >= 2000 and variant == "hungry":
            room.append(np.ones(1 << 27))
        if problem.rows >= 2000 and variant == "sleepy":
            time.sleep(600)
        if problem.rows >= 2000 and variant == "broken":
            raise ValueError("of no use")
    return step
epsilon = None if variant == "plain" else lambda variant, problem: (2.5 if variant == "ok" else float("inf"), "guess")
main(Peer(lambda: {{"fake": "1.0"}}, make_step, epsilon))
"""
NAMES = ("plain", "ok", "hungry", "sleepy", "broken", "missing")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker_fake.py"
    script.write_text(FAKE.format(folder=str(FOLDER)))
    peers = {name: Peer(name.title(), str(script), name) for name in NAMES}
    peers["adafest"] = peers.pop("ok")
    peers["elsewhere"] = Peer("Elsewhere", str(script), "ok", own_environment=True)
    monkeypatch.setattr(compare, "PEERS", peers)


def test_whatever_fails_is_said_and_the_rest_is_measured(fakes: None) -> None:
    result = bench_peers([500, 1000, 2000, 3000], peers=compare.PEERS, rounds=1, steps=3, limit=1.0, gigabytes=0.5)
    rows = {(row["variant"], row["rows"]): row for row in result["rows"]}
    assert {name for name, size in rows if size == 1000} == {"plain", "hungry", "sleepy", "broken", "adafest"}
    assert {name for name, size in rows if size == 2000} == {"plain", "adafest"}
    for row in rows.values():
        assert 0.001 <= row["best"] <= row["median"] and row["repeats"] == 3
        assert row["examples_per_second"] == pytest.approx(1024 / row["best"])
        assert row["ratio_to_plain"]["best"] == row["best"] / rows["plain", row["rows"]]["best"]
        assert row["extra_memory"]["share_of_table"] == row["extra_memory"]["bytes"] / (256 * row["rows"])
        assert row["extra_memory"]["bytes"] < 50e6
    reasons = {(gone["variant"], gone["rows"]): gone["reason"] for gone in result["left_out"]}
    assert reasons == {
        ("hungry", 2000): "out of memory (of 0.5 GB)",
        ("hungry", 3000): "not tried: at 2,000 rows out of memory (of 0.5 GB)",
        ("sleepy", 2000): "a step takes more than 1 s",
        ("sleepy", 3000): "not tried: at 2,000 rows a step takes more than 1 s",
        ("broken", 2000): "failed with exit code 1: ValueError: of no use",
        ("broken", 3000): "not tried: at 2,000 rows failed with exit code 1: ValueError: of no use",
    }
    peers = {peer["variant"]: peer for peer in result["peers"]}
    assert peers["missing"]["absent"] == "No module named 'a_library_that_is_not_there'"
    assert "--tensorflow-python" in peers["elsewhere"]["absent"]
    assert "epsilon" not in peers["plain"] and peers["adafest"]["epsilon"] == 2.5 and peers["hungry"]["epsilon"] is None
    json.dumps(result)
    text = page(result, ["peers_rows.png", "other.png"])
    assert "| 2,000 | Hungry | out of memory (of 0.5 GB) | - |" in text and "- Missing: absent: No module" in text
    assert "| Hungry | fake 1.0 | infinite | - |" in text and "| Ok | fake 1.0 | 2.500 (guess) | - |" in text
    assert "(peers_rows.png)" in text and "other.png" not in text


def test_rounds_add_up_and_slow_sizes_run_once(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SLOW", 0.0)
    said: list[str] = []
    result = bench_peers([500], peers=["adafest", "elsewhere"], rounds=2, steps=2, tensorflow_python="no/such/file", say=said.append)  # fmt: skip
    assert [row["repeats"] for row in result["rows"]] == [2, 2] and len(said) == 3
    assert "does not run" in result["peers"][2]["absent"]
    monkeypatch.setattr(compare, "SLOW", 10.0)
    result = bench_peers([500], peers=[], rounds=2, steps=2)
    assert [row["repeats"] for row in result["rows"]] == [4]


def worker(tmp_path: Path, code: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    return [sys.executable, "-S", str(script)]


def test_how_a_worker_ends(tmp_path: Path) -> None:
    for code, expected in {
        "print('@{\"done\": true}')": None,
        'print(\'@{"absent": "it"}\')': None,
        "import os; os.kill(os.getpid(), 9)": "out of memory",
        "raise MemoryError": "out of memory",
        'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory")': "out of memory",
        "import os; os.abort()": "failed with signal SIGABRT: no message",
        "raise SystemExit(3)": "failed with exit code 3: no message",
    }.items():
        assert run_worker(worker(tmp_path, code), limit=20.0)[1] == expected, code


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    hang = "import time; print('@{%s}', flush=True); time.sleep(600)"
    start = time.perf_counter()
    events, end = run_worker(worker(tmp_path, hang % '"built": 1'), limit=0.5)
    assert events == [{"built": 1}] and end == "a step takes more than 0.5 s"
    assert run_worker(worker(tmp_path, hang % '"start": 1'), 0.1, setup=0.5)[1] == "no answer within 0.5 s"
    assert time.perf_counter() - start < 60


def test_what_is_known_of_a_peer() -> None:
    done = {"rows": 10, "seconds": [1.0], "extra": 5}
    outcome = Outcome()
    take(outcome, [], "out of memory", [10], "none")
    assert outcome.absent == "none"  # it could not even start
    outcome = Outcome(facts={"versions": {}})
    take(
        outcome, [{"start": 10}, done, {"start": 20}, {"out_of_memory": 20}, {"done": True}], None, [10, 20, 30], "none"
    )
    assert outcome.seconds == {10: [1.0]} and outcome.extra == {10: 5}
    assert outcome.reasons == {20: "none", 30: "not tried: at 20 rows none"}
    take(outcome, [{"start": 10}], "failed", [10], "none")  # in a later round
    assert outcome.seconds == {10: [1.0]} and 10 not in outcome.reasons


# ------------------------------------------------------------------ the command


def test_the_command_knows_all_names() -> None:
    assert ("plain", *options.COMPARED) == tuple(compare.PEERS)
    for name in options.COMPARED:
        assert make_parser().parse_args(["peers", f"--peer={name}"]).peer == [name]
    assert all((FOLDER / peer.script).is_file() for peer in compare.PEERS.values())


@pytest.mark.slow  # three processes that import torch
def test_a_small_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opacus")
    argv = ["peers", "--quick", "--rows=300", "--repeats=1", "--steps=2", "--limit=120"]
    argv += ["--peer=adafest", "--peer=opacus_ghost"]
    argv += [f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "SparseDP, AdaFEST" in shown.out and "round 1/1" in shown.err
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["variant"] for row in result["rows"]] == ["plain", "opacus_ghost", "adafest"]
    assert result["left_out"] == [] and all(row["best"] > 0 for row in result["rows"])
    peers = {peer["variant"]: peer for peer in result["peers"]}
    assert 2.1 < peers["adafest"]["epsilon"] < 2.3 and 2.1 < peers["opacus_ghost"]["epsilon"] < 2.3
    assert {found["outcome"] for found in peers["adafest"]["bounds"].values()} == {"honours"}
    assert peers["opacus_ghost"]["bounds"]["functional tie"]["outcome"] == "exceeds"
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["peers_rows.png"]
    text = page(result, ["peers_rows.png"])
    assert "| 300 | SparseDP, AdaFEST | " in text and "exceeds 1." in text and "absent" not in text


def test_a_case_is_small_enough_to_send() -> None:
    for kind in KINDS:
        given = case(kind)
        assert isinstance(given, Case) and sum(weight.size for weight in given.weights.values()) < 200
