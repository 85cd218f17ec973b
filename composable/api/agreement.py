"""Whether all ranks hold the same parameters, and how they come to; knows names and values, no units.

Note [Fingerprints]
Agreement is checked with the extremes of three numbers per annotation: how many parameters there are, a digest of all names,
shapes and dtypes, and a digest of all values. Their cost does not depend on the number of ranks or parameters. Only when they
differ do the ranks compare parameter by parameter, to name the first difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from composable.device.collectives import Wire
from composable.errors import RanksDisagreeError
from composable.model.traversal import ManagedParameter

_CHUNK: Final = 1 << 18  # words that are digested at once


def fingerprint(tensor: Tensor) -> int:
    """A number that equal values share and different ones hardly ever do; the position of values counts."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return 0
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words in (*data[:whole].view(torch.int32).split(_CHUNK), data[whole:]):
        # Each word counts as often as its position says; numbers are taken modulo 2 ** 64.
        total = total * _STEP + (words.to(torch.int64) * _weights(data.device)[: words.numel()]).sum()
    return (int(total) >> 16) & 0x7FFF_FFFF_FFFF


_STEP: Final = 0x5851_F42D_4C95_7F2D


@lru_cache
def _weights(device: torch.device) -> Tensor:
    """An odd number for each position: neither equal nor in any proportion, so that no exchange of rows cancels out."""
    mixed = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _STEP
    return (mixed ^ (mixed >> 29)) * _STEP | 1


def _shape_digest(parameters: Sequence[ManagedParameter]) -> list[int]:
    return [
        zlib.crc32(f"{p.fqn} {tuple(p.parameter.shape)} {p.parameter.dtype} {p.parameter.requires_grad}".encode())
        for p in parameters
    ]


def synchronise(verb: str, parameters: Sequence[ManagedParameter], wire: Wire, mode: str) -> None:
    """Check that the ranks agree, or make them.

    Args:
        mode: "check", "broadcast" (rank 0's values) or "off".

    Raises:
        RanksDisagreeError: names, shapes, dtypes or, in "check", values differ; names the first difference.
    """
    if mode == "off" or wire.ways == 1:
        return
    shapes = _shape_digest(parameters)
    values = [fingerprint(p.parameter) for p in parameters] if mode == "check" else []
    summary = [len(parameters), zlib.crc32(repr(shapes).encode()), zlib.crc32(repr(values).encode())]
    label = f"check of {verb}() across ranks"
    lowest, highest = wire.extremes(summary, label=label)
    if lowest[:2] != highest[:2]:
        _refuse_shapes(verb, parameters, shapes, wire, label)
    if mode == "broadcast":
        for managed in parameters:
            if managed.parameter.device.type != "meta":
                wire.broadcast(managed.parameter.data, label=f"broadcast of parameter '{managed.fqn}'")
        return
    if lowest != highest:
        _refuse_values(verb, parameters, values, wire, label)


def _refuse_shapes(verb: str, parameters: Sequence[ManagedParameter], shapes: list[int], wire: Wire, label: str) -> None:
    counts = [row[0] for row in wire.exchange([len(parameters)], label=label)]
    longest = max(counts)
    rows = wire.exchange(shapes + [0] * (longest - len(shapes)), label=label)
    other = next(r for r, row in enumerate(rows) if row != rows[0] or counts[r] != counts[0])
    first = next((i for i in range(longest) if rows[0][i] != rows[other][i]), min(counts))
    texts = _everybody_says(_describe(parameters, first), wire, label)
    seen = f"rank 0 has {texts[0]}; rank {other} has {texts[other]}"
    raise RanksDisagreeError(
        f"{verb}: rank {other} annotates {counts[other]} parameters, rank 0 {counts[0]}; they differ from parameter "
        f"{first} on: {seen}. Every rank must build the same module in the same order."
    )


def _everybody_says(text: str, wire: Wire, label: str, room: int = 160) -> list[str]:
    """Every rank's `text`, cut to `room` bytes, on every rank."""
    rows = wire.exchange(list(text.encode()[:room].ljust(room)), label=label)
    return [bytes(row).decode(errors="replace").rstrip() for row in rows]


def _describe(parameters: Sequence[ManagedParameter], index: int) -> str:
    if index >= len(parameters):
        return "none there"
    parameter = parameters[index].parameter
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"'{parameters[index].fqn}' {tuple(parameter.shape)} {dtype}"


def _refuse_values(verb: str, parameters: Sequence[ManagedParameter], values: list[int], wire: Wire, label: str) -> None:
    rows = wire.exchange(values, label=label)
    for index, managed in enumerate(parameters):
        other = next((r for r, row in enumerate(rows) if row[index] != rows[0][index]), None)
        if other is not None:
            raise RanksDisagreeError(
                f"{verb}: parameter '{managed.fqn}' differs across ranks (fingerprint rank0={rows[0][index]:x}, "
                f"rank{other}={rows[other][index]:x}); pass sync_module_states='broadcast' or seed equally"
            )
