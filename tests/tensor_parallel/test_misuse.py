"""Tensor-parallel parameters that cannot be managed: one error on every rank, nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
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

from composable import CPUOffloadPolicy, fully_shard
from composable.api.checks import refuse_spread_offload
from composable.comm import comms_wrapped_by
from composable.contract.tree import managed_parameters
from composable.errors import AnnotationError, ForeignParameterError, MeshError, RanksDisagreeError
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    MLP,
    assert_same_parameters,
    batches,
    made,
    mesh_of,
    parallelize_mlp,
    train,
)


def _refused(
    model: nn.Module, error: type[Exception], match: str, verb: Any = fully_shard, **options: Any
) -> None:
    before = dict(model.named_parameters())
    with pytest.raises(error, match=match):
        verb(model, **options)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())


def _given(model: nn.Module, mesh: DeviceMesh, placements: list[Any]) -> None:
    weight = model.up.weight  # type: ignore[union-attr]
    local = torch.ones(4, 6, dtype=weight.dtype)
    spread = DTensor.from_local(local, mesh, placements, run_check=False)
    model.up.weight = nn.Parameter(spread)  # type: ignore[union-attr]


def _rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters()):
        spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(module, name, nn.Parameter(spread))


@spmd(ranks=4)
def test_meshes_that_overlap_are_refused() -> None:
    mesh = mesh_of(2, 2)
    for given in (None, mesh["tp"], init_device_mesh("cpu", (4,))):
        model = made(MLP)
        parallelize_mlp(model, mesh["tp"])
        _refused(model, AnnotationError, r"share ranks \[", mesh=given)
    model = made(MLP)
    parallelize_mlp(model, mesh["dp"])
    _refused(model, AnnotationError, r"share ranks \[", mesh=mesh["dp"])


@spmd(ranks=4)
def test_meshes_that_are_not_two_parts_of_one_are_refused() -> None:
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    unchecked = {"sync_module_states": "off"}  # ranks 0 and 3 have other parts
    groups = [dist.new_group(ranks) for ranks in ((0, 3), (1, 2))]
    other = DeviceMesh.from_group(groups[rank in (1, 2)], "cpu")
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    _refused(model, MeshError, "are not two parts of one mesh", mesh=other, **unchecked)
    fully_shard(model, mesh=mesh["dp"])
    train(model, batches(model, mesh["dp"].get_local_rank(), 2, 1))


@spmd(ranks=4)
def test_placements_that_are_no_cut_are_refused() -> None:
    mesh = mesh_of(2, 2)
    model = made(MLP)
    _given(model, mesh["tp"], [Partial()])
    _refused(model, AnnotationError, "is cut or Replicate over each dimension", mesh=mesh["dp"])
    model = made(MLP)
    model.up.weight = nn.Parameter(
        DTensor.from_local(
            torch.ones(6, 4, dtype=torch.float64).t(), mesh["tp"], [Shard(0)], run_check=False
        )
    )
    _refused(model, AnnotationError, "is not contiguous", mesh=mesh["dp"])
    model = made(MLP)
    _given(model, mesh["tp"], [Shard(0)])
    for placement, match in (
        (Shard(2), "which has 2 dimensions"),
        (_StridedShard(0, split_factor=2), "must return Shard or None, got _StridedShard"),
    ):
        options = {"shard_placement_fn": lambda p, given=placement: given if p.ndim > 1 else None}
        _refused(model, AnnotationError, match, mesh=mesh["dp"], **options)
    # A dimension that both cut may be of any size.
    model.up = nn.Linear(6, 1, dtype=torch.float64)
    distribute_module(model.up, mesh["tp"], _rows)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(0))
    assert model.up.weight.full_tensor().shape == (1, 6)  # type: ignore[operator]


@spmd(ranks=4)
def test_ranks_with_other_placements_are_refused_on_all_ranks() -> None:
    # names of its own: what torch keeps of this mesh is not the same on all ranks afterwards
    mesh = mesh_of(2, 2, names=("dp", "model"))
    model = made(MLP)
    _given(model, mesh["model"], [Replicate() if dist.get_rank() == 0 else Shard(0)])
    _refused(model, RanksDisagreeError, r"up\.weight|Replicate", mesh=mesh["dp"])
    _given(model, mesh["model"], [Replicate()])
    fully_shard(model, mesh=mesh["dp"])


@spmd(ranks=4)
def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    mesh = mesh_of(2, 2)
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    prefetch = -1 if dist.get_rank() == 0 else 1
    match = "prefetch must be" if dist.get_rank() == 0 else "failed, so no rank annotates"
    error: type[Exception] = AnnotationError if dist.get_rank() == 0 else RanksDisagreeError
    _refused(model, error, match, mesh=mesh["dp"], prefetch=prefetch)
    fully_shard(model, mesh=mesh["dp"])


@spmd(ranks=4)
def test_a_plain_parameter_in_place_of_a_tensor_parallel_one_is_refused() -> None:
    mesh = mesh_of(2, 2)
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    inputs = batches(model, mesh["dp"].get_local_rank(), 2, 1)
    train(model, inputs)
    kept = model.up.weight
    model.up.weight = nn.Parameter(torch.ones(8, 6, dtype=torch.float64))
    with pytest.raises(ForeignParameterError, match="is tensor parallel, and was replaced"):
        model(inputs[0])
    model.up.weight = kept
    train(model, inputs)


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11's redistribution looks for dimensions of the mesh in another order",
)
@spmd(ranks=2)
def test_offload_on_an_accelerator_is_refused_and_has_no_effect_on_hosts() -> None:
    mesh = mesh_of(1, 2)
    model, plain = made(MLP), made(MLP)
    parallelize_mlp(model, mesh["tp"])
    with pytest.raises(AnnotationError, match="is tensor parallel, and offload_policy"):
        refuse_spread_offload(managed_parameters([model]), torch.device("cuda"))
    refuse_spread_offload(managed_parameters([plain]), torch.device("cuda"))
    log = Log()
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        fully_shard(model, mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())
    train(model, batches(model, 0, 1, 1))
    train(plain, batches(plain, 0, 1, 1))
    assert_same_parameters(model, plain)
    assert not log.events  # over one data-parallel rank nothing is sent


@spmd(ranks=2)
def test_ignored_parameters_of_other_ranks_are_not_asked_for() -> None:
    mesh = mesh_of(1, 2)
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    if dist.get_rank() == 0:  # the other rank of the ignored parameters' mesh takes no part
        fully_shard(model, mesh=mesh["dp"], ignored_params="*")
