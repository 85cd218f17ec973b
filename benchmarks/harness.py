"""Runs contenders turn by turn in one run, each in ranks of its own.

Must not know what is measured nor who competes.

Note [Living contenders, alternating turns]
Every contender gets processes of its own, one per rank, all alive during the whole run. Only one
contender works at a time; the others block on a pipe and cost nothing. So a round A B C A B C ...
sees the same weather on the machine, while no contender inherits another's heap, garbage or
autograd threads. A turn is a few untimed steps (the caches are somebody else's), then the timed
ones, with a barrier before each; a step lasts as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hollow
import torch
import torch.distributed as dist
from options import BEFORE

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # the checkout that the benchmarks lie in is the one that is measured
    sys.path.insert(0, str(ROOT))

Sample = dict[str, float]
Measure = Callable[[], Sample]
Build = Callable[[str, argparse.Namespace], Measure]
Rounds = dict[str, list[Sample]]

BEST = "best"  # the turn's fastest step: the figure that other people's load disturbs least

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch._dynamo",
]


class Stopwatch:
    """Splits one step into named phases; on CUDA by events, so that no phase waits for the device.

    `host=True` reads the host's clock only: how long the program was busy telling the device what
    to do.
    """

    def __init__(self, device: torch.device, *, host: bool = False) -> None:
        self._device = device
        self._events = device.type == "cuda" and not host
        self._phases: list[str] = []
        self._marks: list[Any] = []

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._phases, self._marks = [], []
        self._start = time.perf_counter()
        self._mark()

    def phase(self, name: str) -> None:
        """The time since the last mark belongs to `name`."""
        self._phases.append(name)
        self._mark()

    def _mark(self) -> None:
        if self._events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> Sample:
        """Seconds per phase, and `step`: their sum on the wall clock (on CUDA until the device is
        idle).
        """
        if self._events:
            torch.cuda.synchronize(self._device)
            spans = [
                a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)
            ]
            total = time.perf_counter() - self._start
        else:
            spans = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
            total = self._marks[-1] - self._start
        return {"step": total, **dict(zip(self._phases, spans, strict=True))}


def device_of(options: argparse.Namespace) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu")
    )


def world_of(options: argparse.Namespace) -> int:
    return int(options.fake_world or options.ranks)


def join_group(options: argparse.Namespace, rank: int, rendezvous: str) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    # An accelerator is launched at by torch's fake group once per rank: at 64 ranks most of the
    # host's time.
    if options.fake_world and (options.hollow or options.device == "cuda"):
        hollow.register()
        dist.init_process_group(
            hollow.NAME, rank=0, world_size=options.fake_world, store=dist.HashStore()
        )
        return
    if options.fake_world:
        # registers the backend "fake"
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=options.fake_world, store=FakeStore())
        return
    backend = "nccl" if options.device == "cuda" else "gloo"
    limit = timedelta(seconds=options.timeout)
    meet = f"file://{rendezvous}"
    dist.init_process_group(
        backend, init_method=meet, rank=rank, world_size=options.ranks, timeout=limit
    )


def _turn(measure: Measure, options: argparse.Namespace) -> list[Sample]:
    gc.collect()
    gc.disable()  # a collection that falls into somebody's step is luck, not speed
    try:
        samples = []
        for step in range(options.settle + options.steps):
            if not options.fake_world:
                dist.barrier()
            sample = measure()
            if step >= options.settle:
                samples.append(sample)
        return samples
    finally:
        gc.enable()


def _rank_main(
    build: Build,
    contender: str,
    options: argparse.Namespace,
    rank: int,
    rendezvous: str,
    pipe: Connection,
) -> None:
    try:
        torch.set_num_threads(1)
        if contender.startswith(BEFORE):
            sys.path.insert(0, str(options.before.resolve()))
        # Under a fake process group nothing arrives, and stale memory full of denormals would slow
        # down who reads it.
        torch.set_flush_denormal(True)
        warnings.simplefilter("ignore")  # rivals deprecate themselves; that is no result
        join_group(options, rank, rendezvous)
        measure = build(contender, options)
        pipe.send(("ready", None))
        while pipe.recv():
            pipe.send(("samples", _turn(measure, options)))
    except EOFError:
        return  # the run was broken off
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class ContenderFailed(RuntimeError):
    """A contender raised, ended or fell silent; the message carries its traceback."""


class _Ranks:
    """The processes of one contender."""

    def __init__(
        self,
        context: Any,
        build: Build,
        contender: str,
        options: argparse.Namespace,
        rendezvous: Path,
    ) -> None:
        self.contender = contender
        self._timeout = options.timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(1 if options.fake_world else options.ranks):
            ours, theirs = context.Pipe()
            arguments = (build, contender, options, rank, str(rendezvous), theirs)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _answers(self, expected: str) -> list[Any]:
        answers: list[Any] = [None] * len(self._pipes)
        missing: dict[Any, int] = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        deadline = time.monotonic() + self._timeout
        while missing:
            ready: list[Any] = wait(list(missing), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise ContenderFailed(
                    f"{self.contender}: rank(s) {sorted(missing.values())} silent for"
                    f" {self._timeout} s"
                )
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    kind, answers[rank] = pipe.recv()
                except EOFError:
                    raise ContenderFailed(
                        f"{self.contender}: rank {rank} ended without a word"
                    ) from None
                if kind != expected:
                    raise ContenderFailed(f"{self.contender}: rank {rank} raised\n{answers[rank]}")
        return answers

    def ready(self) -> None:
        self._answers("ready")

    def turn(self, key: str) -> Sample:
        """One turn: per step the samples of its slowest rank, per metric the median over the
        steps.
        """
        for pipe in self._pipes:
            pipe.send(True)
        by_rank = self._answers("samples")
        slowest = [
            max(samples, key=lambda sample: sample[key]) for samples in zip(*by_rank, strict=True)
        ]
        turn = {name: statistics.median(sample[name] for sample in slowest) for name in slowest[0]}
        return {**turn, BEST: min(sample[key] for sample in slowest)}

    def end(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it ended before us
                pipe.send(False)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def compete(
    build: Build,
    contenders: Sequence[str],
    options: argparse.Namespace,
    *,
    key: str = "step",
    together: bool = True,
    each: Callable[[str], dict[str, Any]] = lambda contender: {},
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Rounds:
    """Measure `contenders` in alternation.

    Args:
        build: a module-level function, called in every rank's process: makes what takes one sample.
        contenders: names, in the order of their turns.
        key: the metric that decides which rank was the slowest.
        together: False ends one contender before the next one starts, for what does not fit side by
            side.
        each: options that differ from one contender to another.

    Returns:
        For each contender one sample per round.

    Raises:
        ContenderFailed: with the traceback of the rank that raised.
    """
    for name in _ONE_THREAD:
        os.environ[name] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    rounds: Rounds = {contender: [] for contender in contenders}
    groups = [list(contenders)] if together else [[contender] for contender in contenders]
    with tempfile.TemporaryDirectory() as folder:
        for group in groups:
            casts: list[_Ranks] = []
            try:
                for number, contender in enumerate(group):
                    note(f"  building {contender}")
                    # used twice, it would mix two groups
                    meet = Path(folder) / f"{contender}-{number}"
                    own = argparse.Namespace(**{**vars(options), **each(contender)})
                    casts.append(_Ranks(context, build, contender, own, meet))
                    casts[-1].ready()
                for number in range(-options.warmup, options.rounds):
                    for cast in casts:
                        sample = cast.turn(key)
                        if number >= 0:
                            rounds[cast.contender].append(sample)
                    note(f"  round {number + 1}/{options.rounds}" if number >= 0 else "  warm-up")
            finally:
                for cast in casts:
                    cast.end()
    return rounds


def series(rounds: Rounds, contender: str, metric: str) -> list[float]:
    return [sample[metric] for sample in rounds[contender]]


def ratios(rounds: Rounds, one: str, other: str, metric: str = "step") -> list[float]:
    """`one` over `other`, round by round: what the machine did in between cancels out."""
    pairs = zip(series(rounds, one, metric), series(rounds, other, metric), strict=True)
    return [mine / theirs for mine, theirs in pairs]


def spread(values: Iterable[float]) -> dict[str, float]:
    listed = list(values)
    return {"median": statistics.median(listed), "min": min(listed), "max": max(listed)}
