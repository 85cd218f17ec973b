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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from composable.algorithms.watch.calls import (
    Call,
    are_apart,
    as_called,
    by_index,
    call_of,
    copied,
    is_forward,
    runs_as_it_is,
)
from composable.api.sync_module_states import digests, fingerprints
from composable.contract.values import map_tensors, tensors_in
from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.step.unit import Unit, unit_of, units_below
from composable.errors import first_line
from composable.memory.torch_private import backward_id, is_transformed, local_tensor

SAME: Final = ""
NOT_DETERMINISTIC: Final = "its kernels are not deterministic"


@dataclass
class Repeat:
    """The unit that runs again at the end of this step.

    Attributes:
        calls: how often it was called in the step; with several, gradients of parameters are sums.
        inputs: gradients of the inputs, by number.
        weights: fingerprints of the gradients of parameters, by FQN.
    """

    unit: Unit
    call: Call | None = None
    calls: int = 0
    inputs: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    _backwards: set[int] = field(default_factory=set)  # with several, what was kept is of some
    _buffers: list[dict[str, Tensor | None]] = field(default_factory=list)  # of modules

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """It is called. Returns its inputs; of the call that is repeated, in nodes of their own.

        What others that read an input add to its gradient does not come through these.
        """
        self.calls += 1
        if self.calls > 1 or not (is_forward() and runs_as_it_is(module)) or is_transformed():
            return args, kwargs
        self.call = call_of(self.unit, module, *copied((args, kwargs)))
        self._buffers = copied(_buffers_of(module))
        args, kwargs = map_tensors((args, kwargs), _with_a_node)
        self._keep(self.inputs, tensors_in((args, kwargs)))
        return args, kwargs

    def end(self, output: Any) -> None:
        """A call has computed."""
        if self.call is not None and self.calls == 1:
            self.call.end(output)
            self._keep(self.call.gradients, tensors_in(output))

    def _keep(self, into: dict[int, Tensor], tensors: Iterable[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.grad_fn is not None:  # a hook on a leaf would outlive the step
                tensor.register_hook(partial(self._came, into, index))

    def _came(self, into: dict[int, Tensor], index: int, gradient: Tensor) -> None:
        into[index] = gradient.detach()  # its graph would hold the hook
        self._backwards.add(backward_id())

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
            if call is None or not call.gradients or not call.outputs or len(self._backwards) > 1:
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
        """Forget what it has: hooks hold it for as long as somebody keeps the loss."""
        self.inputs.clear()
        if self.call is not None:
            self.call.gradients.clear()
        self.call, self._buffers = None, []

    def _first(self, call: Call) -> dict[str, int]:
        found = _named("output", by_index(call.outputs))
        values = fingerprints(list(self.inputs.values()))
        found |= _named("gradient of input", dict(zip(self.inputs, values, strict=True)))
        return found | (_named("gradient of", self.weights) if self.calls == 1 else {})

    def _again(self, call: Call) -> dict[str, int]:
        args, kwargs = copied(call.inputs)
        # Copies: the unit's own are not written to, nor their casts, which it holds now.
        now = _buffers_of(call.module)
        _register(call.module, copied(self._buffers))
        try:
            with as_called(self.unit.mesh_info.device, call.generator, call.autocast):
                output = call.module.forward(*args, **kwargs)
        finally:
            _register(call.module, now)
        outputs = tensors_in(output)
        found = _named("output", by_index(digests([each.detach() for each in outputs])))
        ends = [(outputs[index], gradient) for index, gradient in call.gradients.items()]
        if not are_apart([output for output, _ in ends]):
            return found  # their gradients cannot be told from those that the unit adds
        sources: dict[str, tuple[Tensor, torch.dtype | None]] = {
            f"gradient of input {index}": (each, None)
            for index, each in enumerate(tensors_in((args, kwargs)))
        }
        for group in self.unit.groups:
            for param in group.params:
                if param.fqn in self.weights:  # others may have hooks of the user's
                    name = f"gradient of {param.fqn}"
                    sources[name] = param.compute, group.precision.reduce
        sources = {name: each for name, each in sources.items() if each[0].requires_grad}
        if not sources:
            return found
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            [output for output, _ in ends],
            [each for each, _ in sources.values()],
            [gradient for _, gradient in ends],
            allow_unused=True,
        )
        there = {
            name: local_tensor(each).to(dtype or each.dtype).reshape(-1)
            for (name, (_, dtype)), each in zip(sources.items(), gradients, strict=True)
            if each is not None
        }
        return found | dict(zip(there, fingerprints(list(there.values())), strict=True))


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


def _named(kind: str, found: Mapping[Any, int]) -> dict[str, int]:
    return {f"{kind} {index}": number for index, number in found.items()}


def _difference(one: dict[str, int], other: dict[str, int]) -> str:
    return next((name for name in one if name in other and one[name] != other[name]), SAME)


def _buffers_of(module: nn.Module) -> list[dict[str, Tensor | None]]:
    return [dict(each._buffers) for each in module.modules()]


def _register(module: nn.Module, buffers: list[dict[str, Tensor | None]]) -> None:
    for each, table in zip(module.modules(), buffers, strict=True):
        each._buffers.clear()
        each._buffers.update(table)
