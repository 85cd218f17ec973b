"""`describe`: an annotated model as a table of its units, or of its parameters.

It reads units and the registry, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import chain, product
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.api.mesh import is_alone
from composable.checked import checked
from composable.compilation import unwrapped
from composable.config import grad_reduce_in_words
from composable.contract.contract import registry
from composable.contract.tree import REPLICATE, SHARD, Place, annotation_of, registered_parameters
from composable.engine.params.layout import Slot
from composable.engine.params.param import ManagedParam
from composable.engine.params.param_group import ParamGroup
from composable.engine.step.unit import Unit, unit_of
from composable.errors import few, unit_name
from composable.features.groups import OffloadedGroup
from composable.features.hook_stages import names_of_hooks
from composable.memory.streams import any_has_streams, has_streams
from composable.tensors import slices_at
from composable.torch_private import local_tensor, locals_of

OFFLOAD: Final = "offload_activations"
NOT_ANNOTATED: Final = "(not annotated)"
IGNORED: Final = "(ignored)"
_COUNTS: Final = ("parameters", "numel", "bytes", "bytes_per_rank")
_OFFLOADED: Final = {
    "host": "parameters, gradients and optimizer state rest in the host's memory",
    "no effect": "no effect where ranks compute on the CPU",
}
_SHOWN: Final = 4  # parts of a parameter, and ranks of a part, in the table


@overload
def describe(module: nn.Module, *, by: Literal["unit"] = "unit") -> Description: ...


@overload
def describe(module: nn.Module, *, by: Literal["parameter"]) -> ParameterDescription: ...


@checked
def describe(
    module: nn.Module, *, by: Literal["unit", "parameter"] = "unit"
) -> Description | ParameterDescription:
    """Describe the units of an annotated model, or its parameters, in order.

    A row of a unit shows what the unit holds, and how it is distributed. A row of a parameter shows
    its form and dtype at rest, the dtypes of computation and of the reduction of its gradient,
    which rows are on which ranks, whether it is trained, and its unit.

    Parameters that are neither sharded nor replicated appear in a unit named "(not annotated)". If
    the rows are units, and other verbs were applied somewhere, its name is "(rest)". Parameters of
    `ignored_params` appear in "(ignored)". These units come last. Lines below the table name verbs
    on modules that are not units, and modules on which `offload_activations` has no effect.

    The result prints as a table. `rich.print` fits it to the terminal, and `to_dict()` returns
    plain values. `describe` sends nothing and changes nothing.

    Args:
        module: any model, annotated or not. It may be a part of a model, or the result of
            `torch.compile`.
        by: what a row is: "unit" or "parameter".

    Raises:
        ArgumentError: `by` is neither "unit" nor "parameter".

    Example:
        >>> print(describe(fully_shard(model, policy={Block})))
        >>> print(describe(model, by="parameter"))
    """
    module = unwrapped(module)
    rows: dict[Unit, UnitRow] = {}
    elsewhere: dict[str, tuple[str, ...]] = {}
    not_offloaded = []
    for name, below in module.named_modules():
        annotation = annotation_of(below)
        # first the verb that makes a unit, then the others in the order of the calls
        verbs = sorted(registry(below), key=lambda verb: verb not in (SHARD, REPLICATE))
        if annotation is None:
            for verb in verbs:
                elsewhere[verb] = (*elsewhere.get(verb, ()), unit_name(name))
        elif annotation.state not in rows:
            rows[annotation.state] = _unit_row(name, annotation.state, verbs)
        if OFFLOAD in verbs and _offloads_nothing(below):
            not_offloaded.append(unit_name(name))
    found = _parameters_of(module, {unit: row.unit for unit, row in rows.items()})
    if by == "parameter":
        parts_of = cache(_parts_of)
        return ParameterDescription(tuple(_parameter_row(each, parts_of) for each in found))
    ignored = [each.at_rest for each in found if each.unit_name == IGNORED]
    rest = [e.at_rest for e in found if e.unit not in rows and e.unit_name != IGNORED]
    others = [_row(IGNORED, [module], [], ignored)] if ignored else []
    if rest:
        name = "(rest)" if elsewhere else NOT_ANNOTATED
        others.append(_row(name, [module], list(registry(module)), rest))
    alone = tuple(
        row.unit
        for unit, row in rows.items()
        if is_alone(unit.mesh_info.mesh, (param.at_rest for param in unit.params))
    )
    return Description((*rows.values(), *others), elsewhere, tuple(not_offloaded), alone)


# --- tables, as text and for terminals ------------------------------------------------------------

Cells = tuple[str, ...]
R = TypeVar("R", bound="UnitRow | ParameterRow")


@dataclass(frozen=True, slots=True, repr=False)
class Table(Generic[R]):
    """What prints as a table, and what `rich.print` fits to the terminal.

    Attributes:
        header: the names of the columns.
        right: the names of columns that are aligned to the right.
        rows: above the total.
    """

    header: ClassVar[Cells]
    right: ClassVar[Cells] = ()

    rows: tuple[R, ...]

    def _total_cells(self) -> Cells:
        """Return a last row, below a rule; empty if there is none."""
        return ()

    def _notes(self) -> list[str]:
        """Return lines below the table."""
        return []

    def __str__(self) -> str:
        total = self._total_cells()
        cells = [self.header, *(row.cells() for row in self.rows), *([total] if total else [])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text = [
            "  ".join(
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for name, cell, width in zip(self.header, line, widths, strict=True)
            ).rstrip()
            for line in cells
        ]
        rule = "-" * max(map(len, text))
        text.insert(1, rule)
        if total:
            text.insert(-1, rule)
        return "\n".join([*text, *self._notes()])

    __repr__ = __str__

    def __rich__(self) -> Any:
        boxes, tables, text = map(import_module, ("rich.box", "rich.table", "rich.text"))
        total, notes = self._total_cells(), self._notes()
        made = tables.Table(
            box=boxes.SIMPLE,
            pad_edge=False,
            show_footer=bool(total),
            caption=text.Text("\n".join(notes)) if notes else None,
            caption_justify="left",
        )
        for index, name in enumerate(self.header):
            made.add_column(
                name,
                footer=total[index] if total else "",
                justify="right" if name in self.right else "left",
                overflow="fold",
                no_wrap=index == 0,
            )
        for row in self.rows:
            made.add_row(*map(text.Text, row.cells()))  # as they are: [0:2] is no markup
        return made


# --- units ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """One line of the table. Defaults are those of parameters that are each process's own.

    Attributes:
        unit: the FQN of its (first) module; empty for the module that `describe` was given.
        module: the class of its module, or of each of several.
        annotation: the verbs on its module.
        bytes, bytes_per_rank: of the whole unit, and of what this rank holds at rest.
        dtypes, computes_in, reduces_in: of parameters at rest, of parameters while modules compute,
            and of gradient messages.
        placements: of the parameters, as `DTensor` prints them; "replicated", or "local" for plain
            tensors of one process.
        after_forward: "keep last" (`reshard_after_forward=None`), "reshard", "keep" or "reshard to
            <number of ranks>".
        state: a name of `ShardedState`; "-" if nothing is gathered.
        grad_reduce: "mean", "sum" or "sum / <number>".
        comm_hook: the name of a communication hook.
        offload: "host" if parameters rest there by an offload policy; "no effect" if they are
            computed with there, too.
    """

    unit: str
    module: str
    annotation: str
    parameters: int
    numel: int
    bytes: int
    bytes_per_rank: int
    ranks: int = 1
    dtypes: tuple[str, ...]
    computes_in: tuple[str, ...]
    reduces_in: tuple[str, ...]
    placements: tuple[str, ...] = ("local",)
    after_forward: str = "-"
    state: str = "-"
    checkpointed: bool
    grad_reduce: str = "mean"
    comm_hook: str = ""
    offload: str = ""

    def cells(self) -> Cells:
        """Return the row of the table."""
        return (
            unit_name(self.unit),
            self.module,
            self.annotation,
            *_numbers(self.parameters, self.numel, self.bytes, self.bytes_per_rank),
            _dtypes(self) or "-",
            ", ".join(self.placements) or "-",
            self.after_forward,
            self.state,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Description(Table[UnitRow]):
    """What `describe` returns. Print it for a table, or take `to_dict()`.

    Attributes:
        rows: the units.
        elsewhere: other verbs, and the FQNs of modules that they are on and that are no units.
        not_offloaded: the FQNs of modules on which `offload_activations` has no effect.
        on_one_rank: the FQNs of units whose mesh has one rank, while the world has more: nothing is
            sharded, and no gradients are averaged. Units of tensor-parallel parameters are not
            among them.
    """

    header = (
        "unit", "module", "annotation", "params", "numel", "bytes", "per rank", "dtype",
        "placement", "after fwd", "state",
    )  # fmt: skip
    right = ("params", "numel", "bytes", "per rank")

    elsewhere: dict[str, tuple[str, ...]] = field(default_factory=dict)
    not_offloaded: tuple[str, ...] = ()
    on_one_rank: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        They are the same on every rank, except for `bytes_per_rank` of uneven shards and `state`.
        """
        return {
            "units": [asdict(row) for row in self.rows],
            "elsewhere": {verb: list(names) for verb, names in self.elsewhere.items()},
            "not_offloaded": list(self.not_offloaded),
            "on_one_rank": list(self.on_one_rank),
            "total": self._total(),
        }

    def _total(self) -> dict[str, int]:
        return {name: sum(getattr(row, name) for row in self.rows) for name in _COUNTS}

    @override
    def _total_cells(self) -> Cells:
        return ("total", "", "", *_numbers(*self._total().values()), "", "", "", "")

    @override
    def _notes(self) -> list[str]:
        notes = [
            f"{verb}, on modules that are no unit: {few(names)}"
            for verb, names in self.elsewhere.items()
        ]
        if self.not_offloaded:
            notes.append(
                f"{OFFLOAD}: nothing is copied where modules are on the CPU:"
                f" {few(self.not_offloaded)}"
            )
        if self.on_one_rank:
            notes.append(
                "over one rank, while the world has more: nothing is sharded, and gradients are not"
                f" averaged: {few(list(map(unit_name, self.on_one_rank)))}"
            )
        for offload, meaning in _OFFLOADED.items():
            if found := [unit_name(row.unit) for row in self.rows if row.offload == offload]:
                notes.append(f"offload_policy: {meaning}: {few(found)}")
        return notes


def _offloads_nothing(module: nn.Module) -> bool:
    tensors = chain(module.parameters(), module.buffers())
    devices = {tensor.device for tensor in tensors if not tensor.is_meta}
    # A module without parameters and buffers may run on any device.
    return not (any(map(has_streams, devices)) if devices else any_has_streams())


def _unit_row(name: str, unit: Unit, verbs: Sequence[str]) -> UnitRow:
    spec, is_sharded = unit.spec, unit.spec.verb == SHARD
    parameters = [param.at_rest for param in unit.params]
    offload = ""
    if spec.grouping.on_host:
        used = any(isinstance(group, OffloadedGroup) for group in unit.groups)
        offload = "host" if used else "no effect"
    # A unit whose parameters differ in dtype has several groups.
    states = _unique(group.state.name for group in unit.groups if group.takes_message)
    return replace(
        _row(name, unit.modules, verbs, parameters),
        ranks=unit.mesh_info.all.size,
        computes_in=_names_of(group.precision.compute for group in unit.groups),
        reduces_in=_names_of(group.precision.reduce for group in unit.groups),
        placements=_unique(map(_placements_of, parameters)) if is_sharded else ("replicated",),
        after_forward=_after_forward(spec.reshard_after_forward) if is_sharded else "-",
        state=", ".join(states) or "-",
        grad_reduce=grad_reduce_in_words(spec.divisor),
        comm_hook=names_of_hooks(unit.gradients),
        offload=offload,
    )


def _row(
    name: str, modules: Iterable[nn.Module], verbs: Sequence[str], parameters: Sequence[Tensor]
) -> UnitRow:
    """Make the row of parameters that are this process's own."""
    dtypes = _names_of(each.dtype for each in parameters)
    return UnitRow(
        unit=name,
        module=" + ".join(type(module).__name__ for module in modules),
        annotation=" + ".join(verbs) or "-",
        parameters=len(parameters),
        numel=sum(each.numel() for each in parameters),
        bytes=_bytes(parameters),
        bytes_per_rank=_bytes(locals_of(parameters)),
        dtypes=dtypes,
        computes_in=dtypes,
        reduces_in=dtypes,
        checkpointed="checkpoint" in verbs,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    # `nbytes` is not there for sparse tensors, which a module without an annotation may have
    return sum(each.numel() * each.element_size() for each in tensors)


def _after_forward(after: bool | int | None) -> str:
    if after is None:
        return "keep last"
    if isinstance(after, bool):
        return "reshard" if after else "keep"
    return f"reshard to {after}"


def _placements_of(parameter: nn.Parameter) -> str:
    return ", ".join(map(str, parameter.placements)) if isinstance(parameter, DTensor) else "local"


def _numbers(parameters: int, numel: int, whole: int, per_rank: int) -> tuple[str, ...]:
    return str(parameters), f"{numel:,}", readable_bytes(whole), readable_bytes(per_rank)


def _dtypes(row: UnitRow) -> str:
    """Name the dtypes of the parameters at rest, and whatever differs from them."""
    text = ", ".join(row.dtypes)
    if row.computes_in != row.dtypes:
        text += f" as {', '.join(row.computes_in)}"
    if row.reduces_in != row.computes_in:
        text += f", summed in {', '.join(row.reduces_in)}"
    text += "" if row.grad_reduce == "mean" else f", grad_reduce: {row.grad_reduce}"
    return f"{text}, comm_hook: {row.comm_hook}" if row.comm_hook else text


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _names_of(dtypes: Iterable[Any]) -> tuple[str, ...]:
    return _unique(map(_name_of, dtypes))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def readable_bytes(count: int) -> str:
    """Return a number of bytes in words.

    Example:
        >>> readable_bytes(3 << 19)
        '1.50 MiB'
    """
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {name}"
    return f"{count} B"


# --- parameters -----------------------------------------------------------------------------------

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


class _Described(NamedTuple):
    """A parameter, and the unit that manages it, if any, with its group and slot there.

    A unit that rests on the host has no groups.
    """

    at_rest: nn.Parameter
    names: list[str]
    unit_name: str
    unit: Unit | None = None
    param: ManagedParam | None = None
    group: ParamGroup | None = None
    slot: Slot | None = None


def _parameters_of(module: nn.Module, units: dict[Unit, str]) -> list[_Described]:
    """List the parameters in `module`; `units` are those below it, with their FQNs there."""
    registered = list(registered_parameters(module, stop=()))
    for _, parameter in registered:
        if (unit := unit_of(parameter)) is not None:  # which may be of a module around `module`
            units.setdefault(unit, unit.name)
    ignored = {id(place.registered) for unit in units for place in unit.spec.left_alone}
    # in scopes and calls modules hold something else than what rests
    managed: dict[Place | int, _Described] = {}
    for unit, name in units.items():
        slots = {param: (group, slot) for group in unit.groups for param, slot in group.members}
        for param in unit.params:
            of_group = slots.get(param, (None, None))
            each = _Described(param.at_rest, [], name, unit, param, *of_group)
            # also where it was tied later, at another place
            managed |= dict.fromkeys([*param.info.places, id(param.at_rest)], each)
    found: dict[int, _Described] = {}
    for place, parameter in registered:
        other = _Described(parameter, [], IGNORED if id(parameter) in ignored else NOT_ANNOTATED)
        each = managed.get(place) or managed.get(id(parameter), other)
        found.setdefault(id(each.at_rest), each).names.append(place.fqn)
    return list(found.values())


def _mesh_and_placements(each: _Described) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return the mesh of all ranks that have a part or a copy, and the placements there."""
    own = each.at_rest if isinstance(each.at_rest, DTensor) else None
    kept: tuple[Placement, ...] = ()
    mesh = None if own is None else own.device_mesh
    if each.unit is not None and each.param is not None:
        info = each.param.info
        mesh = info.form.mesh_at_rest((info.mesh_info or each.unit.mesh_info).mesh)
        kept = tuple(info.form.kept)
    if mesh is None:
        return None
    if own is not None and own.device_mesh == mesh:
        return mesh, tuple(own.placements)
    # replicated parameters rest as users made them: also over fewer dimensions
    return mesh, (*kept, *[Replicate()] * (mesh.ndim - len(kept)))


def _parameter_row(each: _Described, parts_of: Any) -> ParameterRow:
    at_rest, group, slot = each.at_rest, each.group, each.slot
    shape, local, found = tuple(at_rest.shape), local_tensor(at_rest), _mesh_and_placements(each)
    parts = () if found is None else parts_of(*found, shape)
    rank = dist.get_rank() if parts else 0
    own = next((part.slices for part in parts if rank in part.ranks), tuple((0, n) for n in shape))
    padding = 0
    if group is not None and slot is not None:
        padding = slot.chunk_numel - slot.local_numel(group.comm.rank)
    return ParameterRow(
        name=each.names[0],
        tied=tuple(each.names[1:]),
        unit=each.unit_name,
        annotation="-" if each.unit is None else each.unit.spec.verb,
        shape=shape,
        placements=tuple(map(str, at_rest.placements)) if isinstance(at_rest, DTensor) else (),
        local_class="Tensor" if type(local) in (Tensor, nn.Parameter) else type(local).__name__,
        device=str(local.device),
        dtype=_name_of(at_rest.dtype),
        computes_in="" if group is None else _name_of(group.precision.compute),
        reduces_in="" if group is None else _name_of(group.precision.reduce),
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
