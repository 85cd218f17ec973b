"""Hybrid sharding: shards within a replica, and replicas that stay the same, on meshes of every shape."""

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

from composable import MixedPrecisionPolicy, checkpoint, fully_shard, replicate
from composable.comm import Comm, comms_wrapped_by
from composable.errors import RanksDisagreeError
from tests.helpers.battery import BATTERY, Case
from tests.helpers.communicators import LastMoment, Log, Recording, Slow, all_ordered
from tests.helpers.compare import assert_same_gradients, assert_same_training, averaged_gradients, full_gradients
from tests.helpers.schemes import outermost_units_of
from tests.helpers.world import Pool, current_device, need_devices, spmd

Annotate = Callable[[nn.Module, Case], None]


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(current_device().type, shape, mesh_dim_names=names)


# --- parity -----------------------------------------------------------------------------------------------------------


def _by_policy(mesh: DeviceMesh, **options: Any) -> Annotate:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), mesh=mesh, **options)

    return annotate


def _plain_around_hybrid(mesh: DeviceMesh, **options: Any) -> Annotate:
    """Every other unit is hybrid, the rest is sharded over all ranks."""

    def annotate(model: nn.Module, case: Case) -> None:
        for unit in outermost_units_of(model, case)[::2]:
            fully_shard(unit, mesh=mesh, **options)
        fully_shard(model, policy=set(case.units))

    return annotate


def _hybrid_around_replicated(mesh: DeviceMesh) -> Annotate:
    def annotate(model: nn.Module, case: Case) -> None:
        for unit in outermost_units_of(model, case)[::2]:
            replicate(unit)
        for unit in outermost_units_of(model, case)[1::2]:
            checkpoint(unit)
        fully_shard(model, mesh=mesh, policy=set(case.units))

    return annotate


def _ways_to_annotate() -> dict[str, Annotate]:
    """By the number of ranks: every shape, every way to name it, and every way to reshard."""
    if dist.get_world_size() == 2:
        found = {"1x2": _by_policy(_mesh(1, 2)), "2x1": _by_policy(_mesh(2, 1)), "mixed": _plain_around_hybrid(_mesh(2, 1))}
        for after in (True, False, 1):
            found[f"1x2, {after}"] = _by_policy(_mesh(1, 2), reshard_after_forward=after)
            found[f"2x1, {after}"] = _by_policy(_mesh(2, 1), reshard_after_forward=after)
            found[f"mixed, {after}"] = _plain_around_hybrid(_mesh(1, 2), reshard_after_forward=after)
        return found
    return {
        "2x2": _by_policy(_mesh(2, 2)),
        "freed": _by_policy(_mesh(2, 2), reshard_after_forward=True),
        "by name": _by_policy(_mesh(2, 2, names=("dp_shard", "dp_replicate")), reshard_after_forward=False),
        "regrouping": _by_policy(_mesh(2, 2, names=("replicate", "shard")), reshard_after_forward=2),
        "4x1": _by_policy(_mesh(4, 1, names=("replicate", "shard"))),
        "1x4": _by_policy(_mesh(1, 4), reshard_after_forward=2),
        "mixed": _plain_around_hybrid(_mesh(2, 2)),
        "mixed and freed": _plain_around_hybrid(_mesh(2, 2), reshard_after_forward=True),
        "mixed and kept": _plain_around_hybrid(_mesh(2, 2), reshard_after_forward=False),
        "mixed and regrouping": _plain_around_hybrid(_mesh(2, 2), reshard_after_forward=2),
        "with replicated units": _hybrid_around_replicated(_mesh(2, 2)),
    }


_CASES: Final = ("transformer with tied embedding", "unused units and parameters", "a unit used several times")


@spmd(ranks=[2, 4])
def test_it_trains_as_one_process() -> None:
    for annotate in _ways_to_annotate().values():
        for case in _CASES:
            assert_same_training(BATTERY[case], annotate)


_WRAPPERS: Final[dict[str, tuple[Callable[[Comm], Comm], ...]]] = {
    "late on one rank": (partial(Slow, rank=0, seconds=0.002),),
    "the backend's own collectives": (all_ordered,),
    "at the last moment": (LastMoment,),
}


@pytest.mark.parametrize("how", _WRAPPERS)
@spmd(ranks=4)
def test_it_does_not_depend_on_when_collectives_arrive_or_which_ones_are_launched(how: str) -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        with ExitStack() as stack:
            for wrapper in _WRAPPERS[how]:
                stack.enter_context(comms_wrapped_by(wrapper))
            _plain_around_hybrid(mesh)(model, case)

    mesh = _mesh(2, 2)
    for case in _CASES:
        assert_same_training(BATTERY[case], annotate)


# --- launch points ----------------------------------------------------------------------------------------------------


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
    """The launches of a backward in which ranks use different parameters; gradients are those of plain models."""
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
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank())).to(current_device())
        for each in (plain, model):
            each(x).square().sum().backward()
        found, expected = full_gradients(model), averaged_gradients(plain)
        assert [name for name, gradient in found.items() if gradient is None] == ["heads.4.weight", "heads.4.bias"], step
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], msg=f"step {step}, {name}")
    return log.labels()


@pytest.mark.parametrize("ordered", [False, True], ids=["pairs", "collectives"])
def test_launches_do_not_depend_on_which_gradients_a_rank_has(pool: Pool, ordered: bool, device: str) -> None:
    need_devices(device, 4)
    logs = pool.run(4, _train_branches, 2, 2, ordered=ordered, device=device)
    assert logs == [logs[0]] * 4
    sums = [label for label in logs[0] if "reduction" in label]
    first, second = "gradient reduction of unit '{}'", "gradient reduction of unit '{}' over replicas"
    units = ["blocks.4", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "(root)"]
    # The second hop of a unit comes when there is no room for its first one any more, and before any other second hop.
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


# --- uses of a program ------------------------------------------------------------------------------------------------


def _two_backwards(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    model(2 * x).square().mean().backward()


def _late_gradients(model: nn.Module, x: Tensor) -> None:
    """Several forwards whose backwards come in another order."""
    losses = [model(scale * x).square().mean() for scale in (1, 2, 3)]
    for loss in losses:
        loss.backward()


@spmd(ranks=4)
def test_gradients_accumulate_over_backwards() -> None:
    for program in (_two_backwards, _late_gradients):
        assert_same_gradients(BATTERY["a unit used several times"], _by_policy(_mesh(2, 2)), program)


# --- mixed precision --------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    """Gradients are what it is called with: of a weight that travels by itself, and of one that shares a message."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(512, 512))
        self.small = nn.Parameter(torch.zeros(7, 3))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.large * gradient).sum() + (self.small * gradient).sum()


@spmd(ranks=4)
def test_both_hops_sum_in_the_dtype_that_the_policy_says() -> None:
    mine = 1 + dist.get_rank() * 2.0**-7  # of which bfloat16 knows each, but not their mean
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for shape in ((2, 2), (4, 1), (1, 4)):
        model = fully_shard(Weights().to(current_device()), mesh=_mesh(*shape), mp_policy=policy)
        model(torch.tensor(mine, dtype=torch.bfloat16, device=current_device())).backward()
        for name, gradient in full_gradients(model).items():
            assert gradient is not None
            assert gradient.dtype is torch.float32
            assert gradient.unique().tolist() == [1 + 1.5 * 2.0**-7], (shape, name)


# --- errors of a program ----------------------------------------------------------------------------------------------


class EitherOrder(nn.Module):
    """Runs its blocks in the other order on the ranks of the second replica."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if dist.get_rank() < 2 else reversed(self.blocks):
            x = block(x)
        return x


def _run_in_either_order() -> str:
    model = EitherOrder().to(current_device())
    fully_shard(model, policy={Block}, mesh=_mesh(2, 2), sync_module_states="broadcast")
    with pytest.raises(RanksDisagreeError) as refused:
        model(torch.ones(2, 4, device=current_device()))
    return str(refused.value)


def test_replicas_that_run_their_units_in_another_order_are_named(pool: Pool, device: str) -> None:
    need_devices(device, 4)
    assert (
        pool.run(4, _run_in_either_order, device=device)
        == [
            "the ranks run different units in the first forward: rank 0 runs 'blocks.0', rank 1 runs 'blocks.0', rank 2 runs "
            "'blocks.1', rank 3 runs 'blocks.1'. Every rank must run the same annotated modules in the same order. If data "
            "decides what runs, annotate a module around it"
        ]
        * 4
    )


# --- what a mesh means ------------------------------------------------------------------------------------------------


@spmd(ranks=4)
def test_parameters_are_replicated_over_one_dimension_and_cut_over_the_other() -> None:
    shard, same = Shard(0), Replicate()
    for mesh, expected in (
        (_mesh(2, 2), (same, shard)),
        (_mesh(2, 2), (same, shard)),  # equal to the one before, and another one
        (_mesh(2, 2, names=("replicate", "shard")), (same, shard)),
        (_mesh(2, 2, names=("DP_Shard", "hsdp_replicate")), (shard, same)),
        (_mesh(4, 1), (same, shard)),
        (_mesh(1, 2, 2, names=("pp", "dp_replicate", "dp_shard"))["dp_replicate", "dp_shard"], (same, shard)),
    ):
        model = nn.Linear(4, 4).to(current_device())
        model.scale = nn.Parameter(torch.ones((), device=current_device()))
        fully_shard(model, mesh=mesh, sync_module_states="broadcast")
        assert isinstance(model.weight, DTensor)
        assert model.weight.placements == expected
        assert model.weight.device_mesh is mesh
        assert model.weight.to_local().shape[0] == 4 // mesh.size(expected.index(shard))
        assert model.scale.placements == (same, same)  # type: ignore[union-attr]


@spmd(ranks=4)
def test_units_of_one_model_may_be_replicated_over_different_ranks() -> None:
    other = _mesh(2, 2, names=("shard", "replicate"))
    for case in _CASES:
        assert_same_training(BATTERY[case], _plain_around_hybrid(other))

        def annotate(model: nn.Module, case: Case) -> None:
            for unit in outermost_units_of(model, case)[::2]:
                fully_shard(unit, mesh=other)
            fully_shard(model, policy=set(case.units), mesh=_mesh(2, 2))

        assert_same_training(BATTERY[case], annotate)
