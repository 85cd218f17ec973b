"""Short words between processes of one host, through pipes; knows no group of ranks and no memory.

A word is a tag of up to 124 bits and two integers. The kernel takes it while the writer goes on, and keeps it after the writer
has ended; no thread of anybody's runs for it. A pipe has one writing and one reading process, so its words arrive in order. The
reader makes it, the writer opens it through `/proc/<pid>/fd`.

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

Word = tuple[int, int]

_FORMAT: Final = struct.Struct("=qqqq")  # shorter than PIPE_BUF: words of several threads are never torn
_MANY: Final = 1024 * _FORMAT.size
_BLANK: Final = b"\xff" * _MANY  # no word: tags are not negative
_HALF: Final = 62  # bits of a tag in one integer
_LOW: Final = (1 << _HALF) - 1
_GLANCE: Final = 0.05  # seconds until a waiting thread looks whether another one has read its word, or its writer has ended

DESTROYED_HERE: Final = "this rank has destroyed its process group"


class Process:
    """Another process of this host, and whether it still runs."""

    _born = "unknown"

    def __init__(self, number: int) -> None:
        self._path = f"/proc/{number}/stat"
        self._born = self._look()

    def has_ended(self) -> bool:
        """Whether it has; a number that was given to somebody else since, and a process that nobody has buried, count."""
        now = self._look()
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


class Inbox:
    """Words that one other process says to this one.

    Args:
        writer: what messages call the other process.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._heard: dict[int, deque[Word]] = {}
        self._ended = False
        self._process: Process | None = None
        self._lock = Lock()  # models may be trained in threads
        # Words are read to where they are found again, if an interrupt comes before they are sorted.
        self._buffer = bytearray(_BLANK)
        self._unsorted = False

    _reading = _writing = -1

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Hear nothing any more; who says something is told."""
        self._close_writing_end()
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1

    @property
    def descriptor(self) -> int:
        """What the other process opens."""
        return self._writing

    def seal(self, process: Process | None = None) -> None:
        """The other process has opened its end: from now on, its end is the only one, and its life is watched."""
        self._close_writing_end()
        self._process = process

    def _close_writing_end(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def wait(self, tag: int, limit: timedelta | None, check: Callable[[Sequence[int]], None] | None = None) -> Word:
        """The next word with this tag.

        Args:
            limit: how long to wait; None means for ever.
            check: gets the tags of all other words that nobody has asked for, and raises if there is no use in waiting.

        Raises:
            TimeoutError: none came in time.
            EOFError: none came, and the other process has ended or let go of the pipe; or this one has.
        """
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        poll = select.poll()
        if self._reading >= 0:
            poll.register(self._reading, select.POLLIN)
        gone = False
        while True:
            ended = gone or self._ended  # looked at first: another thread may hear the word and the end after our `next`
            word, others = self._look(tag)
            if word is not None:
                return word
            if check is not None:
                check(others)
            if ended:
                raise EOFError(f"{self.writer} has ended, or has destroyed its process group")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no word from {self.writer} within {limit}")
            if not poll.poll(_GLANCE * 1000):
                gone = self._process is not None and self._process.has_ended()

    def next(self, tag: int) -> Word | None:
        """The next word with this tag, if it is there."""
        with self._lock:
            words = self._heard.get(tag)
            if not words:
                self._read()
                words = self._heard.get(tag)
                if not words:
                    return None
            word = words.popleft()
            if not words:
                del self._heard[tag]
            return word

    def _look(self, tag: int) -> tuple[Word | None, Sequence[int]]:
        """The next word with this tag, or the tags of the others that were there when it was not."""
        with self._lock:
            if tag not in self._heard:
                self._read()
            if tag not in self._heard:
                return None, tuple(self._heard)
        return self.next(tag), ()

    def holds(self, tag: int) -> bool:
        """Whether a word with this tag has been said and not been asked for."""
        with self._lock:
            if tag not in self._heard:
                self._read()
            return tag in self._heard

    def pending(self) -> Sequence[int]:
        """The tags of all words that have been said and not been asked for."""
        with self._lock:
            self._read()
            return tuple(self._heard)

    def drain(self) -> None:
        """Hear what has been said so far, for whoever asks later."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        if self._reading < 0:
            raise EOFError(DESTROYED_HERE)
        full = True
        while full:
            if self._unsorted:
                self._sort(_MANY)
            self._unsorted = True
            try:
                count = os.readv(self._reading, (self._buffer,))
            except BlockingIOError:
                self._unsorted = False
                return
            self._ended = not count
            self._sort(count)
            full = count == _MANY

    def _sort(self, count: int) -> None:
        """Sort words out of the first `count` bytes that were read. Done twice, there are more than anybody asks for."""
        for low, high, first, second in _FORMAT.iter_unpack(self._buffer[:count]):
            if low >= 0:
                self._heard.setdefault(high << _HALF | low, deque()).append((first, second))
        self._buffer[:count] = _BLANK[:count]
        self._unsorted = False


class Outlet:
    """Words that this process says to one other.

    Args:
        process, descriptor: the other process's number, and what its inbox says.
        reader: what messages call the other process.

    Raises:
        OSError: the other process has ended, or this one may not write to it.
    """

    _writing = -1

    def __init__(self, process: int, descriptor: int, reader: str) -> None:
        self._reader = reader
        # Its own opening of the pipe: that it does not wait is nobody else's affair.
        self._writing = os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Say nothing any more; who waits for a word is told."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def say(self, tag: int, first: int = 0, second: int = 0) -> bool:
        """Say a word; False if the other process has left so many unread that there is no room for it.

        Raises:
            BrokenPipeError: the other process does not listen any more.
            EOFError: this one has closed the pipe.
        """
        if self._writing < 0:
            raise EOFError(DESTROYED_HERE)
        try:
            os.write(self._writing, _FORMAT.pack(tag & _LOW, tag >> _HALF, first, second))
        except BlockingIOError:
            return False
        except BrokenPipeError as error:
            raise BrokenPipeError(f"{self._reader} has ended, or has destroyed its process group") from error
        return True

    def wait_for_room(self) -> None:
        """Return when there may be room, or after a moment."""
        poll = select.poll()
        if self._writing >= 0:
            poll.register(self._writing, select.POLLOUT)
        poll.poll(_GLANCE * 1000)
