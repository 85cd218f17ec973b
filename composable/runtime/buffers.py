"""Buffers of a replicated unit, which everybody computes with as rank 0 has them; knows no parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composable.device.collectives import Wire
from composable.device.parameters import Owner
from composable.device.private import outside_transforms


@outside_transforms
def share_buffers(buffers: Sequence[Owner], wire: Wire, unit: str) -> None:
    """Everybody gets rank 0's. Out of place: an earlier forward may have saved the old ones."""
    if not buffers or wire.ways == 1:
        return
    places: dict[int, tuple[Tensor, list[Owner]]] = {}  # a buffer that modules share stays one
    for owner in buffers:
        buffer = owner.module._buffers.get(owner.name)
        if buffer is not None and buffer.numel():
            places.setdefault(id(buffer), (buffer, []))[1].append(owner)
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, list[Owner]]]] = {}
    for buffer, owners in places.values():
        by_kind.setdefault((buffer.dtype, buffer.device), []).append((buffer, owners))
    for members in by_kind.values():
        with torch.no_grad(), torch.inference_mode(False):
            message = torch.cat([buffer.detach().reshape(-1) for buffer, _ in members])
            wire.broadcast(message, label=f"broadcast of the buffers of unit '{unit}'")
            if wire.rank == 0:
                continue
            pieces = message.split([buffer.numel() for buffer, _ in members])
            for (buffer, owners), piece in zip(members, pieces, strict=True):
                received = piece.view(buffer.shape)
                for owner in owners:
                    owner.module._buffers[owner.name] = received
