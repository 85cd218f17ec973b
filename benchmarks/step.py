"""Claim: a training step is faster than with FSDP2, FSDP1 and DDP.

Times steps and their phases; knows no internals.

Usage:

    python benchmarks/step.py                      # GPT of 43 M parameters, 2 ranks, CPU
    python benchmarks/step.py --model conv --ranks 4
    python benchmarks/step.py --device cuda --fake-world 64
    python benchmarks/step.py --contenders composable,fsdp2 --before ../of-last-week
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import (
    CONTENDERS,
    LOCAL,
    TOGETHER,
    add_choice,
    against_before,
    chosen,
    scale,
    with_before,
)
from harness import (
    ContenderFailed,
    Measure,
    Sample,
    Stopwatch,
    compete,
    device_of,
    series,
    spread,
    world_of,
)
from models import SIZES, adamw, add_adamw, task_of
from options import add_before, parse, parser
from publish import Claim, bars, compared, emit, rounded, times

CLAIMS: list[Claim] = [
    ("composable", "fsdp2", 0.80),
    ("composable", "fsdp1", None),
    ("composable-keep", "fsdp2-keep", None),
    ("composable-keep", "fsdp1-keep", None),
    ("composable-replicate", "ddp", None),
    ("composable-replicate", "ddp-views", None),
    ("composable-replicate-views", "ddp", None),
    ("composable-replicate-views", "ddp-views", None),
    (TOGETHER, "composable", 1.02),
]
# of DDP at its better setting
REPLICATE_LIMITS = {"composable-replicate": 1.0, "composable-replicate-views": 0.95}
# relative, after the warm-up: Adam magnifies the rounding of different summation orders
LOSS_TOLERANCE = 1e-3
DEFAULT = [name for name in CONTENDERS if name not in ("fsdp1-flat", TOGETHER)]


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One training step per call, in seconds; `loss` is the mean over the ranks, and not timed."""
    device = device_of(options)
    task = task_of(options.model, seed=options.seed, rank=dist.get_rank(), device=device)
    model = scale(contender, task.model, task.units, device=device, world=world_of(options))
    optimizer = adamw(model.parameters(), options.adamw)
    watch = Stopwatch(device)
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    if contender == TOGETHER:
        from composable import together

        scope = partial(together, model)
    step = 0

    def measure() -> Sample:
        nonlocal step
        watch.start()
        with scope():
            loss = task.loss(model, step)
            watch.phase("forward")
            loss.backward()
        watch.phase("backward")
        optimizer.step()
        optimizer.zero_grad()
        watch.phase("optimizer")
        sample = watch.stop()
        step += 1
        mean = loss.detach()
        if not options.fake_world:
            dist.all_reduce(mean)
        sample["loss"] = mean.item() / dist.get_world_size()
        return sample

    return measure


def better_ddp(rounds: dict[str, list[Sample]]) -> list[Claim]:
    settings = [name for name in ("ddp", "ddp-views") if name in rounds]
    best = min(
        settings, key=lambda name: spread(series(rounds, name, "step"))["median"], default=None
    )
    return [
        (ours, theirs, REPLICATE_LIMITS[ours] if theirs == best else limit)
        for ours, theirs, limit in CLAIMS
    ]


def check_losses(rounds: dict[str, list[Sample]]) -> None:
    """Contenders that communicate compute the same thing, or comparing their times means nothing.

    Raises:
        ContenderFailed: naming the two contenders and their losses.
    """
    # Not the first step's, which no gradient has touched yet; not the last one's, as rounding adds
    # up.
    losses = {name: samples[:2][-1]["loss"] for name, samples in rounds.items() if name != LOCAL}
    for name, loss in losses.items():
        first = next(iter(losses))
        if not math.isclose(loss, losses[first], rel_tol=LOSS_TOLERANCE):
            raise ContenderFailed(
                f"different training: {name} has loss {loss:.6f}, {first} {losses[first]:.6f}"
            )


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", choices=SIZES, default="gpt")
    add_adamw(options, "default")
    add_before(options)
    add_choice(options, DEFAULT)
    found = parse(options, model="tiny")
    names = with_before(chosen(options, found.contenders), found.before)
    title = task_of(found.model, seed=0, rank=0, device=torch.device("meta")).title
    world = (
        f"{found.fake_world} ranks, communication faked"
        if found.fake_world
        else f"{found.ranks} ranks"
    )
    title = f"Training step: {title} per rank, AdamW, {world}, {found.device}"
    rounds = compete(build, names, found)
    if not found.fake_world:
        check_losses(rounds)
    ratio_table, ratio_data = compared(rounds, [*better_ddp(rounds), *against_before(names)])
    steps = {
        name: {k: v * 1e3 for k, v in spread(series(rounds, name, "step")).items()}
        for name in names
    }

    def draw(path: Path) -> None:
        bars(path, title, "milliseconds per step (line: fastest and slowest round)", steps)

    metrics = ["step", "forward", "backward", "optimizer"]
    suffix = "" if found.model in ("gpt", "tiny") else f"-{found.model}"
    data = {
        "model": found.model,
        "adamw": found.adamw,
        "ratios": ratio_data,
        "seconds": rounded(rounds),
    }
    emit(
        f"step{suffix}",
        found,
        title=title,
        tables=[times(rounds, metrics), ratio_table],
        data=data,
        draw=draw,
    )


if __name__ == "__main__":
    main()
