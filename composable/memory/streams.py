"""Streams and events of an accelerator, what stands for them on a host, and labels for profilers.

Note [Stream discipline]
All buffers are allocated and freed on the compute stream. A communication stream starts after the
compute stream's work so far (`fork`), because that work may still read what the communication
overwrites. The compute stream waits for the event at the end of the communication (`join`) before
it reads the result *and* before anything that the communication reads is freed. So memory never
needs `record_stream`, and the host never blocks.

Autograd runs a hook on the stream on which its forward ran, and callbacks at the end of backward,
too, unless no leaf got a gradient (`torch.autograd.grad`): then it knows no stream. So the engine
remembers the stream of forward (`here`), and runs those callbacks on it (`on`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.profiler import record_function

from composable.torch_private import profiled

LABEL_PREFIX: Final = "composable: "
_NOTHING: Final = nullcontext()


def range_label(name: str, before: str = "") -> AbstractContextManager[Any]:
    """Label the body as `composable: <before><name>` in a trace, if a profiler runs."""
    return record_function(LABEL_PREFIX + before + name) if profiled() else _NOTHING


class Mark:
    """A point in the work of a stream. On a host the work is done by then."""

    __slots__ = ()

    def join(self) -> None:
        """Make the current stream wait for this point; the host goes on."""

    def wait_on_host(self) -> None:
        """Return when the stream has reached this point."""


_HOST_MARK: Final = Mark()


class Streams:
    """The streams of one device, by name. On a host work runs where it is called, and there is
    nothing to order.
    """

    def fork(self, name: str) -> AbstractContextManager[None]:
        """Run the body on stream `name`, after all work that the current stream has so far."""
        return _NOTHING

    def mark(self) -> Mark:
        """The end of the current stream's work so far."""
        return _HOST_MARK

    def here(self) -> Any:
        """The current stream, for `on`; None on a host."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Run the body on `stream`, after the work that the current stream has so far and before
        its later work.
        """
        return _NOTHING


class _EventMark(Mark):
    __slots__ = ("_event", "_index")

    def __init__(self, event: torch.Event, index: int) -> None:
        self._event = event
        self._index = index

    def join(self) -> None:
        torch.accelerator.current_stream(self._index).wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


class _Fork:
    """Sets a stream as the current one and restores the one before. A `torch.Stream` as a context
    stores that in the stream, which is wrong where threads share it or forks nest.
    """

    __slots__ = ("_before", "_device_before", "_stream")

    def __init__(self, stream: torch.Stream, before: torch.Stream) -> None:
        self._stream = stream
        self._before = before

    def __enter__(self) -> None:
        self._device_before = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(self._stream)  # sets the device, too

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)
        if self._device_before != self._before.device_index:
            torch.accelerator.set_device_index(self._device_before)


class AcceleratorStreams(Streams):
    """One stream per name on one accelerator device, made at its first use.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # torch finds the current stream faster by number than by device
        self._index: int = device.index
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


_STREAMS: Final[dict[int, AcceleratorStreams]] = {}
_HOST_STREAMS: Final = Streams()


def has_streams(device: torch.device) -> bool:
    """Whether `device` computes asynchronously to the host, in memory of its own."""
    return device.type not in ("cpu", "meta")


def any_has_streams() -> bool:
    """Whether this process has such a device."""
    return torch.accelerator.is_available()


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`. All models share them, so that independent roots do not
    oversubscribe the device.
    """
    if not has_streams(device):
        return _HOST_STREAMS
    index: int | None = device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    if index not in _STREAMS:
        _STREAMS[index] = AcceleratorStreams(torch.device(device.type, index))
    return _STREAMS[index]
