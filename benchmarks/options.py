"""The command line that all benchmarks share; must not know what is measured."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
BEFORE = "before-"  # of the names of contenders whose composable is another checkout's


def parser(
    description: str, *, rounds: int = 7, steps: int = 3, warmup: int = 1
) -> argparse.ArgumentParser:
    """The options that all benchmarks share; `rounds`, `steps` and `warmup` are this benchmark's
    defaults.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the models live"
    )
    options.add_argument("--ranks", type=int, default=2, help="processes per contender")
    options.add_argument(
        "--fake-world",
        type=int,
        default=0,
        metavar="N",
        help="one process that believes to be one of N",
    )
    options.add_argument(
        "--rounds", type=int, default=rounds, help="turns of each contender that count"
    )
    options.add_argument(
        "--steps",
        type=int,
        default=steps,
        help="timed steps per turn; a turn counts by their median",
    )
    options.add_argument(
        "--settle", type=int, default=1, help="untimed steps at the start of a turn"
    )
    options.add_argument(
        "--warmup", type=int, default=warmup, help="turns of each contender that do not count"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a silent turn is an error"
    )
    options.add_argument(
        "--out", type=Path, default=None, help="folder of the JSON line and the chart"
    )
    options.add_argument(
        "--smoke", action="store_true", help="smallest sizes: shows that it runs, measures nothing"
    )
    # True: a faked world is made by `hollow.py` instead of torch
    options.set_defaults(before=None, hollow=False)
    return options


def add_before(options: argparse.ArgumentParser) -> None:
    """For benchmarks in which a contender's code may be that of another checkout."""
    options.add_argument(
        "--before", type=Path, metavar="DIR", help="a checkout of earlier code, which competes, too"
    )


def parse(options: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse the command line; under `--smoke`, what was left at its default is replaced by
    `smoke`'s values.
    """
    found = options.parse_args()
    defaults = options.parse_args([])
    if found.smoke:
        for name, value in {"rounds": 2, "steps": 1, "settle": 0, "warmup": 0, **smoke}.items():
            if getattr(found, name) == getattr(defaults, name):
                setattr(found, name, value)
    if found.before is not None and not (found.before / "composable" / "__init__.py").exists():
        options.error(f"--before: {found.before} is no checkout of composable")
    # a smoke run, or one of other contenders, must not overwrite figures that mean something
    if found.out is None:
        found.out = (
            Path(tempfile.mkdtemp(prefix="composable-bench-"))
            if found.smoke or found.before
            else RESULTS
        )
    for name, least in (
        ("ranks", 1),
        ("rounds", 1),
        ("steps", 1),
        ("settle", 0),
        ("warmup", 0),
        ("fake_world", 0),
    ):
        if getattr(found, name) < least:
            options.error(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(found, name)}"
            )
    if found.device == "cuda" and not torch.cuda.is_available():
        options.error("--device cuda: this torch sees no CUDA device")
    if found.device == "cuda" and not found.fake_world and found.ranks > torch.cuda.device_count():
        options.error(
            f"--ranks {found.ranks}: there are {torch.cuda.device_count()} CUDA devices; see"
            " --fake-world"
        )
    return found


def counts(text: str) -> list[int]:
    """`"8"`, `"1,2,5"`, or `"1..128"`: the powers of two between, and both ends.

    >>> counts("1..6")
    [1, 2, 4, 6]
    """
    if ".." not in text:
        return [int(part) for part in text.split(",")]
    first, last = (int(part) for part in text.split(".."))
    values = [first]
    while values[-1] * 2 < last:
        values.append(values[-1] * 2)
    return values if last == first else [*values, last]
