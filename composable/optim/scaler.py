"""`torch.amp.GradScaler` over annotated models: a step that one rank skips is skipped by all.

torch's scaler looks for infinities in the gradients of its own rank. If they are DTensors, it also
compares the ranks over which the *first* gradient in the list is sharded, and it refuses lists with
both DTensors and plain tensors. If the first gradient is replicated, every rank would therefore
decide for itself. Experts on different meshes would not know of each other, and a rank without a
gradient would not take part. Here every rank checks and unscales its local gradients. Then the
ranks agree, over all process groups over which a parameter of the optimizer is sharded or trained
together (`model_group_of`). Only parameters decide which groups, so all ranks run the same
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable.contract.values import parameters_of
from composable.engine.params.param import labels_of, model_group_of
from composable.engine.step.observer import Observer, notify
from composable.errors import OptimizerError
from composable.optim.clip import alike, groups_sharded_over, reduce_over
from composable.optim.in_backward import OptimizerInBackward
from composable.torch_private import locals_of, wrap_unscaling

Found = dict[torch.device, Tensor]  # by device: 1.0 if a gradient is not finite


@torch.no_grad()
def unscale_gradients(parameters: list[Tensor], inverse_scale: Tensor, allow_fp16: bool) -> Found:
    """Unscale gradients, in place, and say on which devices one is not finite on any rank."""
    found = _unscale_locally(parameters, inverse_scale, allow_fp16)
    groups = _groups_of(parameters)
    if not groups:
        return found
    # is one not finite, has a rank gradients
    numbers = torch.zeros(2, dtype=torch.float32, device=inverse_scale.device)
    if found:
        numbers[0] = torch.stack([each.to(numbers.device) for each in found.values()]).amax()
        numbers[1] = 1.0
    for group in groups:
        numbers = reduce_over(
            group, numbers, "reduction of whether gradients are finite", largest=True
        )
    # this rank has no gradients, and steps or skips the step as the others do
    if not found and numbers[1].item():
        found[inverse_scale.device] = torch.zeros_like(inverse_scale)
    for each in found.values():
        each.copy_(numbers[0])
    return found


def _unscale_locally(parameters: list[Tensor], inverse_scale: Tensor, allow_fp16: bool) -> Found:
    """What torch's method does, over local tensors."""
    local: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.dtype is torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if parameter.grad.is_sparse:
            # duplicates are added up before the look for infinities
            parameter.grad = parameter.grad.coalesce()
            local.append(parameter.grad._values())
        else:
            local += locals_of([parameter.grad])
    found: Found = {}
    for gradients in alike(local):
        device = gradients[0].device
        number = found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        # A blocking copy: torch's own does not wait, and under CPU offload the host would read it
        # before it is there.
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, number, inverse_scale.to(device)
        )
    return found


def _groups_of(parameters: list[Tensor]) -> list[dist.ProcessGroup]:
    """The groups that have to agree, the largest first; that one alone if it has all ranks of the
    job.
    """
    found: dict[dist.ProcessGroup, None] = {}
    for parameter in parameters:
        if (group := model_group_of(parameter)) is not None:
            found[group] = None
        if isinstance(parameter, DTensor):
            found |= dict.fromkeys(groups_sharded_over(parameter.device_mesh, parameter.placements))
    groups = sorted(found, key=dist.get_world_size, reverse=True)
    has_all = groups and dist.get_world_size(groups[0]) == dist.get_world_size()
    return groups[:1] if has_all else groups


def _extended(unscale: Callable[..., Found]) -> Callable[..., Found]:
    @wraps(unscale)
    def unscaled(
        self: Any,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool = True,
        *args: Any,
    ) -> Found:
        if isinstance(optimizer, OptimizerInBackward):
            raise OptimizerError(
                "apply_optimizer_in_backward: a GradScaler came to step this optimizer, but"
                " backward has stepped already, with gradients that were scaled and may have been"
                " infinite. Train in float32 or bfloat16 without a scaler, or with an optimizer"
                " that steps after backward; load the last checkpoint first"
            )
        parameters = parameters_of(optimizer)
        if not any(labels_of(parameters)):  # other models are torch's
            return unscale(self, optimizer, inv_scale, found_inf, allow_fp16, *args)
        notify(Observer.communicates, "unscale", parameters, self, inv_scale, allow_fp16)
        return unscale_gradients(parameters, inv_scale, allow_fp16)

    return unscaled


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Bring what a scaler has noted on an optimizer to the host, where it steps offloaded
    parameters there: torch's own copy does not wait, and fused kernels would read it before it is
    there.
    """
    for name in ("found_inf", "grad_scale"):
        number = getattr(optimizer, name, None)
        if isinstance(number, Tensor) and number.device.type != "cpu":
            on_host = [each for each in parameters_of(optimizer) if each.device.type == "cpu"]
            if any(labels_of(on_host)):
                setattr(optimizer, name, number.cpu())


register_optimizer_step_pre_hook(_before_step)

wrap_unscaling(_extended)
