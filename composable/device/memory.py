"""Memory that comes and goes: a pool of blocks, and 1-D tensors whose views outlive their memory; knows no layout.

Note [Why the unsharded buffer's storage lives as long as its handle]
Autograd may have saved any alias of an unsharded parameter. Memory comes and goes *inside* one storage object, so every
alias survives: refilling the storage before backward revives saved views without our knowing that they exist.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from composable.device.private import CAN_SWAP, swap_memory


class Shelf:
    """Blocks of host memory of one size, for storages that take turns."""

    __slots__ = ("_blocks", "_husks", "_nbytes")

    def __init__(self, nbytes: int, blocks: list[torch.UntypedStorage], husks: list[torch.UntypedStorage]) -> None:
        self._nbytes = nbytes
        self._blocks = blocks
        self._husks = husks

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Give `storage`, which is empty, memory with undefined contents."""
        if self._blocks:
            block = self._blocks.pop()
            swap_memory(storage, block)
            self._husks.append(block)
        else:
            storage.resize_(self._nbytes)

    def drain(self, storage: torch.UntypedStorage) -> None:
        """Take `storage`'s memory back and leave it empty."""
        husk = self._husks.pop() if self._husks else torch.UntypedStorage(0)
        swap_memory(storage, husk)
        self._blocks.append(husk)


class Resizing:
    """No shelf at all: an accelerator's caching allocator is a pool already, and a torch that cannot swap has no other way."""

    __slots__ = ("_nbytes",)

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Give `storage`, which is empty, memory with undefined contents."""
        storage.resize_(self._nbytes)

    def drain(self, storage: torch.UntypedStorage) -> None:
        """Give `storage`'s memory back and leave it empty."""
        storage.resize_(0)


class MemoryPool:
    """Lends blocks of host memory of exact sizes, so that CPU steps do not fault the same pages in again and again."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[torch.UntypedStorage]] = {}
        self._husks: list[torch.UntypedStorage] = []  # empty ones, left when a block's memory went elsewhere

    def shelf(self, nbytes: int, device: torch.device) -> Shelf | Resizing:
        """Where storages of `nbytes` on `device` get their memory and leave it."""
        if device.type != "cpu" or not nbytes or not CAN_SWAP:
            return Resizing(nbytes)
        return Shelf(nbytes, self._blocks.setdefault(nbytes, []), self._husks)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D host tensor with undefined contents; give it back with `give`."""
        nbytes = numel * dtype.itemsize
        blocks = self._blocks.get(nbytes)
        storage = blocks.pop() if blocks else torch.UntypedStorage(nbytes)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))

    def give(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._blocks.setdefault(storage.nbytes(), []).append(storage)

    def clear(self) -> None:
        """Return all idle blocks to the system."""
        for blocks in self._blocks.values():
            blocks.clear()
        self._husks.clear()

    @property
    def idle_bytes(self) -> int:
        return sum(nbytes * len(blocks) for nbytes, blocks in self._blocks.items())


HOST_MEMORY = MemoryPool()  # one for the process: units of many models take turns


class ElasticBuffer:
    """A 1-D tensor whose memory comes and goes while its views stay valid."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pool: MemoryPool) -> None:
        self._nbytes = numel * dtype.itemsize
        self._storage = torch.UntypedStorage(0, device=device)
        self._shelf = pool.shelf(self._nbytes, device)
        self._shelf.fill(self._storage)
        with torch.inference_mode(False):
            self.tensor = torch.empty(0, dtype=dtype, device=device).set_(self._storage, 0, (numel,), (1,)).data
        self._held = True
        self._lender: torch.UntypedStorage | None = None
        self._on_leave: Callable[[], None] = _nothing

    @property
    def held(self) -> bool:
        return self._held

    @property
    def lodged(self) -> bool:
        """Whether the memory is somebody else's."""
        return self._lender is not None

    @property
    def nbytes(self) -> int:
        """Bytes while the memory is there."""
        return self._nbytes

    def allocate(self) -> None:
        if not self._held:
            self._shelf.fill(self._storage)
            self._held = True

    def lodge(self, memory: torch.UntypedStorage, on_leave: Callable[[], None]) -> bool:
        """Live in `memory`, which is somebody's and has the right size, until `free`; False if that cannot be.

        Args:
            on_leave: called when the memory is not needed any more; not when the buffer moves out.
        """
        if self._held or not CAN_SWAP:
            return False
        swap_memory(self._storage, memory)
        self._held, self._lender, self._on_leave = True, memory, on_leave
        return True

    def move_out(self) -> None:
        """Go on in memory of the pool's, with undefined contents."""
        self._part()
        self._shelf.fill(self._storage)

    def _part(self) -> Callable[[], None]:
        assert self._lender is not None
        swap_memory(self._storage, self._lender)
        on_leave, self._on_leave, self._lender = self._on_leave, _nothing, None
        return on_leave

    def free(self) -> None:
        if not self._held:
            return
        self._held = False
        if self._lender is not None:
            self._part()()
        else:
            self._shelf.drain(self._storage)


def _nothing() -> None:
    return None
