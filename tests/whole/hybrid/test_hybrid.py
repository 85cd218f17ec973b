"""Hybrid sharding: shards within a replica, and replicas that stay the same, on meshes of every
shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable import checkpoint, fully_shard, replicate
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from tests.helpers.battery import BATTERY, Case
from tests.helpers.communicators import LastMoment, Log, Recording, Slow, all_ordered
from tests.helpers.compare import assert_mean_gradients, assert_same_training
from tests.helpers.schemes import outermost_units_of
from tests.helpers.world import Pool, current_device, need_devices, spmd

Annotate = Callable[[nn.Module, Case], None]


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(current_device().type, shape, mesh_dim_names=names)


# --- parity -------------------------------------------------------------------------------------


def _by_policy(mesh: DeviceMesh, **options: Any) -> Annotate:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), mesh=mesh, **options)

    return annotate


def _other_mesh_around_hybrid(mesh: DeviceMesh, around: DeviceMesh | None = None) -> Annotate:
    """Every other unit is on one mesh, the rest on another one, or sharded over all ranks."""

    def annotate(model: nn.Module, case: Case) -> None:
        for unit in outermost_units_of(model, case)[::2]:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, policy=set(case.units), mesh=around)

    return annotate


def _hybrid_around_replicated(mesh: DeviceMesh) -> Annotate:
    def annotate(model: nn.Module, case: Case) -> None:
        for unit in outermost_units_of(model, case)[::2]:
            replicate(unit)
        for unit in outermost_units_of(model, case)[1::2]:
            checkpoint(unit)
        fully_shard(model, mesh=mesh, policy=set(case.units))

    return annotate


def _ways_to_annotate() -> list[Annotate]:
    """By the number of ranks: every shape, every way to name it, and every way to reshard.
    Generated programs mix these.
    """
    if dist.get_world_size() == 2:
        flat = [
            _by_policy(_mesh(*shape), reshard_after_forward=after)
            for shape in ((1, 2), (2, 1))
            for after in (None, True, False, 1)
        ]
        return [
            *flat,
            _other_mesh_around_hybrid(_mesh(2, 1)),
            _other_mesh_around_hybrid(_mesh(1, 2)),
        ]
    return [
        _by_policy(_mesh(2, 2)),
        _by_policy(_mesh(2, 2), reshard_after_forward=True),
        _by_policy(_mesh(2, 2, names=("dp_shard", "dp_replicate")), reshard_after_forward=False),
        _by_policy(_mesh(2, 2, names=("replicate", "shard")), reshard_after_forward=2),
        _by_policy(_mesh(4, 1, names=("replicate", "shard"))),
        _by_policy(_mesh(1, 4), reshard_after_forward=2),
        _other_mesh_around_hybrid(_mesh(2, 2)),
        _other_mesh_around_hybrid(_mesh(2, 2, names=("shard", "replicate"))),
        _other_mesh_around_hybrid(_mesh(2, 2, names=("shard", "replicate")), _mesh(2, 2)),
        _hybrid_around_replicated(_mesh(2, 2)),
    ]


_CASES: Final = (
    "transformer with tied embedding",
    "unused units and parameters",
    "a unit used several times",
)


@spmd(ranks=[2, 4])
def test_it_trains_as_one_process() -> None:
    for annotate in _ways_to_annotate():
        for case in _CASES:
            assert_same_training(BATTERY[case], annotate)


_WRAPPERS: Final[dict[str, Callable[[Comm], Comm]]] = {
    "late on one rank": partial(Slow, rank=0, seconds=0.002),
    "the backend's own collectives": all_ordered,
    "at the last moment": LastMoment,
}


@pytest.mark.parametrize("how", _WRAPPERS)
@spmd(ranks=4)
def test_it_does_not_depend_on_when_collectives_arrive_or_which_ones_are_launched(how: str) -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        with comms_wrapped_by(_WRAPPERS[how]):
            _other_mesh_around_hybrid(mesh)(model, case)

    mesh = _mesh(2, 2)
    for case in _CASES:
        assert_same_training(BATTERY[case], annotate)


# --- launch points ------------------------------------------------------------------------------


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Branches(nn.Module):
    """Blocks and heads; each rank has a head of its own, and nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(6, 6) for _ in range(5)])
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(dist.get_world_size() + 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.heads[dist.get_rank()](self.blocks(x))
        return result


def _train_branches(*shape: int, ordered: bool) -> list[str]:
    """The launches of a backward in which ranks use different parameters; gradients are those of
    plain models.
    """
    torch.manual_seed(0)
    plain = Branches().to(current_device())
    model, log = copy.deepcopy(plain), Log()
    with ExitStack() as stack:
        if ordered:
            stack.enter_context(comms_wrapped_by(all_ordered))
        stack.enter_context(comms_wrapped_by(lambda inner: Recording(inner, log)))
        fully_shard(model, policy={Block}, mesh=_mesh(*shape))
    for step in range(2):
        log.events.clear()
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank())).to(
            current_device()
        )
        for each in (plain, model):
            each(x).square().sum().backward()
        assert_mean_gradients(plain, model, step, rtol=1.3e-6, atol=1e-5)
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert missing == ["heads.4.weight", "heads.4.bias"], step
    return log.labels()


@pytest.mark.parametrize("ordered", [False, True], ids=["pairs", "collectives"])
def test_launches_do_not_depend_on_which_gradients_a_rank_has(
    pool: Pool, ordered: bool, device: str
) -> None:
    need_devices(device, 4)
    logs = pool.run(4, _train_branches, 2, 2, ordered=ordered, device=device)
    assert logs == [logs[0]] * 4
    sums = [label for label in logs[0] if "reduction" in label]
    first, second = (
        "gradient reduction of unit '{}'",
        "gradient reduction of unit '{}' over replicas",
    )
    units = ["blocks.4", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "(root)"]
    # The second stage of a unit comes when there is no space for its first one any more, and before
    # any other second stage.
    assert sums == [
        first.format(units[0]),
        first.format(units[1]),
        second.format(units[0]),
        first.format(units[2]),
        second.format(units[1]),
        first.format(units[3]),
        second.format(units[2]),
        first.format(units[4]),
        first.format(units[5]),
        *[second.format(unit) for unit in units[3:]],
    ]


@spmd(ranks=4)
def test_whole_replicas_tell_each_other_who_has_a_gradient() -> None:
    _train_branches(4, 1, ordered=False)
    _train_branches(1, 4, ordered=False)


# --- what a mesh means --------------------------------------------------------------------------


@spmd(ranks=4)
def test_parameters_are_replicated_over_one_dimension_and_cut_over_the_other() -> None:
    shard, same = Shard(0), Replicate()
    for mesh, expected in (
        (_mesh(2, 2), (same, shard)),
        (_mesh(2, 2), (same, shard)),  # equal to the one before, and another one
        (_mesh(2, 2, names=("replicate", "shard")), (same, shard)),
        (_mesh(2, 2, names=("DP_Shard", "hsdp_replicate")), (shard, same)),
        (_mesh(4, 1), (same, shard)),
        (
            _mesh(1, 2, 2, names=("pp", "dp_replicate", "dp_shard"))["dp_replicate", "dp_shard"],
            (same, shard),
        ),
    ):
        model = nn.Linear(4, 4).to(current_device())
        model.scale = nn.Parameter(torch.ones((), device=current_device()))
        fully_shard(model, mesh=mesh, sync_module_states="broadcast")
        assert isinstance(model.weight, DTensor)
        assert model.weight.placements == expected
        assert model.weight.device_mesh is mesh
        assert model.weight.to_local().shape[0] == 4 // mesh.size(expected.index(shard))
        assert model.scale.placements == (same, same)  # type: ignore[union-attr]
