"""Which communicator serves a group and a device, and what tests put around it; moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist

from composable.device.collectives.accelerator import AcceleratorCommunicator
from composable.device.collectives.communicator import Communicator
from composable.device.collectives.generic import GenericCommunicator
from composable.device.collectives.local import LocalCommunicator
from composable.device.collectives.point_to_point import PointToPointCommunicator
from composable.device.collectives.process_groups import backend_of, communicator_like
from composable.device.streams import streams_of

try:
    from composable.device.collectives.host import host_communicator
except ModuleNotFoundError:  # the folder may be left out: ranks of one host use sockets then, as ranks of several hosts do

    def host_communicator(  # type: ignore[misc]
        group: dist.ProcessGroup, device: torch.device, *, dedicated: bool = False
    ) -> None:
        return None


PAIRS_UP_TO: Final = 8  # ranks in a gloo group up to which pairs beat its collectives

_WRAPPERS: list[Callable[[Communicator], Communicator]] = []


@contextmanager
def communicators_wrapped_by(wrapper: Callable[[Communicator], Communicator]) -> Iterator[None]:
    """Communicators made in the body pass through `wrapper`: how tests delay, record or break collectives."""
    _WRAPPERS.append(wrapper)
    try:
        yield
    finally:
        _WRAPPERS.remove(wrapper)


def communicator_of(group: dist.ProcessGroup | None, device: torch.device, *, dedicated: bool = False) -> Communicator:
    """The communicator for tensors on `device` among the ranks of `group` (None: this rank alone). All ranks call it together.

    Args:
        dedicated: collectives that have no tag of a unit's, too, are told from all others of the group. Backends tell them
            apart by their order only, so there it takes a process group of its own.
    """
    communicator: Communicator
    cpu = torch.device("cpu")

    def mine(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        return communicator_like(group, device) if dedicated else group

    if group is None or dist.get_world_size(group) == 1:
        communicator = LocalCommunicator(device)
    elif device.type not in ("cpu", "meta"):
        communicator = AcceleratorCommunicator(mine(group, device), device, streams_of(device))
    elif backend_of(group, cpu) == "gloo":
        pairs = PointToPointCommunicator if dist.get_world_size(group) <= PAIRS_UP_TO else GenericCommunicator
        communicator = host_communicator(group, cpu, dedicated=dedicated) or pairs(mine(group, cpu), cpu)
    else:
        communicator = GenericCommunicator(mine(group, cpu), cpu)
    for wrapper in _WRAPPERS:
        communicator = wrapper(communicator)
    return communicator
