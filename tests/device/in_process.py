"""A process group's ranks inside one process, moving numbers as their definition says; knows no backend and no handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable.device.collectives import Capabilities, GatherPart, ReducePart


class Seat:
    """The communicator of one of several ranks in this process. What it prepares is gathered by `gather`, for all at once."""

    def __init__(self, rank: int, size: int, *, even_only: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.capabilities = Capabilities(even_only=even_only)

    def prepare(self, parts: Sequence[GatherPart]) -> list[GatherPart]:
        return list(parts)


def gather(by_rank: Sequence[Sequence[GatherPart] | None]) -> None:
    """Every rank's shards land in every rank's whole; what means nothing becomes NaN."""
    for parts in zip(*[prepared or [] for prepared in by_rank], strict=True):
        together = torch.cat([part.shard for part in parts])
        for part in parts:
            assert part.whole.numel() == together.numel()
            part.whole.copy_(together)
            part.whole[part.numel :] = float("nan")


def reduce(by_rank: Sequence[ReducePart]) -> None:
    """Rank r's chunk of all sources, summed in the order of ranks, lands in r's out; the sources are spent."""
    for rank, part in enumerate(by_rank):
        start = rank * part.chunk
        pieces = [other.source[start : start + part.out.numel()] for other in by_rank]
        part.out.copy_(torch.stack(pieces).sum(0))
    for part in by_rank:
        part.source.fill_(float("nan"))
