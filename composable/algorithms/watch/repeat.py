"""Does it reproduce: one unit in each step, in turn, runs again, and its bits are compared.

The unit keeps its inputs and the state of the random generator, and digests of its outputs, of the
gradients of its inputs, and, of sharded units, of those of its parameters in the message that they
are reduced in. Before the optimizer steps it runs again. If the bits differ, it runs a third time:
where the second and third differ, too, its kernels are not deterministic, and nothing can be said.
Otherwise this rank has computed something else the first time.

Left out are units with units inside, with hooks of the user's on their modules, of several modules,
compiled, tensor-parallel, or with synchronised batch norms; calls of other methods than forward;
and calls to which several backwards have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from composable.algorithms.watch.incident import (
    Call,
    are_apart,
    call_of,
    end_call,
    generator_state,
    is_forward,
    keep_gradient,
    runs_as_it_is,
)
from composable.api.sync_module_states import fingerprints
from composable.contract.values import map_tensors, tensors_in
from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.step.unit import Unit, unit_of, units_below
from composable.errors import first_line
from composable.memory.torch_private import backward_id, is_transformed, local_tensor

SAME: Final = ""
NOT_DETERMINISTIC: Final = "its kernels are not deterministic"
Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]  # of modules, by name


@dataclass
class Repeat:
    """The unit that runs again at the end of this step.

    Attributes:
        calls: how often it was called in the step; with several, gradients of parameters are sums.
        inputs: gradients of the inputs, by number.
        weights: fingerprints of the gradients of parameters, by FQN.
        backwards: that have come to the call; with several, what was kept is of some of them.
    """

    unit: Unit
    call: Call | None = None
    calls: int = 0
    inputs: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    backwards: set[int] = field(default_factory=set)
    _buffers: Buffers = field(default_factory=list)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """It is called. Returns its inputs; of the call that is repeated, in nodes of their own.

        What others that read an input add to its gradient does not come through these.
        """
        self.calls += 1
        if self.calls > 1 or not (is_forward() and runs_as_it_is(module)) or is_transformed():
            return args, kwargs
        copied = map_tensors(
            (args, kwargs), lambda each: each.detach().clone().requires_grad_(each.requires_grad)
        )
        self.call = call_of(self.unit, module, *copied)
        self._buffers = _copied((each, each._buffers) for each in module.modules())
        args, kwargs = map_tensors((args, kwargs), _with_a_node)
        for index, tensor in enumerate(tensors_in((args, kwargs))):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(_keep, self.inputs, self.backwards, index))
        return args, kwargs

    def end(self, output: Any) -> None:
        """A call has computed."""
        if self.call is not None and self.calls == 1:
            end_call(self.call, output)
            for index, tensor in enumerate(tensors_in(output)):
                if tensor.requires_grad:
                    kept = self.call.gradients
                    tensor.register_hook(partial(_keep, kept, self.backwards, index))

    def note_weights(self, bucket: GradBucket, named: Iterable[tuple[str, Tensor]]) -> None:
        """Gradients that are about to be reduced.

        Those that are cut along their first dimension are in the message as they are.
        """
        unit, reducer = self.unit, bucket.reducer
        if not unit.is_sharded or unit.spec.divisor or reducer.scales[False].before != 1.0:
            return
        slots = {param.fqn: slot for param, slot in zip(bucket.params, reducer.slots, strict=True)}
        pairs = [
            (name, rows.reshape(-1)[: slots[name].numel])
            for name, rows in named
            if slots[name].dim == 0 and not slots[name].order
        ]
        found = fingerprints([tensor for _, tensor in pairs])
        self.weights |= dict(zip([name for name, _ in pairs], found, strict=True))

    def run(self) -> tuple[str, str]:
        """Run it again, on all ranks. Returns what differs, and why nothing can be said."""
        unit = self.unit
        kept = unit.is_unsharded and bool(unit.kept_by)
        if not kept:
            unit.unshard()
            unit.wait_for_unshard()
        unit.swap_in()
        try:
            call = self.call
            if call is None or not call.gradients or not call.outputs or len(self.backwards) > 1:
                return SAME, ""  # skipped here, or without a backward
            first = self._first(call)
            second = self._again(call)
            differs = _difference(first, second)
            if differs and _difference(second, self._again(call)):
                return SAME, NOT_DETERMINISTIC
            return differs, ""
        except Exception as error:  # of this rank; the others go on
            return SAME, f"its second run raised {type(error).__name__}: {first_line(error)}"
        finally:
            self.drop()
            unit.hold_at_rest()
            if not kept:
                unit.free()

    def drop(self) -> None:
        """Free the gradients, which hooks hold for as long as somebody keeps the loss."""
        self.inputs.clear()
        if self.call is not None:
            self.call.gradients.clear()

    def _first(self, call: Call) -> dict[str, int]:
        found = {
            f"output {index}": number
            for indices, numbers in call.outputs
            for index, number in zip(indices, numbers.tolist(), strict=True)
        }
        values = fingerprints(list(self.inputs.values()))
        found |= {
            f"gradient of input {index}": value
            for index, value in zip(self.inputs, values, strict=True)
        }
        if self.calls == 1:
            found |= {f"gradient of {name}": value for name, value in self.weights.items()}
        return found

    def _again(self, call: Call) -> dict[str, int]:
        unit, device = self.unit, self.unit.mesh_info.device
        args, kwargs = map_tensors(
            call.inputs, lambda each: each.detach().clone().requires_grad_(each.requires_grad)
        )
        inputs = tensors_in((args, kwargs))
        state = generator_state(device)
        # Copies: the unit's own are not written to, nor their casts, which it holds now.
        now = [(each, dict(each._buffers)) for each, _ in self._buffers]
        _register(_copied(self._buffers))
        _set_generator(device, call.generator)
        context: AbstractContextManager[Any] = nullcontext()
        if call.autocast is not None:
            context = torch.autocast(device.type, call.autocast)
        try:
            with torch.enable_grad(), context:
                output = call.module.forward(*args, **kwargs)
        finally:
            _register(now)
            _set_generator(device, state)
        again = Call(call.module, None, call.inputs, call.generator, None)
        end_call(again, output)
        found = {
            f"output {index}": number
            for indices, numbers in again.outputs
            for index, number in zip(indices, numbers.tolist(), strict=True)
        }
        outputs = tensors_in(output)
        ends = [(outputs[index], each) for index, each in call.gradients.items()]
        if not are_apart([each for each, _ in ends]):
            return found  # their gradients cannot be told from those that the unit adds
        # others are not compared, and users may have hooks on them
        compared = [param for param in unit.params if param.fqn in self.weights]
        params = [param for param in compared if param.compute.requires_grad]
        wanted = [each for each in inputs if each.requires_grad]
        sources = [*wanted, *(param.compute for param in params)]
        gradients: Sequence[Tensor | None] = ()
        if sources:
            gradients = torch.autograd.grad(
                [each for each, _ in ends], sources, [each for _, each in ends], allow_unused=True
            )
        names = [
            *(f"gradient of input {i}" for i, each in enumerate(inputs) if each.requires_grad),
            *(f"gradient of {param.fqn}" for param in params),
        ]
        dtype = {param: group.precision.reduce for group in unit.groups for param in group.params}
        casts = [None] * len(wanted) + [dtype[param] for param in params]
        there = [
            (name, local_tensor(each).to(cast or each.dtype).reshape(-1))
            for name, each, cast in zip(names, gradients, casts, strict=bool(sources))
            if each is not None
        ]
        values = fingerprints([tensor for _, tensor in there])
        return found | dict(zip([name for name, _ in there], values, strict=True))


def candidates_in(units: Iterable[Unit]) -> list[Unit]:
    """Units that can run again by themselves; the same on all ranks."""
    return [
        unit
        for unit in units
        if len(unit.modules) == 1
        and units_below(unit.modules) == [unit]
        # a weight that others read belongs to a unit around both
        and {unit_of(each) for each in unit.modules[0].parameters()} <= {unit, None}
        # Their forwards communicate, and a rank may run again alone, or once more.
        and all(param.info.form.is_whole for param in unit.params)
        and not any(isinstance(each, nn.SyncBatchNorm) for each in unit.modules[0].modules())
    ]


def _with_a_node(tensor: Tensor) -> Tensor:
    moves = tensor.requires_grad and tensor.grad_fn is not None and type(tensor) is Tensor
    return tensor.view_as(tensor) if moves else tensor


def _keep(into: dict[int, Tensor], backwards: set[int], index: int, gradient: Tensor) -> None:
    keep_gradient(into, index, gradient)
    backwards.add(backward_id())


def _difference(one: dict[str, int], other: dict[str, int]) -> str:
    return next((name for name in one if name in other and one[name] != other[name]), SAME)


def _copied(buffers: Iterable[tuple[nn.Module, dict[str, Tensor | None]]]) -> Buffers:
    """Copies of buffers; one that modules share stays one."""
    copies: dict[int, Tensor] = {}
    return [
        (
            module,
            {
                name: None if each is None else copies.setdefault(id(each), each.detach().clone())
                for name, each in table.items()
            },
        )
        for module, table in buffers
    ]


def _register(buffers: Buffers) -> None:
    for module, table in buffers:
        module._buffers.clear()
        module._buffers.update(table)


def _set_generator(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
