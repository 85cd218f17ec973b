"""Claim: a step costs little more than it must.

Compares it with its floor, shows where the rest goes; no internals.

The floor is measured in the same run: the un-annotated forward and backward, then the bytes that
have to move, unit by unit by the fastest algorithm at hand and with buffers that are never made
anew, then AdamW on flat plain shards. Nothing overlaps in it: on CPU, moving bytes occupies the
very cores that compute. Where devices can do both at once, the last column says what would remain
if all of the movement were hidden.

    python benchmarks/floor.py
    python benchmarks/floor.py --keep              # reshard_after_forward=False: gathered once
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from algorithms import GATHERS, REDUCTIONS, Move
from contenders import chosen, scale
from harness import Measure, Rounds, Sample, Stopwatch, compete, device_of, spread, world_of
from models import SIZES, Task, adamw, add_adamw, task_of
from options import parse, parser
from profile_ops import Operators, operator_table
from publish import compared, emit, rounded, stacked, table
from torch import nn

FLOOR = "floor"
LIMIT = 1.10
PHASES = ("forward", "backward", "gather", "reduce", "optimizer")


def _unit_numels(task: Task) -> list[int]:
    """Elements of each unit, the root's own last."""
    units = [module for module in task.model.modules() if isinstance(module, task.units)]
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    return [*sizes, task.parameters - sum(sizes)]


def _fastest(makers: dict[str, Move], watch: Stopwatch, device: torch.device) -> Move:
    """The quickest of some ways to do the same, all ranks agreeing."""
    seconds = torch.zeros(len(makers), device=device)
    for _ in range(3):
        for index, move in enumerate(makers.values()):
            dist.barrier()
            watch.start()
            move()()
            watch.phase("move")
            seconds[index] += watch.stop()["step"]
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return list(makers.values())[int(seconds.argmin())]


def _floor(task: Task, options: argparse.Namespace) -> Measure:
    device, size = device_of(options), dist.get_world_size()
    watch = Stopwatch(device)
    padded = [-(-numel // size) * size for numel in _unit_numels(task)]
    whole = torch.zeros(max(padded), device=device)
    shards = [torch.full((numel // size,), 1e-3, device=device) for numel in padded]
    moved = torch.zeros_like(shards[0].new_empty(max(padded) // size))
    gathers: list[Move] = []
    reductions: list[Move] = []
    for numel, shard in zip(padded, shards, strict=True):
        buffer, mine = whole[:numel], moved[: numel // size]
        gathers.append(
            _fastest({name: make(shard, buffer) for name, make in GATHERS.items()}, watch, device)
        )
        makers = {
            name: make(buffer, mine)
            for name, make in REDUCTIONS.items()
            if not name.startswith("all-reduce")
        }
        reductions.append(_fastest(makers, watch, device))
    flat = [nn.Parameter(shard) for shard in shards]
    for parameter in flat:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = adamw(flat, options.adamw)
    rounds_of_gathers = 1 if options.keep else 2
    step = 0

    def measure() -> Sample:
        nonlocal step
        watch.start()
        loss = task.loss(task.model, step)
        watch.phase("forward")
        loss.backward()
        watch.phase("backward")
        for _ in range(rounds_of_gathers):
            for gather in gathers:
                gather()()
        watch.phase("gather")
        for reduce in reductions:
            reduce()()
        watch.phase("reduce")
        optimizer.step()
        task.model.zero_grad()
        watch.phase("optimizer")
        step += 1
        return watch.stop()

    return measure


def _contender(name: str, task: Task, options: argparse.Namespace) -> Measure:
    device = device_of(options)
    model = scale(name, task.model, task.units, device=device, world=world_of(options))
    optimizer = adamw(model.parameters(), options.adamw)
    watch = Stopwatch(device)
    step = 0

    def measure() -> Sample:
        nonlocal step
        watch.start()
        loss = task.loss(model, step)
        watch.phase("forward")
        loss.backward()
        watch.phase("backward")
        optimizer.step()
        optimizer.zero_grad()
        watch.phase("optimizer")
        step += 1
        return watch.stop()

    return measure


def build(name: str, options: argparse.Namespace) -> Measure:
    """One training step per call, in seconds; with `options.profile` the seconds inside each
    operator instead.
    """
    task = task_of(
        options.model, seed=options.seed, rank=dist.get_rank(), device=device_of(options)
    )
    measure = _floor(task, options) if name == FLOOR else _contender(name, task, options)
    return Operators(measure) if options.profile else measure


def floor_table(rounds: Rounds) -> tuple[str, dict[str, dict[str, float]]]:
    """Milliseconds by phase, and above the floor; the contenders' communication is inside forward
    and backward.
    """
    medians = {
        name: {
            phase: spread(sample.get(phase, 0.0) for sample in samples)["median"] * 1e3
            for phase in ("step", *PHASES)
        }
        for name, samples in rounds.items()
    }
    floor = medians[FLOOR]
    hidden = (
        max(floor["forward"] + floor["backward"], floor["gather"] + floor["reduce"])
        + floor["optimizer"]
    )
    rows = []
    for name, phases in medians.items():
        shown = [f"{phases[phase]:.1f}" if phase in rounds[name][0] else "" for phase in PHASES]
        above = phases["step"] - floor["step"]
        rows.append(
            [
                name,
                f"{phases['step']:.1f}",
                *shown,
                f"{above:+.1f}",
                f"{phases['step'] / hidden:.2f}",
            ]
        )
    header = ["ms", "step", *PHASES, "above the floor", "of all-hidden floor"]
    pieces = {
        name: {phase: phases[phase] for phase in PHASES if phase in rounds[name][0]}
        for name, phases in medians.items()
    }
    return table(header, rows), pieces


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", choices=SIZES, default="gpt")
    options.add_argument(
        "--keep",
        action="store_true",
        help="reshard_after_forward=False: every unit is gathered once",
    )
    options.add_argument(
        "--contenders", default=None, help="names or globs; by default composable and FSDP2"
    )
    add_adamw(options, "default")
    found = parse(options, model="tiny")
    if found.fake_world:
        options.error(
            "--fake-world: a faked process group moves no bytes, so there is no floor to measure"
        )
    end = "-keep" if found.keep else ""
    names = chosen(options, found.contenders or f"composable{end},fsdp2{end}")
    title = task_of(found.model, seed=0, rank=0, device=torch.device("cpu")).title
    title = f"Above the floor: {title} per rank, AdamW, {found.ranks} ranks, {found.device}"
    found.profile = False
    rounds = compete(build, [FLOOR, *names], found)
    phases, pieces = floor_table(rounds)
    claims = [(name, FLOOR, LIMIT if name.startswith("composable") else None) for name in names]
    ratio_table, ratio_data = compared(rounds, claims)
    # A profiler slows down whom it watches, so the operators' times come from turns of their own.
    watched = argparse.Namespace(
        **{**vars(found), "profile": True, "rounds": 1, "steps": 1, "warmup": 1}
    )
    operators = operator_table(compete(build, [FLOOR, *names], watched), FLOOR)

    def draw(path: Path) -> None:
        stacked(
            path,
            title,
            "milliseconds per step (contenders communicate inside forward and backward)",
            pieces,
        )

    data = {
        "model": found.model,
        "keep": found.keep,
        "ratios": ratio_data,
        "seconds": rounded(rounds),
    }
    emit(
        f"floor{end}",
        found,
        title=title,
        tables=[phases, ratio_table, operators],
        data=data,
        draw=draw,
    )


if __name__ == "__main__":
    main()
