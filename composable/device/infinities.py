"""A gradient scaler's look for infinities, which all ranks decide on alike; knows no parameter and no scaler.

Note [One decision]
`torch.amp.GradScaler` skips a step where a gradient is not finite. Of DTensors torch asks the ranks that the first one in the
list is cut over: behind one that every rank holds whole, ranks decide each for itself, and behind one that is cut over some,
these alone; then some step and others do not. And it refuses lists in which some are DTensors and some are not. So everything
is looked at where it lies, and then all process groups over which any of these gradients is cut hear of it, one after the
other: those over most ranks first, and of a mesh of which one unit takes the rows and another one the columns, both.

For gradients on the host, torch copies its numbers there without waiting, and computes with them at once: so the host waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable.device.collectives import reduce_numbers
from composable.device.private import local_of
from composable.device.private_operations import replace_dtensor_operation
from composable.device.streams import wait_for_current_stream
from composable.device.sums_over_groups import groups_cut_over

_deferred: Final[ContextVar[bool]] = ContextVar("infinities_deferred", default=False)
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@cache
def agree_on_infinities() -> bool:
    """Let `torch.amp.GradScaler` skip a step on all ranks if one rank's part of a gradient is not finite.

    Returns:
        Whether ranks agree. Where this torch has no such table, they may not.
    """
    return replace_dtensor_operation(_UNSCALE, _unscale)


def _unscale(operation: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    gradients, found, inverse = args
    if _local(found).is_pinned() or _local(inverse).is_pinned():  # as torch makes what it copies without waiting
        wait_for_current_stream()
    operation([_local(gradient) for gradient in gradients], _local(found), _local(inverse), **kwargs)
    if _deferred.get():
        return
    number = _local(found).reshape(1)
    for group, device in groups_of(gradients):
        label = "all-reduce of whether gradients are finite"
        number.copy_(reduce_numbers(number.to(device), group, largest=True, label=label))


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block no rank asks the others: who opens it does so afterwards, once for gradients of all kinds."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def groups_of(tensors: Sequence[Tensor]) -> list[tuple[dist.ProcessGroup, str]]:
    """Those that any of them is cut over, the largest first, and where they communicate."""
    found = {
        (group, tensor.device_mesh.device_type): None
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for group in groups_cut_over(tensor.device_mesh, tensor.placements)
    }
    return sorted(found, key=lambda each: -dist.get_world_size(each[0]))
