"""What torch's gradient scaler is told: whether to skip a step, by all ranks that train a model; unscales nothing by itself.

Note [Scales]
All ranks that hold parts of a model skip a step that one of them skips; see Note [One decision] and Note [Parts of a model].
So that they run the same collectives, the parameters of the optimizer alone say which, whatever gradients a rank has; once for
those of all dtypes. What other units live in the process says nothing: garbage is not collected on all ranks alike.

Ranks that scale their losses by different numbers average gradients of different sizes, and nobody is told. It comes to that
where experts have an optimizer of their own and no annotated module contains them and the rest: nothing says that they are
parts of one model, so one slice may skip a step that another one takes. So scales are compared where ranks meet anyway, on
hosts: of an accelerator the host would have to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable.device.collectives import reduce_numbers
from composable.device.infinities import deferred, groups_of
from composable.device.parameter_labels import label_of
from composable.device.private_operations import FoundInf, extend_unscaling
from composable.errors import OptimizerError
from composable.runtime.model_parts import parts_by_parameter


@cache
def look_after_torchs_scaler() -> None:
    """Let `torch.amp.GradScaler` skip a step on all ranks that hold parts of a model, if one of them skips it."""
    extend_unscaling(_decide_together)


def _decide_together(as_torch_does: Callable[[], FoundInf], optimizer: torch.optim.Optimizer, inverse: Tensor) -> FoundInf:
    groups = _groups_of(optimizer)
    if not groups:
        return as_torch_does()
    with deferred():
        found = as_torch_does()
    scale = inverse.reshape(1)
    mine = torch.stack([number.reshape(1).to(scale.device) for number in found.values()] or [torch.zeros_like(scale)]).amax(0)
    numbers = torch.cat([mine, torch.full_like(mine, bool(found)), scale, -scale])
    for group, where in groups.items():
        label = "all-reduce of whether gradients are finite"
        numbers = reduce_numbers(numbers.to(where), group, largest=True, label=label)
    if numbers.is_cpu:
        _, _, largest, smallest = numbers.tolist()
        if largest != -smallest:
            raise OptimizerError(_different(1 / largest, -1 / smallest))
    if not found and numbers[1].item():  # this rank, which has no gradient, steps or skips the step as the others do
        found[inverse.device] = torch.zeros_like(inverse)
    for number in found.values():
        number.copy_(numbers[0])
    return found


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[dist.ProcessGroup, str]:
    """Those of the ranks that hold parts of one model, and those that any of its parameters is cut over: the largest first. And
    on which type of device they communicate."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = parts_by_parameter()
    if not any(id(each) in parts or (isinstance(each, nn.Parameter) and label_of(each) is not None) for each in given):
        return {}  # other models are left to torch: not all of their ranks need have annotated something
    found = {part.group: part.mesh.device_type for each in given if (part := parts.get(id(each))) is not None}
    found |= {group: where for group, where in groups_of(given) if group not in found}
    return {group: found[group] for group in sorted(found, key=dist.get_world_size, reverse=True)}


def _different(least: float, most: float) -> str:
    return (
        f"GradScaler: the ranks have scaled their losses by different numbers, from {least:g} to {most:g}, so the gradients "
        "that they share are averages of unlike things. Some ranks skipped a step that others took: units on fewer ranks than "
        "the others (experts) have an optimizer of their own, and no annotated module contains both. Annotate a module around "
        "both, or step all parameters with one optimizer. To go on, make a scaler anew on all ranks, with one init_scale, and "
        "leave this step out"
    )
