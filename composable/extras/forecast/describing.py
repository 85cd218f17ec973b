"""The `describe` command: how a model would be sharded over the ranks of a world, without these
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from composable import describe, fully_shard
from composable.errors import ForecastError
from composable.extras.forecast.command import (
    Refused,
    add_model,
    answered,
    blocks_of,
    check_one_model,
    configured,
    function_of,
    made_of_config,
    maker_of,
)
from composable.extras.forecast.forecast import simulated_model
from composable.extras.forecast.plans import Plan

PROGRAM: Final = "python -m composable describe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "what the function makes")
    parser.add_argument(
        "--annotate",
        help="package.module:function that annotates the model, and may take the mesh (default:"
        " fully_shard with the units of --policy; the model as one unit if nothing repeats)",
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        type=dimension_of,
        metavar="NAME=SIZE",
        help="dimensions, e.g. replicate=4 shard=16 (default: one over all ranks)",
    )
    parser.add_argument("--by", choices=("parameter", "unit"), default="parameter")
    parser.add_argument("--json", action="store_true", help="plain values in place of a table")


def dimension_of(text: str) -> tuple[str, int]:
    """Read `shard=16`."""
    found = re.fullmatch(r"(\w+)=([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write a name and a size, like shard=16")
    return found[1], int(found[2])


def run(options: Any) -> int:
    """Print the description; returns the exit status."""
    return answered(PROGRAM, partial(_answer, options))


def _answer(options: Any) -> None:
    check_one_model(options)
    if options.annotate and options.policy:
        raise Refused("--annotate picks the units itself: leave --policy out")
    if options.hf is None:
        make = maker_of(options, None)
    else:
        make = partial(made_of_config, *configured(options))
    if options.annotate:
        annotate = function_of(options.annotate, "annotate")
    else:
        annotate = _plan_of(make, options.policy)
    mesh = dict(options.mesh) if options.mesh else None
    with simulated_model(make, annotate, ranks=options.ranks, mesh=mesh) as model:
        found = describe(model, by=options.by)
    try:
        _show(json.dumps(found.to_dict()) if options.json else found)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plan_of(make: Callable[[], nn.Module], policy: str | None) -> Callable[..., object]:
    with torch.device("meta"):
        model = make()
    try:
        return Plan("fully_shard", blocks_of(model, policy)).annotate
    except ForecastError:  # nothing repeats
        return lambda model, mesh: fully_shard(model, mesh=mesh)


def _show(found: object) -> None:
    """Print a table, in a terminal as one of rich where it is installed; or text as it is."""
    if sys.stdout.isatty() and not isinstance(found, str):
        with suppress(ModuleNotFoundError):
            import_module("rich.console").Console().print(found)
            return
    print(found)
