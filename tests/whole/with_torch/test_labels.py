"""A profiler shows what the library does in a step, by the names of units; without one nothing is
labelled.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, replicate
from composable.memory import streams
from composable.memory.streams import LABEL_PREFIX
from tests.helpers.world import current_device, spmd


def _around(what: str) -> list[str]:
    return [what, f"wait for the {what}"]


@pytest.mark.parametrize(("verb", "ranks"), [("fully_shard", 2), ("hybrid", 4), ("replicate", 2)])
@spmd(everywhere=True)
def test_a_profiler_shows_launches_and_waits_by_unit(verb: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if verb == "replicate":
        replicate(model)
    else:
        mesh = init_device_mesh(current_device().type, (2, 2)) if verb == "hybrid" else None
        fully_shard(model, policy={nn.Linear}, mesh=mesh)
    x = torch.ones(2, 4)
    with mock.patch.object(streams, "record_function", side_effect=AssertionError):
        model(x).sum().backward()
    with profiler.profile() as profile:
        model(x).sum().backward()
    events = sorted(profile.function_events, key=lambda event: event.time_range.start)
    found = [
        event.name.removeprefix(LABEL_PREFIX)
        for event in events
        if event.name.startswith(LABEL_PREFIX)
    ]
    if verb == "replicate":
        assert list(dict.fromkeys(found)) == _around(
            "gradient all-reduce of unit '(root)' ('1.bias' to '0.weight')"
        )
        return
    gathers = [_around(f"all-gather of unit '{unit}'") for unit in "01"]
    reductions = [_around(f"gradient reduction of unit '{unit}'") for unit in "10"]
    if verb == "hybrid":
        reductions += [_around(f"{launch} over replicas") for launch, _ in reductions]
    assert set(found) == {label for pair in (*gathers, *reductions) for label in pair}
    for launch, wait in (*gathers, *reductions):
        assert found.index(launch) < found.index(wait)
