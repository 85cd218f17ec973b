"""Which communicator serves a group and a device, and what tests put around it; moves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from composable.device.collectives.accelerator import AcceleratorCommunicator
from composable.device.collectives.communicator import Communicator
from composable.device.collectives.generic import GenericCommunicator
from composable.device.collectives.local import LocalCommunicator
from composable.device.collectives.point_to_point import PointToPointCommunicator
from composable.device.collectives.process_groups import backend_of, communicator_like, group_like, reference_to
from composable.device.private import end_backwards_where_they_are_called
from composable.device.streams import streams_of

try:
    from composable.device.collectives.host import host_communicator
except ModuleNotFoundError:  # the folder may be left out: ranks of one host use sockets then, as ranks of several hosts do

    def host_communicator(  # type: ignore[misc]
        group: dist.ProcessGroup, device: torch.device, *, dedicated: bool = False
    ) -> None:
        return None


# Not a set of weak references, whose callbacks remove from it while it is copied.
_MADE: Final[WeakKeyDictionary[Communicator, None]] = WeakKeyDictionary()

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
            apart by their order only, so there it takes a process group of its own; on an accelerator one for all of these.
    """
    communicator: Communicator
    cpu = torch.device("cpu")

    def mine(group: dist.ProcessGroup) -> dist.ProcessGroup:
        return communicator_like(group, cpu) if dedicated else group

    if device.type not in ("cpu", "meta"):
        end_backwards_where_they_are_called()
    if group is None or dist.get_world_size(group) == 1:
        communicator = LocalCommunicator(device)
    elif device.type not in ("cpu", "meta"):
        communicator = of_accelerator(group, device, dedicated=dedicated)
    elif backend_of(group, cpu) == "gloo":
        pairs = PointToPointCommunicator if dist.get_world_size(group) <= PAIRS_UP_TO else GenericCommunicator
        communicator = host_communicator(group, cpu, dedicated=dedicated) or pairs(mine(group), cpu)
    else:
        communicator = GenericCommunicator(mine(group), cpu)
    _MADE[communicator] = None
    for wrapper in _WRAPPERS:
        communicator = wrapper(communicator)
    return communicator


def release_messages() -> None:
    """Let all communicators return memory that is kept for messages to come."""
    for reference in _MADE.keyrefs():
        communicator = reference()
        if communicator is not None:
            with suppress(EOFError):  # its group was destroyed, and gave all back
                communicator.release()


_DEDICATED: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Communicator]] = WeakKeyDictionary()


def of_accelerator(group: dist.ProcessGroup, device: torch.device, *, dedicated: bool) -> Communicator:
    """What is dedicated is one for all: each costs hundreds of MiB, and two in use at a time may wait for each other."""
    streams = streams_of(device)
    if not dedicated:
        communicator = AcceleratorCommunicator(group, device, streams)
        communicator.reductions = _reductions_of(communicator, group, device)
        return communicator
    made = _DEDICATED.setdefault(group, {})
    if device not in made:
        made[device] = AcceleratorCommunicator(communicator_like(group, device), device, streams)
        # Backends connect at the first collective. All ranks come to this one; later, some may be waiting in others.
        made[device].min_max([0], label="first collective of a new communicator")
    return made[device]


REDUCTIONS_VARIABLE: Final = "COMPOSABLE_SEPARATE_REDUCTIONS"  # "1" in the environment of all ranks of a group
_REDUCTIONS: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, ref[dist.ProcessGroup]]] = WeakKeyDictionary()


def _reductions_of(
    communicator: AcceleratorCommunicator, group: dist.ProcessGroup, device: torch.device
) -> ref[dist.ProcessGroup]:
    """What reduce-scatters go over: the group itself, or one more, if all ranks want that."""
    made = _REDUCTIONS.setdefault(group, {})
    if device not in made:
        wanted = int(os.environ.get(REDUCTIONS_VARIABLE) == "1")
        (everybody,), _ = communicator.min_max([wanted], label=f"comparison of {REDUCTIONS_VARIABLE}")
        made[device] = reference_to(group_like(group, device, "reduce-scatters") if everybody else group)
    return made[device]
