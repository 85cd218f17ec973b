"""Claim: an optimizer's step over sharded parameters costs the host little.

Times AdamW alone; no byte is communicated.

The models' gradients come from a real backward pass, so every contender's optimizer sees what it
would see in training. `plain shards` are ordinary tensors of the shards' sizes: what a step on the
local storage costs without any DTensor. `composable` steps local shards of its own accord;
`composable-on-dtensors` refuses that, and its results are the same bit for bit.

    # 389 parameters over 8 ranks
    python benchmarks/optimizer.py
    # few, and larger than the caches
    python benchmarks/optimizer.py --width 2048 --units 3 --fake-world 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from contenders import LOCAL, add_choice, chosen, scale
from harness import Measure, Sample, Stopwatch, compete, device_of, series, spread, world_of
from models import ADAMW_FLAGS, adamw, gpt_task
from options import parse, parser
from publish import Claim, bars, compared, emit, rounded, table
from torch import nn

PLAIN = "plain shards"
DEFAULT = [LOCAL, "composable", "fsdp2", "fsdp1", "fsdp1-flat"]
ON_DTENSORS = "composable-on-dtensors"
LIMITS = {"default": 0.25, "foreach": 0.55, "fused": 0.30}  # of FSDP2
COMPARED: list[Claim] = [
    ("composable", ON_DTENSORS, None),
    ("composable", PLAIN, None),
    ("composable", "fsdp1-flat", None),
    (ON_DTENSORS, "fsdp2", None),
]
WIDTH = 32  # at which parameters are so small that the host's time is all that there is


def _plain_shards(model: nn.Module, size: int) -> list[nn.Parameter]:
    shards = []
    for parameter in model.parameters():
        shard = nn.Parameter(parameter.detach().chunk(size)[0].clone())
        shard.grad = torch.full_like(shard, 1e-3)
        shards.append(shard)
    return shards


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One AdamW step per implementation and call, in seconds."""
    device, world = device_of(options), world_of(options)
    shape = {"layers": options.units, "width": options.width, "heads": 2, "batch": 1, "time": 8}
    task = gpt_task(**shape, seed=options.seed, rank=0, device=device)
    if contender == PLAIN:
        parameters = _plain_shards(task.model, world)
    else:
        model = scale(
            "composable" if contender == ON_DTENSORS else contender,
            task.model,
            task.units,
            device=device,
            world=world,
        )
        task.loss(model, 0).backward()
        parameters = list(model.parameters())
    optimizers = {flag: adamw(parameters, flag, rate=1e-6) for flag in options.flags}
    if contender == ON_DTENSORS:
        from composable import step_on_shards

        for optimizer in optimizers.values():
            step_on_shards(optimizer, enabled=False)
    watch = Stopwatch(device, host=True)

    def measure() -> Sample:
        assert task.model is not None  # it has to stay: units know where their shards lie
        watch.start()
        for flag, optimizer in optimizers.items():
            optimizer.step()
            watch.phase(flag)
        return watch.stop()

    return measure


def usable_flags(options: argparse.Namespace) -> list[str]:
    # on CUDA it is `foreach`
    return [flag for flag in ADAMW_FLAGS if flag != "default" or options.device == "cpu"]


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=11, steps=5)
    options.set_defaults(fake_world=8)
    options.add_argument(
        "--units",
        type=int,
        default=32,
        help="transformer blocks of 12 parameters; the root has 5 more",
    )
    options.add_argument("--width", type=int, default=WIDTH, help="of the transformer")
    add_choice(options, DEFAULT)
    found = parse(options, units=2)
    found.flags = usable_flags(found)
    is_long = found.width > WIDTH
    names = [*chosen(options, found.contenders), ON_DTENSORS, PLAIN]
    rounds = compete(build, names, found)
    medians = {
        name: [spread(series(rounds, name, flag))["median"] * 1e3 for flag in found.flags]
        for name in names
    }
    rows = [[name, *[f"{value:.2f}" for value in values]] for name, values in medians.items()]
    ratio_tables, ratio_data = [], {}
    for flag in found.flags:
        limit = None if is_long or found.device != "cpu" else LIMITS[flag]
        text, ratio_data[flag] = compared(
            rounds, [("composable", "fsdp2", limit), *COMPARED], metric=flag
        )
        ratio_tables.append(text)
    count = 12 * found.units + 5
    width = f" of width {found.width}" if is_long else ""
    title = (
        f"AdamW step over {count} parameters of a model{width} sharded {world_of(found)} ways,"
        f" {found.device}"
    )
    best = {
        name: min(found.flags, key=lambda flag: spread(series(rounds, name, flag))["median"])
        for name in names
    }
    values = {
        f"{name} ({best[name]})": {
            k: v * 1e3 for k, v in spread(series(rounds, name, best[name])).items()
        }
        for name in names
    }

    def draw(path: Path) -> None:
        bars(path, title, "milliseconds per step, best implementation for each", values, digits=1)

    tables = [table(["ms per step", *found.flags], rows), *ratio_tables]
    data = {"parameters": count, "ratios": ratio_data, "seconds": rounded(rounds)}
    emit(
        "optimizer-long" if is_long else "optimizer",
        found,
        title=title,
        tables=tables,
        data=data,
        draw=draw,
    )


if __name__ == "__main__":
    main()
