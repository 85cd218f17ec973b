"""Memory in which the ranks of a process group that run on one host write down their launches, so
that the second of two ranks sees at its launch what the first launched there. No rank waits for
another, and nothing is sent.

| part of the memory | holds |
|---|---|
| header | random bytes, by which a rank knows that it has opened the right memory |
| a row per rank | its count of launches, and a ring of entries, which it alone writes |
| an entry | its number, a digest of all launches up to it, and its text |

If the digests of two ranks are equal at a launch, both have launched the same up to it. So a rank
that is more than a ring behind can be compared again once it is closer.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Final
from weakref import finalize
from zlib import crc32

import torch.distributed as dist

from composable.torch_private import store_of

ENTRIES: Final = 1024  # of a ring: more than the launches of most steps
_NUMBER: Final = struct.Struct("=q")
_TEXT: Final = 174
_ENTRY: Final = struct.Struct(f"=qQH{_TEXT}s")  # number, digest, length of the text, text
_HEADER: Final = 64
_KEY_BYTES: Final = 16

# Of one rank: how many collectives it launched, and the texts of the last ones.
Launches = tuple[int, Sequence[str]]


class SharedLaunches:
    """This rank's view of its group's memory.

    Attributes:
        count, digest: of this rank's launches.
        key: of the memory: the same on the ranks that share it, and no others.
        ahead: ranks that were further from this one than a ring is long at its last launch.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.count = self.digest = 0
        self.key = memory[:_KEY_BYTES].hex()
        self.ahead: list[int] = []
        self._memory, self._rank = memory, rank
        # up to which launch each of the others is known to have launched the same
        self._agreed = {peer: 0 for peer in range(size) if peer != rank}
        self._lock = Lock()  # threads of this rank

    def write(self, text: str) -> dict[int, Launches]:
        """Note a launch of this rank.

        Returns:
            If another rank is found to have launched something else up to now, what this rank and
            those launched that are as far, by rank of the group. Nothing otherwise.
        """
        with self._lock:
            text = _fitting(text)
            self.count += 1
            encoded = text.encode()
            self.digest = crc32(encoded + b"\n", self.digest)
            at = self._entry(self._rank, self.count)
            # First the entry, then its number, then the count: others read them the other way.
            _NUMBER.pack_into(self._memory, at, 0)
            _ENTRY.pack_into(self._memory, at, 0, self.digest, len(encoded), encoded)
            _NUMBER.pack_into(self._memory, at, self.count)
            _NUMBER.pack_into(self._memory, self._row(self._rank), self.count)
            self.ahead = []
            # No fence orders this rank's entry before its look at the others': of two ranks that
            # launch at one moment neither may see the other, and one does at its next launch.
            for peer in self._agreed:
                if self._differs(peer):
                    return self._found(until=self._until(peer))
            return {}

    def _until(self, peer: int) -> int:
        count: int = _NUMBER.unpack_from(self._memory, self._row(peer))[0]
        return min(count, self.count)

    def _differs(self, peer: int) -> bool:
        until = self._until(peer)
        if until == self._agreed[peer]:
            return False
        for last_look in (False, True):
            mine, theirs = self._read(self._rank, until), self._read(peer, until)
            if mine is None or theirs is None:
                self.ahead.append(peer)
                return False
            if mine[0] == theirs[0]:
                self._agreed[peer] = until
                return False
            if not last_look:
                time.sleep(0.01)  # a processor may show the writes of another in another order
        return True

    def _found(self, until: int) -> dict[int, Launches]:
        found: dict[int, Launches] = {}
        for rank in sorted([self._rank, *self._agreed]):
            count: int = _NUMBER.unpack_from(self._memory, self._row(rank))[0]
            if count >= until:
                found[rank] = (count, self._texts(rank, count, ENTRIES))
        return found

    def _texts(self, rank: int, count: int, number: int) -> list[str]:
        texts: list[str] = []
        for each in range(count, max(0, count - number), -1):
            entry = self._read(rank, each)
            if entry is None:  # it has been written over since
                break
            texts.append(entry[1])
        return texts[::-1]

    def _row(self, rank: int) -> int:
        return _HEADER + rank * (_NUMBER.size + ENTRIES * _ENTRY.size)

    def _entry(self, rank: int, number: int) -> int:
        return self._row(rank) + _NUMBER.size + number % ENTRIES * _ENTRY.size

    def _read(self, rank: int, number: int) -> tuple[int, str] | None:
        """The digest and the text of a launch; None if its place holds another one."""
        at = self._entry(rank, number)
        found, digest, length, text = _ENTRY.unpack_from(self._memory, at)
        if found != number or _NUMBER.unpack_from(self._memory, at)[0] != number:
            return None
        return digest, text[:length].decode(errors="replace")


def _fitting(text: str) -> str:
    """As much of a text as an entry holds, with a checksum of all of it."""
    if len(text.encode()) <= _TEXT:
        return text
    start = text.encode()[: _TEXT - 12].decode(errors="ignore")
    return f"{start}... {crc32(text.encode()):08x}"


def shared_launches(group: dist.ProcessGroup) -> SharedLaunches | None:
    """The memory that this rank shares with others of `group` on its host; None where there is
    none. Each rank calls it once for a group, at its first launch.
    """
    size = dist.get_world_size(group)
    store = store_of(group)
    config = str(dist.get_backend_config(group)) if type(group) is dist.ProcessGroup else "fake"
    if size == 1 or store is None or "fake" in config or not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError, RuntimeError):  # of the store, or a rank that has ended meanwhile
        rank = dist.get_rank(group)
        # A group that was destroyed and made again may find the keys of the one before.
        turn = store.add(f"composable/launches/{rank}", 1)
        return _opened(store, f"composable/launches/{host()}/{turn}", rank, size)
    return None


def _opened(store: object, key: str, rank: int, size: int) -> SharedLaunches | None:
    """The first rank makes the memory. It has no name that would have to be removed: it ends
    with the last process that holds it.
    """
    length = _HEADER + size * (_NUMBER.size + ENTRIES * _ENTRY.size)
    made = os.memfd_create("composable-launches")
    os.ftruncate(made, length)
    memory = mmap.mmap(made, length)
    memory[:_KEY_BYTES] = os.urandom(_KEY_BYTES)
    mine = f"/proc/{os.getpid()}/fd/{made} {memory[:_KEY_BYTES].hex()}"
    stored = store.compare_set(key, "", mine).decode()  # type: ignore[attr-defined]
    if stored == mine:
        launches = SharedLaunches(memory, rank, size)
        finalize(launches, os.close, made)  # until then others can open it
        return launches
    memory.close()
    os.close(made)
    path, _, random = stored.partition(" ")
    theirs = os.open(path, os.O_RDWR)
    try:
        # the first rank may have ended, and its number be another process's
        if os.fstat(theirs).st_size != length:
            return None
        memory = mmap.mmap(theirs, length)
    finally:
        os.close(theirs)
    return SharedLaunches(memory, rank, size) if memory[:_KEY_BYTES].hex() == random else None


@cache
def host() -> str:
    """Where numbers of processes mean the same, and processes can open each other's memory: one
    kernel, and one space of process ids.
    """
    with suppress(OSError):  # of systems without it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()
