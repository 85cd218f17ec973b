"""Blocks of memory that one rank fills and the other ranks of its host read; knows no collective and no order of messages.

A block is an anonymous file (`memfd_create`): no name to clash or to clean up, and gone with the last process that uses it.
Others open it through `/proc/<pid>/fd`, which needs the same host, user and process namespace. A descriptor is closed only with
the group of ranks that its block was shown to, so that a number that somebody has seen does not come to mean another block.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

import torch
from torch import Tensor

GRAIN: Final = 2 << 20  # blocks are multiples of a huge page
SPARE_BLOCKS: Final = 2  # beyond those that are being read, before a rank waits for its readers


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)  # a fault per 2 MiB instead of one per 4 KiB
    return mapped


def _bytes_of(mapped: mmap.mmap) -> Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(mapped, dtype=torch.uint8)


class Readers(Protocol):
    """Those who have been shown a block."""

    def finished(self) -> bool:
        """Whether all of them have finished; does not wait."""

    def wait(self) -> None:
        """Return when all of them have finished."""


class Block:
    """Memory of this rank's that others may read."""

    descriptor = -1

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("composable")
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.readers: Readers | None = None
        self.settled = False  # whether this rank has received its own part of the collective that the block served
        self.in_step = False  # whether all ranks receive theirs at the same point of the program
        self.grow(nbytes)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def grow(self, nbytes: int) -> None:
        """Make room for `nbytes`. Nobody may be reading."""
        nbytes = -(-nbytes // GRAIN) * GRAIN
        os.ftruncate(self.descriptor, nbytes)
        self.memory = _bytes_of(_map(self.descriptor, nbytes))


class Outbox:
    """This rank's blocks. A block is filled again when all of its readers have finished.

    Note [Waiting for readers]
    A rank waits for the readers of a block only if it has itself received what that collective brought it, and if all ranks
    receive that at the same point of the program: then the others will get as far without anything that this rank has yet to
    send. Buckets of gradients are received when they happen to be there, or else at the end of backward; nobody waits for
    the readers of those.
    """

    def __init__(self) -> None:
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
                waiting = next((read for read in self._read if read.settled and read.in_step), None)  # the oldest
                if waiting is not None:
                    self._read.remove(waiting)
        if waiting is not None:
            if waiting.readers is not None:
                waiting.readers.wait()
            block = waiting
        if block is None:
            return Block(nbytes)
        block.readers = None
        if block.nbytes < nbytes:
            block.grow(nbytes)
        return block

    def _collect(self) -> None:
        """Find out which blocks nobody reads any more."""
        for block in tuple(self._read):
            if block.settled and (block.readers is None or block.readers.finished()):
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
        block.settled = False
        block.in_step = in_step
        with self._lock:
            self._read.append(block)

    def lost(self, block: Block) -> None:
        """Some readers may never finish: leave `block` to them."""
        with self._lock:
            if block in self._read:
                self._read.remove(block)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that messages have needed at the same time so far."""
        with self._lock:
            return sum(block.nbytes for block in (*self._idle, *self._read))


def _size(block: Block) -> int:
    return block.nbytes


class Window:
    """What another process on this host shows: its blocks, opened at first sight."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._blocks: dict[int, Tensor] = {}

    def look(self, descriptor: int, nbytes: int) -> Tensor:
        """The first `nbytes` or more of the other process's block, as uint8.

        Raises:
            OSError: the other process has ended, or this one may not look.
        """
        block = self._blocks.get(descriptor)
        if block is None or block.numel() < nbytes:
            here = os.open(f"/proc/{self._process}/fd/{descriptor}", os.O_RDWR)
            try:
                block = self._blocks[descriptor] = _bytes_of(_map(here, nbytes))
            finally:
                os.close(here)
        return block


@dataclass(frozen=True, slots=True)
class Identity:
    """How others find this process's memory, and make sure that it is this process's: four integers."""

    host: int  # the same for processes that see each other's numbers
    process: int
    descriptor: int
    mark: int  # what the block of that descriptor begins with

    def visible(self, window: Window) -> bool:
        """Whether `window`, opened by another process, shows what this identity says."""
        if self.host != _host():
            return False
        try:
            return int(window.look(self.descriptor, GRAIN)[:8].view(torch.int64).item()) == self.mark
        except (OSError, ValueError):
            return False


_PROOFS: dict[int, tuple[Block, int]] = {}  # by process number: a child of a fork has a number of its own


def my_identity() -> Identity | None:
    """This process's identity, None where the system has no such memory."""
    process = os.getpid()
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").is_dir():
        return None
    if process not in _PROOFS:
        try:
            block = Block(GRAIN)
        except OSError:
            return None
        mark = int.from_bytes(os.urandom(7), "little")
        block.memory[:8].view(torch.int64).fill_(mark)
        _PROOFS[process] = block, mark
    block, mark = _PROOFS[process]
    return Identity(_host(), process, block.descriptor, mark)


def _host() -> int:
    """A number for this boot of this machine and this namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return -1
    return int.from_bytes(hashlib.sha256((boot + namespace).encode()).digest()[:7], "little")
