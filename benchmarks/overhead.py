"""Claim: little Python stands between the user and the hardware.

Times the host per unit and step; no byte is sent.

A fake process group answers every collective at once, and the units are so small that what remains
is the host's work. `added` is a contender's time above the un-annotated model's in the same round,
divided by the number of units. All clip with torch's own function on what their parameters are;
FSDP1 has one of its own, and `composable-on-shards` is composable with its `clip_grad_norm_`, which
does the same to the local shards. All step with torch's AdamW: FSDP2 DTensors, composable the local
shards of its own accord. `un-annotated` clips and steps whole parameters, so what is added by work
on shards may be less than nothing in these two phases. `plain-calls` is the floor of forward and
backward: torch's own calls that a sharded unit needs, from bare hooks (`plain_calls.py`).

    python benchmarks/overhead.py                            # 32 blocks of 12 parameters
    python benchmarks/overhead.py --units 1..128             # how it grows with the units
    python benchmarks/overhead.py --units 16 --params 1..16  # ... and with a unit's parameters
    python benchmarks/overhead.py --before ../of-last-week   # ... beside earlier code, in turns
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from contenders import (
    LOCAL,
    ON_SHARDS,
    PLAIN_CALLS,
    add_choice,
    against_before,
    chosen,
    scale,
    with_before,
)
from harness import Measure, Rounds, Sample, Stopwatch, compete, device_of, series, spread, world_of
from models import Chain, Chains, Task, adamw, add_adamw, gpt_task, vector_task
from options import add_before, counts, parse, parser
from plain_calls import plain_calls
from publish import bars, curves, emit, rounded, table, times
from torch.distributed.device_mesh import init_device_mesh

DEFAULT = [
    LOCAL,
    "composable",
    ON_SHARDS,
    PLAIN_CALLS,
    "fsdp2",
    "fsdp1",
    "composable-replicate",
    "ddp",
]
PHASES = ("forward", "backward", "clip", "optimizer")
LIMIT = 0.30
# On shards, forward and backward are those of `composable`.
RATIOS = [
    ("composable", "fsdp2", ("step", "engine")),
    (ON_SHARDS, "fsdp2", ("step",)),
    ("composable", PLAIN_CALLS, ("engine",)),
    (PLAIN_CALLS, "fsdp2", ("engine",)),
    ("composable", "fsdp1", ("step", "engine")),
    ("composable-replicate", "ddp", ("step", "engine")),
]
WORDS = {
    "step": "whole step",
    "engine": "forward and backward",
    ON_SHARDS: "composable with its own clipping",
}
WIDTH = 32  # wider ones would measure arithmetic and memory, not the host's work


def make_task(options: argparse.Namespace) -> Task:
    device = device_of(options)
    if options.params == 0:
        shape = {"layers": options.units, "width": WIDTH, "heads": 2, "batch": 1, "time": 8}
        return gpt_task(**shape, seed=options.seed, rank=0, device=device)
    torch.manual_seed(options.seed)
    model = Chains(units=options.units, params=options.params, width=WIDTH)
    title = f"{options.units} units of {options.params} matrices of {WIDTH} x {WIDTH}"
    return vector_task(model, Chain, width=WIDTH, device=device, title=title)


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One training step per call: seconds of the host; `engine`: forward and backward only."""
    device = device_of(options)
    task = make_task(options)
    world = world_of(options)
    if contender == PLAIN_CALLS:
        model = plain_calls(task.model, task.units, init_device_mesh(device.type, (world,)))
    else:
        name = contender.replace(ON_SHARDS, "composable")
        model = scale(name, task.model, task.units, device=device, world=world)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, options.adamw, rate=1e-6)
    watch = Stopwatch(device, host=True)
    clip = getattr(model, "clip_grad_norm_", None)  # FSDP1 has its own; torch's would see one shard
    if contender.endswith(ON_SHARDS):
        from composable import clip_grad_norm_

        clip = partial(clip_grad_norm_, parameters)

    def measure() -> Sample:
        watch.start()
        loss = task.loss(model, 0)
        watch.phase("forward")
        loss.backward()
        watch.phase("backward")
        if clip is not None:
            clip(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        watch.phase("clip")
        optimizer.step()
        optimizer.zero_grad()
        watch.phase("optimizer")
        sample = watch.stop()
        return {**sample, "engine": sample["forward"] + sample["backward"]}

    return measure


def added(rounds: Rounds, contender: str, metric: str, units: int) -> dict[str, float]:
    """Milliseconds per unit above the un-annotated model."""
    pairs = zip(series(rounds, contender, metric), series(rounds, LOCAL, metric), strict=True)
    return spread((mine - alone) / units * 1e3 for mine, alone in pairs)


def added_tables(rounds: Rounds, units: int) -> tuple[list[str], list[dict[str, object]]]:
    others = [name for name in rounds if name != LOCAL]
    rows = []
    for name in others:
        whole = added(rounds, name, "step", units)
        phases = [f"{added(rounds, name, phase, units)['median']:.3f}" for phase in PHASES]
        rows.append([name, *[f"{whole[key]:.3f}" for key in ("median", "min", "max")], *phases])
    tables = [table(["added per unit, ms", "step", "min", "max", *PHASES], rows)]
    data: list[dict[str, object]] = []
    rows = []
    before = [
        (ours, theirs, ("step", "engine")) for ours, theirs, _ in against_before(list(rounds))
    ]
    for ours, theirs, metrics in [*RATIOS, *before]:
        for metric in metrics:
            if ours in rounds and theirs in rounds:
                # The medians' ratio: a single round's difference of two near numbers may be
                # anything.
                ratio = (
                    added(rounds, ours, metric, units)["median"]
                    / added(rounds, theirs, metric, units)["median"]
                )
                limit = LIMIT if theirs == "fsdp2" and ours != PLAIN_CALLS else None
                verdict = "" if limit is None else ("yes" if ratio <= limit else "no")
                what = f"{WORDS.get(ours, ours)} / {theirs}, {WORDS[metric]}"
                rows.append([what, f"{ratio:.2f}", f"{limit:.2f}" if limit else "", verdict])
                data.append(
                    {
                        "ours": ours,
                        "theirs": theirs,
                        "metric": metric,
                        "limit": limit,
                        "median": round(ratio, 4),
                    }
                )
    if rows:
        tables.append(table(["ratio of added host time", "median", "limit", "reached"], rows))
    return tables, data


def measure_one(names: list[str], options: argparse.Namespace, units: int, params: int) -> Rounds:
    return compete(
        build, names, argparse.Namespace(**{**vars(options), "units": units, "params": params})
    )


def sweep(
    names: list[str], options: argparse.Namespace, units: list[int], params: list[int]
) -> None:
    """The added time per unit for every combination."""
    others = [name for name in names if name != LOCAL]
    found = {(u, p): measure_one(names, options, u, p) for p in params for u in units}
    lines: dict[str, dict[str, dict[float, float]]] = {}
    rows = []
    for (u, p), rounds in found.items():
        medians = {name: added(rounds, name, "step", u)["median"] for name in others}
        rows.append(
            [str(u), str(p) if p else "12 (block)", *[f"{medians[name]:.3f}" for name in others]]
        )
        by_units = len(units) >= len(params)
        panel = (
            (f"{p} parameters per unit" if p else "transformer blocks")
            if by_units
            else f"{u} units"
        )
        for name in others:
            lines.setdefault(panel, {}).setdefault(name, {})[u if by_units else p] = medians[name]
    x_label = "units" if len(units) >= len(params) else "parameters per unit"
    title = "Host time added per unit and step, fake process group"
    kind = "units" if len(units) >= len(params) else "params"

    def draw(path: Path) -> None:
        curves(path, title, lines, x_label=x_label, y_label="milliseconds per unit and step")

    data = {"units": units, "params": params, "added_ms_per_unit": lines}
    emit(
        f"overhead-{kind}",
        options,
        title=title,
        tables=[table(["units", "parameters per unit", *others], rows)],
        data=data,
        draw=draw,
    )


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=11, steps=5, warmup=2)
    options.set_defaults(fake_world=8)
    options.add_argument(
        "--units", type=counts, default="32", help="number, list, or range such as 1..128"
    )
    options.add_argument(
        "--params",
        type=counts,
        default="0",
        help="parameters per unit; 0: a transformer block, which has 12",
    )
    add_adamw(options, "foreach")
    add_before(options)
    add_choice(options, DEFAULT, also=[ON_SHARDS, PLAIN_CALLS])
    found = parse(options, units=[2], rounds=2)
    names = with_before(
        chosen(options, found.contenders, also=[ON_SHARDS, PLAIN_CALLS]), found.before
    )
    if LOCAL not in names:
        options.error(
            f"--contenders: what is added is counted from {LOCAL!r}, which must be among them"
        )
    units, params = (found.units, found.params)
    if len(units) * len(params) > 1:
        sweep(names, found, units, params)
        return
    rounds = measure_one(names, found, units[0], params[0])
    tables, ratio_data = added_tables(rounds, units[0])
    what = (
        f"{units[0]} transformer blocks of width {WIDTH}"
        if not params[0]
        else f"{units[0]} units of {params[0]} parameters"
    )
    title = f"Host time: {what}, fake process group of {found.fake_world} ranks, {found.device}"
    bar_values = {name: added(rounds, name, "step", units[0]) for name in names if name != LOCAL}

    def draw(path: Path) -> None:
        bars(path, title, "milliseconds added per unit and step", bar_values, digits=2)

    data = {
        "units": units[0],
        "params": params[0],
        "adamw": found.adamw,
        "ratios": ratio_data,
        "seconds": rounded(rounds),
    }
    tables = [times(rounds, ["step", *PHASES]), *tables]
    emit("overhead", found, title=title, tables=tables, data=data, draw=draw)


if __name__ == "__main__":
    main()
