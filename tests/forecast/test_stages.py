"""Forecasts of stages are what torch's schedules do on ranks: messages exactly, memory within two
percent.
"""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from composable import checkpoint, fully_shard, replicate
from composable.comm import comms_wrapped_by
from composable.demo.memory import measure_step
from composable.errors import ForecastError
from composable.forecast import Pipeline, forecast_stages
from tests.forecast.test_forecast import TOKENS, Block, Counting
from tests.helpers.pipelines import installed
from tests.helpers.world import Pool

MESH = {"pp": 2, "dp": 2}
WIDTH, ROWS, MICRO = 48, 12, 6


class Head(nn.Linear):
    pass


def part(index: int, stages: int = 2) -> nn.Module:
    """Two blocks, after an embedding in the first stage, before a head in the last one."""
    blocks: list[nn.Module] = [Block(WIDTH), Block(WIDTH)]
    if index == 0:
        blocks.insert(0, nn.Embedding(250, WIDTH))
    if index == stages - 1:
        blocks.append(Head(WIDTH, 250))
    return nn.Sequential(*blocks)


def sharded(stage: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(stage, mesh=mesh["dp"], policy={Block})


def replicated(stage: nn.Module, mesh: DeviceMesh) -> None:
    replicate(stage, mesh=mesh["dp"])


def recomputed(stage: nn.Module, mesh: DeviceMesh) -> None:
    checkpoint(stage, policy={Block})
    sharded(stage, mesh)


ANNOTATE = {"sharded": sharded, "replicated": replicated, "recomputed": recomputed}
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch() -> Tensor:
    return torch.zeros(ROWS, TOKENS[1], dtype=torch.int64)


def told(name: str = "sharded", schedule: str = "1F1B", **options: Any) -> Pipeline:
    given = {"device": "cpu", "mesh": MESH, "micro_batches": MICRO, "loss": loss_of}
    given |= {"make_target": batch, **options}
    make = partial(part, stages=given["mesh"]["pp"])
    return forecast_stages(make, ANNOTATE[name], batch, schedule=schedule, **given)


# --- a real step --------------------------------------------------------------------------------


class CountingStage(PipelineStage):
    """Notes messages to and from its neighbours."""

    seen: list[tuple[str, str, int, int]]

    def _noted(self, kind: str, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.seen += [(kind, "", 2, each.tensor.nbytes) for each in operations]
        return operations

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("receive", super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("receive", super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("send", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("send", super().get_bwd_send_ops(bwd_chunk_id))


def real_step(name: str, schedule: str, install: bool) -> tuple[list[Any], int]:
    """Messages of the second step of this rank's stage, and its peak."""
    gc.collect()
    before = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    seen: list[tuple[str, str, int, int]] = []
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    index = mesh.get_local_rank("pp")
    torch.manual_seed(index)
    with comms_wrapped_by(partial(Counting, seen=seen)), installed() if install else nullcontext():
        model = part(index)
        ANNOTATE[name](model, mesh)
        stage = CountingStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        stage.seen = seen
        made = SCHEDULES[schedule](stage, MICRO, loss_of)
        optimizer = torch.optim.AdamW(model.parameters())
        given: dict[str, Tensor] = {"target": batch()} if index else {}
        inputs = () if index else (batch(),)

        def run() -> Tensor:
            made.step(*inputs, **given)
            return torch.zeros((), requires_grad=True)

        run()
        optimizer.step()
        seen.clear()
        trace = measure_step(model, optimizer, run, ignore=before)
    return seen, max(map(sum, trace.totals))


def by_kind(messages: list[tuple[str, str, int, int]]) -> dict[tuple[str, str, int], Any]:
    sizes: dict[tuple[str, str, int], list[int]] = {}
    for kind, label, ranks, nbytes in messages:
        unit = label.partition("of unit '")[2].partition("'")[0]
        sizes.setdefault((kind, unit, ranks), []).append(nbytes)
    return {key: (len(each), sum(each)) for key, each in sizes.items()}


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("name", "schedule", "install"),
    [
        ("sharded", "1F1B", True),
        ("sharded", "GPipe", True),
        ("replicated", "1F1B", True),
        ("replicated", "GPipe", False),
        ("sharded", "1F1B", False),
        ("recomputed", "1F1B", True),
    ],
)
def test_stages_send_and_take_what_a_real_schedule_does(
    pool: Pool, name: str, schedule: str, install: bool
) -> None:
    real = pool.run(4, real_step, name, schedule, install)
    with installed() if install else nullcontext():
        found = told(name, schedule)
    for index, stage in enumerate(found.stages):
        seen, peak = real[2 * index]  # of its first rank
        sent: dict[tuple[str, str, int], tuple[int, int]] = {}
        for each in stage.collectives:
            moves = each.kind in ("send", "receive")
            key = each.kind, "" if moves else each.unit, each.ranks
            count, nbytes = sent.get(key, (0, 0))
            sent[key] = count + each.count, nbytes + each.nbytes
        assert sent == by_kind(seen)
        assert stage.peak == pytest.approx(peak, rel=0.01), stage
