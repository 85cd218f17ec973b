"""Ranks that leave a step at different places meet again in the next one, and nobody waits in the old one for the timeout."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import describe, fully_shard
from composable.device.collectives import communicator_of
from composable.errors import CommunicationError
from tests.helpers.communicators import all_shared
from tests.helpers.leaving import Layer, Layers, Planned, in_backward, in_the_third_layer, leave
from tests.helpers.world import Pool, current_device

# Nobody should wait for as long; a test that does takes all of it and fails.
_PATIENCE: Final = 45.0


def _before_the_first_unit(model: nn.Module, x: Tensor) -> None:
    with model.register_forward_pre_hook(leave):
        model(x)


def _after_the_last_unit(model: nn.Module, x: Tensor) -> None:
    with model.register_forward_hook(leave):
        model(x)


def _before_backward(model: nn.Module, x: Tensor) -> None:
    model(x)
    leave()


_WHERE: Final[dict[str, Callable[[nn.Module, Tensor], None]]] = {
    "before the first unit": _before_the_first_unit,
    "in the third unit": in_the_third_layer,
    "after the last unit": _after_the_last_unit,
    "before backward": _before_backward,
    "in backward": in_backward,
}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "resharding": {},
    "keeping": {"reshard_after_forward": False},
    "regrouping": {"reshard_after_forward": 2},
    "hybrid": {},
}


Fails = Callable[[nn.Module, Tensor], None]


def _train(model: nn.Module, skip: Sequence[int], fails: Fails | None) -> tuple[list[float], dict[int, str]]:
    """The losses of the steps that went well, and what the others ended with, by step.

    Args:
        skip: steps to leave out.
        fails: what rank 0 does in some of the steps, if anything.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses, errors = [], {}
    for step in range(7):
        x = torch.randn(4, 8, generator=generator)
        if step in skip:
            continue
        optimizer.zero_grad()
        try:
            if fails is not None and step in (1, 4) and dist.get_rank() == 0:
                fails(model, x)
            loss = model(x).square().mean()
            loss.backward()
        except (Planned, CommunicationError) as error:
            errors[step] = f"{type(error).__name__}: {error}"
            continue
        optimizer.step()
        losses.append(loss.item())
    return losses, errors


def _leave(options: str, cases: list[str]) -> dict[str, tuple[list[float], list[float], dict[int, str]]]:
    """By case: losses as in one process that left the same steps out, those seen, and what the lost steps ended with."""
    found = {}
    for where in cases:
        torch.manual_seed(0)
        model = Layers()
        plain = copy.deepcopy(model)
        mesh = (
            init_device_mesh(current_device().type, (2, 2))
            if options == "hybrid"
            else dist.new_group(timeout=timedelta(seconds=_PATIENCE))
        )
        fully_shard(model, mesh=mesh, policy={Layer}, **_OPTIONS[options])
        losses, errors = _train(model, (), _WHERE[where])
        found[where] = _train(plain, [*errors], None)[0], losses, errors
        dist.barrier()
    return found


# Who skips a backward tells nobody: its next forward may as well be one more of the same step, until others have left that.
_SKIPPED: Final = ("after the last unit", "before backward")
_TOLD: Final = re.compile(
    r"CommunicationError: rank \d: the (all-gather|gradient reduction) of unit '(\d|\(root\))'( over replicas)? failed: "
    r"rank \d has left this step"
    r"( and gone on to a later one|: its backward did not finish"
    r"|: unit '(\d|\(root\))' raised (Planned: as planned|CommunicationError: .*))\n"
)


@pytest.mark.host
@pytest.mark.parametrize(("ranks", "options"), [(2, "resharding"), (2, "keeping"), (4, "regrouping"), (4, "hybrid")])
def test_ranks_that_leave_a_step_at_different_places_meet_in_a_later_one(pool: Pool, ranks: int, options: str) -> None:
    for rank, found in enumerate(pool.run(ranks, _leave, options, [*_WHERE])):
        for where, (expected, losses, errors) in found.items():
            case = f"rank {rank}, {where}: {errors}"
            assert losses == pytest.approx(expected, rel=1e-5), case
            assert [*errors] == ([1, 2, 4, 5] if where in _SKIPPED else [1, 4]), case
            for step, error in errors.items():
                planned = rank == 0 and step in (1, 4)
                assert error == "Planned: as planned" if planned else _TOLD.match(error), case


def _leave_often() -> tuple[int, int]:
    """Bytes of shared memory that messages need after a few lost steps, and after many."""
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=_PATIENCE))
    model = fully_shard(Layers(), mesh=group, policy={Layer})
    outbox = all_shared(communicator_of(group, torch.device("cpu"))).host_group.outbox  # type: ignore[attr-defined]
    needed = []
    for step in range(24):
        try:
            if step % 2 and dist.get_rank() == 0:
                in_backward(model, torch.ones(4, 8))
            model(torch.ones(4, 8)).sum().backward()
        except (Planned, CommunicationError):
            assert step % 2, "the step before was lost, this one is not"
        needed.append(outbox.nbytes)
    return needed[5], needed[-1]


@pytest.mark.host
def test_messages_of_steps_that_were_left_give_their_memory_back(pool: Pool) -> None:
    for few, many in pool.run(2, _leave_often):
        assert many <= few + (6 << 20), "of some 12 lost steps"


def _look_at_a_copy_on_rank_0() -> tuple[float, float]:
    torch.manual_seed(0)
    first, second = Layers(), Layers()
    plain = copy.deepcopy(second)
    group = dist.new_group(timeout=timedelta(seconds=_PATIENCE))
    fully_shard(first, mesh=group)
    if dist.get_rank() == 0:
        assert str(describe(copy.deepcopy(first)))
    fully_shard(second, mesh=group, policy={Layer})
    x = torch.ones(4, 8)
    return second(x).sum().item(), plain(x).sum().item()


def test_one_rank_may_look_at_a_copy(pool: Pool) -> None:
    for seen, expected in pool.run(2, _look_at_a_copy_on_rank_0):
        assert seen == pytest.approx(expected)
