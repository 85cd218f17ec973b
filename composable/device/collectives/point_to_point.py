"""gloo between hosts: every pair of ranks exchanges exactly the bytes that it must; knows no other backend.

gloo's tensor collectives clone, reduce everything everywhere and copy in `wait()`; pairs move each byte once, straight from
the shard into its final place, while the caller computes. In large groups the number of pairs per rank grows, so there
gloo's own collectives take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.base import GroupCommunicator
from composable.device.collectives.communicator import (
    Capabilities,
    CompositeWork,
    GatherPart,
    PreparedGather,
    ReducePart,
    ScaledInput,
    Scratch,
    Work,
    put_scaled_input,
    raise_failed,
    scale_sums,
)
from composable.device.collectives.tags import TagSequence
from composable.plan.routes import DIRECT_BYTES_OF_SOCKETS


class PointToPointCommunicator(GroupCommunicator):
    """gloo: every pair of ranks exchanges exactly the bytes that it must, straight between shard and unsharded buffer."""

    capabilities = Capabilities(DIRECT_BYTES_OF_SOCKETS, ordered=True)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Each rank starts with its right neighbour, so that nobody is everybody's first.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))

    def prepare(self, parts: Sequence[GatherPart]) -> PreparedGather:
        receives: list[tuple[list[Tensor], int, int]] = []
        sends: list[tuple[list[Tensor], int, int]] = []
        copies: tuple[list[Tensor], list[Tensor]] = ([], [])  # targets, sources
        for index, part in enumerate(parts):
            chunk = part.shard.numel()
            pieces = [part.whole[r * chunk : min((r + 1) * chunk, part.numel)] for r in range(self.size)]
            mine = part.shard[: pieces[self.rank].numel()]
            if mine.numel():
                copies[0].append(pieces[self.rank])
                copies[1].append(mine)
            for peer in self._peers:
                if pieces[peer].numel():
                    receives.append(([pieces[peer]], peer, index))
                if mine.numel():
                    sends.append(([mine], peer, index))
        return receives, sends, copies

    def all_gather(self, prepared: PreparedGather, *, label: str, tags: TagSequence) -> Work:
        receives, sends, copies = prepared
        tag = tags.next_tag() & TagSequence.LOWEST
        try:
            group = self.group
            works = [group.recv(tensor, peer, tag + index) for tensor, peer, index in receives]
            works += [group.send(tensor, peer, tag + index) for tensor, peer, index in sends]
        except RuntimeError as error:
            raise_failed(label, self.names[self.rank], error)
        if copies[0]:
            torch._foreach_copy_(*copies)  # which transforms of torch.func leave alone, as they do not `copy_`
        return CompositeWork(works, label, self.names[self.rank])

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        rank, peers, tag = self.rank, self._peers, tags.next_tag() & TagSequence.LOWEST
        incoming: list[tuple[ReducePart, Tensor, Tensor]] = []
        works: list[Any] = []
        try:
            group = self.group
            for index, part in enumerate(parts):
                source, chunk, numel = part.source, part.chunk, part.out.numel()
                if numel:
                    lent = scratch.take(len(peers) * numel, source.dtype)
                    rows = lent.view(len(peers), numel)
                    works += [group.recv([rows[row]], peer, tag + index) for row, peer in enumerate(peers)]
                    incoming.append((part, rows, lent))
                for peer in peers:
                    piece = source[peer * chunk : (peer + 1) * chunk]
                    if piece.numel():
                        works.append(group.send([piece], peer, tag + index))
        except RuntimeError as error:
            raise_failed(label, self.names[rank], error)

        def add_up() -> None:
            for part, rows, lent in incoming:
                own = part.source[rank * part.chunk : rank * part.chunk + part.out.numel()]
                by_rank = [own if r == rank else rows[(r - rank) % self.size - 1] for r in range(self.size)]
                torch.add(by_rank[0], by_rank[1], out=part.out)
                for other in by_rank[2:]:  # in the order of ranks, so that every run rounds alike
                    part.out.add_(other)
                scratch.give(lent)
            scale_sums([part for part, _, _ in incoming])

        return CompositeWork(works, label, self.names[rank], add_up)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        put_scaled_input(tensor, scaled_input)
        work = self._launch(label, lambda: dist.all_reduce(tensor, group=self.group, async_op=True))
        return CompositeWork([work], label, self.names[self.rank])
