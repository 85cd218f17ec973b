"""Contents of a device's memory that wait on the host, and their ways there and back; knows not what they are good for.

Note [There and back]
Both ways have a stream of their own, since links carry data both ways at once, and the host waits for neither. Memory of the
device is allocated, and freed, on the stream that computes. What still leaves is held, and that stream waits for the end of
its copy before the memory is freed. To wait at once would be to compute nothing meanwhile, so the last few are held, and no
more: if the link is slower than what computes, that waits, and the memory stays bounded. Backward needs first what was saved
last. That is still there, if nothing was saved after it.

Note [The order of return]
Backward goes through what was saved from the newest to the oldest. So whoever asks for something has the next older copies on
their way. A guess that is wrong costs a copy, never a number: what is not asked for goes again, and comes once more when it is.

Note [Memory of the host]
Pinned memory comes from torch's caching allocator, which notes the stream of every copy that does not block, and gives freed
memory to nobody before these copies are done. Without pinned memory a copy makes the host wait, as everywhere in torch.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from composable.device.streams import Mark, Streams, streams_of

# How many leave at a time, and how many are on their way back: attention saves four tensors, and backward asks for all at once.
AHEAD: Final = 4
_LOOKED_AT: Final = 32  # of what was saved before: most of that may be gone already

LEAVING: Final = "offload"
RETURNING: Final = "bring back"


class _OnDevice:
    """Memory of the device that another stream copies from, or to. Who drops it has the stream that it is of wait first."""

    __slots__ = ("_copying", "_done", "_streams", "flat", "stream")

    def __init__(self, flat: Tensor, copying: str, streams: Streams) -> None:
        self.flat = flat
        self.stream = streams.here()
        self._copying = copying
        self._streams = streams
        self._done: Mark | None = None  # not before the copy is launched, which an interrupt may prevent

    def launch(self, target: Tensor, source: Tensor, *, blocks: bool, after: Mark | None = None) -> Mark:
        with self._streams.fork(self._copying):
            if after is not None:
                after.join()
            target.copy_(source, non_blocking=not blocks)
            self._done = self._streams.mark()
        return self._done

    def wait(self) -> None:
        """The current stream waits for the end of the copy."""
        if self._done is None:
            with self._streams.fork(self._copying):
                self._done = self._streams.mark()
        self._done.join()

    def __del__(self) -> None:
        with self._streams.on(self.stream):
            self.wait()


class HostCopy:
    """The contents of a stretch of memory, as they were when it was made. They are never written to."""

    __slots__ = (
        "__weakref__", "_arrived", "_home", "_near", "_on_host", "_pinned", "_readers", "_source", "_unread", "index"
    )  # fmt: skip

    def __init__(self, flat: Tensor, home: HostCopies, index: int, *, pin_memory: bool) -> None:
        self.index = index
        self._home = home
        self._source = ref(flat.untyped_storage())
        self._readers = self._unread = 0
        self._pinned = pin_memory
        self._on_host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=pin_memory)
        self._near: _OnDevice | None = _OnDevice(flat, LEAVING, home.streams)
        self._arrived = self._near.launch(self._on_host, flat, blocks=not pin_memory)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        return self._source() is storage

    def add_reader(self) -> None:
        self._readers += 1
        self._unread += 1

    def is_near(self) -> bool:
        return self._near is not None

    def bring_back(self) -> _OnDevice:
        """Let it be on its way to the device, for the current stream."""
        home = self._home
        if self._near is not None and self._near.stream == home.streams.here():
            return self._near
        flat = torch.empty(self._on_host.shape, dtype=self._on_host.dtype, device=home.device)
        _hold(home.expected, self, 2 * AHEAD)
        near = _OnDevice(flat, RETURNING, home.streams)
        near.launch(flat, self._on_host, blocks=not self._pinned, after=self._arrived)
        self._near, self._unread = near, self._readers
        return near

    def read(self) -> Tensor:
        """The contents on the device. Each reader reads once before it reads again; the last one gets the memory to itself."""
        near = self.bring_back()
        self._home.expect_older(self.index)  # for which this one may have to leave
        near.wait()
        self._unread -= 1
        if self._unread <= 0:
            self._near = None
        return near.flat

    def leave_device(self) -> None:
        self._near = None


class HostCopies:
    """All copies on the host of what was on one device, in the order in which they were made.

    Attributes:
        expected: that are on their way back, or have come.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = streams_of(device)
        self._numbers = count()
        self._by_index: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()
        self._by_stretch: WeakValueDictionary[tuple[Any, ...], HostCopy] = WeakValueDictionary()
        self._leaving: deque[ref[HostCopy]] = deque()
        self.expected: deque[ref[HostCopy]] = deque()

    def copy_of(self, tensor: Tensor, start: int, stop: int, *, pin_memory: bool) -> HostCopy:
        """A copy of the elements from `start` to `stop` of the storage of `tensor`: the one that there is, or a new one."""
        storage = tensor.untyped_storage()
        key = (id(storage), start, stop, tensor.dtype, tensor._version)
        found = self._by_stretch.get(key)
        if found is not None and found.is_of(storage):
            return found
        flat = tensor.detach().as_strided((stop - start,), (1,), start)
        made = HostCopy(flat, self, next(self._numbers), pin_memory=pin_memory)
        self._by_index[made.index] = self._by_stretch[key] = made
        _hold(self._leaving, made, AHEAD)
        return made

    def expect_older(self, index: int) -> None:
        """What was saved before `index` is asked for next."""
        older = map(self._by_index.get, range(index - 1, max(index - 1 - _LOOKED_AT, -1), -1))
        expected = [copy for copy, _ in zip(filter(None, older), range(AHEAD), strict=False)]
        for copy in expected:
            if not copy.is_near():
                copy.bring_back()


def _hold(held: deque[ref[HostCopy]], copy: HostCopy, most: int) -> None:
    """Of those that are on the device, only `copy` and the last ones before it stay, `most` in all."""
    alive = [each for each in (other() for other in held) if each is not None and each is not copy and each.is_near()]
    for each in alive[: max(len(alive) + 1 - most, 0)]:
        each.leave_device()
    held.clear()
    held.extend(map(ref, (*alive[-most + 1 :], copy)))


_COPIES: Final[dict[torch.device, HostCopies]] = {}


def copies_of(device: torch.device) -> HostCopies:
    """The copies of what was on `device`, which has an index if there are several of its kind."""
    if device not in _COPIES:
        _COPIES[device] = HostCopies(device)
    return _COPIES[device]
