"""Claim: with local steps, bytes between replicas fall with the length of a round.

Counts them, and draws the loss beside synchronous training.

Usage:

    # 300 steps of a small model of the demo, 2 replicas of 2 ranks
    python benchmarks/local_steps.py
    python benchmarks/local_steps.py --every 1,10,50
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from harness import Measure, Rounds, Sample, compete, series
from options import counts, parse, parser
from publish import curves, emit, rounded, table

from composable.comm.launch import Launch

SYNCHRONOUS: Final = "composable"
TURN: Final = 10  # steps in a turn, over which losses are averaged


class Counting:
    """A comm that counts the elements' bytes of what it reduces, if its ranks belong to different
    replicas.
    """

    def __init__(self, inner: Any, sent: list[int], shards: int) -> None:
        self._inner = inner
        ranks = [] if inner.group is None else dist.get_process_group_ranks(inner.group)
        self._sent = sent if len({rank // shards for rank in ranks}) > 1 else [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], launch: Launch, scale: float = 1.0
    ) -> Any:
        self._sent[0] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self._inner.all_reduce(tensors, launch, scale)


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One turn of training steps per call."""
    from torch.distributed.device_mesh import init_device_mesh

    from composable import fully_shard, local_steps
    from composable.comm.backends import comms_wrapped_by
    from examples.demo import model as demo
    from examples.demo.text import batch, read_corpus

    shards = options.ranks // 2
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(options.seed)
    model = demo.GPT(layers=options.layers, width=options.width, context=options.context).apply(
        demo.initialise
    )
    sent = [0]
    with comms_wrapped_by(partial(Counting, sent=sent, shards=shards)):
        fully_shard(model, mesh=mesh, policy={demo.Block})
        optimizer = demo.optimizer_of(model)
        if contender != SYNCHRONOUS:
            local_steps(model, optimizer, every=int(contender.removeprefix("every ")))
    data, step, rank = read_corpus().train, 0, dist.get_rank()

    def measure() -> Sample:
        nonlocal step
        sent[0], losses, start = 0, torch.zeros(()), time.perf_counter()
        for _ in range(TURN):
            rows = batch(
                data,
                step=step * options.ranks + rank,
                seed=options.seed,
                size=4,
                context=options.context,
            )
            losses += demo.train_step(model, optimizer, *rows, peak=2e-3, step=step)
            step += 1
        seconds = time.perf_counter() - start
        dist.all_reduce(losses)
        loss = losses.item() / (TURN * options.ranks)
        return {"step": seconds / TURN, "loss": loss, "bytes": sent[0] / TURN}

    return measure


def _rows(rounds: Rounds, contenders: Sequence[str]) -> list[list[str]]:
    rows, whole = [], 0.0
    for contender in contenders:
        sent = sum(series(rounds, contender, "bytes")) / len(rounds[contender])
        whole = whole or sent
        losses = series(rounds, contender, "loss")
        middle = losses[(len(losses) - 1) // 2]
        rows.append(
            [
                contender,
                f"{sent / 1024:.1f}",
                f"{sent / whole:.3f}",
                f"{middle:.3f}",
                f"{losses[-1]:.3f}",
            ]
        )
    return rows


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=30, steps=1, warmup=0)
    options.add_argument("--every", default="1,10,50", help="lengths of a round, in steps")
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--context", type=int, default=64)
    options.set_defaults(ranks=4, settle=0)
    found = parse(options, every="1,2", layers=1, width=32, context=16)
    contenders = [SYNCHRONOUS, *(f"every {length}" for length in counts(found.every))]
    rounds = compete(build, contenders, found, together=False)
    steps = found.rounds * TURN
    title = (
        f"Local steps: {steps} steps of the demo's model (width {found.width}), 2 replicas of"
        f" {found.ranks // 2} ranks, {found.device}"
    )
    header = ["contender", "KiB per step", "/ hybrid", f"loss at {steps // 2}", f"loss at {steps}"]

    def draw(path: Path) -> None:
        losses = {
            c: {TURN * (i + 1): v for i, v in enumerate(series(rounds, c, "loss"))}
            for c in contenders
        }
        curves(
            path,
            title,
            {"training loss": losses},
            x_label="step",
            y_label="nats per byte",
            log_y=False,
        )

    emit(
        "local-steps",
        found,
        title=title,
        tables=[table(header, _rows(rounds, contenders))],
        data={"rounds": rounded(rounds)},
        draw=draw,
    )


if __name__ == "__main__":
    main()
