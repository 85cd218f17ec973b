"""The collectives of ranks of one host: bytes through memory that both ends see, messages about them through pipes; no backend.

Note [Shared memory]
A message over the loopback device is copied into the kernel and out again, by threads that compete with the model for the
cores. Here the sender copies it into a block of shared memory and says which in a message; the receiver reads it at the first
use of the result, straight into its final place (gathers) or straight into the sum (reductions), and says that the block may
be filled again. Messages carry tags, so ranks that diverge still wait and time out by name.
Nothing that anybody computes with lives in shared memory, only messages: an optimizer may write to a shard while others read
the last message, and whatever a user's code writes to on one rank is that rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.base import GroupCommunicator
from composable.device.collectives.communicator import (
    FAILURES,
    Capabilities,
    GatherPart,
    PreparedGather,
    ReducePart,
    ScaledInput,
    Scratch,
    Work,
    raise_failed,
)
from composable.device.collectives.host.discovery import host_group_of
from composable.device.collectives.host.gathers import GatherPlan, offsets, plan_gather, view_of
from composable.device.collectives.host.host_group import HostGroup
from composable.device.collectives.host.pipes import Message
from composable.device.collectives.host.shared_memory import Block
from composable.device.collectives.tags import Steps, TagSequence
from composable.plan.scaling import may_scale_inputs

DIRECT_BYTES: Final = 32 << 10  # bytes in a shard from which copying it by itself pays; benchmarks/collectives.py

Fill = Callable[[Block], object]
# Of the messages of the peers, by rank; what it returns is the rest.
Receive = Callable[[dict[int, Message]], Work | None]


class _Transfer:
    """A message that this rank has shown, and those that it waits for from all others."""

    __slots__ = ("_block", "_host_group", "_keeps", "_label", "_messages", "_receive", "_rest", "_steps", "_tag")

    def __init__(
        self,
        host_group: HostGroup,
        block: Block,
        tag: int,
        label: str,
        receive: Receive,
        steps: Steps,
        *,
        in_step: bool,
        keeps: bool = False,
    ) -> None:
        self._rest: Work | None = None
        self._receive: Receive | None = None
        self._messages: dict[int, Message] = {}
        self._host_group = host_group
        self._block = block
        self._tag = tag
        self._label = label
        self._steps = steps
        self._receive = receive
        self._keeps = keeps  # what has come stays until all have come: a check may be made again after an interrupt
        host_group.send_block(block, tag, in_step=in_step)

    def progress(self) -> bool:
        if self._receive is not None:
            if not self._is_here():
                return False
            self._take(self._receive)
        return self._rest is None or self._rest.progress()

    def _is_here(self) -> bool:
        """Whether all peers have shown theirs."""
        try:
            for peer in self._host_group.peers:
                if peer not in self._messages:
                    message = self._host_group.poll(peer, self._tag)
                    if message is None:
                        return False
                    self._messages[peer] = message
        except FAILURES as error:
            raise_failed(self._label, self._host_group.names[self._host_group.rank], error)
        return True

    def wait(self) -> None:
        if self._receive is not None:
            self._take(self._receive)
        if self._rest is not None:
            self._rest.wait()

    def _take(self, receive: Receive) -> None:
        host_group, received = self._host_group, self._messages
        try:
            if self._keeps:
                for peer in host_group.peers:
                    host_group.receive(peer, self._tag, self._label, keep=True)
                # Before any is taken: an interrupt may lose one that has been taken, and nobody must wait for it again.
                self._note_met()
            for peer in host_group.peers:
                if peer not in received:
                    received[peer] = host_group.receive(peer, self._tag, self._label)
            self._note_met()
            with torch.no_grad():
                self._rest = receive(received)
            host_group.acknowledge(self._tag)
        except FAILURES as error:
            self.abort()
            raise_failed(self._label, host_group.names[host_group.rank], error)
        except BaseException:
            self.abort()
            raise
        self._receive = None  # first: a block that comes back is another message's
        self._block.received = True

    def _note_met(self) -> None:
        self._steps.meet(TagSequence.step_in(self._tag), self._host_group.number)

    def abort(self) -> None:
        if self._receive is not None:
            self._leave()
            self._receive = None
        elif self._rest is not None:
            self._rest.abort()

    def __del__(self) -> None:
        with suppress(AttributeError):  # interrupted before it was made
            self.abort()  # an interrupt left nobody who holds it

    def _leave(self) -> None:
        self._host_group.abort(self._block, self._tag, self._messages, self._steps)


class HostCommunicator(GroupCommunicator):
    """All ranks on one host. Make it with `host_communicator`, which finds out whether the ranks see each other's memory.

    Args:
        dedicated: all of its collectives are told from those of other communicators of the group, also the ones that have no
            unit's tag. Checks of ordinary ones have tags in common: ranks that have come to different units must meet in
            a check of their order.
    """

    capabilities = Capabilities(DIRECT_BYTES, reads_scaled_inputs=True, tells_of_leaving=True)

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, host_group: HostGroup, *, dedicated: bool = False
    ) -> None:
        super().__init__(group, device)
        self.host_group = host_group
        self.dedicated = dedicated
        self.presence = host_group.presence
        self._broadcasts: TagSequence | None = self.tags.open() if dedicated else None
        self._checks: TagSequence = self.tags.open() if dedicated else host_group.checks
        if self._broadcasts is not None:
            self.tags.counted += [self._broadcasts, self._checks]

    def release(self) -> None:
        self.host_group.outbox.release()

    # --- gathers ----------------------------------------------------------------------------------------------------

    def prepare(self, parts: Sequence[GatherPart]) -> PreparedGather:
        return plan_gather(parts, self.rank, self.size)

    def all_gather(self, prepared: PreparedGather, *, label: str, tags: TagSequence) -> Work:
        plan: GatherPlan = prepared

        def receive(messages: dict[int, Message]) -> None:
            plan.copy_from(messages, self.host_group.view)

        work = self._transfer(plan.nbytes, plan.fill, receive, label, tags, in_step=True)
        plan.copy_own()
        return work

    # --- reductions -------------------------------------------------------------------------------------------------

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        starts, stride = offsets([part.source for part in parts], [part.chunk for part in parts])
        me = self.rank

        def column(reader: int, owner: int) -> int:
            """A message has a column for every reader but its owner."""
            return (reader - (reader > owner)) * stride

        def fill(block: Block) -> None:
            for peer in self.host_group.peers:
                for part, start in zip(parts, starts, strict=True):
                    piece = part.source[peer * part.chunk : (peer + 1) * part.chunk]
                    if piece.numel():
                        place = view_of(block.memory, column(peer, me) + start, piece.numel(), piece.dtype)
                        _scale(piece, part.scale if part.early else 1.0, out=place)

        def receive(messages: dict[int, Message]) -> None:
            for part, start in zip(parts, starts, strict=True):
                numel = part.out.numel()
                own = part.source[me * part.chunk : me * part.chunk + numel]
                terms = {me: own}
                for peer, block in self._blocks(messages):
                    terms[peer] = view_of(block, column(me, peer) + start, numel, own.dtype)
                if self.size == 2 and part.early:
                    torch.add(terms[1 - me], own, alpha=part.scale, out=part.out)
                    continue
                if part.early:
                    terms[me] = own * part.scale
                add_up([terms[rank] for rank in range(self.size)], out=part.out)
                if not part.early and part.scale != 1.0:
                    part.out.mul_(part.scale)

        return self._transfer(stride * len(self.host_group.peers), fill, receive, label, tags, in_step=True)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        flat = tensor.detach().contiguous().view(-1)
        mine, factor = (scaled_input[0].detach().view(-1), scaled_input[1]) if scaled_input is not None else (flat, 1.0)
        # Adding a multiple rounds once where multiplying and adding rounds twice, so ranks would differ in what is not exact.
        at_once = self.size == 2 and (scaled_input is None or may_scale_inputs(str(flat.dtype).removeprefix("torch."), factor))
        # Each rank adds up one chunk and shows the sum; between two ranks it is as quick that both add up everything.
        chunk = flat.numel() if self.size == 2 else -(-flat.numel() // self.size)
        start = 0 if self.size == 2 else self.rank * chunk
        sums = flat[start : start + chunk]
        in_step, tags = tags is not None, tags or self.sums
        tag, next_tag = tags.next_tag(), tags.next_tag()

        def fill(block: Block) -> None:
            _scale(mine, factor, out=view_of(block.memory, 0, flat.numel(), flat.dtype))

        def receive(messages: dict[int, Message]) -> Work | None:
            own, first = mine[start : start + chunk], start * flat.element_size()
            terms = {peer: view_of(block, first, sums.numel(), flat.dtype) for peer, block in self._blocks(messages)}
            if at_once:
                torch.add(terms[1 - self.rank], own, alpha=factor, out=sums)
            else:
                terms[self.rank] = own if factor == 1.0 else torch.mul(own, factor, out=sums)
                add_up([terms[rank] for rank in range(self.size)], out=sums)
            if self.size > 2:
                return self._transfer(
                    chunk * flat.element_size(), fill_sum, receive_sums, label, tags, next_tag, in_step=in_step
                )
            put_in_place()
            return None

        def fill_sum(block: Block) -> None:
            view_of(block.memory, 0, sums.numel(), flat.dtype).copy_(sums)

        def receive_sums(messages: dict[int, Message]) -> None:
            for peer, block in self._blocks(messages):
                chunk_of_peer = flat[peer * chunk : (peer + 1) * chunk]
                chunk_of_peer.copy_(view_of(block, 0, chunk_of_peer.numel(), flat.dtype))
            put_in_place()

        def put_in_place() -> None:
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))

        return self._transfer(flat.numel() * flat.element_size(), fill, receive, label, tags, tag, in_step=in_step)

    def _blocks(self, messages: dict[int, Message]) -> list[tuple[int, Tensor]]:
        """What the peers show, as uint8."""
        return [(peer, self.host_group.view(peer, message)) for peer, message in messages.items()]

    # --- broadcasts -------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        if self._broadcasts is None or tensor.device.type != "cpu":
            super().broadcast(tensor, label=label)
            return
        flat = tensor.detach().contiguous().view(-1)

        def fill(block: Block) -> None:
            if self.rank == 0:
                view_of(block.memory, 0, flat.numel(), flat.dtype).copy_(flat)

        def receive(messages: dict[int, Message]) -> None:
            if self.rank:
                shown = view_of(self.host_group.view(0, messages[0]), 0, flat.numel(), flat.dtype)
                tensor.detach().copy_(shown.view(tensor.shape))

        nbytes = flat.numel() * flat.element_size() if self.rank == 0 else 0
        self._transfer(nbytes, fill, receive, label, self._broadcasts).wait()

    # --- checks -----------------------------------------------------------------------------------------------------

    def min_max(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> tuple[list[int], list[int]]:
        columns = list(zip(*self.all_gather_ints(values, label=label, tags=tags), strict=True))
        return [min(column) for column in columns], [max(column) for column in columns]

    def all_gather_ints(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> list[list[int]]:
        count = len(values)
        rows = [list(values)] * self.size

        def fill(block: Block) -> None:
            view_of(block.memory, 0, 1 + count, torch.int64).copy_(torch.tensor([count, *values], dtype=torch.int64))

        def receive(messages: dict[int, Message]) -> None:
            for peer, block in self._blocks(messages):
                said, *rows[peer] = view_of(block, 0, 1 + count, torch.int64).tolist()
                if said != count:
                    raise RuntimeError(
                        f"rank {self.names[peer]} takes part in another check, of {said} values and not of {count}"
                    )

        self._transfer(8 * (1 + count), fill, receive, label, tags or self._checks, keeps=True).wait()
        return rows

    # --- all of them ------------------------------------------------------------------------------------------------

    def _transfer(
        self,
        nbytes: int,
        fill: Fill,
        receive: Receive,
        label: str,
        tags: TagSequence,
        tag: int = 0,
        *,
        in_step: bool = False,
        keeps: bool = False,
    ) -> _Transfer:
        host_group = self.host_group
        tag = tag or tags.next_tag()
        try:
            block = host_group.outbox.take(max(1, nbytes))
            with torch.no_grad():
                fill(block)
            return _Transfer(host_group, block, tag, label, receive, tags.steps, in_step=in_step, keeps=keeps)
        except FAILURES as error:
            raise_failed(label, self.names[self.rank], error)


def _scale(tensor: Tensor, factor: float, *, out: Tensor) -> None:
    if factor == 1.0:
        out.copy_(tensor)
    else:
        torch.mul(tensor, factor, out=out)


def add_up(terms: Sequence[Tensor], *, out: Tensor) -> None:
    """The sum, in the order of ranks, so that every run rounds alike. `out` may be one of the terms."""
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)
        return
    total = torch.add(terms[0], terms[1])
    for scaled_input in terms[2:-1]:
        total.add_(scaled_input)
    torch.add(total, terms[-1], out=out)


def host_communicator(group: dist.ProcessGroup, device: torch.device, *, dedicated: bool = False) -> HostCommunicator | None:
    """For a group whose ranks all see each other's memory; None for any other. All ranks call it together."""
    host = host_group_of(group, device)
    return HostCommunicator(group, device, host, dedicated=dedicated) if host is not None else None
