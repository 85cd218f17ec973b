"""Shards and gradients that rest in the host's memory, and their ways to the device and back; knows no layout and no unit.

Note [Shards at rest on the host]
What is gathered comes from a copy on the device, which lives from the launch of a gather to its end; it is cast there. What was
summed lands on the device and leaves it at once. Both ways have a stream of their own. Memory of the device comes and goes on
the stream that computes, which waits for the end of a copy before it gives memory back: for sums on their way that is when the
next ones leave, so that at most two units' are there.

Note [Who waits on the host]
An optimizer, clipping, `load_state_dict` and whatever else users do work on the host, and no stream orders that. So the host
waits until nothing is on its way any more: where a forward of a root has ended, since shards may be written to then, and where
a backward has, since gradients may be read. Inside of a backward it waits before a gradient is added to another one, and before
a hook of the user's is called with one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from composable.device.elastic_buffer import ElasticBuffer
from composable.device.memory import MemoryPool
from composable.device.streams import Mark, streams_of

COMING: Final = "bring shards"
LEAVING: Final = "send gradients"
_LEAVING_AT_ONCE: Final = 2  # sums of as many units


class _Traffic:
    """What is on its way between one device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.streams = streams_of(device)
        self._read: Mark | None = None  # where the last shards have been read
        self._leaving: deque[tuple[Mark, Callable[[], None]]] = deque()  # with what gives their memory back

    def reads_until(self, mark: Mark) -> None:
        self._read = mark

    def send(self, targets: Sequence[Tensor], sums: Sequence[Tensor], free: Callable[[], None]) -> None:
        """Copy sums to the host; `free` gives their memory back, when that is over."""
        with self.streams.fork(LEAVING):
            for target, source in zip(targets, sums, strict=True):
                target.copy_(source, non_blocking=target.is_pinned())
            mark = self.streams.mark()
        self._leaving.append((mark, free))
        self.give_back(_LEAVING_AT_ONCE)

    def give_back(self, left: int = 0) -> None:
        """The memory of all sums but the last `left`."""
        while len(self._leaving) > left:
            mark, free = self._leaving.popleft()
            mark.join()
            free()

    def wait(self) -> None:
        """Return when nothing is on its way."""
        if self._read is not None:
            self._read.wait_on_host()
            self._read = None
        if self._leaving:
            self._leaving[-1][0].wait_on_host()
            self.give_back()


_TRAFFIC: Final[dict[torch.device, _Traffic]] = {}


def wait_for_traffic() -> None:
    """Return when nothing is on its way between any device and shards on the host. See Note [Who waits on the host]."""
    for traffic in _TRAFFIC.values():
        traffic.wait()


class HostHome:
    """Memory of the host where shards that are computed with on `device` rest.

    Args:
        device: with its index.
    """

    __slots__ = ("_pin_memory", "device", "traffic")

    def __init__(self, device: torch.device, *, pin_memory: bool) -> None:
        self.device = device
        self._pin_memory = pin_memory
        self.traffic = _TRAFFIC.setdefault(device, _Traffic(device))

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pin_memory and numel > 0)

    def take(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Memory of the host that these tensors of the device are on their way to."""
        pinned = self._pin_memory
        taken = [torch.empty_like(each, device="cpu", pin_memory=pinned and each.numel() > 0) for each in sums]
        leaving = [*sums]
        self.traffic.send(taken, leaving, partial(list.clear, leaving))
        return taken


class ComingShards:
    """The shards of one unit on the device, while a gather needs them.

    Attributes:
        buffer: of the same layout as the shard buffer.
    """

    __slots__ = ("_end", "_shard", "_traffic", "buffer")

    def __init__(self, shard: Tensor, home: HostHome, pool: MemoryPool) -> None:
        self._shard = shard
        self._traffic = home.traffic
        self._end: Mark | None = None
        self.buffer = ElasticBuffer(shard.numel(), shard.dtype, home.device, pool)

    def here(self) -> AbstractContextManager[None]:
        """Run the body where shards come: after everything that the current stream was given so far, and after them."""
        return self._traffic.streams.fork(COMING)

    def bring(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Let them come, and copy `sources`, which are parts of them, to `targets`."""
        self.buffer.allocate()
        with self.here():
            self.buffer.tensor.data.copy_(self._shard.data, non_blocking=self._shard.is_pinned())
            self._end = self._traffic.streams.mark()
            self._traffic.reads_until(self._end)
            if targets:
                torch._foreach_copy_(list(targets), list(sources))
                self._end = self._traffic.streams.mark()

    def end(self) -> None:
        """They are not needed any more, and what `here` was given is done before whatever the current stream is given now."""
        if self._end is not None:
            self._end.join()
            self._end = None
        self.buffer.free()


class LeavingSums:
    """Where the sums of one reduction land on the device, and where they rest on the host.

    Args:
        stretches: where sums are in `numel` elements, starts and ends.

    Attributes:
        buffer: memory of the device, from `refresh` until they have left.
        rests: memory of the host.
    """

    __slots__ = ("_parts", "_traffic", "buffer", "rests")

    def __init__(
        self, numel: int, dtype: torch.dtype, home: HostHome, pool: MemoryPool, stretches: Sequence[tuple[int, int]]
    ) -> None:
        self._traffic = home.traffic
        self.buffer = ElasticBuffer(numel, dtype, home.device, pool)
        self.rests = home.zeros(numel, dtype)
        targets = [self.rests[start:end] for start, end in stretches]
        self._parts = targets, [self.buffer.stretch(start, end - start).data for start, end in stretches]
        self.refresh()

    def refresh(self) -> None:
        """Memory for the next sums."""
        if self.buffer.held:
            self._traffic.give_back()  # if the last ones are on their way
        self.buffer.allocate()
        self.buffer.tensor.data.zero_()  # what lies between sums leaves with them

    def send(self) -> None:
        self._traffic.send(*self._parts, self.buffer.free)

    def wait(self) -> None:
        """Return when they are there."""
        self._traffic.wait()

    def drop(self) -> None:
        """They are not wanted."""
        self._traffic.give_back()
        self.buffer.free()
