"""Buffers of replicated units, which everybody computes with as rank 0 has them; knows no parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from composable.device.collectives import Communicator
from composable.device.parameter_swap import Place
from composable.device.private import outside_transforms
from composable.errors import RanksDisagreeError
from composable.runtime.averaging import Averaging


class Buffered(Protocol):
    """A replicated unit."""

    buffers: tuple[Place, ...]
    averaging: Averaging


def share_buffers(units: Sequence[Buffered]) -> None:
    """All of them compute with rank 0's buffers.

    Called before the forward of what is around them, which every rank runs: one may leave out some of what is inside.
    """
    if not any(unit.buffers for unit in units):
        return
    by_communicator: dict[int, list[Buffered]] = {}
    for unit in units:
        by_communicator.setdefault(id(unit.averaging.communicator), []).append(unit)
    for members in by_communicator.values():
        communicator, buffers = members[0].averaging.communicator, [place for unit in members for place in unit.buffers]
        if buffers and communicator.size > 1:
            for unit in members:
                unit.averaging.order.abort()  # if a backward raised
            communicator.sums.steps.rejoin()
            order = members[0].averaging.order
            if communicator.capabilities.ordered and (len(members) < len(order) or order.company.may_have_others(order.kin)):
                _check_order(members[0].averaging)
            _share(buffers, communicator, members[0].averaging.name)


def _check_order(called: Averaging) -> None:
    """Others use the same communicator, and what is annotated around them all is not called: each shares by itself."""
    unit, communicator = called.name, called.communicator
    label = f"check of the order of units with buffers, at unit '{unit}'"
    lowest, highest = communicator.min_max([called.place], label=label)
    if lowest != highest:
        raise RanksDisagreeError(
            f"replicate: rank {communicator.rank} calls unit '{unit}', whose buffers follow rank 0, where another rank calls "
            "another unit. Call such units in the same order on every rank, or call the annotated module around them"
        )


@outside_transforms
def _share(buffers: Sequence[Place], communicator: Communicator, unit: str) -> None:
    """Everybody gets rank 0's. Out of place: an earlier forward may have saved the old ones."""
    found: dict[int, tuple[Tensor, list[Place]]] = {}  # a buffer that modules share stays one
    for place in buffers:
        buffer = place.module._buffers.get(place.name)
        if buffer is not None and buffer.numel():
            found.setdefault(id(buffer), (buffer, []))[1].append(place)
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, list[Place]]]] = {}
    for buffer, places in found.values():
        by_kind.setdefault((buffer.dtype, buffer.device), []).append((buffer, places))
    for members in by_kind.values():
        with torch.no_grad(), torch.inference_mode(False):
            message = torch.cat([buffer.detach().reshape(-1) for buffer, _ in members])
            communicator.broadcast(message, label=f"broadcast of the buffers of unit '{unit}'")
            if communicator.rank == 0:
                continue
            pieces = message.split([buffer.numel() for buffer, _ in members])
            for (buffer, places), piece in zip(members, pieces, strict=True):
                received = piece.view(buffer.shape)
                for place in places:
                    place.module._buffers[place.name] = received
