"""Tensors that are wrapped and cut as a parameter is: its forms, and those of its gradients; knows no module."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from composable.device.flat_parameters import as_parameter
from composable.device.infinities import agree_on_infinities
from composable.device.parameter_labels import copy_attributes
from composable.device.private import dtensor_like, local_of, parameter_around, set_local
from composable.errors import few
from composable.plan.layout import Slot
from composable.plan.routes import Route

trainability: Final = attrgetter("requires_grad")  # in C: it is asked of all parameters before forwards


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Wrap `local` as `parameter` is wrapped: a DTensor of the same mesh and placements, or nothing."""
    if not isinstance(parameter, DTensor):
        return local
    own = local_of(parameter)
    if local.shape == own.shape and local.stride() == own.stride() and local.dtype == own.dtype:
        return dtensor_like(local, parameter)
    return _wrap(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def gradient_like(local: Tensor, parameter: Tensor) -> Tensor:
    """`like_parameter` for a gradient that every rank holds whole: quick, because it is asked in every step."""
    if not isinstance(parameter, DTensor):
        return local
    if local.stride() == parameter.stride() and local.dtype == parameter.dtype:
        return dtensor_like(local, parameter)
    return _wrap(local, parameter.device_mesh, parameter.placements, local.shape, local.stride())


def summand_like(local: Tensor, parameter: Tensor) -> DTensor:
    """A gradient of `parameter` of which every rank has a summand, `local`: the whole is the mean over all ranks.

    Of a parameter that rests on the host it says that it is there, or torch would not have it: so is the mean, once it is made.
    """
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    made = _wrap(local, mesh, [Partial("avg")] * mesh.ndim, local.shape, local.stride())
    return made if made.device.type == parameter.device.type else dtensor_like(local, made, parameter.device)


def summand_over_replicas_like(shard_dim: int, local: Tensor, parameter: Tensor) -> Tensor:
    """A gradient cut as `parameter` is, of which each replica has a summand: the whole is the mean over the replicas.

    Args:
        shard_dim: the dimension of the mesh that parameters are cut over.
    """
    assert isinstance(parameter, DTensor)
    placements = [each if dim == shard_dim else Partial("avg") for dim, each in enumerate(parameter.placements)]
    return _wrap(local, parameter.device_mesh, placements, parameter.shape, parameter.stride())


def _wrap(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor around `local`. It is made around a stand-in, because a DTensor takes over the storage offset of what it
    is made around, and one with an offset cannot be deep-copied. Where `local` rests on the host, and the ranks of the mesh
    communicate elsewhere, torch would move it: the DTensor is on the host, as that of torch's own fully_shard is."""
    if local.device.type not in ("meta", mesh.device_type):
        agree_on_infinities()
        bare = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        return dtensor_like(local, DTensor.from_local(bare, mesh, placements, run_check=False, shape=shape, stride=stride))
    stand_in = torch.empty_like(local) if local.storage_offset() else local
    dtensor = DTensor.from_local(stand_in, mesh, placements, run_check=False, shape=shape, stride=stride)
    set_local(dtensor, local)
    return dtensor


def make_sharded(local: Tensor, slot: Slot, mesh: DeviceMesh, mesh_dim: int, *, requires_grad: bool) -> nn.Parameter:
    """The DTensor parameter that lives on the module at rest: cut over one dimension of the mesh, the same along others."""
    placement = Replicate() if slot.route is Route.WHOLE and not (slot.num_shards == 1 and slot.shape) else Shard(slot.cut_dim)
    whole = as_parameter(torch.empty(slot.shape, device="meta"), slot)
    placements = [Replicate() if dim != mesh_dim else placement for dim in range(mesh.ndim)]
    return _parameter_around(local, mesh, placements, whole.shape, whole.stride(), requires_grad=requires_grad)


def make_replicated(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor parameter over the memory of a plain one, of which every rank of `mesh` has a copy.

    Its local tensor shares the version counter of `whole`.
    """
    local = whole.detach()
    return _parameter_around(
        local, mesh, [Replicate()] * mesh.ndim, local.shape, local.stride(), requires_grad=whole.requires_grad
    )


def _parameter_around(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    *,
    requires_grad: bool,
) -> nn.Parameter:
    agree_on_infinities()
    # Around a stand-in, for the reason that `_wrap` gives: a Parameter is a detached copy of what it is made of.
    made = _wrap(torch.empty_like(local), mesh, placements, shape, stride)
    parameter = parameter_around(made, requires_grad=requires_grad)
    assert isinstance(parameter, DTensor)
    set_local(parameter, local)
    return parameter


def make_unsharded(view: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """The plain parameter that the module computes with."""
    with torch.inference_mode(False):
        return nn.Parameter(view.data, requires_grad=requires_grad)


def cut(whole: Tensor, slot: Slot, rank: int) -> Tensor:
    """The shard of a whole tensor that `rank` owns: a view."""
    if slot.route is Route.WHOLE:
        return whole
    start, length = slot.extent(rank)
    return whole.narrow(slot.cut_dim, start, length)


def shard_like(value: Tensor, parameter: DTensor, device: torch.device) -> DTensor:
    """A tensor of the same shape, spread as `parameter` is: of a plain one, which every rank has, a view on `device`.

    A DTensor of another placement is exchanged with the other ranks, so all of them must call this.
    """
    placements = parameter.placements
    if isinstance(value, DTensor):
        return value if value.placements == placements else value.redistribute(placements=placements)
    mesh, local = parameter.device_mesh, value.detach()
    # Asked of the mesh and not of its groups: DTensor's own caches may have given the parameter an equal mesh from before,
    # whose groups have been destroyed.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size = local.shape[placement.dim]
            chunk = -(-size // mesh.size(axis))
            start = min(coordinate[axis] * chunk, size)
            local = local.narrow(placement.dim, start, min(chunk, size - start))
    if not local.is_meta:
        local = local.to(device)
    return _wrap(local, mesh, placements, parameter.shape, parameter.stride())


def describe_mesh(mesh: DeviceMesh) -> str:
    """A mesh in a few words: `the (2,) cpu mesh of ranks 0, 1`."""
    return f"the {tuple(mesh.shape)} {mesh.device_type} mesh of ranks {few([str(r) for r in mesh.mesh.flatten().tolist()])}"


def keep_gradients_in(dtype: torch.dtype, parameter: nn.Parameter) -> None:
    """The parameter's gradient has `dtype`: the one that is there, and those to come. torch may have a parameter's own only."""
    if getattr(parameter, "grad_dtype", dtype) != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)


def adopt_local(tensor: Tensor, view: Tensor) -> None:
    """Move a DTensor's data into `view` and let it live there from now on."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        view.copy_(local_of(tensor).reshape(view.shape))
    set_local(tensor, view)


def bring_home(parameter: nn.Parameter) -> None:
    """A parameter that was moved says again that it is where its local tensor is, and keeps its identity. So does its
    gradient, whose memory moves."""
    assert isinstance(parameter, DTensor)
    local, gradient = local_of(parameter), parameter.grad
    parameter.grad = None
    made = _parameter_around(
        local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride(),
        requires_grad=parameter.requires_grad,
    )  # fmt: skip
    copy_attributes(parameter, made)
    torch.utils.swap_tensors(parameter, made)
    if isinstance(gradient, DTensor):
        parameter.grad = like_parameter(local_of(gradient).to(local.device), parameter)
