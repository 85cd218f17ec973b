"""A 1-D tensor whose memory is given back when its unit is resharded, while views of it stay; knows no layout.

Note [Why the unsharded buffer's storage lives as long as its handle]
Autograd may have saved any alias of an unsharded parameter. Memory comes and goes *inside* one storage object, so every
alias survives: refilling the storage before backward revives saved views without our knowing that they exist.
"""

from __future__ import annotations

import torch

from composable.device.memory import MemoryPool


class ElasticBuffer:
    """A 1-D tensor whose memory comes and goes while its views stay valid."""

    __slots__ = ("_held", "_nbytes", "_shelf", "_storage", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pool: MemoryPool) -> None:
        self._nbytes = numel * dtype.itemsize
        self._storage = torch.UntypedStorage(0, device=device)
        self._shelf = pool.free_list(self._nbytes, device)
        self._shelf.fill(self._storage)
        with torch.inference_mode(False):
            self.tensor = torch.empty(0, dtype=dtype, device=device).set_(self._storage, 0, (numel,), (1,)).data
        self._held = True

    @property
    def held(self) -> bool:
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes while the memory is there."""
        return self._nbytes

    def allocate(self) -> None:
        if not self._held:
            self._shelf.fill(self._storage)
            self._held = True  # last, and first below: after an interrupt in between there may be more memory, never less

    def free(self) -> None:
        if self._held:
            self._held = False
            self._shelf.drain(self._storage)
