"""`describe(model, by="parameter")`: the at-rest form of each parameter, and its rows by rank.

It reads units and what they manage, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from composable.contract.tree import SHARD, Place, annotation_of, registered_parameters
from composable.engine.params.layout import Slot
from composable.engine.params.param import ManagedParam
from composable.engine.params.param_group import ParamGroup
from composable.engine.step.unit import Unit, unit_of
from composable.errors import unit_name
from composable.report.table import Cells, Table
from composable.tensors.dtensors import slices_at
from composable.torch_private import local_tensor

NOT_ANNOTATED: Final = "(not annotated)"
IGNORED: Final = "(ignored)"
_SHOWN: Final = 4  # parts of a parameter, and ranks of a part, in the table

Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What some ranks have of a parameter.

    Attributes:
        ranks: of the world; several have copies.
        slices: first index and the one after the last along each dimension of the whole parameter;
            equal ones where a shard is empty.
    """

    ranks: tuple[int, ...]
    slices: Slices


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter.

    Attributes:
        name: the FQN, the first one of a tied parameter.
        tied: its other FQNs.
        unit: the FQN of its unit, empty for the module that `describe` was given; "(ignored)" for
            `ignored_params`, "(not annotated)" for parameters of no unit.
        annotation: the verb of the unit; "-" if there is none.
        shape: of the whole.
        placements: at rest, as `DTensor` prints them; none for a plain tensor.
        local_class: of what is at rest on this rank: "Tensor", or a class with the extension
            protocol.
        device: at rest.
        dtype, computes_in, reduces_in: at rest, while modules compute, and of gradient messages;
            the last two are empty for a parameter of no unit, and for a unit that rests on the host
            (`offload_to_host`).
        padding: elements that this rank's part of a message has beyond its shard, since every rank
            sends as many as the first.
        slices: which part of the whole this rank has.
        parts: what the ranks of its mesh have, in the order of ranks; none where each process has a
            tensor of its own, and for placements of classes that torch does not document.
        trainable: whether it requires a gradient.
    """

    name: str
    tied: tuple[str, ...]
    unit: str
    annotation: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    local_class: str
    device: str
    dtype: str
    computes_in: str
    reduces_in: str
    padding: int
    slices: Slices
    parts: tuple[Part, ...]
    trainable: bool

    def cells(self) -> Cells:
        """Return the row of the table."""
        return (
            " = ".join((self.name, *self.tied)),
            self.unit if self.unit in (IGNORED, NOT_ANNOTATED) else unit_name(self.unit),
            " x ".join(map(str, self.shape)) or "scalar",
            _at_rest(self),
            self.dtype,
            self.computes_in or "-",
            (self.reduces_in or "-") if self.trainable else "frozen",
            _part_in_words(self.slices, self.shape),
            _parts_in_words(self),
        )


@dataclass(frozen=True, slots=True, repr=False)
class ParameterDescription(Table[ParameterRow]):
    """What `describe(model, by="parameter")` returns. Print it for a table, or take `to_dict()`.

    Attributes:
        rows: the parameters, in the order of `named_parameters()`; tied ones once.
    """

    header = (
        "parameter", "unit", "shape", "at rest", "dtype", "computes in", "reduced in", "this rank",
        "on ranks",
    )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        They are the same on every rank, except for `slices`, `padding`, and `parts` of parameters
        whose mesh has some ranks only, as plain ones beside tensor-parallel ones.
        """
        return {"parameters": [asdict(row) for row in self.rows]}


def describe_parameters(module: nn.Module) -> ParameterDescription:
    """Describe the parameters of an annotated model, or of any other one."""
    units: dict[Unit, str] = {}
    for name, below in module.named_modules():
        if (annotation := annotation_of(below)) is not None:
            units.setdefault(annotation.state, name)
    registered = list(registered_parameters(module, stop=()))
    for _, parameter in registered:
        if (unit := unit_of(parameter)) is not None:  # which may be of a module around `module`
            units.setdefault(unit, unit.name)
    # in scopes and calls modules hold something else than what rests
    managed = {place: each for unit in units for each in _of(unit) for place in each.places}
    ignored = {id(place.registered) for unit in units for place in unit.spec.left_alone}

    found: dict[object, tuple[_Described, list[str]]] = {}
    for place, parameter in registered:
        each = managed.get(place) or _Described(parameter)
        key = each.param or id(parameter)
        found.setdefault(key, (each, []))[1].append(place.fqn)
    parts_of = cache(_parts_of)
    rows = []
    for each, names in found.values():
        unit_named = IGNORED if id(each.at_rest) in ignored else NOT_ANNOTATED
        if each.unit is not None:
            unit_named = units[each.unit]
        rows.append(_row(each, names, unit_named, parts_of))
    return ParameterDescription(tuple(rows))


@dataclass(frozen=True, slots=True)
class _Described:
    """A parameter, and the unit that manages it, if any, with its group and slot there.

    A unit that rests on the host has no groups.
    """

    at_rest: nn.Parameter
    unit: Unit | None = None
    param: ManagedParam | None = None
    group: ParamGroup | None = None
    slot: Slot | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        return () if self.param is None else self.param.info.places

    @property
    def mesh_and_placements(self) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        """The mesh of all ranks that have a part or a copy, and the placements there."""
        own = self.at_rest if isinstance(self.at_rest, DTensor) else None
        kept: tuple[Placement, ...] = ()
        mesh = None if own is None else own.device_mesh
        if self.unit is not None and self.param is not None:
            info = self.param.info
            mesh = info.form.mesh_at_rest((info.mesh_info or self.unit.mesh_info).mesh)
            kept = tuple(info.form.kept)
        if mesh is None:
            return None
        if own is not None and own.device_mesh == mesh:
            return mesh, tuple(own.placements)
        # replicated parameters rest as users made them: also over fewer dimensions
        return mesh, (*kept, *[Replicate()] * (mesh.ndim - len(kept)))


def _of(unit: Unit) -> list[_Described]:
    grouped = {
        param: (group, slot)
        for group in unit.groups
        for param, slot in zip(group.params, group.slots, strict=True)
    }
    return [
        _Described(param.at_rest, unit, param, *grouped.get(param, (None, None)))
        for param in unit.params
    ]


def _row(each: _Described, names: Sequence[str], unit: str, parts_of: Any) -> ParameterRow:
    at_rest, group, slot = each.at_rest, each.group, each.slot
    shape, local, found = tuple(at_rest.shape), local_tensor(at_rest), each.mesh_and_placements
    parts = () if found is None else parts_of(*found, shape)
    rank = dist.get_rank() if parts else 0
    own = next((part.slices for part in parts if rank in part.ranks), tuple((0, n) for n in shape))
    padding = 0
    if group is not None and slot is not None:
        padding = slot.chunk_numel - slot.local_numel(group.comm.rank)
    return ParameterRow(
        name=names[0],
        tied=tuple(names[1:]),
        unit=unit,
        annotation="-" if each.unit is None else each.unit.spec.verb,
        shape=shape,
        placements=tuple(map(str, at_rest.placements)) if isinstance(at_rest, DTensor) else (),
        local_class="Tensor" if type(local) in (Tensor, nn.Parameter) else type(local).__name__,
        device=str(local.device),
        dtype=name_of(at_rest.dtype),
        computes_in="" if group is None else name_of(group.precision.compute),
        reduces_in="" if group is None else name_of(group.precision.reduce),
        padding=padding,
        slices=own,
        parts=parts,
        trainable=at_rest.requires_grad,
    )


def _parts_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[Part, ...]:
    """Return what the ranks of a mesh have; nothing where placements do not tell."""
    found: dict[Slices, list[int]] = {}
    ranks = mesh.mesh.flatten().tolist()
    for rank, place in zip(ranks, product(*map(range, mesh.shape)), strict=True):
        slices = slices_at(place, mesh, placements, shape)
        if slices is None:
            return ()
        found.setdefault(slices, []).append(rank)
    parts = [Part(tuple(sorted(ranks)), slices) for slices, ranks in found.items()]
    return tuple(sorted(parts, key=lambda part: part.ranks))


def name_of(dtype: torch.dtype) -> str:
    """As `float32`."""
    return str(dtype).removeprefix("torch.")


# --- as text ------------------------------------------------------------------------------------


def _at_rest(row: ParameterRow) -> str:
    text = f"DTensor {', '.join(row.placements)}" if row.placements else "plain"
    if row.annotation not in (SHARD, "-") and not row.placements:
        text += ", replicated"
    if row.local_class != "Tensor":
        text += f", {row.local_class}"
    if row.padding:
        text += f", padded by {row.padding}"
    return text


def _part_in_words(slices: Slices, shape: tuple[int, ...]) -> str:
    """As one would cut it out of the whole: `[0:2]`, or `[:, 2:4]` of columns."""
    cuts = [
        ":" if (start, end) == (0, size) else f"{start}:{end}"
        for (start, end), size in zip(slices, shape, strict=True)
    ]
    while cuts and cuts[-1] == ":":
        cuts.pop()
    if not cuts:
        return "all"
    return "none" if any(start == end for start, end in slices) else f"[{', '.join(cuts)}]"


def _parts_in_words(row: ParameterRow) -> str:
    said = [
        f"{_ranks_in_words(part.ranks)}: {_part_in_words(part.slices, row.shape)}"
        for part in row.parts
    ]
    if len(said) > _SHOWN:
        said[_SHOWN - 2 : -1] = ["..."]
    return "  ".join(said) or "-"


def _ranks_in_words(ranks: tuple[int, ...]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"{first}-{last}"
    if len(ranks) > _SHOWN:
        return f"{first},{ranks[1]},...,{last}"
    return ",".join(map(str, ranks))
