"""What is measured, without TorchRec: the command and the page are for those who do not have it, too."""

from __future__ import annotations

from dataclasses import dataclass

from sparsedp.models.dlrm import MLPERF_DIM, MLPERF_TABLES, dlrm_table_sizes

NUMBERS = 13  # dense inputs of an example
# Tables of equal size and their dim; DLRM has those of MLPerf's benchmark.
EQUAL_TABLES = {"light": (8, 32), "one": (1, 64), "many": (26, 32)}
MODELS = {"dlrm": "DLRM", "light": "light model", "one": "one table", "many": "26 tables"}
SHARDINGS = {"row_wise": "rows", "table_wise": "tables", "column_wise": "columns"}
VARIANTS = {
    "plain": "TorchRec",
    "dpsgd": "DP-SGD",
    "lazydp": "LazyDP",
    "eana": "EANA",
    "fest": "FEST",
    "adafest": "AdaFEST",
    "adafest+": "AdaFEST+",
    "exponential": "exponential",
}
WAYS = {  # of looking up rows of many tables in one process
    "PyTorch": "one by one",
    "TorchRec": "unsharded EmbeddingBagCollection",
    "loop": "one compiled loop",
    "FBGEMM": "one call of FBGEMM",
}
# These go over every row of every table in a step. They are measured on smaller tables, beside TorchRec on those.
DENSE = ("dpsgd",)


@dataclass(frozen=True)
class Setting:
    """What a step is measured at."""

    model: str
    sharding: str
    gigabytes: float  # of all tables together, 10^9 bytes each
    batch: int  # examples of each rank
    ids: int = 1  # of each feature

    @property
    def dim(self) -> int:
        return EQUAL_TABLES[self.model][1] if self.model in EQUAL_TABLES else MLPERF_DIM

    @property
    def table_sizes(self) -> list[int]:
        rows = self.gigabytes * 1e9 / (4 * self.dim)
        if self.model in EQUAL_TABLES:
            count, _ = EQUAL_TABLES[self.model]
            return [max(1, round(rows / count))] * count
        return dlrm_table_sizes(rows / sum(MLPERF_TABLES))

    @property
    def table_bytes(self) -> int:
        return 4 * self.dim * sum(self.table_sizes)

    def __str__(self) -> str:
        return (
            f"{MODELS[self.model]}, by {SHARDINGS[self.sharding]}, {self.gigabytes:g} GB, {self.batch} examples a rank, "
            f"{self.ids} id(s) a feature"
        )
