"""Which comm serves a process group and a device; groups that are made of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.backends import AcceleratorComm, GenericComm, LocalComm, PointToPointComm
from composable.comm.base import Comm, backend_of
from composable.comm.launch import Launch
from composable.comm.supplied import with_own_memory, with_symmetric_memory
from composable.errors import CommunicationError, RanksDisagreeError, first_line
from composable.memory.streams import has_streams, streams_of
from composable.torch_private import timeout_of

# ranks in a gloo group up to which point-to-point messages are faster than its collectives
PAIRS_UP_TO: Final = 8
# "1" in the environment of all ranks, see `AcceleratorComm`
REDUCTIONS_VARIABLE: Final = "COMPOSABLE_SEPARATE_REDUCTIONS"
# "1" in the environment of all ranks, see supplied.py
SYMMETRIC_VARIABLE: Final = "COMPOSABLE_SYMMETRIC_MEMORY"

_CPU: Final = torch.device("cpu")
_COMMS: Final[WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.device, bool], Comm]]] = (
    WeakKeyDictionary()
)
_WRAPPERS: Final[list[Callable[[Comm], Comm]]] = []
_local_comm: Final = cache(LocalComm)


def comm_of(
    group: dist.ProcessGroup | None, device: torch.device, *, symmetric: bool = False
) -> Comm:
    """The comm for tensors on `device` among the ranks of `group` (None: this rank alone); the same
    one at every call.

    Args:
        symmetric: its messages are in symmetric memory.
    """
    comm: Comm
    device = device if has_streams(device) else _CPU
    if group is None or dist.get_world_size(group) == 1:
        comm = _local_comm(device)
    else:
        made = _COMMS.setdefault(group, {})
        if (device, symmetric) not in made:
            fresh = _make_comm(group, device)
            made[device, symmetric] = with_symmetric_memory(fresh) if symmetric else fresh
        comm = made[device, symmetric]
    for wrapper in _WRAPPERS:
        comm = wrapper(comm)
    return comm


def comm_of_messages(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """The comm that gathers and reduces for a unit: as the environment says, in symmetric memory.

    Raises:
        MeshError: the group's backend has none.
    """
    return comm_of(group, device, symmetric=os.environ.get(SYMMETRIC_VARIABLE) == "1")


def _make_comm(group: dist.ProcessGroup, device: torch.device) -> Comm:
    if has_streams(device):
        apart = os.environ.get(REDUCTIONS_VARIABLE) == "1"
        ranks = dist.get_process_group_ranks(group)
        return AcceleratorComm(
            group,
            device,
            streams_of(device),
            _group_of(ranks, group, device, "reduce-scatters") if apart else None,
        )
    if backend_of(group, device) == "gloo" and dist.get_world_size(group) <= PAIRS_UP_TO:
        return PointToPointComm(group, device)
    return GenericComm(group, device)


@contextmanager
def comms_wrapped_by(wrapper: Callable[[Comm], Comm]) -> Iterator[None]:
    """Let comms that are asked for in the body pass through `wrapper`: how users send in their own
    way, and tests record, delay or break collectives.

    A comm that defines `allocate(size, *, dtype, device)`, as FSDP2's `AllGather` does, supplies
    the memory of its messages; see supplied.py.
    """

    # One wrapped comm for each comm, as units that share a group share a comm.
    cached: Callable[[Comm], Comm] = cache(lambda comm: with_own_memory(wrapper(comm)))  # type: ignore[assignment]
    _WRAPPERS.append(cached)
    try:
        yield
    finally:
        _WRAPPERS.remove(cached)


def reduce_numbers(
    numbers: Tensor, group: dist.ProcessGroup, *, largest: bool, text: str
) -> Tensor:
    """The sum, or the largest, of all ranks' `numbers` (1-D, a few), one by one. NaN on one rank is
    NaN on all.

    Args:
        text: of the launch.
    """
    comm, launch = comm_of(group, numbers.device), Launch(text)
    if not largest:
        found = numbers.clone()
        comm.all_reduce([found], launch).wait()
        return found
    # Gathered, because backends differ in which one of NaN and a number is the larger.
    every = numbers.new_empty(comm.size * numbers.numel())
    comm.all_gather([(every, numbers.contiguous())], launch).wait()
    return every.view(comm.size, -1).amax(0)


def notification_sum(mine: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The sum over all ranks of one number, as torch's `Join` makes it; other ranks may be inside
    of `Join` itself.
    """
    number = torch.full((1,), mine, device=device)  # of this shape and dtype
    try:
        dist.all_reduce(number, group=group)
    except RanksDisagreeError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()}: the exchange of which ranks have data failed:"
            f" {first_line(error)}\nAnother rank raised or ended inside of a join scope; look for"
            " the first error among all ranks."
        ) from error
    return number.item()


# --- groups -------------------------------------------------------------------------------------

# By the group that they are made of, their ranks and their purpose. Weak: torch keeps groups until
# they are destroyed.
_Made = WeakValueDictionary[tuple[object, ...], dist.ProcessGroup]
_GROUPS: Final[WeakKeyDictionary[dist.ProcessGroup, _Made]] = WeakKeyDictionary()


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "callers ask is_distributed() first"
    return group


def ranks_of(comm: Comm) -> list[int]:
    """The global ranks of a comm, in the order of its own."""
    if comm.group is None:
        return [dist.get_rank() if is_distributed() else 0]
    return dist.get_process_group_ranks(comm.group)


def subgroup_of(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """The group of `size` consecutive ranks of `group` that this rank belongs to. All ranks of
    `group` call it.
    """
    ranks = dist.get_process_group_ranks(group)
    start = dist.get_rank(group) // size * size
    return _group_of(
        ranks[start : start + size], group, device, "all-gathers of post-forward shards"
    )


def group_of_all(
    groups: Sequence[dist.ProcessGroup], ranks: list[int], device: torch.device
) -> dist.ProcessGroup:
    """The group of all `ranks` of a mesh, whose dimensions have `groups` on this rank."""
    for group in (*groups, world_group()):
        if dist.get_world_size(group) == len(ranks):
            return group
    return _group_of(sorted(ranks), groups[0], device, "all ranks of a mesh")


def _group_of(
    ranks: list[int], like: dist.ProcessGroup, device: torch.device, purpose: str
) -> dist.ProcessGroup:
    """A group of `ranks` with the backends and the timeout of `like`, made once. All of `ranks`
    call it, and no others.

    torch names such a group by its ranks and by how many groups this process knows: that must be
    the same on all `ranks`.
    """
    made = _GROUPS.setdefault(like, WeakValueDictionary())
    key = (purpose, *ranks)
    found = made.get(key)
    if found is None:
        default = world_group()
        # Where the default group is bound to a device, torch would split the new communicator off
        # it, and all ranks of the default group have to take part in that.
        bound, default.bound_device_id = default.bound_device_id, None
        try:
            found = made[key] = dist.new_group(
                ranks,
                timeout_of(like, device),
                str(dist.get_backend_config(like)),
                use_local_synchronization=True,
                group_desc=f"composable: {purpose}",
            )
        finally:
            default.bound_device_id = bound
    return found
