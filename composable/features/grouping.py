"""Which group each sharded parameter is in: what gathers it, and where its shard rests.

CPU offload: shards rest on the host, and come to the device before they are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from composable.comm.base import DONE, Work
from composable.comm.launch import Launch
from composable.comm.mesh_info import MeshInfo
from composable.config import CPUOffloadPolicy, MixedPrecisionPolicy
from composable.engine.params.layout import Slot
from composable.engine.params.param import ManagedParam, memory_order
from composable.engine.params.param_group import Gather, Grouping, ParamGroup, ShardedGroup
from composable.engine.params.precision import Precision
from composable.features.extension import ExtendedGroup
from composable.memory.offload import ComingShards, HostHome
from composable.memory.streams import has_streams
from composable.tensors.protocol import has_protocol
from composable.torch_private import local_tensor


@dataclass(frozen=True)
class GroupingByForm(Grouping):
    """One group, which may rest on the host, or two where some parameters have FSDP2's extension
    protocol: these, with plain ones that can share their message, and the rest.

    Attributes:
        policy: that the protocol's methods are given.
    """

    policy: MixedPrecisionPolicy = field(compare=False)
    offload: CPUOffloadPolicy | None = None

    @property
    @override
    def on_host(self) -> bool:
        return self.offload is not None

    @override
    def groups(
        self,
        params: Sequence[ManagedParam],
        precision: Precision,
        device: torch.device,
        mesh_info: MeshInfo,
    ) -> list[ParamGroup]:
        together = list[ManagedParam]()
        if any(map(_is_extended, params)):
            together = [param for param in params if _is_extended(param) or _may_join(param)]
        rest = [param for param in params if param not in together]
        args, made = (precision, device, mesh_info), list[ParamGroup]()
        if together:
            made.append(ExtendedGroup(self.policy, together, *args))
        if rest and self.offload and has_streams(device):
            home = HostHome(device, pin_memory=self.offload.pin_memory)
            made.append(OffloadedGroup(home, rest, *args))
        elif rest:
            made += super().groups(rest, *args)
        return made


def _is_extended(param: ManagedParam) -> bool:
    """A plain parameter's attributes are not its shards', so that it has no protocol."""
    if type(param.current) is nn.Parameter or not param.info.form.is_whole:
        return False
    return has_protocol(local_tensor(param.current))


def _may_join(param: ManagedParam) -> bool:
    """Whether its shards are rows in memory order."""
    rows = param.info.form.is_whole and param.info.shard_dim == 0
    return rows and not memory_order(param.current)


# --- CPU offload ---------------------------------------------------------------------------------


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
