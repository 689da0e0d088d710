"""Rows per second and peak memory of reading a click log: ours, an earlier revision's, and Arrow and polars alone."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Each is run in a process of its own, with the file and a folder as arguments, and prints the number of rows.
_OURS = """
from sparsedp.data import CountVocabulary, HashVocabulary, open_click_log
log = open_click_log(FILE, cache_dir=FOLDER, vocabulary={vocabulary})
print(len(log))
"""
_NAMES = """
names = [str(i) for i in range(40)]
"""
_ARROW = """
import pyarrow as pa, pyarrow.csv as csv
types = {n: pa.float64() if int(n) < 14 else pa.string() for n in names}
options = csv.ReadOptions(column_names=names, block_size=1 << 22), csv.ParseOptions(delimiter="\\t")
print(sum(batch.num_rows for batch in csv.open_csv(FILE, *options, csv.ConvertOptions(column_types=types))))
"""
_ARROW_WHOLE = _ARROW.replace("csv.open_csv(", "csv.read_csv(").replace(
    "for batch in csv.read_csv(FILE, *options, csv.ConvertOptions(column_types=types))",
    "for batch in csv.read_csv(FILE, *options, csv.ConvertOptions(column_types=types)).to_batches()",
)
_POLARS = """
import polars as pl
types = [pl.Float64] * 14 + [pl.String] * 26
print(len(pl.read_csv(FILE, separator="\\t", has_header=False, new_columns=names, schema_overrides=types)))
"""
_TIMED = """
import sys, time
FILE, FOLDER = sys.argv[1:]
{imports}
before = time.perf_counter(), time.process_time()
{code}
after = time.perf_counter(), time.process_time()
peak = next(int(line.split()[1]) / 1e3 for line in open("/proc/self/status") if line.startswith("VmHWM"))  # Linux
print(after[0] - before[0], after[1] - before[1], peak)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the file, which is generated (1000000)")
    parser.add_argument("--repeats", type=int, default=3, help="of each reader; they take turns (3)")
    parser.add_argument("--base", metavar="REV", help="also measure the reader of this revision")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")


def run(args: argparse.Namespace) -> int:
    from sparsedp.data import generated_click_log, write_click_log

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (file,) = write_click_log(generated_click_log(args.rows), folder / "log.tsv")
        readers = _readers(folder, args.base)
        found: dict[str, list[list[float]]] = {reader: [] for reader in readers}
        for repeat in range(args.repeats):
            for reader, (code, path) in readers.items():
                found[reader].append(_measured(code, path, file, folder / f"{repeat}-{len(found[reader])}-{reader}"))
    result = {reader: _best(args.rows, values) for reader, values in found.items()}
    table = Table(
        title=f"{args.rows:,} rows of Criteo's format, best of {args.repeats}, {len(os.sched_getaffinity(0))} cores"
    )
    for column in ("reader", "rows/s", "seconds of processor per million rows", "peak memory, MB"):
        table.add_column(column, justify="left" if column == "reader" else "right")
    for reader, values in result.items():
        table.add_row(reader, *(f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in values.values()))
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _readers(folder: Path, base: str | None) -> dict[str, tuple[str, str]]:
    """The code of each reader, and where its package lies."""
    here = str(Path(__file__).parents[1] / "src")
    readers = {
        "hashed": (_OURS.format(vocabulary="HashVocabulary()"), here),
        "counted": (_OURS.format(vocabulary="CountVocabulary(10)"), here),
        "pyarrow alone, streamed": (_NAMES + _ARROW, here),
        "pyarrow alone, whole": (_NAMES + _ARROW_WHOLE, here),
        "polars alone, whole": (_NAMES + _POLARS, here),
    }
    if base is not None:
        archive = subprocess.run(["git", "archive", base, "src"], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(folder / "base", filter="data")
        for name in ("hashed", "counted"):
            readers[f"{name}, {base}"] = (readers[name][0], str(folder / "base" / "src"))
    return readers


def _measured(code: str, path: str, file: Path, folder: Path) -> list[float]:
    imports = "\n".join(line for line in code.splitlines() if line.startswith(("from", "import")))
    rest = "\n".join(line for line in code.splitlines() if not line.startswith(("from", "import")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _TIMED.format(imports=imports, code=rest), str(file), str(folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return [float(value) for value in printed.split()[1:]]


def _best(rows: int, values: Any) -> dict[str, float]:
    seconds, processor, memory = (min(column) for column in zip(*values))
    return {"rows_per_second": rows / seconds, "processor": processor / rows * 1e6, "memory": memory}
