"""Computes what a run costs in privacy, or the noise that a budget asks for, without any model or data."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from sparsedp.accounting import accountant_names, get_epsilon, get_noise_multiplier
from sparsedp.accounting.registry import describe_accountants
from sparsedp.cli.runfolder import plain
from sparsedp.errors import ConfigError
from sparsedp.plan import require_delta

EPILOG = """examples:
  sparsedp account epsilon --noise-multiplier 0.6 --sample-rate 0.002 --steps 500 --delta 1e-6
  sparsedp account epsilon --noise-multiplier 0.6 --batch-size 2048 --dataset-size 1000000 --epochs 1 \\
      --delta 1e-6
  sparsedp account noise --target-epsilon 3 --target-delta 1e-6 --batch-size 2048 --dataset-size 1000000 \\
      --epochs 1

Batches are Poisson samples; neighbouring data sets differ by adding or removing one example.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    questions = parser.add_subparsers(dest="question", required=True, metavar="{epsilon,noise}")
    for name, help in (
        ("epsilon", "the epsilon of a run"),
        ("noise", "the least noise for a target epsilon"),
    ):
        question = questions.add_parser(
            name, help=help, description=help, epilog=EPILOG, formatter_class=parser.formatter_class
        )
        if name == "epsilon":
            question.add_argument(
                "--noise-multiplier", type=float, required=True, help="noise deviation / clipping norm"
            )
            question.add_argument("--delta", type=float, required=True)
        else:
            question.add_argument("--target-epsilon", type=float, required=True)
            question.add_argument("--target-delta", type=float, required=True)
        question.add_argument("--allow-large-delta", action="store_true", help="take a delta above 0.01, too")
        question.add_argument("--sample-rate", type=float, help="probability that an example joins a batch")
        question.add_argument("--batch-size", type=int, help="expected; with --dataset-size, instead of --sample-rate")
        question.add_argument("--dataset-size", type=int, help="number of units: examples, or users")
        question.add_argument("--steps", type=int)
        question.add_argument("--epochs", type=int, help="instead of --steps")
        question.add_argument(
            "--accountant", choices=accountant_names(), default="pld", help=describe_accountants().replace("%", "%%")
        )
        question.add_argument("--json", action="store_true", help="print JSON")
        question.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    rate, steps = _rate_and_steps(args)
    require_delta(
        args.delta if args.question == "epsilon" else args.target_delta, args.dataset_size, args.allow_large_delta
    )
    if args.question == "epsilon":
        noise, delta = args.noise_multiplier, args.delta
    else:
        delta = args.target_delta
        noise = get_noise_multiplier(
            target_epsilon=args.target_epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=args.accountant,
        )
    epsilon = get_epsilon(
        noise_multiplier=noise, sample_rate=rate, steps=steps, delta=delta, accountant=args.accountant
    )
    answer: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "noise_multiplier": noise,
        "sample_rate": rate,
        "steps": steps,
        "accountant": args.accountant,
    }
    if args.json:
        print(json.dumps(plain(answer), indent=2))
        return 0
    first = ("epsilon", "noise_multiplier") if args.question == "epsilon" else ("noise_multiplier", "epsilon")
    for name in (*first, "delta", "sample_rate", "steps", "accountant"):
        value = answer[name]
        print(f"{name.replace('_', ' '):17s} {f'{value:.6g}' if isinstance(value, float) else value}")
    return 0


def _rate_and_steps(args: argparse.Namespace) -> tuple[float, int]:
    sizes = args.batch_size, args.dataset_size
    if (args.sample_rate is None) == (None in sizes) or (args.sample_rate is not None and sizes != (None, None)):
        raise ConfigError("give either --sample-rate, or both --batch-size and --dataset-size")
    if (args.steps is None) == (args.epochs is None):
        raise ConfigError("give either --steps or --epochs")
    if args.sample_rate is not None:
        rate, epoch = args.sample_rate, _steps_of_rate(args.sample_rate)
    else:
        if not 1 <= args.batch_size <= args.dataset_size:
            raise ConfigError(
                f"--batch-size must be between 1 and --dataset-size; got {args.batch_size} and {args.dataset_size}"
            )
        rate, epoch = args.batch_size / args.dataset_size, math.ceil(args.dataset_size / args.batch_size)
    return rate, args.steps if args.steps is not None else args.epochs * epoch


def _steps_of_rate(rate: float) -> int:
    if not 0 < rate <= 1:
        raise ConfigError(f"--sample-rate must be above 0 and at most 1; got {rate:g}")
    return math.ceil(1 / rate - 1e-9)  # 1 / (1 / 3) must be 3
