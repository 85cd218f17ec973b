"""Where buffers get their memory, and give it back to: a pool of blocks of host memory; knows no layout."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from composable.device.private import CAN_SWAP, swap_memory


class FreeList:
    """Blocks of host memory of one size, for storages that take turns; gone with the last of those who use it.

    Attributes:
        blocks: that nobody uses. Buffers take theirs from here, and put it back, without a call.
    """

    __slots__ = ("__weakref__", "_empty_storages", "blocks", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.blocks: list[torch.UntypedStorage] = []
        self._empty_storages: list[torch.UntypedStorage] = []  # empty ones, left when a block's memory went elsewhere

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Give `storage`, which is empty, memory with undefined contents."""
        if self.blocks:
            block = self.blocks.pop()
            swap_memory(storage, block)
            self._empty_storages.append(block)
        else:
            storage.resize_(self.nbytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Take `storage`'s memory back and leave it empty."""
        empty_storage = self._empty_storages.pop() if self._empty_storages else torch.UntypedStorage(0)
        swap_memory(storage, empty_storage)
        self.blocks.append(empty_storage)

    def clear(self) -> None:
        """Return all idle blocks to the system."""
        self.blocks.clear()
        self._empty_storages.clear()


class Resizing:
    """No free lists: an accelerator's caching allocator is a pool already, and a torch that cannot swap has no other way."""

    __slots__ = ("_nbytes", "blocks")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.blocks: list[torch.UntypedStorage] = []  # nobody leaves any

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Give `storage`, which is empty, memory with undefined contents."""
        storage.resize_(self._nbytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Give `storage`'s memory back and leave it empty."""
        storage.resize_(0)


class MemoryPool:
    """Lends blocks of host memory of exact sizes, so that CPU steps do not fault the same pages in again and again.

    Args:
        keeps: what comes back is kept for the next; otherwise it goes to the allocator that it is from.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._free_lists: WeakValueDictionary[int, FreeList] = WeakValueDictionary()
        self._given: dict[int, list[torch.UntypedStorage]] = {}  # what `give` brought, by size

    def free_list(self, nbytes: int, device: torch.device) -> FreeList | Resizing:
        """Where storages of `nbytes` on `device` get their memory and leave it."""
        if device.type != "cpu" or not nbytes or not CAN_SWAP or not self._keeps:
            return Resizing(nbytes)
        found = self._free_lists.get(nbytes)
        if found is None:
            found = self._free_lists[nbytes] = FreeList(nbytes)
        return found

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D host tensor with undefined contents; give it back with `give`."""
        nbytes = numel * dtype.itemsize
        blocks = self._given.get(nbytes)
        storage = blocks.pop() if blocks else torch.UntypedStorage(nbytes)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))

    def give(self, tensor: Tensor) -> None:
        if not self._keeps:
            return
        storage = tensor.untyped_storage()
        self._given.setdefault(storage.nbytes(), []).append(storage)

    def clear(self) -> None:
        """Return all idle blocks to the system."""
        self._given.clear()
        for free_list in list(self._free_lists.values()):
            free_list.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody uses."""
        given = sum(nbytes * len(blocks) for nbytes, blocks in self._given.items())
        return given + sum(free_list.nbytes * len(free_list.blocks) for free_list in list(self._free_lists.values()))


HOST_MEMORY = MemoryPool()  # one for the process: units of many models take turns
NO_POOL = MemoryPool(keeps=False)
