"""Buffers of replicated units follow one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from composable.comm import Comm
from composable.comm.launch import Launch
from composable.contract.tree import Place
from composable.engine.step.unit import Unit
from composable.torch_private import outside_transforms

_BROADCAST: Final = Launch("broadcast of buffers")


@outside_transforms
def broadcast_buffers(units: Sequence[Unit], source: int = 0, *, saved: bool) -> None:
    """Buffers of replicated units follow one rank, in forwards with gradients only, as with DDP.

    The values are written into the tensors that users hold, on hosts only where they differ.

    Args:
        saved: an earlier forward waits for its backward, and may have saved the buffers. Then a
            buffer is replaced.
    """
    # One message per kind; a buffer that modules share stays one.
    messages: dict[
        tuple[Comm, torch.dtype, torch.device], dict[int, tuple[Tensor, list[Place]]]
    ] = {}
    for unit in units:
        comm = unit.mesh_info.all
        for place in unit.spec.broadcast_buffers if comm.size > 1 else ():
            buffer = place.module._buffers.get(place.name)
            if buffer is not None and buffer.numel():
                members = messages.setdefault((comm, buffer.dtype, buffer.device), {})
                members.setdefault(id(buffer), (buffer, []))[1].append(place)
    for (comm, _, _), members in messages.items():
        with torch.no_grad(), torch.inference_mode(False):
            message = torch.cat([buffer.detach().reshape(-1) for buffer, _ in members.values()])
            comm.broadcast([message], _BROADCAST, source)
        pieces = message.split([buffer.numel() for buffer, _ in members.values()])
        for (buffer, places), piece in (
            zip(members.values(), pieces, strict=True) if comm.rank != source else ()
        ):
            received = piece.view(buffer.shape)
            if not comm.traits.on_stream and torch.equal(buffer, received):
                continue  # where a stream is, to compare would make the host wait
            if saved:
                received = received.clone()  # no view of the message, which other buffers share
                for place in places:
                    place.module._buffers[place.name] = received
            else:
                with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(received)
