"""Weights that hold several are cut part by part over tensor-parallel ranks (torch's
`_StridedShard`, transformers' `packed_colwise`): what is saved, loaded, shown and edited of them.
"""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from composable import (
    clip_grad_norm_,
    export,
    full_state_dict,
    fully_shard,
    load,
    remove,
    replicate,
    summon_full_params,
)
from composable.tensors import cut_along
from composable.torch_private import cut_by
from tests.helpers.compare import full
from tests.helpers.world import spmd
from tests.tensor_parallel.models import OPTIMIZERS, assert_same_parameters, mesh_of

WIDTH = 6
# "unable to be interpreted into a corresponding shard_order"
pytestmark = pytest.mark.skipif(
    torch.__version__.startswith(("2.11", "2.12")), reason="operators of torch 2.11 refuse them"
)


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.group = mesh.get_group()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient := gradient.clone(), group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        dist.all_reduce(x := x.clone(), group=mesh.get_group())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Gated(nn.Module):
    """The gate and the up projection in one weight, stacked for each of the experts, and a bias."""

    def __init__(self, hidden: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(2 * hidden) / 3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, hidden) / 3)
        self.tp: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        up, bias, down = (
            each.to_local() if isinstance(each, DTensor) else each
            for each in (self.up, self.bias, self.down)
        )
        if self.tp is not None:
            x = _SumOfGradients.apply(x, self.tp)
        gate, value = (torch.einsum("bi,eoi->beo", x, up) + bias).chunk(2, dim=-1)
        y = torch.einsum("beo,eio->bi", gate.sigmoid() * value, down)
        return y if self.tp is None else _Sum.apply(y, self.tp)


def _cut(model: nn.Module, tp: DeviceMesh) -> None:
    placements = {
        "up": _StridedShard(1, split_factor=2),
        "bias": _StridedShard(0, split_factor=2),
        "down": Shard(2),
    }
    for module in model.modules():
        if isinstance(module, Gated):
            module.tp = tp
            for name, placement in placements.items():
                whole = module.get_parameter(name).detach()
                distributed = distribute_tensor(whole, tp, [placement], src_data_rank=None)
                setattr(module, name, nn.Parameter(distributed))


def _made(hidden: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(hidden), Gated(hidden)).double()


def _train(model: nn.Module, rank: int, ranks: int, steps: int = 3) -> None:
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randn(2 * ranks, WIDTH, generator=generator, dtype=torch.float64)
        rows = batch if rank < 0 else batch[2 * rank : 2 * rank + 2]
        model(rows).square().mean().backward()
        clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


_PLANS: dict[str, Any] = {
    "rows": partial(fully_shard, policy={Gated}),
    "the dimension that tp cuts": partial(
        fully_shard,
        policy={Gated},
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0),
    ),
    "columns": partial(fully_shard, policy={Gated}, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    "replicate": replicate,
}


def _annotated(plan: str, shape: tuple[int, ...], hidden: int = 8, seed: int = 0) -> Any:
    mesh, model = mesh_of(*shape), _made(hidden, seed)
    _cut(model, mesh["tp"])
    _PLANS[plan](model, mesh=mesh["dp"])
    return model, mesh["dp"].get_local_rank(), mesh["dp"].size()


@pytest.mark.parametrize("plan", _PLANS)
@pytest.mark.parametrize("shape", [(2, 2, 8), (2, 2, 7), (1, 4, 10), (4, 1, 8)])
@spmd(ranks=4)
def test_they_train_as_one_process(plan: str, shape: tuple[int, int, int]) -> None:
    # 7: a rank of each part has fewer rows than the other
    model, replica, replicas = _annotated(plan, shape[:2], shape[2])
    alone = _made(shape[2])
    _train(model, replica, replicas)
    _train(alone, -1, replicas)
    assert_same_parameters(model, alone)


@pytest.mark.parametrize("plan", _PLANS)
@spmd(ranks=2)
def test_they_train_on_two_ranks(plan: str) -> None:
    model, replica, replicas = _annotated(plan, (1, 2))
    alone = _made()
    _train(model, replica, replicas)
    _train(alone, -1, replicas)
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_they_train_beside_replicas() -> None:
    mesh, model, alone = mesh_of(2, 1, 2, names=("replicate", "shard", "tp")), _made(), _made()
    _cut(model, mesh["tp"])
    fully_shard(model, policy={Gated}, mesh=mesh["replicate", "shard"])
    _train(model, mesh["replicate"].get_local_rank(), 2)
    _train(alone, -1, 2)
    assert_same_parameters(model, alone)


def _folder() -> Path:
    reported = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(reported)
    assert reported[0] is not None
    return Path(reported[0])


def _assert_same(found: Any, expected: Any) -> None:
    whole = {name: full(tensor).detach() for name, tensor in dict(found).items()}
    torch.testing.assert_close(whole, dict(expected), rtol=0, atol=0)


_SHARDED = [plan for plan in _PLANS if plan != "replicate"]


@pytest.mark.parametrize("plan", _SHARDED)
@spmd(ranks=4)
def test_whole_values_are_saved_and_loaded(plan: str) -> None:
    model, *_ = _annotated(plan, (2, 2), 7)
    expected = _made(7).state_dict()
    assert model[1].up.placements[0] == _StridedShard(1, split_factor=2)
    _assert_same(model.state_dict(), expected)
    _assert_same(full_state_dict(model, rank0_only=False), expected)
    folder = _folder()
    export(model, folder / "out")
    dist.barrier()
    _assert_same(load_file(folder / "out/model.safetensors"), expected)
    other, *_ = _annotated(plan, (2, 2), 7, seed=1)
    for assign in (False, True):
        wanted = _made(7, seed=2 + assign).state_dict()
        other.load_state_dict(wanted, assign=assign)
        _assert_same(other.state_dict(), wanted)
    other.load_state_dict(model.state_dict())
    _assert_same(other.state_dict(), expected)


@spmd(ranks=4)
def test_a_folder_is_read() -> None:
    mesh, folder, expected = mesh_of(2, 2), _folder(), _made(7, seed=3).state_dict()
    if dist.get_rank() == 0:
        save_file(dict(expected), folder / "model.safetensors")
    dist.barrier()
    model = _made(7)
    _cut(model, mesh["tp"])
    fully_shard(model, policy={Gated}, mesh=mesh["dp"])
    load(model, folder)
    _assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("plan", _PLANS)
@spmd(ranks=4)
def test_they_are_shown_edited_and_given_back(plan: str) -> None:
    model, *_ = _annotated(plan, (2, 2))
    with summon_full_params(model):
        up = model[1].up
        assert (up.device_mesh.mesh_dim_names, up.placements) == (
            ("tp",),
            (_StridedShard(1, split_factor=2),),
        )
        with torch.no_grad():
            up.to_local().mul_(2)
    expected = _made()
    with torch.no_grad():
        expected[1].up.mul_(2)  # type: ignore[operator, union-attr]
    _assert_same(model.state_dict(), expected.state_dict())
    copied = copy.deepcopy(model)
    remove(model, replicate if plan == "replicate" else fully_shard)
    assert model[1].up.placements == (_StridedShard(1, split_factor=2),)
    for each in (model, copied):
        _assert_same(each.state_dict(), expected.state_dict())


@pytest.mark.parametrize("size", [1, 7, 8, 11])
@spmd(ranks=4)
def test_a_whole_is_cut_as_torch_cuts_it(size: int) -> None:
    mesh = mesh_of(1, 4)["tp"]
    whole, rank = torch.arange(float(3 * size)).view(3, size), mesh.get_local_rank()
    for placement in (Shard(1), _StridedShard(1, split_factor=2), _StridedShard(1, split_factor=3)):
        expected = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        found = cut_by(placement, partial(cut_along, ranks=4, rank=rank), whole)
        torch.testing.assert_close(found, expected.to_local(), rtol=0, atol=0)
