"""A bucket goes through the same phases as a sharded unit's gradients, whatever becomes of its sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable.device.gradient_buckets import GradientBucket
from composable.errors import CommunicationError, PhaseError
from composable.plan.phases import GradPhase
from composable.runtime.bucket import Bucket


class Sums:
    """A communicator whose sums come when the test says so; and one sum of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.there = self.fails = False

    def all_reduce(self, tensor: Tensor, **_: Any) -> Sums:
        self.log.append("launch")
        return self

    def progress(self) -> bool:
        return self.there

    def wait(self) -> None:
        self.log.append("wait")
        if self.fails:
            raise CommunicationError("another rank left")

    def abort(self) -> None:
        self.log.append("abort")


def _launched() -> tuple[Bucket, Sums]:
    parameter, sums = nn.Parameter(torch.zeros(3)), Sums()
    bucket = Bucket([0], GradientBucket([parameter], [None]), sums, "sum")  # type: ignore[arg-type]
    bucket.open()
    parameter.grad = torch.ones(3)
    bucket.gradients.collect(())
    bucket.launch()
    return bucket, sums


def test_it_is_finished_once_by_whoever_comes_first() -> None:
    bucket, sums = _launched()
    assert bucket.phase is GradPhase.REDUCING
    assert not bucket.progress()
    sums.there = True
    assert bucket.progress()
    assert bucket.phase is GradPhase.EMPTY
    bucket.finish()
    assert sums.log == ["launch", "wait"]


def test_a_sum_that_failed_is_in_flight_no_more_and_can_be_launched_again() -> None:
    bucket, sums = _launched()
    sums.fails = True
    with pytest.raises(CommunicationError):
        bucket.finish()
    assert bucket.phase is GradPhase.EMPTY
    bucket.launch()
    sums.fails = False
    bucket.finish()
    assert sums.log == ["launch", "wait", "launch", "wait"]


def test_what_is_in_flight_is_given_up_when_it_is_dropped() -> None:
    bucket, sums = _launched()
    bucket.drop()
    bucket.drop()
    assert bucket.phase is GradPhase.EMPTY
    assert sums.log == ["launch", "abort"]


def test_what_is_held_is_launched_later_and_nothing_is_launched_twice() -> None:
    bucket, _ = _launched()
    with pytest.raises(PhaseError, match=r"REDUCE .* is not possible while REDUCING"):
        bucket.launch()
    bucket.finish()
    bucket.hold()
    assert bucket.phase is GradPhase.HELD
    bucket.launch()
    assert bucket.phase is GradPhase.REDUCING
