"""torch's pipelines over stages that are tensor parallel and sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from composable import fully_shard
from tests.helpers.world import spmd
from tests.tensor_parallel.models import MLP, OPTIMIZERS, WIDTH, full, made, mesh_of


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11's redistribution looks for dimensions of the mesh in another order",
)
@pytest.mark.filterwarnings("ignore")
@spmd(ranks=4)
def test_stages_train_as_one_process() -> None:
    mesh = mesh_of(2, 1, 2, names=("pp", "dp", "tp"))
    at = mesh.get_local_rank("pp")
    for kind in (schedules.ScheduleGPipe, schedules.Schedule1F1B):
        alone: Any = made(lambda: nn.Sequential(MLP(), MLP()))
        part: Any = copy.deepcopy(nn.Sequential(alone[at]))
        plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
        parallelize_module(part, mesh["tp"], plan)
        fully_shard(part, mesh=mesh["dp"])
        stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = kind(stage, 2, loss_fn=mse_loss)
        optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (part, alone)]
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
            losses: list[Any] = []
            schedule.step(x) if at == 0 else schedule.step(target=x.cos(), losses=losses)
            loss = mse_loss(alone(x), x.cos())
            loss.backward()
            if at:
                torch.testing.assert_close(torch.stack(losses).mean(), loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for found, plain in zip(part.parameters(), alone[at].parameters(), strict=True):
                torch.testing.assert_close(full(found).detach(), plain.detach())
