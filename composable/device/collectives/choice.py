"""Which wire serves a group and a device, and what tests put around it; moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist

from composable.device.collectives.groups import backend_of, communicator_like
from composable.device.collectives.pairs import PairsWire
from composable.device.collectives.tensors import StreamsWire, TensorsWire
from composable.device.collectives.wire import LocalWire, Wire
from composable.device.streams import streams_of

try:
    from composable.device.collectives.host import host_communicator
except ModuleNotFoundError:  # the folder may be left out: ranks of one host use sockets then, as ranks of several hosts do

    def host_communicator(  # type: ignore[misc]
        group: dist.ProcessGroup, device: torch.device, *, apart: bool = False
    ) -> None:
        return None


PAIRS_UP_TO: Final = 8  # ranks in a gloo group up to which pairs beat its collectives

_WRAPPERS: list[Callable[[Wire], Wire]] = []


@contextmanager
def wires_wrapped_by(wrapper: Callable[[Wire], Wire]) -> Iterator[None]:
    """Wires made in the body pass through `wrapper`: how tests delay, record or break collectives."""
    _WRAPPERS.append(wrapper)
    try:
        yield
    finally:
        _WRAPPERS.remove(wrapper)


def wire_of(group: dist.ProcessGroup | None, device: torch.device, *, apart: bool = False) -> Wire:
    """The wire for tensors on `device` among the ranks of `group` (None: this rank alone). All ranks call it together.

    Args:
        apart: collectives that have no tag of a unit's, too, are told apart from all others of the group. Backends tell them
            apart by their order only, so there it takes a communicator of the wire's own.
    """
    wire: Wire
    cpu = torch.device("cpu")

    def mine(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        return communicator_like(group, device) if apart else group

    if group is None or dist.get_world_size(group) == 1:
        wire = LocalWire()
    elif device.type not in ("cpu", "meta"):
        wire = StreamsWire(mine(group, device), device, streams_of(device))
    elif backend_of(group, cpu) == "gloo":
        pairs = PairsWire if dist.get_world_size(group) <= PAIRS_UP_TO else TensorsWire
        wire = host_communicator(group, cpu, apart=apart) or pairs(mine(group, cpu), cpu)
    else:
        wire = TensorsWire(mine(group, cpu), cpu)
    for wrapper in _WRAPPERS:
        wire = wrapper(wire)
    return wire
