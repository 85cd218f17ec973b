"""Tensor-parallel parameters: the user's `DTensor`s over other dimensions of the mesh, or plain
tensors that `declare_part` has declared as one rank's part of a whole.

The local tensor of such a parameter has the same shape on all data-parallel ranks, so a unit
shards, gathers and reduces it like a plain parameter. Around the local tensor there are these
`DTensor`s:

| | mesh | placements |
|---|---|---|
| at rest | (tp, dp) | the user's, then those of the unit |
| compute | tp | the user's |
| gradient as autograd leaves it | tp | any; redistributed to the user's |
| gradient accumulated under `no_sync` | (tp, dp) | the user's, then `Partial` |

The user's mesh may also contain the data-parallel dimensions (`dp_mesh_dims`). Before the
annotation, parameters are `Replicate` along them. Modules compute with the user's `DTensor`s, whose
gradients are `Partial` along these dimensions. The at-rest form is the same as above.

A DTensor applies its placements from left to right. With tp first, shards of local tensors are
therefore plain `Shard`s, even if both meshes cut the same dimension. Declared parts and their
gradients are plain tensors while modules compute. In all other respects they are handled like
`DTensor`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.comm import Comm, comm_of
from composable.engine.params.param import ParamForm
from composable.tensors.dtensors import whole_of, wrap
from composable.torch_private import (
    local_of,
    local_tensor,
    locals_of,
    parameter_around,
    set_local,
    waited_for,
)


@dataclass(frozen=True, eq=False, slots=True)
class DTensorForm(ParamForm):
    """How the user distributed one parameter.

    Attributes:
        like: a DTensor on the meta device with its mesh, placements, shape and stride.
        joint: the mesh that it rests on: the dimensions of its own one, and then those of the
            unit's.
        dims: which dimensions of its own mesh are not data parallel.
    """

    like: DTensor
    joint: DeviceMesh
    dims: tuple[int, ...]
    is_whole: ClassVar[bool] = False

    @property
    def mesh(self) -> DeviceMesh:
        return self.like.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(self.like.placements)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is distributed as by the user. It may be at rest, too, if not cut."""
        return isinstance(tensor, DTensor) and (
            (tensor.device_mesh, tuple(tensor.placements)) == (self.mesh, self.placements)
        )

    @property
    @override
    def kept(self) -> tuple[Placement, ...]:
        return tuple(self.placements[dim] for dim in self.dims)

    @override
    def given(self, registered: Tensor) -> Tensor | None:
        return local_tensor(registered) if self.owns(registered) else None

    @override
    def local_like(self, registered: Tensor) -> Tensor:
        return local_of(self.like)

    @override
    def mesh_at_rest(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        return self.joint

    @override
    def size_of(
        self, shape: torch.Size, strides: tuple[int, ...]
    ) -> tuple[torch.Size, tuple[int, ...]]:
        return self.like.shape, self.like.stride()

    @override
    def comms(self, device: torch.device) -> list[Comm]:
        return [comm_of(self.mesh.get_group(dim), device) for dim in self.dims]

    @override
    def refusal(self, name: str, replacement: nn.Parameter) -> str:
        if isinstance(replacement, DTensor):
            return ""
        return (
            f"parameter {name} is tensor parallel, and was replaced by a plain one; nothing would"
            " tell which part of it each rank has. Load it with load_state_dict(), or call"
            " remove(), and annotate again"
        )

    @override
    def uncut(self, parameter: DTensor) -> int:
        # replicated parameters rest as the user distributed them
        return parameter.device_mesh.ndim if self.owns(parameter) else self.ndim

    @override
    def compute_parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        # A DTensor takes over the storage offset of what it is made around. torch.compile expects
        # that of the local tensor; at-rest parameters have none, so that they can be copied.
        like = self.like
        made = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False,
            shape=like.shape, stride=like.stride(),
        )  # fmt: skip
        parameter = parameter_around(made, requires_grad=requires_grad)
        set_local(parameter, local)  # type: ignore[arg-type]
        return parameter

    @override
    def shown(self, local: Tensor) -> Tensor:
        like = self.like
        return wrap(local, self.mesh, self.placements, like.shape, like.stride())

    @override
    @torch.no_grad()
    def unsharded(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return whole_of(tensor)
        if self.owns(tensor):  # replicated parameters rest so
            return local_of(tensor).clone()
        # as if it were the same on all tensor-parallel ranks: along them nothing is sent
        like, placements = local_of(self.like), [*tensor.placements]
        placements[: self.ndim] = [Replicate()] * self.ndim
        local = local_of(tensor)
        return whole_of(wrap(local, tensor.device_mesh, placements, like.shape, like.stride()))

    @override
    def laid_out(self, value: Tensor, at_rest: nn.Parameter) -> Tensor:
        return value

    @override
    def refill(self, original: nn.Parameter, value: Tensor, at_rest: nn.Parameter) -> bool:
        if (original.dtype, original.device) != (value.dtype, value.device):
            return False
        local_tensor(original.detach()).copy_(value)
        return True

    # --- gradients -------------------------------------------------------------------------------

    @override
    def local_gradient(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        # Under sequence parallel, the gradient of what is replicated over tp is `Partial` there: an
        # all-reduce over tp, which all of its ranks launch, since they compute alike. It is made in
        # the dtype in which the gradient stays.
        if not isinstance(gradient, DTensor):
            return gradient
        if tuple(gradient.placements) != self.placements:
            taken = self.placements_taken(gradient)
            gradient = gradient.to(dtype).redistribute(placements=taken)  # type: ignore[attr-defined]
        return waited_for(local_of(gradient))  # type: ignore[arg-type]

    def placements_taken(self, gradient: DTensor) -> tuple[Placement, ...]:
        """The placements in which a gradient is reduced over the data-parallel dimensions: along
        them each rank has a term of the mean.
        """
        return tuple(
            own if dim in self.dims or came.is_shard() else came
            for dim, (own, came) in enumerate(
                zip(self.placements, gradient.placements, strict=True)
            )
        )

    @override
    def settled(self, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor) or tuple(gradient.placements) == self.placements:
            return gradient
        taken = self.placements_taken(gradient)
        if gradient.placements != taken:
            gradient = gradient.redistribute(placements=taken)
            set_local(gradient, waited_for(local_of(gradient)))
        if taken == self.placements:
            return gradient
        return DTensor.from_local(
            gradient.to_local(), self.mesh, self.placements, run_check=False,
            shape=gradient.shape, stride=gradient.stride(),
        )  # fmt: skip


class PartForm(DTensorForm):
    """How the user distributed a parameter of which modules have a part, a plain tensor
    (`declare_part`).
    """

    __slots__ = ()

    compute_parameter = ParamForm.compute_parameter
    shown = ParamForm.shown
    refusal = ParamForm.refusal

    @override
    def owns(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, DTensor)


PART: Final = "_composable_part"  # the attribute that `declare_part` sets


def mesh_and_placements(parameter: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """How the user distributed `parameter`; None for a plain one."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, tuple(parameter.placements)
    return getattr(parameter, PART, None)


def meta_like(parameter: Tensor, shape: torch.Size) -> DTensor:
    """A DTensor on the meta device that is distributed as `parameter`, and whole has `shape`."""
    found = mesh_and_placements(parameter)
    assert found is not None
    mesh, placements = found
    (local,) = locals_of([parameter])
    bare = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    stride = parameter.stride()
    if not isinstance(parameter, DTensor):
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(bare, mesh, placements, run_check=False, shape=shape, stride=stride)
