"""What torch's own clipping is told: norms of gradients of several kinds, and which have none yet; scales nothing by itself.

Note [Gradients of several kinds]
`torch.nn.utils.clip_grad_norm_` puts the norms of all gradients together, and then scales them all at once. Torch refuses
lists in which some are DTensors and some are not, or of two meshes. And of DTensors it takes the largest element rank by rank:
one whose part is empty raises there, and the others wait for it. In these cases the norm is taken here: of what each rank has,
and then over the process groups that a gradient is cut over, all of them in one message for each group. What every rank has
whole is its own norm. Torch is handed this one number in place of the gradients. All else is left to torch.

A gradient that a rank holds alone (`no_sync`) has no norm that all could scale by, and as a plain tensor it does not say so.
torch would clip it by numbers of this rank's. So torch asks first. Of parameters that backward steps it finds no gradients, and
would return a norm of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from composable.device.collectives import reduce_numbers
from composable.device.private import local_of
from composable.device.private_operations import ask_before_clipping, extend_dtensor_operation
from composable.errors import ClippingError
from composable.runtime.accumulation import any_window_open
from composable.runtime.early_steps import stepped_in_backward
from composable.runtime.ownership import local_gradients

_SCALE: Final = torch.ops.aten._foreach_mul_.Tensor


@cache
def look_after_torchs_clipping() -> None:
    """Let torch's own clipping take any mix of gradients, and none that this rank holds alone."""
    extend_dtensor_operation(_SCALE, _scale)
    ask_before_clipping(_refuse_held, _refuse_stepped, _in_one)


def _refuse_stepped(parameters: Any) -> None:
    if isinstance(parameters, list) and (name := stepped_in_backward(parameters)) is not None:
        raise ClippingError(
            f"torch.nn.utils.clip_grad_norm_: {name} is stepped in backward (apply_optimizer_in_backward), as soon as its "
            "gradient is there and before the others are; there is none left to clip. Clip, or step in backward"
        )


def _refuse_held(gradients: Any) -> None:
    """Of those that rest as DTensors, torch knows that they are summands; the others are plain tensors."""
    if not any_window_open() or not isinstance(gradients, list):
        return
    given = {id(gradient): None for gradient in gradients if not isinstance(gradient, DTensor)}
    for parameter, unit, name in local_gradients():
        if parameter.grad is not None and id(parameter.grad) in given:
            raise ClippingError(
                f"clipping by torch.nn.utils: the gradient of parameter '{name}' of unit '{unit}' is this rank's alone: it "
                "was made under no_sync, and no backward since has averaged it over the ranks. Each rank would clip by numbers "
                "of its own. Run the last backward before clipping outside of no_sync, or call reduce_gradients(model), on all "
                "ranks"
            )


def _in_one(tensors: list[Tensor], order: float) -> list[Tensor]:
    """The norm of all of them in their place, if torch cannot take it: on the device of the first, in the widest dtype."""
    spread = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if spread and not order > 0:
        # For some of these a rank whose part is empty raises, and the others wait for it.
        raise ClippingError(
            f"clipping by torch.nn.utils: norm_type must be a positive number or inf, got {order}: no other norm of a tensor "
            "can be put together from those of its shards"
        )
    # Beside a plain number torch's norm would be a DTensor, by which it scales no plain tensor one by one.
    alike = len(spread) == len(tensors) and _are_alike(tensors)
    if not spread or (alike and order != math.inf) or any(map(_is_summand, tensors)):
        return tensors
    # An empty tensor has no largest element, and adds nothing.
    locals_ = [local if local.numel() else local.new_zeros(1) for local in map(_local, tensors)]
    norms = _over_ranks(tensors, [torch.linalg.vector_norm(local, order) for local in locals_], order)
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), order)
    mesh = spread[0].device_mesh
    if not alike or norm.device.type != mesh.device_type:
        return [norm]
    return [DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)]


def _scale(operation: Any, args: tuple[Any, ...], kwargs: Any, as_torch_does: Callable[[], Any]) -> Any:
    tensors, factor = args
    # Summands are scaled here: torch 2.11 scales copies of them, and drops these.
    summands = [tensor for tensor in tensors if _is_summand(tensor)]
    as_they_are = _are_alike([*tensors, factor]) and not summands
    if as_they_are or factor.ndim or _is_summand(factor) or not all(map(_scales_with_its_terms, summands)):
        return as_torch_does()
    return operation([_local(tensor) for tensor in tensors], _local(factor), **(kwargs or {}))


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are DTensors of one mesh, but for plain numbers, which torch takes for copies."""
    spread = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    others = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.ndim]
    return not others and all(tensor.device_mesh == spread[0].device_mesh for tensor in spread)


def _is_summand(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def _scales_with_its_terms(tensor: Any) -> bool:
    """Whether the whole is scaled when every rank scales what it has: of a product or a maximum that is not so."""
    return all(placement.reduce_op in ("sum", "avg") for placement in tensor.placements if placement.is_partial())


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _over_ranks(tensors: Sequence[Tensor], norms: Sequence[Tensor], order: float) -> list[Tensor]:
    """The norms of whole gradients, of those of this rank's parts."""
    found = list(norms)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            cut = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1 and not placements[dim].is_replicate()]
            by_groups.setdefault(tuple(mesh.get_group(dim) for dim in cut), []).append(index)
    for groups, members in by_groups.items():
        if not groups:
            continue
        numbers = torch.stack([norms[index] for index in members]).double()
        numbers = numbers if order == math.inf else numbers**order
        mesh = tensors[members[0]].device_mesh  # type: ignore[attr-defined]
        numbers = numbers.to(mesh.device_type)
        for group in groups:
            label = "all-reduce of the norms of gradients"
            numbers = reduce_numbers(numbers, group, largest=order == math.inf, label=label)
        numbers = numbers if order == math.inf else numbers ** (1 / order)
        for index, number in zip(members, numbers.unbind(), strict=True):
            found[index] = number.to(norms[index].device, norms[index].dtype)
    return found
