"""The folder that `watch` writes when it finds something.

One process can run the unit again from it.

A file per rank: the shards of the unit and of those inside, the inputs of its call, the gradients
of its outputs, the state of the random generator, digests of what was gathered and computed, the
gradients that landed, versions and options, and the modules without their parameters.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from composable import __version__
from composable.contract.contract import Method
from composable.errors import first_line
from composable.extras.watch.calls import ModuleCall, by_index
from composable.extras.watch.findings import Finding
from composable.extras.watch.script import main_of_process
from composable.seams import Unit, hooks_of, stepped_in_backward, units_in
from composable.torch_private import local_tensor

FORMAT: Final = 4
_OURS: Final = ("_composable_", "__deepcopy__", "__reduce_ex__")  # what annotations leave


def write(
    folder: Path,
    finding: Finding,
    rank: int,
    unit: Unit | None,
    calls: Sequence[ModuleCall],
    names: Mapping[Unit, str],
    more: Mapping[str, Any],
) -> None:
    """Write this rank's file. All ranks do.

    Args:
        folder: of all incidents.
        finding: that is written.
        rank: this one's number.
        unit: that the finding is about, if it is about one.
        calls: those of the unit in the step.
        names: of all units.
        more: what else is known.
    """
    into = folder / f"{finding.kind.replace(' ', '-')}-step-{finding.step}"
    into.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "format": FORMAT,
        "versions": {"composable": __version__, "torch": str(torch.__version__)},
        "rank": rank,
        "finding": str(finding),
        "why": _why_not_again(unit),
        **more,
    }
    if unit is not None and not found["why"]:
        index = finding.call if finding.call < len(calls) else -1  # this rank may have skipped some
        found |= _of_unit(unit, names) | {"calls": len(calls)}
        found |= _of_call(unit, names, calls[index]) if calls else {}
    torch.save(found, into / f"rank-{rank}.pt")


def _why_not_again(unit: Unit | None) -> str:
    """Why one process cannot run the unit of a finding again; empty if it can."""
    if unit is None:
        return "it is about no unit"
    below = [param for each in units_in(*unit.modules) for param in each.params]
    if not all(param.is_whole for param in below):
        return "its parameters are tensor-parallel"
    if stepped_in_backward([param.at_rest for param in below]):
        return "backward has stepped the unit's parameters"
    return ""


@torch.no_grad()
def _of_unit(unit: Unit, names: Mapping[Unit, str]) -> dict[str, Any]:
    units = _units(unit)
    info = unit.mesh_info
    return {
        "options": {each.name: str(each.spec.mp_policy) for each in units},
        "device": info.device.type,
        "shard": info.shard.rank,
        "shards": info.shard.size,
        "replica": 0 if info.replicate is None else info.replicate.rank,
        "parameters": [row for each in units for row in _of_parameters(each, names[each])],
        "averaged": not any(each.spec.divisor or hooks_of(each) for each in units),
    }


@torch.no_grad()
def _of_call(unit: Unit, names: Mapping[Unit, str], call: ModuleCall) -> dict[str, Any]:
    module, places = _without_parameters(_units(unit), names, call.module)
    return {
        "inputs": _pickled(call.inputs),
        "generator": call.generator,
        "autocast": call.autocast,
        "exact": call.is_exact,
        "gradients": {index: each.cpu() for index, each in call.gradients.items()},
        "outputs": by_index(call.outputs),
        "module": module,
        "places": places,
        "main": main_of_process(),
    }


def _units(unit: Unit) -> list[Unit]:
    """The unit, and those inside."""
    return list(dict.fromkeys([unit, *units_in(*unit.modules)]))


def _of_parameters(unit: Unit, name: str) -> list[dict[str, Any]]:
    rows = []
    for group in unit.groups:
        for param, slot in zip(group.params, group.slots, strict=True):
            gradient = param.at_rest.grad
            rows.append(
                {
                    "name": f"{name} {param.fqn}",
                    "fqn": param.fqn,
                    "cut": slot.cut_dim if group.takes_message and not group.extended else None,
                    "whole": not slot.is_cut,
                    "dtype": group.precision.compute,
                    "trains": param.at_rest.requires_grad,
                    "shard": local_tensor(param.at_rest).detach().cpu(),
                    "gradient": None if gradient is None else local_tensor(gradient).detach().cpu(),
                }
            )
    return rows


def _without_parameters(
    units: list[Unit], names: Mapping[Unit, str], module: nn.Module
) -> tuple[Any, list[tuple[str, str, str]]]:
    """A module, pickled, without what annotations left on it, and where its parameters belong.

    A place is the FQN of a module, the name there, and the name among the parameters of the units.
    """
    named = {
        (id(place.module), place.name): f"{names[unit]} {param.fqn}"
        for unit in units
        for param in unit.params
        for place in param.registered_at
    }
    places = [
        (fqn, name, named[id(below), name])
        for fqn, below in module.named_modules()
        for name in below._parameters
        if (id(below), name) in named
    ]
    return _pickled(_plain(module, set(named), {})), places


def _plain(module: nn.Module, named: set[tuple[int, str]], done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    copied: nn.Module = object.__new__(type(module))
    done[id(module)] = copied
    fresh = vars(nn.Module())
    own = {
        name: value
        for name, value in vars(module).items()
        if name not in fresh and not name.startswith(_OURS) and not isinstance(value, Method)
    }
    tables = {
        "_buffers": {
            name: None if each is None else each.detach().clone()
            for name, each in module._buffers.items()
        },
        "_parameters": {
            name: None if (id(module), name) in named else each
            for name, each in module._parameters.items()
        },
        "_modules": {
            name: None if each is None else _plain(each, named, done)
            for name, each in module._modules.items()
        },
    }
    vars(copied).update(fresh | own | tables, training=module.training)
    return copied


def _pickled(value: Any) -> Any:
    """Its bytes; or, if it cannot be pickled, why."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        return f"it cannot be pickled: {first_line(error)}"
    return buffer.getvalue()
