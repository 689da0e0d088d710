"""Leaves out each unit of a batch in turn and shows by how much that moves the clipped sum, over C, and in which parameter.

No training and no noise: the model and the loss of a configuration, or your own, with their weights as they begin.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from sparsedp.audit import Replay, replay
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.config.load import add_set_argument, load_config
from sparsedp.cli.config.trust import Code, add_trust_argument
from sparsedp.cli.prepare import limit_threads, load_data, make_model, with_collate
from sparsedp.cli.progress import draw_progress
from sparsedp.errors import ConfigError
from sparsedp.progress import no_progress

# Units of the batch that a configuration's data are looked at in, and rows of the table that is printed.
_UNITS, _SHOWN = 32, 5
BROKEN = 1
# What a function may return beside the model and the batch: the arguments of `sparsedp.audit.replay`.
_OPTIONS = (
    "loss", "loop", "users", "map_clip", "max_grad_norm", "loss_reduction", "take", "replace_recurrent",
)  # fmt: skip

EPILOG = """examples:
  sparsedp audit replay demo                               the model, loss and data of a configuration
  sparsedp audit replay my.yaml --units 8                  8 units of a configuration of your own
  sparsedp audit replay my_training:replayed               what a function of your own returns
  sparsedp audit replay my_training:replayed --max-grad-norm 0.5 --json

MODULE:FUNCTION is looked for in the current directory and among installed packages, and runs. It returns (model, loss_fn,
batch), or a dict with model, batch, loss or loop, and any of users, map_clip, max_grad_norm, loss_reduction, take,
replace_recurrent. loop(model, batch) returns the loss as your training loop computes it, with all that it does before it calls
the model: what is mixed there no model's refusal can see.

Exit codes: 0 the bound holds on this batch; 1 it does not; 2 an error, or a model that is refused anyway.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "source",
        metavar="MODULE:FUNCTION | CONFIG",
        help="a function that gives model, loss and batch; or a configuration",
    )
    parser.add_argument(
        "--units",
        type=positive_count,
        metavar="N",
        help=f"leave out the first N units (default: all; {_UNITS} of CONFIG)",
    )
    parser.add_argument(
        "--max-grad-norm", type=positive_number, metavar="C", help="the bound (default: the configuration's, or 1)"
    )
    parser.add_argument(
        "--map-clip", type=positive_number, metavar="C1", help="replay AdaFEST's map of contributions, too"
    )
    add_set_argument(parser, "change a key of CONFIG, as in --set privacy.max_grad_norm=0.5")
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    module, batch, options = _named(args) if ":" in args.source else _configured(args)
    if args.max_grad_norm is not None:
        options["max_grad_norm"] = args.max_grad_norm
    if args.map_clip is not None:
        options["map_clip"] = args.map_clip
    loss, progress = options.pop("loss", None), no_progress if args.quiet else draw_progress
    result = replay(module, loss, batch, units=args.units, progress=progress, **{"max_grad_norm": 1.0, **options})
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_table(result))
        console.print(str(result), markup=False, soft_wrap=True)
    return 0 if result.holds else BROKEN


def _named(args: argparse.Namespace) -> tuple[nn.Module, Any, dict[str, Any]]:
    """What the user's function gives: naming it on the command line is trusting it."""
    if args.overrides:
        raise ConfigError("--set changes a configuration; MODULE:FUNCTION has none")
    address = args.source
    name = address.partition(":")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"expected MODULE:FUNCTION, such as my_training:replayed, or a configuration; got {address!r}"
        )
    value = Code(trusted=(name, *args.trust)).find(address, "MODULE:FUNCTION")()
    if isinstance(value, tuple) and len(value) == 3:
        value = dict(zip(("model", "loss", "batch"), value))
    if not isinstance(value, Mapping) or not {"model", "batch"} <= value.keys():
        raise ConfigError(
            f"{address} must return (model, loss_fn, batch), or a dict with model, batch and loss or loop"
        )
    unknown = sorted(value.keys() - {"model", "batch", *_OPTIONS})
    if unknown:
        raise ConfigError(
            f"{address} returned {', '.join(map(repr, unknown))}; known are model, batch, {', '.join(_OPTIONS)}"
        )
    if not isinstance(value["model"], nn.Module):
        raise ConfigError(f"{address}: model must be a torch module, not {type(value['model']).__name__}")
    return value["model"], value["batch"], {key: value[key] for key in _OPTIONS if value.get(key) is not None}


def _configured(args: argparse.Namespace) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The first examples of a configuration's data."""
    config = load_config(args.source, args.overrides, args.trust)
    limit_threads(config)
    mechanism = config.make_mechanism()
    data = with_collate(config, load_data(config))
    count = min(args.units or _UNITS, len(data.training))
    options: dict[str, Any] = {
        "loss": config.make_loss(), "loss_reduction": config.privacy.loss_reduction,
        "max_grad_norm": config.privacy.max_grad_norm, "take": getattr(data.training, "take", None),
    }  # fmt: skip
    if config.privacy.unit == "user":
        options["users"] = data.training.users[:count]
    if mechanism.contribution_clip is not None:
        options["map_clip"] = mechanism.contribution_clip
    return make_model(config, data.training), data.examples(count), options


def _table(result: Replay) -> Table:
    """The units that move most."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    heads = [result.unit, "moves the sum by", "most of it in"] + ["moves the map by"] * (result.map_clip is not None)
    for head in heads:
        table.add_column(head, justify="right" if "moves" in head else "left")
    for unit in sorted(result.units, key=lambda replayed: -replayed.ratio)[:_SHOWN]:
        name = unit.worst_parameter
        cells = [str(unit.unit), f"{unit.ratio:.4f} C", f"{name} ({unit.parameters[name]:.4f} C)"]
        table.add_row(*cells, *([] if unit.map_ratio is None else [f"{unit.map_ratio:.4f} C1"]))
    return table
