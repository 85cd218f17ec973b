"""Clipping where slices of a mesh hold other experts: all ranks count all of them, each once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import clip_grad_norm_, fully_shard, no_sync, reduce_gradients, remove, replicate
from composable.errors import ClippingError, NonFiniteError
from tests.helpers.compare import full
from tests.helpers.mixtures import (
    NESTED,
    SCHEMES,
    agree,
    all_gradients,
    batch,
    mixture,
    norm_of,
    sharded,
)
from tests.helpers.world import current_device, spmd
from tests.meshes import test_dims

# torch 2.11 has none
DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", test_dims.Dims)
ORDERS: Final = (1.0, 2.0, 3.0, math.inf)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_norm_is_that_of_all_experts(scheme: str) -> None:
    for order in ORDERS:
        model, mesh = mixture(SCHEMES[scheme])
        model(batch()).square().mean().backward()
        before = all_gradients(model, mesh)
        expected = norm_of(before, order)
        norm = clip_grad_norm_(model, expected.item() / 4, order)
        agree(norm)
        torch.testing.assert_close(norm.cpu(), expected.float(), rtol=1e-5, atol=0)
        for now, then in zip(all_gradients(model, mesh), before, strict=True):
            torch.testing.assert_close(now, then / 4, rtol=1e-4, atol=1e-7)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
def test_a_slice_whose_expert_had_nothing_to_do_takes_part(scheme: str) -> None:
    model, mesh = mixture(NESTED[scheme])
    for _ in range(2):
        model.zero_grad()
        model(batch(), expert=mesh.get_local_rank("experts") == 1).square().mean().backward()
    expected = norm_of(all_gradients(model, mesh), 2.0)
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    agree(norm)
    torch.testing.assert_close(norm.cpu(), expected.float(), rtol=1e-5, atol=0)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_in_one_expert_is_refused_by_all(scheme: str) -> None:
    model, mesh = mixture(SCHEMES[scheme])
    model(batch()).square().mean().backward()
    if mesh.get_local_rank("experts") == 1:
        assert model.expert.up.weight.grad is not None
        model.expert.up.weight.grad.mul_(torch.nan)
    with pytest.raises(NonFiniteError, match="norm of order 2 over all gradients is nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
def test_experts_are_clipped_by_themselves(scheme: str) -> None:
    """Their norm is that of the experts of all slices, also where one slice's got no gradient."""
    for works in (False, True):
        model, mesh = mixture(NESTED[scheme])
        model(
            batch(), expert=works or mesh.get_local_rank("experts") == 1
        ).square().mean().backward()
        experts = all_gradients(model, mesh)[4:]
        norm = clip_grad_norm_(list(model.expert.parameters()), 1e-3)
        agree(norm)
        torch.testing.assert_close(norm.cpu(), norm_of(experts, 2.0).float(), rtol=1e-5, atol=0)


@spmd(ranks=4)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_a_model_of_its_own_on_the_ranks_of_an_expert_is_no_part(
    verb: Callable[..., nn.Module],
) -> None:
    """Also if only one slice has it, and clips and scales it, while a mixture on the same meshes
    lives.
    """
    model, mesh = mixture(sharded)
    model(batch()).square().mean().backward()
    if mesh.get_local_rank("experts") == 0:
        torch.manual_seed(0)
        plain, other = (nn.Linear(7, 3).to(current_device()) for _ in range(2))
        other.load_state_dict(plain.state_dict())
        verb(other, mesh=mesh["copies"])
        x = torch.ones(2, 7, device=current_device())
        scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        plain(x).square().sum().backward()
        scaler.scale(other(x).square().sum()).backward()
        scaler.unscale_(optimizer)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(other.parameters(), 0.1), expected)
        scaler.step(optimizer)
    expected = norm_of(all_gradients(model, mesh), 2.0)
    torch.testing.assert_close(
        clip_grad_norm_(model.parameters(), 0.1).cpu(), expected.float(), rtol=1e-5, atol=0
    )


@spmd(ranks=4)
def test_layers_beside_tensor_parallel_ones_count_once() -> None:
    """What is sharded over one dimension of a mesh, and alike along the other, is no part of
    anything.
    """
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)).to(current_device())
    x = torch.ones(2, 6, device=current_device()) + torch.arange(6, device=current_device())
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)).to(current_device())
    model.load_state_dict(plain.state_dict())
    plain(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    parallelize_module(model[1], mesh["tp"], ColwiseParallel())
    fully_shard(model[0], mesh=mesh["dp"])
    model(x).square().sum().backward()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), expected)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_what_was_an_expert_is_none_when_the_annotation_around_it_was_removed(
    verb: Callable[..., nn.Module],
) -> None:
    """Each slice goes on with a model of its own."""
    model, mesh = mixture(
        NESTED["shards in shards" if verb is fully_shard else "a replica in a replica"]
    )
    if verb is fully_shard:
        remove(model.head, verb)
    remove(model, verb)
    verb(model, mesh=mesh["copies"])
    model(batch()).square().mean().backward()
    expected = norm_of([full(p.grad).cpu() for p in model.parameters() if p.grad is not None], 2.0)
    torch.testing.assert_close(
        clip_grad_norm_(model.parameters(), 0.1).cpu(), expected.float(), rtol=1e-5, atol=0
    )


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
def test_accumulated_gradients_are_refused_by_name_and_clipped_when_they_were_reduced(
    scheme: str,
) -> None:
    model, mesh = mixture(NESTED[scheme])
    with no_sync(model):
        model(batch()).square().mean().backward()
    with pytest.raises(
        ClippingError, match=r"no_sync.*call reduce_gradients\(model\), on all ranks"
    ):
        clip_grad_norm_(model.parameters(), 0.1)
    reduce_gradients(model)
    expected = norm_of(all_gradients(model, mesh), 2.0)
    torch.testing.assert_close(
        clip_grad_norm_(model.parameters(), 0.1).cpu(), expected.float(), rtol=1e-5, atol=0
    )


@spmd(ranks=4)
def test_a_parameter_on_other_ranks_has_no_norm_here() -> None:
    """Pipelines hold parameters of all stages, and train those of one."""
    mesh = DeviceMesh(current_device().type, [0, 1])
    elsewhere = nn.Parameter(
        distribute_tensor(torch.ones(4, device=current_device()), mesh, [Shard(0)])
    )
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(7, 3).to(current_device()))
    model(batch()).square().mean().backward()
    expected = norm_of([full(p.grad).cpu() for p in model.parameters() if p.grad is not None], 2.0)
    norm = clip_grad_norm_([*model.parameters(), elsewhere], 0.1)
    torch.testing.assert_close(norm.cpu(), expected.float(), rtol=1e-5, atol=0)


class _Distributed(nn.Module):
    """Weights of experts over `ep`, and a bias that its ranks share."""

    def __init__(self, ep: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.bias = nn.Parameter(torch.randn(4, 7, 7)), nn.Parameter(torch.randn(7))
        if ep is not None:
            self.up = nn.Parameter(distribute_tensor(self.up.detach(), ep, [Shard(0)]))
            self.bias = nn.Parameter(distribute_tensor(self.bias.detach(), ep, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, bias = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.bias))
        # each rank's experts have their own gradients, as do all of them in one process
        return (x @ up).square().sum() + (x + bias).square().sum()


@spmd(ranks=4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
@pytest.mark.parametrize("verb", [fully_shard, replicate])
@pytest.mark.parametrize("around", ["shards", "replicas", "both"])
def test_dtensors_of_experts_count_once_whatever_mesh_the_model_is_on(
    shape: tuple[int, int], verb: Callable[..., nn.Module], around: str
) -> None:
    mesh = init_device_mesh(current_device().type, shape, mesh_dim_names=("dp", "ep"))
    plain, model = (
        nn.Sequential(nn.LayerNorm(7), _Distributed(ep)).to(current_device())
        for ep in (None, mesh["ep"])
    )
    verb(model[1], mesh=mesh["dp"])
    if around == "replicas":
        replicate(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=("dp", "ep")))
    else:
        dims = {"shards": {"shard": ("dp", "ep")}, "both": {"shard": "ep", "replicate": "dp"}}
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims[around]))
    x = torch.arange(14.0, device=current_device()).view(2, 7).sin()
    for order in ORDERS:
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        # what is before the experts has gradients of this rank's experts, and of all in one process
        for ours, theirs in zip(model[0].parameters(), plain[0].parameters(), strict=True):
            theirs.grad = full(ours.grad)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, order)
        norm = clip_grad_norm_(model, 0.1, order)
        agree(norm)
        torch.testing.assert_close(norm, expected)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad)
