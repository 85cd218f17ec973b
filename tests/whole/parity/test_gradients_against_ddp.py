"""On two ranks every way to annotate gives the very bits of DistributedDataParallel's gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable import no_sync
from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import full_gradients, full_parameters, sgd
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd

# Sums of two numbers do not depend on their order, so equality can be exact.
_CASES = (
    "transformer with tied embedding",
    "convolutions with frozen statistics",
    "odd sizes",
    "a unit used several times",
)
_SCHEMES = (
    "fully_shard by policy",
    "fully_shard without resharding",
    "replicate",
    "replicate in small buckets",
    "checkpoint, then fully_shard",
)


def _single_precision(case: Case) -> nn.Module:
    return case.model(0, dist.get_rank()).float().to(current_device())


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("scheme", _SCHEMES)
@spmd(ranks=2)
def test_gradients_equal_ddps_bit_for_bit(name: str, scheme: str) -> None:
    case = BATTERY[name]
    device = current_device()
    plain, annotated = _single_precision(case), _single_precision(case)
    rival = DistributedDataParallel(plain, device_ids=[device] if device.type == "cuda" else None)
    SCHEMES[scheme].annotate(annotated, case)
    rival_optimizer, optimizer = sgd(plain), sgd(annotated)
    for step in range(4):
        inputs = [
            t.float() if t.is_floating_point() else t
            for t in case.inputs(0, step, dist.get_rank(), device)
        ]
        if step == 2:
            with rival.no_sync(), no_sync(annotated):
                for loss in (case.loss(rival, *inputs), case.loss(annotated, *inputs)):
                    loss.backward()
            continue  # step 3 adds to that
        theirs, ours = case.loss(rival, *inputs), case.loss(annotated, *inputs)
        assert torch.equal(theirs, ours)
        theirs.backward()
        ours.backward()
        expected, actual = full_gradients(plain), full_gradients(annotated)
        assert list(expected) == list(actual)
        for parameter, gradient in expected.items():
            mine = actual[parameter]
            assert gradient is not None
            assert mine is not None
            assert torch.equal(gradient, mine), f"step {step}, '{parameter}'"
        rival_optimizer.step()
        optimizer.step()
        rival_optimizer.zero_grad()
        optimizer.zero_grad()
    theirs_full, ours_full = full_parameters(plain), full_parameters(annotated)
    for parameter, value in theirs_full.items():
        assert torch.equal(value, ours_full[parameter]), parameter
