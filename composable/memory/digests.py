"""Digests of tensors: compare values between two ranks, or now with an earlier time.

The bytes of a tensor are read as words of 64 bits. A word is weighted by its position, and the sum
is taken modulo 2 ** 64. The highest bit of a product depends only on the highest bit of the word
and on the lowest bit of its weight, so two flipped signs could cancel. Therefore the upper half of
each word is added a second time, as a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from composable.tensors import plain_parts

_WORDS: Final = 1 << 16  # which stay in a cache of the host with what is computed of them
_STEP: Final = 0x5851_F42D_4C95_7F2D


def digests(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """On each device the indices of the tensors there, and a number for each. Waits for no device.

    Takes some MiB, however large the tensors are. Empty tensors and those on the meta device have
    none. Of a DTensor it is that of this rank's part.
    """
    plain = list(map(plain_parts, tensors))
    alike: dict[torch.device, list[int]] = {}
    for index, parts in enumerate(plain):
        if any(part.numel() and not part.is_meta for part in parts):
            alike.setdefault(parts[0].device, []).append(index)
    with torch.no_grad():
        for device, indices in alike.items():
            most = max(part.nbytes for index in indices for part in plain[index])
            weights = _weights(device, min(_WORDS, max(most // 8, 8)))
            yield indices, torch.stack([_digest(plain[index], weights) for index in indices])


def digests_as_ints(tensors: Sequence[Tensor]) -> list[int]:
    """As `digests`, of each 47 bits; 0 for those that have none. Waits for each device once."""
    found = [0] * len(tensors)
    for indices, totals in digests(tensors):
        for index, total in zip(indices, totals.tolist(), strict=True):
            found[index] = (total >> 16) & 0x7FFF_FFFF_FFFF
    return found


def _digest(parts: Sequence[Tensor], weights: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    buffer = torch.empty_like(weights)
    for part in parts:
        data = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if data.stride(0) != 1:  # one element, whose stride is any
            data = data.clone(memory_format=torch.contiguous_format)
        data = data.view(torch.uint8)
        whole = data.numel() // 8 * 8
        for octets in data[:whole].split(8 * _WORDS):
            # a view that begins between two words
            aligned = octets.clone() if octets.storage_offset() % 8 else octets
            words = aligned.view(torch.int64)
            near, upper = weights[: words.numel()], buffer[: words.numel()]
            torch.bitwise_right_shift(words, 32, out=upper)
            total = (total * _STEP + _dot(words, near)) * _STEP + _dot(upper, near)
        rest = data[whole:].to(torch.int64)
        total = total * _STEP + _dot(rest, weights[: rest.numel()])
    return total


def _dot(words: Tensor, weights: Tensor) -> Tensor:
    if words.device.type == "cpu":
        return torch.dot(words, weights)
    return (words * weights).sum()  # CUDA has no dot product of integers


def _weights(device: torch.device, count: int) -> Tensor:
    """An odd number for each position, in no simple proportion to the others, so that no exchange
    of rows cancels out.
    """
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _STEP
    return (mixed ^ (mixed >> 29)) * _STEP | 1
