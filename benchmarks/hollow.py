"""A process group in which every other rank is a copy of this one, for worlds of any size.

Must not know who calls it.

torch's own fake process group copies the input of an all-gather once per rank, in a loop: 5 ms with
4096 ranks, more than the work that `scale.py` is after. This one fills the output in one kernel, so
its time depends on the bytes and not on the ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

NAME = "hollow"


class HollowGroup(dist.ProcessGroup):
    """Rank 0 of `size`. What is gathered is this rank's part over and over; what is reduced is this
    rank's alone.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._num_shards = size

    def _nothing(self, *_: Any) -> dist.Work:
        return FakeWork()

    allreduce = allreduce_coalesced = broadcast = barrier = _nothing

    def _gather(self, output: Tensor, part: Tensor, *_: Any) -> dist.Work:
        # FSDP2 gathers in place: the part is a piece of the output.
        output.detach().view(self._num_shards, -1).copy_(part.detach().clone().view(1, -1))
        return FakeWork()

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], *_: Any) -> dist.Work:
        for copies, part in zip(outputs, parts, strict=True):
            for each in copies:  # DDP compares shapes in this way, once
                each.copy_(part)
        return FakeWork()

    def _scatter(self, output: Tensor, whole: Tensor, *_: Any) -> dist.Work:
        output.detach().view(-1).copy_(whole.detach().view(self._num_shards, -1)[0])
        return FakeWork()

    _allgather_base = all_gather_single = _gather  # the second name from torch 2.13 on
    _reduce_scatter_base = reduce_scatter_single = _scatter

    def _gather_all(self, outputs: list[Tensor], parts: list[Tensor], *_: Any) -> dist.Work:
        for output, part in zip(outputs, parts, strict=True):
            self._gather(output, part)
        return FakeWork()

    def _scatter_all(self, outputs: list[Tensor], wholes: list[Tensor], *_: Any) -> dist.Work:
        for output, whole in zip(outputs, wholes, strict=True):
            self._scatter(output, whole)
        return FakeWork()

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_all
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _scatter_all

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        # The base class asks a C++ backend for it, which there is none of; what torch calls this
        # group is on record.
        return str(dist.distributed_c10d._world.pg_names[self])


def _make(store: Any, rank: int, size: int, timeout: Any) -> HollowGroup:
    return HollowGroup(rank, size)


def register() -> None:
    """Make `init_process_group("hollow")` possible in this process."""
    dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
