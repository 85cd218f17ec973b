"""Simulates the stages of a pipeline, one after the other, with torch's own schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from composable.checked import PositiveInt, Takes, checked
from composable.errors import ForecastError
from composable.extras.forecast.devices import Device, amount, device_of, milliseconds, unit_for
from composable.extras.forecast.forecast import (
    Forecast,
    MakeOptimizer,
    aligned,
    are_sizes,
    paced,
    running,
    takes_mesh,
    train,
)
from composable.extras.forecast.machine import Machine, meta_of, note_unknown, tensors_in

SCHEDULES: Final = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
POINT_TO_POINT: Final = ("send", "receive")

MakeStage = Annotated[
    Callable[[int], nn.Module],
    Takes("a function that makes a stage by its number (such as lambda index: Part(index))"),
]
AnnotateStage = Annotated[
    Callable[[nn.Module, DeviceMesh], object],
    Takes(
        "a function that takes the stage and the mesh, and passes the dimensions of the stage on"
        ' (such as lambda part, mesh: fully_shard(part, mesh=mesh["dp"]))',
        takes_mesh,
    ),
]
StageSizes = Annotated[
    Mapping[str, int],
    Takes(
        "names of dimensions with their sizes, that of the stages first"
        ' (such as {"pp": 4, "dp": 16})',
        are_sizes,
    ),
]


@dataclass(frozen=True)
class Pipeline:
    """What `forecast_stages` found.

    Attributes:
        schedule: "GPipe" or "1F1B".
        micro_batches: of a step.
        stages: a rank's step of each stage, in order, without what it waits for other stages:
            what it receives is there when it wants it.
        forwards: seconds of one micro-batch on each stage, with what it waits for messages.
        backwards: the same of backward.

    Example:
        >>> found = forecast_stages(
        ...     make_stage,
        ...     lambda part, mesh: fully_shard(part, mesh=mesh["dp"]),
        ...     make_batch,
        ...     mesh={"pp": 4, "dp": 2},
        ...     micro_batches=8,
        ... )
        >>> peaks = [stage.peak for stage in found.stages]
    """

    schedule: str
    micro_batches: int
    stages: tuple[Forecast, ...]
    forwards: tuple[float, ...]
    backwards: tuple[float, ...]

    @property
    def largest(self) -> int:
        """The number of the stage that needs the most memory; of equal ones the first."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].peak)

    @property
    def fits(self) -> bool:
        """Whether every stage does."""
        return all(stage.fits for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Of a step: all micro-batches pass the stages; then gradients are reduced, and the
        optimizers step.
        """
        busy = map(self._busy, range(len(self.stages)))
        return self._passing + max(
            stage.seconds - each for stage, each in zip(self.stages, busy, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The part of forwards and backwards in which the slowest stage waits for others:
        (stages - 1) / (micro-batches + stages - 1), where all stages take equal times.
        """
        return 1 - max(map(self._busy, range(len(self.stages)))) / self._passing

    def _busy(self, index: int) -> float:
        return self.micro_batches * (self.forwards[index] + self.backwards[index])

    @property
    def _passing(self) -> float:
        """When the last backward is over, if each stage follows the order of the schedule, and
        waits for what its neighbours give it.
        """
        stages, count = range(len(self.stages)), self.micro_batches
        orders = []
        for index in stages:
            # forwards before the first backward, of as many micro-batches as are kept at a time
            first = count if self.schedule == "GPipe" else min(len(stages) - index, count)
            order = [(True, at) for at in range(first)]
            for at in range(count):
                order.append((False, at))
                if first + at < count:
                    order.append((True, first + at))
            orders.append(order)
        free = [0.0 for _ in stages]
        done: dict[tuple[int, bool, int], float] = {}
        while any(orders):
            for index, order in enumerate(orders):
                if not order:
                    continue
                forward, at = order[0]
                neighbour = index - 1 if forward else index + 1
                given = done.get((neighbour, forward, at)) if neighbour in stages else 0.0
                if given is not None:
                    took = (self.forwards if forward else self.backwards)[index]
                    free[index] = done[index, forward, at] = max(free[index], given) + took
                    order.pop(0)
        return max(free)

    def __str__(self) -> str:
        first = self.stages[0]
        size, unit = unit_for(self.stages[self.largest].peak)
        rows = [("stage", "parameters", f"peak, {unit}", "busy, ms", "sends, receives", "")]
        for index, stage in enumerate(self.stages):
            moved = sum(each.nbytes for each in stage.collectives if each.kind in POINT_TO_POINT)
            notes = ["the most memory"] * (index == self.largest)
            notes += ["does not fit"] * (not stage.fits)
            rows.append(
                (
                    str(index), f"{sum(stage.subject.parameters.values()):,}",
                    amount(stage.peak, (size, unit)).split()[0],
                    milliseconds(stage.seconds, first.seconds), amount(moved), ", ".join(notes),
                )
            )  # fmt: skip
        verdict = "fits" if self.fits else "DOES NOT FIT"
        step = milliseconds(self.seconds, self.seconds)
        return "\n".join(
            [
                f"{self.schedule}, {self.micro_batches} micro-batches on {first.place}: {verdict}",
                *aligned(rows),
                f"a step takes {step} ms; the bubble is {self.bubble:.0%} of forward and backward",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """For `json`; the stages as `Forecast.to_dict` has them."""
        kept = ("schedule", "micro_batches", "seconds", "bubble", "largest", "fits")
        values = {name: getattr(self, name) for name in kept}
        return {**values, "stages": [stage.to_dict() for stage in self.stages]}


@checked
def forecast_stages(
    make_stage: MakeStage,
    annotate: AnnotateStage,
    make_batch: Callable[[], Any],
    *,
    mesh: StageSizes,
    micro_batches: PositiveInt,
    schedule: str = "1F1B",
    make_target: Callable[[], Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    device: str | Device = "h100",
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    steps: PositiveInt = 2,
    progress: Callable[[str], object] | None = None,
) -> Pipeline:
    """Predict memory and time of each stage of a pipeline, without the devices.

    The forecast runs a stage as `forecast` runs a model, with torch's own stage and schedule, as
    the first of its data-parallel ranks. It counts the activations of all micro-batches that the
    schedule keeps, torch's receive buffers, and messages to the neighbouring stages. If your
    program calls `composable.fsdp2.install()`, call it before. As in training, gradients are then
    reduced once per step, and without it in every micro-batch.

    Args:
        make_stage: makes a stage from its number. Its parameters are on the meta device, whichever
            device the function names.
        annotate: annotates a stage as your program does. It gets the stage and the mesh, e.g.
            `lambda part, mesh: fully_shard(part, mesh=mesh["dp"])`.
        make_batch: returns the first stage's input of one step on one rank, a tensor or a tuple of
            tensors. The schedule splits their first dimension into micro-batches.
        mesh: names and sizes of the dimensions. The dimension of the stages is first, e.g.
            `{"pp": 4, "dp": 16}`.
        micro_batches: of a step.
        schedule: "GPipe" or "1F1B".
        make_target: returns the target of one step on one rank. None: the loss gets no target.
        loss: returns a scalar from the last stage's output, and from the target if there is one.
            None: the sum of the output.
        device, optimizer, steps, progress: as for `forecast`.

    Raises:
        ForecastError: as from `forecast`; or a stage returns something other than tensors.
        ValueError: an argument is not valid.

    Example:
        >>> print(
        ...     forecast_stages(
        ...         lambda index: Part(config, index),
        ...         lambda part, mesh: fully_shard(part, mesh=mesh["dp"], policy={Block}),
        ...         lambda: torch.zeros(8, 4096, dtype=torch.int64),
        ...         mesh={"pp": 4, "dp": 16},
        ...         micro_batches=8,
        ...     )
        ... )

    Schedules are those of `torch.distributed.pipelining`: GPipe (arXiv:1811.06965) and 1F1B
    (PipeDream-Flush, arXiv:2006.09503), where the bubble's part is from.
    """
    (name, kind), on_device = _schedule_of(schedule), device_of(device)
    dimension, count = next(iter(mesh.items()))
    stages: list[Forecast] = []
    passes: list[tuple[float, float]] = []
    received: tuple[Tensor, ...] = ()  # by the next stage; on the meta device
    groups: list[dist.ProcessGroup] = []

    def annotated(stage: nn.Module, whole: DeviceMesh) -> object:
        groups.append(whole.get_group(dimension))
        return annotate(stage, whole)

    loss_fn, target_of = loss or _sum, make_target
    if target_of is None:  # the schedule passes one to the loss
        loss_fn = partial(_without_target, loss_fn)
        target_of = partial(torch.zeros, micro_batches)
    for index in range(count):
        said = progress and partial(_say, progress, index)
        machine = Machine(on_device, said and paced(said, steps))
        rank = index * (prod(mesh.values()) // count)
        with running(machine, partial(make_stage, index), annotated, mesh, rank) as model:
            batch = () if index else _batch_of(make_batch, micro_batches)
            inputs = _described(tuple(t.chunk(micro_batches)[0] for t in batch)) or received
            machine.at(phase="forward")
            received = _described(_outputs_of(model, index, inputs))
            stage = _Stage(
                model, index, count, torch.device("cpu"),
                input_args=inputs, output_args=received, group=groups.pop(),
            )  # fmt: skip
            stage.tell(machine)
            target = target_of() if index == count - 1 else None
            made = kind(stage, micro_batches, loss_fn)
            run = partial(stage.run_step, made, target)
            stages.append(train(machine, model, mesh, batch, optimizer, run, steps))
            passes.append((stage.seconds["forward"], stage.seconds["backward"]))
    forwards, backwards = (
        tuple(s / micro_batches for s in all) for all in zip(*passes, strict=True)
    )
    return Pipeline(name, micro_batches, tuple(stages), forwards, backwards)


class _Stage(PipelineStage):
    """Tells the machine where it is.

    Attributes:
        seconds: of the last step's forwards and backwards, with waiting for their messages.
    """

    def tell(self, machine: Machine) -> None:
        """Tell `machine` from now on."""
        self._machine = machine
        self.begin_step()

    def begin_step(self) -> None:
        self._ended = self._machine.now
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def run_step(
        self, schedule: PipelineScheduleSingle, target: Tensor | None, _: nn.Module, batch: Any
    ) -> None:
        self.begin_step()
        schedule.step(*batch, target=target)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._machine.at(phase="forward")
        output = super().forward_one_chunk(*args, **kwargs)
        self._end_chunk()
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self._machine.at(phase="backward")
        super().backward_one_chunk(*args, **kwargs)
        self._end_chunk()
        self._machine.at(unit="(root)")  # it sends what this gave

    def _end_chunk(self) -> None:
        machine = self._machine
        self.seconds[machine.phase] += machine.now - self._ended
        self._ended = machine.now


def _say(progress: Callable[[str], object], index: int, text: str) -> None:
    progress(f"stage {index}, {text}")


def _schedule_of(given: object) -> tuple[str, type[PipelineScheduleSingle]]:
    for name, kind in SCHEDULES.items():
        if str(given).lower() == name.lower():
            return name, kind
    raise ValueError(
        f'forecast_stages: schedule={given!r} must be "GPipe" or "1F1B", which have one stage on'
        " each rank"
    )


def _batch_of(make_batch: Callable[[], Any], micro_batches: int) -> tuple[Tensor, ...]:
    made = make_batch()
    batch = made if isinstance(made, tuple) else (made,)
    for tensor in batch:
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            raise ValueError(
                "forecast_stages: make_batch must return a tensor with rows, or a tuple of them, as"
                f" torch's stages take by position; it returned {type(made).__name__}"
            )
        if len(tensor) % micro_batches:
            raise ValueError(
                f"forecast_stages: {micro_batches} micro-batches do not divide the {len(tensor)}"
                " rows that make_batch returned, and torch's stages receive equal ones"
            )
    return batch


def _outputs_of(model: nn.Module, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a stage makes of a micro-batch, without values."""
    given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs]
    note_unknown(*given)
    made = model(*(to.requires_grad_(t.requires_grad) for to, t in zip(given, inputs, strict=True)))
    outputs = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    for output in outputs:
        if not isinstance(output, Tensor) or isinstance(output, DTensor):
            raise ForecastError(
                f"forecast_stages: stage {index} returns a {type(output).__name__}; torch's stages"
                " pass on tensors, one or a tuple of them, and no DTensors without further settings"
            )
    return outputs


def _described(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same on the meta device."""
    return tuple(meta_of(t).requires_grad_(t.requires_grad) for t in tensors)


def _sum(output: Any, *_: Any) -> Tensor:
    return tensors_in(output)[0].sum()


def _without_target(loss: Callable[..., Tensor], output: Any, _: Tensor) -> Tensor:
    return loss(output)
