"""What is written to a folder when something was found, so that one process can run the unit again.

A file per rank: the shards of the unit and of those inside, the inputs of its call, the gradients
of its outputs, the state of the random generator, digests of what was gathered and computed, the
gradients that landed, versions and options, and the modules without their parameters.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from composable.algorithms.watch.findings import Finding
from composable.api.sync_module_states import digests
from composable.contract.methods import Method
from composable.contract.values import map_tensors, tensors_in
from composable.engine.step.unit import Unit
from composable.errors import first_line
from composable.features.hook_stages import hooks_of
from composable.memory.torch_private import local_tensor

FORMAT: Final = 1
_OURS: Final = ("_composable_", "__deepcopy__", "__reduce_ex__")  # what annotations leave


@dataclass
class Call:
    """One call of a unit's module in the step that is under way.

    Attributes:
        forward: the number of the forward.
        inputs: of the module; what it writes to them in place is in them.
        generator: the state of the random generator before it.
        outputs: digests of the outputs, by device.
        gradients: of the outputs, by number.
    """

    module: nn.Module
    forward: int | None
    inputs: tuple[Any, Any]
    generator: Tensor
    autocast: torch.dtype | None
    outputs: list[tuple[list[int], Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)


def call_of(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Call:
    """A call that begins."""
    device = unit.mesh_info.device
    on = torch.is_autocast_enabled(device.type)
    inputs = map_tensors(
        (args, kwargs), lambda each: each.detach().requires_grad_(each.requires_grad)
    )
    return Call(
        module,
        unit.step.calls[-1].number,
        inputs,
        generator_state(device),
        torch.get_autocast_dtype(device.type) if on else None,
    )


def end_call(call: Call, output: Any) -> None:
    """The module has computed."""
    with torch.no_grad():
        call.outputs = list(digests([each.detach() for each in tensors_in(output)]))


def generator_state(device: torch.device) -> Tensor:
    """The state of the generator that modules on `device` draw from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def write(
    folder: Path,
    finding: Finding,
    unit: Unit | None,
    names: Mapping[Unit, str],
    call: Call | None,
    gathered: Mapping[str, int],
    rank: int,
    ranks: list[int],
    version: str,
) -> Path:
    """Write this rank's file. All ranks do; returns the folder of the incident."""
    into = folder / f"{finding.kind.replace(' ', '-')}-step-{finding.step}"
    into.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "format": FORMAT,
        "versions": {"composable": version, "torch": str(torch.__version__)},
        "rank": rank,
        "ranks": ranks,
        "finding": str(finding),
        "unit": finding.unit,
        "step": finding.step,
        "gathered": dict(gathered),
    }
    if unit is not None:
        found |= _of_unit(unit, names, call)
    torch.save(found, into / f"rank-{rank}.pt")
    return into


@torch.no_grad()
def _of_unit(unit: Unit, names: Mapping[Unit, str], call: Call | None) -> dict[str, Any]:
    units = [unit, *unit.relations.below]
    info = unit.mesh_info
    found: dict[str, Any] = {
        "options": {each.name: str(each.spec.mp_policy) for each in units},
        "device": info.device.type,
        "shard": info.shard.rank,
        "shards": info.shard.size,
        "replica": 0 if info.replicate is None else info.replicate.rank,
        "parameters": [_of_parameters(each, names.get(each, each.name)) for each in units],
        "averaged": not any(each.spec.divisor or hooks_of(each.gradients) for each in units),
    }
    if call is not None:
        found["inputs"] = _pickled(call.inputs)
        found["generator"], found["autocast"] = call.generator, call.autocast
        found["gradients"] = {index: each.cpu() for index, each in call.gradients.items()}
        found["outputs"] = {
            index: number
            for indices, numbers in call.outputs
            for index, number in zip(indices, numbers.tolist(), strict=True)
        }
        found["module"], found["places"] = _without_parameters(units, names, call.module)
    return found


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
                    "whole": slot.route.name == "WHOLE",
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
        (id(place.module), place.name): f"{names.get(unit, unit.name)} {param.fqn}"
        for unit in units
        for param in unit.params
        for place in param.info.places
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
    twin: nn.Module = object.__new__(type(module))
    done[id(module)] = twin
    fresh = vars(nn.Module())
    own = {
        name: value
        for name, value in vars(module).items()
        if name not in fresh and not name.startswith(_OURS) and not isinstance(value, Method)
    }
    fresh |= {"training": module.training}
    fresh["_buffers"] = {
        name: None if each is None else each.detach().clone()
        for name, each in module._buffers.items()
    }
    fresh["_parameters"] = {
        name: None if (id(module), name) in named else each
        for name, each in module._parameters.items()
    }
    fresh["_modules"] = {
        name: None if each is None else _plain(each, named, done)
        for name, each in module._modules.items()
    }
    vars(twin).update(fresh | own)
    return twin


def _pickled(value: Any) -> Any:
    """Its bytes; or, if it cannot be pickled, why."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        return f"it cannot be pickled: {first_line(error)}"
    return buffer.getvalue()
