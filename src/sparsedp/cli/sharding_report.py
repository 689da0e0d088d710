"""What `sparsedp plan --nproc` says: which part of which table goes to which process, what it sends, and what it has to hold."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sparsedp.check import memory_of_check
from sparsedp.cli.arguments import positive_count
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.config.load import dump_config
from sparsedp.cli.config.losses import Loss
from sparsedp.cli.prepare import Prepared, forward
from sparsedp.distributed.on_disk import LARGE
from sparsedp.distributed.sharding import Sharding, choose_sharding, in_bytes, parse_bytes
from sparsedp.distributed.sizes import Held, TableUse, Work
from sparsedp.errors import ConfigError, UnsupportedError
from sparsedp.prediction import TouchStatistics, predict_part
from sparsedp.tables import find_tables

# Python with torch, TorchRec and SparseDP: what a process has before it reads anything (resident, measured on Linux).
_PROCESS = 700_000_000
_SHOWN = 12  # tables
_LOOKED_AT = 256  # examples whose ids are counted


@dataclass(frozen=True)
class Processes:
    """What was asked: how many processes, on how many hosts of how much memory each."""

    ranks: int
    hosts: int = 1
    memory: int | None = None

    @staticmethod
    def of(args: argparse.Namespace) -> Processes | None:
        if args.nproc is None:
            if args.hosts is not None or args.memory is not None:
                raise ConfigError("--hosts and --memory are about several processes: say how many, with --nproc")
            return None
        hosts = args.hosts or 1
        if args.nproc % hosts:
            raise ConfigError(
                f"--nproc {args.nproc} cannot be divided evenly among --hosts {hosts}: it counts the processes of all hosts"
            )
        return Processes(args.nproc, hosts, args.memory)


def add_processes_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes (docs/distributed.md)")
    group.add_argument(
        "--nproc", metavar="N", type=positive_count, help="plan for this many processes, of all hosts together"
    )
    group.add_argument("--hosts", metavar="H", type=positive_count, help="machines that they run on (1)")
    group.add_argument("--memory", metavar="SIZE", type=_memory, help="of each host, such as 256GB or 256GiB")


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---------------------------------------------------------------------- what is known of the run


def sharding_report(
    asked: Processes, config: Config, parts: Prepared, statistics: TouchStatistics, activations: float
) -> dict[str, Any]:
    """The sharding that fits, as plain values. `activations` are the bytes of an example."""
    plan, model = parts.engine.plan, parts.model
    if not plan.mechanism.takes_ranks:
        raise UnsupportedError(
            f"The mechanism '{plan.mechanism.name}' cannot train in several processes: leave --nproc out."
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tables = find_tables(model)
    examples = parts.loader.expected_examples / asked.ranks
    batches = max(1, math.ceil(examples / (config.training.max_physical_batch or math.inf)))
    try:
        together = predict_part(plan, statistics, 1.0)
        per_rank = predict_part(plan, statistics, 1 / asked.ranks)
        read = predict_part(plan, statistics, 1 / (asked.ranks * batches))
    except UnsupportedError:  # a mechanism of the user's own
        together, per_rank, read = {}, {}, {}
    looked_up = lookups_of(model, parts.loss, parts.data)
    examples_per_unit = parts.loader.expected_examples / parts.loader.expected_units
    collected, bags = tables_of_collections(model)
    uses = []
    for name in sorted(tables & trained.keys()):
        parameter, found, part = trained[name], looked_up.get(name, Lookups()), per_rank.get(name)
        # Units that use all rows without looking so many up: a softmax.
        whole = part is not None and part.whole and found.ids * examples_per_unit < parameter.shape[0]
        if whole and plan.mechanism.noise_waits:
            raise UnsupportedError(
                f"Table '{name}' is used whole, so every rank needs a copy of it, and {plan.mechanism.name} cannot train copies: "
                "a rank that reads its rows would settle them, and the others would not hear of it. Take another mechanism."
            )
        uses.append(
            TableUse(
                name, parameter.shape[0], parameter.shape[1], parameter.element_size(), found.calls, found.ids,
                pooled=name in bags, weighted=name in bags and found.weighted, whole=whole, apart=name not in collected,
                touched=None if part is None else part.touched, passed=None if part is None else part.passed,
                touched_by_all=None if name not in together else together[name].touched,
                read=None if name not in read else read[name].touched * batches,
            )
        )  # fmt: skip
    dense = [p for name, p in trained.items() if name not in tables]
    dense_bytes = sum(p.nbytes for p in model.parameters()) - sum(trained[use.name].nbytes for use in uses)
    state = config.optimizer.state_share()
    held = Held(
        process=_PROCESS,
        data=_data_bytes(parts.data),
        dense=round(dense_bytes + sum(p.nbytes for p in dense) * (1 + state)),
        activations=round(activations * examples / batches),
        state_share=config.optimizer.table_state_share(),
    )
    work = Work(examples, plan.mechanism, sum(p.numel() for p in dense), batches)
    chosen = choose_sharding(uses, asked.ranks, asked.hosts, asked.memory, work=work, held=held, by_shard_tables=True)
    places = dict.fromkeys(sorted(tables - trained.keys()), "data_parallel") | chosen.places
    # Until it is divided, each process has the whole model, with large weights in files.
    on_disk = sum(p.nbytes for p in model.parameters() if p.nbytes >= LARGE)
    return {
        **_as_dict(chosen, asked, uses),
        "config": as_config(places),
        "disk_bytes_per_host": on_disk * (asked.ranks // asked.hosts)
        if as_config(places)["sharding"] != "data_parallel"
        else 0,
        "check_bytes_of_the_first_rank": memory_of_check(model) if config.training.check else 0,
    }


def as_config(places: Mapping[str, str]) -> dict[str, Any]:
    """What a configuration says under `distributed` to have its tables there."""
    kinds = set(places.values())
    if len(kinds) == 1 and kinds <= {"row_wise", "data_parallel"}:
        return {"sharding": kinds.pop()}
    return {"sharding": "planned", "tables": dict(places)}


def tables_of_collections(model: nn.Module) -> tuple[set[str], set[str]]:
    """The tables that are in a collection of TorchRec's, and those of these whose rows are added up where they are."""
    names = {id(p): name for name, p in model.named_parameters()}
    collected: set[str] = set()
    bags: set[str] = set()
    for module in model.modules():
        kind = type(module).__name__
        if type(module).__module__.startswith("torchrec.") and kind in (
            "EmbeddingBagCollection",
            "EmbeddingCollection",
        ):
            tables = {names[id(p)] for p in module.parameters()}
            collected |= tables
            bags |= tables if kind == "EmbeddingBagCollection" else set()
    return collected, bags


@dataclass
class Lookups:
    """How a table is looked up in by one example, on average."""

    calls: float = 0.0
    ids: float = 0.0
    weighted: bool = False


def lookups_of(model: nn.Module, loss: Loss, data: Data) -> dict[str, Lookups]:
    """For each table what the first examples look up, by the name of its weight."""
    count = min(_LOOKED_AT, len(data.training))
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Lookups] = {}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        ids = args[0] if args else kwargs["input"]
        one = found.setdefault(names[id(module.weight)], Lookups())
        is_bag = isinstance(module, nn.EmbeddingBag)
        one.weighted |= is_bag and (len(args) > 2 or kwargs.get("per_sample_weights") is not None)
        one.calls += 1
        one.ids += ids.numel() / count

    modules = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            forward(model, loss, data.examples(count))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _data_bytes(data: Data) -> int:
    """Of the arrays of the training and the held-out data that are in memory, each counted once."""
    seen: dict[int, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, np.ndarray):
            owner = value
            while isinstance(owner.base, np.ndarray) and not isinstance(owner, np.memmap):
                owner = owner.base
            if not isinstance(owner, np.memmap):  # pages of a file are the system's to keep, once for all processes
                seen[id(owner)] = owner.nbytes
        elif isinstance(value, Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    for part in (data.training, data.held_out):
        for value in getattr(part, "__dict__", {}).values():
            for item in (
                value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
            ):
                count(item)
    return sum(seen.values())


# ---------------------------------------------------------------------- in plain values, and as a person reads it


def _as_dict(chosen: Sharding, asked: Processes, uses: list[TableUse]) -> dict[str, Any]:
    total, memory = chosen.sent.total, chosen.memory_of_ranks
    by_purpose = {name: values for name, values in chosen.sent.by_purpose().items() if values.any()}
    per_host = memory.reshape(asked.hosts, -1).sum(1)
    return {
        "processes": asked.ranks,
        "hosts": asked.hosts,
        "host_memory_bytes": asked.memory,
        "fits": None if asked.memory is None else chosen.fits,
        "advice": chosen.advice,
        "tables": [
            {
                "name": use.name,
                "sharding": chosen.tables[use.name].kind,
                "kernel": chosen.tables[use.name].kernel,
                "ranks": list(chosen.tables[use.name].ranks),
                "host": chosen.tables[use.name].host,
                "rows": use.rows,
                "dim": use.dim,
                "bytes": use.bytes,
                "largest_shard_bytes": max(
                    len(part.shard.rows) * len(part.shard.columns) * use.itemsize
                    for part in chosen.tables[use.name].parts
                ),
            }
            for use in sorted(uses, key=lambda use: -use.bytes)
        ],
        "sent_bytes_per_step": {
            "mean": float(total.mean()),
            "most": float(total.max()),
            "by_purpose": {name: float(values.mean()) for name, values in by_purpose.items()},
        },
        "sent_bytes_before_the_first_step": chosen.sent_once,
        "memory_bytes_per_rank": {
            "most": float(memory.max()),
            "least": float(memory.min()),
            "limit": chosen.limit,
            "of_the_fullest": {name: float(values[int(memory.argmax())]) for name, values in chosen.memory.items()},
        },
        "memory_bytes_of_the_fullest_host": float(per_host.max()),
    }


def print_sharding(console: Console, report: dict[str, Any]) -> None:
    several = report["several_processes"]
    memory, sent = several["memory_bytes_per_rank"], several["sent_bytes_per_step"]
    table = Table("table", "rows x dim", "size", "sharding", "where", "largest part", box=SIMPLE_HEAD, pad_edge=False)
    for entry in several["tables"][:_SHOWN]:
        shape = f"{entry['rows']:,} x {entry['dim']}"
        largest = in_bytes(entry["largest_shard_bytes"])
        table.add_row(
            entry["name"], shape, in_bytes(entry["bytes"]), entry["sharding"], _where(entry, several), largest
        )
    if rest := several["tables"][_SHOWN:]:
        kinds = ", ".join(sorted({entry["sharding"] for entry in rest}))
        table.add_row(f"{len(rest)} more", "", in_bytes(sum(entry["bytes"] for entry in rest)), kinds, "", "")
    console.print(f"{several['processes']} processes on {several['hosts']} host(s):", highlight=False)
    console.print(table)
    totals = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    totals.add_row("sent", f"{in_bytes(sent['mean'])} a step by a rank, {in_bytes(sent['most'])} by the busiest:")
    for name, size in sent["by_purpose"].items():
        totals.add_row(f"  {name.replace('_', ' ')}", in_bytes(size))
    if once := several["sent_bytes_before_the_first_step"]:
        totals.add_row("sent once", f"{in_bytes(once)} by a rank before the first step, to choose rows")
    totals.add_row(
        "memory", f"{in_bytes(memory['most'])} of the fullest rank, {in_bytes(memory['least'])} of the emptiest:"
    )
    for name, size in memory["of_the_fullest"].items():
        totals.add_row(f"  {name}", in_bytes(size))
    host = in_bytes(several["memory_bytes_of_the_fullest_host"])
    given = "" if several["host_memory_bytes"] is None else f" of {in_bytes(several['host_memory_bytes'])}"
    totals.add_row("  a host", f"{host}{given}")
    if check := several["check_bytes_of_the_first_rank"]:
        totals.add_row(
            "check", f"{in_bytes(check)} of the first process before tables are divided (training.check: false)"
        )
    if disk := several["disk_bytes_per_host"]:
        totals.add_row("disk", f"{in_bytes(disk)} of a host, beside the run's folder, while the tables are divided")
    console.print(totals)
    console.print("What sparsedp train then does so, in the configuration:", highlight=False)
    console.print(dump_config({"distributed": several["config"]}), markup=False, highlight=False, soft_wrap=True)
    if several["advice"]:
        console.print(several["advice"], markup=False, soft_wrap=True)


def _where(entry: dict[str, Any], several: dict[str, Any]) -> str:
    ranks = entry["ranks"]
    if entry["host"] is not None:
        return f"host {entry['host']}"
    if len(ranks) == several["processes"]:
        return "all ranks" if entry["sharding"] == "row_wise" else "a copy on each rank" if len(ranks) > 1 else "rank 0"
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def exit_code(report: dict[str, Any]) -> int:
    """2 if it does not fit: whoever asks in a script has to see it."""
    several = report.get("several_processes")
    if several is None or several["advice"] is None:
        return 0
    print("sparsedp: error: the run does not fit; see the plan", file=sys.stderr)
    return 2
