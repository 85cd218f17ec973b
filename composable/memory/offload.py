"""Shards and gradients at rest in host memory, and the copies between there and the device
(`CPUOffloadPolicy`).

An all-gather reads a copy of the shards on the device, which exists from the launch of the
all-gather to its end. Reduced gradients land on the device and leave it at once. Each direction has
a stream of its own; device memory is allocated and freed on the compute stream, which waits for the
end of a copy before the memory is freed. For gradients, it waits when the gradients of the next
unit are copied, so the copy of one unit's gradients overlaps with the reduction of the next unit's.

Optimizers, clipping and `load_state_dict` work on the host, and no stream orders that. So the host
waits (`wait_for_traffic`) at the end of a root forward, because shards may be written to
afterwards, and at the end of backward, because gradients may be read. Within a backward it waits
before a gradient is accumulated or given to a hook of the user.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from composable.memory.elastic import ElasticBuffer
from composable.memory.streams import Mark, streams_of

TO_DEVICE_STREAM: Final = "copy shards to device"
TO_HOST_STREAM: Final = "copy gradients to host"
# reductions whose device memory is held while backward goes on and they are copied to the host
_MAX_LEAVING: Final = 1


class _Traffic:
    """The copies in flight between one device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.streams = streams_of(device)
        self.shards_read: Mark | None = None  # the end of the last copy that reads shards
        # with the function that frees its device memory
        self._leaving: deque[tuple[Mark, Callable[[], None]]] = deque()

    def send(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], free: Callable[[], None]
    ) -> None:
        """Copy reduced gradients to the host; call `free` when the copy has ended."""
        with self.streams.fork(TO_HOST_STREAM):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=target.is_pinned())
            mark = self.streams.mark()
        self._leaving.append((mark, free))
        self.free_sent(_MAX_LEAVING)

    def free_sent(self, keep: int = 0) -> None:
        """Free the device memory of all gradients on their way but the last `keep`, after their
        copies.
        """
        while len(self._leaving) > keep:
            mark, free = self._leaving.popleft()
            mark.join()
            free()

    def wait(self) -> None:
        if self.shards_read is not None:
            self.shards_read.wait_on_host()
            self.shards_read = None
        if self._leaving:
            self._leaving[-1][0].wait_on_host()
            self.free_sent()


_TRAFFIC: Final[dict[torch.device, _Traffic]] = {}


def wait_for_traffic() -> None:
    """Return when no copy between any device and shards or gradients on the host is in flight."""
    for traffic in _TRAFFIC.values():
        traffic.wait()


def free_cached_memory(device: torch.device) -> None:
    """Return what torch's allocator caches to the device, where other processes can take it."""
    getattr(torch.get_device_module(device), "empty_cache", lambda: None)()


class HostHome:
    """Host memory in which shards and gradients rest that `device` computes with.

    Args:
        device: with its index.
        pin_memory: without pinned memory every copy blocks the host.
    """

    __slots__ = ("device", "pin_memory", "traffic")

    def __init__(self, device: torch.device, *, pin_memory: bool) -> None:
        self.device = device
        self.pin_memory = pin_memory
        self.traffic = _TRAFFIC.setdefault(device, _Traffic(device))

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor on the host, outside of inference mode."""
        with torch.inference_mode(False):
            return torch.zeros(
                numel, dtype=dtype, device="cpu", pin_memory=self.pin_memory and numel > 0
            )

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors to which copies of these device tensors are launched. `tensors` must not be
        written to afterwards, and the caller drops them: they are held until the copies have
        ended.
        """
        with torch.inference_mode(False):
            targets = [
                torch.empty_like(
                    each, device="cpu", pin_memory=self.pin_memory and each.numel() > 0
                )
                for each in tensors
            ]
        leaving = [*tensors]
        self.traffic.send(targets, leaving, partial(list.clear, leaving))
        return targets

    def take_one(self, tensor: Tensor) -> Tensor:
        """The same for one."""
        return self.take([tensor])[0]


class ComingShards:
    """The copy of a group's shards on the device, which exists while an all-gather needs it.

    Attributes:
        buffer: laid out as the shard buffer.
    """

    __slots__ = ("_end", "_shard", "_traffic", "buffer")

    def __init__(self, shard: Tensor, home: HostHome) -> None:
        self._shard = shard
        self._traffic = home.traffic
        self._end: Mark | None = None
        self.buffer = ElasticBuffer(shard.numel(), shard.dtype, home.device)

    def here(self) -> AbstractContextManager[None]:
        """Run the body on the stream of the copy: after the copy and after all work that the
        current stream has so far. The all-gather is launched in it, so that neither the compute
        stream nor the host waits for the shards.
        """
        return self._traffic.streams.fork(TO_DEVICE_STREAM)

    def bring(self, targets: Sequence[Tensor] = (), sources: Sequence[Tensor] = ()) -> None:
        """Launch the copy of the shards to `buffer`, and then of `sources`, parts of `buffer`, to
        `targets` (casts).
        """
        self.buffer.allocate()
        with self.here():
            self.buffer.tensor.data.copy_(self._shard.data, non_blocking=self._shard.is_pinned())
            self._traffic.shards_read = self._end = self._traffic.streams.mark()
            if targets:
                torch._foreach_copy_(list(targets), list(sources))
                self._end = self._traffic.streams.mark()

    def end(self) -> None:
        """Free `buffer`; the compute stream waits for the copies. A second call does nothing."""
        if self._end is not None:
            self._end.join()
            self._end = None
        self.buffer.free()
