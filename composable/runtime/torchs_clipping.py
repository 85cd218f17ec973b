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
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from composable.device.private import local_of
from composable.device.private_operations import ask_before_clipping, extend_dtensor_operation
from composable.device.sums_over_groups import Share, over_all_ranks
from composable.errors import ClippingError
from composable.runtime.accumulation import any_window_open
from composable.runtime.early_steps import stepped_in_backward
from composable.runtime.model_parts import Part, parts_by_gradient, parts_by_parameter
from composable.runtime.optimizer_hooks import refuse_not_trained
from composable.runtime.ownership import local_gradients

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


class _Counted(NamedTuple):
    """A gradient, or the parameter that has none on this rank, and the part of a model that it is of, if any."""

    tensor: Tensor
    is_here: bool
    part: Part | None


def _in_one(tensors: list[Tensor], order: float, parameters: Sequence[Tensor] | None) -> list[Tensor]:
    """The norm of all of them in their place, if torch cannot take it: on the device of the first, in the widest dtype."""
    # Which way is taken, over which groups and in which dtype must not depend on which gradients this rank has.
    kinds = tensors if parameters is None or len(tensors) == len(parameters) else _kinds_of(parameters)
    parts = parts_by_gradient(tensors) if parameters is None else parts_by_parameter()
    spread = [kind for kind in kinds if isinstance(kind, DTensor)]
    # Beside a plain number torch's norm would be a DTensor, by which it scales no plain tensor one by one.
    alike = len(spread) == len(kinds) and _are_alike(kinds)
    if not parts and (not spread or (alike and 0 < order < math.inf)):
        return tensors
    counted = _counted(tensors, parameters, parts)
    model = max([part for *_, part in counted if part is not None], key=_size_of, default=None)
    if (spread or model is not None) and not order > 0:
        # For some of these a rank whose part is empty raises, and the others wait for it.
        raise ClippingError(
            f"clipping by torch.nn.utils: norm_type must be a positive number or inf, got {order}: no other norm of a tensor "
            "can be put together from those of its shards"
        )
    if (model is None and (not spread or (alike and order != math.inf))) or any(map(_is_summand, tensors)):
        return tensors
    mesh = spread[0].device_mesh if spread else None
    norm = _over_ranks(counted, order, model)
    norm = norm.to(_local(kinds[0]).device, reduce(torch.promote_types, [kind.dtype for kind in kinds]))
    if mesh is None or not alike or norm.device.type != mesh.device_type:
        return [norm]
    return [DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)]


def _kinds_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients, and those that train and have none."""
    found = [(parameter, parameter.grad) for parameter in parameters]
    return [p if gradient is None else gradient for p, gradient in found if gradient is not None or p.requires_grad]


def _counted(tensors: Sequence[Tensor], parameters: Sequence[Tensor] | None, parts: Mapping[int, Part]) -> list[_Counted]:
    if parameters is None:
        return [_Counted(tensor, True, parts.get(id(tensor))) for tensor in tensors]
    found = [(p if p.grad is None else p.grad, p.grad is not None, p) for p in parameters]
    return [_Counted(each, is_here, parts.get(id(p))) for each, is_here, p in found if is_here or p.requires_grad]


def _size_of(part: Part) -> int:
    return dist.get_world_size(part.group)


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


def _groups_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Those that it is cut over."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return ()  # ranks outside of its mesh have nothing of it
    mesh, placements = tensor.device_mesh, tensor.placements
    cut = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1 and not placements[dim].is_replicate()]
    return tuple(mesh.get_group(dim) for dim in cut)


def _over_ranks(counted: Sequence[_Counted], order: float, model: Part | None) -> Tensor:
    """The norm of all gradients of all ranks.

    Args:
        model: a part of the model whose ranks all take part, if it has parts.
    """
    largest = order == math.inf
    meshes = [each.tensor.device_mesh for each in counted if isinstance(each.tensor, DTensor)]
    at = (meshes[0] if model is None else model.mesh).device_type  # ranks communicate there
    # What is no part is alike on all ranks that take part, if it is not cut over any.
    alike: dict[tuple[tuple[dist.ProcessGroup, ...], Part | None], list[Tensor]] = {((), None): []}
    for tensor, is_here, part in counted:
        alike.setdefault((_groups_of(tensor), part), []).extend([_local(tensor)] if is_here else [])
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
