"""All-gathers among ranks of one host: into one buffer for all of them where that can be, by copies elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from composable.device.collectives.neighbourhood import Neighbourhood
from composable.device.collectives.places import Place
from composable.device.collectives.wire import FAILURES, Buffer, GatherPart, failed
from composable.device.shared_memory import Block
from composable.device.words import Word

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
    """One all-gather, prepared: what this rank shows, what it copies from whom, and where all may gather together."""

    nbytes: int
    shards: list[Tensor]
    starts: list[int]
    own: tuple[list[Tensor], list[Tensor]]  # targets, sources
    wanted: dict[int, list[tuple[Tensor, int]]]  # by peer: target, where it starts in the peer's message
    place: Place | None
    lodger: Buffer | None = None  # what is to be gathered in `place`
    tag: int | None = None  # of the gather whose result is in `place`
    shown: dict[int, list[Tensor]] = field(default_factory=dict)  # by address of a block: where the shards go
    seen: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by peer and address: where targets come from

    def copy_own(self) -> None:
        if self.own[0]:
            torch._foreach_copy_(*self.own)

    def fill(self, block: Block) -> None:
        """Copy the shards to where the others find them."""
        key = block.memory.data_ptr()
        if key not in self.shown:
            with torch.inference_mode(False):  # they are written to outside of it, too
                self.shown[key] = [
                    view_of(block.memory, start, shard.numel(), shard.dtype)
                    for shard, start in zip(self.shards, self.starts, strict=True)
                ]
        torch._foreach_copy_(self.shown[key], self.shards)

    def copy_from(self, near: Neighbourhood, words: dict[int, Word]) -> None:
        """Copy what the others show, wherever it is."""
        for peer, word in words.items():
            targets = [target for target, _ in self.wanted[peer]]
            if targets:
                torch._foreach_copy_(targets, self._sources(near, peer, word))

    def _sources(self, near: Neighbourhood, peer: int, word: Word) -> list[Tensor]:
        if word[0] >= 0:
            memory = near.look(peer, word)
        elif self.place is not None and word == word_for(self.place):
            memory = near.opened(self.place).memory
        else:
            raise RuntimeError(f"rank {peer} gathers somewhere else: the ranks annotated different modules, or in other orders")
        key = peer, memory.data_ptr()
        if key not in self.seen:
            self.seen[key] = [
                view_of(memory, start if word[0] >= 0 else int(to.storage_offset()) * to.element_size(), to.numel(), to.dtype)
                for to, start in self.wanted[peer]
            ]
        return self.seen[key]


def word_for(place: Place) -> Word:
    """What a rank says when it has written to `place`; blocks are told of by descriptors, which are not negative."""
    return -1 - place.number, 0


def plan_gather(parts: Sequence[GatherPart], rank: int, ways: int, place: Place | None) -> GatherPlan:
    chunks = [part.shard.numel() for part in parts]
    starts, nbytes = offsets([part.shard for part in parts], chunks)
    own: tuple[list[Tensor], list[Tensor]] = ([], [])
    wanted: dict[int, list[tuple[Tensor, int]]] = {peer: [] for peer in range(ways) if peer != rank}
    for part, chunk, start in zip(parts, chunks, starts, strict=True):
        for owner in range(ways):
            target = part.whole[owner * chunk : min((owner + 1) * chunk, part.numel)]
            if not target.numel():
                continue
            if owner == rank:
                own[0].append(target)
                own[1].append(part.shard[: target.numel()])
            else:
                wanted[owner].append((target, start))
    return GatherPlan(nbytes, [part.shard for part in parts], starts, own, wanted, place)


def make_room(plan: GatherPlan, buffer: Buffer, near: Neighbourhood) -> None:
    """Let `buffer` live in the place in common, if that is free, and in memory of its own otherwise."""
    place = plan.place
    plan.lodger = plan.tag = None
    if place is not None and place.enter():
        common = None
        try:
            common = near.opened(place)
        except (OSError, EOFError):
            plan.place = None  # the rank that made it has let it go, or has ended
        if common is not None and buffer.lodge(common.storage, lambda: _leave(plan, place, near)):
            plan.lodger = buffer
            return
        place.leave()
    buffer.allocate()


def _leave(plan: GatherPlan, place: Place, near: Neighbourhood) -> None:
    tag, plan.tag, plan.lodger = plan.tag, None, None
    place.leave()
    if tag is not None:
        near.say_done(tag)


class CommonGather:
    """A gather into the place in common, once this rank has written its part."""

    __slots__ = ("_label", "_near", "_plan", "_tag", "_waited")

    def __init__(self, plan: GatherPlan, near: Neighbourhood, label: str, tag: int) -> None:
        assert plan.place is not None
        self._plan = plan
        self._near = near
        self._label = label
        self._tag = tag
        self._waited = False
        plan.copy_own()
        plan.tag = tag
        plan.place.note(near.say(tag, *word_for(plan.place)))

    def wait(self) -> None:
        if self._waited:
            return
        self._waited = True
        plan, near = self._plan, self._near
        assert plan.place is not None
        try:
            words = {peer: near.hear(peer, self._tag) for peer in near.peers}
            mine = word_for(plan.place)
            if all(word == mine for word in words.values()):
                return  # everybody's part is there; that this rank has finished is said when the buffer leaves
            with torch.no_grad():
                self._move_out(words)
        except FAILURES as error:
            raise failed(self._label, near.rank, error) from error

    def _move_out(self, words: dict[int, Word]) -> None:
        """Somebody could not use the place: go on in private."""
        plan, near, place = self._plan, self._near, self._plan.place
        assert plan.lodger is not None
        assert place is not None
        plan.lodger.move_out()
        plan.lodger = plan.tag = None
        try:
            plan.copy_own()
            plan.copy_from(near, words)
        finally:
            place.leave()
        near.say_done(self._tag)
