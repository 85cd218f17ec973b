"""A launch knows what sends it: observers tell launches of equal text apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, together
from composable.comm import observe_launches
from composable.comm.launch import Launch, LaunchKind
from tests.helpers.world import spmd


class _TwoDtypes(nn.Module):
    """Two groups, and two messages of gradients, of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        self.high = nn.Parameter(torch.linspace(1, -1, 16, dtype=torch.float64).view(4, 4))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.low).double() @ self.high
        if self.fails:
            raise ValueError("as planned")
        return hidden


def _launches_of_a_step(model: nn.Module) -> list[Launch]:
    noted: list[Launch] = []

    waits: list[Launch] = []

    def note(comm: object, launch: Launch, *_: Any) -> None:
        noted.append(launch)

    def waiting(comm: object, launch: Launch) -> None:
        assert launch in noted
        waits.append(launch)

    def waited(comm: object, launch: Launch) -> None:
        assert waits[-1] is launch

    end = observe_launches(launched=note, waiting=waiting, waited=waited)
    try:
        with together(model) as step:
            model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    finally:
        end()
    assert step.lost == bool(step.why)
    kinds = LaunchKind.GATHER, LaunchKind.REDUCE
    assert [each for each in noted if each.kind in kinds] == [
        each for each in waits if each.kind in kinds
    ]
    model.zero_grad()
    return noted


@spmd(ranks=2)
def test_launches_of_equal_text_are_distinguished_by_what_sends_them() -> None:
    model = fully_shard(_TwoDtypes())
    low, high = model.parameters()
    for _ in range(2):  # orders are agreed in the first steps
        before = _launches_of_a_step(model)
    launches = _launches_of_a_step(model)

    gathers = [each for each in launches if each.kind is LaunchKind.GATHER]
    assert {each.text for each in gathers} == {"all-gather of unit '(root)'"}
    dtypes = [each.sender.precision.compute for each in gathers]
    assert sorted(map(str, dtypes)) == ["torch.float32", "torch.float64"]

    reductions = [each for each in launches if each.kind is LaunchKind.REDUCE]
    assert {each.text for each in reductions} == {"gradient reduction of unit '(root)'"}
    senders = [each.sender.at_rest for each in reductions]
    assert sorted(senders, key=lambda each: each[0] is high) == [(low,), (high,)]

    assert {each.unit for each in (*gathers, *reductions)} == {"(root)"}
    kept = [each for each in before if each.kind in (LaunchKind.GATHER, LaunchKind.REDUCE)]
    assert kept == gathers + reductions, "made once, and not in each step"

    # a rank that has lost the step gathers both groups for the others, each in its turn
    model.fails = dist.get_rank() == 1
    assert [*map(str, _launches_of_a_step(model))][: len(launches)] == [*map(str, launches)]


def test_launches_are_equal_only_if_they_are_one_and_keep_no_sender() -> None:
    sender = nn.Linear(1, 1)
    launch, other = (Launch("sum", LaunchKind.REDUCE, sender) for _ in range(2))
    assert (str(launch), f"{launch}", launch.sender) == ("sum", "sum", sender)
    assert launch != other
    del sender
    assert launch.sender is None
