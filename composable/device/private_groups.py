"""torch's private parts of process groups, each with its reason and its fallback; knows nothing of this project.

Checked with torch 2.11.0, 2.13.0 (CPU build) and 2.15.0, and read in the sources of 2.12.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long the group's collectives wait; None where this torch does not tell. There is no public way to ask."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def _options_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A copy of what the group's backend was told besides its timeout; None where there is nothing, or no copy of it."""
    with suppress(AttributeError, RuntimeError, TypeError):  # of what cannot be copied, the new group would change the original
        options: Any = copy.deepcopy(group._get_backend(device).options)
        if hasattr(options, "split_from"):
            options.split_from = None  # nobody else than the new group's ranks take part
        return options
    return None


def named_group(
    ranks: list[int], name: str, description: str, *, like: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup | None:
    """A new group of `ranks`, this one among them, with the backends, options and timeout of another one. All of them call it.
    None where this torch, or a default group written in Python that makes others itself, has no such way.

    `dist.new_group` is not enough. It names a group by how many groups the process knows: ranks that were in different ones
    before would look for each other under different names. And where the default group is bound to a device, as
    `init_process_group(device_id=...)` does it, it splits the new communicator off the default one, which all ranks of that
    have to take part in; a split off `like`, `dist.split_group`, names groups in the same way.
    """
    c10d, default = dist.distributed_c10d, dist.group.WORLD
    assert default is not None
    known, (_, store) = c10d._world.pg_map, c10d._world.pg_map[default]
    backend, _ = known.get(like) or known[default]
    backend = dist.Backend(backend)
    timeout = timeout_of(like, device) or c10d._get_default_timeout(backend)
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None or hasattr(default, "new_group"):
        return None
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        made: dist.ProcessGroup
        made, _ = make(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            backend,
            store,
            name,
            backend_options=_options_of(like, device),
            timeout=timeout,
            group_desc=description,
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def when_destroyed(group: dist.ProcessGroup, method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method, if its object still lives, when this rank destroys `group`. torch tells nobody.

    What its registry alone holds of a group, a view of the store, goes with the entry. Meshes hold the group itself; it is
    watched where the registry looks otherwise, and then nothing happens until they have let go of it.
    """

    def call() -> None:
        found = method()
        if found is not None:
            found()

    watched: Any = group
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        _, watched = dist.distributed_c10d._world.pg_map[group]
    weakref.finalize(watched, call).atexit = False


def drop_from_meshes(group: dist.ProcessGroup) -> None:
    """Have all meshes let go of a group. They keep those of their dimensions, which compiled functions look up there, also when
    these are destroyed, and have no public way to end that. Nobody knows all of them: copies of a `DTensor` have their own."""
    for mesh in [each for each in gc.get_objects() if issubclass(type(each), DeviceMesh)]:
        registry = getattr(mesh, "_pg_registry", {})
        for name in [name for name, kept in registry.items() if kept is group]:
            del registry[name]


def _store_of(group: dist.ProcessGroup) -> Any:
    """What the ranks of `group` found each other through: the one place that a rank reaches by itself. Nothing public gives it;
    without it, nothing is written and nothing found."""
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        _, store = dist.distributed_c10d._world.pg_map[group]
        return store
    return None


def write_to_store(group: dist.ProcessGroup, place: str, text: str) -> None:
    store = _store_of(group)
    if store is not None:
        with suppress(RuntimeError):  # a store may be gone before its group
            store.set(place, text)


def read_from_store(group: dist.ProcessGroup, place: str) -> str:
    store = _store_of(group)
    if store is not None:
        with suppress(RuntimeError):
            return store.get(place).decode() if store.check([place]) else ""
    return ""


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a group launches one kind of collective: methods of its own by name, and their options.

    `getattr(group, single)(output, input, options)` returns a work, or None if there is nothing to wait for; `coalesced` takes
    lists of outputs and inputs, and launches all at once. Complex tensors go in as `as_real` makes them.
    """

    single: str
    coalesced: str
    options: Any


def launchers(group: dist.ProcessGroup, *, asynchronous: bool) -> tuple[Launcher, Launcher, Launcher]:
    """The group's own all-gather, reduce-scatter and averaging reduce-scatter of tensors.

    torch's own functions end in these, after checks that are the same at every call: 9 us of Python. Several in one launch it
    offers by a context only, which leaves the group in it when an interrupt ends its body: what comes later is put on a list
    that nobody launches, without a word.
    """
    gather_options, sum_options, mean_options = AllgatherOptions(), ReduceScatterOptions(), ReduceScatterOptions()
    gather_options.asyncOp = sum_options.asyncOp = mean_options.asyncOp = asynchronous
    mean_options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    if hasattr(group, "all_gather_single"):  # in torch 2.13
        gather = ("all_gather_single", "all_gather_single_coalesced")
        scatter = ("reduce_scatter_single", "reduce_scatter_single_coalesced")
    else:
        gather = ("_allgather_base", "allgather_into_tensor_coalesced")
        scatter = ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
    return Launcher(*gather, gather_options), Launcher(*scatter, sum_options), Launcher(*scatter, mean_options)


def sum_launcher(group: dist.ProcessGroup) -> tuple[str, Any]:
    """The group's own all-reduce of a list of one tensor: a method by name, and its options; not asynchronous."""
    options = AllreduceOptions()
    options.asyncOp = False
    return "allreduce", options


def cannot_coalesce(error: RuntimeError) -> bool:
    """Whether a backend says by it that it has no launch of several collectives at once, and has launched none."""
    return "does not support" in str(error) or "No backend type associated" in str(error)
