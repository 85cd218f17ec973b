"""What a process waits for, where others of its host can look it up; knows no ranks and no pipes.

A board lies in the arena's first page, which all others see from the start. It is written to only in waits that take long,
so it costs nothing while all goes well, and nothing piles up where nobody looks.
"""

from __future__ import annotations

import struct
from threading import Lock
from typing import Final

BYTES: Final = 512

_COUNT: Final = struct.Struct("=q")  # how often it was written to; odd while it is
_HEAD: Final = struct.Struct("=qqq")  # a tag in two halves, bytes of text
_TEXT: Final = _COUNT.size + _HEAD.size
_HALF: Final = 62  # bits of a tag in one integer
_LOW: Final = (1 << _HALF) - 1


class Board:
    """A tag and a text, or nothing; of several threads that wait, the one that came last.

    Args:
        memory: that others see, zeros at first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._lock = Lock()

    def write(self, tag: int, text: str) -> None:
        """Say that this process waits for the message `tag`, which is not 0."""
        said = text.encode()[: BYTES - _TEXT]
        memory = self._memory
        with self._lock:
            (count,) = _COUNT.unpack_from(memory)
            _COUNT.pack_into(memory, 0, count | 1)
            _HEAD.pack_into(memory, _COUNT.size, tag & _LOW, tag >> _HALF, len(said))
            memory[_TEXT : _TEXT + len(said)] = said
            _COUNT.pack_into(memory, 0, (count | 1) + 1)

    def clear(self, tag: int) -> None:
        """Say that it does not wait for `tag` any more."""
        if self.read()[0] == tag:
            self.write(0, "")

    def read(self) -> tuple[int, str]:
        """What the process waits for: a tag, 0 if it waits for nothing or is just saying so, and a text."""
        memory = self._memory
        (before,) = _COUNT.unpack_from(memory)
        low, high, length = _HEAD.unpack_from(memory, _COUNT.size)
        text = bytes(memory[_TEXT : _TEXT + length])
        (after,) = _COUNT.unpack_from(memory)
        if before % 2 or before != after:
            return 0, ""
        return high << _HALF | low, text.decode(errors="replace")
