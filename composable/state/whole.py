"""Convert at-rest parameters to whole plain tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Real
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.api.explicit_calls import units_in
from composable.checked import checks_of, is_bool
from composable.comm.backends import ranks_of
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.compilation import untraced, unwrapped
from composable.engine.edits.loading import says_nothing_of_groups
from composable.engine.params.param import PLAIN, ManagedParam, ParamForm, copy_attributes
from composable.engine.step.root import end_interrupted
from composable.engine.step.unit import Unit
from composable.errors import PhaseError, RanksDisagreeError, first_line
from composable.torch_private import in_backward, local_of

F = TypeVar("F", bound=Callable[..., Any])

# Without shards these send nothing, and one rank may call them, as users of DDP do.
_FOR_SHARDS: Final = ("full_state_dict", "stream_full", "summon_full_params")


@torch.no_grad()
def write_whole(whole: Tensor, target: Tensor, form: ParamForm = PLAIN) -> None:
    """Write this rank's part of a local tensor of `form`, which is not sharded, into `target`.

    No message.
    """
    if isinstance(target, DTensor):
        local = local_of(target)
        local.copy_(local_of(form.shard_like(whole, target, local.device)))
    else:
        target.copy_(whole)


def whole_parameter(
    value: Tensor, at_rest: nn.Parameter, kind: type[nn.Parameter] = nn.Parameter
) -> nn.Parameter:
    """Make a whole parameter of class `kind` to register in place of the at-rest one.

    It has what users gave to the at-rest one.
    """
    whole = nn.Parameter.__new__(kind, value, at_rest.requires_grad)
    copy_attributes(at_rest, whole)
    return whole


def follow_whole(at_rest: nn.Parameter, whole: nn.Parameter) -> None:
    """Take over what was done to a whole parameter besides writing to it.

    That is freezing it, and Python attributes.
    """
    at_rest.requires_grad_(whole.requires_grad)
    copy_attributes(whole, at_rest)


def tensors_at_rest(model: nn.Module) -> dict[str, Tensor]:
    """List parameters and buffers by name in the state dict.

    They are not detached: a write to a detached `DTensor` moves no version counter.
    """
    with says_nothing_of_groups():
        state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def comms_of_model(units: Sequence[Unit]) -> list[Comm]:
    """Return the comms over all ranks that have a part of the model.

    These are that of the first unit, and those across tensor-parallel ranks.
    """
    info = units[0].mesh_info
    across = (
        comm
        for unit in units
        for param in unit.params
        for comm in param.info.form.comms(info.device)
    )
    return [info.all, *dict.fromkeys(across)]


def all_or_none(
    caller: str,
    comms: Sequence[Comm],
    act: Callable[[], Any],
    must_agree: int = 0,
    arguments: Mapping[str, str] | None = None,
) -> Any:
    """Run `act` on all ranks of `comms`, and raise on every rank if it raised on one.

    Also raise on every rank if the ranks have different numbers `must_agree`, or other `arguments`.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as caught:
        error = caught
    failure = None if error is None else f"{type(error).__name__}: {first_line(error)}"
    for comm in comms:  # ranks of the next one get it, too
        launch = Launch(f"agreement of {caller}")
        said = comm.all_gather_objects((failure, must_agree, arguments or {}), launch)
        by_rank = dict(zip(ranks_of(comm), said, strict=True))
        failed = [f"rank {rank}: {text}" for rank, (text, *_) in by_rank.items() if text]
        failure = failure or next(iter(failed), None) or _difference(by_rank)
    if error is not None:
        raise error
    if failure:
        raise RanksDisagreeError(f"{caller}: {failure}")
    return result


def _difference(said: Mapping[int, tuple[str | None, int, Mapping[str, str]]]) -> str | None:
    """Say in what a rank differs from the first one; None if in nothing."""
    first, (_, names, values) = next(iter(said.items()))
    for rank, (_, its_names, given) in said.items():
        for name, value in values.items():
            if given.get(name, value) != value:
                return (
                    f"the ranks differ in {name}: rank {first} has {value}, rank {rank}"
                    f" {given[name]}. Pass the same arguments on every rank"
                )
        if its_names != names:
            return (
                "the ranks have tensors of different names or shapes in their state dicts, as"
                " experts on meshes of their own. Export such modules one by one, on the ranks that"
                " have them, or use torch.distributed.checkpoint"
            )
    return None


def checked_on_all_ranks(function: F) -> F:
    """As `checked`, and raise on every rank if one passes a wrong argument, or another one.

    For functions of an annotated `module` that all ranks call, though not in each step: the ranks
    exchange one message before `function` runs.

    Raises:
        ArgumentError: by the function, on the rank with the wrong argument.
        RanksDisagreeError: by the function, on the others; on all, if plain values differ.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        checks = checks_of(function)
        module = kwargs.get("module", next(iter(args[checks.hidden :]), None))
        comms: list[Comm] = []
        given: dict[str, str] = {}
        if isinstance(module, nn.Module):
            units = units_in(checks.name, unwrapped(module))
            if checks.name not in _FOR_SHARDS or any(unit.is_sharded for unit in units):
                comms = comms_of_model(units)
        if checks.are_right(args, kwargs):
            bound = checks.signature.bind(*args[checks.hidden :], **kwargs)
            bound.apply_defaults()
            given = {name: _as_compared(name, value) for name, value in bound.arguments.items()}
        all_or_none(checks.name, comms, partial(checks.refuse, args, kwargs), arguments=given)
        return function(*args, **kwargs)

    return untraced(call)  # type: ignore[return-value]


def _as_compared(name: str, value: Any) -> str:
    """Return what ranks compare: hosts may have a folder elsewhere, and objects are their own."""
    plain = is_bool(value) or isinstance(value, str | Real | torch.dtype | Mapping | None)
    if isinstance(value, Mapping):
        value = dict(sorted(value.items(), key=str))
    return str(value) if plain and (value is None or name != "folder") else "another object"


@dataclass(frozen=True, slots=True)
class NamedParam:
    """A parameter of a unit, by its name in the model."""

    fqn: str
    unit: Unit
    param: ManagedParam

    @property
    def comm(self) -> Comm:
        """Among the ranks that have the parameter."""
        return (self.param.info.mesh_info or self.unit.mesh_info).all


def managed_in(verb: str, model: nn.Module) -> Iterator[NamedParam]:
    """Yield the managed parameters of all units in `model`, each once, in the order of units."""
    names = {
        (id(module), name): f"{prefix}.{name}" if prefix else name
        for prefix, module in unwrapped(model).named_modules()
        for name in module._parameters
    }
    for unit in units_in(verb, model):
        for param in unit.params:
            found = [
                names[key]
                for place in param.info.places
                if (key := (id(place.module), place.name)) in names
            ]
            if found:
                yield NamedParam(found[0], unit, param)


def names_that_differ(
    comm: Comm, members: Sequence[NamedParam], numbers: Sequence[int], what: str
) -> list[str]:
    """Find the parameters for which ranks of `comm` have different numbers; all of them call it."""
    lowest, highest = comm.min_max([*numbers], Launch(f"comparison of {what}"))
    return [
        each.fqn for each, low, high in zip(members, lowest, highest, strict=True) if low != high
    ]


def require_at_rest(verb: str, units: list[Unit]) -> None:
    """Let modules hold their at-rest parameters.

    Inside of a forward or backward this is an error.
    """
    end_interrupted(units)
    for unit in units:
        if unit.step.calls or in_backward():
            raise PhaseError(
                f"{verb} was called inside of the forward or backward of unit '{unit.name}'; call"
                " it outside"
            )
        unit.swap_out()
