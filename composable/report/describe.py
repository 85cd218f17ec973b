"""What became of a model, as a table; reads handles and the registry, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor

from composable.compilation import unwrapped
from composable.config import Free, FreeUnlessLast, Keep, ReshardTo, grad_reduce_in_words
from composable.device.flat_parameters import name_of
from composable.device.streams import any_has_streams, has_streams
from composable.errors import few, unit_name
from composable.model.contract import Annotation, registry
from composable.model.traversal import REPLICATE, SHARD, managed_parameters
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.sharded_unit import ShardedUnit

OFFLOAD: Final = "offload_activations"
_OFFLOADED: Final = {
    "host": "parameters, gradients and optimizer state rest in the host's memory",
    "no effect": "no effect where ranks compute on the CPU",
}
_AFTER: Final[dict[type, str]] = {Free: "reshard", FreeUnlessLast: "keep last", Keep: "keep"}


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One line of the table. Bytes are of this rank (`bytes_per_rank`) and of the whole unit (`bytes`)."""

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
    grad_reduce: str = "mean"  # "sum", or "sum / n"
    comm_hook: str = ""  # its name
    offload: str = ""  # "host": parameters rest there; "no effect": they would, if they were computed with elsewhere


@dataclass(frozen=True, slots=True)
class Description:
    """What `describe` returns: print it, or take `to_dict()`."""

    rows: tuple[UnitRow, ...]
    elsewhere: dict[str, tuple[str, ...]] = field(default_factory=dict)  # other verbs: modules that are no unit, by FQN
    not_offloaded: tuple[str, ...] = ()  # modules that offload_activations has no effect on, by FQN

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank but for `bytes_per_rank` of uneven shards."""
        elsewhere = {verb: list(names) for verb, names in self.elsewhere.items()}
        units = [asdict(row) for row in self.rows]
        return {
            "units": units,
            "elsewhere": elsewhere,
            "not_offloaded": list(self.not_offloaded),
            "total": self._total(),
        }

    def _total(self) -> dict[str, int]:
        return {
            "parameters": sum(row.parameters for row in self.rows),
            "numel": sum(row.numel for row in self.rows),
            "bytes": sum(row.bytes for row in self.rows),
            "bytes_per_rank": sum(row.bytes_per_rank for row in self.rows),
        }

    def __str__(self) -> str:
        header = (
            "unit",
            "module",
            "annotation",
            "params",
            "numel",
            "bytes",
            "per rank",
            "dtype",
            "placement",
            "after fwd",
            "state",
        )
        lines = [header]
        for row in self.rows:
            lines.append(
                (
                    unit_name(row.unit),
                    row.module,
                    row.annotation,
                    str(row.parameters),
                    f"{row.numel:,}",
                    readable_bytes(row.bytes),
                    readable_bytes(row.bytes_per_rank),
                    _dtypes(row) or "-",
                    ", ".join(row.placements) or "-",
                    row.after_forward,
                    row.state,
                )
            )
        total = self._total()
        lines.append(
            (
                "total",
                "",
                "",
                str(total["parameters"]),
                f"{total['numel']:,}",
                readable_bytes(total["bytes"]),
                readable_bytes(total["bytes_per_rank"]),
                "",
                "",
                "",
                "",
            )
        )
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        right = {3, 4, 5, 6}
        text = [
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        rule = "-" * max(len(line) for line in text)
        notes = [f"{verb}, on modules that are no unit: {few(names)}" for verb, names in self.elsewhere.items()]
        if self.not_offloaded:
            notes.append(f"{OFFLOAD}: nothing is copied where modules are on the CPU: {few(self.not_offloaded)}")
        for offload, means in _OFFLOADED.items():
            if found := [unit_name(row.unit) for row in self.rows if row.offload == offload]:
                notes.append(f"offload_policy: {means}: {few(found)}")
        return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], *notes])

    __repr__ = __str__


def readable_bytes(count: int) -> str:
    """A number of bytes as people read it, e.g. "1.50 MiB"."""
    if count < 1 << 10:
        return f"{count} B"
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {name}"
    raise AssertionError("unreachable")


def describe(module: nn.Module) -> Description:
    """The units of an annotated model, in order, with what each holds and how it is spread.

    Parameters that are neither sharded nor replicated come last, as a unit named "(not annotated)", or "(rest)" where
    other verbs were applied somewhere. Verbs on modules that are no unit are told of below the table, and so are modules whose
    activations have nowhere to go.

    Example:
        >>> print(describe(fully_shard(model, policy={Block})))
    """
    module = unwrapped(module)
    rows: list[UnitRow] = []
    elsewhere: dict[str, list[str]] = {}
    seen: dict[int, None] = {}
    for name, below in module.named_modules():
        annotations = registry(below)
        verbs = _verbs(annotations)
        managing = [verb for verb in (SHARD, REPLICATE) if verb in annotations]
        for verb in managing:
            state = annotations[verb].state
            if id(state) not in seen:
                seen[id(state)] = None
                rows.append(_sharded(name, state, verbs) if verb == SHARD else _replicated(name, below, state, verbs))
        for verb in () if managing else verbs:
            elsewhere.setdefault(verb, []).append(unit_name(name))
    rest = _unmanaged(module, elsewhere)
    at_home = tuple(unit_name(name) for name, below in module.named_modules() if _is_not_offloaded(below))
    return Description((*rows, *rest), {verb: tuple(names) for verb, names in elsewhere.items()}, at_home)


def _is_not_offloaded(module: nn.Module) -> bool:
    if OFFLOAD not in _verbs(registry(module)):
        return False
    devices = {tensor.device for held in (module.parameters(), module.buffers()) for tensor in held if not tensor.is_meta}
    return not (any(map(has_streams, devices)) if devices else any_has_streams())  # what holds nothing may run anywhere


def _verbs(annotations: Mapping[str, Annotation]) -> list[str]:
    """The verbs that do something on this very module: what makes it a unit first, then the others as they were applied.

    With a policy `checkpoint` and `offload_activations` do something on the picked modules below only.
    """
    others = [verb for verb in annotations if verb not in ("checkpoint", OFFLOAD) or annotations[verb].state.brackets]
    return sorted(others, key=lambda verb: verb not in (SHARD, REPLICATE))


def _sharded(name: str, unit: ShardedUnit, verbs: list[str]) -> UnitRow:
    unit.recover()
    handle = unit.handle
    parameters = [param.sharded for param in handle.parameters.params]
    after = _AFTER.get(type(handle.after_forward), "")
    if isinstance(handle.after_forward, ReshardTo):
        after = f"regroup {handle.after_forward.ranks}"
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return UnitRow(
        unit=name,
        module=" + ".join(type(m).__name__ for m in unit.modules),
        annotation=" + ".join(verbs),
        parameters=len(parameters),
        numel=sum(p.numel() for p in parameters),
        bytes=sum(p.numel() * p.element_size() for p in parameters),
        bytes_per_rank=sum(p.numel() * p.element_size() for p in local),
        ranks=handle.mesh_info.all.size,
        dtypes=_unique(name_of(p.dtype) for p in parameters),
        computes_in=_unique(precision.compute for precision in handle.parameters.precisions),
        reduces_in=_unique(precision.reduce for precision in handle.parameters.precisions),
        placements=_unique(
            ", ".join(str(placement) for placement in p.placements) if isinstance(p, DTensor) else "local" for p in parameters
        ),
        after_forward=after,
        state=handle.phase.name,
        checkpointed="checkpoint" in verbs,
        grad_reduce=grad_reduce_in_words(None if unit.spec is None else unit.spec.divisor),
        offload=_offload(unit),
        comm_hook="" if handle.gradients.comm_hooks is None else handle.gradients.comm_hooks.name,
    )


def _offload(unit: ShardedUnit) -> str:
    if unit.spec is None or unit.spec.offload is None:
        return ""
    return "no effect" if unit.home == unit.handle.mesh_info.device else "host"


def _replicated(name: str, module: nn.Module, unit: ReplicatedUnit, verbs: list[str]) -> UnitRow:
    averaging = unit.averaging
    row = _plain_row(name, type(module).__name__, verbs, averaging.owned_at_rest, averaging.communicator.size)
    hook = "" if averaging.hook is None else averaging.hook.name
    row = replace(row, grad_reduce=grad_reduce_in_words(averaging.divisor), comm_hook=hook)
    casts = averaging.casts
    if casts is None:
        return row
    precisions = [casts.precision.of(p.dtype, exact=exact) for p, exact in averaging.parameters.with_exact()]
    return replace(
        row,
        computes_in=_unique(precision.compute for precision in precisions),
        reduces_in=_unique(precision.reduce for precision in precisions),
    )


def _plain_row(name: str, module: str, verbs: Sequence[str], parameters: list[nn.Parameter], ranks: int) -> UnitRow:
    size = sum(p.numel() * p.element_size() for p in parameters)
    dtypes = _unique(name_of(p.dtype) for p in parameters)
    return UnitRow(
        unit=name,
        module=module,
        annotation=" + ".join(verbs) or "-",
        parameters=len(parameters),
        numel=sum(p.numel() for p in parameters),
        bytes=size,
        bytes_per_rank=size,
        ranks=ranks,
        dtypes=dtypes,
        computes_in=dtypes,
        reduces_in=dtypes,
        placements=("replicated",) if REPLICATE in verbs else ("local",),
        after_forward="-",
        state="-",
        checkpointed="checkpoint" in verbs,
    )


def _unmanaged(module: nn.Module, elsewhere: Mapping[str, list[str]]) -> list[UnitRow]:
    annotations = registry(module)
    if SHARD in annotations or REPLICATE in annotations:
        return []
    rest = [managed.parameter for managed in managed_parameters([("", module)])]
    name = "(rest)" if elsewhere else "(not annotated)"
    return [_plain_row(name, type(module).__name__, _verbs(annotations), rest, 1)] if rest else []


def _dtypes(row: UnitRow) -> str:
    """Those of the parameters, and whatever differs from that."""
    text = ", ".join(row.dtypes)
    if row.computes_in != row.dtypes:
        text += f" as {', '.join(row.computes_in)}"
    if row.reduces_in != row.computes_in:
        text += f", summed in {', '.join(row.reduces_in)}"
    text += "" if row.grad_reduce == "mean" else f", grad_reduce: {row.grad_reduce}"
    return f"{text}, comm_hook: {row.comm_hook}" if row.comm_hook else text


def _unique(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
