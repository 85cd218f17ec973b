"""Which parameters are a part of a model that other ranks hold other parts of, and who all these ranks are.

Note [Parts of a model]
Experts lie on slices of a mesh: the ranks of a slice share one, and those of the next slice another one, while a router or an
attention layer is all ranks'. A DTensor knows the ranks of its own slice only. That there are others tells a larger group: one
that contains these ranks and more, and whose parameters are in the same annotated module or in the same list. What lies on a
mesh of which one *dimension* is meant is no part: beside tensor parallel weights, a layer that is sharded over `mesh["dp"]` is
the same on all ranks of "tp", and no group of that model contains these of "dp" and more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable.device.collectives import reference_to
from composable.model.traversal import get_all_sharded_states, get_replicated_states
from composable.runtime.handle import HANDLES
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.ownership import units


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Where one part of a model lies.

    Attributes:
        mesh: of the ranks that hold it.
        group: of all ranks that hold parts of that model.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class _Note:
    """Units of `mesh_info`, and of no other one over the same ranks, are parts among the ranks of `group`."""

    mesh_info: ref[MeshInfo]
    around: ref[MeshInfo]  # of the annotation that says so
    group: ref[dist.ProcessGroup]
    size: int  # of the group, which may be destroyed by now


_notes: Final[list[_Note]] = []


def note_parts(modules: Sequence[nn.Module], mesh_info: MeshInfo) -> None:
    """Of units below `modules`, which are being annotated over `mesh_info`, those on fewer ranks than others hold a part of the
    model, of which the other ranks have other ones."""
    sharded = [state.handle.mesh_info for each in modules for state in get_all_sharded_states(each)]
    replicated = [state.averaging.mesh_info for each in modules for state in get_replicated_states(each)]
    around = [mesh_info, *sharded, *(each for each in replicated if each is not None)]
    found = list({id(each): each for each in around if each.mesh is not None}.values())
    groups = dict.fromkeys(each.group() for each in found if each.group is not None)
    _notes[:] = [note for note in _notes if note.mesh_info() is not None and note.group() is not None]  # those of the living
    for group in filter(None, groups):
        size = dist.get_world_size(group)
        parts = [each for each in found if each.mesh is not None and _contains(group, each.mesh)]
        _notes.extend(_Note(ref(each), ref(mesh_info), reference_to(group), size) for each in parts)


def forget_parts(mesh_info: MeshInfo) -> None:
    """The annotation of `mesh_info` was removed. Copies of it say the same as it did, as long as there are some."""
    others = [*(handle.mesh_info for handle in list(HANDLES)), *(unit.mesh_info for unit in units())]
    if not any(each is mesh_info for each in others):
        _notes[:] = [note for note in _notes if note.around() is not mesh_info]


def parts_by_parameter() -> dict[int, ModelPart]:
    """The parts that were noted, by the ids of their parameters as users see them between steps."""
    if not _notes:
        return {}
    noted = _noted()
    found = [(parameter, noted.get(id(mesh_info))) for parameter, mesh_info in _of_units()]
    return {id(parameter): part for parameter, part in found if part is not None}


def parts_by_gradient(tensors: Sequence[Tensor]) -> dict[int, ModelPart]:
    """The parts that `tensors` are gradients of, by their ids. A copy of a gradient does not tell whose it is."""
    if not _notes:
        return {}
    noted = _noted()
    by_gradient = {id(parameter.grad): noted.get(id(mesh_info)) for parameter, mesh_info in _of_units()}
    return {id(each): part for each in tensors if (part := by_gradient.get(id(each))) is not None}


def enclosing_group(
    mesh: DeviceMesh, noted: dist.ProcessGroup | None, groups: Iterable[dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    """The largest group, of what was noted of a part on `mesh` and of `groups`, that contains its ranks and others.

    See Note [Parts of a model].
    """
    known = () if noted is None else (noted,)
    return max((*known, *(group for group in groups if _contains(group, mesh))), key=dist.get_world_size, default=None)


def _contains(group: dist.ProcessGroup, mesh: DeviceMesh) -> bool:
    """Whether it has all ranks of `mesh` and others."""
    larger = dist.get_process_group_ranks(group)
    return len(larger) > mesh.size() and set(mesh.mesh.flatten().tolist()) <= set(larger)


def _of_units() -> Iterator[tuple[nn.Parameter, MeshInfo]]:
    """Every parameter of a unit, as users see it between steps."""
    for handle in list(HANDLES):
        for param in handle.parameters.params:
            yield param.sharded, handle.mesh_info
    for unit in units():
        if unit.mesh_info is not None:
            for parameter in unit.owned_at_rest:
                yield parameter, unit.mesh_info


def _noted() -> Mapping[int, ModelPart]:
    """By the id of the units' mesh info: the largest group that was noted for them."""
    found: dict[int, ModelPart] = {}
    for note in sorted(_notes, key=attrgetter("size")):
        mesh_info, group = note.mesh_info(), note.group()
        if mesh_info is not None and mesh_info.mesh is not None and group is not None:
            found[id(mesh_info)] = ModelPart(mesh_info.mesh, group)
    return found
