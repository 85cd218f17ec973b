"""`describe`: the units of an annotated model as a table; `parameters.py` has the other one.

It reads units and the registry, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, overload

from torch import nn
from torch.distributed.tensor import DTensor

from composable.compilation import unwrapped
from composable.config import grad_reduce_in_words
from composable.contract.contract import registry
from composable.contract.tree import REPLICATE, SHARD, annotation_of, managed_parameters
from composable.engine.step.unit import Unit, unit_of
from composable.errors import few, unit_name
from composable.features.hook_stages import names_of_hooks
from composable.features.offloaded import OffloadedGroup
from composable.memory.streams import any_has_streams, has_streams
from composable.report.parameters import ParameterDescription, describe_parameters
from composable.report.table import plain, rich
from composable.torch_private import locals_of

OFFLOAD: Final = "offload_activations"
_HEADER: Final = (
    "unit", "module", "annotation", "params", "numel", "bytes",
    "per rank", "dtype", "placement", "after fwd", "state",
)  # fmt: skip
_RIGHT_ALIGNED: Final = ("params", "numel", "bytes", "per rank")
_OFFLOADED: Final = {
    "host": "parameters, gradients and optimizer state rest in the host's memory",
    "no effect": "no effect where ranks compute on the CPU",
}


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One line of the table.

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
    ranks: int
    dtypes: tuple[str, ...]
    computes_in: tuple[str, ...]
    reduces_in: tuple[str, ...]
    placements: tuple[str, ...]
    after_forward: str
    state: str
    checkpointed: bool
    grad_reduce: str = "mean"
    comm_hook: str = ""
    offload: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """What `describe` returns. Print it for a table, or take `to_dict()`.

    Attributes:
        rows: the units.
        elsewhere: other verbs, and the FQNs of modules that they are on and that are no units.
        not_offloaded: the FQNs of modules on which `offload_activations` has no effect.
    """

    rows: tuple[UnitRow, ...]
    elsewhere: dict[str, tuple[str, ...]] = field(default_factory=dict)
    not_offloaded: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        They are the same on every rank, except for `bytes_per_rank` of uneven shards and `state`.
        """
        return {
            "units": [asdict(row) for row in self.rows],
            "elsewhere": {verb: list(names) for verb, names in self.elsewhere.items()},
            "not_offloaded": list(self.not_offloaded),
            "total": self._total(),
        }

    def _total(self) -> dict[str, int]:
        names = ("parameters", "numel", "bytes", "bytes_per_rank")
        return {name: sum(getattr(row, name) for row in self.rows) for name in names}

    def __str__(self) -> str:
        rows, total = self._cells()
        lines = plain(_HEADER, rows, right=_RIGHT_ALIGNED, total=total)
        return "\n".join([*lines, *self._notes()])

    def __rich__(self) -> Any:
        rows, total = self._cells()
        return rich(_HEADER, rows, right=_RIGHT_ALIGNED, total=total, notes=self._notes())

    def _cells(self) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        total = ("total", "", "", *_numbers(*self._total().values()), "", "", "", "")
        return [*map(_cells, self.rows)], total

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
        for offload, meaning in _OFFLOADED.items():
            if found := [unit_name(row.unit) for row in self.rows if row.offload == offload]:
                notes.append(f"offload_policy: {meaning}: {few(found)}")
        return notes

    __repr__ = __str__


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


def describe(
    module: nn.Module, *, by: Literal["unit", "parameter"] = "unit"
) -> Description | ParameterDescription:
    """Describe the units of an annotated model, or its parameters, in order.

    For each unit, say what it holds, and how it is distributed. For each parameter, say how it
    rests and in which dtype, in what it is computed with and its gradient reduced, which rows are
    on which ranks, whether it is trained, and whose unit it is.

    Parameters that are neither sharded nor replicated are of a unit named "(not annotated)", or
    "(rest)" if units are described and other verbs were applied somewhere; those of
    `ignored_params` of "(ignored)". As units they come last.
    Verbs on modules that are no units are named below the table, and so are modules on which
    `offload_activations` has no effect.

    The result prints as a table, `rich.print` fits it to the terminal, and `to_dict()` returns
    plain values. Nothing is sent, and nothing changes.

    Args:
        module: an annotated model, or any other one. It may be a part of a model, or what
            `torch.compile` returned.
        by: what a row is: "unit" or "parameter".

    Raises:
        ValueError: `by` is something else.

    Example:
        >>> print(describe(fully_shard(model, policy={Block})))
        >>> print(describe(model, by="parameter"))
    """
    if by not in ("unit", "parameter"):
        raise ValueError(f'describe: by={by!r} must be "unit" or "parameter"')
    module = unwrapped(module)
    if by == "parameter":
        return describe_parameters(module)
    rows: dict[Unit, UnitRow] = {}
    elsewhere: dict[str, list[str]] = {}
    not_offloaded = []
    for name, below in module.named_modules():
        annotation = annotation_of(below)
        # first the verb that makes a unit, then the others in the order of the calls
        verbs = sorted(registry(below), key=lambda verb: verb not in (SHARD, REPLICATE))
        if annotation is None:
            for verb in verbs:
                elsewhere.setdefault(verb, []).append(unit_name(name))
        elif annotation.state not in rows:
            rows[annotation.state] = _unit_row(name, annotation.state, verbs)
        if OFFLOAD in verbs and _offloads_nothing(below):
            not_offloaded.append(unit_name(name))
    named = {verb: tuple(names) for verb, names in elsewhere.items()}
    rest = (*_ignored(module, rows), *_unmanaged(module, named=bool(elsewhere)))
    return Description((*rows.values(), *rest), named, tuple(not_offloaded))


def _offloads_nothing(module: nn.Module) -> bool:
    devices = {
        tensor.device
        for held in (module.parameters(), module.buffers())
        for tensor in held
        if not tensor.is_meta
    }
    # A module without parameters and buffers may run on any device.
    return not (any(map(has_streams, devices)) if devices else any_has_streams())


def _unit_row(name: str, unit: Unit, verbs: Sequence[str]) -> UnitRow:
    spec, is_sharded = unit.spec, unit.spec.verb == SHARD
    parameters = [param.at_rest for param in unit.params]
    offload = ""
    if spec.grouping.on_host:
        offload = (
            "host"
            if any(isinstance(group, OffloadedGroup) for group in unit.groups)
            else "no effect"
        )
    return replace(
        _plain_row(
            name, " + ".join(type(module).__name__ for module in unit.modules), verbs, parameters
        ),
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


def _plain_row(
    name: str, module: str, verbs: Sequence[str], parameters: Sequence[nn.Parameter]
) -> UnitRow:
    """Make the row of parameters that are this process's own."""
    local = locals_of(parameters)
    dtypes = _names_of(each.dtype for each in parameters)
    return UnitRow(
        unit=name,
        module=module,
        annotation=" + ".join(verbs) or "-",
        parameters=len(parameters),
        numel=sum(each.numel() for each in parameters),
        bytes=sum(each.numel() * each.element_size() for each in parameters),
        bytes_per_rank=sum(each.numel() * each.element_size() for each in local),
        ranks=1,
        dtypes=dtypes,
        computes_in=dtypes,
        reduces_in=dtypes,
        placements=("local",),
        after_forward="-",
        state="-",
        checkpointed="checkpoint" in verbs,
    )


def _after_forward(after: bool | int | None) -> str:
    if after is None:
        return "keep last"
    if isinstance(after, bool):
        return "reshard" if after else "keep"
    return f"reshard to {after}"


def _placements_of(parameter: nn.Parameter) -> str:
    return ", ".join(map(str, parameter.placements)) if isinstance(parameter, DTensor) else "local"


def _ignored(module: nn.Module, units: Iterable[Unit]) -> list[UnitRow]:
    """Make a row for `ignored_params`, which the caller trains, each rank its own."""
    registered = (place.registered for unit in units for place in unit.spec.left_alone)
    left = {
        id(found): found for found in registered if found is not None and unit_of(found) is None
    }
    return [_plain_row("(ignored)", type(module).__name__, [], list(left.values()))] if left else []


def _unmanaged(module: nn.Module, *, named: bool) -> list[UnitRow]:
    """Make a row for the parameters of no unit; `named`: verbs that make no unit were applied."""
    rest = [managed.tensor for managed in managed_parameters([module])]
    if annotation_of(module) is not None or not rest:
        return []
    name = "(rest)" if named else "(not annotated)"
    return [_plain_row(name, type(module).__name__, list(registry(module)), rest)]


def _cells(row: UnitRow) -> tuple[str, ...]:
    numbers = _numbers(row.parameters, row.numel, row.bytes, row.bytes_per_rank)
    placements = ", ".join(row.placements) or "-"
    text = (_dtypes(row) or "-", placements, row.after_forward, row.state)
    return (unit_name(row.unit), row.module, row.annotation, *numbers, *text)


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
    return _unique(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
