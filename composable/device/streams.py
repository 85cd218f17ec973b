"""Streams and events of an accelerator, and what stands for them on CPU; knows neither parameters nor collectives.

Note [Stream discipline]
All buffers are allocated and freed on the compute stream. A communication stream starts only after the compute stream's
work so far (`fork`), because that work may still read what the communication overwrites. The compute stream waits for the
event at the end of the communication (`join`) before it reads the result *and* before anything that the communication
reads is freed. So memory never needs `record_stream`, and the host never blocks.

Autograd runs hooks on the stream of forward. What it runs at the end of a backward it runs there, too, unless no leaf got a
gradient (`torch.autograd.grad`): then it knows of no stream. So the stream of forward is remembered, and used (`on`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol

import torch


class Mark(Protocol):
    """A point in a stream's work that the compute stream can wait for."""

    def join(self) -> None:
        """Make the current stream wait for this point; the host goes on."""

    def wait_on_host(self) -> None:
        """Return when the stream has come there."""


class Streams(Protocol):
    """The streams of one device, by name."""

    def fork(self, name: str) -> AbstractContextManager[None]:
        """Run the body on stream `name`, after everything that the current stream was given so far."""

    def mark(self) -> Mark:
        """The end of the current stream's work so far."""

    def here(self) -> Any:
        """The stream that work is given to, for `on`; None where there is one only."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Run the body on `stream`, between what the current stream was given so far and what it is given later."""


class _NoMark:
    def join(self) -> None:
        return None

    def wait_on_host(self) -> None:
        return None


_NO_MARK: Final = _NoMark()
_NO_FORK: Final = nullcontext()


class HostStreams:
    """CPU: work runs where it is called, so there is nothing to order."""

    def fork(self, name: str) -> AbstractContextManager[None]:
        return _NO_FORK

    def mark(self) -> Mark:
        return _NO_MARK

    def here(self) -> None:
        return None

    def on(self, stream: None) -> AbstractContextManager[None]:
        return _NO_FORK


class _EventMark:
    __slots__ = ("_event", "_index")

    def __init__(self, event: torch.Event, index: int) -> None:
        self._event = event
        self._index = index

    def join(self) -> None:
        torch.accelerator.current_stream(self._index).wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


class _Fork:
    """What the body of one fork returns to. Threads share the streams, and forks may nest: a stream of torch's, entered as a
    context by itself, would remember one thread's place for another one."""

    __slots__ = ("_before", "_device_before", "_stream")

    def __init__(self, stream: torch.Stream, before: torch.Stream) -> None:
        self._stream = stream
        self._before = before

    def __enter__(self) -> None:
        self._device_before = torch.accelerator.current_device_index()
        try:
            torch.accelerator.set_stream(self._stream)  # and its device
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)
        if self._device_before != self._before.device_index:
            torch.accelerator.set_device_index(self._device_before)


class AcceleratorStreams:
    """One stream per name on one accelerator device, made at its first use.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index  # torch finds the current stream quicker by number than by device
        self._streams: dict[str, torch.Stream] = {}

    def stream(self, name: str) -> torch.Stream:
        if name not in self._streams:
            # High priority, so that a short collective is not queued behind a long kernel.
            self._streams[name] = torch.Stream(self.device, priority=-1)
        return self._streams[name]

    def fork(self, name: str) -> AbstractContextManager[None]:
        stream, current = self.stream(name), torch.accelerator.current_stream(self._index)
        stream.wait_stream(current)
        return _Fork(stream, current)

    def mark(self) -> Mark:
        return _EventMark(torch.accelerator.current_stream(self._index).record_event(), self._index)

    def here(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._index)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        current = torch.accelerator.current_stream(self._index)
        if stream == current:
            yield
            return
        stream.wait_stream(current)
        with _Fork(stream, current):
            yield
        current.wait_stream(stream)


_STREAMS: dict[int, AcceleratorStreams] = {}
_HOST_STREAMS: Final = HostStreams()


def has_streams(device: torch.device) -> bool:
    """Whether a device computes beside the host, in memory of its own."""
    return device.type not in ("cpu", "meta")


def any_has_streams() -> bool:
    """Whether there may be such a device here."""
    return torch.accelerator.is_available()


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`, shared by every model on it so that independent roots do not oversubscribe it."""
    if not has_streams(device):
        return _HOST_STREAMS
    index: int | None = device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    if index not in _STREAMS:
        _STREAMS[index] = AcceleratorStreams(torch.device(device.type, index))
    return _STREAMS[index]


def wait_for_current_stream() -> None:
    """Return when the accelerator has done what its current stream was given so far."""
    torch.accelerator.current_stream().synchronize()
