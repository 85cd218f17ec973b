"""Nothing is read before it has arrived and nothing is changed while it travels, however late
collectives are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import pytest
from torch import nn

from composable import fully_shard
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm, Work
from composable.comm.launch import Launch
from tests.helpers.battery import BATTERY, Case
from tests.helpers.communicators import Impatient, LastMoment, Pairs, Slow, Waited, all_ordered
from tests.helpers.compare import assert_same_training, differences
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, need_devices

WRAPPERS: Final[dict[str, Callable[[Comm], Comm]]] = {
    "slow on one rank": partial(Slow, rank=1, seconds=0.003),
    "impatient": Impatient,
    "last moment": LastMoment,
}
_CASES: Final = (
    "transformer with tied embedding",
    "a unit used several times",
    "unused units and parameters",
)
_SCHEMES: Final = (
    "fully_shard by policy",
    "fully_shard without resharding",
    "replicate",
    "replicate in small buckets",
    "fully_shard inside replicate",
    "replicate inside fully_shard",
    "checkpoint, then fully_shard",
)


def _train(case: str, scheme: str, *wrappers: Callable[[Comm], Comm]) -> None:
    how = SCHEMES[scheme]

    def annotate(model: nn.Module, case: Case) -> None:
        with ExitStack() as stack:
            for wrapper in wrappers:
                stack.enter_context(comms_wrapped_by(wrapper))
            how.annotate(model, case)

    assert_same_training(BATTERY[case], annotate, replicated=how.replicated)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("case", _CASES)
def test_training_does_not_depend_on_when_collectives_arrive(
    pool: Pool, case: str, scheme: str, wrapper: str, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _train, case, scheme, WRAPPERS[wrapper], device=device)


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("case", _CASES)
def test_nor_does_it_where_the_backends_own_collectives_take_the_place_of_messages(
    pool: Pool, case: str, scheme: str
) -> None:
    pool.run(3, _train, case, scheme, all_ordered, partial(Slow, rank=1, seconds=0.001))


class _NeverArrives(LastMoment):
    """What a forgotten wait would look like."""

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        super().all_gather(pairs, launch)
        return Waited(lambda: None)


def _forget_to_wait() -> list[str]:
    def annotate(model: nn.Module, case: Case) -> None:
        with comms_wrapped_by(_NeverArrives):
            fully_shard(model)

    return differences(BATTERY["a unit used several times"], annotate, steps=1)


def test_a_forgotten_wait_would_be_found(pool: Pool) -> None:
    for found in pool.run(2, _forget_to_wait):
        assert found
        assert "nan" in found[0]
