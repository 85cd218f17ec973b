"""Observers are notified of what they override, in a step's order; decisions are taken back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typing_extensions import override

from composable import clip_grad_norm_, fully_shard, replicate
from composable.engine.step.observer import DECISIONS, OBSERVERS, Observer, Observers
from composable.engine.step.root import Root
from composable.engine.step.unit import UnitCall
from tests.helpers.world import Pool, current_device


class _Noting(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    @override
    def pre_forward(self, root: Root, call: UnitCall) -> None:
        again = "" if call.root is root else " again"
        self.said.append(f"enter {call.unit.name}{again}")

    @override
    def post_forward(self, root: Root, call: UnitCall, keep: bool) -> None:
        self.said.append(f"leave {call.unit.name}")

    @override
    def opens_backward(self, root: Root) -> None:
        self.said.append("backward")

    @override
    def pre_backward(self, root: Root, call: UnitCall) -> None:
        self.said.append(f"into {call.unit.name}")

    @override
    def ends_backward(self, root: Root) -> None:
        self.said.append("end")

    @override
    def gradients_landed(self) -> None:
        self.said.append("landed")

    @override
    def communicates(self, what: str, *_: object) -> None:
        self.said.append(what)


def _events(verb: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
    if verb == "fully_shard":
        fully_shard(model, policy={nn.Linear})
    else:
        replicate(model)
    noting = _Noting()
    remove = OBSERVERS.add(noting)
    try:
        model(torch.ones(2, 4, device=current_device())).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
    finally:
        remove()
    said, noting.said = noting.said, []
    model(torch.ones(2, 4, device=current_device()))
    assert not noting.said  # after `remove`
    return said


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (
            "fully_shard",
            "enter (root), enter 0, leave 0, enter 1, leave 1, leave (root), backward, into (root),"
            " into 1, into 0, end, landed, clip",
        ),
        ("replicate", "enter (root), leave (root), backward, into (root), end, landed, clip"),
    ],
)
def test_an_observer_sees_a_step_in_its_order(pool: Pool, verb: str, expected: str) -> None:
    for said in pool.run(2, _events, verb):
        assert ", ".join(said) == expected


def test_nothing_is_called_for_events_that_an_observer_leaves_alone() -> None:
    observers = Observers()
    remove = observers.add(_Noting())
    assert (len(observers["pre_forward"]), len(observers["lands_backward"])) == (1, 0)
    remove()
    assert not observers["pre_forward"]


def test_an_answer_is_taken_back() -> None:
    assert DECISIONS.source() == 0
    undo = DECISIONS.answer(source=lambda: 3, by_arrival=lambda: False)
    try:
        assert (DECISIONS.source(), DECISIONS.by_arrival()) == (3, False)
    finally:
        undo()
    assert (DECISIONS.source(), DECISIONS.by_arrival()) == (0, True)
