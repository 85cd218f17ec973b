"""What is written to a folder when something was found, so that one process can run the unit again.

A file per rank: the shards of the unit and of those inside, the inputs of its call, the gradients
of its outputs, the state of the random generator, digests of what was gathered and computed, the
gradients that landed, versions and options, and the modules without their parameters.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import walk_stack
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from composable.algorithms.watch.checks import version_of
from composable.algorithms.watch.findings import Finding
from composable.api.sync_module_states import digests
from composable.contract.hooks import dispatcher_of
from composable.contract.methods import Method
from composable.contract.values import map_tensors, tensors_in
from composable.engine.step.unit import Unit, units_below
from composable.errors import first_line
from composable.features.hook_stages import hooks_of
from composable.memory.torch_private import local_tensor

FORMAT: Final = 2
# Of a module: torch's, and that of `register_forward_method`.
_CALLERS: Final = ("_call_impl", "_call_as_forward")
_OURS: Final = ("_composable_", "__deepcopy__", "__reduce_ex__")  # what annotations leave


@dataclass
class Call:
    """One call of a unit's module in the step that is under way.

    Attributes:
        forward: the number of the forward.
        inputs: of the module; what it writes to them in place is in them.
        generator: the state of the random generator before it.
        exact: to run its forward again is all that a call of the module does.
        versions: of its inputs and buffers: where a buffer is registered, which, and its version.
        outputs: digests of the outputs, by device.
        gradients: of the outputs, by number.
        ended: it has computed.
    """

    module: nn.Module
    forward: int | None
    inputs: tuple[Any, Any]
    generator: Tensor
    autocast: torch.dtype | None
    exact: bool = True
    versions: list[tuple[dict[str, Tensor | None] | None, str, Tensor, int]] = field(
        default_factory=list
    )
    outputs: list[tuple[list[int], Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    ended: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether it can be repeated to the bit: nothing that it read was written to since."""
        return self.exact and all(
            (table is None or table.get(name) is tensor) and version_of(tensor) == version
            for table, name, tensor, version in self.versions
        )


def is_forward() -> bool:
    """Whether the call that begins is one of the module, and not of a method in its place."""
    names = (frame.f_code.co_name for frame, _ in walk_stack(None))
    return next((each for each in names if each in _CALLERS), "") == _CALLERS[0]


def runs_as_it_is(module: nn.Module) -> bool:
    """Whether to call `forward` is all that a call of the module does: no hooks, not compiled."""
    for each in module.modules():
        own = 0 if dispatcher_of(each) is None else 2  # of annotations
        if len(each._forward_hooks) + len(each._forward_pre_hooks) != own:
            return False
        if each._compiled_call_impl is not None:
            return False
    return True


def are_apart(outputs: Sequence[Tensor]) -> bool:
    """Whether none is computed from another one: then their gradients come from outside alone."""
    edges = [get_gradient_edge(each) for each in outputs]
    ends = {edge.node for edge in edges}
    seen, pending = set[Node](), [*ends]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node in ends:
                return False
            if node is not None and node not in seen:
                seen.add(node)
                pending.append(node)
    return len({(edge.node, edge.output_nr) for edge in edges}) == len(edges)


def keep_gradient(into: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """A hook of a tensor. Without its graph, which would hold the hook."""
    into[index] = gradient.detach()


def call_of(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Call:
    """A call that begins."""
    device = unit.mesh_info.device
    on = torch.is_autocast_enabled(device.type)
    inputs = map_tensors(
        (args, kwargs), lambda each: each.detach().requires_grad_(each.requires_grad)
    )
    read: list[tuple[dict[str, Tensor | None] | None, str, Tensor]]
    read = [(None, "", each) for each in tensors_in(inputs)]
    read += [
        (below._buffers, name, buffer)
        for below in module.modules()
        for name, buffer in below._buffers.items()
        if buffer is not None
    ]
    return Call(
        module,
        unit.step.calls[-1].number,
        inputs,
        generator_state(device),
        torch.get_autocast_dtype(device.type) if on else None,
        runs_as_it_is(module),
        [(*each, version_of(each[-1])) for each in read],
    )


def end_call(call: Call, output: Any) -> None:
    """The module has computed."""
    call.ended = True
    with torch.no_grad():
        call.outputs = list(digests([each.detach() for each in tensors_in(output)]))


def generator_state(device: torch.device) -> Tensor:
    """The state of the generator that modules on `device` draw from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def write(folder: Path, finding: Finding, rank: int, more: dict[str, Any]) -> None:
    """Write this rank's file, with `more` in it. All ranks do."""
    into = folder / f"{finding.kind.replace(' ', '-')}-step-{finding.step}"
    into.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "format": FORMAT,
        "versions": {"composable": _version(), "torch": str(torch.__version__)},
        "rank": rank,
        "finding": str(finding),
        "unit": finding.unit,
        "step": finding.step,
    }
    torch.save(found | more, into / f"rank-{rank}.pt")


def _version() -> str:
    try:
        return version("torch-composable")
    except PackageNotFoundError:
        return "unknown"


@torch.no_grad()
def of_unit(unit: Unit, names: Mapping[Unit, str], calls: int, call: Call | None) -> dict[str, Any]:
    """What is written of a unit.

    Args:
        unit: that one process is to run again.
        names: of this unit and of those inside.
        calls: how often it was called in the step.
        call: one of them, if there was any.
    """
    units = list(dict.fromkeys([unit, *units_below(unit.modules)]))
    info = unit.mesh_info
    found: dict[str, Any] = {
        "options": {each.name: str(each.spec.mp_policy) for each in units},
        "device": info.device.type,
        "shard": info.shard.rank,
        "shards": info.shard.size,
        "replica": 0 if info.replicate is None else info.replicate.rank,
        "parameters": [_of_parameters(each, names.get(each, each.name)) for each in units],
        "calls": calls,
        "averaged": not any(each.spec.divisor or hooks_of(each.gradients) for each in units),
    }
    if call is not None:
        found["inputs"] = _pickled(call.inputs)
        found["generator"], found["autocast"] = call.generator, call.autocast
        found["exact"] = call.is_exact
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
