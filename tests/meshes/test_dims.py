"""Data-parallel dimensions of a larger mesh, by name; and those of hosts, which torchrun tells."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable import fully_shard, replicate
from composable.fsdp2 import fully_shard as fsdp2_face
from tests.helpers.refusals import refused
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    MLP,
    assert_trains_as_one_process,
    made,
    mesh_of,
    parallelize_mlp,
)


class Dims(NamedTuple):
    """As torch's `DataParallelMeshDims`, which older versions do not have."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def _annotate(model: nn.Module, verb: Any = fully_shard, **options: Any) -> None:
    verb(model, **options)


@spmd(ranks=4)
def test_dimensions_of_one_role_are_flattened() -> None:
    mesh = mesh_of(2, 2, names=("dp", "cp"))
    for verb, dims in (
        (fully_shard, Dims(("dp", "cp"))),
        (replicate, Dims(replicate=("dp", "cp"))),
    ):
        annotate = partial(_annotate, verb=verb, mesh=mesh, dp_mesh_dims=dims)
        model = assert_trains_as_one_process(MLP, annotate, mesh, optimizer="AdamW")
    assert not isinstance(model.up.weight, DTensor)
    other = fully_shard(made(MLP), mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))
    assert other.up.weight.device_mesh is mesh["dp", "cp"]._flatten("dp_cp")


@spmd(ranks=4)
def test_shards_and_replicas_are_named_whatever_their_order() -> None:
    mesh = mesh_of(2, 2, names=("inner", "outer"))
    dims = Dims("inner", "outer")
    for verb in (fully_shard, fsdp2_face):
        annotate = partial(_annotate, verb=verb, mesh=mesh, dp_mesh_dims=dims)
        model = assert_trains_as_one_process(MLP, annotate, mesh)
        weight = model.up.weight
        assert isinstance(weight, DTensor)
        assert weight.placements == (Replicate(), Shard(0))
        assert weight.device_mesh.mesh_dim_names == ("outer", "inner")
        assert weight.device_mesh.mesh.tolist() == [[0, 2], [1, 3]]
    # FSDP2 shards over the second dimension of two
    theirs = fsdp2_face(made(MLP), mesh=mesh).up.weight
    assert (theirs.placements, theirs.device_mesh) == ((Replicate(), Shard(0)), mesh)


@pytest.mark.in_full_only
@spmd(ranks=8)
def test_dimensions_that_are_not_named_are_tensor_parallel_or_left_alone() -> None:
    mesh = mesh_of(2, 2, 2, names=("dp", "cp", "tp"))

    def annotate(model: nn.Module) -> None:
        parallelize_mlp(model[0], mesh["tp"])  # type: ignore[index]
        fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))

    def kind() -> nn.Module:
        return nn.Sequential(MLP(), nn.Linear(6, 6))

    dp = mesh["dp", "cp"]._flatten("dp_cp")
    model = assert_trains_as_one_process(kind, annotate, dp)
    up, last = model[0].up.weight, model[1].weight  # type: ignore[index]
    assert up.device_mesh.mesh_dim_names == ("tp", "dp_cp")
    assert last.device_mesh is dp


@spmd(ranks=4)
def test_hosts_shard_inside_and_replicate_across() -> None:
    rank = dist.get_rank()
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        model = made(MLP)
        mesh: DeviceMesh = fully_shard(model, mesh="hybrid").up.weight.device_mesh
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        annotate = partial(_annotate, mesh="hybrid")
        again = assert_trains_as_one_process(MLP, annotate, mesh)
        assert again.up.weight.device_mesh is mesh
        plain = made(MLP)
        said = refused(plain, lambda: replicate(plain, mesh="hybrid"))
        assert "expected a DeviceMesh" in said
    with (
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": ""}),
        patch("socket.gethostname", lambda: f"host {rank // 2}"),
    ):
        assert fully_shard(made(MLP), mesh="hybrid").up.weight.device_mesh is mesh
    for local in ("", "3", "2" if rank else "4", "x"):
        with (
            patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local}),
            patch("socket.gethostname", lambda: f"host {rank % 2}"),
        ):
            model = made(MLP)
            said = refused(model, lambda: fully_shard(model, mesh="hybrid"))  # noqa: B023
            assert "it must be one divisor of 4 on all ranks" in said
