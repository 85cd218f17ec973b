"""torch's pipelines over annotated stages, with `install()`: gradients of one process, reduced once
per unit and step, under schedules that call backward and those that split it.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

import composable
from composable import fsdp2
from composable.comm import comms_wrapped_by
from composable.fsdp2 import installation
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import full
from tests.helpers.world import Pool

SCHEDULES: Final = {
    "GPipe": schedules.ScheduleGPipe,
    "1F1B": schedules.Schedule1F1B,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}
SPLIT: Final = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
WIDTH: Final = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Part(nn.Module):
    """What one stage computes: a block, and parameters of the stage's own, of which one is unused
    and one is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * self.frozen.cos()) * (1 + self.scale.sin() / 8)


Annotate = Callable[[Part, DeviceMesh], object]


def shard(part: Part, mesh: DeviceMesh, **options: Any) -> None:
    composable.fully_shard(part.block, mesh=mesh, **options)
    composable.fully_shard(part, mesh=mesh, **options)


def shard_by_face(part: Part, mesh: DeviceMesh, **options: Any) -> None:
    fsdp2.fully_shard(part.block, mesh=mesh, **options)
    fsdp2.fully_shard(part, mesh=mesh, **options)


def replicate(part: Part, mesh: DeviceMesh, **options: Any) -> None:
    composable.replicate(part, mesh=mesh, **options)


def mixed(part: Part, mesh: DeviceMesh) -> None:
    """Replicated blocks below what is sharded."""
    composable.replicate(part.block, mesh=mesh)
    composable.fully_shard(part, mesh=mesh)


VERBS: Final = {"fully_shard": shard, "face": shard_by_face, "replicate": replicate}


@contextmanager
def installed() -> Iterator[None]:
    """These workers may have run FSDP2 itself before."""
    with mock.patch.object(installation, "classes_of_fsdp2", list):
        handle = fsdp2.install()
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Pipeline:
    """Two stages on each rank, or one, over `dp` ranks each, and the same model in one process.

    Attributes:
        log: of collectives of annotated stages.
    """

    name: str
    dp: int
    annotate: Annotate
    scale_grads: bool = True
    make: Callable[[], Part] = Part

    def __post_init__(self) -> None:
        warnings.simplefilter("ignore")
        pp = torch.distributed.get_world_size() // self.dp
        mesh = init_device_mesh("cpu", (pp, self.dp), mesh_dim_names=("pp", "dp"))
        self.rank, self.index = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        kind = SCHEDULES[self.name]
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        self.stages = 2 * pp if several else pp
        own = [self.rank]
        if several:
            v_shaped = self.name in ("ZBVZeroBubble", "DualPipeV")
            own.append(2 * pp - 1 - self.rank if v_shaped else self.rank + pp)
        torch.manual_seed(0)
        whole = nn.Sequential(*(self.make() for _ in range(self.stages)))
        self.plain = copy.deepcopy(whole)
        self.parts = {at: whole[at] for at in own}
        self.log = Log()
        with comms_wrapped_by(lambda comm: Recording(comm, self.log)):
            for part in self.parts.values():
                self.annotate(part, mesh["dp"])
        group = mesh.get_group("pp")
        made = [
            PipelineStage(part, at, self.stages, torch.device("cpu"), group=group)
            for at, part in self.parts.items()
        ]
        self.n = max(4, self.stages)
        self.schedule = kind(
            made if several else made[0],
            n_microbatches=self.n,
            loss_fn=mse_loss,
            scale_grads=self.scale_grads,
        )

    def run(self, seed: int, factor: float = 1.0) -> None:
        """One step of the schedule, and of the model in one process."""
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(self.dp, 2 * self.n, WIDTH, generator=generator)
        goals = data.cos()
        inputs = (data[self.index],) if 0 in self.parts else ()
        last = {"target": goals[self.index]} if self.stages - 1 in self.parts else {}
        self.schedule.step(*inputs, **last)
        for xs, ys in zip(data, goals, strict=True):
            for x, y in zip(xs.chunk(self.n), ys.chunk(self.n), strict=True):
                (mse_loss(self.plain(x), y) * factor / self.n / self.dp).backward()

    def check(self, rtol: float = 1e-5, *, values: bool = False) -> None:
        """Gradients, or values, are those of one process."""
        for at, part in self.parts.items():
            expected = dict(self.plain[at].named_parameters())
            for name, parameter in part.named_parameters():
                tensors = [expected[name].detach() if values else expected[name].grad]
                found = parameter if values else parameter.grad
                assert (found is None) is (tensors[0] is None), f"{at}.{name}"
                if found is not None:
                    torch.testing.assert_close(
                        full(found),
                        tensors[0],
                        rtol=rtol,
                        atol=rtol,
                        msg=lambda m: f"{at}.{name} {m}",
                    )

    def optimizers(self) -> list[torch.optim.Optimizer]:
        own = [parameter for part in self.parts.values() for parameter in part.parameters()]
        return [torch.optim.SGD(each, lr=0.1) for each in (own, list(self.plain.parameters()))]

    def reductions(self) -> Counter[str]:
        """How often each message was reduced since the last call."""
        labels = [label for label in self.log.labels() if label.startswith("gradient ")]
        self.log.events.clear()
        return Counter(labels)


def _train(name: str, dp: int, verb: str) -> None:
    with installed():
        pipeline = Pipeline(name, dp, VERBS[verb])
        optimizers = pipeline.optimizers()
        for seed in range(3):
            pipeline.run(seed)
            pipeline.check()
            found = pipeline.reductions()
            if dp > 1 and seed:  # the first step has a backward more, which infers shapes
                # stages have the same names, and two of them may be on this rank
                units = 1 if verb == "replicate" else 2
                assert found.total() == units * len(pipeline.parts), found
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        pipeline.check(values=True)


@pytest.mark.parametrize("dp", [2, 1])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_as_one_process_and_reduce_once_per_unit_and_step(
    pool: Pool, schedule: str, verb: str, dp: int
) -> None:
    pool.run(4, _train, schedule, dp, verb)
