"""Which views are copied to which between a message and the parameters in it; knows slots, no buffer and no unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from composable.plan.layout import Slot

_WIDE: Final = (torch.complex128, torch.int64, torch.int32)  # elements of 16, 8 and 4 bytes


def stack(buffer: Tensor, starts: Sequence[int], rows: int, row_stride: int, row_numel: int) -> Tensor:
    """Equal stretches of rows, which start at equal distances in `buffer`, as one (stretches, rows, row_numel) view."""
    start = buffer.storage_offset() + starts[0]
    return buffer.as_strided((len(starts), rows, row_numel), (starts[1] - starts[0], row_stride, 1), start)


def widened(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Equal-shaped views of the same bytes, in elements as wide as they allow; to copy one to the other.

    A copy walks short rows element by element: with 1024 ranks and rows of 16 bytes this takes less than half the time.
    """
    for wide in _WIDE:
        if all(_can_hold(tensor, wide) for tensor in (target, source)):
            return target.view(wide), source.view(wide)
    return target, source


def _can_hold(tensor: Tensor, wide: torch.dtype) -> bool:
    *strides, last = tensor.stride()
    ratio = wide.itemsize // tensor.dtype.itemsize
    return ratio > 1 and last == 1 and not any(x % ratio for x in (tensor.shape[-1], tensor.storage_offset(), *strides))


def pair_rows(slot: Slot, whole: Tensor, columns: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of equal-shaped views that match a parameter with its chunks, one chunk per row of `columns`.

    Args:
        whole: 1-D; the parameter, with room for `slot.full_numel` elements, or for `slot.numel` only.
        columns: (num_shards, chunk_numel) view of a staging area.
    """
    if not slot.numel:
        return []
    if slot.dim == 0 and whole.numel() >= slot.num_shards * slot.chunk_numel:
        return [(whole[: slot.num_shards * slot.chunk_numel].view(slot.num_shards, slot.chunk_numel), columns)]
    size, chunk, outer, inner = slot.shape[slot.dim], slot.chunk, slot.outer, slot.inner
    cube = whole[: slot.numel].view(outer, size, inner)
    full_rows, rest = divmod(size, chunk)
    pairs = []
    if full_rows:
        even = cube[:, : full_rows * chunk].view(outer, full_rows, chunk, inner) if outer == 1 else None
        if even is None:
            even = cube.narrow(1, 0, full_rows * chunk).unflatten(1, (full_rows, chunk))
        pairs.append((even.permute(1, 0, 2, 3), columns[:full_rows].unflatten(1, (outer, chunk, inner))))
    if rest:
        tail = columns[full_rows, : outer * rest * inner].view(outer, rest, inner)
        pairs.append((cube[:, full_rows * chunk :], tail))
    return pairs
