"""Claim: a rank's work does not depend on how many ranks there are.

Fakes worlds of 8 to 16384; no byte is sent.

`annotate`: a model of 70 B parameters on the meta device, once per process. `first step`, `step`:
host time with a small model of tall matrices, so that up to 1024 ranks each own a row; beyond, a
rank's message is padded with rows of nobody.

    python benchmarks/scale.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from contenders import add_choice, chosen, scale
from harness import Measure, Rounds, Stopwatch, compete, device_of, ratios, series, spread
from models import Tall, Talls, WideBlock, WideModel, vector_task
from options import counts, parse, parser
from publish import curves, emit, rounded, table
from torch import nn
from torch.distributed.tensor import DTensor

DEFAULT = ["composable", "fsdp2"]
LIMIT = 1.10  # host time with 1024 ranks against 8
FROM, TO = 8, 1024
ADAM_BYTES = 4  # parameter, gradient and two states, in the parameter's dtype
WIDTH = 4


def _local_bytes(model: nn.Module) -> int:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def build(label: str, options: argparse.Namespace) -> Measure:
    """One sample: annotating the large model, and one training step of the small one."""
    device, world, name = device_of(options), options.fake_world, options.contender
    small = Talls(units=options.units, rows=options.rows, width=WIDTH)
    task = vector_task(small, Tall, width=WIDTH, device=device, title="")
    model = scale(name, task.model, task.units, device=device, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    watch = Stopwatch(device, host=True)

    def step() -> float:
        watch.start()
        task.loss(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.phase("all")
        return watch.stop()["step"]

    once = {"first step": step()}
    wide = _wide(options.layers)
    start = time.perf_counter()
    wide = scale(name, wide, WideBlock, device=device, world=world)
    once["annotate"] = time.perf_counter() - start
    once["bytes"] = _local_bytes(wide)
    del wide  # a model of thousands of modules would slow down the collector in what is timed next
    return lambda: {"step": step(), **once}


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=7, steps=3)
    options.set_defaults(fake_world=FROM, hollow=True)
    options.add_argument(
        "--worlds", type=counts, default="8,64,512,1024,4096,16384", help="numbers of faked ranks"
    )
    options.add_argument("--units", type=int, default=16, help="units of the small model")
    options.add_argument(
        "--rows", type=int, default=TO, help="height of the small model's matrices"
    )
    options.add_argument(
        "--layers", type=int, default=80, help="layers of the large one; 80 make 70 B parameters"
    )
    add_choice(options, DEFAULT)
    found = parse(options, worlds=[FROM, TO], units=2, layers=2)
    names = chosen(options, found.contenders)
    labels = {f"{name}, {world} ranks": (name, world) for world in found.worlds for name in names}
    rounds = compete(
        build,
        list(labels),
        found,
        each=lambda label: dict(zip(("contender", "fake_world"), labels[label], strict=True)),
    )

    def middle(name: str, world: int, metric: str) -> float:
        return spread(series(rounds, f"{name}, {world} ranks", metric))["median"]

    rows = []
    for name in names:
        for world in found.worlds:
            seconds = [
                f"{middle(name, world, metric) * 1e3:.1f}"
                for metric in ("annotate", "first step", "step")
            ]
            size = middle(name, world, "bytes") * ADAM_BYTES
            rows.append([f"{name}, {world} ranks", *seconds, f"{size / 2**30:.3f}"])
    header = ["", "annotate, ms", "first step, ms", "step, ms", "state, GiB per rank"]
    tables, ratio_data = [table(header, rows)], growth(rounds, names, found.worlds)
    if ratio_data:
        shown = [
            [
                f"{row['contender']}, {TO} / {FROM} ranks, {row['metric']}",
                f"{row['median']:.2f}",
                f"{row['min']:.2f}",
                f"{row['max']:.2f}",
            ]
            for row in ratio_data
        ]
        tables.append(
            table(["ratio", "median", "min", "max"], shown)
            + f"\n\nLimit for composable's step: {LIMIT:.2f}."
        )
    panels = {
        metric: {
            name: {float(w): middle(name, w, metric) * 1e3 for w in found.worlds} for name in names
        }
        for metric in ("annotate", "step")
    }
    title = f"Host time by number of ranks (faked), {found.device}"

    def draw(path: Path) -> None:
        curves(path, title, panels, x_label="ranks", y_label="milliseconds", log_y=False)

    parameters = sum(p.numel() for p in _wide(found.layers).parameters())
    data = {
        "parameters": parameters,
        "worlds": found.worlds,
        "ratios": ratio_data,
        "seconds": rounded(rounds),
    }
    emit(
        "scale",
        found,
        title=f"{title}; {parameters / 1e9:.1f} B parameters",
        tables=tables,
        data=data,
        draw=draw,
    )


def _wide(layers: int) -> nn.Module:
    with torch.device("meta"):
        return WideModel(layers=layers)


def growth(rounds: Rounds, names: list[str], worlds: list[int]) -> list[dict[str, object]]:
    """The times at 1024 ranks over those at 8, round by round."""
    if not {FROM, TO} <= set(worlds):
        return []
    rows: list[dict[str, object]] = []
    for name in names:
        for metric in ("annotate", "step"):
            seen = spread(ratios(rounds, f"{name}, {TO} ranks", f"{name}, {FROM} ranks", metric))
            limit = LIMIT if metric == "step" and name.startswith("composable") else None
            rows.append({"contender": name, "metric": metric, "limit": limit, **seen})
    return rows


if __name__ == "__main__":
    main()
