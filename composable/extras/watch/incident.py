"""Calls that are kept, and the folder that `watch` writes when it finds something.

One process can run the unit again from it (`replay.py`).

A file per rank: the shards of the unit and of those inside, the inputs of its call, the gradients
of its outputs, the state of the random generator, digests of what was gathered and computed, the
gradients that landed, versions and options, and the modules without their parameters.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from composable import __version__
from composable.contract.contract import Method
from composable.contract.hooks import dispatcher_of
from composable.contract.values import map_tensors, tensors_in
from composable.errors import first_line
from composable.extras.watch.findings import Finding
from composable.memory.digests import digests
from composable.seams import Unit, hooks_of, stepped_in_backward, units_in
from composable.torch_private import local_tensor

FORMAT: Final = 4
_OURS: Final = ("_composable_", "__deepcopy__", "__reduce_ex__")  # what annotations leave
# What calls a module: torch's, and that of methods that `register_forward_method` knows.
_CALLERS: Final = ("_call_impl", "_call_as_forward")


@dataclass
class ModuleCall:
    """One call of a unit's module in the step that is under way.

    Attributes:
        forward: the number of the forward.
        inputs: of the module; what it writes to them in place is in them.
        generator: the state of the random generator before it.
        autocast: the dtype, if it runs under autocast.
        plain: to run its forward again is all that a call of the module does.
        read: what it can read besides parameters, and the versions.
        outputs: digests of the outputs, as `digests` has them.
        gradients: of the outputs, by number.
    """

    module: nn.Module
    forward: int | None
    inputs: tuple[Any, Any]
    generator: Tensor
    autocast: torch.dtype | None
    plain: bool
    read: list[tuple[Tensor, int]] = field(default_factory=list)
    outputs: list[tuple[list[int], Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def _reads(self) -> list[tuple[Tensor, int]]:
        tensors = (*tensors_in(self.inputs), *self.module.buffers())
        return [(each, version_of(each)) for each in tensors]

    @torch.no_grad()
    def end(self, output: Any) -> None:
        """The module has computed."""
        self.outputs = list(digests([each.detach() for each in tensors_in(output)]))

    def end_step(self) -> None:
        """The step has ended. Hooks of outputs refer to the gradients for as long as these live."""
        self.gradients.clear()

    @property
    def is_exact(self) -> bool:
        """Whether it can be repeated to the bit: what it read is still there, not written to."""
        pairs = zip(self.read, self._reads(), strict=False)
        return self.plain and all(
            tensor is now and version == newer for (tensor, version), (now, newer) in pairs
        )


def keep_gradient(into: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """A hook of an output, held by whoever keeps the loss; without the graph, which holds it."""
    into[index] = gradient.detach()


def call_of(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> ModuleCall:
    """A call that begins."""
    device = unit.mesh_info.device
    call = ModuleCall(
        module,
        unit.forward_number,
        map_tensors((args, kwargs), _detached),
        generator_state(device),
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        runs_as_it_is(module),
    )
    call.read = call._reads()
    return call


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def version_of(tensor: Tensor) -> int:
    """Of its writes; those of inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def by_index(found: Iterable[tuple[list[int], Tensor]]) -> dict[int, int]:
    """Read `digests`: by the index of the tensor."""
    return {
        index: number
        for indices, numbers in found
        for index, number in zip(indices, numbers.tolist(), strict=True)
    }


def generator_state(device: torch.device) -> Tensor:
    """The state of the generator that modules on `device` draw from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator(device: torch.device, state: Tensor) -> None:
    """Set the generator that modules on `device` draw from."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def is_forward() -> bool:
    """Whether the call that begins is one of the module, and not of a method in its place."""
    names = (frame.f_code.co_name for frame, _ in walk_stack(None))
    return next((each for each in names if each in _CALLERS), "") == _CALLERS[0]


def runs_as_it_is(module: nn.Module) -> bool:
    """Whether to call `forward` is all that a call of the module does: no hooks, not compiled."""
    for each in module.modules():
        own = 0 if dispatcher_of(each) is None else 2  # of annotations
        hooks = len(each._forward_hooks) + len(each._forward_pre_hooks)
        if hooks != own or each._compiled_call_impl is not None:
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


# --- the folder ----------------------------------------------------------------------------------


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


def main_of_process() -> dict[str, str]:
    """Where the script of this process is, and its package if it has one; nothing for a session."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    package = getattr(main, "__package__", None) or ""
    return {} if path is None else {"path": os.path.abspath(path), "package": package}
