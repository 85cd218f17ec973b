"""Finds out whether all ranks of a process group see each other's memory, and connects them; sends nothing afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable.device.collectives.base import GroupCommunicator
from composable.device.collectives.host.host_group import HostGroup
from composable.device.collectives.host.pipes import PipeReader, PipeWriter, Process
from composable.device.collectives.host.presence import Connection
from composable.device.collectives.host.shared_memory import UNKNOWN_HOST, Arena, Identity, Window

T = TypeVar("T")

ENABLE_VARIABLE: Final = "COMPOSABLE_SHARED_MEMORY"  # "0" in the environment of any rank: all of them use sockets
_LABEL: Final = "exchange of how ranks reach each other"

_FOUND: WeakKeyDictionary[dist.ProcessGroup, HostGroup | None] = WeakKeyDictionary()


def host_group_of(group: dist.ProcessGroup, device: torch.device) -> HostGroup | None:
    """The host group of a process group, None if its ranks do not all see each other's memory. All ranks call it together."""
    if group not in _FOUND:
        _FOUND[group] = _discover(GroupCommunicator(group, device))
    return _FOUND[group]


def _discover(communicator: GroupCommunicator) -> HostGroup | None:
    """None on every rank if any rank cannot look at any other.

    Whatever a rank lacks (memory, descriptors, /proc), it goes on to the votes: the others wait for it there.
    """
    arena = _made(Arena) if os.environ.get(ENABLE_VARIABLE, "1") != "0" else None
    # Numbers of hosts are not negative; a rank that cannot, or may not, has a number that nobody else has.
    host = arena.identity.host if arena is not None and arena.identity.host != UNKNOWN_HOST else -2 - communicator.rank
    # First what costs the same for any number of ranks: most large groups are on several hosts.
    lowest, highest = communicator.min_max([host], label=_LABEL)
    if lowest != highest or arena is None:
        return None
    readers = {
        rank: _made(partial(PipeReader, f"rank {communicator.names[rank]}"))
        for rank in range(communicator.size)
        if rank != communicator.rank
    }
    pipes = [reader.descriptor if (reader := readers.get(rank)) is not None else -1 for rank in range(communicator.size)]
    rows = communicator.all_gather_ints([*astuple(arena.identity), *pipes], label=_LABEL)
    connections: dict[int, Connection] = {}
    for rank, reader in readers.items():
        if reader is not None:
            found = _made(partial(_connect, Identity(*rows[rank][:4]), rows[rank][4 + communicator.rank], reader))
            if found is not None:
                connections[rank] = found
    if communicator.min_max([len(connections)], label=_LABEL)[0] != [communicator.size - 1]:
        return None
    for rank, connection in connections.items():
        connection.reader.connected(Process(rows[rank][1]))
    return HostGroup(communicator, arena, connections)


def _made(make: Callable[[], T]) -> T | None:
    """What `make` returns, None where the system does not let it."""
    try:
        return make()
    except OSError:
        return None


def _connect(identity: Identity, pipe: int, reader: PipeReader) -> Connection:
    return Connection(identity.process, Window(identity), reader, PipeWriter(identity.process, pipe, reader.writer))
