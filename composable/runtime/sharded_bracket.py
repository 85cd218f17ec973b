"""The bracket around the forward of a sharded unit's modules, also where a call raises or is interrupted. Decides no order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from composable.compilation import untraced
from composable.device.private import backward_id, in_backward, next_node
from composable.runtime.divergence import say_farewell
from composable.runtime.dtype_notes import note_of_dtypes
from composable.runtime.handle import Handle
from composable.runtime.inputs import on_device
from composable.runtime.misuse import outside_of_a_call
from composable.runtime.planning import Planned, root_for_call
from composable.runtime.recast import refuse_recast


class Stage(Enum):
    """How far a call has come."""

    ENTERING = "the root does not know yet"
    OPENING = "the root knows"
    FORWARD = "the module computes"
    ENTERING_AGAIN = "a recomputation begins"
    RECOMPUTATION = "the module computes once more"


class _Call:
    """One call of a unit's module: how far it has come, the number of autograd's next node when it began, and the handle it
    found."""

    __slots__ = ("handle", "since", "stage")

    handle: Handle

    def __init__(self) -> None:
        self.stage = Stage.ENTERING
        self.since = next_node()


class ShardedBracket:
    """The calls of one unit's modules. It is copied with its unit, without the calls."""

    __slots__ = ("_calls", "_left_to_run", "_unit", "outermost")

    def __init__(self, unit: Planned) -> None:
        self._unit = unit
        self.outermost = False
        self._calls: list[_Call] = []  # that are running
        self._left_to_run: list[nn.Module] = []  # of the unit's modules, until all have computed

    @untraced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = _Call()
        self._calls.append(call)  # before anything that may raise: `on_error` takes it back
        self.outermost = False
        unit = self._unit
        handle = call.handle = unit.handle
        if backward_id() != -1:
            # A recomputation: it neither records order nor reshards, since backward needs the parameters next.
            call.stage = Stage.ENTERING_AGAIN
            handle.unshard_in_step()
            handle.wait_for_unshard()
            handle.calls.begin()
            call.stage = Stage.RECOMPUTATION
            edges = handle.parameters.precision.edges
            return (args, kwargs) if edges is None else edges.inputs(args, kwargs)
        root = root_for_call(unit, module)
        call.stage = Stage.OPENING
        root.forward.open(handle, module)
        call.stage = Stage.FORWARD
        if not self._left_to_run:
            self._left_to_run = list(unit.modules)
        root.forward.enter(handle)
        handle.calls.begin()
        if len(root.running) == 1:
            self.outermost = True
            if handle.mesh_info.shard.capabilities.moves_inputs:
                args, kwargs = on_device(args, kwargs, handle.parameters.device)
        edges = handle.parameters.precision.edges
        return (args, kwargs) if edges is None else edges.inputs(args, kwargs)

    def leave(self, module: nn.Module, output: Any) -> Any:
        call = self._calls.pop()
        handle, root = call.handle, self._unit.root
        handle.calls.end()
        assert root is not None
        edges = handle.parameters.precision.edges
        if edges is not None:
            output = edges.output(output)
        if call.stage is Stage.RECOMPUTATION:
            refuse_recast(handle.parameters)
            if torch.is_grad_enabled():
                handle.outputs.watch(output, call.since, count=False)
            return output
        if module in self._left_to_run:
            self._left_to_run.remove(module)
        try:
            refuse_recast(handle.parameters)
            complete = not self._left_to_run and handle.calls.depth == 0
            output = root.forward.leave(handle, output, call.since, complete=complete)
        except BaseException:
            self._left_to_run = []
            root.on_error(handle)
            raise
        return output

    def on_error(self, module: nn.Module) -> None:
        call, unit = self._calls.pop(), self._unit
        if call.stage is Stage.RECOMPUTATION:
            unit.handle.calls.end()  # checkpointing stops a recomputation by raising as soon as it has what it needs
        elif call.stage is Stage.FORWARD:
            low = unit.handle.parameters.precision.in_force.param_dtype
            note_of_dtypes(sys.exception(), module, low, unit.handle.name)
            unit.handle.calls.end()
            self._left_to_run = []
            assert unit.root is not None
            unit.root.on_error(unit.handle)

    @untraced
    def on_interrupt(self) -> None:
        root = self._unit.root
        if root is not None:
            unnoted = root.forward.call is None and any(call.stage is Stage.ENTERING for call in self._calls)
            root.recover()
            root.steps.behind = True
            if unnoted:
                root.steps.open()  # the others have
                say_farewell(root.handles, "its forward was interrupted")
        while self._calls:  # of a forward that goes on: somebody inside it caught the interrupt
            self.on_error(self._unit.modules[0])

    def drop_calls(self) -> None:
        """No call of this unit's modules is under way any more."""
        self._calls = [call for call in self._calls[-1:] if call.stage is Stage.ENTERING]
        self._left_to_run = []

    def called_inside(self, module: nn.Module) -> None:
        """A module with parameters of this unit computes while no module of the unit itself is called."""
        unit = self._unit
        if unit.handle.calls.depth:
            return  # it is recomputed by itself, within the unit's backward
        unit.check_hooks()
        if in_backward() and unit.root is not None:
            # Part of this unit is recomputed, and its outputs were not on the way here.
            unit.handle.outputs.on_backward(False)
            return
        raise outside_of_a_call(unit.handle, unit.modules, module)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._unit, "bracket")
