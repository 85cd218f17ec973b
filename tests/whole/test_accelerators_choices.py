"""CPU tensors under an accelerator's communicator, and so by all of its choices: each is taken, and every number is right."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from composable.device import memory
from composable.device.collectives import Communicator, communicators_wrapped_by
from composable.device.memory import HOST_MEMORY, Resizing
from composable.plan.routes import Route
from composable.runtime import sharded_bracket
from composable.runtime.hop import Hop
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, no_sync, replicate
from tests.helpers.battery import BATTERY
from tests.helpers.communicators import all_accelerators
from tests.helpers.compare import assert_same_training, full, full_gradients
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool

pytestmark = pytest.mark.beyond_sim("these tensors are of the host")


# --- each choice ------------------------------------------------------------------------------------------------------------


def _sharded(*modules: nn.Module, hosts: bool = False) -> nn.Module:
    model = nn.Sequential(*modules)
    if hosts:
        fully_shard(model)
    else:
        with communicators_wrapped_by(all_accelerators):
            fully_shard(model)
    return model


def _flat(model: nn.Module) -> Any:
    unit = fully_shard.state(model)
    assert unit is not None
    (group,) = unit.handle.parameters.groups
    return group.flat


def _placement_of_shards() -> None:
    def odd() -> list[nn.Module]:
        return [nn.Linear(3, 5), nn.Linear(5, 1)]

    assert any(slot.shard_start % 4 for slot in _flat(_sharded(*odd(), hosts=True)).layout.slots), "packed without gaps"
    flat = _flat(_sharded(*odd()))
    assert all(slot.shard_start % 4 == 0 for slot in flat.layout.slots), "16 bytes are four elements"
    assert flat._packed_copies == ([], []), "one kernel splits the rows, in elements of their own"
    numels, targets = flat._columns
    assert sum(numels) == flat.layout.packed_numel
    assert [target.shape for target in targets] == [(2, numel) for numel in numels]


def test_shards_that_share_a_message_start_at_multiples_of_16_bytes(pool: Pool) -> None:
    pool.run(2, _placement_of_shards)


def _parts_of_a_launch() -> None:
    def of_small_parameters(communicator: Communicator) -> Communicator:
        twin: Any = all_accelerators(communicator)
        twin.capabilities = replace(twin.capabilities, direct_bytes=64)
        return twin

    model = nn.ParameterList([torch.zeros(64 + 8 * (k % 3)) for k in range(40)])
    model.forward = lambda x: x
    with communicators_wrapped_by(of_small_parameters):
        fully_shard(model)
    slots = _flat(model).layout.slots
    alone = [slot for slot in slots if slot.route is Route.DIRECT]
    assert len(alone) == 32
    assert min(slot.numel for slot in alone) >= max(slot.numel for slot in slots if slot.route is Route.PACKED)


def test_one_launch_takes_the_32_largest_shards_and_a_message_with_the_others(pool: Pool) -> None:
    pool.run(2, _parts_of_a_launch)


class _Thrice(nn.Module):
    """A unit of which two thirds travel first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.skipped = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y if skip else y + self.skipped(x)


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Thrice() for _ in range(4)])

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, skip)
        return x


def _reductions_in_two_parts(hybrid: bool) -> None:
    def of_small_parameters(communicator: Communicator) -> Communicator:
        twin: Any = all_accelerators(communicator)
        twin.capabilities = replace(twin.capabilities, direct_bytes=64, divided_bytes=64)
        return twin

    torch.manual_seed(0)
    model, ranks = _Chain(), dist.get_world_size()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, ranks // 2) if hybrid else (ranks,))
    with communicators_wrapped_by(of_small_parameters):
        fully_shard(model, policy={_Thrice}, mesh=mesh)
    batches = torch.randn(3, ranks, 2, 8)
    with mock.patch.object(Hop, "wait_for_first", autospec=True, side_effect=Hop.wait_for_first) as landed:
        for number, batch in enumerate(batches):
            with no_sync(model) if number == 0 else nullcontext():
                model(batch[dist.get_rank()], skip=dist.get_rank() == 1).square().mean().backward()
    assert landed.call_count > 0
    unit = fully_shard.state(model.get_submodule("blocks.1"))
    assert unit is not None
    assert all(each.divided for group in unit.handle.gradients.groups for each in group.reductions.values())
    for batch in batches:
        for rank, share in enumerate(batch):
            (alone(share, skip=rank == 1).square().mean() / ranks).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_reduction_in_two_parts_of_which_one_is_waited_for_early_brings_the_same(pool: Pool, hybrid: bool) -> None:
    """Also where a rank misses gradients of the second part, and after a backward that reduced nothing."""
    pool.run(4 if hybrid else 2, _reductions_in_two_parts, hybrid)


def _memory_of_buffers(hosts: bool) -> None:
    HOST_MEMORY.clear()
    model = _sharded(nn.Linear(64, 64), hosts=hosts)
    model(torch.ones(2, 64)).sum().backward()
    pooled = hosts and memory.CAN_SWAP
    assert isinstance(_flat(model).unsharded[0]._free_list, memory.FreeList if pooled else Resizing)
    assert (HOST_MEMORY.idle_bytes > 0) is pooled


@pytest.mark.parametrize("hosts", [True, False])
def test_memory_that_is_freed_goes_to_a_hosts_pool_and_to_an_accelerators_allocator(pool: Pool, hosts: bool) -> None:
    pool.run(2, _memory_of_buffers, hosts)


def _inputs_that_are_moved() -> list[torch.device]:
    moved = []

    def noted(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
        moved.append(device)
        return on_device(args, kwargs, device)

    on_device = sharded_bracket.on_device
    sharded_bracket.on_device = noted
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with communicators_wrapped_by(all_accelerators):
            fully_shard(model, policy={nn.Linear})
        model(torch.ones(2, 4))
    finally:
        sharded_bracket.on_device = on_device
    return moved


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_root_is_given_is_moved_and_what_units_inside_are_given_is_not(pool: Pool, ranks: int) -> None:
    """The root has no parameters of its own: it tells where it is by its mesh."""
    assert pool.run(ranks, _inputs_that_are_moved) == [[torch.device("cpu")]] * ranks


def _buckets() -> list[int]:
    model = nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(4)])  # 1.4 MiB each
    with communicators_wrapped_by(all_accelerators):
        replicate(model)
    model(torch.ones(2, 600)).sum().backward()
    unit = replicate.state(model)
    assert unit is not None
    reducer: Any = unit.averaging.reducer
    return [len(bucket.members) for bucket in reducer.buckets.each]


def test_gradients_of_a_few_mib_share_a_bucket(pool: Pool) -> None:
    assert pool.run(2, _buckets) == [[1, 3]] * 2, "the first one is small, so that communication starts early"


def _reads_of_steps(steps: int) -> list[int]:
    reads: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with communicators_wrapped_by(all_accelerators):
        replicate(model)
    tolist = Tensor.tolist
    for _ in range(steps):
        reads.append(0)

        def counted(tensor: Tensor) -> Any:
            reads[-1] += 1
            return tolist(tensor)

        Tensor.tolist = counted  # type: ignore[method-assign]
        try:
            model(torch.ones(2, 4)).sum().backward()
        finally:
            Tensor.tolist = tolist  # type: ignore[method-assign]
    return reads


def test_numbers_that_travel_with_gradients_are_read_until_all_ranks_agree_and_then_no_more(pool: Pool) -> None:
    for first, second, *later in pool.run(2, _reads_of_steps, 5):
        assert first
        assert second
        assert later == [0, 0, 0]


class _OftenUnused(nn.Module):
    """A block with a parameter that even ranks use in every step, and odd ones never."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.extra = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + self.extra if dist.get_rank() % 2 == 0 else y


def _train_with_missing_gradients(hosts: bool) -> tuple[list[str], list[list[float] | None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[_OftenUnused() for _ in range(5)])
    with nullcontext() if hosts else communicators_wrapped_by(all_accelerators):
        fully_shard(model, policy={_OftenUnused})
    tolist, seen = Tensor.tolist, []

    def counted(tensor: Tensor) -> Any:
        seen.append("read")
        return tolist(tensor)

    found: list[list[float] | None] = []
    for _ in range(2):
        seen.clear()
        x = torch.ones(2, 4, requires_grad=True)
        x.register_hook(lambda _: seen.append("backward of the first block"))
        Tensor.tolist = counted  # type: ignore[method-assign]
        try:
            model(x).square().sum().backward()
        finally:
            Tensor.tolist = tolist  # type: ignore[method-assign]
        found = [None if p.grad is None else full(p.grad).tolist() for p in model.parameters()]
        model.zero_grad()
    return seen, found


def test_whether_others_had_missing_gradients_is_read_when_backward_is_over(pool: Pool) -> None:
    """In the middle of it, the host would wait for each unit's reduction, and launch nothing ahead."""
    (_, here), (on_host, expected) = pool.run(2, _train_with_missing_gradients, True)
    (_, even), (seen, odd) = pool.run(2, _train_with_missing_gradients, False)
    assert on_host.index("read") < on_host.index("backward of the first block")
    assert seen[0] == "backward of the first block"
    assert seen.count("read") == 5
    assert even == odd == here == expected
    assert odd.count(None) == 5, "what no rank used"


# --- all of them together ---------------------------------------------------------------------------------------------------


def _train(cases: Sequence[str], scheme: str) -> None:
    how = SCHEMES[scheme]
    for case in cases:
        with communicators_wrapped_by(all_accelerators):
            assert_same_training(BATTERY[case], how.annotate, replicated=how.replicated)


_CASES: Final = ["odd sizes", "two dtypes", "unused units and parameters"]


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        (1, "fully_shard by policy"),
        (2, "fully_shard by policy"),
        (2, "replicate"),
        (2, "replicate inside fully_shard"),
        (2, "fully_shard, then checkpoint"),
        (4, "fully_shard over two neighbours"),
    ],
)
def test_training_by_all_choices_is_that_of_one_process(pool: Pool, ranks: int, scheme: str) -> None:
    """The rest of the battery, and every other test of training, runs so by `make test-accelerator`."""
    pool.run(ranks, _train, _CASES, scheme)
