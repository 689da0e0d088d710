"""What is said where TorchRec or FBGEMM do not fit."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from sparsedp import PrivacyEngine
from sparsedp.cli.config.sections import DistributedConfig
from sparsedp.distributed import require_torchrec
from sparsedp.distributed.requirements import FBGEMM_FOR_TORCH, TORCHREC, _require_release
from sparsedp.errors import UnsupportedError


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for module in list(sys.modules):
        if module.partition(".")[0] in names:
            monkeypatch.delitem(sys.modules, module)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(UnsupportedError, match=r"need TorchRec and FBGEMM.*pip install --no-deps"):
        require_torchrec()


def test_another_abi_is_explained_with_the_release_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise OSError('fbgemm_gpu_config.so: undefined symbol: _ZNR5torch7Library4_defE')"
    )
    without(monkeypatch, "fbgemm_gpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.__version__", "2.13.0+cpu")
    with pytest.raises(UnsupportedError, match=r"undefined symbol.*Install fbgemm-gpu-cpu==1\.8\.0"):
        require_torchrec()
    monkeypatch.setattr("torch.__version__", "2.99.0")
    without(monkeypatch, "fbgemm_gpu")
    with pytest.raises(UnsupportedError, match=r"the FBGEMM release of torch 2\.99"):
        require_torchrec()


@pytest.mark.parametrize("release", ["1.7.9", "1.0.0", "1.9.3", "1.10.0", "2.0.0"])
def test_releases_that_were_not_tried_are_refused(release: str) -> None:
    """With the release that all tests run with, which is what constraints.txt installs."""
    wanted = (
        rf"TorchRec {release} .*1\.8\.0 is tested, and up to 1\.9\.2 is taken.*pip install --no-deps torchrec==1\.8\.0"
    )
    with pytest.raises(UnsupportedError, match=wanted):
        _require_release(release)
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"torchrec=={TORCHREC[0]}" in constraints and f"fbgemm-gpu-cpu=={FBGEMM_FOR_TORCH['2.13']}" in constraints


@pytest.mark.parametrize("release", ["1.8.0", "1.8.0+cpu", "1.9.0", "1.9.2"])
def test_releases_that_are_taken(release: str) -> None:
    _require_release(release)


def test_ranks_wait_for_a_minute_unless_told_otherwise() -> None:
    given = inspect.signature(PrivacyEngine).parameters["rank_timeout"].default
    assert given == DistributedConfig().rank_timeout == 60


@pytest.mark.distributed
def test_what_is_installed_here_fits() -> None:
    require_torchrec()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "kernel", "said"),
    [
        ("grid_shard", "fused", "sharding type 'grid_shard', .*mean pooling is wrong.*Use one of row_wise"),
        ("table_column_wise", "fused", "sharding type 'table_column_wise', .*several parts .* on one rank.*Use one of"),
        ("another", "fused", "sharding type 'another', .*where its rows are.*Use one of"),
        ("row_wise", "fused_uvm_caching", "compute kernel 'fused_uvm_caching', .*keeps rows in a cache.*Use 'fused'"),
        ("row_wise", "key_value", "compute kernel 'key_value'"),
        ("table_wise", "quant", "compute kernel 'quant'"),
    ],
)
def test_shardings_and_kernels_that_are_refused_by_name(kind: str, kernel: str, said: str) -> None:
    from torchrec.distributed.types import ParameterSharding

    from sparsedp.distributed.collections import placement_in

    with pytest.raises(UnsupportedError, match=f"Table 'model.t' has {said}"):
        placement_in({"model.t": ParameterSharding(sharding_type=kind, compute_kernel=kernel)})


@pytest.mark.distributed
def test_modules_that_change_ids_by_the_data_are_refused_by_name() -> None:
    from torch import nn
    from torchrec.distributed.itep_embeddingbag import ShardedITEPEmbeddingBagCollection
    from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
    from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection

    from sparsedp.distributed.collections import sharded_collections

    for kind in (
        ShardedManagedCollisionEmbeddingCollection,
        ShardedManagedCollisionEmbeddingBagCollection,
        ShardedITEPEmbeddingBagCollection,
    ):
        part = kind.__new__(kind)  # what it holds does not matter
        nn.Module.__init__(part)
        module = nn.Module()
        module.tables = part
        with pytest.raises(UnsupportedError, match=f"Module 'tables' .{kind.__name__}.*change ids by the data"):
            list(sharded_collections(module))
