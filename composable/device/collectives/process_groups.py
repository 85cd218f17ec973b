"""Process groups: which backend serves them, new ones made of them, and who lets go of them at their end; moves no tensor."""

from __future__ import annotations

from hashlib import sha256
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable.device.private_groups import drop_from_meshes, named_group, timeout_of, when_destroyed


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves tensors on `device`, e.g. "gloo"."""
    for entry in str(dist.get_backend_config(group)).split(","):
        kind, _, backend = entry.rpartition(":")
        if kind in ("", device.type):
            return backend
    return "undefined"


class _Watched:
    """A group that meshes keep until it is destroyed. What is left of it afterwards are threads, and one that drops its last
    tensor when the interpreter is already gone ends the process by `std::terminate`, after all work was done."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        when_destroyed(group, WeakMethod(self._end))

    def _end(self) -> None:
        group = self._group()
        if group is not None:
            drop_from_meshes(group)


_WATCHED: WeakKeyDictionary[dist.ProcessGroup, _Watched] = WeakKeyDictionary()


def let_go_when_destroyed(mesh: DeviceMesh) -> None:
    """No mesh keeps a group of this mesh's dimensions that this rank has destroyed."""
    for group in mesh.get_all_groups():
        if group not in _WATCHED:
            _WATCHED[group] = _Watched(group)


def reference_to(group: dist.ProcessGroup) -> ref[dist.ProcessGroup]:
    """What tells a group from any other, also when it is gone, and does not keep it."""
    reference = ref(group)
    hash(reference)  # of a group that is gone it could not be taken any more
    return reference


_SUBGROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


_UNIONS: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]] = WeakKeyDictionary()


def subgroup_of(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """The group of `size` consecutive ranks of `group` that this rank belongs to; made once."""
    made = _SUBGROUPS.setdefault(group, {})
    if size not in made:
        ranks = dist.get_process_group_ranks(group)
        start = dist.get_rank(group) // size * size
        made[size] = _new_group(ranks[start : start + size], group, device, "gathers of post-forward shards")
    return made[size]


def group_of_both(
    one: dist.ProcessGroup, other: dist.ProcessGroup, ranks: list[int], device: torch.device
) -> dist.ProcessGroup:
    """The group of all `ranks` of a mesh, whose two dimensions have these groups on this rank; made once, if it must be."""
    for group in (one, other, world_group()):
        if dist.get_world_size(group) == len(ranks):
            return group
    made = _UNIONS.setdefault(one, WeakKeyDictionary())
    if other not in made:
        made[other] = _new_group(sorted(ranks), one, device, "checks among all ranks of a mesh")
    return made[other]


def communicator_like(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of the same ranks, whose collectives cannot be taken for those of `group`."""
    return group if dist.get_world_size(group) == 1 else group_like(group, device, "sums of replicated modules")


def group_like(group: dist.ProcessGroup, device: torch.device, purpose: str) -> dist.ProcessGroup:
    """A new group of the same ranks."""
    return _new_group(dist.get_process_group_ranks(group), group, device, purpose)


def end_group(group: dist.ProcessGroup) -> None:
    """Destroy a group on this rank alone: those who wait for it there find that their connections are closed."""
    dist.destroy_process_group(group)


# How many groups were made here, by their ranks. Each was made by all of its ranks, so they agree on a name for the next one.
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = WeakKeyDictionary()


def _new_group(ranks: list[int], like: dist.ProcessGroup, device: torch.device, purpose: str) -> dist.ProcessGroup:
    """A group of `ranks`, made like `like`, whatever the other ranks do meanwhile.

    Args:
        purpose: what tools call it by.
    """
    counts = _MADE.setdefault(world_group(), {})
    number = counts.get(tuple(ranks), 0) + 1
    digest = sha256(repr(ranks).encode()).hexdigest()[:16]
    name, description = f"composable_{digest}_{number}", f"composable {purpose}"
    made = named_group(ranks, name, description, like=like, device=device)
    if made is None:
        made = dist.new_group(ranks, timeout_of(like, device), use_local_synchronization=True, group_desc=description)
    counts[tuple(ranks)] = number  # now: of one that was not made, ranks may not all know
    return made


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # callers asked is_distributed() first
    return group
