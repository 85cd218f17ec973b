"""Short words between processes of one host, through pipes; knows no group of ranks and no memory.

A word is a tag and two integers. The kernel takes it while the writer goes on, and keeps it after the writer has ended; no
thread of anybody's runs for it. A pipe has one writing and one reading process, so its words arrive in order, and its end is
seen as soon as the writer ends. The reader makes it, the writer opens it through `/proc/<pid>/fd`.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from datetime import timedelta
from threading import Lock
from typing import Final

Word = tuple[int, int]

_FORMAT: Final = struct.Struct("=qqq")  # shorter than PIPE_BUF: words of several threads are never torn
_MANY: Final = 2048 * _FORMAT.size
_GLANCE: Final = 0.05  # seconds until a waiting thread looks whether another one has read its word


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
        self._lock = Lock()  # models may be trained in threads

    def __del__(self) -> None:
        self.seal()
        os.close(self._reading)

    @property
    def descriptor(self) -> int:
        """What the other process opens."""
        return self._writing

    def seal(self) -> None:
        """The other process has opened its end: from now on, its end is the only one."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def wait(self, tag: int, limit: timedelta | None) -> Word:
        """The next word with this tag.

        Args:
            limit: how long to wait; None means for ever.

        Raises:
            TimeoutError: none came in time.
            EOFError: none came, and the other process has ended or let go of the pipe.
        """
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while True:
            ended = self._ended  # looked at first: another thread may hear the word and the end after our `next`
            word = self.next(tag)
            if word is not None:
                return word
            if ended:
                raise EOFError(f"{self.writer} has ended, or has destroyed its process group")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no word from {self.writer} within {limit}")
            poll.poll(_GLANCE * 1000)

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

    def _read(self) -> None:
        try:
            data = os.read(self._reading, _MANY)
        except BlockingIOError:
            return
        self._ended = not data
        for tag, first, second in _FORMAT.iter_unpack(data):
            self._heard.setdefault(tag, deque()).append((first, second))


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
        self._writing = os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY)

    def __del__(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)

    def say(self, tag: int, first: int = 0, second: int = 0) -> None:
        """Say a word. It waits only if the other process has left thousands of words unread.

        Raises:
            BrokenPipeError: the other process does not listen any more.
        """
        try:
            os.write(self._writing, _FORMAT.pack(tag, first, second))
        except BrokenPipeError as error:
            raise BrokenPipeError(f"{self._reader} has ended, or has destroyed its process group") from error
