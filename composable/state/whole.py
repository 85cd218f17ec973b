"""Convert at-rest parameters to whole plain tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.api.scopes import units_in
from composable.comm import Comm
from composable.comm.launch import Launch
from composable.compilation import unwrapped
from composable.engine.edits.loading import says_nothing_of_groups
from composable.engine.params.form import PLAIN, ParamForm
from composable.engine.params.param import ManagedParam, copy_attributes
from composable.engine.step.root import end_interrupted
from composable.engine.step.unit import Unit
from composable.errors import PhaseError, RanksDisagreeError, first_line
from composable.torch_private import in_backward, local_of


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
    caller: str, comms: Sequence[Comm], act: Callable[[], None], must_agree: int = 0
) -> None:
    """Run `act` on all ranks of `comms`, and raise on every rank if it raised on one.

    Also raise on every rank if the ranks have different numbers `must_agree`.
    """
    error: Exception | None = None
    try:
        act()
    except Exception as caught:
        error = caught
    failure = None if error is None else f"{type(error).__name__}: {first_line(error)}"
    agree = True
    for comm in comms:
        said = comm.all_gather_objects((failure, must_agree), Launch(f"agreement of {caller}"))
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text is not None]
        failure = failure or next(iter(failed), None)
        agree = agree and all(number == must_agree for _, number in said)
    if error is not None:
        raise error
    if failure:
        raise RanksDisagreeError(f"{caller}: {failure}")
    if not agree:
        raise RanksDisagreeError(
            f"{caller}: the ranks have tensors of different names or shapes in their state dicts,"
            " as experts on meshes of their own. Export such modules one by one, on the ranks that"
            " have them, or use torch.distributed.checkpoint"
        )


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
