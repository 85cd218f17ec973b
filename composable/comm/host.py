"""Comms for tensors of a host: the tensor collectives of any backend, and point-to-point messages for gloo.

gloo's tensor collectives clone their inputs, reduce everything on every rank and copy in `wait`. Point-to-point messages move
each byte once, straight from the shard to its final place, while the caller computes. The messages per rank grow with the
ranks, so in large groups gloo's own collectives are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.base import GroupComm, Pairs, Traits, Work, scale_sums
from composable.comm.ledger import checksum
from composable.errors import CommunicationError
from composable.memory.elastic import borrow, give_back
from composable.memory.streams import range_label
from composable.memory.torch_private import Launcher, as_real, launchers

_FIRST_TAG: Final = 1 << 30  # apart from the small tags that users choose for messages of their own; a tag is a C int


class _HostWork:
    """The works of one collective, and what is left to do on this rank when they are complete."""

    __slots__ = ("_comm", "_failure", "_finish", "_label", "_works")

    def __init__(self, comm: GenericComm, label: str, works: list[Any], finish: Callable[[], None] | None = None) -> None:
        self._comm = comm
        self._label = label
        self._works = works
        self._finish = finish
        self._failure = ""

    def wait(self) -> None:
        if self._failure:
            raise CommunicationError(self._failure)  # again, and without another report
        if not self._works and self._finish is None:
            return
        try:
            with range_label(self._label, "wait for the "):
                self._comm.guarded(self._label, self._complete)
        except CommunicationError as error:
            self._failure = str(error)
            raise

    def _complete(self) -> None:
        for work in self._works:
            if work is not None:  # of a group written in Python, that was complete at its launch
                work.wait()
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class GenericComm(GroupComm):
    """The group's own tensor collectives, launched asynchronously. Works for every backend of a host."""

    traits = Traits(direct_bytes=1 << 20, max_direct=512, align=1, on_stream=False)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._launchers = launchers(group, asynchronous=True)

    def _all_gather(self, pairs: Pairs, label: str) -> Work:
        return _HostWork(self, label, self._start(self._launchers.all_gather, pairs))

    def _reduce_scatter(self, pairs: Pairs, label: str, scale: float) -> Work:
        if self._is_mean(scale):
            return _HostWork(self, label, self._start(self._launchers.reduce_scatter_mean, pairs))
        works = self._start(self._launchers.reduce_scatter, pairs)
        return _HostWork(self, label, works, _scaling([out for out, _ in pairs], scale))

    def _all_reduce(self, tensors: Sequence[Tensor], label: str, scale: float) -> Work:
        is_mean = self._is_mean(scale)
        launcher = self._launchers.all_reduce_mean if is_mean else self._launchers.all_reduce
        launch = getattr(self.group, launcher.single)
        works = [launch([as_real(tensor)], launcher.options) for tensor in tensors]
        return _HostWork(self, label, works, _scaling(tensors, 1.0 if is_mean else scale))

    def _start(self, launcher: Launcher, pairs: Pairs) -> list[Any]:
        launch = getattr(self.group, launcher.single)
        return [launch(as_real(output), as_real(source), launcher.options) for output, source in pairs]


def _scaling(tensors: Sequence[Tensor], scale: float) -> Callable[[], None] | None:
    """What multiplies sums when they are complete."""
    return None if scale == 1.0 else partial(scale_sums, tensors, scale)


class PointToPointComm(GenericComm):
    """gloo, up to 8 ranks: each pair of ranks exchanges the bytes that it must, and no others.

    Ranks count messages alike, and each has a tag of its own in its pair of ranks. The tag says the label, too: ranks that
    launched different collectives must not get each other's bytes. They wait for the timeout, and say what they launched.
    """

    traits = Traits(direct_bytes=512 << 10, max_direct=512, align=1, on_stream=False)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._messages = count()
        # Each rank starts with its right neighbour; if all started with rank 0, that would be the bottleneck.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))

    def _next_tag(self, label: str) -> int:
        return _FIRST_TAG | (next(self._messages) ^ checksum(label)) & (_FIRST_TAG - 1)

    def _all_gather(self, pairs: Pairs, label: str) -> Work:
        group, own = self.group, []
        works, sends = [], []
        for whole, shard in pairs:
            tag = self._next_tag(label)
            if not shard.numel():
                continue
            parts = whole.split(shard.numel())
            own.append((parts[self.rank], shard))
            works += [group.recv([parts[peer]], peer, tag) for peer in self._peers]
            sends += [(shard, peer, tag) for peer in self._peers]
        # All receives come first: what arrives for one that is posted needs no memory in between.
        works += [group.send([shard], peer, tag) for shard, peer, tag in sends]
        if own:
            torch._foreach_copy_([part for part, _ in own], [shard for _, shard in own])
        return _HostWork(self, label, works)

    def _reduce_scatter(self, pairs: Pairs, label: str, scale: float) -> Work:
        group, received = self.group, []
        works, sends = [], []
        for out, whole in pairs:
            tag = self._next_tag(label)
            if not out.numel():
                continue
            lent = borrow(len(self._peers) * out.numel(), whole.dtype)
            rows, parts = lent.split(out.numel()), whole.split(out.numel())
            works += [group.recv([row], peer, tag) for row, peer in zip(rows, self._peers, strict=True)]
            sends += [(parts[peer], peer, tag) for peer in self._peers]
            received.append((out, parts[self.rank], rows, lent))
        works += [group.send([part], peer, tag) for part, peer, tag in sends]

        def add_up() -> None:
            for out, own, rows, lent in received:
                # In the order of ranks, so that every run rounds alike. `rows` are in the order of `self._peers`.
                terms = [own if rank == self.rank else rows[(rank - self.rank) % self.size - 1] for rank in range(self.size)]
                torch.add(terms[0], terms[1], out=out)
                for term in terms[2:]:
                    out.add_(term)
                give_back(lent)
            if scale != 1.0:
                scale_sums([out for out, *_ in received], scale)

        return _HostWork(self, label, works, add_up)
