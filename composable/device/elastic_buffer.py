"""A 1-D tensor whose memory is given back when its unit is resharded, while views of it stay; knows no layout.

Note [Why the unsharded buffer's storage lives as long as its handle]
Autograd may have saved any alias of an unsharded parameter. Memory comes and goes *inside* one storage object, so every
alias survives: refilling the storage before backward revives saved views without our knowing that they exist.

Note [Views without memory]
A buffer is born empty, and its parts are cut while it is: what is annotated is whole then, and an accelerator would need room
for its largest unit once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from composable.device.memory import MemoryPool
from composable.device.private import swap_memory, view_without_memory

_STORAGES: Final[WeakValueDictionary[int, torch.UntypedStorage]] = WeakValueDictionary()  # of all buffers, by their ids


def is_elastic(storage: torch.UntypedStorage) -> bool:
    """Whether `storage` belongs to a buffer whose memory comes and goes."""
    return _STORAGES.get(id(storage)) is storage


class ElasticBuffer:
    """A 1-D tensor whose memory comes and goes while its views stay valid; there is none at first."""

    __slots__ = ("_block", "_free_list", "_held", "_nbytes", "_storage", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pool: MemoryPool) -> None:
        self._nbytes = numel * dtype.itemsize
        self._free_list = pool.free_list(self._nbytes, device)
        self._held = False
        self._block: torch.UntypedStorage | None = None  # empty: what it lent its memory from
        with torch.inference_mode(False):
            start = torch.empty(0, dtype=dtype, device=device)
            self._storage = start.untyped_storage()
            _STORAGES[id(self._storage)] = self._storage
            self.tensor = self._view(start, (numel,), (1,)).data

    def _view(self, start: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        view = view_without_memory(start, shape, strides)
        if view is not None:
            return view
        held = self._held
        self.allocate()
        view = start.as_strided(shape, strides)
        if not held:
            self.free()
        return view

    def part(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """What lies from `start` on, whether the memory is there or not."""
        return self._view(self.tensor[start:start], shape, strides)

    def stretch(self, start: int, numel: int) -> Tensor:
        """`numel` elements from `start` on."""
        return self.part(start, (numel,), (1,))

    @property
    def held(self) -> bool:
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes while the memory is there."""
        return self._nbytes

    def allocate(self) -> None:
        if not self._held:
            if self._free_list.blocks:  # what `allocate` does, without the calls: it is done ten times per unit and step
                self._block = block = self._free_list.blocks.pop()
                swap_memory(self._storage, block)
            else:
                self._free_list.allocate(self._storage)
            self._held = True  # last, and first below: after an interrupt in between there may be more memory, never less

    def free(self) -> None:
        if self._held:
            self._held = False
            block = self._block
            if block is None:
                self._free_list.release(self._storage)
            else:
                self._block = None
                swap_memory(self._storage, block)
                self._free_list.blocks.append(block)
