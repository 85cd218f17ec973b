"""Each stage of a pipeline trains for a few steps by torch's schedule, and what it takes is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from composable.errors import ForecastError
from composable.forecast.devices import Device, amount, device_of, milliseconds, unit_for
from composable.forecast.forecast import check_functions, machine_of, running, takes_mesh, train
from composable.forecast.machine import Machine, note_unknown, tensors_in
from composable.forecast.result import Forecast, aligned

POINT_TO_POINT: Final = ("send", "receive")


@dataclass(frozen=True)
class Pipeline:
    """What `forecast_stages` found.

    Attributes:
        schedule: the name of its class.
        micro_batches: of a step.
        stages: a rank's step of each stage, in order, without what it waits for other stages:
            what it receives is there when it wants it.
        seconds_per_micro_batch: of each stage, forward and backward with the messages that they
            wait for.
    """

    schedule: str
    micro_batches: int
    stages: tuple[Forecast, ...]
    seconds_per_micro_batch: tuple[float, ...]

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
        """Of a step: a micro-batch passes all stages, and the others follow at the pace of the
        slowest one. After that, gradients are reduced, and the optimizers step.
        """
        passes, count = self.seconds_per_micro_batch, self.micro_batches
        after = max(
            stage.seconds - count * each for stage, each in zip(self.stages, passes, strict=True)
        )
        return sum(passes) + (count - 1) * max(passes) + after

    @property
    def bubble(self) -> float:
        """The part of forwards and backwards in which the slowest stage waits for others:
        (stages - 1) / (micro-batches + stages - 1), where stages take equal times.
        """
        slowest = max(self.seconds_per_micro_batch)
        others = sum(self.seconds_per_micro_batch) - slowest
        return others / (self.micro_batches * slowest + others)

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
        return {
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "seconds": self.seconds,
            "bubble": self.bubble,
            "largest": self.largest,
            "fits": self.fits,
            "stages": [stage.to_dict() for stage in self.stages],
        }


def forecast_stages(
    make_stage: Callable[[int], nn.Module],
    annotate: Callable[[nn.Module, DeviceMesh], object],
    make_batch: Callable[[], Any],
    *,
    mesh: Mapping[str, int],
    micro_batches: int,
    schedule: str = "1F1B",
    make_target: Callable[[], Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    device: str | Device = "h100",
    optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW,
    steps: int = 2,
    progress: Callable[[str], object] | None = None,
) -> Pipeline:
    """Say what each stage of a pipeline takes, without the devices.

    A stage is run as `forecast` runs a model, by torch's own stage and schedule, in place of the
    first of its data-parallel ranks: with the activations of as many micro-batches as the schedule
    keeps, torch's buffers for what is received, and messages to the neighbours. If your program
    calls `composable.fsdp2.install()`, call it before: gradients are then reduced once per step,
    and else in every micro-batch, as in training.

    Args:
        make_stage: makes a stage by its number; its parameters are on the meta device, whatever it
            says.
        annotate: what your program calls on a stage. It gets the stage and the mesh, e.g.
            `lambda part, mesh: fully_shard(part, mesh=mesh["dp"])`.
        make_batch: the first stage's input of one step on one rank, a tensor or a tuple of tensors.
            The schedule splits their first dimension into micro-batches.
        mesh: names and sizes of the dimensions, that of the stages first, e.g.
            `{"pp": 4, "dp": 16}`.
        micro_batches: of a step.
        schedule: "GPipe" or "1F1B".
        make_target: the target of one step on one rank. None: the loss gets none.
        loss: of the last stage's output, and of the target if there is one, a scalar. None: the sum
            of the output.
        device, optimizer, steps, progress: as for `forecast`.

    Raises:
        ForecastError: as from `forecast`; or a stage returns something other than tensors.
        ValueError: an argument makes no sense.

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
    check_functions(
        make_stage=make_stage,
        annotate=annotate,
        make_batch=make_batch,
        make_target=make_target,
        loss=loss,
        optimizer=optimizer,
    )
    if not takes_mesh(annotate):
        raise ValueError(
            "forecast_stages: annotate must take the stage and the mesh, and pass the dimensions of"
            ' the stage on, e.g. lambda part, mesh: fully_shard(part, mesh=mesh["dp"])'
        )
    _check_numbers(mesh, micro_batches, steps)
    kind, on_device = _schedule_of(schedule), device_of(device)
    dimension, count = next(iter(mesh.items()))
    stages: list[Forecast] = []
    passes: list[float] = []
    received: tuple[Tensor, ...] = ()  # by the next stage; on the meta device
    for index in range(count):
        machine = machine_of(on_device, progress, steps)
        groups: list[dist.ProcessGroup] = []

        def annotated(stage: nn.Module, whole: DeviceMesh) -> object:
            groups.append(whole.get_group(dimension))  # noqa: B023 - called in this round
            return annotate(stage, whole)

        rank = index * (prod(mesh.values()) // count)
        with running(machine, partial(make_stage, index), annotated, mesh, rank) as model:
            batch = () if index else _batch_of(make_batch, micro_batches)
            inputs = _described(tuple(t.chunk(micro_batches)[0] for t in batch)) or received
            received = _described(_outputs_of(model, index, inputs))
            stage = _Stage(machine, model, index, count, inputs, received, groups[0])
            if index < count - 1:
                target = None
            elif make_target is None:
                target = torch.zeros(micro_batches)
            else:
                target = make_target()
            loss_fn = (loss or _sum) if make_target else partial(_without_target, loss or _sum)
            made = kind(stage, micro_batches, loss_fn)
            run = partial(_step, stage, made, target)
            stages.append(train(machine, model, mesh, batch, optimizer, run, steps))
            passes.append(stage.seconds / micro_batches)
    return Pipeline(kind.__name__, micro_batches, tuple(stages), tuple(passes))


class _Stage(PipelineStage):
    """Tells the machine where it is.

    Attributes:
        seconds: from the beginning of the last step to the end of its last backward.
    """

    def __init__(
        self,
        machine: Machine,
        module: nn.Module,
        index: int,
        count: int,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(
            module, index, count, torch.device("cpu"), input_args=inputs, output_args=outputs,
            group=group,
        )  # fmt: skip
        self._machine = machine
        self.began = self.seconds = 0.0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._machine.phase = "forward"
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self._machine.phase = "backward"
        super().backward_one_chunk(*args, **kwargs)
        self._machine.unit = "(root)"  # it sends what this gave
        self.seconds = self._machine.now - self.began


def _step(
    stage: _Stage,
    schedule: PipelineScheduleSingle,
    target: Tensor | None,
    _: nn.Module,
    batch: tuple[Tensor, ...],
) -> None:
    stage.began = stage._machine.now
    schedule.step(*batch, target=target)


def _schedule_of(name: object) -> type[PipelineScheduleSingle]:
    found = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}.get(str(name).lower())
    if found is None:
        raise ValueError(
            f'forecast_stages: schedule={name!r} must be "GPipe" or "1F1B", which have one stage on'
            " each rank"
        )
    return found


def _check_numbers(mesh: object, *numbers: object) -> None:
    """Refuse what are no sizes of dimensions, and numbers of micro-batches and steps below one."""

    def is_count(number: object) -> bool:
        return isinstance(number, int) and number >= 1

    if not (isinstance(mesh, Mapping) and mesh and all(map(is_count, mesh.values()))):
        raise ValueError(
            f"forecast_stages: mesh={mesh!r} must be names of dimensions with their sizes, that of"
            ' the stages first, as in {"pp": 4, "dp": 16}'
        )
    if not all(map(is_count, numbers)):
        raise ValueError(
            f"forecast_stages: micro_batches={numbers[0]!r} and steps={numbers[1]!r} must be whole"
            " numbers of at least 1"
        )


def _batch_of(make_batch: Callable[[], Any], micro_batches: int) -> tuple[Tensor, ...]:
    made = make_batch()
    batch = made if isinstance(made, tuple) else (made,)
    for tensor in batch:
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            raise ValueError(
                "forecast_stages: make_batch must return a tensor, or a tuple of tensors, with rows;"
                f" it returned {type(made).__name__}. torch's stages pass tensors on by position"
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
    return tuple(
        torch.empty_strided(
            t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad
        )
        for t in tensors
    )


def _sum(output: Any, *_: Any) -> Tensor:
    return tensors_in(output)[0].sum()


def _without_target(loss: Callable[..., Tensor], output: Any, _: Tensor) -> Tensor:
    return loss(output)
