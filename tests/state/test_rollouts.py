"""Ranks that hold other shards read mesh, placements and local shards of `named_parameters()`, and
get their parts without a whole tensor anywhere. What is read is the contract; the receiver is
`examples/rollouts.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable import MixedPrecisionPolicy, fully_shard, replicate
from composable.comm import observe_launches
from examples.rollouts import Block, local, parts_in, transfer
from tests.helpers.compare import all_full
from tests.helpers.world import current_device, spmd

TP: Final = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(32, 5)).to(current_device())


def _hybrid(model: nn.Sequential, mesh: DeviceMesh) -> None:
    fully_shard(model, policy={Block}, mesh=init_device_mesh(mesh.device_type, (2, 2)))


def _sharded_over_tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> None:
    mesh = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for block in (model[0], model[1]):
        parallelize_module(block, mesh["tp"], TP)
    fully_shard(model, policy={Block}, mesh=mesh["dp"])


LOW: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
LAST: Final = {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}
ALL: Final = (0, 1, 2, 3)
# How a model is annotated, and over which ranks.
SOURCES: Final[dict[str, tuple[Sequence[int], Callable[[nn.Sequential, DeviceMesh], Any]]]] = {
    "shards": (ALL, lambda model, mesh: fully_shard(model, policy={Block}, mesh=mesh)),
    "last dimension": (ALL, lambda model, _: fully_shard(model, policy={Block}, **LAST)),
    "in bf16": (ALL, lambda model, _: fully_shard(model, policy={Block}, mp_policy=LOW)),
    "hybrid": (ALL, _hybrid),
    "over tensor parallel": (ALL, _sharded_over_tensor_parallel),
    "replicate": (ALL, lambda model, _: replicate(model)),
    "on two ranks": ((0, 1), lambda model, mesh: fully_shard(model, mesh=mesh)),
}
TARGETS: Final[dict[str, Sequence[int]]] = {
    "tensor parallel": ALL,
    "tensor parallel on two ranks": (2, 3),
    "tensor parallel on three ranks": (1, 2, 3),
    "one rank": (3,),
}


def make_meshes() -> dict[Sequence[int], DeviceMesh]:
    """All of them on all ranks: groups are made together."""
    members = dict.fromkeys([*(ranks for ranks, _ in SOURCES.values()), *TARGETS.values()])
    return {ranks: DeviceMesh(current_device().type, [*ranks]) for ranks in members}


def make_target(mesh: DeviceMesh) -> nn.Sequential:
    model = make_model(1).to(torch.bfloat16 if mesh.size() == 3 else torch.float32)
    if mesh.size() > 1:
        for block in (model[0], model[1]):
            parallelize_module(block, mesh, TP)
    return model


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that gets memory of its own."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        storages = {
            each.untyped_storage().data_ptr()
            for each in pytree.tree_leaves((args, kwargs))
            if isinstance(each, Tensor) and not isinstance(each, DTensor)
        }
        for each in pytree.tree_leaves(out):
            if (
                isinstance(each, Tensor)
                and not isinstance(each, DTensor)
                and each.untyped_storage().data_ptr() not in storages
            ):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.itemsize)
        return out


@spmd(ranks=4)
def test_ranks_with_other_shards_get_their_parts_and_nothing_is_gathered() -> None:
    rank, meshes = dist.get_rank(), make_meshes()
    whole = dict(make_model(0).named_parameters())
    weights = {name for name, parameter in whole.items() if parameter.numel() > 2000}
    assert len(weights) == 4
    for (source, (trainers, annotate)), (wanted, receivers) in itertools.product(
        SOURCES.items(), TARGETS.items()
    ):
        model = target = None
        if rank in trainers:
            model = make_model(0)
            annotate(model, meshes[trainers])
        if rank in receivers:
            target = make_target(meshes[receivers])
        launched: list[object] = []
        end = observe_launches(launched=lambda *each, launched=launched: launched.append(each))
        with Largest() as largest:
            transfer(model, target, [*trainers], [*receivers])
        end()
        case = (source, wanted)
        assert launched == [], case
        if case != ("replicate", "one rank"):  # who has all of it sends all of it
            assert largest.elements <= 32 * 66 // 2, case
        if target is None:
            continue
        for name, parameter in target.named_parameters():
            part = tuple(slice(*ends) for ends in parts_in(parameter, receivers)[rank])
            expected = whole[name].detach()[part].to(parameter.dtype)
            assert torch.equal(local(parameter), expected), (*case, name)


@spmd(ranks=4)
def test_parts_are_what_local_shards_hold_also_behind_steps() -> None:
    meshes = make_meshes()
    for trainers, annotate in SOURCES.values():
        if dist.get_rank() not in trainers:
            continue
        model = make_model(0)
        annotate(model, meshes[trainers])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 32, device=current_device())).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters = dict(model.named_parameters())
        for parameter, full in zip(
            parameters.values(), all_full([*parameters.values()]), strict=True
        ):
            part = tuple(slice(*e) for e in parts_in(parameter, trainers)[dist.get_rank()])
            assert torch.equal(local(parameter), full[part])
