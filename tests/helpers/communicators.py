"""Comms that record, delay or hold back collectives, for `comms_wrapped_by`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.backends import AcceleratorComm, GenericComm, LocalComm, PointToPointComm
from composable.comm.base import Comm, Work
from composable.comm.launch import Launch
from composable.memory.streams import Streams

Pairs = Sequence[tuple[Tensor, Tensor]]
CPU: Final = torch.device("cpu")


@dataclass
class Log:
    """What happened on this rank, in order: ("launch" or "wait", text), and whatever the test
    adds.
    """

    events: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, text: str) -> None:
        self.events.append((what, text))

    def labels(self, what: str = "launch") -> list[str]:
        return [text for event, text in self.events if event == what]


class Waited:
    """A work that calls `act` at the first wait."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def wait(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


class Around:
    """A comm that passes everything on. Subclasses override `_around`, through which collectives
    with a work are launched.
    """

    def __init__(self, inner: Comm) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _around(self, launch: Launch, start: Callable[[], Work]) -> Work:
        return start()

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        return self._around(launch, lambda: self._inner.all_gather(pairs, launch))

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        return self._around(launch, lambda: self._inner.reduce_scatter(pairs, launch, scale))

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        return self._around(launch, lambda: self._inner.all_reduce(tensors, launch, scale))


class Recording(Around):
    """Writes launches and waits into a log."""

    def __init__(self, inner: Comm, log: Log) -> None:
        super().__init__(inner)
        self._log = log

    def _around(self, launch: Launch, start: Callable[[], Work]) -> Work:
        self._log.add("launch", launch.text)
        work = start()

        def wait() -> None:
            self._log.add("wait", launch.text)
            work.wait()

        return Waited(wait)


class Slow(Around):
    """Starts every collective late on one rank."""

    def __init__(self, inner: Comm, *, rank: int, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds if inner.rank == rank else 0.0

    def _around(self, launch: Launch, start: Callable[[], Work]) -> Work:
        time.sleep(self._seconds)
        return start()


class Impatient(Around):
    """Waits for every collective at once: results are there as early as they can be."""

    def _around(self, launch: Launch, start: Callable[[], Work]) -> Work:
        start().wait()
        return Waited(lambda: None)


class LastMoment(Around):
    """Moves no byte before the wait, and leaves NaN where the result will be. A read that is too
    early, or a write to what is being sent, gives other numbers in every run.
    """

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        return self._later(pairs, lambda: self._inner.all_gather(pairs, launch))

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        return self._later(pairs, lambda: self._inner.reduce_scatter(pairs, launch, scale))

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        before = [tensor.detach().clone() for tensor in tensors]
        pairs = [(tensor, value) for tensor, value in zip(tensors, before, strict=True)]

        def start() -> Work:
            for tensor, value in pairs:
                tensor.detach().copy_(value)
            return self._inner.all_reduce(tensors, launch, scale)

        return self._later(pairs, start)

    def _later(self, pairs: Pairs, start: Callable[[], Work]) -> Work:
        for output, source in pairs:
            if (
                output.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
                and output.is_floating_point()
            ):
                output.detach().fill_(float("nan"))
        return Waited(lambda: start().wait())


class Delayed(Around):
    """Now and then sleeps before it launches or waits, on every rank at other times."""

    def __init__(self, inner: Comm, draw: random.Random) -> None:
        super().__init__(inner)
        self._draw = draw

    def _sleep(self) -> None:
        if self._draw.random() < 0.1:
            time.sleep(0.004 * self._draw.random())

    def _around(self, launch: Launch, start: Callable[[], Work]) -> Work:
        self._sleep()
        work = start()

        def wait() -> None:
            self._sleep()
            work.wait()

        return Waited(wait)


def all_ordered(comm: Comm) -> Comm:
    """The backend's own tensor collectives in place of point-to-point messages."""
    return GenericComm(comm.group, comm.device) if isinstance(comm, PointToPointComm) else comm


class ThreadedAccelerator(AcceleratorComm):
    """An accelerator's comm with all of its choices, over CPU tensors: the host launches and goes
    on.

    What is launched runs in a thread, one collective after the other, as with NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, thread: ThreadPoolExecutor) -> None:
        super().__init__(group, CPU, Streams())
        self._thread = thread
        self._inside = threading.local()

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        return self._in_flight(super().all_gather, pairs, launch)

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        return self._in_flight(super().reduce_scatter, pairs, launch, scale)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        return self._in_flight(super().all_reduce, tensors, launch, scale)

    def _in_flight(self, start: Callable[..., Work], *args: Any) -> Work:
        result = self._in_turn(lambda: start(*args).wait())
        return Waited(lambda: result.result())

    def _launch(self, *args: Any) -> Any:
        if getattr(self._inside, "the_thread", False):
            return super()._launch(*args)
        start = super()._launch
        return self._in_turn(lambda: start(*args)).result()

    def _in_turn(self, call: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            self._inside.the_thread = True
            with torch.no_grad():
                return call()

        return self._thread.submit(run)


_THREADED: Final[WeakKeyDictionary[dist.ProcessGroup, ThreadedAccelerator]] = WeakKeyDictionary()


def all_accelerators(comm: Comm) -> Comm:
    """An accelerator's comm in place of another one."""
    if comm.group is None:
        local = LocalComm(CPU)
        local.traits = LocalComm(torch.device("cuda")).traits
        return local
    group = comm.group
    if group not in _THREADED:
        # A group of its own, so that the thread's collectives and those of the test itself are
        # never mixed up.
        own = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        _THREADED[group] = ThreadedAccelerator(own, ThreadPoolExecutor(1))
    return _THREADED[group]
