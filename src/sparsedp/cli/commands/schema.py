"""Prints the JSON schema of configurations, with which editors complete keys and mark what is wrong."""

from __future__ import annotations

import argparse
import json

from sparsedp.cli.config.jsonschema import config_schema

EPILOG = """examples:
  sparsedp schema > sparsedp.schema.json

and in the first line of a configuration beside it, for editors with the YAML language server:
  # yaml-language-server: $schema=sparsedp.schema.json

The schema knows keys, types and ranges. What depends on several keys is checked by `sparsedp train` and `sparsedp plan` alone.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    print(json.dumps(config_schema(), indent=2))
    return 0
