"""What torch's own clipping is told: norms of gradients of several kinds, and which have none yet; scales nothing by itself.

Note [Gradients of several kinds]
`torch.nn.utils.clip_grad_norm_` puts the norms of all gradients together, and then scales them all at once. Torch refuses
lists in which some are DTensors and some are not, or of two meshes. And of DTensors it takes the largest element rank by rank:
one whose part is empty raises there, and the others wait for it. In these cases the norm is taken here: of what each rank has,
and then over the process groups that a gradient is cut over, all of them in one message for each group. What every rank has
whole is its own norm. Of experts on slices of a mesh, those of the other slices are added, too (Note [Parts of a model]); then
ranks also average what they have whole, so that all get the same number. Torch is handed this one number in place of the
gradients. All else is left to torch.

A gradient that a rank holds alone (`no_sync`) has no norm that all could scale by, and as a plain tensor it does not say so.
torch would clip it by numbers of this rank's. So torch asks first. Of parameters that backward steps, and of those in whose
place others are trained, it finds no gradients, and would return a norm of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from composable.device.private import local_of
from composable.device.private_operations import ask_before_clipping, extend_dtensor_operation
from composable.device.sums_over_groups import Share, groups_cut_over, over_all_ranks
from composable.errors import ClippingError
from composable.runtime.accumulation import any_window_open
from composable.runtime.early_steps import stepped_in_backward
from composable.runtime.model_parts import ModelPart, parts_by_gradient, parts_by_parameter
from composable.runtime.optimizer_hooks import refuse_not_trained
from composable.runtime.ownership import local_gradients

Groups = tuple[dist.ProcessGroup, ...]

_SCALE: Final = torch.ops.aten._foreach_mul_.Tensor


@cache
def look_after_torchs_clipping() -> None:
    """Let torch's own clipping take any mix of gradients, and none that this rank holds alone."""
    extend_dtensor_operation(_SCALE, _scale)
    ask_before_clipping(_refuse_held, _refuse_without_gradients, _in_one)


def _refuse_without_gradients(parameters: Any) -> None:
    if not isinstance(parameters, list):
        return
    refuse_not_trained("torch.nn.utils.clip_grad_norm_", parameters)
    if (name := stepped_in_backward(parameters)) is not None:
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


def _in_one(tensors: list[Tensor], order: float, parameters: list[Tensor] | None) -> list[Tensor]:
    """The norm of all of them in their place, if torch cannot take it: on the device of the first, in the widest dtype.

    Args:
        parameters: those that were given, if it was not gradients. So which way is taken, over which groups and in which dtype,
            does not depend on which gradients this rank has.
    """
    owners = tensors if parameters is None else parameters
    if len(owners) != len(tensors):
        owners = [owner for owner in owners if owner.requires_grad or owner.grad is not None]
    # Where this rank has no gradient, the parameter says what it would be like.
    kinds = tensors if len(owners) == len(tensors) else [p if p.grad is None else p.grad for p in owners]
    spread = [kind for kind in kinds if isinstance(kind, DTensor)]
    # Beside a plain number torch's norm would be a DTensor, by which it scales no plain tensor one by one.
    alike = len(spread) == len(kinds) and _are_alike(kinds)
    noted = parts_by_gradient(tensors) if parameters is None else parts_by_parameter()
    parts = [noted.get(id(owner)) for owner in owners] if noted else [None for _ in owners]
    model = max(filter(None, parts), key=lambda part: dist.get_world_size(part.group), default=None)
    if model is None and (not spread or (alike and 0 < order < math.inf)):
        return tensors
    if not order > 0:
        # For some of these a rank whose part is empty raises, and the others wait for it.
        raise ClippingError(
            f"clipping by torch.nn.utils: norm_type must be a positive number or inf, got {order}: no other norm of a tensor "
            "can be put together from those of its shards"
        )
    if any(map(_is_summand, tensors)):
        if model is None and alike:
            return tensors
        raise ClippingError(
            "clipping by torch.nn.utils: some of these gradients are this rank's summands (made under no_sync, and no backward "
            "since has averaged them), and others are not on the same mesh. Run the last backward before clipping outside of "
            "no_sync, or call reduce_gradients(model), on all ranks"
        )
    mesh = spread[0].device_mesh if spread else None
    at = mesh if model is None else model.mesh
    assert at is not None
    pairs = zip(kinds, owners, strict=True)
    locals_ = [None if parameters is not None and kind is owner else _local(kind) for kind, owner in pairs]
    norm = _over_ranks(list(zip(map(_groups_of, kinds), parts, locals_, strict=True)), order, at.device_type, model)
    norm = norm.to(_local(kinds[0]).device, reduce(torch.promote_types, [kind.dtype for kind in kinds]))
    if mesh is None or not alike or norm.device.type != mesh.device_type:
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


def _groups_of(tensor: Tensor) -> Groups:
    return groups_cut_over(tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()


def _over_ranks(
    counted: Sequence[tuple[Groups, ModelPart | None, Tensor | None]], order: float, at: str, model: ModelPart | None
) -> Tensor:
    """The norm of all gradients of all ranks.

    Args:
        counted: of each, what it is cut over, the part of a model that it is in, and what this rank has of it.
        at: the type of device that ranks communicate on.
        model: a part of the model whose ranks all take part, if it has parts.
    """
    largest = order == math.inf
    # What is no part is alike on all ranks that take part, if it is not cut over any.
    alike: dict[tuple[Groups, ModelPart | None], list[Tensor]] = {((), None): []}
    for groups, part, local in counted:
        alike.setdefault((groups, part), []).extend([] if local is None else [local])
    shares = []
    for (groups, part), locals_ in alike.items():
        number = _power(locals_, order).to(at)
        if part is not None:
            shares.append(Share(number, groups, part.group, part.mesh.size()))
        elif groups:
            shares.append(Share(number, groups))
        elif model is not None:
            shares.append(Share(number, (), model.group, dist.get_world_size(model.group)))
        elif locals_:
            shares.append(Share(number, ()))
    powers = over_all_ranks(shares, largest=largest, label="all-reduce of the norms of gradients")
    if not powers:
        return torch.zeros(())  # on one rank, without gradients
    together = torch.stack([power.to(powers[0].device) for power in powers])
    norm: Tensor = together.amax() if largest else together.sum() ** (1 / order)
    return norm


def _power(locals_: Sequence[Tensor], order: float) -> Tensor:
    """What is added up over ranks, or compared."""
    norms = [torch.linalg.vector_norm(each, order).double() for each in locals_ if each.numel()]  # nothing has no largest
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=locals_[0].device if locals_ else None)
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), order)
    power: Tensor = norm if order == math.inf else norm**order
    return power
