"""Which group each sharded parameter is in: what gathers it, and where its shard rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from typing_extensions import override

from composable.comm.mesh_info import MeshInfo
from composable.config import CPUOffloadPolicy, MixedPrecisionPolicy
from composable.engine.params.param import ManagedParam, memory_order
from composable.engine.params.param_group import Grouping, ParamGroup
from composable.engine.params.precision import Precision
from composable.features.extension import ExtendedGroup
from composable.features.offloaded import OffloadedGroup
from composable.memory.offload import HostHome
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
