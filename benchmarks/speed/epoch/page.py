"""`python -m benchmarks epoch` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.markdown import images, markdown_table, milliseconds, number
from benchmarks.speed.names import NAMES


def page(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    lines = (
        [
            NAMES[row["variant"]],
            str(row["threads"]),
            milliseconds(row),
            milliseconds(row["fetching"]),
            number(row["ratio_to_plain"]["best"]),
            milliseconds(row["busy"]),
            number(row["busy_ratio_to_plain"]["median"]),
        ]
        for row in result["rows"]
    )
    heads = ("epoch", "its batches alone", "ratio to plain, best", "beside other work", "ratio to plain, median")
    table = markdown_table(("variant", "threads", *heads), lines)
    setting = result["setting"]
    return f"""# A whole epoch

Two towers over {setting["users"]:,} users and {setting["items"]:,} items, dim {setting["dim"]}, on a `TensorDataset` of
{setting["examples"]:,} examples in batches of {setting["batch"]:,}: plain PyTorch with `DataLoader(data, shuffle=True)`,
which reads one example after another, and private loops over the loader that `make_private` returns, which reads
whole columns by one index, and where that takes long while the step before runs. The ratio is to the faster of plain's
two. In so small a model waking a thread up takes longer than most operations: one thread (`torch.set_num_threads(1)`,
`training.threads: 1`) is faster.
The last two columns are epochs while as many other processes as there are threads compute without a pause.

{table}

{images(plots, "epoch_")}"""
