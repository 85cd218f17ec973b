"""What torch's gradient scaler is told where units are on fewer ranks than others: infinities elsewhere; unscales nothing.

Note [Scales]
Ranks that scale their losses by different numbers average gradients of different sizes, and nobody is told. So all ranks that
hold parts of a model skip a step that one of them skips; see Note [Parts of a model]. Nothing says that units are parts of one
model where each has an optimizer of its own, and no annotated module is around them: then one slice may skip a step that
another one takes, and scales drift apart. That is seen at the next step of what all ranks share.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives import reduce_numbers
from composable.device.private_operations import ask_after_unscaling
from composable.errors import OptimizerError
from composable.runtime.model_parts import parts_by_parameter, spread_by_parameter


@cache
def look_after_torchs_scaler() -> None:
    """Let `torch.amp.GradScaler` skip a step on all ranks that hold parts of a model, if one of them skips it."""
    ask_after_unscaling(_decide_together)


def _decide_together(optimizer: torch.optim.Optimizer, found: dict[torch.device, Tensor], inverse: Tensor) -> None:
    groups = _groups_of(optimizer)
    if not groups:
        return
    mine = max([float(number) for number in found.values()], default=0.0)
    numbers = torch.tensor([mine, float(inverse), -float(inverse)], dtype=torch.float64)
    for group, where in sorted(groups.items(), key=lambda each: -dist.get_world_size(each[0])):
        label = "all-reduce of whether gradients are finite"
        numbers = reduce_numbers(numbers.to(where, torch.float32), group, largest=True, label=label).double().cpu()
    infinite, largest, smallest = numbers.tolist()
    if largest != -smallest:
        raise OptimizerError(_different(1 / largest, -1 / smallest))
    if not found:  # the other ranks take a step or skip it, and this rank without gradients does as they do
        found[inverse.device] = torch.zeros((), device=inverse.device)
    for number in found.values():
        number.fill_(infinite)


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[dist.ProcessGroup, str]:
    """Of its parameters, those of the ranks that hold parts of one model, and the largest that any is spread over; and on which
    type of device they communicate."""
    spread = spread_by_parameter()
    if not spread:
        return {}
    parts = parts_by_parameter()
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    found = {part.group: part.mesh.device_type for key in given if (part := parts.get(key)) is not None}
    over = {spread[key].group: spread[key].mesh for key in given if key in spread}
    living = {group(): mesh.device_type for group, mesh in over.items() if group is not None and mesh is not None}
    whole = max(filter(None, [*living, *found]), key=dist.get_world_size, default=None)
    if whole is not None and whole not in found:
        found[whole] = living[whole]
    return found


def _different(least: float, most: float) -> str:
    return (
        f"GradScaler: the ranks have scaled their losses by different numbers, from {least:g} to {most:g}, so the gradients "
        "that they share are averages of unlike things. Some ranks skipped a step that others took: units on fewer ranks than "
        "the others (experts) have an optimizer of their own, and no annotated module contains both. Annotate a module around "
        "both, or step all parameters with one optimizer. To go on, load the scaler's state_dict() of one rank on all of them, "
        "and leave this step out"
    )
