"""`clip_grad_norm_`: one norm over any mix of sharded, replicated and plain parameters.

The norm is the same on all ranks.

All ranks have to run the same collectives. So parameters alone decide which: the process groups
over which a parameter's placements shard it take part, whether or not this rank has a gradient or
an element of it. Each group gathers one number per combination of groups over which parameters are
sharded (data and tensor parallel).

Gradients that are the same on all ranks of a group are counted once: each rank adds its share, one
over the number of ranks. So even if ranks hold different values, or one of them NaN, all ranks get
the same norm and scale their shards alike.

A parameter on fewer ranks than the rest of the model is an expert: other ranks hold other experts
in its place. All of them count, each once, so its norm is summed over the ranks of the whole model
(`model_group_of`), divided by the number of copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable.checked import checked
from composable.comm.backends import is_distributed, reduce_numbers
from composable.comm.base import backend_of
from composable.compilation import untraced
from composable.engine.params.param import (
    holds_unreduced,
    label_of,
    mesh_of,
    model_group_of,
    unit_mesh_of,
)
from composable.engine.step.observer import Observer, notify
from composable.errors import ClippingError, NonFiniteError, kind_of
from composable.optim.in_backward import stepped_in_backward
from composable.optim.refusals import is_trained, refuse_unreduced
from composable.torch_private import locals_of, modes_are_on

Groups = tuple[dist.ProcessGroup, ...]

_EPSILON: Final = 1e-6  # torch's: keeps gradients of norm 0 finite
_DOUBLE: Final = (torch.float64, torch.complex128)
_HALF: Final = (torch.float16, torch.bfloat16)


@untraced
@checked
@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float | Literal["inf"] = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients down, in place, if their norm is above `max_norm`.

    The norm covers all parameters and all ranks. The result is the same as that of
    `torch.nn.utils.clip_grad_norm_` on the model before it was annotated. torch's function needs
    parameters that are all DTensors of one mesh. This function accepts any mix. All ranks call it
    together, with the same parameters in the same order.

    Gradients that are plain tensors count once, because they are the same on all ranks. If no unit
    manages a parameter (`ignored_params`), average its gradient before you call this. Units on a
    part of the model's ranks (experts) count once per part.

    Args:
        module: a module, a tensor, or an iterable of tensors.
        max_norm: the largest norm that gradients have afterwards.
        norm_type: the order of the norm: positive, or inf for the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or NaN, on all ranks, before any gradient
            changes. The host then waits for the accelerator.
        pp_group: the process group of a pipeline, whose ranks have different parameters. The norm
            then covers all stages. Every rank of the group calls this function, even if it has no
            parameters.

    Returns:
        The norm before clipping, as a plain tensor without dimensions. It is the same on all ranks.
        Its dtype is float64 if a parameter is float64, and float32 otherwise, also for half
        precision.

    Raises:
        ClippingError: an argument is not valid, a parameter is not the one that the model trains,
            or a gradient is not placed on the mesh like its parameter.
        NonFiniteError: the norm is not finite, and `error_if_nonfinite` is set.

    Example:
        >>> loss.backward()
        >>> norm = clip_grad_norm_(model, 1.0)
        >>> optimizer.step()

    After Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
    (ICML 2013).
    """
    try:
        limit, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError, RuntimeError):
        limit = order = math.nan
    if not (limit >= 0 and order > 0):
        raise ClippingError(
            "clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must"
            f" be a positive number or inf, got {max_norm!r} and {norm_type!r}. To measure the norm"
            " only, pass max_norm=float('inf')"
        )
    if pp_group is not None and dist.get_rank(pp_group) < 0:
        raise ClippingError(
            "clip_grad_norm_: pp_group must be that of the pipeline that this rank is a stage of."
            ' Of a mesh, pass mesh["pp"].get_group()'
        )
    parameters = _parameters_of(module)
    if (name := stepped_in_backward(parameters)) is not None:
        raise ClippingError(
            f"clip_grad_norm_: {name} is stepped in backward (apply_optimizer_in_backward), before"
            " the gradients of the other parameters are there. Clip, or step in backward"
        )
    notify(Observer.communicates, "clip", parameters, limit, order, error_if_nonfinite)
    gradients = _LocalGradients(parameters)
    total = gradients.total_norm(order)
    if pp_group is not None:
        if pp_group in gradients.groups:
            raise ClippingError(
                "clip_grad_norm_: parameters are sharded over pp_group, whose ranks are counted"
                " anyway. Pass the group of the pipeline, or leave pp_group out"
            )
        power, label = _power(total, order), "reduction of the norm of gradients over the pipeline"
        power = reduce_over(pp_group, power.reshape(1), label, largest=order == math.inf)[0]
        total = _root(power, order).to(total.dtype)
    if error_if_nonfinite and not total.isfinite():
        raise NonFiniteError(
            f"clip_grad_norm_: the norm of order {order:g} over all gradients is {total.item()}. No"
            " gradient was changed. Skip this step: optimizer.zero_grad(), then the next batch;"
            " with a GradScaler, pass error_if_nonfinite=False"
        )
    gradients.scale((limit / (total + _EPSILON)).clamp(max=1.0))
    return total


# --- gradients, by the ranks over which they are summed -----------------------------------------


@dataclass(eq=False, slots=True)
class _Part:
    """Gradients that are summed over the same ranks.

    Attributes:
        groups: the process groups over which the gradients are sharded; none: every rank holds them
            whole.
        mesh: that the parameters are on, of their units and of the user, if it does not have all
            ranks of the process.
        model_group: the ranks of the model of which these are a part, if known.
        tree: the outermost annotation around their units.
    """

    groups: Groups = ()
    mesh: DeviceMesh | None = None
    model_group: dist.ProcessGroup | None = None
    tree: object = None
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def copies(self) -> int:
        """The number of ranks of `mesh` that hold the same values."""
        return 1 if self.mesh is None else self.mesh.size() // _num_ranks(self.groups)

    def lists(self) -> list[list[Tensor]]:
        """The local gradients that are not empty, in lists of one dtype and device."""
        # an empty shard has no largest element, and nothing to scale
        return alike([local for local in locals_of(self.gradients) if local.numel()])

    def norm(self, order: float, device: torch.device) -> Tensor:
        """The norm of what this rank has, in single precision at least."""
        norms: list[Tensor] = []
        for locals_ in self.lists():
            norms += torch._foreach_norm(
                locals_, order, dtype=torch.float32 if locals_[0].dtype in _HALF else None
            )
        if not norms:
            return torch.zeros((), device=device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), order)
        return norm


class _LocalGradients:
    """The gradients of some parameters, in local tensors."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.device = locals_of(parameters)[0].device if parameters else torch.device("cpu")
        # Parameters decide, and not gradients, since all ranks have to round alike and run the same
        # collectives.
        self.dtype = torch.float64 if any(p.dtype in _DOUBLE for p in parameters) else torch.float32
        self._parts: dict[tuple[Any, ...], _Part] = {}
        self._meshes: dict[int, tuple[DeviceMesh, object]] = {}  # of units, and their trees
        self._across: Groups = ()  # over which parameters of units are tensor parallel
        world = dist.get_world_size() if is_distributed() else 1
        last: tuple[Any, ...] = ()
        for parameter in parameters:
            gradient, label = parameter.grad, label_of(parameter)
            if label is not None and not is_trained(parameter, label):
                raise ClippingError(
                    f"clip_grad_norm_: {label} is not the one that is trained: it is from before"
                    " its module was annotated, or was replaced since, or is registered only while"
                    " modules compute. Pass the model, or model.parameters() as of now"
                )
            unit_mesh, mesh, tree, group = None, None, None, None
            if label is not None and world > 1:
                (unit_mesh, tree), group = unit_mesh_of(parameter), model_group_of(parameter)
                mesh = mesh_of(parameter)  # the unit's may have some of its ranks only
            if unit_mesh is not None:
                self._meshes[id(unit_mesh)] = unit_mesh, tree
            if mesh is not None and mesh.size() == world:
                mesh = None
            placed = _placed(parameter)
            # neighbours mostly are alike, and a look-up costs more than the comparison
            if last != (placed, mesh, group, tree):
                last = placed, mesh, group, tree
                groups = _groups_of(parameter)
                if unit_mesh is not None:
                    own = [unit_mesh.get_group(dim) for dim in range(unit_mesh.ndim)]
                    self._across += tuple(group for group in groups if group not in own)
                part = self._parts.setdefault(
                    (groups, mesh, group, id(tree)), _Part(groups, mesh, group, tree)
                )
            if gradient is None:
                continue
            if placed != _placed(gradient) or (placed is None and holds_unreduced(parameter)):
                refuse_unreduced("clip_grad_norm_", [parameter], ClippingError)
                raise ClippingError(
                    f"clip_grad_norm_: a parameter of shape {tuple(parameter.shape)} is"
                    f" {_described(parameter)}, but its gradient is {_described(gradient)}."
                    " Redistribute the gradient to the parameter's mesh and placements first"
                )
            part.gradients.append(gradient)

    @property
    def groups(self) -> Groups:
        """All process groups over which one of the parameters is sharded."""
        return tuple(dict.fromkeys(group for part in self._parts.values() for group in part.groups))

    def _model_group(self, part: _Part) -> dist.ProcessGroup | None:
        """The largest known group that has all ranks of the part's units and others.

        Those others hold other experts. None if there is no such group. Besides the group of an
        annotation around the units, parameters in the same list tell of such groups. The groups of
        a tensor parallel mesh are not among them, of which each has one rank of `mesh["dp"]`, all
        of them if there is one. Nor is a group of the same tree, where the annotation around
        decides: experts may be on more ranks than the parameters around them.
        """
        if part.mesh is None:
            return None
        ranks = set(part.mesh.mesh.flatten().tolist())
        seen = [(each.tree, group) for each in self._parts.values() for group in each.groups]
        known = [
            group for tree, group in seen if tree is not part.tree and group not in self._across
        ]
        for mesh, tree in self._meshes.values():
            if mesh.ndim == 1 and tree is not part.tree:
                known.append(mesh.get_group())
        if part.model_group is not None:
            known.append(part.model_group)
        larger = [
            group
            for group in dict.fromkeys(known)
            if ranks < set(dist.get_process_group_ranks(group))
        ]
        return max(larger, key=dist.get_world_size, default=None)

    def total_norm(self, order: float) -> Tensor:
        """The norm of all gradients of all ranks, as if they were one vector.

        It is the same on all ranks.
        """
        largest = order == math.inf
        join = torch.maximum if largest else torch.add
        shares: dict[Groups, Tensor] = {}
        whole = _Part()
        for part in self._parts.values():
            model_group = self._model_group(part)
            if model_group is None and not part.groups:
                whole.gradients += part.gradients
                continue
            groups, power = part.groups, _power(part.norm(order, self.device), order)
            if model_group is not None:
                groups, power = (model_group,), power if largest else power / part.copies
            shares[groups] = power if groups not in shares else join(shares[groups], power)
        norm = whole.norm(order, self.device)
        if not shares:
            return norm.to(self.dtype)
        most, power = max(shares, key=_num_ranks), _power(norm, order)
        shares[most] = join(shares[most], power if largest else power / _num_ranks(most))
        for group in dict.fromkeys(group for groups in shares for group in groups):
            over = [groups for groups in shares if group in groups]
            sent = torch.stack([shares[groups] for groups in over])
            found = reduce_over(group, sent, "reduction of the norm of gradients", largest=largest)
            shares |= dict(zip(over, found.unbind(), strict=True))
        together = torch.stack(list(shares.values()))
        return _root(together.amax() if largest else together.sum(), order).to(self.dtype)

    def scale(self, coefficient: Tensor) -> None:
        """Multiply all gradients, in place."""
        # On an accelerator, asking would cost more than multiplying. Below a dispatch mode a tensor
        # may have no value.
        if coefficient.is_cpu and not modes_are_on() and coefficient.item() == 1:
            return
        for part in self._parts.values():
            for locals_ in part.lists():
                torch._foreach_mul_(locals_, coefficient.to(locals_[0].device, locals_[0].dtype))


def _groups_of(parameter: Tensor) -> Groups:
    if not isinstance(parameter, DTensor):
        return ()
    placements = parameter.placements
    if any(placement.is_partial() for placement in placements):
        raise ClippingError(
            f"clip_grad_norm_: of a parameter with placements {placements}, each rank holds a"
            " summand only. Redistribute it first: p.redistribute(p.device_mesh, [Replicate()]"
            " * p.device_mesh.ndim)"
        )
    return groups_sharded_over(parameter.device_mesh, placements)


def groups_sharded_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> Groups:
    """The process groups over which the parts of a DTensor add up to the whole.

    None on a rank outside of its mesh.
    """
    if mesh.get_coordinate() is None:
        return ()
    sharded = [
        dim
        for dim, placement in enumerate(placements)
        if mesh.size(dim) > 1 and not placement.is_replicate()
    ]
    return tuple(map(mesh.get_group, sharded))


def reduce_over(group: dist.ProcessGroup, numbers: Tensor, text: str, *, largest: bool) -> Tensor:
    """The sum, or the largest, of all ranks' `numbers` (1-D), one by one.

    The result is on the device that they are on here. Numbers on the host come from parameters
    under CPU offload, or from a pipeline stage without parameters, while other stages send from the
    accelerator: so the accelerator is preferred if it has a backend of its own.
    """
    device = numbers.device
    if device.type == "cpu" and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        if backend_of(group, accelerator) not in ("undefined", backend_of(group, device)):
            device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return reduce_numbers(numbers.to(device), group, largest=largest, text=text).to(numbers.device)


def _num_ranks(groups: Groups) -> int:
    return math.prod(map(dist.get_world_size, groups))


def _power(norm: Tensor, order: float) -> Tensor:
    """What is summed over ranks, or compared.

    In double precision, so that it overflows only where the norm does.
    """
    return norm.double() if order == math.inf else norm.double() ** order


def _root(power: Tensor, order: float) -> Tensor:
    return power if order == math.inf else power ** (1 / order)


def _placed(tensor: Tensor) -> tuple[Any, ...] | None:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _described(tensor: Tensor) -> str:
    return (
        f"a DTensor with placements {tensor.placements}"
        if isinstance(tensor, DTensor)
        else "a plain tensor"
    )


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors of one dtype and device, which one kernel can take."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def _parameters_of(given: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    found: Any = given.parameters() if isinstance(given, nn.Module) else given
    if isinstance(found, Tensor) or not isinstance(found, Iterable):
        found = [found]
    members = {id(each): each for each in found}
    for each in members.values():
        if not isinstance(each, Tensor):
            raise ClippingError(
                "clip_grad_norm_: module must be a module, a tensor or an iterable of tensors, got"
                f" {kind_of(each)} in it. Pass the model, or model.parameters()"
            )
    return list(members.values())
