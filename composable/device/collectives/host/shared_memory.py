"""Blocks of memory that one rank fills and the other ranks of its host read; knows no collective and no order of messages.

Note [One arena per rank and group]
A rank's blocks of one group lie in one anonymous file (`memfd_create`): no name to clash or to clean up, and gone with the last
process that uses it. It is large from the start, but has memory only where a block is. The others open it through
`/proc/<pid>/fd` when they meet, and never again: so nothing that somebody was shown can come to mean something else, and a
rank that ends, or destroys its group, takes nothing away from those who have yet to read.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import sys
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from composable.device.collectives.host.board import BYTES, Board

GRAIN: Final = 2 << 20  # blocks start and end where huge pages do
ROOM: Final = 1 << 36  # addresses of an arena; memory is another matter
_BOARD_AT: Final = 64  # in an arena, behind its mark
_NOTES_AT: Final = _BOARD_AT + BYTES
NOTE_BYTES: Final = 400
NOTES: Final = 16  # kept for those who have yet to read them
SPARE_BLOCKS: Final = 2  # beyond those that are being read, before a rank waits for its readers

# Otherwise every mapping has a file open for as long as it lives.
_UNTRACKED: Final[dict[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def _map(descriptor: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, ROOM, prot=access, **_UNTRACKED)
    with suppress(OSError, AttributeError):  # a kernel without huge pages has small ones
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _bytes_of(mapped: mmap.mmap, start: int, nbytes: int) -> Tensor:
    """A tensor of its own and not a view of everything: whoever adds up storages must not count addresses for memory."""
    with torch.inference_mode(False):
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=nbytes)


def _mark_in(mapped: mmap.mmap) -> Tensor:
    """The number that an arena begins with."""
    return _bytes_of(mapped, 0, 8).view(torch.int64)


def _board_in(mapped: mmap.mmap) -> Board:
    return Board(memoryview(mapped)[_BOARD_AT : _BOARD_AT + BYTES])


@dataclass(frozen=True, slots=True)
class Identity:
    """How others find a rank's arena, and make sure that it is that rank's: four integers."""

    host: int  # the same for processes that see each other's numbers
    process: int
    descriptor: int
    mark: int  # what the arena begins with


class Arena:
    """Where this rank's blocks of one group lie.

    Raises:
        OSError: the system has no such memory, or no descriptor left.
    """

    _descriptor = -1

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memory without a name")
        self._descriptor = os.memfd_create("composable")
        os.ftruncate(self._descriptor, ROOM)
        self._mapped = _map(self._descriptor)
        self._lock = Lock()  # models may be trained in threads
        self._end = GRAIN
        self._gaps: list[tuple[int, int]] = []  # start and size, once used and given back
        mark = int.from_bytes(os.urandom(7), "little")
        self.provide(0, _NOTES_AT + NOTES * NOTE_BYTES)
        _mark_in(self._mapped).fill_(mark)
        self.identity = Identity(_host(), os.getpid(), self._descriptor, mark)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def board(self) -> Board:
        """This rank's; others see it without having been told of a block."""
        return _board_in(self._mapped)

    def write_note(self, number: int, text: bytes) -> tuple[int, int]:
        """Leave a text where all others can read it, in memory that is there from the start: where it is, how long it is."""
        start, text = _NOTES_AT + number % NOTES * NOTE_BYTES, text[:NOTE_BYTES]
        self._mapped[start : start + len(text)] = text
        return start, len(text)

    def reserve(self, nbytes: int) -> tuple[int, Tensor]:
        """Addresses that nobody uses: where they start, and what will be there."""
        with self._lock:
            start = next((start for start, size in self._gaps if size == nbytes), self._end)
            if start < self._end:
                self._gaps.remove((start, nbytes))
            elif start + nbytes > ROOM:
                raise OSError(errno.ENOMEM, f"no room for a block of {nbytes} bytes beside {start} that are in use")
            else:
                self._end += nbytes
        return start, _bytes_of(self._mapped, start, nbytes)

    def provide(self, start: int, nbytes: int) -> None:
        """Let there be memory. Without it, one that is missing would be noticed by a signal that ends the process.

        Raises:
            OSError: there is none.
        """
        os.posix_fallocate(self._descriptor, start, nbytes)

    def drop(self, start: int, nbytes: int) -> None:
        """Return memory to the system. Nobody may be reading."""
        with suppress(OSError, AttributeError):
            self._mapped.madvise(mmap.MADV_REMOVE, start, nbytes)

    def give_back(self, start: int, nbytes: int) -> None:
        """Return memory and addresses, for other blocks of that size. Nobody may be reading."""
        self.drop(start, nbytes)
        with self._lock:
            self._gaps.append((start, nbytes))


class Window:
    """Another rank's arena.

    Raises:
        OSError: the other process has ended, this one may not look, or what is there is something else.
    """

    def __init__(self, identity: Identity) -> None:
        if identity.host != _host():
            raise OSError(errno.EXDEV, "another host's numbers mean nothing here")
        here = os.open(f"/proc/{identity.process}/fd/{identity.descriptor}", os.O_RDONLY)
        try:
            if os.fstat(here).st_size != ROOM:
                raise OSError(errno.ESTALE, "this is no arena")
            self._mapped = _map(here, mmap.PROT_READ)  # nobody writes to memory that is another rank's
        finally:
            os.close(here)
        with warnings.catch_warnings():  # torch says once per process that tensors over such memory must not be written to
            warnings.simplefilter("ignore")
            mark = _mark_in(self._mapped)
        if int(mark.item()) != identity.mark:
            raise OSError(errno.ESTALE, "this is somebody else's arena")
        self.board = _board_in(self._mapped)
        self._seen: dict[tuple[int, int], Tensor] = {}

    def read_note(self, start: int, nbytes: int) -> bytes:
        return self._mapped[start : start + nbytes]

    def view(self, start: int, nbytes: int) -> Tensor:
        """What the other rank shows there, as uint8."""
        found = self._seen.get((start, nbytes))
        if found is None:
            found = self._seen[start, nbytes] = _bytes_of(self._mapped, start, nbytes)
        return found


class Readers(Protocol):
    """Those who have been shown a block."""

    def finished(self) -> bool:
        """Whether all of them have finished; does not wait."""

    def wait(self) -> None:
        """Return when all of them have finished."""


class Block:
    """Memory of this rank's that others may read."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.start = 0
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.readers: Readers | None = None
        self.received = False  # whether this rank has received its own part of the collective that the block served
        self.in_step = False  # whether all ranks receive theirs at the same point of the program
        self._provided = 0
        self.make_room(nbytes)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def make_room(self, nbytes: int) -> None:
        """Have memory for `nbytes` at least. Nobody may be reading."""
        if nbytes > self.nbytes:
            self._move(-(-nbytes // GRAIN) * GRAIN)
        if nbytes > self._provided:
            wanted = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, self.nbytes)
            self._arena.provide(self.start + self._provided, wanted - self._provided)
            self._provided = wanted

    def release(self) -> None:
        """Return the memory to the system, and keep the addresses. Nobody may be reading; `make_room` before the next use."""
        self._provided = 0
        self._arena.drop(self.start, self.nbytes)

    def _move(self, nbytes: int) -> None:
        before, size = self.start, self.nbytes
        self.start, self.memory = self._arena.reserve(nbytes)
        self._provided = 0
        if size:
            self._arena.give_back(before, size)


class Outbox:
    """This rank's blocks. A block is filled again when all of its readers have finished.

    Note [Waiting for readers]
    A rank waits for the readers of a block only if it has itself received what that collective brought it, and if all ranks
    receive that at the same point of the program: then the others will get as far without anything that this rank has yet to
    send. Buckets of gradients are received when they happen to be there, or else at the end of backward; nobody waits for
    the readers of those. Ranks that differ may wait for each other all the same, and are told like others who do.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = Lock()  # models may be trained in threads
        self._idle: list[Block] = []
        self._read: deque[Block] = deque()

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes` that nobody reads."""
        with self._lock:
            self._collect()
            block = self._idle_block(nbytes)
            waiting = None
            if block is None and len(self._read) > SPARE_BLOCKS:
                waiting = next((read for read in self._read if read.received and read.in_step), None)  # the oldest
                if waiting is not None:
                    self._read.remove(waiting)
        if waiting is not None:
            try:
                if waiting.readers is not None:
                    waiting.readers.wait()
            except BaseException:
                with self._lock:
                    self._read.append(waiting)
                raise
            block = waiting
        if block is None:
            return Block(self._arena, nbytes)
        block.readers = None
        try:
            block.make_room(nbytes)
        except OSError:
            with self._lock:
                self._idle.append(block)
            raise
        return block

    def _collect(self) -> None:
        """Find out which blocks nobody reads any more."""
        for block in tuple(self._read):
            if block.received and (block.readers is None or block.readers.finished()):
                self._read.remove(block)
                self._idle.append(block)

    def _idle_block(self, nbytes: int) -> Block | None:
        """The smallest idle block that is large enough, or else the largest."""
        if not self._idle:
            return None
        fitting = [block for block in self._idle if block.nbytes >= nbytes]
        block = min(fitting, key=_size) if fitting else max(self._idle, key=_size)
        self._idle.remove(block)
        return block

    def lend(self, block: Block, readers: Readers, *, in_step: bool) -> None:
        """`block` is being read until all `readers` have finished."""
        block.readers = readers
        block.received = False
        block.in_step = in_step
        with self._lock:
            self._read.append(block)

    def release(self) -> None:
        """Return memory that nobody reads to the system, until messages need it again."""
        with self._lock:
            self._collect()
            for block in self._idle:
                block.release()

    def close(self) -> None:
        """Return what memory is known to be idle. No block may be shown any more.

        A finalizer comes here, perhaps in the middle of anything else, so no lock is waited for.
        """
        for block in tuple(self._idle):
            block.release()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that messages have needed at the same time so far."""
        with self._lock:
            return sum(block.nbytes for block in (*self._idle, *self._read))


def _size(block: Block) -> int:
    return block.nbytes


UNKNOWN_HOST: Final = -1


def _host() -> int:
    """A number for this boot of this machine and this namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return UNKNOWN_HOST
    return int.from_bytes(hashlib.sha256((boot + namespace).encode()).digest()[:7], "little")
