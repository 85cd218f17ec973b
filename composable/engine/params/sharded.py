"""Parameters that are sharded at rest: `DTensor`s over the group's shard buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.comm.mesh_info import MeshInfo
from composable.engine.params.layout import Route, Slot
from composable.engine.params.param import (
    ManagedParam,
    as_parameter,
    at_home,
    copy_attributes,
    cut,
    shape_and_strides,
)
from composable.engine.params.param_group import ParamGroup
from composable.engine.params.precision import Precision
from composable.errors import ForeignParameterError
from composable.memory.elastic import with_own_storage
from composable.tensors.dtensors import dtensor_parameter
from composable.tensors.protocol import has_protocol
from composable.torch_private import local_of, take_hooks


class ShardedGroup(ParamGroup):
    """See the top of this file."""

    shard: Tensor

    @override
    def _make_memory(self) -> tuple[Tensor, ...]:
        self.shard = self._make_shard()
        for param, slot in zip(self.params, self.slots, strict=True):
            view, given = self.shard_view(slot).data, param.users_local
            if given is None:
                view.copy_(local_of(param.current).reshape(view.shape))  # type: ignore[arg-type]
            else:
                view.copy_(cut(given.data, slot, self.comm.rank))
        return (self.shard,)

    def _make_shard(self) -> Tensor:
        dtype = self.precision.original
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.device)

    def _stretch(self, slot: Slot) -> Tensor:
        return self.shard[slot.shard_start : slot.shard_start + slot.local_numel(self.comm.rank)]

    def shard_view(self, slot: Slot) -> Tensor:
        return as_parameter(self._stretch(slot).view(slot.local_shape(self.comm.rank)), slot)

    def _local(self, slot: Slot) -> Tensor:
        """A shard as the at-rest parameter holds it: the buffer's memory and version counter, and a
        storage of its own.

        What `torch.save` writes is storages, and a view of the buffer would take the whole buffer
        with it.
        """
        shard = self._stretch(slot)
        local = shard.detach()
        local.data = as_parameter(
            with_own_storage(shard).view(slot.local_shape(self.comm.rank)), slot
        )
        return local

    @override
    def _make_at_rest(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        registered, form, info = param.current, param.info.form, self.mesh_info
        mesh = form.mesh_at_rest(info.mesh)
        assert mesh is not None
        assert info.mesh is not None
        if param.users_local is None:
            return at_home(registered, self._local(slot))
        at_rest = dtensor_parameter(
            self._local(slot), mesh,
            [*form.kept, *_shard_placements(slot, info.mesh, info.shard_dim)],
            *form.size_of(*shape_and_strides(slot)), requires_grad=registered.requires_grad,
        )  # fmt: skip
        take_hooks(registered, at_rest)
        copy_attributes(registered, at_rest)
        return at_rest

    @override
    def _local_compute(self, slot: Slot) -> Tensor:
        if self._aliased(slot):
            # It shares the shards' version counter; torch.compile refuses views.
            return self.shard_view(slot).detach()
        return super()._local_compute(slot)

    @override
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        at_rest = param.at_rest
        assert isinstance(at_rest, DTensor)
        local, right = local_of(at_rest), self.shard_view(slot)
        if at_rest.device_mesh.device_type == "cpu" and local.device.type not in ("cpu", "meta"):
            raise ForeignParameterError(
                f"parameter '{param.fqn}' of unit '{self.unit}' was moved to {local.device}, and"
                " the ranks of its mesh communicate on cpu. Call"
                f" module.to('{local.device.type}') before fully_shard, or pass it a mesh of"
                f" {local.device.type}"
            )
        moved = local.data_ptr() != address
        if param.registered is at_rest and not moved and local.numel() != right.numel():
            # An operator with `out=` resizes a shard to the whole, and fails. The next write would
            # go behind the shard's memory.
            local.as_strided_(right.shape, right.stride())
            raise ForeignParameterError(
                f"parameter '{param.fqn}' of unit '{self.unit}': its shard was resized by an"
                " operator with out=, as torch.nn.init.eye_ calls one. The shard has its shape and"
                " its values again. Initialise the parameter before fully_shard, or"
                " load_state_dict() the whole tensor"
            )
        # An empty shard has no address, wherever it is. A protocol may have been given to it after
        # the annotation.
        elsewhere = (local.device, local.dtype) != (self.shard.device, self.shard.dtype)
        return elsewhere or (moved and local._base is None) or has_protocol(local)

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.shard = move(self.shard)
        for param, slot in zip(self.params, self.slots, strict=True):
            param.move(move, self._local(slot))


@dataclass(frozen=True)
class Grouping:
    """Which groups the sharded parameters of a unit with one precision, device and mesh are in:
    here, one. `features/grouping.py` has others. Equal ones give the same kinds of groups.
    """

    @property
    def on_host(self) -> bool:
        """Whether shards rest in host memory, wherever they are gathered."""
        return False

    def groups(
        self,
        params: Sequence[ManagedParam],
        precision: Precision,
        device: torch.device,
        mesh_info: MeshInfo,
    ) -> list[ParamGroup]:
        return [ShardedGroup(params, precision, device, mesh_info)]


def _shard_placements(slot: Slot, mesh: DeviceMesh, mesh_dim: int) -> list[Placement]:
    """The placements of a sharded parameter: cut over `mesh_dim`, the same along other dimensions
    of the mesh.
    """
    uncut = slot.route is Route.WHOLE and (slot.num_shards > 1 or not slot.shape)
    along: Placement = Replicate() if uncut else Shard(slot.cut_dim)
    return [along if dim == mesh_dim else Replicate() for dim in range(mesh.ndim)]
