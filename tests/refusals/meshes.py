"""Meshes, tensor-parallel parameters and parts that cannot be annotated."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from composable import declare_part, describe, fully_shard, replicate
from tests.helpers.world import current_device
from tests.refusals.table import Refusals, annotating, row
from tests.tensor_parallel.models import MLP, batches, full, made, mesh_of, parallelize_mlp, train


class Dims(NamedTuple):
    """As torch's `DataParallelMeshDims`, which older versions do not have."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2).to(current_device())


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(current_device().type, shape, mesh_dim_names=names)


# --- meshes -------------------------------------------------------------------------------------

_TO_FLATTEN: Final = "To use all of its ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, pass a slice, mesh[...], or name the data-parallel dimensions in dp_mesh_dims=."


@row(2)
def meshes_of_too_many_dimensions() -> Refusals:
    for mesh, names in (
        (_mesh(1, 2, 1, names=("x", "y", "z")), ": ('x', 'y', 'z')"),
        (_mesh(1, 1, 2, names=("pp", "dp_shard", "dp_replicate")), ": ('pp', 'dp_shard', 'dp_replicate')"),
        (_mesh(1, 1, 2), ""),
    ):
        yield annotating(fully_shard, _layer(), mesh=mesh), f"MeshError: fully_shard takes a mesh of one dimension, or of two: one to replicate over and one to shard over; this one has 3{names}. {_TO_FLATTEN}"
        yield annotating(replicate, _layer(), mesh=mesh), f"MeshError: replicate takes a mesh of one dimension; this one has 3{names}. {_TO_FLATTEN}"


@row(3)
def a_mesh_of_two_dimensions_over_two_of_three_ranks() -> Refusals:
    """Every rank takes part in making meshes."""
    mesh, model = DeviceMesh(current_device().type, torch.tensor([[0], [1]])), _layer()
    flat = DeviceMesh(mesh.device_type, mesh.mesh.flatten())
    if dist.get_rank() < 2:
        yield annotating(replicate, model, mesh=mesh), f"MeshError: replicate takes a mesh of one dimension; this one has 2. {_TO_FLATTEN}"
        replicate(model, mesh=flat)
        assert describe(model).rows[0].ranks == 2
    else:
        yield annotating(replicate, model, mesh="cpu"), "MeshError: ..."


@row(2)
def meshes_of_two_dimensions_that_do_not_say_which_is_which() -> Refusals:
    for shape, (one, other) in {(1, 2): ("dp", "tp"), (2, 1): ("dp_shard", "cp_shard")}.items():
        yield annotating(fully_shard, _layer(), mesh=_mesh(*shape, names=(one, other))), f"MeshError: fully_shard: of a mesh of two dimensions, one is sharded over and the other one replicated over. The names of this one, ('{one}', '{other}'), do not say which: let one contain 'replicate' and the other one 'shard'. To shard over one dimension alone, pass mesh[\"{one}\"] or mesh[\"{other}\"]; over both, name them in dp_mesh_dims=DataParallelMeshDims(shard=('{one}', '{other}'))."


@row(2)
def what_is_no_mesh() -> Refusals:
    others = dist.new_group([0])  # on rank 1 a number that stands for no group
    for verb in (fully_shard, replicate):
        said = f"MeshError: {verb.__name__}: expected a DeviceMesh, a ProcessGroup or None as mesh, got"
        for given, kind in (("cpu", "str"), ([dist.group.WORLD], "list"), (2, "int")):
            yield annotating(verb, _layer(), mesh=given), f"{said} {kind}."
        if dist.get_rank() == 1:
            yield annotating(verb, _layer(), mesh=others), f"{said} int, which new_group() returns on ranks outside of the group: annotate the module on the ranks of the group alone."
    if dist.get_rank() == 0:  # all ranks are to know as many groups
        dist.destroy_process_group(others)


@row(2)
def meshes_that_list_ranks_otherwise_than_process_groups() -> Refusals:
    """Loading a state dict would cut for the rank that the mesh says, and a gather take the pieces
    in the group's order.
    """
    kind, names = current_device().type, ("shard", "replicate")
    for mesh, listed in ((DeviceMesh(kind, [1, 0]), "[1, 0]"), (DeviceMesh(kind, [[1], [0]], mesh_dim_names=names), "[[1], [0]]")):
        yield annotating(fully_shard, _layer(), mesh=mesh), f"MeshError: fully_shard: the mesh {listed} does not list its ranks in ascending order along dimension 0, which is sharded over, as process groups do. Make it by init_device_mesh, or of mesh.mesh.sort(0).values."


@row(2)
def numbers_of_ranks_that_do_not_divide_the_mesh() -> Refusals:
    for mesh in (None, _mesh(1, 2, names=("replicate", "shard"))):
        yield annotating(fully_shard, _layer(), mesh=mesh, reshard_after_forward=3), "MeshError: reshard_after_forward=3: parameters are sharded over 2 ranks, which 3 does not divide."
    yield annotating(fully_shard, _layer(), reshard_after_forward="yes"), "ArgumentError: fully_shard: reshard_after_forward must be True or False, a whole number or None, got the str 'yes'"


@row(2)
def names_of_no_dimension() -> Refusals:
    mesh, model, three = mesh_of(2, 1), made(MLP), mesh_of(1, 1, 2, names=("a", "b", "c"))
    for verb, over, dims, said in (
        (fully_shard, mesh, Dims(), "must name a dimension to shard over"),
        (fully_shard, mesh, Dims(replicate="dp"), "to shard over"),
        (replicate, mesh, Dims("dp"), "to replicate over, and none"),
        (fully_shard, mesh, Dims("cp"), "names shard='cp'"),
        (fully_shard, mesh, Dims(("dp", "dp")), "names shard=('dp', 'dp')"),
        (fully_shard, None, Dims("dp"), "must be a DeviceMesh with names, got None"),
        (fully_shard, three, None, "in dp_mesh_dims="),
    ):
        yield annotating(verb, model, mesh=over, dp_mesh_dims=dims), f"MeshError: ...{said}..."
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))


@row(4)
def ranks_that_name_other_dimensions() -> Refusals:
    mesh, rank = mesh_of(2, 2, names=("dp", "cp")), dist.get_rank()
    for dims, other in (
        (Dims("dp") if rank == 0 else Dims(("dp", "cp")), "1"),
        (Dims("dp", "cp") if rank == 3 else Dims("cp", "dp"), "3"),
        (Dims("there is none") if rank == 1 else Dims("dp"), "1"),
    ):
        model = made(MLP)
        yield annotating(fully_shard, model, mesh=mesh, dp_mesh_dims=dims), f"RanksDisagreeError: ...dp_mesh_dims names {{...}} on rank 0 and {{...}} on rank {other}..."
        fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))


# --- tensor-parallel parameters -----------------------------------------------------------------


def _given(model: Any, mesh: DeviceMesh, placement: Any) -> None:
    local = torch.ones(4, 6, dtype=model.up.weight.dtype)
    model.up.weight = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))


def _parallel(mesh: DeviceMesh) -> Any:
    model = made(MLP)
    parallelize_mlp(model, mesh)
    return model


def _rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


@row(4)
def data_parallel_meshes_that_overlap_with_tensor_parallel_ones() -> Refusals:
    mesh = mesh_of(2, 2)
    for given in (None, mesh["tp"], init_device_mesh("cpu", (4,))):
        yield annotating(fully_shard, _parallel(mesh["tp"]), mesh=given), "AnnotationError: ...share ranks [..."
    yield annotating(fully_shard, _parallel(mesh["dp"]), mesh=mesh["dp"]), "AnnotationError: ...share ranks [..."


@row(4)
def meshes_that_are_not_two_parts_of_one() -> Refusals:
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ((0, 3), (1, 2))]  # ranks 0 and 3 have other parts
    other, model = DeviceMesh.from_group(groups[rank in (1, 2)], "cpu"), _parallel(mesh["tp"])
    yield annotating(fully_shard, model, mesh=other, sync_module_states="off"), "MeshError: ...are not two parts of one mesh..."
    fully_shard(model, mesh=mesh["dp"])
    train(model, batches(model, mesh["dp"].get_local_rank(), 2, 1))


@row(4)
def placements_that_are_no_cut() -> Refusals:
    mesh, model = mesh_of(2, 2), made(MLP)
    _given(model, mesh["tp"], Partial())
    yield annotating(fully_shard, model, mesh=mesh["dp"]), "AnnotationError: ...is cut or Replicate over each dimension..."
    local = torch.ones(6, 4, dtype=torch.float64).t()
    model.up.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False))
    yield annotating(fully_shard, model, mesh=mesh["dp"]), "AnnotationError: ...is not contiguous..."
    _given(model, mesh["tp"], Shard(0))
    for placement, said in (
        (Shard(2), "which has 2 dimensions"),
        (_StridedShard(0, split_factor=2), "must return Shard or None, got _StridedShard"),
    ):
        place = lambda p, given=placement: given if p.ndim > 1 else None  # noqa: E731
        yield annotating(fully_shard, model, mesh=mesh["dp"], shard_placement_fn=place), f"AnnotationError: ...{said}..."
    # A dimension that both cut may be of any size.
    model.up = nn.Linear(6, 1, dtype=torch.float64)
    distribute_module(model.up, mesh["tp"], _rows)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(0))
    assert full(model.up.weight).shape == (1, 6)


@row(4)
def placements_of_other_ranks() -> Refusals:
    # names of its own: what torch keeps of this mesh is not the same on all ranks afterwards
    mesh, model = mesh_of(2, 2, names=("dp", "model")), made(MLP)
    _given(model, mesh["model"], Replicate() if dist.get_rank() == 0 else Shard(0))
    yield annotating(fully_shard, model, mesh=mesh["dp"]), "RanksDisagreeError: ...up.weight..."
    _given(model, mesh["model"], Replicate())
    fully_shard(model, mesh=mesh["dp"])


@row(4)
def a_tensor_parallel_model_that_one_rank_cannot_annotate() -> Refusals:
    mesh, first = mesh_of(2, 2), dist.get_rank() == 0
    said = "ArgumentError: ...prefetch must be..." if first else "RanksDisagreeError: ...failed, so no rank annotates...prefetch must be..."
    model = _parallel(mesh["tp"])
    yield annotating(fully_shard, model, mesh=mesh["dp"], prefetch=-1 if first else 1), said
    fully_shard(model, mesh=mesh["dp"])


@row(4)
def a_plain_parameter_in_place_of_a_tensor_parallel_one() -> Refusals:
    mesh = mesh_of(2, 2)
    model = fully_shard(_parallel(mesh["tp"]), mesh=mesh["dp"])
    inputs = batches(model, mesh["dp"].get_local_rank(), 2, 1)
    train(model, inputs)
    kept = model.up.weight
    model.up.weight = nn.Parameter(torch.ones(8, 6, dtype=torch.float64))
    yield lambda: model(inputs[0]), "ForeignParameterError: ...is tensor parallel, and was replaced..."
    model.up.weight = kept
    train(model, inputs)


@row(4)
def parts_that_do_not_fit() -> Refusals:
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    tp, parameter = mesh["tp"], nn.Parameter(torch.zeros(4, 2))
    plain: Any = parameter.data
    for placements in ([], [Shard(2)], [Partial()], [Shard(0), Shard(0)]):
        yield lambda placements=placements: declare_part(parameter, tp, placements), "AnnotationError: ...do not fit a parameter of shape..."
    yield lambda: declare_part(plain, tp, [Shard(0)]), "AnnotationError: declare_part: parameter must be a plain nn.Parameter, got a Tensor"
    first = tp.get_local_rank() == 0
    module = nn.Linear(2, 3 if first else 4)  # the last ones have the rest, not the first
    declare_part(module.weight, tp, [Shard(0)])
    yield annotating(fully_shard, module, mesh=mesh["dp"], sync_module_states="off"), "AnnotationError: ...chunk does not give..."
    module = nn.Linear(2, 4)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    for other, said in ((rank == 0, "...weight..."), (first, "...weight...")):  # which others of its data-parallel or of its tp ranks see
        declare_part(module.weight, tp, [Replicate() if other else Shard(0)])
        yield annotating(fully_shard, module, mesh=mesh["dp"]), f"RanksDisagreeError: {said}"
    declare_part(module.weight, tp, [Shard(0)])
    yield annotating(replicate, module, mesh=mesh["dp"]), "AnnotationError: ...state dicts would take it for the whole..."
    yield annotating(fully_shard, module, mesh=tp), "AnnotationError: ...which share ranks..."
    fully_shard(module, mesh=mesh["dp"], sync_module_states="off")
    assert full(module.weight).shape == (8, 2)
