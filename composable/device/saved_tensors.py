"""What stands for a tensor that autograd saves for backward: the tensor, or a copy on the host; knows no module.

Note [Versions]
Autograd raises if what it saved was written to before backward reads it, but not where hooks of saved tensors stand in
between: it would give the old numbers, or new ones, without a word. So the version is compared here, for what stays on the
device too. What has left it is known by a tensor without memory that shares the version counter of the one that was saved.

Note [What stays]
Parameters and their views, since they stay on the device anyway, or are gathered anew before backward; so do casts of them by
autocast, which would travel with every step. Buffers of modules. Whatever is no plain, strided tensor. And what is small:
to go and come back costs the host some time, whatever the size (`MIN_BYTES` in docs/settings.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.elastic_buffer import is_elastic
from composable.device.host_copies import HostCopy, copies_of
from composable.device.private import innermost, local_of
from composable.device.streams import has_streams
from composable.errors import SavedTensorError

_ALIGNED: Final = 512  # bytes: kernels may round otherwise where memory is aligned otherwise; allocators align to this, or less
_CASTS: Final = ("ToCopyBackward0", "CastAheadBackward")

_without_memory: Final[dict[tuple[torch.dtype, torch.device], Tensor]] = {}


class SavedTensor(Protocol):
    """What autograd holds in place of a tensor."""

    def tensor(self) -> Tensor:
        """The tensor, for backward.

        Raises:
            SavedTensorError: it was written to since.
        """


class _Counter:
    """The version counter that a tensor shares with its views and aliases, and what it was when the tensor was saved."""

    __slots__ = ("_alias", "_version", "_where")

    def __init__(self, tensor: Tensor, where: str, *, holds_memory: bool) -> None:
        self._version = tensor._version
        self._where = where
        self._alias = tensor.detach()
        if not holds_memory:
            key = (tensor.dtype, tensor.device)
            if key not in _without_memory:
                _without_memory[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._alias.data = _without_memory[key]

    def unchanged(self, shape: torch.Size | None = None) -> Tensor:
        alias, version = self._alias, self._alias._version
        if version != self._version:
            kind = f"{alias.type()} {list(alias.shape if shape is None else shape)}"
            raise SavedTensorError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{kind}], which {self._where} saved for backward, is at version {version}; expected version "
                f"{self._version} instead. Write to a copy of it, or after backward; "
                "torch.autograd.set_detect_anomaly(True) shows the operation that cannot compute its gradient"
            )
        return alias


class Kept:
    """A tensor that stays where it is."""

    __slots__ = ("_counter",)

    def __init__(self, tensor: Tensor, where: str) -> None:
        self._counter = _Counter(tensor, where, holds_memory=True)

    def tensor(self) -> Tensor:
        return self._counter.unchanged()


class Offloaded:
    """A tensor whose contents are on the host, or on their way."""

    __slots__ = ("_copy", "_counter", "_offset", "_shape", "_strides")

    def __init__(self, tensor: Tensor, start: int, copy: HostCopy, where: str) -> None:
        copy.add_reader()
        self._copy = copy
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset() - start
        self._counter = _Counter(tensor, where, holds_memory=False)

    def tensor(self) -> Tensor:
        self._counter.unchanged(self._shape)
        with torch.no_grad():
            flat = self._copy.read()
            return flat.as_strided(self._shape, self._strides, flat.storage_offset() + self._offset)


def _extent(tensor: Tensor) -> int:
    """How many elements lie between the first and the last one, both among them; strides of torch are not negative."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _stretch_around(tensor: Tensor, extent: int) -> tuple[int, int]:
    """What is copied: the whole storage, which several tensors may share, unless half of it is something else. Two halves are
    two copies: kernels may write the second one after the first was saved, without the version telling it."""
    item = tensor.element_size()
    start, whole = int(tensor.storage_offset()), tensor.untyped_storage().nbytes() // item
    if 2 * extent > whole:
        return 0, whole
    return start - start % (_ALIGNED // item), start + extent


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and innermost(tensor) is tensor
    )


def _is_of_a_parameter(tensor: Tensor) -> bool:
    """A view of a parameter, or of its cast by autocast, which made a node of it."""
    base = tensor._base if tensor._is_view() else tensor
    if isinstance(base, nn.Parameter):
        return True
    node = None if base is None else base.grad_fn
    if node is None or node.name() not in _CASTS:
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of parameters and buffers, by their ids."""
    local = (local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return {id(storage): storage for storage in (t.untyped_storage() for t in local if _is_held_plainly(t))}


def _is_held_plainly(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


class Savings:
    """Decides, for one call of a module, what leaves the device.

    Args:
        held: gives what the module and those inside it hold, asked when the first tensor might leave.
        where: for messages of errors.
    """

    __slots__ = ("_held", "_min_bytes", "_pin_memory", "_stays", "_where")

    def __init__(self, held: Callable[[], Iterable[Tensor]], where: str, *, min_bytes: int, pin_memory: bool) -> None:
        self._held = held
        self._where = where
        self._min_bytes = min_bytes
        self._pin_memory = pin_memory
        self._stays: dict[int, torch.UntypedStorage] | None = None

    def save(self, tensor: Tensor) -> SavedTensor:
        if has_streams(tensor.device) and _is_plain(tensor) and tensor.numel():
            extent = _extent(tensor)
            if extent * tensor.element_size() >= self._min_bytes and not self._is_held(tensor):
                start, stop = _stretch_around(tensor, extent)
                copy = copies_of(tensor.device).copy_of(tensor, start, stop, pin_memory=self._pin_memory)
                return Offloaded(tensor, start, copy, self._where)
        return Kept(tensor, self._where)

    def _is_held(self, tensor: Tensor) -> bool:
        if _is_of_a_parameter(tensor):
            return True
        if self._stays is None:
            self._stays = storages_of(self._held())
        storage = tensor.untyped_storage()
        return id(storage) in self._stays or is_elastic(storage)


def restore(saved: SavedTensor) -> Tensor:
    """What backward gets for what `Savings.save` returned."""
    return saved.tensor()
