"""State dicts of units of many modules: what each module takes does not grow with their number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    export,
    full_state_dict,
    fully_shard,
    load,
    materialize,
    refresh,
    reshard,
    unshard,
)
from tests.helpers.world import current_device, spmd


class _Scaled(nn.Module):
    """Has a buffer, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _calls_of(function: Any, *arguments: Any) -> int:
    """How many calls of Python functions it makes, in this package."""
    calls, lines = 0, 0

    def count(frame: Any, event: str, _: object) -> Any:
        nonlocal calls, lines
        if "composable/" not in frame.f_code.co_filename:
            return None
        calls, lines = calls + (event == "call"), lines + (event == "line")
        return count

    sys.settrace(count)
    try:
        function(*arguments)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("shown", [False, True])
@spmd(ranks=2)
def test_a_state_dict_takes_each_module_of_a_unit_equally_long(shown: bool) -> None:
    made = {}
    for number in (10, 40):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(number))).to(current_device())
        fully_shard(model)
        if shown:
            unshard(model)
        model.state_dict()  # the first one notes where parameters are
        saved = model.state_dict()
        made[number] = (
            _calls_of(model.state_dict) / number,
            _calls_of(model.load_state_dict, saved) / number,
        )
    for few, many in zip(made[10], made[40], strict=True):
        assert many < 1.5 * few


@spmd(ranks=2)
def test_filling_a_unit_takes_each_module_equally_long(tmp_path: Path) -> None:
    took: dict[int, list[float]] = {}
    for number in (10, 40):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))
        fully_shard(model, sync_module_states="off")
        torch.manual_seed(0)
        calls = [_calls_of(materialize, model)]
        folder = tmp_path / str(number)
        export(model, folder)
        calls.append(_calls_of(load, model, folder))
        calls += [_calls_of(each, model) for each in (refresh, full_state_dict)]
        took[number] = [count / number for count in calls]
    for few, many in zip(took[10], took[40], strict=True):
        assert many < 1.5 * few


@spmd(ranks=2)
def test_while_whole_parameters_are_shown_state_dicts_have_what_is_at_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _Scaled(), nn.Linear(4, 4)).to(current_device())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    unshard(model)
    for part in (model, model[1], model[2]):
        assert {value.dtype for value in part.state_dict().values()} == {torch.float32}
    found = model.state_dict()
    for name, value in expected.items():
        assert isinstance(found[name], DTensor) == isinstance(value, DTensor)
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    held = [*model.parameters(), model[1].scale]
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
    assert not any(isinstance(tensor, DTensor) for tensor in held)
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
