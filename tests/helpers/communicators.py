"""Communicators that record, delay or hold back collectives; knows the protocol of communicators and nothing above it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives import (
    AcceleratorCommunicator,
    Communicator,
    GatherPart,
    GenericCommunicator,
    LocalCommunicator,
    PointToPointCommunicator,
    ReducePart,
    ScaledInput,
    Scratch,
    Steps,
    TagSequence,
    Work,
    communicator_like,
)
from composable.device.streams import HostStreams


@dataclass
class Log:
    """What happened on this rank, in order: ("launch" or "wait", label), and whatever the test adds."""

    events: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, label: str) -> None:
        self.events.append((what, label))

    def labels(self, what: str = "launch") -> list[str]:
        return [label for event, label in self.events if event == what]

    def while_in_flight(self, label: str, what: str) -> list[str]:
        """Labels of the events `what` between the first launch of `label` and its wait."""
        start = self.events.index(("launch", label))
        end = self.events.index(("wait", label), start)
        return [other for event, other in self.events[start:end] if event == what]


@dataclass
class _Later:
    """An arrival that does something of its own before or in place of the communicator's."""

    act: Callable[[], None]
    try_to: Callable[[], bool] = lambda: False
    done: bool = False

    def progress(self) -> bool:
        return self.done or self.try_to()

    def wait(self) -> None:
        if not self.done:
            self.done = True
            self.act()

    def abort(self) -> None:
        self.wait()


class _Around:
    """A communicator that passes everything on."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class OwnTags(_Around):
    """Refuses tags that were opened for another group: each numbers its own, so here they may be another unit's."""

    _OPENED: ClassVar[WeakKeyDictionary[Any, WeakSet[TagSequence]]] = WeakKeyDictionary()  # by group

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._opened = self._OPENED.setdefault(inner.group, WeakSet())
        self.tags = self  # in place of the communicator's

    def open(self) -> TagSequence:
        sequence = self._inner.tags.open()
        self._opened.add(sequence)
        return sequence

    @property
    def opened(self) -> int:
        return self._inner.tags.opened

    def open_up_to(self, count: int) -> None:
        self._inner.tags.open_up_to(count)

    def count_by(self, steps: Steps) -> None:
        self._inner.tags.count_by(steps)

    def _check(self, label: str, tags: TagSequence | None) -> None:
        assert tags is None or tags in self._opened, f"{label}: under tags of another group"

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        self._check(label, tags)
        return self._inner.all_gather(prepared, label=label, tags=tags)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        self._check(label, tags)
        return self._inner.reduce_scatter(parts, scratch=scratch, label=label, tags=tags)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        self._check(label, tags)
        return self._inner.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags)

    def min_max(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> tuple[list[int], list[int]]:
        self._check(label, tags)
        return self._inner.min_max(values, label=label, tags=tags)

    def all_gather_ints(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> list[list[int]]:
        self._check(label, tags)
        return self._inner.all_gather_ints(values, label=label, tags=tags)


class Recording(_Around):
    """Writes launches and waits into a log."""

    def __init__(self, inner: Communicator, log: Log) -> None:
        super().__init__(inner)
        self._log = log

    def _noted(self, label: str, work: Work) -> Work:
        self._log.add("launch", label)

        def wait() -> None:
            self._log.add("wait", label)
            work.wait()

        return _Later(wait, work.progress)

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        # On its way until it is waited for: what has come lands earlier, and the log would go by the time.
        return _Later(self._noted(label, self._inner.all_gather(prepared, label=label, tags=tags)).wait)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        return self._noted(label, self._inner.reduce_scatter(parts, scratch=scratch, label=label, tags=tags))

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        return self._noted(label, self._inner.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags))


class Slow(_Around):
    """Starts every collective late on one rank."""

    def __init__(self, inner: Communicator, *, rank: int, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds if inner.rank == rank else 0.0

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        time.sleep(self._seconds)
        return self._inner.all_gather(prepared, label=label, tags=tags)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        time.sleep(self._seconds)
        return self._inner.reduce_scatter(parts, scratch=scratch, label=label, tags=tags)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        time.sleep(self._seconds)
        return self._inner.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags)


class Impatient(_Around):
    """Waits for every collective at once: results are there before anybody asks."""

    def _now(self, work: Work) -> Work:
        work.wait()
        return _Later(lambda: None, lambda: True)

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        return self._now(self._inner.all_gather(prepared, label=label, tags=tags))

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        return self._now(self._inner.reduce_scatter(parts, scratch=scratch, label=label, tags=tags))

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        return self._now(self._inner.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags))


class LastMoment(_Around):
    """Moves no byte before the wait, and leaves NaN where the result will be: who reads too early, or changes what is
    being sent, computes something else than expected, every time and not once in a thousand runs."""

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return self._inner.prepare(parts), list(parts)

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        plan, parts = prepared
        for part in parts:
            if part.whole.untyped_storage().data_ptr() != part.shard.untyped_storage().data_ptr():
                _spoil(part.whole)
        return _Later(lambda: self._inner.all_gather(plan, label=label, tags=tags).wait())

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        for part in parts:
            if part.out.untyped_storage().data_ptr() != part.source.untyped_storage().data_ptr():
                _spoil(part.out)
        return _Later(lambda: self._inner.reduce_scatter(parts, scratch=scratch, label=label, tags=tags).wait())

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        before = tensor.detach().clone()
        _spoil(tensor)

        def act() -> None:
            tensor.detach().copy_(before)
            self._inner.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags).wait()

        return _Later(act)


class Delayed(_Around):
    """A communicator that now and then sleeps before it launches or waits, on every rank at other times."""

    def __init__(self, inner: Communicator, draw: random.Random) -> None:
        super().__init__(inner)
        self._draw = draw

    def _nap(self) -> None:
        if self._draw.random() < 0.1:
            time.sleep(0.004 * self._draw.random())

    def _delayed(self, launch: Callable[[], Any]) -> Any:
        self._nap()
        return _Delayed(launch(), self._nap)

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        return self._delayed(lambda: self._inner.all_gather(prepared, label=label, tags=tags))  # type: ignore[no-any-return]

    def reduce_scatter(self, parts: Any, *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        return self._delayed(  # type: ignore[no-any-return]
            lambda: self._inner.reduce_scatter(parts, scratch=scratch, label=label, tags=tags)
        )

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        return self._delayed(lambda: self._inner.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags))  # type: ignore[no-any-return]


@dataclass
class _Delayed:
    inner: Any
    nap: Callable[[], None]

    def abort(self) -> None:
        self.inner.abort()

    def wait(self) -> None:
        self.nap()
        self.inner.wait()

    def progress(self) -> bool:
        return bool(self.inner.progress())


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        with torch.no_grad():
            tensor.data.fill_(float("nan"))


def all_shared(communicator: Communicator) -> Communicator:
    """The communicator that ranks of one host have anyway; that it is the one through shared memory is made sure of."""
    assert communicator.capabilities.tells_of_leaving
    return communicator


def all_sockets(communicator: Communicator) -> Communicator:
    """A communicator that moves everything from point to point, in place of one that uses shared memory."""
    if communicator.capabilities.tells_of_leaving and communicator.dedicated:
        return PointToPointCommunicator(communicator_like(communicator.group, communicator.device), communicator.device)
    return (
        PointToPointCommunicator(communicator.group, communicator.device)
        if communicator.capabilities.tells_of_leaving
        else communicator
    )


def all_ordered(communicator: Communicator) -> Communicator:
    """A communicator whose collectives are told apart by nothing but their order, as NCCL's are."""
    if communicator.capabilities.tells_of_leaving and communicator.dedicated:
        return GenericCommunicator(communicator_like(communicator.group, communicator.device), communicator.device)
    sent_by_pairs = communicator.capabilities.tells_of_leaving or isinstance(communicator, PointToPointCommunicator)
    return GenericCommunicator(communicator.group, communicator.device) if sent_by_pairs else communicator


class _Waiting:
    """What waits for a launch, and for what it brings."""

    def __init__(self, launched: Future[Any], kept: object) -> None:
        self._launched = launched
        self._kept = kept

    def progress(self) -> bool:
        return False

    def wait(self) -> None:
        self._launched.result()
        self._kept = None

    abort = wait


class ThreadedAccelerator(AcceleratorCommunicator):
    """An accelerator's communicator with all of its choices, over CPU tensors: the host launches, and goes on.

    What is launched on one communicator runs in a thread, one after the other, as with NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, thread: ThreadPoolExecutor) -> None:
        super().__init__(group, torch.device("cpu"), HostStreams())
        self._thread = thread

    def _on_stream(self, stream: str, label: str, launch: Any, call: tuple[Any, ...], finish: Any = None) -> Work:
        run = partial(super()._on_stream, stream, label, launch, call, finish)
        return _Waiting(self._in_turn(lambda: run().wait()), call)

    def _launch(self, label: str, call: Callable[[], Any]) -> Any:
        return self._in_turn(partial(super()._launch, label, call)).result()

    def _in_turn(self, launch: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            with torch.no_grad():
                return launch()

        return self._thread.submit(run)


_OWN: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, ThreadPoolExecutor]] = WeakKeyDictionary()
_DEDICATED: WeakKeyDictionary[dist.ProcessGroup, ThreadedAccelerator] = WeakKeyDictionary()


def all_accelerators(communicator: Communicator) -> Communicator:
    """An accelerator's communicator in place of another one; one for all that are dedicated."""
    if isinstance(communicator, LocalCommunicator):
        return LocalCommunicator(torch.device("cuda"))
    group = communicator.group
    dedicated = communicator.capabilities.tells_of_leaving and communicator.dedicated
    if group not in (_DEDICATED if dedicated else _OWN):
        own = communicator_like(group, torch.device("cpu"))  # what a test itself sends is never in between
        if dedicated:
            _DEDICATED[group] = ThreadedAccelerator(own, ThreadPoolExecutor(1))
        else:
            _OWN[group] = own, ThreadPoolExecutor(1)
    return _DEDICATED[group] if dedicated else ThreadedAccelerator(*_OWN[group])
