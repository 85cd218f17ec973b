"""torch's pipelines over annotated stages: schedules that call backward train, those that split it
are refused by name.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.functional import mse_loss

from composable import fully_shard, replicate
from composable.errors import OptimizerError
from tests.helpers.compare import full
from tests.helpers.world import Pool

VERBS = {"fully_shard": fully_shard, "replicate": replicate}


def _step(verb: str, schedule_class: type, ranks_per_stage: int) -> None:
    """Two stages, or four in turns, of `ranks_per_stage` ranks each."""
    mesh = init_device_mesh("cpu", (2, ranks_per_stage), mesh_dim_names=("pp", "dp"))
    rank, index = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()
    plain = copy.deepcopy(whole)
    several = schedule_class is not Schedule1F1B
    numbers = [rank, rank + 2] if several else [rank]
    parts = {
        at: nn.Sequential(whole[at]) if several else nn.Sequential(*whole[2 * at : 2 * at + 2])
        for at in numbers
    }
    for part in parts.values():
        VERBS[verb](part, mesh=mesh["dp"])
    stages = [
        PipelineStage(
            part, at, 4 if several else 2, torch.device("cpu"), group=mesh.get_group("pp")
        )
        for at, part in parts.items()
    ]
    schedule = schedule_class(stages if several else stages[0], n_microbatches=4, loss_fn=mse_loss)
    data = torch.randn(
        ranks_per_stage, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    goals = data.cos()

    def step() -> None:
        inputs: tuple[Tensor, ...] = (data[index],) if rank == 0 else ()
        schedule.step(*inputs, target=goals[index]) if rank == 1 else schedule.step(*inputs)

    step()
    optimizer = torch.optim.SGD(
        [parameter for part in parts.values() for parameter in part.parameters()], lr=0.1
    )
    for x, y in (
        (x, y)
        for batch, goal in zip(data, goals, strict=True)
        for x, y in zip(batch.chunk(4), goal.chunk(4), strict=True)
    ):
        (mse_loss(plain(x), y) / 4 / ranks_per_stage).backward()
    if schedule_class is ScheduleInterleavedZeroBubble and ranks_per_stage > 1:
        with pytest.raises(
            OptimizerError,
            match="was called by ScheduleInterleavedZeroBubble, which takes gradients of weights",
        ):
            optimizer.step()
        return
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = dict(plain.named_parameters())
    for at, part in parts.items():
        first = at if several else 2 * at
        for name, parameter in part.named_parameters():
            block, rest = name.split(".", 1)
            torch.testing.assert_close(
                full(parameter), expected[f"{first + int(block)}.{rest}"].detach()
            )


@pytest.mark.parametrize(
    "schedule", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble]
)
@pytest.mark.parametrize("verb", VERBS)
def test_schedules_train_stages_or_are_refused_by_the_optimizers_step(
    pool: Pool, verb: str, schedule: type
) -> None:
    pool.run(4, _step, verb, schedule, 2)


def test_a_schedule_that_splits_backwards_trains_stages_of_one_rank(pool: Pool) -> None:
    pool.run(2, _step, "replicate", ScheduleInterleavedZeroBubble, 1)
