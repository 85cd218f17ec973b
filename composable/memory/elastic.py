"""Buffers whose memory comes and goes, and the idle blocks of host memory that they share.

Autograd may have saved any alias of a compute parameter. So the memory of a full buffer comes and
goes *inside* one storage object: every alias survives, and the all-gather of backward refills what
forward saved without knowing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from composable.torch_private import CAN_SWAP, outside_inference, swap_memory, view_without_memory

# Idle blocks of host memory by their size in bytes. The host's allocator returns large blocks to
# the system, and then every use faults all pages in again; an accelerator's caching allocator does
# not need this.
_IDLE: Final[dict[int, list[torch.UntypedStorage]]] = {}
# Whose forward or backward runs. Blocks are kept until the last of these ends: what is freed
# outside of them serves nobody soon, and goes back to the system at once.
_USERS: Final[set[ref[Any]]] = set()
_ELASTIC: Final = "_composable_is_elastic"  # of a storage; False: others resize it
# Of open scopes of `resizing_buffers`: what is called when idle blocks return to the system.
_RESIZING: Final[list[Callable[[], object]]] = []


def _new_block(nbytes: int) -> torch.UntypedStorage:
    # a default device of the user applies to storages, too
    return torch.UntypedStorage(nbytes, device="cpu")


def borrow(numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D host tensor with undefined contents, for `give_back`."""
    nbytes = numel * dtype.itemsize
    with outside_inference():
        idle = _IDLE.setdefault(nbytes, [])
        block = idle.pop() if idle else _new_block(nbytes)
        return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, (numel,), (1,))


def give_back(tensor: Tensor) -> None:
    """Return what `borrow` gave. No alias of `tensor` may be used afterwards."""
    block = tensor.untyped_storage()
    if _USERS:
        _IDLE[block.nbytes()].append(block)


def keep_idle_memory(user: object) -> None:
    """From now on keep blocks that are freed, since they are used again soon: until
    `release_idle_memory(user)`, or nothing else refers to `user`.
    """
    _USERS.add(ref(user, _USERS.discard))


def release_idle_memory(user: object) -> None:
    """`user` needs idle blocks no longer; if it was the last user, all return to the system."""
    _USERS.discard(ref(user))
    if _USERS:
        return
    for blocks in _IDLE.values():
        blocks.clear()
    for on_release in _RESIZING:
        on_release()


def keeps_idle_memory() -> bool:
    """Whether a block that is freed now is kept."""
    return bool(_USERS)


def idle_bytes() -> int:
    """Bytes of host memory that no buffer uses."""
    return sum(block.nbytes() for blocks in _IDLE.values() for block in blocks)


@contextmanager
def resizing_buffers(on_release: Callable[[], object] = int) -> Iterator[None]:
    """Buffers that are made in the body resize their storages, on a host, too, where a simulated
    machine sees it. They share no idle blocks.

    Args:
        on_release: is called when idle blocks return to the system.
    """
    _RESIZING.append(on_release)
    try:
        yield
    finally:
        _RESIZING.remove(on_release)


class ElasticBuffer:
    """A 1-D tensor whose memory comes and goes while its views stay valid. It has none at first.

    Attributes:
        tensor: the whole buffer.
        nbytes: its size while the memory is there.
        held: whether the memory is there. `allocate` and `free` alone change it.
    """

    __slots__ = ("_block", "_idle", "_storage", "held", "nbytes", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.nbytes = numel * dtype.itemsize
        self.held = False
        pooled = device.type == "cpu" and self.nbytes > 0 and CAN_SWAP and not _RESIZING
        self._idle: list[torch.UntypedStorage] | None = (
            _IDLE.setdefault(self.nbytes, []) if pooled else None
        )
        # pooled and held: the block, empty, whose memory is in `_storage`
        self._block: torch.UntypedStorage | None = None
        with outside_inference():
            start = torch.empty(0, dtype=dtype, device=device)
            self._storage = start.untyped_storage()
            setattr(self._storage, _ELASTIC, True)
            self.tensor = self._view(start, (numel,), (1,)).data

    def _view(self, start: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        # Views are made without memory: when a model is annotated its parameters are whole, and
        # full buffers beside them could exceed the memory of the device.
        view = view_without_memory(start, shape, strides)
        if view is None:
            held = self.held
            self.allocate()
            view = start.as_strided(shape, strides)
            if not held:
                self.free()
        return view

    def part(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """A view from element `start` on, whether the memory is there or not. It shares the version
        counter of `tensor`.
        """
        with outside_inference():
            return self._view(self.tensor[start:start], shape, strides)

    def stretch(self, start: int, numel: int) -> Tensor:
        """`numel` elements from `start` on; see `part`."""
        return self.part(start, (numel,), (1,))

    def allocate(self) -> None:
        """Let the memory be there, with undefined contents if it was not. Aliases and version
        counters do not change.
        """
        if self.held:
            return
        if self._idle is None:
            self._storage.resize_(self.nbytes)
        else:
            # the block that was used last is the most likely to be in the caches
            self._block = self._idle.pop() if self._idle else _new_block(self.nbytes)
            swap_memory(self._storage, self._block)
        self.held = True

    def free(self) -> None:
        """Give the memory back, if it is there: a host's to the idle blocks or to the system, an
        accelerator's to its caching allocator.
        """
        if not self.held:
            return
        self.held = False
        if self._idle is None:
            self._storage.resize_(0)
        else:
            assert self._block is not None
            block, self._block = self._block, None
            swap_memory(self._storage, block)
            if _USERS:
                self._idle.append(block)


def is_elastic(storage: torch.UntypedStorage) -> bool:
    return getattr(storage, _ELASTIC, False)


def comes_and_goes(storage: torch.UntypedStorage) -> bool:
    """Whether its memory does: that of an elastic buffer, or what `note_resized` was given."""
    return hasattr(storage, _ELASTIC)


def note_resized(storage: torch.UntypedStorage) -> None:
    """The caller frees its memory and takes it again by `resize_`."""
    setattr(storage, _ELASTIC, False)


def with_own_storage(view: Tensor) -> Tensor:
    """A tensor over the memory of `view`, a dense 1-D tensor, with a storage of its own that starts
    there.

    torch saves whole storages, and a `DTensor` whose local tensor starts inside of its storage can
    be neither detached and copied nor saved. DLPack makes another storage over the same memory, and
    keeps that memory alive. Returns `view` itself on a device that does not implement DLPack.
    """
    with outside_inference():
        if view.device.type == "meta":
            return view.new_empty(view.shape)  # `empty_like` runs in Python there
        try:
            octets = from_dlpack(view.detach().view(torch.uint8))  # DLPack does not know all dtypes
        except (BufferError, RuntimeError, TypeError, ValueError):
            return view
        return octets.view(view.dtype)
