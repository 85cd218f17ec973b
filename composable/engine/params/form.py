"""What a parameter is: a plain tensor, or one that its user has distributed over ranks
(`features/dtensor_form.py`). The annotation picks the form, and nothing else asks which one it is.

A unit shards, gathers and reduces one *local* tensor of each parameter. For a plain parameter this
is the whole parameter; for a distributed one it is this rank's part. The form converts between the
local tensor and what users and modules see. How a parameter is stored at rest is decided by its
group (`param_group.py`), and how it is sent by its gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from composable.comm.base import Comm
from composable.tensors.dtensors import whole_of, wrap
from composable.tensors.protocol import cut_along
from composable.torch_private import SHARDS, can_take_data, cut_by


class ParamForm:
    """A plain parameter. Other forms override what differs."""

    __slots__ = ()

    # whether the modules of one rank compute with all of it, in a plain tensor
    is_whole: ClassVar[bool] = True

    @property
    def kept(self) -> Sequence[Placement]:
        """Its placements over the user's dimensions of the mesh that it rests on, which are before
        those of the unit.
        """
        return ()

    @property
    def ndim(self) -> int:
        """The number of the user's dimensions of the mesh that it rests on."""
        return len(self.kept)

    def given(self, registered: Tensor) -> Tensor | None:
        """The local tensor of a parameter as its user made it; None of one that rests."""
        return None if isinstance(registered, DTensor) else registered

    def local_like(self, registered: Tensor) -> Tensor:
        """A tensor with the shape and strides of the local one, which is not sharded."""
        return registered

    # --- at rest ---------------------------------------------------------------------------------

    def mesh_at_rest(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """The mesh that it rests on in a unit over `mesh`: all ranks that have a part or a copy."""
        return mesh

    def size_of(
        self, shape: torch.Size, strides: tuple[int, ...]
    ) -> tuple[torch.Size, tuple[int, ...]]:
        """Shape and strides of the whole, of which those of the local tensor are given."""
        return shape, strides

    def comms(self, device: torch.device) -> list[Comm]:
        """The comms along the user's dimensions."""
        return []

    def refusal(self, name: str, replacement: nn.Parameter) -> str:
        """Why the parameter with this name cannot be replaced by `replacement`; empty if it can."""
        return ""

    def uncut(self, parameter: DTensor) -> int:
        """The first dimensions of a parameter's mesh along which its local tensor is not cut, when
        it is sharded.
        """
        return 0

    def shard_like(self, value: Tensor, parameter: DTensor, device: torch.device) -> DTensor:
        """`value` with the placements of `parameter`: of a plain tensor, the local one, this rank's
        shard on `device`.

        A DTensor with other placements is redistributed, so all ranks must call this.
        """
        placements = parameter.placements
        if isinstance(value, DTensor):
            same = value.placements == placements
            return value if same else value.redistribute(placements=placements)
        mesh, local = parameter.device_mesh, value.detach()
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(placements):
            if isinstance(placement, SHARDS) and axis >= self.uncut(parameter):
                cut = partial(cut_along, ranks=mesh.size(axis), rank=coordinate[axis])
                local = cut_by(placement, cut, local)
        if not local.is_meta:
            local = local.to(device)
        return wrap(local, mesh, placements, parameter.shape, parameter.stride())

    # --- compute ---------------------------------------------------------------------------------

    @property
    def kind(self) -> type[nn.Parameter]:
        """The class of what modules compute with."""
        return nn.Parameter

    def compute_parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """What modules compute with, around the local tensor, whose memory may come later."""
        return nn.Parameter.__new__(self.kind, local, requires_grad)

    def finish_copy(self, made: nn.Parameter, memo: dict[Any, Any]) -> None:
        """A copy at rest was made (`copy.deepcopy`), with the attributes of the original."""

    def shown(self, local: Tensor) -> Tensor:
        """The local tensor, or its gradient, as modules see it that compute."""
        return local

    # --- whole -----------------------------------------------------------------------------------

    def unsharded(self, tensor: Tensor) -> Tensor:
        """Gather a copy of the local tensor of what rests; all ranks of the unit's mesh call it."""
        return whole_of(tensor)

    def laid_out(self, value: Tensor, at_rest: nn.Parameter) -> Tensor:
        """A copy of a local tensor with the strides of the parameter; what was gathered is
        contiguous.
        """
        if type(value) is not Tensor:  # its class lays it out
            return value
        laid_out = torch.empty_strided(
            value.shape, at_rest.stride(), dtype=value.dtype, device=value.device
        )
        return laid_out.copy_(value)

    def refill(self, original: nn.Parameter, value: Tensor, at_rest: nn.Parameter) -> bool:
        """Write a local tensor into the parameter that was there before the annotation, unless it
        does not fit.
        """
        # torch gives no memory to what was made on meta, and none of some devices to what was made
        # on a host
        if (
            (original.shape, original.dtype, original.is_meta)
            != (value.shape, value.dtype, value.is_meta)
        ) or not can_take_data(original, value):
            return False
        if original.device == value.device:
            original.data.copy_(value)
        else:
            original.data = self.laid_out(value, at_rest)
        return True

    # --- gradients -------------------------------------------------------------------------------

    def local_gradient(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The local tensor of what autograd left, with the parameter's placements.

        Args:
            dtype: of a reduction over the user's dimensions, if that takes one.
        """
        return gradient

    def settled(self, gradient: Tensor) -> Tensor:
        """A gradient of this rank as autograd may add it to a reduced one, of which it does not
        know that it is a mean: with the parameter's placements, this rank's term inside.
        """
        return gradient

    def unreduced(self, local: Tensor, at_rest: Tensor) -> Tensor:
        """This rank's gradient, not yet reduced: the mean over all ranks is the gradient."""
        if not isinstance(at_rest, DTensor):
            return local
        mesh, size = at_rest.device_mesh, self.size_of(local.shape, local.stride())
        placements = [*self.kept, *[Partial("avg")] * (mesh.ndim - len(self.kept))]
        # torch refuses a gradient on another device than its parameter; where parameters rest on
        # the host, this one is on its way there.
        return wrap(local, mesh, placements, *size, at_rest.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamForm:
        return self  # it may hold process groups, and nothing of it changes


PLAIN: Final = ParamForm()
