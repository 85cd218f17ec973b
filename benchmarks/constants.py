"""Claim: constants that tune have values that others do not beat.

Times steps with other ones; knows where constants stand.

Usage:

    python benchmarks/constants.py  # all constants, GPT of 43 M parameters, 2 ranks
    python benchmarks/constants.py --only IN_FLIGHT --rounds 7
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from contenders import scale
from harness import Measure, Sample, Stopwatch, compete, device_of, series, spread, world_of
from models import SIZES, adamw, task_of
from options import parse, parser
from publish import compared, emit, rounded, table


class Constant(NamedTuple):
    """Where one stands, who is timed with it, and with which values; the first is the one that the
    library has.
    """

    module: str
    contender: str
    values: tuple[int, ...]


CONSTANTS: Final = {
    "IN_FLIGHT": Constant("composable.engine.gradients.post_backward", "composable", (1, 0, 3)),
    "FIRST_BYTES": Constant(
        "composable.engine.gradients.post_backward",
        "composable-replicate",
        (1 << 20, 1 << 16, 25 << 20),
    ),
}


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One training step per call, in seconds."""
    name, _, value = contender.partition("=")
    constant = CONSTANTS[name]
    module = import_module(constant.module)
    if getattr(module, name) != constant.values[0]:
        raise ValueError(
            f"{name} in {constant.module} is {getattr(module, name)}, this page says"
            f" {constant.values[0]}"
        )
    setattr(module, name, int(value))
    device = device_of(options)
    task = task_of(options.model, seed=options.seed, rank=dist.get_rank(), device=device)
    model = scale(
        constant.contender, task.model, task.units, device=device, world=world_of(options)
    )
    optimizer = adamw(model.parameters(), "default")
    watch = Stopwatch(device)
    step = 0

    def measure() -> Sample:
        nonlocal step
        watch.start()
        task.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.phase("all")
        step += 1
        return watch.stop()

    return measure


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=5, steps=2)
    options.add_argument("--model", choices=SIZES, default="gpt")
    options.add_argument("--only", default=",".join(CONSTANTS), help="names, separated by commas")
    found = parse(options, model="tiny", only="IN_FLIGHT,FIRST_BYTES")
    title = task_of(found.model, seed=0, rank=0, device=torch.device("meta")).title
    rows, data = [], {}
    for name in found.only.split(","):
        first, *others = [f"{name}={value}" for value in CONSTANTS[name].values]
        rounds = compete(build, [first, *others], found)
        _, ratios = compared(rounds, [(other, first, None) for other in others])
        by_name = {each["ours"]: each for each in ratios}
        for each in (first, *others):
            ratio = by_name.get(each)
            against = (
                ["1.00", "", ""]
                if ratio is None
                else [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
            )
            step = spread(series(rounds, each, "step"))["median"]
            rows.append([each, CONSTANTS[name].contender, f"{step * 1e3:.1f}", *against])
        data[name] = rounded(rounds)
    header = ["constant", "contender", "step, ms", "/ the library's", "min", "max"]
    title = f"Constants: {title} per rank, AdamW, {found.ranks} ranks, {found.device}"
    emit(
        "constants",
        found,
        title=title,
        tables=[table(header, rows)],
        data={"model": found.model, "seconds": data},
        draw=None,
    )


if __name__ == "__main__":
    main()
