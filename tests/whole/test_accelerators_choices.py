"""CPU tensors under an accelerator's communicator, and so by all of its choices: each is taken, and every number is right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, replicate
from composable.comm import Comm, comms_wrapped_by
from composable.engine.layout import Route
from tests.helpers.battery import BATTERY
from tests.helpers.communicators import Around, all_accelerators
from tests.helpers.compare import assert_same_training, full
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool

pytestmark = pytest.mark.beyond_sim("these tensors are of the host")


# --- each choice ------------------------------------------------------------------------------------------------------------


def _sharded(*modules: nn.Module, hosts: bool = False) -> nn.Module:
    model = nn.Sequential(*modules)
    if hosts:
        fully_shard(model)
    else:
        with comms_wrapped_by(all_accelerators):
            fully_shard(model)
    return model


def _group(model: nn.Module) -> Any:
    unit = fully_shard.state(model)
    assert unit is not None
    (group,) = unit.groups
    return group


def _placement_of_shards() -> None:
    def odd() -> list[nn.Module]:
        return [nn.Linear(3, 5), nn.Linear(5, 1)]

    assert any(slot.shard_start % 4 for slot in _group(_sharded(*odd(), hosts=True)).slots), "packed without gaps"
    group = _group(_sharded(*odd()))
    assert all(slot.shard_start % 4 == 0 for slot in group.slots), "16 bytes are four elements"
    assert group._copies == [], "one kernel splits the rows, in elements of their own"
    numels, targets = group._columns
    assert sum(numels) == group.layout.packed_numel
    assert [target.shape for target in targets] == [(2, numel) for numel in numels]


def test_shards_that_share_a_message_start_at_multiples_of_16_bytes(pool: Pool) -> None:
    pool.run(2, _placement_of_shards)


def _parts_of_a_launch() -> None:
    def of_small_parameters(comm: Comm) -> Comm:
        twin = Around(all_accelerators(comm))
        twin.traits = replace(twin.traits, direct_bytes=64)
        return twin

    model = nn.ParameterList([torch.zeros(64 + 8 * (k % 3)) for k in range(40)])
    model.forward = lambda x: x
    with comms_wrapped_by(of_small_parameters):
        fully_shard(model)
    slots = _group(model).slots
    alone = [slot for slot in slots if slot.route is Route.DIRECT]
    assert len(alone) == 32
    assert min(slot.numel for slot in alone) >= max(slot.numel for slot in slots if slot.route is Route.PACKED)


def test_one_launch_takes_the_32_largest_shards_and_a_message_with_the_others(pool: Pool) -> None:
    pool.run(2, _parts_of_a_launch)


def _buckets() -> list[int]:
    model = nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(4)])  # 1.4 MiB each
    with comms_wrapped_by(all_accelerators):
        replicate(model)
    model(torch.ones(2, 600)).sum().backward()
    unit = replicate.state(model)
    assert unit is not None
    assert unit.root is not None
    return [len(each.bucket.params) for each in unit.root.buckets._buckets]


def test_gradients_of_a_few_mib_share_a_bucket(pool: Pool) -> None:
    assert pool.run(2, _buckets) == [[1, 3]] * 2, "the first one is small, so that communication starts early"


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
    with nullcontext() if hosts else comms_wrapped_by(all_accelerators):
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
        with comms_wrapped_by(all_accelerators):
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
