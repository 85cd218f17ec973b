"""torch's pipelines over annotated stages, beside the same model in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

import composable
from composable import fsdp2
from composable.comm.backends import comms_wrapped_by
from composable.fsdp2 import installation
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import full

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
ROWS: Final = torch.tensor([1, 3, 3])


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


class Looking(Part):
    """Also adds what it looks up, which does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(ROWS).sum(0)


def _shard(part: Part, mesh: DeviceMesh, **options: Any) -> None:
    composable.fully_shard(part.block, mesh=mesh, **options)
    composable.fully_shard(part, mesh=mesh, **options)


def _shard_by_face(part: Part, mesh: DeviceMesh) -> None:
    fsdp2.fully_shard(part.block, mesh=mesh)
    fsdp2.fully_shard(part, mesh=mesh)


def _replicate(part: Part, mesh: DeviceMesh, **options: Any) -> None:
    composable.replicate(part, mesh=mesh, **options)


def _mix(part: Part, mesh: DeviceMesh) -> None:
    for module in part.children():
        composable.replicate(module, mesh=mesh)
    composable.fully_shard(part, mesh=mesh)


def _recompute(annotate: Annotate, part: Part, mesh: DeviceMesh) -> None:
    composable.checkpoint(part.block)
    annotate(part, mesh)


def _shard_hybrid(part: Part, mesh: DeviceMesh) -> None:
    del mesh  # all four ranks are replicas of one stage
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    composable.fully_shard(part, mesh=pairs)


def _shard_blocks(part: Part, mesh: DeviceMesh) -> None:
    """And not the module of the stage."""
    composable.fully_shard(part.block, mesh=mesh)


Annotate = Callable[..., object]
LOW: Final = composable.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)
# Ways to annotate the module of a stage.
WAYS: Final[dict[str, Annotate]] = {
    "fully_shard": _shard,
    "face": _shard_by_face,
    "replicate": _replicate,
    "both verbs": _mix,
    "resharded": partial(_shard, reshard_after_forward=True),
    "kept": partial(_shard, reshard_after_forward=False),
    "sharded and recomputed": partial(_recompute, _shard),
    "replicated and recomputed": partial(_recompute, _replicate),
    "sharded bfloat16": partial(_shard, mp_policy=LOW),
    "replicated bfloat16": partial(_replicate, mp_policy=LOW),
    "sums of shards": partial(_shard, grad_reduce="sum"),
    "sums of replicas": partial(_replicate, grad_reduce="sum"),
    "hybrid": _shard_hybrid,
    "blocks": _shard_blocks,
}


class LaterStage(PipelineStage):
    """Calls what stages of torch 2.15 call."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.set_manual_backward_finalization(True)
        return super().forward_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        self.submod.finalize_backward(async_op=True).wait()
        self.submod.set_manual_backward_finalization(False)
        self.scale_grads(grad_scale_factor)


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
    """Stages over `dp` ranks each, and the same model in one process.

    Attributes:
        local: stages on each rank, for schedules of several.
        log: of collectives of annotated stages.
    """

    name: str
    dp: int
    way: str
    local: int = 2
    scale_grads: bool = True
    make: Callable[[], Part] = Part
    stage: type[PipelineStage] = PipelineStage

    def __post_init__(self) -> None:
        warnings.simplefilter("ignore")
        pp = torch.distributed.get_world_size() // self.dp
        mesh = init_device_mesh("cpu", (pp, self.dp), mesh_dim_names=("pp", "dp"))
        rank, self.index = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        kind = SCHEDULES[self.name]
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        self.stages = self.local * pp if several else pp
        own = range(rank, self.stages, pp)
        if self.name in ("ZBVZeroBubble", "DualPipeV"):
            own = [rank, self.stages - 1 - rank]
        torch.manual_seed(0)
        whole = nn.Sequential(*(self.make() for _ in range(self.stages)))
        self.plain = copy.deepcopy(whole)
        self.parts = {at: whole[at] for at in own}
        self.log = Log()
        with comms_wrapped_by(lambda comm: Recording(comm, self.log)):
            for part in self.parts.values():
                WAYS[self.way](part, mesh["dp"])
        self.group = mesh.get_group("pp")
        self.n = max(4, self.stages)
        self.make_schedule()

    def make_schedule(self) -> None:
        """With stages that know of no step; those of torch cannot go on after a failed one."""
        kind = SCHEDULES[self.name]
        made = [
            self.stage(part, at, self.stages, torch.device("cpu"), group=self.group)
            for at, part in self.parts.items()
        ]
        self.schedule = kind(
            made if issubclass(kind, schedules.PipelineScheduleMulti) else made[0],
            n_microbatches=self.n,
            loss_fn=mse_loss,
            scale_grads=self.scale_grads,
        )

    def run(self, seed: int, factor: float = 1.0) -> None:
        """One step of the schedule, and of the model in one process.

        Args:
            factor: of the gradients in one process.
        """
        data = torch.randn(
            self.dp, 2 * self.n, WIDTH, generator=torch.Generator().manual_seed(seed)
        )
        goals = data.cos()
        self.step(self.schedule.step, data[self.index], goals[self.index])
        for xs, ys in zip(data, goals, strict=True):
            for x, y in zip(xs.chunk(self.n), ys.chunk(self.n), strict=True):
                (mse_loss(self.plain(x), y) * factor / self.n / self.dp).backward()

    def step(self, function: Callable[..., object], batch: Tensor, goals: Tensor) -> None:
        """Call `step` or `eval` of the schedule with what this rank's stages need."""
        inputs = (batch,) if 0 in self.parts else ()
        last = {"target": goals} if self.stages - 1 in self.parts else {}
        function(*inputs, **last)

    def check(self, tolerance: float = 1e-5, *, values: bool = False) -> None:
        """Gradients, or values, are those of one process."""
        for at, part in self.parts.items():
            expected = dict(self.plain[at].named_parameters())
            for name, parameter in part.named_parameters():
                found, there = parameter, expected[name]
                if not values:
                    assert (found.grad is None) is (there.grad is None), f"{at}.{name}"
                    if found.grad is None or there.grad is None:
                        continue
                    found, there = found.grad, there.grad  # type: ignore[assignment]
                torch.testing.assert_close(
                    full(found.detach()).to_dense(),
                    there.detach().to_dense(),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=f"stage {at}, {name}: {{}}".format,
                )

    def distance(self) -> float:
        """Of all gradients from those of one process, relative to these."""
        pairs = [
            (full(parameter.grad) - there.grad, there.grad)
            for at, part in self.parts.items()
            for parameter, there in zip(part.parameters(), self.plain[at].parameters(), strict=True)
            if parameter.grad is not None and there.grad is not None
        ]
        off, whole = (torch.cat([t.flatten() for t in each]) for each in zip(*pairs, strict=True))
        return float(off.norm() / whole.norm())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of the stages, and of the model in one process."""
        own = [parameter for part in self.parts.values() for parameter in part.parameters()]
        return [torch.optim.SGD(each, lr=0.1) for each in (own, list(self.plain.parameters()))]

    def reductions(self) -> int:
        """How many messages reduced gradients since the last call."""
        labels = [label for label in self.log.labels() if label.startswith("gradient ")]
        self.log.events.clear()
        return len(labels)
