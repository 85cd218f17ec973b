"""Clipping and scaling where slices of a mesh hold other experts: all ranks count all of them, each once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import clip_grad_norm_, fully_shard, replicate
from composable.errors import NonFiniteError, OptimizerError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd

ORDERS: Final = (1.0, 2.0, 3.0, math.inf)


class Expert(nn.Module):
    """Its gradients are of another size on every slice; one parameter has no dimensions, and no rank a part of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(10 + number)
        self.up, self.scale = nn.Linear(5, 5), nn.Parameter(torch.tensor(2.0 + 3 * number))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.scale


class Mixture(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = nn.Linear(7, 5), nn.Linear(5, 3)
        self.expert = Expert(number)

    def forward(self, x: Tensor, *, expert: bool = True) -> Tensor:
        x = self.router(x)
        return self.head(x + self.expert(x) if expert else x)


def _sharded(model: Mixture, copies: DeviceMesh) -> None:
    fully_shard(model.expert, mesh=copies)
    fully_shard(model, policy={"head": {}})


def _shards_in_a_replica(model: Mixture, copies: DeviceMesh) -> None:
    fully_shard(model.expert, mesh=copies)
    replicate(model)


def _replica_in_shards(model: Mixture, copies: DeviceMesh) -> None:
    replicate(model.expert, mesh=copies)
    fully_shard(model, policy={"head": {}})


def _replicated(model: Mixture, copies: DeviceMesh) -> None:
    replicate(model.expert, mesh=copies)
    replicate(model)


def _side_by_side(model: Mixture, copies: DeviceMesh) -> None:
    fully_shard(model.router)
    fully_shard(model.head)
    fully_shard(model.expert, mesh=copies)


def _replicas_beside_shards(model: Mixture, copies: DeviceMesh) -> None:
    replicate(model.router)
    replicate(model.head)
    fully_shard(model.expert, mesh=copies)


Annotate = Callable[[Mixture, DeviceMesh], None]
NESTED: Final[dict[str, Annotate]] = {
    "shards in shards": _sharded,
    "shards in a replica": _shards_in_a_replica,
    "a replica in shards": _replica_in_shards,
    "a replica in a replica": _replicated,
}
SCHEMES: Final[dict[str, Annotate]] = {
    **NESTED,
    "shards side by side": _side_by_side,
    "replicas beside shards": _replicas_beside_shards,
}


def _mixture(annotate: Annotate) -> tuple[Mixture, DeviceMesh]:
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("experts", "copies"))
    model = Mixture(mesh.get_local_rank("experts")).to(current_device())
    annotate(model, mesh["copies"])
    return model, mesh


def _batch() -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(dist.get_rank())).to(current_device())


def _all_gradients(model: Mixture, mesh: DeviceMesh) -> list[Tensor]:
    """Of what all ranks share, and of all experts, each once."""
    mine = [full(p.grad).cpu() for p in model.expert.parameters() if p.grad is not None]
    of_all: list[Any] = [None] * mesh.size(0)
    dist.all_gather_object(of_all, mine, group=mesh.get_group("experts"))
    shared = [full(p.grad).cpu() for layer in (model.router, model.head) for p in layer.parameters() if p.grad is not None]
    return [*shared, *(gradient for each in of_all for gradient in each)]


def _norm(gradients: list[Tensor], order: float) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each.double(), order) for each in gradients]), order)


def _agree(norm: Tensor) -> None:
    """On the very bits: otherwise ranks scale shared gradients apart."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, full(norm).item())
    assert len(dict.fromkeys(of_all)) == 1, of_all


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_norm_is_that_of_all_experts(scheme: str) -> None:
    for order in ORDERS:
        model, mesh = _mixture(SCHEMES[scheme])
        model(_batch()).square().mean().backward()
        before = _all_gradients(model, mesh)
        expected = _norm(before, order)
        norm = clip_grad_norm_(model, expected.item() / 4, order)
        _agree(norm)
        torch.testing.assert_close(norm.cpu(), expected.float(), rtol=1e-5, atol=0)
        for now, then in zip(_all_gradients(model, mesh), before, strict=True):
            torch.testing.assert_close(now, then / 4, rtol=1e-4, atol=1e-7)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
@pytest.mark.parametrize("foreach", [None, False], ids=["at once", "one by one"])
def test_torchs_own_clipping_counts_all_experts(scheme: str, foreach: bool | None) -> None:
    for order in ORDERS:
        model, mesh = _mixture(NESTED[scheme])
        model(_batch()).square().mean().backward()
        before = _all_gradients(model, mesh)
        expected = _norm(before, order)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), expected.item() / 4, order, foreach=foreach)
        _agree(norm)
        torch.testing.assert_close(full(norm).cpu(), expected.float(), rtol=1e-5, atol=0)
        for now, then in zip(_all_gradients(model, mesh), before, strict=True):
            torch.testing.assert_close(now, then / 4, rtol=1e-4, atol=1e-7)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
def test_a_slice_whose_expert_had_nothing_to_do_takes_part(scheme: str) -> None:
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        model, mesh = _mixture(NESTED[scheme])
        model(_batch(), expert=mesh.get_local_rank("experts") == 1).square().mean().backward()
        model.zero_grad()
        model(_batch(), expert=mesh.get_local_rank("experts") == 1).square().mean().backward()
        expected = _norm(_all_gradients(model, mesh), 2.0)
        norm = clip(model.parameters(), 1e-3)
        _agree(norm)
        torch.testing.assert_close(full(norm).cpu(), expected.float(), rtol=1e-5, atol=0)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_in_one_expert_is_refused_by_all(scheme: str) -> None:
    model, mesh = _mixture(SCHEMES[scheme])
    model(_batch()).square().mean().backward()
    if mesh.get_local_rank("experts") == 1:
        assert model.expert.up.weight.grad is not None
        model.expert.up.weight.grad.mul_(torch.nan)
    with pytest.raises(NonFiniteError, match="norm of order 2 over all gradients is nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
@pytest.mark.parametrize("apart", [False, True], ids=["one optimizer", "one for experts"])
def test_a_step_that_one_expert_skips_is_skipped_by_all(scheme: str, apart: bool) -> None:
    model, mesh = _mixture(NESTED[scheme])
    shared = [*model.router.parameters(), *model.head.parameters()]
    lists = [shared, list(model.expert.parameters())] if apart else [list(model.parameters())]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in lists]
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    for bad in (0, 1, None):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(_batch()).square().mean()).backward()
        if mesh.get_local_rank("experts") == bad:
            assert model.expert.up.weight.grad is not None
            model.expert.up.weight.grad.mul_(torch.inf)
        before = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = {name: not torch.equal(before[name], full(parameter)) for name, parameter in model.named_parameters()}
        skipped = [name for name, each in moved.items() if not each]
        of_optimizer = [name for name in moved if not apart or name.startswith("expert.")]
        assert skipped == ([] if bad is None else of_optimizer)
        assert scaler.get_scale() == {0: 2.0, 1: 1.0, None: 1.0}[bad]


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_experts_are_clipped_by_themselves(scheme: str, clip: Callable[..., Tensor]) -> None:
    """Their norm is that of the experts of all slices, also where one slice's got no gradient."""
    for works in (False, True):
        model, mesh = _mixture(NESTED[scheme])
        model(_batch(), expert=works or mesh.get_local_rank("experts") == 1).square().mean().backward()
        experts = _all_gradients(model, mesh)[4:]
        norm = clip(list(model.expert.parameters()), 1e-3)
        _agree(norm)
        torch.testing.assert_close(full(norm).cpu(), _norm(experts, 2.0).float(), rtol=1e-5, atol=0)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
@pytest.mark.parametrize("apart", [False, True], ids=["one optimizer", "one for experts"])
def test_a_scaler_asks_all_slices_whatever_gradients_an_expert_has(scheme: str, apart: bool) -> None:
    """Of one slice, no gradients of the expert, which are in a dtype of their own; of another one, infinities."""
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("experts", "copies"))
    model = Mixture(mesh.get_local_rank("experts")).to(current_device())
    model.expert.bfloat16()
    model.forward = partial(_in_two_dtypes, model)  # type: ignore[method-assign]
    NESTED[scheme](model, mesh["copies"])
    shared = [*model.router.parameters(), *model.head.parameters()]
    lists = [shared, list(model.expert.parameters())] if apart else [list(model.parameters())]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in lists]
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    works = mesh.get_local_rank("experts") == 1
    scaler.scale(model(_batch(), expert=works).square().mean()).backward()
    if works:
        assert model.expert.up.weight.grad is not None
        model.expert.up.weight.grad.mul_(torch.inf)
    before = full(model.router.weight).clone()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(before, full(model.router.weight)) != apart


def _in_two_dtypes(model: Mixture, x: Tensor, *, expert: bool) -> Tensor:
    x = model.router(x)
    return model.head(x + model.expert(x.bfloat16()).float() if expert else x)


@spmd(ranks=[2, 4])
@pytest.mark.beyond_sim("to compare the scales, the host would have to wait")
def test_scales_that_have_drifted_apart_are_refused() -> None:
    """Nothing says that experts are parts of a model, if no annotated module contains them and their optimizer is their own."""
    model, mesh = _mixture(_side_by_side)
    shared = torch.optim.SGD([*model.router.parameters(), *model.head.parameters()], lr=0.1)
    experts = torch.optim.SGD(model.expert.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    for step in range(2):
        scaler.scale(model(_batch()).square().mean()).backward()
        if mesh.get_local_rank("experts") == 1:
            assert model.expert.up.weight.grad is not None
            model.expert.up.weight.grad.mul_(torch.inf)
        before = full(model.router.weight).clone()
        if step:
            with pytest.raises(OptimizerError, match="scaled their losses by different numbers, from 2 to 4"):
                scaler.step(shared)
            assert torch.equal(before, full(model.router.weight))
        else:
            scaler.step(shared)
            scaler.step(experts)
            scaler.update()


@spmd(ranks=4)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_a_model_of_its_own_on_the_ranks_of_an_expert_is_no_part(
    verb: Callable[..., nn.Module], clip: Callable[..., Tensor]
) -> None:
    """Also if only one slice has it, and clips and scales it, while a mixture on the same meshes lives."""
    mixture, mesh = _mixture(_sharded)
    mixture(_batch()).square().mean().backward()
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
        torch.testing.assert_close(full(clip(other.parameters(), 0.1)), expected)
        scaler.step(optimizer)
    expected = _norm(_all_gradients(mixture, mesh), 2.0)
    torch.testing.assert_close(full(clip(mixture.parameters(), 0.1)).cpu(), expected.float(), rtol=1e-5, atol=0)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
def test_the_norm_of_gradients_alone_counts_all_experts(scheme: str) -> None:
    """Torch is given no parameters then."""
    model, mesh = _mixture(NESTED[scheme])
    model(_batch()).square().mean().backward()
    expected = _norm(_all_gradients(model, mesh), 2.0)
    norm = full(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    _agree(norm)
    torch.testing.assert_close(norm.cpu(), expected.float(), rtol=1e-5, atol=0)


@spmd(ranks=4)
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_layers_beside_tensor_parallel_ones_count_once(clip: Callable[..., Tensor]) -> None:
    """What is sharded over one dimension of a mesh, and alike along the other, is no part of anything."""
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
    torch.testing.assert_close(full(clip(model.parameters(), 0.1)), expected)
