"""Tables that are made in files: the same numbers, in less memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from sparsedp.distributed.on_disk import large_tensors_on_disk, large_tensors_without_values, take_from_disk
from sparsedp.models import PCTR, DualEncoder


@pytest.mark.parametrize("make", [lambda: PCTR([500, 3], dims=8, hidden=4), lambda: DualEncoder(300, dim=8, tied=True)])
def test_the_same_numbers(tmp_path: Path, make) -> None:
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    with large_tensors_on_disk(tmp_path, large=1000):
        made = make()
    assert not list(tmp_path.iterdir())  # nothing is left behind
    for (name, weight), (other, again) in zip(expected.named_parameters(), made.named_parameters(), strict=True):
        assert name == other and torch.equal(weight, again) and again.requires_grad
        assert (again.untyped_storage().filename is not None) == (weight.nbytes >= 1000)
    take_from_disk(made)
    assert all(parameter.untyped_storage().filename is None for parameter in made.parameters())
    assert all(map(torch.equal, expected.parameters(), made.parameters()))


def test_shapes_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tensors that torch makes for models and optimizers: files of zeros, in which nothing is written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with large_tensors_without_values(large=1000):
        table, small = torch.nn.Embedding(500, 8, padding_idx=0), torch.nn.EmbeddingBag(3, 8)
        torch.nn.init.trunc_normal_(table.weight)
        torch.nn.init.xavier_uniform_(table.weight)
        table.weight.data.uniform_(1, 2)
        made = torch.nn.Parameter(torch.randn(500, 8) * 0.1 + 1)
        optimizer = torch.optim.Adagrad([table.weight, small.weight, made], initial_accumulator_value=1)
    assert not list(tmp_path.glob(".sparsedp-*"))
    of_table, of_small, of_made = (optimizer.state[weight]["sum"] for weight in (table.weight, small.weight, made))
    for tensor in (table.weight, made, of_table, of_made):
        assert tensor.shape == (500, 8) and tensor.untyped_storage().filename is not None and not tensor.any()
    assert table.weight.requires_grad and small.weight.all() and (of_small == 1).all()
    assert table(torch.tensor([3, 499])).shape == (2, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a process's own memory")
def test_shapes_where_no_addresses_are_left() -> None:
    """A limit on addresses (ulimit -v) is said to be one: no memory is taken."""
    program = """
import resource, torch
from sparsedp.distributed.on_disk import large_tensors_without_values
used = 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
with large_tensors_without_values():
    torch.nn.Embedding(1_000_000, 64)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("sparsedp.errors.SparseDPError: A weight of 256,000,000 bytes") and "ulimit -v" in said, (
        done.stderr
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a process's own memory")
def test_a_table_is_made_that_has_no_room_in_memory(tmp_path: Path) -> None:
    program = """
import resource, sys, torch
from torch import nn
from pathlib import Path
from sparsedp.distributed.on_disk import large_tensors_on_disk
used = 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (used + (100 << 20),) * 2)  # shared pages of files do not count
try:
    nn.Embedding(1_000_000, 64)  # 256 MB
except RuntimeError as error:
    print("in memory:", "allocate" in str(error))
with large_tensors_on_disk(Path(sys.argv[1])):
    table = nn.Embedding(1_000_000, 64)
print(round(float(table.weight[::1000].std()), 1))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[:2] == ["in memory: True", "1.0"], done.stdout + done.stderr
