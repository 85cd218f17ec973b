"""Calls that run again in another process (`replay.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from composable.contract.hooks import dispatcher_of
from composable.contract.values import map_tensors, tensors_in
from composable.memory.digests import digests
from composable.seams import Unit

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
