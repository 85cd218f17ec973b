"""That all of a unit is where its ranks communicate: refused or moved; knows no parameter's contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from composable.device.parameter_swap import Place
from composable.errors import AnnotationError
from composable.model.traversal import REPLICATE, SHARD, ManagedParameter, walk


def buffers_of(modules: Sequence[nn.Module]) -> list[tuple[str, Place, Tensor]]:
    """FQN, place and value of every buffer in `modules` that is in no annotated module below them, at all of its places."""
    return [
        (f"{fqn}.{name}".strip("."), Place(below, name), buffer)
        for root in modules
        for fqn, below in walk(root, stop=(SHARD, REPLICATE))
        for name, buffer in below._buffers.items()
        if buffer is not None
    ]


def refuse_elsewhere(
    verb: str, parameters: Sequence[ManagedParameter], buffers: Sequence[tuple[str, Place, Tensor]], device: torch.device
) -> None:
    """Refuse tensors that are not on `device`; those that are on meta will be.

    Raises:
        AnnotationError: one is elsewhere, or a buffer is uninitialised.
    """
    for fqn, tensor in _named(parameters, buffers):
        if isinstance(tensor, UninitializedBuffer):
            raise AnnotationError(f"buffer '{fqn}' is uninitialised; run a lazy module once before annotating it")
        if tensor.device.type != "meta" and not _same(tensor.device, device):
            raise AnnotationError(
                f"{verb}: '{fqn}' is on {tensor.device}, and the ranks of the mesh communicate on {device}; call "
                f"module.to('{device}') before annotating it"
            )


def move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move buffers to where the parameters go; a verb that fails puts the former ones back."""
    moved: dict[int, Tensor] = {}  # a buffer that modules share stays one
    for _, place, buffer in buffers_of(modules):
        if buffer.device.type not in ("meta", device.type) and not isinstance(buffer, UninitializedBuffer):
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            place.module._buffers[place.name] = moved[id(buffer)]


def _named(
    parameters: Sequence[ManagedParameter], buffers: Sequence[tuple[str, Place, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    yield from ((managed.fqn, managed.parameter) for managed in parameters)
    yield from ((fqn, buffer) for fqn, _, buffer in buffers)


def _same(one: torch.device, other: torch.device) -> bool:
    index: int | None = one.index  # torch says int, and means None, too
    return one.type == other.type and index in (None, other.index)
