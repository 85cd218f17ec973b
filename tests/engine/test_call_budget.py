"""Calls of Python functions are what the library costs the host, and they can be counted: no step
makes more than its budget.
"""

from __future__ import annotations

import gc
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

import pytest
import torch
from torch import Tensor, nn

import composable
from tests.helpers.world import Pool

_PACKAGE: Final = str(Path(composable.__file__).parent)
_BUDGET: Final = tomllib.loads((Path(__file__).parent / "call_budget.toml").read_text())


class Unit(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4, 4), 0.1) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def _calls(action: Callable[[], object]) -> int:
    """How many frames of the library's own code an action runs."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        # A rank reads what the other has launched (`SharedLaunches`) if that was first.
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            count += not code.co_qualname.startswith("SharedLaunches.")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def _step(verb: str, units: int, parameters: int) -> dict[str, int]:
    gc.collect()  # a backward asks all roots that live whether they take part
    model = nn.Sequential(*(Unit(parameters) for _ in range(units)))
    if verb == "fully_shard":
        composable.fully_shard(model, policy={Unit})
    else:
        composable.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters())
    found = {}
    for _ in range(3):  # orders are recorded and agreed in the first ones
        losses: list[Tensor] = []
        found = {
            "forward": _calls(lambda: losses.append(model(torch.ones(2, 4)).sum())),  # noqa: B023
            "backward": _calls(lambda: losses[0].backward()),  # noqa: B023
            "optimizer": _calls(optimizer.step),
        }
        optimizer.zero_grad()
    return found


def _per_unit_and_parameter(verb: str) -> dict[str, dict[str, float]]:
    gc.collect()
    # what tests before have left open is observed until the last watch is closed
    composable.watch(composable.fully_shard(nn.Linear(1, 1))).remove()
    few, more_units, more_parameters = _step(verb, 4, 4), _step(verb, 8, 4), _step(verb, 4, 8)
    return {
        phase: {
            "unit": (
                (more_units[phase] - few[phase]) / 4 - (more_parameters[phase] - few[phase]) / 4
            ),
            "parameter": (more_parameters[phase] - few[phase]) / 16,
        }
        for phase in few
    }


@pytest.mark.beyond_sim("it counts what a host with gloo does")
@pytest.mark.launches_not_compared("counts the calls of a step, to which comparisons would add")
@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
def test_a_step_stays_within_its_budget_of_calls(pool: Pool, verb: str) -> None:
    for found in pool.run(2, _per_unit_and_parameter, verb):
        assert {
            phase: {what: found[phase][what] <= most for what, most in each.items()}
            for phase, each in _BUDGET[verb].items()
        } == {phase: dict.fromkeys(each, True) for phase, each in found.items()}, (
            f"{found} is above {_BUDGET[verb]}"
        )
