"""Parameters that are tensor parallel: `DTensor`s of the user's, on other dimensions of the mesh,
or plain tensors of which `declare_part` says that they are one rank's part of a whole.

The engine shards, gathers and reduces the local tensor of such a parameter, as it does a plain
parameter: it is of one shape along the data-parallel dimensions. This file says what is around it:

| | mesh | placements |
|---|---|---|
| at rest | (tp, dp) | the user's, then those of the unit |
| compute | tp | the user's |
| gradient as autograd leaves it | tp | any; redistributed to the user's |
| gradient accumulated under `no_sync` | (tp, dp) | the user's, then `Partial` |

The user's mesh may have the data-parallel dimensions, too, along which parameters are `Replicate`
before the annotation (`dp_mesh_dims`). Modules compute with them as they were given, and their
gradients are `Partial` there; at rest nothing differs.

A DTensor applies its placements from left to right, so shards of local tensors are exact with tp
first: plain `Shard`, also where both cut one dimension. Declared parts are plain tensors while
modules compute, and so are their gradients; all else is as for a `DTensor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from composable.comm import Comm, comm_of
from composable.memory.torch_private import (
    local_of,
    locals_of,
    parameter_around,
    set_local,
    waited_for,
)


@dataclass(frozen=True, eq=False, slots=True)
class ModelSpec:
    """How the user spread one parameter.

    Attributes:
        like: a DTensor on the meta device with its mesh, placements, shape and stride.
        joint: the mesh that it rests on: the dimensions of its own one, and then those of the
            unit's.
        dims: which dimensions of its own mesh are not data parallel.
        is_plain: modules compute with plain tensors (`declare_part`).
    """

    like: DTensor
    joint: DeviceMesh
    dims: tuple[int, ...]
    is_plain: bool = False

    @property
    def mesh(self) -> DeviceMesh:
        return self.like.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(self.like.placements)

    @property
    def kept(self) -> tuple[Placement, ...]:
        """Its placements over the dimensions of the joint mesh that are the user's."""
        return tuple(self.placements[dim] for dim in self.dims)

    @property
    def local(self) -> Tensor:
        """A meta tensor like the local tensor, which the engine takes for a whole parameter."""
        return local_of(self.like)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the joint mesh that are the user's."""
        return len(self.dims)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is spread as the user did. One that nothing cuts may be at rest, too."""
        if self.is_plain or not isinstance(tensor, DTensor):
            return self.is_plain and not isinstance(tensor, DTensor)
        return (tensor.device_mesh, tuple(tensor.placements)) == (self.mesh, self.placements)

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

    def settled(self, gradient: Tensor) -> Tensor:
        """A gradient of this rank as autograd may add it to a reduced one, of which it does not
        know that it is a mean: with the parameter's placements, this rank's term inside.
        """
        if not isinstance(gradient, DTensor) or tuple(gradient.placements) == self.placements:
            return gradient
        taken = redistributed(gradient, self.placements_taken(gradient))
        if tuple(taken.placements) == self.placements:
            return taken
        return DTensor.from_local(
            taken.to_local(), self.mesh, self.placements, run_check=False,
            shape=taken.shape, stride=taken.stride(),
        )  # fmt: skip

    def compute_parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The parameter that modules compute with, around `local`, whose memory may come later."""
        if self.is_plain:
            return nn.Parameter(local, requires_grad=requires_grad)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        return self  # it holds process groups, and nothing of it changes


PART: Final = "_composable_part"  # the attribute that `declare_part` sets


def spread_of(parameter: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """How the user spread `parameter`; None for a plain one."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, tuple(parameter.placements)
    return getattr(parameter, PART, None)


def model_like(parameter: Tensor, shape: torch.Size) -> DTensor:
    """A DTensor on the meta device that is spread as `parameter`, and whole has `shape`."""
    spread = spread_of(parameter)
    assert spread is not None
    mesh, placements = spread
    (local,) = locals_of([parameter])
    bare = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    stride = parameter.stride()
    if not isinstance(parameter, DTensor):
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(bare, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_gradients(
    gradients: Sequence[Tensor | None],
    specs: Sequence[ModelSpec | None],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """What autograd left, as local tensors with the placements of their parameters.

    Under sequence parallel, the gradient of what is replicated over tp is `Partial` there: an
    all-reduce over tp, which all of its ranks launch, since they compute alike. It is made in
    `dtype`, in which the gradient stays.
    """
    found = list(gradients)
    for index, (gradient, spec) in enumerate(zip(gradients, specs, strict=True)):
        if spec is None or not isinstance(gradient, DTensor):
            continue
        if tuple(gradient.placements) != spec.placements:
            taken = spec.placements_taken(gradient)
            gradient = gradient.to(dtype).redistribute(placements=taken)  # type: ignore[attr-defined]
        found[index] = waited_for(local_of(gradient))
    return found


def redistributed(gradient: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """A gradient with these placements, in memory that nothing writes to any more."""
    if gradient.placements == placements:
        return gradient
    made = gradient.redistribute(placements=placements)
    set_local(made, waited_for(local_of(made)))
    return made


def whole_over_units(tensor: DTensor, spec: ModelSpec) -> Tensor:
    """Gather what lies over the unit's dimensions: this rank's local tensor of the user's mesh."""
    if spec.owns(tensor):  # replicated parameters rest so
        return local_of(tensor)
    placements = [*spec.kept, *[Replicate()] * (tensor.device_mesh.ndim - spec.ndim)]
    return waited_for(local_of(tensor.redistribute(placements=placements)))


def comms_across(specs: Iterable[ModelSpec | None], device: torch.device) -> list[Comm]:
    """The comms along the users' dimensions of these parameters' meshes."""
    meshes: list[tuple[DeviceMesh, tuple[int, ...]]] = []
    for spec in specs:
        if spec is not None and (spec.mesh, spec.dims) not in meshes:
            meshes.append((spec.mesh, spec.dims))
    return [comm_of(mesh.get_group(dim), device) for mesh, dims in meshes for dim in dims]
