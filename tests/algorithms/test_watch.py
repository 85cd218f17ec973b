"""`watch`: the first value that is not finite is named: rank, unit, phase, tensor, step."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
import torch.distributed as dist
from torch.optim import SGD

from composable import watch
from tests.algorithms.watched import PROGRAMS, Fault, Program, spoil_at_rest
from tests.helpers.world import Pool

STEPS: Final = 3
# What each fault is called: the unit, the phase, and how the tensor's name begins.
NAMES: Final[dict[str, tuple[str, str, str]]] = {
    "forward": ("blocks.{block}", "output", "output 0"),
    "backward": ("blocks.{block}", "gradient", "gradient of input 0"),
    "weight": ("blocks.{block}", "gradient", "up.weight"),
    "between forward": ("(root)", "input", "input 0 of unit 'blocks.{next}'"),
    "between backward": ("(root)", "gradient", "gradient of output 0 of unit 'blocks.{block}'"),
    "batch": ("(root)", "input", "input 0"),
    "loss": ("(root)", "gradient", "gradient of output 0"),
    "at rest": ("blocks.{block}", "parameter", "{parameter}"),
}


def train(program: Program, fault: Fault | None, **options: Any) -> tuple[list[Any], str]:
    """The findings of a short training, and the parameter that was written to."""
    model, plant = program.build(fault)
    optimizer, parameter = SGD(model.parameters(), lr=0.1), ""
    with watch(model, **options) as watched:
        for step in range(STEPS):
            plant.step = step
            if fault is not None and (fault.kind, fault.step) == ("at rest", step):
                parameter = spoil_at_rest(model, fault)
            program.backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()
    return watched.findings, parameter


def generated(name: str, ranks: int, seed: int) -> list[Fault]:
    """One fault of each kind, at a place that the seed decides."""
    draw = random.Random(f"{name} {ranks} {seed}")
    found = []
    for kind in NAMES:
        # behind the last block the root goes on, and no unit is entered
        block = draw.randrange(2 if kind == "between forward" else 3)
        where = draw.randrange(ranks), draw.randrange(STEPS)
        value = draw.choice([float("nan"), float("nan"), float("inf")])
        found.append(Fault(kind, *where, 0 if kind in ("batch", "loss") else block, value))
    return found


def _every_fault_is_named(name: str, seed: int) -> None:
    for fault in generated(name, dist.get_world_size(), seed):
        findings, parameter = train(PROGRAMS[name], fault)
        unit, phase, tensor = (
            text.format(block=fault.block, next=fault.block + 1, parameter=parameter)
            for text in NAMES[fault.kind]
        )
        assert findings, f"{fault} was missed"
        first = findings[0]
        named = first.unit, first.phase, first.tensor, first.step
        assert named == (unit, phase, tensor, fault.step), f"{fault}: {first}"
        assert fault.rank == first.rank or fault.kind == "at rest", f"{fault}: {first}"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_that_is_not_finite_is_named(pool: Pool, name: str, ranks: int) -> None:
    pool.run(ranks, _every_fault_is_named, name, 0)
