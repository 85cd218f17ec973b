"""The communicator of one rank alone, which has nothing to say to anybody; calls no collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from composable.device.collectives.communicator import (
    ON_ACCELERATOR,
    Capabilities,
    CompositeWork,
    GatherPart,
    PreparedGather,
    ReducePart,
    ScaledInput,
    Scratch,
    Work,
    put_scaled_input,
    scale_sums,
)
from composable.device.collectives.tags import NoPresence, Steps, TagSequence

_CPU: Final = torch.device("cpu")


class _Tags:
    """Messages that nobody gets need no numbers of their own."""

    opened = 0

    def __init__(self, sums: TagSequence) -> None:
        self._sums = sums

    def open(self) -> TagSequence:
        return TagSequence(0)

    def open_up_to(self, count: int) -> None:
        return None

    def count_by(self, steps: Steps) -> None:
        self._sums.steps = steps


class _Store:
    """Nobody looks anything up."""

    def publish(self, text: str, place: int, *, of_rank: bool = False) -> None:
        return None

    def published(self, place: int, rank: int | None = None) -> str:
        return ""


class LocalCommunicator:
    """One rank: nothing to say to anybody."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device = _CPU) -> None:
        on_host = device.type in ("cpu", "meta")
        self.capabilities = Capabilities() if on_host else replace(ON_ACCELERATOR, even_only=False, ordered=False)
        self.sums = TagSequence(0)
        self.tags = _Tags(self.sums)
        self.presence = NoPresence()
        self.store = _Store()

    def release(self) -> None:
        return None

    def prepare(self, parts: Sequence[GatherPart]) -> PreparedGather:
        return tuple(parts)

    def all_gather(self, prepared: PreparedGather, *, label: str, tags: TagSequence) -> Work:
        for part in prepared:
            part.whole.copy_(part.shard)
        return CompositeWork([], label, 0)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        for part in parts:
            part.out.copy_(part.source[: part.out.numel()])
        scale_sums(parts)
        return CompositeWork([], label, 0)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        put_scaled_input(tensor, scaled_input)
        return CompositeWork([], label, 0)

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        return None

    def min_max(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> tuple[list[int], list[int]]:
        return list(values), list(values)

    def all_gather_ints(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> list[list[int]]:
        return [list(values)]
