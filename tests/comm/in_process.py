"""The comms of a group's ranks inside one process, for tests of what packs and unpacks messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from composable.comm.backends import LocalComm
from composable.comm.base import Traits, Work
from composable.comm.launch import Launch
from tests.helpers.communicators import Waited

_CPU: Final = torch.device("cpu")


class Seat(LocalComm):
    """The comm of one rank of several. Its collectives run when all seats launched the same number
    of them: see `seats`.
    """

    def __init__(self, rank: int, every: list[Seat], traits: Traits | None) -> None:
        super().__init__(_CPU)
        self.rank = rank  # type: ignore[misc]
        self._every = every
        self._launched: list[tuple[str, list[tuple[Tensor, Tensor]], float]] = []
        if traits is not None:
            self.traits = traits

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self._every)

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]], launch: Launch) -> Work:
        return self._launch("all_gather", list(pairs), 1.0)

    def reduce_scatter(
        self, pairs: Sequence[tuple[Tensor, Tensor]], launch: Launch, scale: float = 1.0
    ) -> Work:
        return self._launch("reduce_scatter", list(pairs), scale)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        return self._launch("all_reduce", [(tensor, tensor) for tensor in tensors], scale)

    def _launch(self, kind: str, pairs: list[tuple[Tensor, Tensor]], scale: float) -> Work:
        self._launched.append((kind, pairs, scale))
        if all(seat._launched for seat in self._every):
            _run([seat._launched.pop(0) for seat in self._every])
        return Waited(lambda: None)


def seats(size: int, traits: Traits | None = None) -> list[Seat]:
    """The comms of `size` ranks. Launch a collective on each of them; the last launch moves the
    numbers of all.
    """
    every: list[Seat] = []
    every += [Seat(rank, every, traits) for rank in range(size)]
    return every


def _run(by_rank: list[Any]) -> None:
    assert len({(kind, scale) for kind, _, scale in by_rank}) == 1, (
        "ranks launched different collectives"
    )
    kind, _, scale = by_rank[0]
    for pairs in zip(*[pairs for _, pairs, _ in by_rank], strict=True):
        if kind == "all_gather":
            whole = torch.cat([shard for _, shard in pairs])
            for output, _ in pairs:
                assert output.numel() == whole.numel()
                output.copy_(whole)
            continue
        total = torch.stack([source for _, source in pairs]).sum(0) * scale
        for rank, (output, source) in enumerate(pairs):
            if kind == "reduce_scatter":
                assert output.numel() * len(pairs) == source.numel()
                output.copy_(total.split(output.numel())[rank])
            else:
                output.copy_(total)
