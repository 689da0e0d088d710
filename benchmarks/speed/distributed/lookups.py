"""Many small tables in one process: 26 lookups one by one, as one call of FBGEMM, and as one compiled loop of ours.

`share_of_step` is what a way takes of the private step of the whole model, in processor time: what another way could save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from numba import njit
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from benchmarks.speed.access import draw_ids
from benchmarks.speed.step.measure import pctr
from benchmarks.speed.steps import Workload, private_step
from benchmarks.speed.timing import Stopwatch, Timing
from sparsedp.mechanisms import EANA
from sparsedp.models.dlrm import DLRM, MLPERF_DIM, dlrm_table_sizes

WARMUP = 3
_SCALE = 0.0013  # of MLPerf's tables: 0.12 GB


def time_lookups(model: str, batch: int, repeats: int) -> dict[str, Any]:
    sizes, dims, make, inputs = _problem(model, batch)
    weights = [torch.empty(n, dim).uniform_(-0.01, 0.01) for n, dim in zip(sizes, dims)]
    work = Workload(model, make, (*inputs, torch.rand(batch).round()))
    ids = inputs[-1]
    ways = {
        "PyTorch": _one_by_one(weights, ids),
        "TorchRec": _in_a_collection(weights, ids),
        "loop": _in_one_loop(weights, ids),
        "FBGEMM": _in_one_call(weights, ids),
    }
    timings = _processor_time({"step": private_step(work, Stopwatch(), EANA(), sparse=True), **ways}, repeats)
    shares = {name: timings[name].median / timings["step"].median for name in ways}
    return {
        "model": model, "batch": batch, "tables": len(sizes), "step": timings["step"].to_dict(),
        "ways": {name: {**timings[name].to_dict(), "share_of_step": shares[name]} for name in ways},
    }  # fmt: skip


def _problem(model: str, batch: int) -> tuple[list[int], list[int], Callable[[bool], nn.Module], tuple[Tensor, ...]]:
    """Rows and dim of the tables, the model, and its inputs, of which the last are the ids."""
    if model == "dlrm":
        sizes = dlrm_table_sizes(_SCALE)
        inputs = torch.rand(batch, 13) * 100, draw_ids(sizes, batch)
        return sizes, [MLPERF_DIM] * len(sizes), lambda sparse: DLRM(sizes, sparse=sparse), inputs
    work = pctr(batch, 1.0)
    tables = [part for part in work.make(True).modules() if isinstance(part, nn.Embedding)]
    sizes, dims = [table.num_embeddings for table in tables], [table.embedding_dim for table in tables]
    return sizes, dims, work.make, work.batch[:-1]


def _one_by_one(weights: list[Tensor], ids: Tensor) -> Callable[[], Any]:
    columns = ids.unbind(1)
    return lambda: torch.cat([torch.embedding(weight, column) for weight, column in zip(weights, columns)], 1)


def _in_a_collection(weights: list[Tensor], ids: Tensor) -> Callable[[], Any]:
    """TorchRec's unsharded collection. A batch is new each time: it keeps what it was taken apart into."""
    keys = [f"f{i}" for i in range(len(weights))]
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=key, embedding_dim=w.shape[1], num_embeddings=len(w), feature_names=[key])
            for key, w in zip(keys, weights)
        ]
    )
    values, lengths = ids.T.contiguous().view(-1), torch.ones(ids.numel(), dtype=torch.long)

    def run() -> Any:
        with torch.no_grad():
            return tables(KeyedJaggedTensor(keys, values, lengths=lengths)).values()

    return run


def _in_one_call(weights: list[Tensor], ids: Tensor) -> Callable[[], Any]:
    # Fused tables have a dim that can be divided by 4: of others, as of pCTR, the rows are padded.
    batched = SplitTableBatchedEmbeddingBagsCodegen(
        [(len(w), -(-w.shape[1] // 4) * 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for w in weights],
        optimizer=EmbOptimType.EXACT_SGD,
        pooling_mode=PoolingMode.SUM,
    )
    for mine, given in zip(batched.split_embedding_weights(), weights):
        mine[:, : given.shape[1]] = given
    values, offsets = ids.T.contiguous().view(-1), torch.arange(ids.numel() + 1)

    def run() -> Any:
        with torch.no_grad():
            return batched(values, offsets)

    return run


def _in_one_loop(weights: list[Tensor], ids: Tensor) -> Callable[[], Any]:
    flat = torch.cat([weight.flatten() for weight in weights]).numpy()
    firsts = np.cumsum([0, *(weight.numel() for weight in weights)])[:-1]
    dims = np.array([weight.shape[1] for weight in weights])
    columns = np.cumsum([0, *dims])[:-1]
    numbers = ids.numpy()

    def run() -> Any:
        out = np.empty((len(numbers), int(dims.sum())), np.float32)
        _gather(flat, firsts, dims, columns, numbers, out)
        return out

    return run


@njit(cache=True, nogil=True)
def _gather(
    flat: np.ndarray, firsts: np.ndarray, dims: np.ndarray, columns: np.ndarray, ids: np.ndarray, out: np.ndarray
) -> None:
    for i in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            begin = firsts[t] + ids[i, t] * dims[t]
            out[i, columns[t] : columns[t] + dims[t]] = flat[begin : begin + dims[t]]


def _processor_time(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """In turns, on one thread: another program that takes the processor does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-WARMUP, repeats):
        for name, run in variants.items():
            start = time.process_time()
            run()
            if turn >= 0:
                seconds[name].append(time.process_time() - start)
    return {name: Timing.of(values) for name, values in seconds.items()}
