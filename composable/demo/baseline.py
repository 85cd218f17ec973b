"""Train the un-annotated model in one process on the whole batch. The annotated model must have the same losses."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from composable.demo.memory import MemoryTrace, measure_step, resident_bytes
from composable.demo.model import build, loss_of
from composable.demo.options import Options, ParityError
from composable.demo.recipe import optimizer_of, train_step
from composable.demo.text import batch, read_corpus

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Baseline:
    """Losses of the first steps in nats per byte, and the memory of one step."""

    losses: list[float]
    memory: MemoryTrace


def run_baseline(options: Options, threads: int) -> Baseline:
    """Train in a new process, so that neither process's memory is counted for the other."""
    spawn = multiprocessing.get_context("spawn")
    quietly = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a stack trace
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=signal.signal, initargs=quietly) as pool:
        return pool.submit(_train, options, threads).result()


def _train(options: Options, threads: int) -> Baseline:
    torch.set_num_threads(threads)
    data = read_corpus().train
    before = resident_bytes()
    model = build(options)
    optimizer = optimizer_of(model)

    def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(data, step=step, seed=options.seed, size=options.batch_size, context=options.context)

    losses = [
        train_step(model, optimizer, *rows(step), peak=options.learning_rate, step=step).item()
        for step in range(options.compared_steps)
    ]
    idx, targets = rows(options.compared_steps)
    memory = measure_step(model, optimizer, lambda: loss_of(model, idx, targets), ignore=[data], resident_before=before)
    return Baseline(losses, memory)


def relative_difference(one: float, other: float) -> float:
    """|one - other| / |other|."""
    return abs(one - other) / abs(other)


def check_parity(step: int, loss: float, expected: float) -> None:
    """Check the loss of one step against the un-annotated model.

    Raises:
        ParityError: the losses differ by more than 1e-4 of the expected one, or one of them is not a number.
    """
    difference = relative_difference(loss, expected)
    if not difference <= TOLERANCE:
        raise ParityError(
            f"step {step + 1}: the annotated model's loss is {loss:.7f}, the un-annotated model's {expected:.7f}; "
            f"they differ by {difference:.1e} of it, and {TOLERANCE:.0e} is allowed"
        )
