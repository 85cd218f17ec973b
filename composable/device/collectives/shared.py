"""Ranks of one host: bytes go through memory that both ends see, and word of them through pipes; calls no backend.

Note [Shared memory]
A message over the loopback device is copied into the kernel and out again, by threads that compete with the model for the
cores. Here the sender copies it into a block of shared memory and says which in a word; the receiver reads it at the first
use of the result, straight into its final place (gathers) or straight into the sum (reductions), and says that the block may
be filled again. Words carry tags like all messages, so ranks that diverge still wait and time out by name.
Nothing that a user can reach lives in shared memory: an optimizer may write to a shard while others read the last message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.group import GroupWire
from composable.device.collectives.numbers import reduce_numbers
from composable.device.collectives.wire import Arrival, Channel, GatherPart, ReducePart, Scratch, failed
from composable.device.private import timeout_of
from composable.device.shared_memory import Block, Identity, Outbox, Window, my_identity
from composable.device.words import Inbox, Outlet, Word

DIRECT_BYTES: Final = 64 << 10  # bytes in a shard from which copying it by itself pays
SWITCH: Final = "COMPOSABLE_SHARED_MEMORY"  # "0" in the environment of any rank: all of them use sockets
_ALIGN: Final = 64
_LABEL: Final = "exchange of where each rank's shared memory is"
_FAILURES: Final = (RuntimeError, OSError, EOFError)
_DONE: Final = 1  # added to a message's tag: word that it has been read


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another rank of the group on this host."""

    window: Window
    inbox: Inbox
    outlet: Outlet


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What lives as long as a process group: the other ranks, by rank, and the blocks that this one shows.

    A block comes back when its readers say so, through pipes of that group; with the group, both are gone.
    """

    neighbours: dict[int, Neighbour]
    outbox: Outbox


Fill = Callable[[Block], None]
Receive = Callable[[dict[int, Tensor]], None]  # what the peers show, by rank, as uint8


def _offsets(tensors: Sequence[Tensor], numels: Sequence[int]) -> tuple[list[int], int]:
    """Where each of several pieces starts in one message, and the message's size, in bytes."""
    starts, end = [], 0
    for tensor, numel in zip(tensors, numels, strict=True):
        starts.append(end)
        end += -(-numel * tensor.element_size() // _ALIGN) * _ALIGN
    return starts, end


def _piece(memory: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return memory[start : start + numel * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class _GatherPlan:
    """One all-gather, prepared: what this rank shows, and what it copies from whom."""

    nbytes: int
    shards: list[Tensor]
    starts: list[int]
    own: tuple[list[Tensor], list[Tensor]]  # targets, sources
    wanted: dict[int, list[tuple[Tensor, int]]]  # by peer: target, where it starts in the peer's message
    shown: dict[int, list[Tensor]] = field(default_factory=dict)  # by address of a block: where the shards go
    seen: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by peer and address: where targets come from


class _Handover:
    """A message that this rank has shown, and those that it waits for from all others."""

    __slots__ = ("_block", "_label", "_receive", "_tag", "_wire")

    def __init__(
        self, wire: SharedWire, block: Block, tag: int, label: str, receive: Callable[[dict[int, Tensor]], None]
    ) -> None:
        self._wire = wire
        self._block = block
        self._tag = tag
        self._label = label
        self._receive: Receive | None = receive
        wire.show(block, tag)

    def wait(self) -> None:
        if self._receive is None:
            return
        receive, self._receive = self._receive, None
        wire = self._wire
        try:
            messages = wire.look(self._tag)
            with torch.no_grad():
                receive(messages)
            wire.say_done(self._tag)
        except _FAILURES as error:
            wire.outbox.lost(self._block)
            raise failed(self._label, wire.rank, error) from error
        self._block.settled = True


class _Thanks:
    """The words of peers that they have read a message; those who have yet to say so are `left`."""

    __slots__ = ("_left", "_tag", "_wire")

    def __init__(self, wire: SharedWire, tag: int, left: list[int]) -> None:
        self._wire = wire
        self._tag = tag
        self._left = left

    def finished(self) -> bool:
        while self._left and self._wire.has_heard(self._left[-1], self._tag):
            self._left.pop()
        return not self._left

    def wait(self) -> None:
        while self._left:
            self._wire.hear(self._left[-1], self._tag)
            self._left.pop()


class SharedWire(GroupWire):
    """All ranks on one host. Make it with `shared_wire`, which finds out whether the ranks see each other's memory."""

    even_only = False
    direct_bytes = DIRECT_BYTES

    def __init__(self, group: dist.ProcessGroup, device: torch.device, neighbourhood: Neighbourhood) -> None:
        super().__init__(group, device)
        self._neighbours = neighbourhood.neighbours
        self.outbox = neighbourhood.outbox
        self._peers = tuple((self.rank + step) % self.ways for step in range(1, self.ways))
        self._channel: Channel = self.open_channel()  # for what has no unit's tag

    # --- words ------------------------------------------------------------------------------------------------------

    def show(self, block: Block, tag: int) -> None:
        """Tell everybody that `block` is filled."""
        for peer in self._peers:
            self._neighbours[peer].outlet.say(tag, block.descriptor, block.nbytes)
        self.outbox.lend(block, _Thanks(self, tag + _DONE, [*self._peers]))

    def look(self, tag: int) -> dict[int, Tensor]:
        """The peers' messages, by peer, when they are there."""
        return {peer: self._neighbours[peer].window.look(*self.hear(peer, tag)) for peer in self._peers}

    def say_done(self, tag: int) -> None:
        """Tell everybody that their message has been read."""
        for peer in self._peers:
            with suppress(BrokenPipeError):  # who has ended does not need its block any more
                self._neighbours[peer].outlet.say(tag + _DONE)

    def has_heard(self, peer: int, tag: int) -> bool:
        return self._neighbours[peer].inbox.next(tag) is not None

    def hear(self, peer: int, tag: int) -> Word:
        inbox = self._neighbours[peer].inbox
        return inbox.next(tag) or inbox.wait(tag, timeout_of(self.group, self.device))

    # --- collectives ------------------------------------------------------------------------------------------------

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        chunks = [part.shard.numel() for part in parts]
        starts, nbytes = _offsets([part.shard for part in parts], chunks)
        own: tuple[list[Tensor], list[Tensor]] = ([], [])
        wanted: dict[int, list[tuple[Tensor, int]]] = {peer: [] for peer in self._peers}
        for part, chunk, start in zip(parts, chunks, starts, strict=True):
            for rank in range(self.ways):
                place = part.whole[rank * chunk : min((rank + 1) * chunk, part.numel)]
                if not place.numel():
                    continue
                if rank == self.rank:
                    own[0].append(place)
                    own[1].append(part.shard[: place.numel()])
                else:
                    wanted[rank].append((place, start))
        return _GatherPlan(nbytes, [part.shard for part in parts], starts, own, wanted)

    def all_gather(self, prepared: Any, *, label: str, tag: int) -> Arrival:
        plan: _GatherPlan = prepared

        def receive(messages: dict[int, Tensor]) -> None:
            for peer, message in messages.items():
                key = peer, message.data_ptr()
                if key not in plan.seen:
                    plan.seen[key] = [_piece(message, at, place.numel(), place.dtype) for place, at in plan.wanted[peer]]
                if plan.seen[key]:
                    torch._foreach_copy_([place for place, _ in plan.wanted[peer]], plan.seen[key])

        def fill(block: Block) -> None:
            key = block.memory.data_ptr()
            if key not in plan.shown:
                plan.shown[key] = [
                    _piece(block.memory, start, shard.numel(), shard.dtype)
                    for shard, start in zip(plan.shards, plan.starts, strict=True)
                ]
            torch._foreach_copy_(plan.shown[key], plan.shards)

        arrival = self._hand_over(plan.nbytes, fill, receive, label, tag)
        if plan.own[0]:
            torch._foreach_copy_(*plan.own)
        return arrival

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tag: int) -> Arrival:
        starts, stride = _offsets([part.source for part in parts], [part.chunk for part in parts])
        me = self.rank

        def column(reader: int, owner: int) -> int:
            """A message has a column for every reader but its owner."""
            return (reader - (reader > owner)) * stride

        def fill(block: Block) -> None:
            for peer in self._peers:
                for part, start in zip(parts, starts, strict=True):
                    piece = part.source[peer * part.chunk : (peer + 1) * part.chunk]
                    if piece.numel():
                        place = _piece(block.memory, column(peer, me) + start, piece.numel(), piece.dtype)
                        if _exact(part.scale):
                            torch.mul(piece, part.scale, out=place)
                        else:
                            place.copy_(piece)

        def receive(messages: dict[int, Tensor]) -> None:
            for part, start in zip(parts, starts, strict=True):
                numel = part.out.numel()
                own = part.source[me * part.chunk : me * part.chunk + numel]
                terms = {me: own}
                for peer, message in messages.items():
                    terms[peer] = _piece(message, column(me, peer) + start, numel, own.dtype)
                if self.ways == 2 and _exact(part.scale):
                    torch.add(terms[1 - me], own, alpha=part.scale, out=part.out)
                    continue
                if _exact(part.scale):
                    terms[me] = own * part.scale
                add_up([terms[rank] for rank in range(self.ways)], out=part.out)
                if not _exact(part.scale):
                    part.out.mul_(part.scale)

        return self._hand_over(stride * len(self._peers), fill, receive, label, tag)

    def all_reduce(self, tensor: Tensor, *, label: str) -> Arrival:
        flat = tensor.detach().contiguous().view(-1)
        # Each rank adds up one chunk and shows the sum; between two ranks it is as quick that both add up everything.
        chunk = flat.numel() if self.ways == 2 else -(-flat.numel() // self.ways)
        chunks = [flat] * 2 if self.ways == 2 else [flat[rank * chunk : (rank + 1) * chunk] for rank in range(self.ways)]
        mine = chunks[self.rank]
        start = 0 if self.ways == 2 else self.rank * chunk * flat.element_size()
        tags = self._channel.next_tag(), self._channel.next_tag()

        def fill(block: Block) -> None:
            _piece(block.memory, 0, flat.numel(), flat.dtype).copy_(flat)

        def receive(messages: dict[int, Tensor]) -> None:
            terms = {peer: _piece(message, start, mine.numel(), flat.dtype) for peer, message in messages.items()}
            terms[self.rank] = mine
            add_up([terms[rank] for rank in range(self.ways)], out=mine)
            if self.ways > 2:
                self._hand_over(chunk * flat.element_size(), fill_sum, receive_sums, label, tags[1]).wait()
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))

        def fill_sum(block: Block) -> None:
            _piece(block.memory, 0, mine.numel(), flat.dtype).copy_(mine)

        def receive_sums(messages: dict[int, Tensor]) -> None:
            for peer, message in messages.items():
                chunks[peer].copy_(_piece(message, 0, chunks[peer].numel(), flat.dtype))

        return self._hand_over(flat.numel() * flat.element_size(), fill, receive, label, tags[0])

    def _hand_over(
        self,
        nbytes: int,
        fill: Fill,
        receive: Receive,
        label: str,
        tag: int,
    ) -> Arrival:
        try:
            block = self.outbox.take(nbytes)
            with torch.no_grad():
                fill(block)
            return _Handover(self, block, tag, label, receive)
        except _FAILURES as error:
            raise failed(label, self.rank, error) from error


def _exact(scale: float) -> bool:
    """Whether multiplying by `scale` before the sum rounds as multiplying after it does: for powers of two."""
    return math.frexp(scale)[0] == 0.5


def add_up(terms: Sequence[Tensor], *, out: Tensor) -> None:
    """The sum, in the order of ranks, so that every run rounds alike. `out` may be one of the terms."""
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)
        return
    total = torch.add(terms[0], terms[1])
    for term in terms[2:-1]:
        total.add_(term)
    torch.add(total, terms[-1], out=out)


# --- who sees whose memory --------------------------------------------------------------------------------------------

_NEIGHBOURHOODS: WeakKeyDictionary[dist.ProcessGroup, Neighbourhood | None] = WeakKeyDictionary()


def shared_wire(group: dist.ProcessGroup, device: torch.device) -> SharedWire | None:
    """The wire for a group whose ranks all see each other's memory, None for any other. All ranks call it together."""
    if group not in _NEIGHBOURHOODS:
        _NEIGHBOURHOODS[group] = _look_around(GroupWire(group, device))
    neighbourhood = _NEIGHBOURHOODS[group]
    return SharedWire(group, device, neighbourhood) if neighbourhood is not None else None


def _look_around(wire: GroupWire) -> Neighbourhood | None:
    """The ranks' memory; None on every rank if any rank cannot look at any other."""
    mine = my_identity() if os.environ.get(SWITCH, "1") != "0" else None
    host = float(mine.host if mine is not None else -1)
    # First what costs the same for any number of ranks: most large groups are no neighbourhoods.
    highest, lowest = reduce_numbers(torch.tensor([host, -host], dtype=torch.float64), wire.group, largest=True, label=_LABEL)
    if mine is None or highest != host or -lowest != host:
        return None
    inboxes = {rank: Inbox(f"rank {rank}") for rank in range(wire.ways) if rank != wire.rank}
    doors = [inboxes[rank].descriptor if rank in inboxes else -1 for rank in range(wire.ways)]
    rows = wire.exchange([*astuple(mine), *doors], label=_LABEL)
    met = {rank: _meet(Identity(*rows[rank][:4]), rows[rank][4 + wire.rank], inbox) for rank, inbox in inboxes.items()}
    neighbours = {rank: neighbour for rank, neighbour in met.items() if neighbour is not None}
    if not all(found for (found,) in wire.exchange([int(len(neighbours) == len(met))], label=_LABEL)):
        return None
    for inbox in inboxes.values():
        inbox.seal()
    return Neighbourhood(neighbours, Outbox())


def _meet(identity: Identity, door: int, inbox: Inbox) -> Neighbour | None:
    window = Window(identity.process)
    if not identity.visible(window):
        return None
    try:
        return Neighbour(window, inbox, Outlet(identity.process, door, inbox.writer))
    except OSError:
        return None
