"""Claim: a step of Muon, whose ranks share the matrices, takes less than one over DTensors.

Times `torch.optim.Muon` alone. Over DTensors, torch's operators gather every matrix, and every rank
computes all of them; `step_on_matrices` gives each rank whole ones of its own. The gradients come
from a real backward pass. `un-annotated` is a plain model on each rank: what it takes to compute
all matrices, without a message.

    # a GPT of 3.2 M parameters over 2 ranks
    python benchmarks/matrices.py
    python benchmarks/matrices.py --ranks 4 --width 512
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from contenders import LOCAL, scale
from harness import Measure, Sample, Stopwatch, compete, device_of, series, spread, world_of
from models import gpt_task
from options import parse, parser
from publish import Claim, bars, compared, emit, rounded, table

OURS = "composable"
ON_DTENSORS = "composable-on-dtensors"
COMPARED: list[Claim] = [
    (OURS, "fsdp2", 0.6),
    (OURS, ON_DTENSORS, 0.6),
    (OURS, LOCAL, None),
]


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One step of Muon per call, in seconds."""
    import torch.distributed as dist

    device, world = device_of(options), world_of(options)
    shape = {"layers": options.units, "width": options.width, "heads": 4, "batch": 1, "time": 32}
    task = gpt_task(**shape, seed=options.seed, rank=dist.get_rank(), device=device)
    name = OURS if contender == ON_DTENSORS else contender
    model = scale(name, task.model, task.units, device=device, world=world)
    task.loss(model, 0).backward()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = torch.optim.Muon(matrices, lr=1e-6)
    if contender == OURS:
        from composable import step_on_matrices

        step_on_matrices(optimizer)
    watch = Stopwatch(device)

    def measure() -> Sample:
        assert task.model is not None  # it has to stay: units know where their shards lie
        watch.start()
        optimizer.step()
        watch.phase("Muon")
        return watch.stop()

    return measure


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=9, steps=3)
    options.add_argument("--units", type=int, default=4, help="transformer blocks of 4 matrices")
    options.add_argument("--width", type=int, default=256, help="of the transformer")
    found = parse(options, units=1, width=32)
    names = [OURS, "fsdp2", ON_DTENSORS, LOCAL]
    rounds = compete(build, names, found)
    title = (
        f"Step of Muon over the matrices of a GPT of {found.units} layers of width {found.width},"
        f" {found.ranks} ranks, {found.device}"
    )
    values = {
        name: {k: v * 1e3 for k, v in spread(series(rounds, name, "step")).items()}
        for name in names
    }
    rows = [
        [name, *[f"{values[name][key]:.1f}" for key in ("median", "min", "max")]] for name in names
    ]
    ratios, data = compared(rounds, COMPARED)

    def draw(path: Path) -> None:
        bars(path, title, "milliseconds per step", values, digits=1)

    emit(
        "matrices",
        found,
        title=title,
        tables=[table(["ms per step", "median", "min", "max"], rows), ratios],
        data={"ratios": data, "seconds": rounded(rounds)},
        draw=draw,
    )


if __name__ == "__main__":
    main()
