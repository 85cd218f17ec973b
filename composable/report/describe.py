"""`describe`: an annotated model's units as a table; `parameters.py` makes one of parameters.

It reads units and the registry, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Final, Literal, overload

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from composable.api.mesh import is_alone
from composable.checked import checked
from composable.comm import is_distributed
from composable.compilation import unwrapped
from composable.config import grad_reduce_in_words
from composable.contract.contract import registry
from composable.contract.tree import REPLICATE, SHARD, annotation_of, managed_parameters
from composable.engine.step.unit import Unit, unit_of
from composable.errors import few, unit_name
from composable.features.groups import OffloadedGroup
from composable.features.hook_stages import names_of_hooks
from composable.memory.streams import any_has_streams, has_streams
from composable.report.parameters import (
    IGNORED,
    NOT_ANNOTATED,
    ParameterDescription,
    describe_parameters,
    name_of,
)
from composable.report.table import Cells, Table
from composable.torch_private import locals_of

OFFLOAD: Final = "offload_activations"
_COUNTS: Final = ("parameters", "numel", "bytes", "bytes_per_rank")
_OFFLOADED: Final = {
    "host": "parameters, gradients and optimizer state rest in the host's memory",
    "no effect": "no effect where ranks compute on the CPU",
}


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
    if by == "parameter":
        return describe_parameters(module)
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
    others = []
    if ignored := _ignored(rows):
        others.append(_row(IGNORED, [module], [], ignored))
    rest = [managed.tensor for managed in managed_parameters([module])]
    if rest and annotation_of(module) is None:
        name = "(rest)" if elsewhere else NOT_ANNOTATED
        others.append(_row(name, [module], list(registry(module)), rest))
    alone = tuple(row.unit for unit, row in rows.items() if _is_on_one_rank(unit))
    return Description((*rows.values(), *others), elsewhere, tuple(not_offloaded), alone)


def _is_on_one_rank(unit: Unit) -> bool:
    mesh = unit.mesh_info.mesh
    at_rest = (param.at_rest for param in unit.params)
    return mesh is not None and is_distributed() and is_alone(mesh, at_rest)


def _offloads_nothing(module: nn.Module) -> bool:
    tensors = chain(module.parameters(), module.buffers())
    devices = {tensor.device for tensor in tensors if not tensor.is_meta}
    # A module without parameters and buffers may run on any device.
    return not (any(map(has_streams, devices)) if devices else any_has_streams())


def _ignored(units: Iterable[Unit]) -> list[nn.Parameter]:
    """`ignored_params`, which the caller trains, each rank its own."""
    registered = [place.registered for unit in units for place in unit.spec.left_alone]
    found = [each for each in registered if each is not None and unit_of(each) is None]
    return list({id(each): each for each in found}.values())


def _unit_row(name: str, unit: Unit, verbs: Sequence[str]) -> UnitRow:
    spec, is_sharded = unit.spec, unit.spec.verb == SHARD
    parameters = [param.at_rest for param in unit.params]
    offload = ""
    if spec.grouping.on_host:
        used = any(isinstance(group, OffloadedGroup) for group in unit.groups)
        offload = "host" if used else "no effect"
    return _row(
        name,
        unit.modules,
        verbs,
        parameters,
        ranks=unit.mesh_info.all.size,
        computes_in=_names_of(group.precision.compute for group in unit.groups),
        reduces_in=_names_of(group.precision.reduce for group in unit.groups),
        placements=_unique(map(_placements_of, parameters)) if is_sharded else ("replicated",),
        after_forward=_after_forward(spec.reshard_after_forward) if is_sharded else "-",
        # A unit whose parameters differ in dtype has several groups.
        state=", ".join(_unique(group.state.name for group in unit.groups if group.takes_message))
        or "-",
        grad_reduce=grad_reduce_in_words(spec.divisor),
        comm_hook=names_of_hooks(unit.gradients),
        offload=offload,
    )


def _row(
    name: str,
    modules: Iterable[nn.Module],
    verbs: Sequence[str],
    parameters: Sequence[nn.Parameter],
    **of_unit: Any,
) -> UnitRow:
    """Make the row of parameters that are this process's own, or with what is known `of_unit`."""
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
        checkpointed="checkpoint" in verbs,
        **({"computes_in": dtypes, "reduces_in": dtypes} | of_unit),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
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


def _names_of(dtypes: Iterable[Any]) -> tuple[str, ...]:
    return _unique(map(name_of, dtypes))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
