"""Claim: the peak of memory is below FSDP2's, and known before the run.

Measures bytes per phase; knows no internals.

On CPU a phase's peak is the kernel's high-water mark of resident memory, reset before each phase,
above what the process held before the model was made; pages that several ranks map count in equal
parts for each. On CUDA it is the allocator's peak. Every contender's ranks are fresh processes.
glibc keeps freed blocks for later, so by default it is told to give large ones back at once: the
mark then counts what lives. `--allocator default` leaves it alone and shows what a process really
occupies.

    python benchmarks/memory.py
    python benchmarks/memory.py --device cuda --fake-world 64
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, TOGETHER, add_choice, chosen, scale
from harness import Measure, Sample, compete, device_of, series, spread, world_of
from models import SIZES, adamw, add_adamw, task_of
from options import parse, parser
from publish import Claim, bars, compared, emit, rounded, table
from torch import distributed as dist

from composable.forecast import forecast

PHASES = ("forward", "backward", "optimizer")
CLAIMS: list[Claim] = [
    ("composable", "fsdp2", 1.00),
    ("composable", "fsdp1", None),
    ("composable-keep", "fsdp2-keep", 1.00),
    ("composable-replicate", "ddp-views", None),
]
PREDICTION_LIMIT = 0.05
PREDICTED = ("un-annotated", "composable", "composable-keep", "composable-replicate")
# bytes that a process which trains on a host has above its tensors: workspaces of BLAS, the
# allocator
AROUND = 45e6
DEFAULT = [name for name in CONTENDERS if name not in ("fsdp1-flat", TOGETHER)]


class Gauge:
    """Bytes in use now, and at most since the last reset."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = 0
        self._zero = self.now()

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Linux: the high-water mark starts again from here
            Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) - self._zero
        return _kernel("smaps_rollup", "Pss") - self._zero

    def peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._zero
        # The mark counts shared pages in full, for every rank that maps them.
        counted_twice = _kernel("status", "VmRSS") - _kernel("smaps_rollup", "Pss")
        return _kernel("status", "VmHWM") - counted_twice - self._zero


def _kernel(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the kernel does not report {name}; on CPU this benchmark needs Linux")
    return int(found[1]) * 1024


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One training step per call: bytes at the peak of each phase; `rest`: after the step."""
    device, rank = device_of(options), dist.get_rank()
    # Code that a first step loads is no contender's memory: load it before the gauge is set to
    # zero.
    first = task_of("tiny", seed=0, rank=rank, device=device)
    first.loss(first.model, 0).backward()
    adamw(first.model.parameters(), options.adamw).step()
    del first
    gauge = Gauge(device)
    task = task_of(options.model, seed=options.seed, rank=rank, device=device)
    gauge.reset()
    model = scale(contender, task.model, task.units, device=device, world=world_of(options))
    annotate = gauge.peak()
    optimizer = adamw(model.parameters(), options.adamw)
    step = 0

    def measure() -> Sample:
        nonlocal step
        sample: Sample = {"annotate": annotate}
        gauge.reset()
        loss = task.loss(model, step)
        sample["forward"] = gauge.peak()
        gauge.reset()
        loss.backward()
        sample["backward"] = gauge.peak()
        gauge.reset()
        optimizer.step()
        optimizer.zero_grad()
        sample["optimizer"] = gauge.peak()
        sample["rest"] = gauge.now()
        sample["peak"] = max(sample[phase] for phase in PHASES)
        step += 1
        return sample

    return measure


def peak_of(contender: str, model: str, size: int) -> int:
    """Bytes at the peak of a step, as `composable.forecast` says."""
    task = task_of(model, seed=0, rank=0, device=torch.device("cpu"))
    return forecast(
        lambda: task_of(model, seed=0, rank=0, device=torch.device("meta")).model,
        lambda annotated: CONTENDERS[contender](annotated, task.units, None),
        lambda: 0,
        ranks=size,
        device="cpu",
        loss=task.loss,
    ).peak


def prediction_table(
    rounds: dict[str, list[Sample]], names: list[str], predicted: dict[str, float]
) -> tuple[str, list[dict[str, Any]]]:
    rows, data = [], []
    for name in names:
        if name in predicted:
            seen = spread(series(rounds, name, "peak"))["median"]
            said = predicted[name]
            error = said / seen - 1
            verdict = "yes" if abs(error) <= PREDICTION_LIMIT else "no"
            rows.append(
                [
                    name,
                    f"{predicted[name] / 1e6:.0f}",
                    f"{seen / 1e6:.0f}",
                    f"{error:+.1%}",
                    verdict,
                ]
            )
            data.append({"contender": name, "predicted": round(said), "measured": round(seen)})
    return (
        table(
            ["peak", "predicted, MB", "measured, MB", "off by", f"within {PREDICTION_LIMIT:.0%}"],
            rows,
        )
        if rows
        else ""
    ), data


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=3, steps=1, warmup=2)
    options.add_argument("--model", choices=SIZES, default="gpt")
    add_adamw(options, "default")
    options.add_argument(
        "--allocator",
        choices=("exact", "default"),
        default="exact",
        help="glibc's habit, see above",
    )
    add_choice(options, DEFAULT)
    found = parse(options, model="tiny")
    names = chosen(options, found.contenders)
    size, predicted = world_of(found), {}
    if found.device == "cpu":
        predicted = {
            name: peak_of(name, found.model, size) + AROUND for name in PREDICTED if name in names
        }
    task = task_of(found.model, seed=found.seed, rank=0, device=torch.device("meta"))
    world = (
        f"{found.fake_world} ranks, communication faked"
        if found.fake_world
        else f"{found.ranks} ranks"
    )
    allocator = ", glibc as it is" if found.allocator == "default" else ""
    title = (
        f"Peak memory per rank: {task.title} per rank, AdamW, {world}, {found.device}{allocator}"
    )
    if found.allocator == "exact":
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)  # read by every process at its start
    rounds = compete(build, names, found, key="peak", together=False)
    rows = []
    for name in names:
        medians = {
            metric: spread(series(rounds, name, metric))["median"] / 1e6
            for metric in rounds[name][0]
        }
        rows.append(
            [name, *[f"{medians[key]:.0f}" for key in ("peak", "annotate", *PHASES, "rest")]]
        )
    ratio_table, ratio_data = compared(rounds, CLAIMS, metric="peak")
    prediction, prediction_data = prediction_table(rounds, names, predicted)
    peaks = {
        name: {k: v / 1e6 for k, v in spread(series(rounds, name, "peak")).items()}
        for name in names
    }

    def draw(path: Path) -> None:
        bars(path, title, "megabytes at the peak of a step", peaks)

    tables = [
        table(["MB", "peak of a step", "annotate", *PHASES, "at rest"], rows),
        ratio_table,
        prediction,
    ]
    data = {
        "model": found.model,
        "allocator": found.allocator,
        "ratios": ratio_data,
        "predictions": prediction_data,
        "bytes": rounded(rounds),
    }
    suffix = ("-large" if found.model == "large" else "") + (
        "" if found.allocator == "exact" else "-default"
    )
    emit(f"memory{suffix}", found, title=title, tables=tables, data=data, draw=draw)


if __name__ == "__main__":
    main()
