"""Short messages between processes of one host, through pipes; knows no group of ranks and no memory.

A message is a tag of up to 124 bits and two integers. Writes do not block: the kernel keeps the message, even after the
writer has ended, and no thread runs for it. A pipe has one writing and one reading process, so its messages arrive in order.
The reader makes it, the writer opens it through `/proc/<pid>/fd`.

Note [When a writer has ended]
The end of a pipe is seen as soon as the last process has closed it that has it open. That may be a child which the writer
has forked (a worker that loads data), long after the writer was killed. So who waits looks at the process, too.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Final

from composable.device.collectives.communicator import DESTROYED_HERE

Message = tuple[int, int]

_FORMAT: Final = struct.Struct("=qqqq")  # shorter than PIPE_BUF: messages of several threads are never torn
_MANY: Final = 1024 * _FORMAT.size
_BLANK: Final = b"\xff" * _MANY  # no message: tags are not negative
_HALF: Final = 62  # bits of a tag in one integer
_LOW: Final = (1 << _HALF) - 1
_UNKNOWN: Final = "unknown"
_POLL_SECONDS: Final = 0.05  # until a waiting thread looks whether another one has read its message, or its writer has ended


class Process:
    """Another process of this host, and whether it still runs."""

    _born = _UNKNOWN

    def __init__(self, number: int) -> None:
        self._path = f"/proc/{number}/stat"
        self._born = self._look()

    def has_ended(self) -> bool:
        """Whether it has; a number that was given to somebody else since, and a process that nobody has buried, count."""
        now = self._look()
        if self._born == _UNKNOWN:  # nobody could look so far: no descriptor was left
            self._born = now
        return not now or now != self._born

    def _look(self) -> str:
        """When the process was started; nothing if it has ended."""
        try:
            text = Path(self._path).read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError:
            return self._born  # nothing is known
        state, *fields = text.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]


class PipeReader:
    """Messages that one other process sends to this one.

    Args:
        writer: what errors call the other process.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._received: dict[int, deque[Message]] = {}
        self._ended = False
        self._process: Process | None = None
        self._lock = Lock()  # models may be trained in threads
        # Messages are read to where they are found again, if an interrupt comes before they are sorted.
        self._buffer = bytearray(_BLANK)
        self._unsorted = False

    _read_end = _write_end = -1

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Receive nothing any more; who sends something is told."""
        self._close_write_end()
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1

    @property
    def descriptor(self) -> int:
        """What the other process opens."""
        return self._write_end

    def connected(self, process: Process | None = None) -> None:
        """The other process has opened its end: from now on, its end is the only one, and its life is watched."""
        self._close_write_end()
        self._process = process

    def _close_write_end(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def receive(
        self,
        tag: int,
        limit: timedelta | None,
        check: Callable[[Sequence[int]], None] | None = None,
        *,
        keep: bool = False,
    ) -> Message:
        """The next message with this tag.

        Args:
            limit: how long to wait; None means for ever.
            keep: the message stays for whoever asks next; what is returned means nothing.
            check: gets the tags of all other messages that nobody has asked for, and raises if there is no use in waiting.

        Raises:
            TimeoutError: none came in time.
            EOFError: none came, and the other process has ended or let go of the pipe; or this one has.
        """
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        ready = select.poll()
        if self._read_end >= 0:
            ready.register(self._read_end, select.POLLIN)
        gone = False
        while True:
            ended = gone or self._ended  # looked at first: another thread may read the message and the end after our poll
            message, others = self._peek(tag) if keep else self._poll(tag)
            if message is not None:
                return message
            if check is not None:
                check(others)
            if ended:
                raise EOFError(f"{self.writer} has ended, or has destroyed its process group")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no message from {self.writer} within {limit}")
            if not ready.poll(_POLL_SECONDS * 1000):
                gone = self._process is not None and self._process.has_ended()

    def poll(self, tag: int) -> Message | None:
        """The next message with this tag, if it is there."""
        with self._lock:
            messages = self._received.get(tag)
            if not messages:
                self._read()
                messages = self._received.get(tag)
                if not messages:
                    return None
            message = messages.popleft()
            if not messages:
                del self._received[tag]
            return message

    def _poll(self, tag: int) -> tuple[Message | None, Sequence[int]]:
        """The next message with this tag, or the tags of the others that were there when it was not."""
        with self._lock:
            if tag not in self._received:
                self._read()
            if tag not in self._received:
                return None, tuple(self._received)
        return self.poll(tag), ()

    def _peek(self, tag: int) -> tuple[Message | None, Sequence[int]]:
        found = self.pending()
        return ((0, 0) if tag in found else None), found

    def has(self, tag: int) -> bool:
        """Whether a message with this tag has come that nobody has asked for."""
        with self._lock:
            if tag not in self._received:
                self._read()
            return tag in self._received

    def pending(self) -> Sequence[int]:
        """The tags of all messages that have come and nobody has asked for."""
        with self._lock:
            self._read()
            return tuple(self._received)

    def drain(self) -> None:
        """Read what has been sent so far, for whoever asks later."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        if self._read_end < 0:
            raise EOFError(DESTROYED_HERE)
        full = True
        while full:
            if self._unsorted:
                self._sort(_MANY)
            self._unsorted = True
            try:
                count = os.readv(self._read_end, (self._buffer,))
            except BlockingIOError:
                self._unsorted = False
                return
            self._ended = not count
            self._sort(count)
            full = count == _MANY

    def _sort(self, count: int) -> None:
        """Sort messages out of the first `count` bytes that were read. Done twice, there are more than anybody asks for."""
        for low, high, first, second in _FORMAT.iter_unpack(self._buffer[:count]):
            if low >= 0:
                self._received.setdefault(high << _HALF | low, deque()).append((first, second))
        self._buffer[:count] = _BLANK[:count]
        self._unsorted = False


class PipeWriter:
    """Messages that this process sends to one other.

    Args:
        process, descriptor: the other process's number, and its reader's descriptor.
        reader: what errors call the other process.

    Raises:
        OSError: the other process has ended, or this one may not write to it.
    """

    _write_end = -1

    def __init__(self, process: int, descriptor: int, reader: str) -> None:
        self._reader = reader
        # Its own opening of the pipe: that it does not wait is nobody else's affair.
        self._write_end = os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Send nothing any more; who waits for a message is told."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def send(self, tag: int, first: int = 0, second: int = 0) -> bool:
        """Send a message; False if the other process has left so many unread that there is no room for it.

        Raises:
            BrokenPipeError: the other process does not read any more.
            EOFError: this one has closed the pipe.
        """
        if self._write_end < 0:
            raise EOFError(DESTROYED_HERE)
        try:
            os.write(self._write_end, _FORMAT.pack(tag & _LOW, tag >> _HALF, first, second))
        except BlockingIOError:
            return False
        except BrokenPipeError as error:
            raise BrokenPipeError(f"{self._reader} has ended, or has destroyed its process group") from error
        return True

    def wait_for_room(self) -> None:
        """Return when there may be room, or after a moment."""
        ready = select.poll()
        if self._write_end >= 0:
            ready.register(self._write_end, select.POLLOUT)
        ready.poll(_POLL_SECONDS * 1000)
