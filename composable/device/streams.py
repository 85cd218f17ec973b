"""Streams and events of an accelerator, and what stands for them on CPU; knows neither parameters nor collectives.

Note [Stream discipline]
All buffers are allocated and freed on the compute stream. A communication stream starts only after the compute stream's
work so far (`fork`), because that work may still read what the communication overwrites. The compute stream waits for the
event at the end of the communication (`join`) before it reads the result *and* before anything that the communication
reads is freed. So memory never needs `record_stream`, and the host never blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Mark(Protocol):
    """A point in a stream's work that the compute stream can wait for."""

    def join(self) -> None:
        """Make the current stream wait for this point; the host goes on."""


class Streams(Protocol):
    """The streams of one device, by name."""

    def fork(self, name: str) -> AbstractContextManager[None]:
        """Run the body on stream `name`, after everything that the current stream was given so far."""

    def mark(self) -> Mark:
        """The end of the current stream's work so far."""


class _NoMark:
    def join(self) -> None:
        return None


class HostStreams:
    """CPU: work runs where it is called, so there is nothing to order."""

    _MARK = _NoMark()

    def fork(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Mark:
        return self._MARK


class _EventMark:
    __slots__ = ("_event",)

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def join(self) -> None:
        torch.accelerator.current_stream(self._event.device).wait_event(self._event)


class AcceleratorStreams:
    """One stream per name on one accelerator device, made at its first use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.Stream] = {}

    def stream(self, name: str) -> torch.Stream:
        if name not in self._streams:
            # High priority, so that a short collective is not queued behind a long kernel.
            self._streams[name] = torch.Stream(self.device, priority=-1)
        return self._streams[name]

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        stream = self.stream(name)
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            yield

    def mark(self) -> Mark:
        return _EventMark(torch.accelerator.current_stream(self.device).record_event())


_STREAMS: dict[torch.device, Streams] = {}


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`, shared by every model on it so that independent roots do not oversubscribe it."""
    if device.type in ("cpu", "meta"):
        return _STREAMS.setdefault(torch.device("cpu"), HostStreams())
    if device not in _STREAMS:
        _STREAMS[device] = AcceleratorStreams(device)
    return _STREAMS[device]
