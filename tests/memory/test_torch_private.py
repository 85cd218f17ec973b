"""Private parts of torch that no test of their users watches: transforms, and the meshes of new
DTensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from composable.torch_private import (
    dtensor_like,
    innermost,
    is_transformed,
    local_of,
    outside_transforms,
    parameter_around,
    wrap,
)
from tests.helpers.world import spmd


def test_transforms_are_noticed_and_left() -> None:
    buffer = torch.zeros(2)

    @outside_transforms
    def write() -> bool:
        buffer.fill_(1)
        return is_transformed()

    def function(x: Tensor) -> Tensor:
        assert is_transformed()
        assert not write()
        assert type(innermost(x)) is Tensor
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    assert not is_transformed()
    assert buffer.tolist() == [1, 1]


@spmd(ranks=2)
def test_dtensors_and_parameters_keep_the_mesh_of_the_tensor_that_they_are_made_like() -> None:
    mesh = init_device_mesh("cpu", (2,))
    like = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
    with torch.device("meta"), torch.inference_mode():
        made = dtensor_like(torch.ones(2, 3), like)
    local = torch.arange(8.0)[2:].view(2, 3)
    made = dtensor_like(local, like)
    assert local_of(made) is local
    assert (made.shape, made.placements, made.storage_offset()) == (like.shape, like.placements, 0)
    assert made.device_mesh is mesh
    assert parameter_around(made, requires_grad=True).device_mesh is mesh
    whole = torch.ones(4, 3)
    meta = torch.device("meta")
    made = wrap(whole, mesh, [Replicate()], whole.shape, whole.stride(), meta)
    assert made.device.type == "meta"
