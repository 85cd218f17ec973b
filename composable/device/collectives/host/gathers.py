"""One all-gather among ranks of one host, prepared: who copies what from where; sends nothing and waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from composable.device.collectives.communicator import GatherPart
from composable.device.collectives.host.pipes import Message
from composable.device.collectives.host.shared_memory import Block

_ALIGN: Final = 64  # bytes


def offsets(tensors: Sequence[Tensor], numels: Sequence[int]) -> tuple[list[int], int]:
    """Where each of several pieces starts in one message, and the message's size, in bytes."""
    starts, end = [], 0
    for tensor, numel in zip(tensors, numels, strict=True):
        starts.append(end)
        end += -(-numel * tensor.element_size() // _ALIGN) * _ALIGN
    return starts, end


def view_of(memory: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return memory[start : start + numel * dtype.itemsize].view(dtype)


@dataclass(slots=True, eq=False)
class GatherPlan:
    """What this rank shows, and what it copies from whom."""

    nbytes: int
    shards: list[Tensor]
    starts: list[int]
    own: tuple[list[Tensor], list[Tensor]]  # targets, sources
    wanted: dict[int, list[tuple[Tensor, int]]]  # by peer: target, where it starts in the peer's message
    shown: dict[int, list[Tensor]] = field(default_factory=dict)  # by where a block starts: where the shards go
    seen: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by peer and start: where targets come from

    def copy_own(self) -> None:
        if self.own[0]:
            torch._foreach_copy_(*self.own)

    def fill(self, block: Block) -> None:
        """Copy the shards to where the others find them."""
        key = block.start
        if key not in self.shown:
            with torch.inference_mode(False):  # they are written to outside of it, too
                self.shown[key] = [
                    view_of(block.memory, start, shard.numel(), shard.dtype)
                    for shard, start in zip(self.shards, self.starts, strict=True)
                ]
        torch._foreach_copy_(self.shown[key], self.shards)

    def copy_from(self, messages: Mapping[int, Message], view: Callable[[int, Message], Tensor]) -> None:
        """Copy what the others show, wherever it is."""
        for peer, message in messages.items():
            wanted = self.wanted[peer]
            if not wanted:
                continue
            key = peer, message[0]
            if key not in self.seen:
                memory = view(peer, message)
                self.seen[key] = [view_of(memory, start, to.numel(), to.dtype) for to, start in wanted]
            torch._foreach_copy_([target for target, _ in wanted], self.seen[key])


def plan_gather(parts: Sequence[GatherPart], rank: int, size: int) -> GatherPlan:
    chunks = [part.shard.numel() for part in parts]
    starts, nbytes = offsets([part.shard for part in parts], chunks)
    own: tuple[list[Tensor], list[Tensor]] = ([], [])
    wanted: dict[int, list[tuple[Tensor, int]]] = {peer: [] for peer in range(size) if peer != rank}
    for part, chunk, start in zip(parts, chunks, starts, strict=True):
        for owner in range(size):
            target = part.whole[owner * chunk : min((owner + 1) * chunk, part.numel)]
            if not target.numel():
                continue
            if owner == rank:
                own[0].append(target)
                own[1].append(part.shard[: target.numel()])
            else:
                wanted[owner].append((target, start))
    return GatherPlan(nbytes, [part.shard for part in parts], starts, own, wanted)
