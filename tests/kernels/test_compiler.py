"""Loops are compiled also where nothing can be kept, and somebody who waits for that is told."""

from __future__ import annotations

import errno
import gc
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest
from numba.core import caching

import sparsedp
from sparsedp.kernels import compiler
from sparsedp.kernels.compiler import compile_loop


@pytest.fixture(autouse=True)
def _nothing_was_said_yet() -> None:
    compiler._is_compiling.cache_clear()


def doubled(number: int) -> int:
    return 2 * number


def tripled(number: int) -> int:
    return 3 * number


def test_without_a_folder_to_write_to_loops_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])  # as for a user without a home
    monkeypatch.setattr(doubled, "__module__", "sparsedp.kernels.doubles")
    monkeypatch.setattr(tripled, "__module__", "sparsedp.kernels.doubles")
    with caplog.at_level(logging.INFO, "sparsedp"):
        assert compile_loop()(doubled)(4) == 8
        assert compile_loop(fastmath=True)(tripled)(4) == 12
    assert sum("NUMBA_CACHE_DIR" in message for message in caplog.messages) == 1


def test_other_refusals_of_numba_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(caching.FunctionCache, "__init__", refuse)
    with pytest.raises(RuntimeError, match="something else"):
        compile_loop()(doubled)


def test_compiling_is_announced_once_and_only_for_loops_of_this_package(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # empty: nothing is kept there yet
    # A loop that is read again looks for its module.
    monkeypatch.setitem(sys.modules, "sparsedp.kernels.doubles", ModuleType("sparsedp.kernels.doubles"))
    with caplog.at_level(logging.INFO, "sparsedp"):
        compile_loop()(doubled)(4)
        assert not caplog.messages
        monkeypatch.setattr(doubled, "__module__", "sparsedp.kernels.doubles")
        monkeypatch.setattr(tripled, "__module__", "sparsedp.kernels.doubles")
        for function in (doubled, tripled):
            compile_loop()(function)(4.0)
        assert len(caplog.messages) == 1 and "first time" in caplog.messages[0]
        compiler._is_compiling.cache_clear()
        gc.collect()  # what Numba would find in memory
        compile_loop()(doubled)(4.0)  # is read again
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("kind", ["jitclass", "exec"])
def test_numba_code_of_others_still_compiles(kind: str) -> None:
    if kind == "exec":
        scope: dict[str, Any] = {}
        exec("def plus(x): return x + 1", scope)
        assert numba.njit(scope["plus"])(3) == 4
        return
    from numba.experimental import jitclass

    class Held:
        def __init__(self, x: float) -> None:
            self.x = x

    assert jitclass([("x", numba.float64)])(Held)(3.0).x == 3.0


def fourfold(number: int) -> int:
    return 4 * number


class Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["file", "folder", "folder above", "owner"])
def test_no_code_is_read_that_others_can_have_written(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if any(map(compiler._is_everybodys, (Path(__file__), Path(__file__).parent))):
        pytest.skip("everybody may change this file")
    above = tmp_path / "cache"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(above))
    assert compile_loop()(fourfold)(4) == 16
    (index,) = above.glob("*/*.nbi")
    index.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    gc.collect()
    compile_loop()(fourfold)(4)
    assert (tmp_path / "ran").exists()  # it would run, were it ours
    (tmp_path / "ran").unlink()
    index.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    if how == "owner":
        if os.getuid():
            pytest.skip("only root gives files away")
        os.chown(index, 12345, -1)
    else:
        {"file": index, "folder": index.parent, "folder above": above}[how].chmod(0o777)
    before = index.read_bytes()
    assert compile_loop()(fourfold)(4) == 16
    assert not (tmp_path / "ran").exists() and index.read_bytes() == before


def test_a_folder_with_the_sticky_bit_may_be_everybodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    above = tmp_path / "cache"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(above))
    compile_loop()(fourfold)(4)
    above.chmod(0o1777)  # as /tmp
    loop = compile_loop()(fourfold)
    assert loop(4) == 16 and sum(loop.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("what", ["file", "folder"])
def test_where_everybody_may_change_the_code_loops_are_kept_all_the_same(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose umask is 0: whoever may write what is kept may write the code as well."""
    monkeypatch.setitem(sys.modules, "loops_of_all", ModuleType("loops_of_all"))  # a loop that is read looks for it
    file = tmp_path / "code" / "loops_of_all.py"
    file.parent.mkdir()
    file.write_text("def loop(n):\n    return n + 7\n")
    (file if what == "file" else file.parent).chmod(0o777)
    for hits in (0, 1):
        scope: dict[str, Any] = {"__name__": "loops_of_all", "__file__": str(file)}
        exec(compile(file.read_text(), str(file), "exec"), scope)
        loop = compile_loop()(scope["loop"])
        assert loop(1) == 8 and sum(loop.stats.cache_hits.values()) == hits
        for path in (file.parent / "__pycache__", *file.parent.glob("__pycache__/*")):
            path.chmod(0o777)
        gc.collect()


def test_files_that_others_write_or_delete_meanwhile_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compile_loop()(fourfold)(4) == 16
    (index,) = tmp_path.glob("*/*.nbi")
    (index.parent / f"{index.name}.tmp.0").symlink_to("nowhere")  # another process's, renamed by now
    loop = compile_loop()(fourfold)
    assert loop(4) == 16 and sum(loop.stats.cache_hits.values()) == 1
    (index.parent / f"{index.stem}.7.nbc").symlink_to("nowhere")  # listed, and deleted then
    monkeypatch.setattr(fourfold, "__module__", "sparsedp.kernels.fourfold")  # of which it is said that it compiles
    assert compile_loop()(fourfold)(4) == 16


def test_a_full_disk_does_not_stop_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert compile_loop()(fourfold)(4) == 16


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [b"", b"\x80\x04\x95", b"not a pickle"])
def test_a_broken_file_is_made_anew(ending: str, left: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compile_loop()(fourfold)(4)
    (file,) = tmp_path.glob(f"*/*.{ending}")
    file.write_bytes(left)
    for hits in (0, 1):
        loop = compile_loop()(fourfold)
        assert loop(4) == 16 and sum(loop.stats.cache_hits.values()) == hits


def test_a_loop_is_compiled_anew_when_one_that_it_calls_changes(tmp_path: Path) -> None:
    head = "from sparsedp.kernels.compiler import compile_loop\n"
    (tmp_path / "called.py").write_text(f"{head}@compile_loop()\ndef f(n):\n    return n + 1\n")
    (tmp_path / "calls.py").write_text(f"{head}from called import f\n@compile_loop()\ndef g(n):\n    return f(n)\n")
    code = "from pathlib import Path; from sparsedp.kernels import compiler; compiler._FOLDER = Path('.').absolute(); "
    code += "compiler._digest.cache_clear();"
    environment = {**os.environ, "PYTHONPATH": f"{Path(sparsedp.__file__).parents[1]}:{tmp_path}"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run() -> str:
        command = [sys.executable, "-c", f"{code} from calls import g; print(g(1))"]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert run() == "2\n"
    (tmp_path / "called.py").write_text((tmp_path / "called.py").read_text().replace("n + 1", "n + 100"))
    assert run() == "101\n"


def test_two_processes_that_fill_one_cache(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import numpy as np
        from sparsedp.mechanisms.survivors import _joined
        print(_joined(np.array([1, 3]), np.array([2, 4]), np.array([1, 3, 4])).tolist())
    """)
    env = {**os.environ, "PYTHONPATH": str(Path(sparsedp.__file__).parents[1]), "NUMBA_CACHE_DIR": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in both] == ["[1, 2, 3]"] * 2
