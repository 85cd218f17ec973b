"""Nothing is read before it has arrived and nothing is changed while it travels, however late collectives are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import pytest
from torch import nn

from composable import fully_shard
from composable.device.collectives import Communicator, communicators_wrapped_by
from tests.helpers.battery import BATTERY, Case
from tests.helpers.communicators import Impatient, LastMoment, Slow, all_shared, all_sockets
from tests.helpers.compare import assert_same_training, differences
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, need_devices

WRAPPERS: Final[dict[str, Callable[[Communicator], Communicator]]] = {
    "slow on one rank": partial(Slow, rank=1, seconds=0.003),
    "impatient": Impatient,
    "last moment": LastMoment,
}
# Which way bytes take depends on where the ranks run; tests would only ever see one way.
WAYS: Final[dict[str, Callable[[Communicator], Communicator]]] = {
    "all through shared memory": all_shared,
    "all through sockets": all_sockets,
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


def _train(case: str, scheme: str, *wrappers: Callable[[Communicator], Communicator]) -> None:
    how = SCHEMES[scheme]

    def annotate(model: nn.Module, case: Case) -> None:
        with ExitStack() as stack:
            for wrapper in wrappers:
                stack.enter_context(communicators_wrapped_by(wrapper))
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


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(2, "all through shared memory", marks=pytest.mark.host),
        pytest.param(3, "all through shared memory", marks=pytest.mark.host),
        (3, "all through sockets"),
    ],
)
@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("case", _CASES)
def test_training_does_not_depend_on_the_way_that_bytes_take(pool: Pool, case: str, scheme: str, way: str, ranks: int) -> None:
    pool.run(ranks, _train, case, scheme, WAYS[way], partial(Slow, rank=1, seconds=0.001))


class _NeverArrives(LastMoment):
    """What a forgotten wait would look like."""

    def all_gather(self, prepared, *, label, tags):  # type: ignore[no-untyped-def]
        work = super().all_gather(prepared, label=label, tags=tags)
        work.done = True  # type: ignore[attr-defined]
        return work


def _forget_to_wait() -> list[str]:
    def annotate(model: nn.Module, case: Case) -> None:
        with communicators_wrapped_by(_NeverArrives):
            fully_shard(model)

    return differences(BATTERY["a unit used several times"], annotate, steps=1)


def test_a_forgotten_wait_would_be_found(pool: Pool) -> None:
    for found in pool.run(2, _forget_to_wait):
        assert found
        assert "nan" in found[0]
