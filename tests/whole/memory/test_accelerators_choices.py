"""CPU tensors under an accelerator's communicator, and so by all of its choices: every number is
right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch
from torch import nn

from composable import fully_shard
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from composable.engine.params.layout import Route
from tests.helpers.battery import BATTERY
from tests.helpers.communicators import Around, all_accelerators
from tests.helpers.compare import assert_same_training
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import spmd

pytestmark = pytest.mark.beyond_sim("these tensors are of the host")


@spmd(ranks=2)
def test_one_launch_takes_the_32_largest_shards_and_a_message_with_the_others() -> None:
    def of_small_parameters(comm: Comm) -> Comm:
        clone = Around(all_accelerators(comm))
        clone.traits = replace(clone.traits, direct_bytes=64)
        return clone

    model = nn.ParameterList([torch.zeros(64 + 8 * (k % 3)) for k in range(40)])
    model.forward = lambda x: x
    with comms_wrapped_by(of_small_parameters):
        fully_shard(model)
    unit = fully_shard.state(model)
    assert unit is not None
    slots = unit.groups[0].slots
    alone = [slot for slot in slots if slot.route is Route.DIRECT]
    assert len(alone) == 32
    assert min(slot.numel for slot in alone) >= max(
        slot.numel for slot in slots if slot.route is Route.PACKED
    )


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
@spmd(everywhere=True)
def test_training_by_all_choices_is_that_of_one_process(scheme: str) -> None:
    """The rest of the battery, and every other test of training, runs so by `make
    test-accelerator`.
    """
    how = SCHEMES[scheme]
    for case in _CASES:
        with comms_wrapped_by(all_accelerators):
            assert_same_training(BATTERY[case], how.annotate, replicated=how.replicated)
