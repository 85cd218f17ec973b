"""The norm of the gradients of any mix of sharded, replicated and plain parameters, and their scaling; knows no optimizer.

Note [Which collectives]
All ranks must run the same ones. So parameters alone say which: a DTensor whose placements cut it over a dimension of its
mesh makes that dimension's process group take part, whether or not this rank has a gradient, or anything, of it. Per group
there is one all-reduce of one number, or of a few where parameters are cut over several groups.

Note [Whole gradients]
What every rank holds whole is counted once. Where there is a collective anyway, each rank puts in its share of it, one over
the number of ranks: so even if ranks hold different values, or one of them NaN, all ranks get the same norm, scale their shards
of one gradient by the same number, and raise together.

Note [Experts]
Parameters on a slice of the ranks count once per slice, wherever the others of the list, or of the model, are on more ranks:
see Note [Parts of a model] in `composable.runtime.model_parts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable.api.meshes import communication_device, device_for_numbers
from composable.device.collectives import is_distributed, reduce_numbers
from composable.device.parameter_labels import label_of
from composable.device.private import local_of
from composable.device.sums_over_groups import Share, groups_cut_over, over_all_ranks
from composable.errors import ClippingError
from composable.runtime.model_parts import enclosing_group, parts_by_parameter
from composable.runtime.optimizer_hooks import Form
from composable.runtime.ownership import units

_DOUBLE: Final = (torch.float64, torch.complex128)
_HALF: Final = (torch.float16, torch.bfloat16)

Groups = tuple[dist.ProcessGroup, ...]
Placements = tuple[Placement, ...]


class _Spread:
    """Local gradients that are cut over the same process groups; none: every rank holds them whole.

    Attributes:
        mesh: of the ranks that hold these parameters, if they are not all.
        model: the group of the ranks that hold other parts of the model that these are of, if that is known.
        device: where its share of the norm is put together.
    """

    def __init__(self, groups: Groups, device: torch.device, mesh: DeviceMesh | None, model: dist.ProcessGroup | None) -> None:
        self.groups, self.device, self.mesh, self.model = groups, device, mesh, model
        self.copies = 1 if mesh is None else mesh.size()
        self.locals: list[Tensor] = []

    @cached_property
    def kinds(self) -> list[list[Tensor]]:
        """The local gradients that are not empty, those together that one kernel can take."""
        # An empty shard has no largest element, and nothing to scale.
        found = [local for local in self.locals if local.numel()]
        kinds = [(local.dtype, local.get_device()) for local in found]
        different = dict.fromkeys(kinds)
        if len(different) == 1:
            return [found]
        return [[local for local, k in zip(found, kinds, strict=True) if k == kind] for kind in different]

    def norm(self, order: float, device: torch.device) -> Tensor:
        """The norm of what this rank has, in single precision at least."""
        norms: list[Tensor] = []
        for locals_ in self.kinds:
            norms += torch._foreach_norm(locals_, order, dtype=torch.float32 if locals_[0].dtype in _HALF else None)
        if not norms:
            return torch.zeros((), device=device)
        in_place = len(self.kinds) == 1 and norms[0].device == device
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms if in_place else [n.to(device) for n in norms]), order)
        return norm


class Gradients:
    """The gradients of some parameters, in local tensors."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._spreads: dict[tuple[Groups, DeviceMesh | None, dist.ProcessGroup | None], _Spread] = {}
        self.device = _local(parameters[0]).device
        # As for the collectives, it is parameters that decide: ranks that round in different ways would drift apart.
        dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
        self.dtype = torch.float64 if any(dtype in _DOUBLE for dtype in dtypes) else torch.float32
        self._world = dist.get_world_size() if is_distributed() else 1
        found = [(unit, unit.mesh_info) for unit in units()] if self._world > 1 else []
        self._replicas = [(unit, info.mesh) for unit, info in found if info is not None and info.mesh is not None]
        self._collect(parameters)
        self._given = parameters

    def _collect(self, parameters: Sequence[Tensor]) -> None:
        """Sort the local gradients by what they are cut over. Written out: it runs for every parameter in every step."""
        held_by = self._replicated_on_some_ranks()
        models = {key: part.group for key, part in parts_by_parameter().items()} if self._world > 1 else {}
        mesh, placements, part = None, None, None
        last: dist.ProcessGroup | None = None
        whole = sharded = self._spread((), self.device).locals
        for parameter in parameters:
            gradient = parameter.grad
            model = models.get(id(parameter)) if models else None
            if not isinstance(parameter, DTensor):
                holders = held_by.get(id(parameter)) if held_by else None
                locals_ = whole if holders is None else self._spread((), self.device, holders, model).locals
                if isinstance(gradient, DTensor):
                    raise _spread_otherwise(parameter, gradient)
                if gradient is not None:
                    locals_.append(gradient)
                continue
            if parameter.device_mesh is not mesh or parameter.placements != placements or model is not last:
                mesh, placements, last = parameter.device_mesh, parameter.placements, model
                groups = _groups_of(mesh, placements)
                # Only units lie on slices; of tensor parallel parameters the ranks of the mesh have everything.
                part = mesh if mesh.size() < self._world else None
                at = communication_device(mesh, local_of(parameter).device)
                holders = part if _is_of_shards(parameter) else None
                sharded = self._spread(groups, at, holders, model).locals if groups else whole
            locals_ = sharded
            if sharded is whole and (part is not None or held_by):
                # A replicated parameter that rests beside shards has their mesh, whichever ranks have it.
                holders = part if _is_of_shards(parameter) else held_by.get(id(parameter))
                locals_ = whole if holders is None else self._spread((), at, holders, model).locals
            if gradient is None:
                continue
            if not isinstance(gradient, DTensor) or gradient.placements != placements:
                raise _spread_otherwise(parameter, gradient)
            if gradient.device_mesh is not mesh and gradient.device_mesh != mesh:
                raise _spread_otherwise(parameter, gradient)
            locals_.append(local_of(gradient))

    def _spread(
        self, groups: Groups, device: torch.device, mesh: DeviceMesh | None = None, model: dist.ProcessGroup | None = None
    ) -> _Spread:
        found = self._spreads.get((groups, mesh, model))
        if found is None:
            found = self._spreads[groups, mesh, model] = _Spread(groups, device, mesh, model)
        return found

    def total_norm(self, order: float) -> Tensor:
        """The norm of all gradients of all ranks, as if they were one vector: the same on all ranks."""
        whole, *others = self._spreads.values()
        enclosing = self._enclosing(others)
        for spread, larger in zip(others, enclosing, strict=True):
            if larger is None and not spread.groups:
                whole.locals, spread.locals = whole.locals + spread.locals, []
        pairs = zip(others, enclosing, strict=True)
        cut = [(spread, larger) for spread, larger in pairs if spread.groups or larger is not None]
        if not cut:
            return whole.norm(order, self.device).to(self.dtype)
        largest = order == math.inf
        alone = _power(whole.norm(order, cut[0][0].device), order)
        powers = [_power(spread.norm(order, spread.device), order) for spread, _ in cut]
        shares = [Share(power, one.groups, larger, one.copies) for power, (one, larger) in zip(powers, cut, strict=True)]
        around = max(filter(None, enclosing), key=dist.get_world_size, default=None)
        if around is not None:
            shares.append(Share(alone, (), around, dist.get_world_size(around)))
        else:
            first, num_shards = shares[0], math.prod(map(dist.get_world_size, shares[0].groups))
            together = torch.maximum(first.number, alone) if largest else first.number + alone / num_shards
            shares[0] = Share(together, first.groups)
        found = over_all_ranks(shares, largest=largest, label="all-reduce of the gradients' norm")
        at_home = torch.stack([power.to(self.device) for power in found])
        return (at_home.amax() if largest else at_home.sum() ** (1 / order)).to(self.dtype)

    def _enclosing(self, spreads: Sequence[_Spread]) -> list[dist.ProcessGroup | None]:
        """For each, the group of the ranks that hold other parts of the same model. See Note [Parts of a model]."""
        if all(spread.mesh is None for spread in spreads):
            return [None for _ in spreads]
        given = {id(parameter): None for parameter in self._given}
        here = [mesh for unit, mesh in self._replicas if any(id(parameter) in given for parameter in unit.owned_at_rest)]
        groups = list(dict.fromkeys([*self._groups, *(mesh.get_group() for mesh in here)]))
        return [None if each.mesh is None else enclosing_group(each.mesh, each.model, groups) for each in spreads]

    def _replicated_on_some_ranks(self) -> dict[int, DeviceMesh]:
        """The mesh of a replicated parameter, by its id, where not all ranks hold it."""
        found: dict[int, DeviceMesh] = {}
        for unit, mesh in self._replicas:
            if mesh.size() < self._world:
                found |= dict.fromkeys(map(id, unit.owned_at_rest), mesh)
        return found

    @property
    def _groups(self) -> Groups:
        return tuple(dict.fromkeys(group for spread in self._spreads.values() for group in spread.groups))

    def refuse_group(self, group: dist.ProcessGroup) -> None:
        """Raise if `group` is said to be a pipeline's, and gradients are cut over it: stages have different parameters."""
        if group in self._groups:
            raise ClippingError(
                "clip_grad_norm_: parameters are cut over pp_group, whose norm is taken over it anyway. Pass the group of the "
                "pipeline, or leave pp_group out"
            )

    def scale(self, coefficient: Tensor) -> None:
        """Multiply all gradients, in place."""
        if coefficient.is_cpu and coefficient.item() == 1:
            return  # nothing would change; on an accelerator, to ask would cost more than to multiply
        for spread in self._spreads.values():
            for locals_ in spread.kinds:
                torch._foreach_mul_(locals_, coefficient.to(locals_[0].device, locals_[0].dtype))


def over_stages(norm: Tensor, order: float, group: dist.ProcessGroup, device: torch.device | None) -> Tensor:
    """The norm of the gradients of all stages of a pipeline, of which this rank has `norm`, on `device` if any."""
    power = _power(norm.to(device_for_numbers(group, device)), order).reshape(1)
    label = "all-reduce of the gradients' norm over the pipeline"
    (found,) = reduce_numbers(power, group, largest=order == math.inf, label=label).unbind()
    return (found if order == math.inf else found ** (1 / order)).to(norm.device, norm.dtype)


def _groups_of(mesh: DeviceMesh, placements: Placements) -> Groups:
    """The process groups among which the parts of a DTensor must be added up."""
    if any(placement.is_partial() for placement in placements):
        raise ClippingError(
            f"clip_grad_norm_: of a parameter with placements {placements}, each rank holds a summand only, from which its "
            "norm cannot be told. Redistribute it first: p.redistribute(p.device_mesh, [Replicate()] * p.device_mesh.ndim)"
        )
    return groups_cut_over(mesh, placements)


def _is_of_shards(parameter: Tensor) -> bool:
    label = label_of(parameter) if isinstance(parameter, nn.Parameter) else None
    return label is not None and label[2] == Form.SHARDED.name


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _power(norm: Tensor, order: float) -> Tensor:
    """What is added up over ranks, or compared; in double precision, so that this overflows only where torch's own would."""
    return norm.double() if order == math.inf else norm.double() ** order


def _spread_otherwise(parameter: Tensor, gradient: Tensor) -> ClippingError:
    def spread(tensor: Tensor) -> str:
        return f"a DTensor with placements {tensor.placements}" if isinstance(tensor, DTensor) else "a plain tensor"

    cure = "p.grad = p.grad.redistribute(p.device_mesh, p.placements)"
    if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
        cure = "make both DTensors, or neither"
    return ClippingError(
        f"clip_grad_norm_: a parameter of shape {tuple(parameter.shape)} is {spread(parameter)}, but its gradient is "
        f"{spread(gradient)}; what it adds to the norm cannot be told without communication. First, {cure}."
    )
