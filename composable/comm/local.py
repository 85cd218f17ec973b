"""The comm of one rank alone: it copies, and calls no collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from composable.comm.accelerator import ON_ACCELERATOR
from composable.comm.base import DONE, Pairs, Sizes, Traits, Work, scale_sums
from composable.comm.launch import Launch
from composable.memory.streams import has_streams, range_label

# Without messages every parameter may as well go straight to its place.
_HOST: Final = Traits(direct_bytes=0, max_direct=1 << 30, align=1, on_stream=False)
_ACCELERATOR: Final = replace(ON_ACCELERATOR, direct_bytes=0, max_direct=1 << 30)


class LocalComm:
    group = None
    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.traits = _ACCELERATOR if has_streams(device) else _HOST

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        if pairs:
            with range_label(launch.text):
                torch._foreach_copy_([whole for whole, _ in pairs], [shard for _, shard in pairs])
        return DONE

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        self.all_gather(pairs, launch)
        return self.all_reduce([out for out, _ in pairs], launch, scale)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        if scale != 1.0:
            scale_sums(tensors, scale)
        return DONE

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, source: Tensor, sizes: Sizes, launch: Launch
    ) -> Work:
        out.copy_(source)
        return DONE

    def broadcast(self, tensors: Sequence[Tensor], launch: Launch, src: int = 0) -> None:
        return None

    def min_max(self, values: Sequence[int], launch: Launch) -> tuple[list[int], list[int]]:
        return list(values), list(values)

    def all_gather_ints(self, values: Sequence[int], launch: Launch) -> list[list[int]]:
        return [list(values)]

    def all_gather_objects(self, value: Any, launch: Launch) -> list[Any]:
        return [value]
