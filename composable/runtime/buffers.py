"""Buffers of replicated units, which everybody computes with as rank 0 has them; knows no parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from composable.device.collectives import Wire
from composable.device.parameters import Owner
from composable.device.private import outside_transforms
from composable.errors import RanksDisagreeError
from composable.runtime.launch_order import LaunchOrder


class Buffered(Protocol):
    """A replicated unit."""

    @property
    def name(self) -> str: ...

    @property
    def buffers(self) -> Sequence[Owner]: ...

    @property
    def number(self) -> int: ...

    @property
    def wire(self) -> Wire: ...

    @property
    def order(self) -> LaunchOrder: ...


def share_buffers(units: Sequence[Buffered]) -> None:
    """All of them compute with rank 0's buffers.

    Called before the forward of what is around them, which every rank runs: one may leave out some of what is inside.
    """
    if not any(unit.buffers for unit in units):
        return
    by_wire: dict[int, list[Buffered]] = {}
    for unit in units:
        by_wire.setdefault(id(unit.wire), []).append(unit)
    for members in by_wire.values():
        wire, buffers = members[0].wire, [owner for unit in members for owner in unit.buffers]
        if buffers and wire.ways > 1:
            for unit in members:
                unit.order.unwind()  # if a backward raised
            if wire.capabilities.ordered and len(members) < len(members[0].order):
                _check_order(members[0])
            _share(buffers, wire, members[0].name or "root")


def _check_order(called: Buffered) -> None:
    """Others communicate over the same wire, and what is annotated around them all is not called: each shares by itself."""
    unit, wire = called.name or "root", called.wire
    label = f"check of the order of units with buffers, at unit '{unit}'"
    lowest, highest = wire.extremes([called.number], label=label)
    if lowest != highest:
        raise RanksDisagreeError(
            f"replicate: rank {wire.rank} calls unit '{unit}', whose buffers follow rank 0, where another rank calls another "
            "unit. Call such units in the same order on every rank, or call the annotated module around them"
        )


@outside_transforms
def _share(buffers: Sequence[Owner], wire: Wire, unit: str) -> None:
    """Everybody gets rank 0's. Out of place: an earlier forward may have saved the old ones."""
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
