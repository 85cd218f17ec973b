"""Parameters that are whole at rest, in the users' own memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from composable.engine.params.layout import Slot
from composable.engine.params.param import ManagedParam, at_home, copy_attributes
from composable.engine.params.param_group import ParamGroup
from composable.engine.params.param_hooks import move_hooks
from composable.tensors.dtensors import dtensor_parameter, gradient_like
from composable.torch_private import local_of, locals_of


class ReplicatedGroup(ParamGroup):
    """See the top of this file.

    Args:
        rest_mesh: the mesh on which they rest as `DTensor(Replicate)`, next to shards; None: they
            rest as users made them.
        read_apart: modules of other units compute with some of them, in calls that this unit does
            not see.
    """

    def __init__(self, *args: Any, rest_mesh: DeviceMesh | None, read_apart: bool) -> None:
        self._rest_mesh, self._read_apart = rest_mesh, read_apart
        super().__init__(*args)

    @override
    def _make_memory(self) -> tuple[Tensor, ...]:
        return tuple(map(_adopt, self.params))

    @override
    def _make_at_rest(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        registered, own, mesh = param.current, param.own, self._rest_mesh
        assert own is not None
        if mesh is None:
            if registered is param.at_rest is not own:  # the shards around it were removed
                move_hooks(registered, own)
                if isinstance(registered.grad, DTensor):
                    own.grad = local_of(registered.grad)
            return own
        if isinstance(registered, DTensor) and registered.device_mesh == mesh:
            return at_home(registered, own.detach())
        at_rest = dtensor_parameter(
            own.detach(), mesh, [Replicate()] * mesh.ndim,
            own.shape, own.stride(), requires_grad=own.requires_grad,
        )  # fmt: skip
        copy_attributes(own, at_rest)
        # autograd accumulates on `own`, and users mean the reduced gradient
        move_hooks(own, at_rest)
        if own.grad is not None:
            at_rest.grad = gradient_like(own.grad, at_rest)
            own.grad = None
        return at_rest

    @override
    def _make_compute(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        if self.precision.casts:
            return super()._make_compute(param, slot)
        assert param.own is not None
        if self._read_apart or not self.precision.changes or param.at_rest is not param.own:
            return param.own
        # Gradients are summed in another dtype. Autograd must not add to the user's gradient, which
        # would be rounded again. (What other units read keeps the user's object: their calls would
        # not show another form.)
        (own,) = locals_of([param.own])
        return param.info.form.compute_parameter(own.detach(), requires_grad=self._differentiable)

    @override
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        local, own = locals_of([param.at_rest, param.own])  # type: ignore[list-item]
        return (
            not local.data_ptr() == own.data_ptr() == address
            or local.device != self.device
            or param.at_rest.dtype != self.precision.original
        )


def _adopt(param: ManagedParam) -> nn.Parameter:
    """The user's own parameter, of what is registered now."""
    registered, own = param.current, param.own
    if not param.info.form.is_whole:  # it rests as the user made it, next to shards, too
        own = registered
    elif own is not None and registered is param.at_rest:
        (local,) = locals_of([registered])
        # torch gives no memory to what was made on the meta device
        if own.is_meta and not local.is_meta:
            own = nn.Parameter(local.detach(), requires_grad=registered.requires_grad)
        elif local.data_ptr() != own.data_ptr():
            own.data = local  # the at-rest parameter was moved
    elif isinstance(registered, DTensor):  # loaded with assign=True
        own = nn.Parameter(local_of(registered), requires_grad=registered.requires_grad)
    else:
        own = registered
    param.keep(own)
    return own
