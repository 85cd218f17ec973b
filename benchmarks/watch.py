"""Claim: `watch` takes at most 2 % of a step.

Times steps of the same model with and without it, by the clock and by the time of the processor,
and the processor's time inside of what `watch` does, which a busy machine changes least.

Usage:

    python benchmarks/watch.py                      # GPT of 43 M parameters, 2 ranks, CPU
    python benchmarks/watch.py --verb replicate
    python benchmarks/watch.py --device cuda --fake-world 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from contenders import scale
from harness import Measure, Rounds, Sample, compete, device_of, ratios, series, spread, world_of
from models import SIZES, adamw, add_adamw, task_of
from options import parse, parser
from publish import emit, rounded, table

PLAIN: Final = "as it is"
LIMIT: Final = 0.02
EVENTS: Final = ("pre_forward", "post_forward", "pre_backward", "ends_backward", "gradients_landed")
# What is watched, by `every`.
WATCHED: Final = {"watched": 1, "watched, one step in 10": 10}
VERBS: Final = {"fully_shard": "composable", "replicate": "composable-replicate"}


class Inside:
    """The processor's time in calls of some methods, from now on."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def time(self, kind: type, name: str) -> None:
        method = getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        setattr(kind, name, timed)


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One training step per call: seconds of the clock and of the processor."""
    from composable import Watch, watch
    from composable.extras.watch.watch import RankObserver, _Bracket, _StepObserver

    device = device_of(options)
    task = task_of(options.model, seed=options.seed, rank=dist.get_rank(), device=device)
    verb = VERBS[options.verb]
    model = scale(verb, task.model, task.units, device=device, world=world_of(options))
    optimizer = adamw(model.parameters(), options.adamw)
    inside = Inside()
    if contender != PLAIN:
        for name in ("launching", *(name for name in vars(_StepObserver) if name in EVENTS)):
            inside.time(_StepObserver, name)
        for kind, name in (
            (_Bracket, "pre_forward"),
            (_Bracket, "post_forward"),
            (Watch, "end_step"),
        ):
            inside.time(kind, name)
        inside.time(RankObserver, "gradient_came")
        watch(model, every=WATCHED[contender])
    step = 0

    def measure() -> Sample:
        nonlocal step
        start, processor = time.perf_counter(), time.process_time()
        inside.seconds = 0.0
        task.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        step += 1
        return {
            "step": time.perf_counter() - start,
            "cpu": time.process_time() - processor,
            "inside": inside.seconds,
        }

    return measure


def _rows(rounds: Rounds, contenders: Sequence[str]) -> list[list[str]]:
    rows = []
    for contender in contenders:
        row = [contender]
        for metric in ("step", "cpu"):
            row.append(f"{spread(series(rounds, contender, metric))['median'] * 1e3:.1f}")
            against = spread(ratios(rounds, contender, PLAIN, metric))
            row.append("" if contender == PLAIN else f"{against['median']:.3f}")
        spent = spread(series(rounds, contender, "inside"))["median"]
        whole = spread(series(rounds, contender, "cpu"))["median"]
        row += ["", ""] if contender == PLAIN else [f"{spent * 1e3:.1f}", f"{spent / whole:.3f}"]
        rows.append([*row, f"{LIMIT:.2f}" if contender == "watched" else ""])
    return rows


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", choices=SIZES, default="gpt")
    options.add_argument("--verb", choices=VERBS, default="fully_shard")
    add_adamw(options, "default")
    found = parse(options, model="tiny")
    contenders = [PLAIN, *WATCHED]
    title = task_of(found.model, seed=0, rank=0, device=torch.device("meta")).title
    title = f"Watched steps: {title} per rank, {found.verb}, {found.ranks} ranks, {found.device}"
    rounds = compete(build, contenders, found)
    header = ["contender", "step, ms", "/ as it is", "processor, ms", "/ as it is"]
    header += ["in watch, ms", "/ processor", "limit"]
    emit(
        "watch" if found.verb == "fully_shard" else f"watch-{found.verb}",
        found,
        title=title,
        tables=[table(header, _rows(rounds, contenders))],
        data={"model": found.model, "seconds": rounded(rounds)},
    )


if __name__ == "__main__":
    main()
