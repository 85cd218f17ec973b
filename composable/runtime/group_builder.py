"""How a unit's parameters are sorted into groups and come into flat buffers; knows neither phases nor order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.config import CPUOffloadPolicy
from composable.device.flat_parameters import FlatParameters, dtype_named, memory_order
from composable.device.host_home import HostHome
from composable.device.memory import MemoryPool
from composable.device.parameter_forms import adopt_local, bring_home, cut, keep_gradients_in, make_sharded, make_unsharded
from composable.device.parameter_labels import copy_attributes
from composable.device.parameter_swap import ShardedParam
from composable.device.private import local_of, take_hooks
from composable.device.streams import has_streams
from composable.plan.layout import Layout, ParamSpec, plan_layout
from composable.plan.precision import Precision
from composable.runtime.dtype_group import DtypeGroup
from composable.runtime.gradient_hooks import call_when_accumulated
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.unit_precision import UnitPrecision

_CACHE_LINE: Final = 64  # bytes


def home_of(offload: CPUOffloadPolicy | None, device: torch.device) -> HostHome | None:
    """Where shards rest that are computed with on `device`; None if it is there."""
    return HostHome(device, pin_memory=offload.pin_memory) if offload is not None and has_streams(device) else None


class GroupBuilder:
    """Makes the groups of one unit around the parameters that are registered, as often as these are exchanged.

    Args:
        on_gradient: called when autograd has accumulated a gradient of an unsharded parameter.
    """

    __slots__ = ("_in_place", "_mesh_info", "_offload", "_on_gradient", "_params", "_pool", "_precision")

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh_info: MeshInfo,
        precision: UnitPrecision,
        pool: MemoryPool,
        on_gradient: Callable[[Tensor], None],
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        self._params = params
        self._offload = offload
        self._mesh_info = mesh_info
        self._in_place = mesh_info.mesh is None
        self._precision = precision
        self._pool = pool
        self._on_gradient = on_gradient

    def build(self) -> tuple[DtypeGroup, ...]:
        """Make groups of the parameters as they are now: plain tensors, or DTensors of our placement."""
        alike: dict[tuple[Precision, torch.device], list[ShardedParam]] = {}
        for param in self._params:
            tensor = param.registered
            assert tensor is not None
            local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            stays = self._in_place or local.device.type in ("meta", self._mesh_info.device.type)
            precision = self.precision_of(param, tensor.dtype)
            if precision.changes or not self._in_place:
                alike.setdefault((precision, local.device if stays else self._mesh_info.device), []).append(param)
        # Everything that can fail happens before the first parameter of the module changes.
        flats = [(members, self._flat(precision, device, members)) for (precision, device), members in alike.items()]
        groups = []
        for members, flat in flats:
            for position, param in enumerate(members):
                self._adopt_into(flat, position, param)
            groups.append(DtypeGroup(flat, members, self._mesh_info))
        return tuple(groups)

    def precision_of(self, param: ShardedParam, dtype: torch.dtype) -> Precision:
        """What the policy means for a parameter of `dtype`."""
        return self._precision.of(dtype, exact=param.info.exact)

    def _flat(self, precision: Precision, device: torch.device, members: Sequence[ShardedParam]) -> FlatParameters:
        communicator = self._mesh_info.shard
        home = None if self._in_place else home_of(self._offload, device)
        layout = self._layout(members, precision, offloaded=home is not None)
        own = [tensor for param in members if (tensor := param.registered) is not None] if self._in_place else ()
        flat = FlatParameters(
            layout,
            precision=precision,
            device=device,
            communicator=communicator,
            pool=self._pool,
            own=own,
            in_one=self._mesh_info.post_forward is not None,  # of which ranks keep equal cuts after forward
            home=home,
        )
        if own:
            return flat
        with torch.no_grad():
            for position, param in enumerate(members):
                tensor = param.registered
                assert tensor is not None
                view = flat.shard_view(position).data
                if isinstance(tensor, DTensor):
                    view.copy_(local_of(tensor).reshape(view.shape))
                elif device.type != "meta":
                    view.copy_(cut(tensor.data, layout.slots[position], communicator.rank))
        return flat

    def _layout(self, members: Sequence[ShardedParam], precision: Precision, *, offloaded: bool) -> Layout:
        communicator = self._mesh_info.shard
        specs = []
        for param in members:
            tensor, dim = param.registered, param.info.cut_dim
            assert tensor is not None
            order = memory_order(tensor)
            shape = tuple(tensor.shape[axis] for axis in order) if order else tuple(tensor.shape)
            specs.append(ParamSpec(param.info.fqn, shape, order.index(dim) if order and dim is not None else dim, order))
        sent = dtype_named(precision.compute).itemsize
        smallest = min(sent, dtype_named(precision.original).itemsize)
        capabilities = communicator.capabilities
        return plan_layout(
            specs,
            num_shards=communicator.size,
            direct_numel=-(-capabilities.direct_bytes // sent),
            max_direct=capabilities.max_parts,
            align=max(1, _CACHE_LINE // smallest),
            packed_align=max(1, capabilities.packed_align // smallest),
            copied=offloaded or precision.compute != precision.original,
            direct_multiple=max(1, capabilities.packed_align // min(sent, dtype_named(precision.reduce).itemsize)),
        )

    def _adopt_into(self, flat: FlatParameters, position: int, param: ShardedParam) -> None:
        mesh, registered = self._mesh_info.mesh, param.registered
        assert isinstance(registered, nn.Parameter)
        param.sharded = registered
        if mesh is not None and isinstance(registered, DTensor):
            adopt_local(registered, flat.local(position))
            if flat.home is not None and registered.device != flat.shard.device:
                bring_home(registered)
        elif mesh is not None:
            local, mesh_dim = flat.local(position), self._mesh_info.shard_dim
            whole = flat.layout.slots[position]
            param.sharded = make_sharded(local, whole, mesh, mesh_dim, requires_grad=registered.requires_grad)
            take_hooks(registered, param.sharded)
            param.replace(param.sharded)
        keep_gradients_in(flat.gradient_dtype, param.sharded)
        differentiable = flat.compute_dtype.is_floating_point or flat.compute_dtype.is_complex
        param.unsharded = make_unsharded(flat.full_views[position], requires_grad=differentiable)
        if differentiable:
            call_when_accumulated(param.unsharded, self._on_gradient)
        copy_attributes(registered, param.sharded)
        copy_attributes(registered, param.unsharded)
