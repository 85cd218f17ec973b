"""Shows where composable's host time goes, by file: samples of what Python runs.

Looks into the library; compares nothing. A timer of the process' own time interrupts forward and
backward about once in a millisecond, and what composable's code is at then counts, with what torch
does for it (a call into torch is counted where it returns). `decides` are the files that decide
what a step does next (hooks, units, roots, orders): all that a recording could leave out, if it
were replayed. Time outside of composable's files is the model's own.

    python benchmarks/sampled.py               # 32 transformer blocks, faked group of 8 ranks
    python benchmarks/sampled.py --lines 30    # and the lines that take most
"""

from __future__ import annotations

import argparse
import collections
import signal
import time
from pathlib import Path
from types import FrameType

import torch
from contenders import scale
from harness import device_of, join_group, world_of
from options import parse, parser
from overhead import make_task
from publish import table

import composable

PACKAGE = str(Path(composable.__file__).parent) + "/"
DECIDES = ("contract/", "engine/step/", "engine/gradients/post_backward.py")
INTERVAL = 0.0011  # seconds; no divisor of a step


class Samples:
    """What composable was at when the timer rang."""

    def __init__(self) -> None:
        self.files: collections.Counter[str] = collections.Counter()
        self.lines: collections.Counter[str] = collections.Counter()
        self.count = 0

    def take(self, _: int, frame: FrameType | None) -> None:
        self.count += 1
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.files[file] += 1
            self.lines[f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"] += 1


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    join_group(options, 0, "")
    task, samples = make_task(options), Samples()
    model = scale(
        "composable", task.model, task.units, device=device_of(options), world=world_of(options)
    )
    signal.signal(signal.SIGPROF, samples.take)
    seconds, steps = 0.0, 0
    for step in range(options.warmup + options.steps):
        loud = step >= options.warmup
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, INTERVAL * loud, INTERVAL * loud)
        task.loss(model, step).backward()
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds += (time.process_time() - start) * loud
        steps += loud
        model.zero_grad()
    each = 1e6 * seconds / steps / options.units / max(1, samples.count)  # us of a unit and sample
    # where C returns from the graph to a hook: autograd's own time, of which nothing is ours
    graph = samples.files.pop("engine/step/visit.py", 0)
    decides = sum(n for file, n in samples.files.items() if file.startswith(DECIDES))
    rows = [[file, f"{each * n:.1f}"] for file, n in samples.files.most_common(25)]
    rows += [
        ["all of composable", f"{each * samples.files.total():.1f}"],
        ["of these: decides", f"{each * decides:.1f}"],
        ["model and autograd", f"{each * (samples.count - samples.files.total()):.1f}"],
        ["of these: seen as autograd calls a hook", f"{each * graph:.1f}"],
    ]
    print(table(["file", "us per unit"], rows))
    for line, n in samples.lines.most_common(options.lines):
        print(f"{each * n:7.1f} us  {line}")


if __name__ == "__main__":
    options = parser("Where composable's host time goes, by file.", steps=300, warmup=5)
    options.add_argument("--units", type=int, default=32)
    options.add_argument("--params", type=int, default=0, help="0: transformer blocks")
    options.add_argument("--lines", type=int, default=0, help="so many lines that take most")
    options.set_defaults(fake_world=8)
    main(parse(options, units=2, steps=3))
