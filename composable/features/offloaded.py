"""CPU offload: shards that rest on the host, and come to the device before they are gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from composable.comm.base import DONE, Work
from composable.comm.launch import Launch
from composable.engine.params.gather import Gather
from composable.engine.params.layout import Slot
from composable.engine.params.param_group import ShardedGroup
from composable.memory.offload import ComingShards, HostHome


class OffloadedGather(Gather):
    """Sends a copy of the shards that exists as long as the gather needs it."""

    def __init__(self, coming: ComingShards, *args: Any) -> None:
        self._coming = coming
        super().__init__(*args)
        self._holds_input = True

    @override
    def _read(self, start: int, numel: int) -> Tensor:
        return self._coming.buffer.stretch(start, numel).data

    @override
    def launch(self, launch: Launch) -> Work:
        for buffer in self._in_flight:
            buffer.allocate()
        self._coming.bring(*self._casts)
        if not self.pairs:
            return DONE
        with self._coming.here():
            return self._comm.all_gather(self.pairs, launch)

    @override
    def end_sending(self) -> None:
        self._coming.end()
        super().end_sending()


class OffloadedGroup(ShardedGroup):
    """Parameters whose shards rest on the host, as their gradients do."""

    def __init__(self, home: HostHome, *args: Any) -> None:
        self._home, self.to_rest = home, home.take
        super().__init__(*args)

    @override
    def _make_shard(self) -> Tensor:
        return self._home.zeros(self.layout.shard_numel, self.precision.original)

    @override
    def _make_gather(self) -> Gather:
        return OffloadedGather(
            ComingShards(self.shard, self._home), self._copied(), self.layout, self.precision,
            self.device, self.comm, self.shard,
        )  # fmt: skip

    @override
    def _aliased(self, slot: Slot) -> bool:
        return False
