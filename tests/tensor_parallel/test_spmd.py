"""Parameters that are DTensors over the whole mesh, `Replicate` along its data-parallel dimensions,
with inputs that are DTensors over it, too.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from composable import (
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    no_sync,
    remove,
    replicate,
    summon_full_params,
)
from composable.errors import AnnotationError, RanksDisagreeError
from tests.helpers.world import spmd
from tests.meshes import test_dims
from tests.tensor_parallel.models import (
    MLP,
    assert_same_parameters,
    assert_trains_as_one_process,
    batches,
    full,
    loss_of,
    made,
    mesh_of,
    train,
)

# torch 2.11 has none, and its FSDP2 does not know `dp_mesh_dims`
Dims: Any = getattr(fsdp, "DataParallelMeshDims", test_dims.Dims)
_UNEVEN = 7  # of which two ranks have four and three


class Net(MLP):
    """Computes with DTensors over `mesh`; the loss is of this rank's rows."""

    def __init__(self) -> None:
        super().__init__(_UNEVEN)
        self.scale = nn.Parameter(torch.tensor(1.5))  # which no rank cuts
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return super().forward(x) * self.scale
        rows = _over(self.mesh, None, data=Shard(0))
        whole = DTensor.from_local(x, self.mesh, rows, run_check=False)
        out = super().forward(whole) * self.scale
        # FSDP2 warns of views
        return out.redistribute(placements=rows).to_local().clone()  # type: ignore[attr-defined]


def _over(mesh: DeviceMesh, tp: int | None, *, data: Placement | None = None) -> list[Placement]:
    """Placements: cut along dimension `tp` over that dimension of the mesh."""
    return [
        (data or Replicate()) if name != "tp" else (Replicate() if tp is None else Shard(tp))
        for name in mesh.mesh_dim_names or ()
    ]


def _distribute(model: Net, mesh: DeviceMesh) -> Net:
    model.mesh = mesh
    cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        distributed = distribute_tensor(parameter.detach(), mesh, _over(mesh, cuts.get(name)))
        setattr(module, name.rpartition(".")[2], nn.Parameter(distributed))
    return model


def _annotate(model: Any, *, mesh: DeviceMesh, verb: Any = fully_shard, **dims: Any) -> None:
    verb(_distribute(model, mesh), mesh=mesh, dp_mesh_dims=Dims(**dims))


@pytest.mark.unsampled
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp"), ("pods", "dp")])
@spmd(ranks=4)
def test_it_trains_as_one_process(names: tuple[str, str]) -> None:
    mesh = mesh_of(2, 2, names=names)
    dims = {"shard": "dp", "replicate": "pods" if "pods" in names else None}
    annotate = partial(_annotate, mesh=mesh, **dims)
    dp = mesh if "pods" in names else mesh["dp"]
    model = assert_trains_as_one_process(Net, annotate, dp, optimizer="AdamW")
    assert_trains_as_one_process(Net, annotate, dp, clip=clip_grad_norm_)
    assert model.up.weight.device_mesh.mesh_dim_names == (  # type: ignore[union-attr]
        ("pods", "dp") if "pods" in names else ("tp", "dp")
    )


@spmd(ranks=4)
def test_replicas_train_as_one_process() -> None:
    mesh = mesh_of(2, 2)
    annotate = partial(_annotate, mesh=mesh, verb=replicate, replicate="dp")
    model = assert_trains_as_one_process(Net, annotate, mesh["dp"], clip=clip_grad_norm_)
    assert model.up.weight.device_mesh == mesh  # type: ignore[union-attr]


@pytest.mark.parametrize("beside_shards", [False, True])
@spmd(ranks=4)
def test_gradients_of_replicas_add_up_over_backwards(beside_shards: bool) -> None:
    mesh = mesh_of(2, 2)
    model, alone = _distribute(made(Net), mesh), made(Net)
    replicate(model.up if beside_shards else model, mesh=mesh, dp_mesh_dims=Dims(replicate="dp"))
    if beside_shards:
        fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    own, whole = batches(model, mesh["dp"].get_local_rank(), 2, 4), batches(alone, -1, 2, 4)
    for step, set_to_none in enumerate((None, False, True, None)):
        for each, batch in ((model, own[step]), (alone, whole[step])):
            loss = loss_of(each, batch)
            loss.backward(retain_graph=True)
            loss.backward()
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), other.grad, msg=name)  # type: ignore[arg-type]
        if set_to_none is not None:
            model.zero_grad(set_to_none)
            alone.zero_grad(set_to_none)


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
@spmd(ranks=4)
def test_whole_parameters_of_replicas_are_read_and_edited(names: tuple[str, str]) -> None:
    mesh = mesh_of(2, 2, names=names)
    model, alone = _distribute(made(Net), mesh), made(Net)
    replicate(model, mesh=mesh, dp_mesh_dims=Dims(replicate="dp"))
    loss_of(model, batches(model, mesh["dp"].get_local_rank(), 2, 1)[0]).backward()
    loss_of(alone, batches(alone, -1, 2, 1)[0]).backward()
    with summon_full_params(model, writeback=False, with_grads=True):
        assert_same_parameters(model, alone)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), other.grad)  # type: ignore[arg-type]
    for rank0_only in (False, True):
        with summon_full_params(model, rank0_only=rank0_only, with_grads=True), torch.no_grad():
            if not rank0_only or mesh["dp"].get_local_rank() == 0:
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                    parameter.grad.mul_(2.0)  # type: ignore[union-attr]
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine), 0.25 * other)
        torch.testing.assert_close(full(mine.grad), 4 * other.grad)  # type: ignore[arg-type, operator]


@pytest.mark.skipif(Dims is test_dims.Dims, reason="FSDP2 of torch 2.11 takes no dp_mesh_dims")
@spmd(ranks=4)
def test_the_numbers_are_those_of_fsdp2() -> None:
    # FSDP2 wants the very mesh object, and torch remembers equal ones of other tests
    mesh = mesh_of(2, 2, names=("data", "tp"))
    inputs = batches(made(Net), mesh["data"].get_local_rank(), 2, 3)
    ours, theirs = made(Net), made(Net)
    _annotate(ours, mesh=mesh, shard="data")
    theirs.scale = nn.Parameter(theirs.scale.detach()[None])  # FSDP2 does not take scalars
    _annotate(theirs, mesh=mesh, verb=fsdp2, shard="data")
    for mine, other in zip(train(ours, inputs), train(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other)
    expected = {name: full(each) for name, each in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(full(parameter), expected[name].view(parameter.shape), msg=name)


@spmd(ranks=4)
def test_what_else_an_annotation_does_works_and_remove_gives_back_what_was_given() -> None:
    mesh = mesh_of(2, 2, names=("tp", "dp"))
    rank = mesh["dp"].get_local_rank()
    model, alone = _distribute(made(Net), mesh), made(Net)
    given = dict(model.named_parameters())
    placements = {name: each.placements for name, each in given.items()}
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    first, second = batches(model, rank, 2, 2)
    with no_sync(model):
        loss_of(model, first).backward()
    loss_of(model, second).backward()
    for batch in batches(alone, -1, 2, 2):
        loss_of(alone, batch).backward()
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), other.grad, msg=name)  # type: ignore[arg-type]
    state = full_state_dict(model, rank0_only=False)
    model.load_state_dict({name: 2 * value for name, value in state.items()})
    at_rest = dict(model.named_parameters())
    model.double()  # what the groups are built anew for
    with summon_full_params(model), torch.no_grad():
        assert model.up.weight.placements == placements["up.weight"]
        model.up.weight.mul_(0.5)
    loss_of(model, first).backward()
    assert all(at_rest[name] is each for name, each in model.named_parameters())
    copied = copy.deepcopy(model)
    loss_of(copied, first).backward()
    remove(model, fully_shard)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.mul_(1.0 if name == "up.weight" else 2.0)
    assert_same_parameters(model, alone)
    for name, parameter in model.named_parameters():
        assert parameter is given[name]
        assert parameter.grad.placements == parameter.placements == placements[name]
    loss_of(model, first).backward()


@spmd(ranks=2)
def test_a_mesh_without_other_dimensions_will_do_and_shards_of_the_users_are_refused() -> None:
    mesh = mesh_of(2, names=("dp",))
    dims = Dims(shard="dp")
    assert_trains_as_one_process(Net, partial(_annotate, mesh=mesh, shard="dp"), mesh)
    model = _distribute(made(Net), mesh)
    model.up.weight = nn.Parameter(model.up.weight.detach().redistribute(placements=[Shard(0)]))
    with pytest.raises(AnnotationError, match=r"up\.weight.*share ranks \[0, 1\]"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@spmd(ranks=4)
def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    mesh, first = mesh_of(2, 2), dist.get_rank() == 0
    model, dims = _distribute(made(Net), mesh), Dims(shard="dp")
    with pytest.raises(AnnotationError if first else RanksDisagreeError, match="prefetch must be"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, prefetch=-1 if first else 1)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
