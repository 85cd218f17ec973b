"""Forecasts of stages are what torch's schedules do on ranks: messages exactly, memory within two
percent.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable import checkpoint, fully_shard, replicate
from composable.comm.backends import comms_wrapped_by
from composable.errors import ForecastError
from composable.forecast import Pipeline, forecast_stages
from examples.demo.memory import measure_step
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


def forecast_for(name: str = "sharded", schedule: str = "1F1B", **options: Any) -> Pipeline:
    given: dict[str, Any] = {"device": "cpu", "mesh": MESH, "micro_batches": MICRO, "loss": loss_of}
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


def real_step(name: str, schedule: str, install: bool, stages: int) -> tuple[list[Any], int]:
    """Messages of the second step of this rank's stage, and its peak."""
    gc.collect()
    before = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    seen: list[tuple[str, str, int, int]] = []
    mesh = init_device_mesh("cpu", (stages, 4 // stages), mesh_dim_names=tuple(MESH))
    index = mesh.get_local_rank("pp")
    torch.manual_seed(index)
    with comms_wrapped_by(partial(Counting, seen=seen)), installed() if install else nullcontext():
        model = part(index, stages)
        ANNOTATE[name](model, mesh)
        stage = CountingStage(model, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
        stage.seen = seen
        made = SCHEDULES[schedule](stage, MICRO, loss_of)
        optimizer = torch.optim.AdamW(model.parameters())
        given: dict[str, Any] = {"target": batch()} if index == stages - 1 else {}
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
    ("name", "schedule", "install", "stages"),
    [
        ("sharded", "GPipe", True, 2),
        ("sharded", "1F1B", False, 2),
        ("recomputed", "1F1B", True, 2),
        ("replicated", "GPipe", True, 4),
        pytest.param("sharded", "1F1B", True, 2, marks=pytest.mark.in_full_only),
        pytest.param("replicated", "1F1B", True, 2, marks=pytest.mark.in_full_only),
        pytest.param("replicated", "GPipe", False, 2, marks=pytest.mark.in_full_only),
        pytest.param("sharded", "1F1B", True, 4, marks=pytest.mark.in_full_only),
    ],
)
def test_stages_send_and_take_what_a_real_schedule_does(
    pool: Pool, name: str, schedule: str, install: bool, stages: int
) -> None:
    real = pool.run(4, real_step, name, schedule, install, stages)
    with installed() if install else nullcontext():
        found = forecast_for(name, schedule, mesh={"pp": stages, "dp": 4 // stages})
    for index, stage in enumerate(found.stages):
        seen, peak = real[index * 4 // stages]  # of its first rank
        sent: dict[tuple[str, str, int], tuple[int, int]] = {}
        for each in stage.collectives:
            moves = each.kind in ("send", "receive")
            key = each.kind, "" if moves else each.unit, each.ranks
            count, nbytes = sent.get(key, (0, 0))
            sent[key] = count + each.count, nbytes + each.nbytes
        assert sent == by_kind(seen)
        assert stage.peak == pytest.approx(peak, rel=0.02), stage


# --- schedules ----------------------------------------------------------------------------------


def test_a_stage_keeps_the_micro_batches_that_the_schedule_has_in_flight() -> None:
    """Stages 1 and 2 of 4 are alike. Under 1F1B they keep 3 and 2, under GPipe all 6."""
    mesh = {"pp": 4, "dp": 1}
    by_turns, at_once = (
        [
            stage.at_peak["activations, temporaries"]
            for stage in forecast_for(schedule=each, mesh=mesh).stages
        ]
        for each in ("1F1B", "GPipe")
    )
    one = by_turns[1] - by_turns[2]
    assert one > 0.2 * by_turns[2]
    assert at_once[1] == at_once[2]
    assert at_once[1] - by_turns[1] == pytest.approx(3 * one, rel=0.02)


def timed(schedule: str, forwards: tuple[float, ...], backwards: tuple[float, ...]) -> Pipeline:
    """Stages that do nothing else."""
    one = forecast_for(mesh={"pp": 1, "dp": 1}).stages[0]
    stages = tuple(
        replace(one, seconds=MICRO * sum(each)) for each in zip(forwards, backwards, strict=True)
    )
    return Pipeline(schedule, MICRO, stages, forwards, backwards)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_equal_stages_is_that_of_the_papers(schedule: str) -> None:
    found = timed(schedule, (1.0,) * 4, (2.0,) * 4)
    assert found.seconds == pytest.approx((MICRO + 3) * 3)
    assert found.bubble == pytest.approx(3 / (MICRO + 3))


def test_micro_batches_follow_at_the_pace_of_the_slowest_stage() -> None:
    forwards, backwards = (1.0, 3.0, 1.0), (2.0, 4.0, 5.0)
    found = timed("GPipe", forwards, backwards)
    assert found.seconds == pytest.approx(5 + 5 * 3 + 11 + 5 * 5)
    # under 1F1B the second stage is never without work from its first forward to its last backward
    found = timed("1F1B", (1.0, 3.0), (2.0, 4.0))
    assert found.seconds == pytest.approx(1 + MICRO * 7 + 2)
    assert found.bubble == pytest.approx(3 / (MICRO * 7 + 3))


def test_a_step_goes_on_after_the_last_backward() -> None:
    found = timed("1F1B", (1.0, 1.0), (2.0, 2.0))
    later = replace(found.stages[1], seconds=found.stages[1].seconds + 7)
    assert replace(found, stages=(found.stages[0], later)).seconds == found.seconds + 7


# --- what is said -------------------------------------------------------------------------------


def test_a_table_names_the_stage_that_needs_the_most_and_those_that_do_not_fit() -> None:
    found = forecast_for(device="h100", mesh={"pp": 3, "dp": 4})
    assert found.largest == max(range(3), key=lambda index: found.stages[index].peak)
    lines = str(found).splitlines()
    assert lines[0] == "1F1B, 6 micro-batches on H100, 3 pp x 4 dp: fits"
    assert ["the most memory" in line for line in lines[2:5]] == [
        index == found.largest for index in range(3)
    ]
    assert f"the bubble is {found.bubble:.0%}" in lines[5]
    small = replace(found.stages[0].device, capacity=found.stages[found.largest].peak)
    lacking = forecast_for(device=small, mesh={"pp": 3, "dp": 4})
    assert not lacking.fits
    assert "DOES NOT FIT" in str(lacking)
    assert "the most memory, does not fit" in str(lacking)
    kept = json.loads(json.dumps(found.to_dict()))
    assert kept["largest"] == found.largest
    assert kept["stages"][2]["peak"] == found.stages[2].peak


def test_messages_between_nodes_take_longer() -> None:
    def passing(dp: int) -> float:
        spans = forecast_for(device="h100", mesh={"pp": 2, "dp": dp}).stages[0].streams
        return max(span.end - span.start for span in spans if span.stream == "send")

    assert passing(8) > passing(4)  # the second stage is on the same node, or on the next


def test_stages_of_several_tensors_without_an_annotation_and_a_loss_are_forecast() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x) * mask, mask

    found = forecast_stages(
        lambda _: Two(),
        lambda stage, mesh: None,
        lambda: (torch.zeros(4, 8), torch.ones(4, 8)),
        mesh={"pp": 2},
        micro_batches=2,
        schedule="gpipe",
        optimizer=None,
    )
    first, last = (
        {each.kind: (each.count, each.nbytes) for each in stage.collectives}
        for stage in found.stages
    )
    both, one = (4, 2 * 2 * 64), (2, 2 * 64)  # no gradient of the mask comes back
    assert (first["send"], first["receive"]) == (both, one)
    assert (last["send"], last["receive"]) == (one, both)


def test_progress_names_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["composable.extras.forecast.forecast"], "PACE", 0.0)
    said: list[str] = []
    forecast_for(progress=said.append)
    assert "stage 1, step 2 of 2, backward of unit '0'" in said
    assert said[-1] == "stage 1, step 2 of 2, optimizer"


def test_tensor_parallel_stages_are_forecast() -> None:
    def distribute(stage: nn.Module, mesh: DeviceMesh) -> None:
        plan: dict[str, Any] = {}
        for name, module in stage.named_children():
            if isinstance(module, Block):
                plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        parallelize_module(stage, mesh["tp"], plan)
        fully_shard(stage, mesh=mesh["dp"], policy={Block})

    whole = forecast_for(mesh={"pp": 2, "dp": 2})
    found = forecast_stages(
        part, distribute, batch, mesh={"pp": 2, "dp": 2, "tp": 2}, micro_batches=MICRO,
        loss=loss_of, make_target=batch, device="cpu",
    )  # fmt: skip
    for less, more in zip(found.stages, whole.stages, strict=True):
        rests = "parameters, buffers"
        assert less.at_rest[rests] < more.at_rest[rests]
        assert {each.dimension for each in less.collectives} == {"pp", "dp", "tp"}


# --- what is refused ----------------------------------------------------------------------------


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": 4}, ValueError, "mesh must be names of dimensions with their sizes, that of"),
        ({"mesh": {}}, ValueError, "mesh must be names"),
        ({"mesh": {"pp": 0}}, ValueError, "mesh must be names"),
        ({"micro_batches": 0}, ValueError, "micro_batches must be a whole number"),
        ({"micro_batches": 5}, ValueError, "5 micro-batches do not divide the 12 rows"),
        ({"micro_batches": 1}, ValueError, "Number of microbatches"),
        ({"schedule": "Interleaved1F1B"}, ValueError, 'must be "GPipe" or "1F1B", which have one'),
        ({"schedule": None}, ValueError, "schedule must be"),
        (
            {"annotate": lambda stage: None},
            ValueError,
            "annotate must be a function that takes the stage and",
        ),
        (
            {"annotate": replicate},
            ValueError,
            "annotate must be a function that takes the stage and",
        ),
        ({"make_batch": dict}, ValueError, "make_batch must return a tensor with rows"),
        ({"make_stage": nn.Linear(1, 1)}, ValueError, "make_stage must be .* got a Linear"),
        ({"make_stage": lambda index: [index]}, ValueError, "returned no module: list"),
        (
            {"make_stage": lambda _: Named(), "annotate": lambda stage, mesh: None},
            ForecastError,
            "stage 0 returns a dict; torch's stages",
        ),
        ({"make_target": 3}, ValueError, "make_target must be a function of 0 arguments"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"make_stage": part, "annotate": sharded, "make_batch": batch, "mesh": MESH}
    given |= {"micro_batches": MICRO, "make_target": batch, "loss": loss_of, "device": "cpu"}
    with pytest.raises(error, match=message) as caught:
        forecast_stages(**{**given, **options})
    assert len(str(caught.value)) < 300
    assert not dist.is_initialized()


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.sum().item()


def test_a_stage_that_reads_values_is_refused_by_its_module() -> None:
    with pytest.raises(ForecastError, match=r"reads a value .* in forward of unit '\(root\)'"):
        forecast_stages(
            lambda _: Reads(8, 8), replicated, lambda: torch.zeros(4, 8), mesh=MESH, micro_batches=2
        )
    assert not dist.is_initialized()
