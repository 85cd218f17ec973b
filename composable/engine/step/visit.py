"""The hooks around forwards of a unit's modules, and the hooks through which backward enters it.

The hooks call `Unit`, which holds the parameters and gradients of its modules, and `Root`, which
decides the order of the step. Neither of the two calls a hook.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from functools import partial
from operator import attrgetter
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.compilation import untraced
from composable.engine.gradients.agreed import InputGradMode
from composable.engine.params.param import ManagedParam
from composable.engine.params.precision import cast, moved
from composable.engine.step.compiled import guarded, runs_again
from composable.engine.step.observer import OBSERVERS
from composable.engine.step.outputs import lends, owned, watch
from composable.engine.step.plan import plan_root, root_for_call
from composable.engine.step.root import Root
from composable.engine.step.unit import BY_HAND, Unit, UnitCall
from composable.errors import OutputError, PhaseError
from composable.torch_private import current_node, in_backward, next_node

logger = logging.getLogger("composable")

_WARNED: Final[WeakSet[Unit]] = WeakSet()  # units whose gradients at rest were warned of


class Visit:
    """The bracket around forwards of one unit's modules (`composable.contract.hooks`)."""

    __slots__ = ("_is_entering", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        # `pre_forward` runs, or it raised and has cleaned up, so that `on_error` has nothing to do
        self._is_entering = False

    @untraced
    def pre_forward(
        self, module: nn.Module, args: Any, kwargs: Any, *, computes: bool = True
    ) -> tuple[Any, Any]:
        """Pre-forward. Not `computes`: the unit takes part in communication only."""
        unit, self._is_entering = self.unit, True
        root = unit.root
        if root is not None and _recomputes(unit, root):
            # Checkpointing runs this forward again: no order is recorded and nothing resharded,
            # backward needs it next.
            call = UnitCall(unit, unit.step, module, next_node(), None)
            if root.in_step:  # not in the second half of a split backward
                before = _before_recomputation(root, call)
                # so that it repeats what its forward did
                inside = before is None or before.anchors
                enters = inside and (
                    unit.trains or root.order.input_grad_mode(unit) is InputGradMode.REQUIRED
                )
                call.take_place(None, outermost=False, is_entered=enters)
                for notify in OBSERVERS.pre_forward:
                    notify(root, call)
            unit.unshard()
            unit.wait_for_unshard()
        else:
            root = root_for_call(unit, module, computes=computes)  # may reset: forget all calls
            call = UnitCall(unit, unit.step, module, next_node(), root)
            for notify in OBSERVERS.pre_forward:
                notify(root, call)
            root.pre_forward(call, (args, kwargs) if computes else None)
        self._is_entering = False
        unit.push_call(call)
        policy, device = unit.spec.mp_policy, unit.mesh_info.device
        # also where torch's checkpoint around the root runs it again
        if (call.outermost or unit is root.top) and device.type not in ("cpu", "meta"):
            args, kwargs = moved((args, kwargs), device)
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast((args, kwargs), policy.param_dtype)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Post-forward."""
        unit = self.unit
        call, grad = unit.step.calls[-1], torch.is_grad_enabled()
        try:
            unit.pop_call()
            if unit.spec.mp_policy.output_dtype is not None:
                output = cast(output, unit.spec.mp_policy.output_dtype)
            if grad:
                output, keep = self._watch(output, call)
            elif call.outermost:
                output, keep = owned(output, unit.name), False
            else:  # until the root's forward ends
                keep = lends(output, unit.aliases)
            end_call(call, keep=keep)
        except BaseException:
            if call.root is not None:
                call.root.on_error(unit)  # of the outermost forward, also if its end raised
            raise
        return output

    def _watch(self, output: Any, call: UnitCall) -> tuple[Any, bool]:
        """Let `pre_backward` be called before backward goes through `output`, at the nodes that
        this call made; at one node, for the outer call first. Returns it, and whether parameters
        must outlive forward.
        """
        unit = self.unit
        root = call.root
        if root is not None and not root.eager_because:
            return owned(output, unit.name) if call.outermost else output, False
        counted = root is not None and bool(unit.params)
        output, found, aliases, opaque = watch(
            output, call.since, partial(pre_backward, call), unit.aliases,
            counted=counted, anchors=call.anchors, leaves=unit.name if call.outermost else "",
        )  # fmt: skip
        if not found:
            if opaque and unit.trains and unit.is_sharded:
                raise OutputError(
                    f"unit '{unit.name}': forward returned {', '.join(opaque)}, in which no tensor"
                    " that requires grad was found, so backward cannot be followed to the unit."
                    " Return tensors, containers, dataclasses or objects with attributes"
                )
            return output, aliases or unit.trains
        if root is not None:  # backward comes once, however often parts run again
            call.await_backward()
            output = guarded(output, root)
        return output, aliases

    @untraced
    def on_error(self, module: nn.Module) -> None:
        """Forward, or a hook around it, raised. Called for the innermost module first."""
        unit = self.unit
        raised, self._is_entering = self._is_entering, False
        calls = unit.step.calls
        if unit.root is not None and unit.root.runs_elsewhere and not in_backward():
            return  # this call was refused, and is not the one under way
        # `pre_forward` raised, and what it called has cleaned up; or a reset has forgotten the call
        if raised or not calls or calls[-1].module is not module:
            return
        root = calls[-1].root
        if root is None:  # checkpointing stops a recomputation by an exception, when it has enough
            end_call(unit.pop_call(), keep=False)
        else:
            error = sys.exception()
            assert error is not None
            for notify in OBSERVERS.raises:
                notify(root, calls[-1], error)
            unit.pop_call()
            unit.end_forward()
            root.on_error(unit)


def _recomputes(unit: Unit, root: Root) -> bool:
    """Whether a forward that begins repeats what checkpointing dropped: it runs inside of a
    backward of its own root. (A model without a root, which checkpointing around it runs again, has
    its first forward there.)
    """
    if not root.eager_because:  # the compiler reduces the gradients
        return runs_again()
    # The second half of a split backward runs outside of a step.
    return in_backward() and (root.in_step or BY_HAND in unit.step.needed_by)


def end_call(call: UnitCall, *, keep: bool) -> None:
    """A call has computed. `keep`: parameters must outlive forward."""
    root = call.root or call.unit.root
    if root is not None:  # a part that runs again may have none since the tree changed
        for notify in OBSERVERS.post_forward:
            notify(root, call, keep)
        if call.root is root:  # otherwise it recomputes, and backward needs the unit next
            root.post_forward(call, keep=keep)


# --- backward ------------------------------------------------------------------------------------


@untraced
def pre_backward(call: UnitCall, *_: object) -> None:
    """Backward is about to go through an output that `call` made."""
    unit = call.unit
    if unit.modules:
        # anew, if a unit came or went since the forward
        root = unit.root or plan_root(unit)
        root.pre_backward(call)
    elif unit.is_sharded and unit.spec.params:
        raise PhaseError(
            f"fully_shard was removed from unit '{unit.name}' between a forward and its backward:"
            " the parameters that this backward goes to are no longer the module's. Run the"
            " backward first, or the forward again"
        )


def _before_recomputation(root: Root, again: UnitCall) -> UnitCall | None:
    """Checkpointing is about to run a forward again, for the node that backward is at.

    If some ranks skip the last unit of the checkpointed part, ranks come here from different nodes.
    So backward enters the unit now, and before it those around it: on all ranks in one order,
    before the recomputation gathers others.

    Returns:
        The call that is run again; None if it ran without gradients (reentrant checkpointing).
    """
    calls, entered = root.step.history, list[UnitCall]()  # the last call, and those around it
    for index in range(bisect_right(calls, current_node(), key=attrgetter("since")) - 1, -1, -1):
        call = calls[index]
        if call.watched and (not entered or entered[-1].unit in call.unit.relations.ran_inside):
            entered.append(call)
        if call.unit is again.unit:
            with torch.no_grad():  # of the backward; recomputations have gradients
                for each in reversed(entered):
                    pre_backward(each)
            return call
    return None


def _gradient_arrived(unit: Unit, param: ManagedParam) -> None:
    """Autograd has accumulated a gradient on what modules compute with."""
    (unit.root or plan_root(unit)).on_gradient(unit, param)


def _gradient_arrived_at_rest(unit: Unit, param: ManagedParam) -> None:
    """Autograd has accumulated on an at-rest parameter that modules do not compute with."""
    root = unit.root
    if root is not None:  # none before the first forward: a penalty alone
        root.on_gradient_at_rest(unit, param)
    # Shards are DTensors there, which torch does not mix with a batch.
    if not isinstance(param.at_rest, DTensor) and unit not in _WARNED:
        _WARNED.add(unit)
        logger.warning(
            "unit '%s': a gradient came to parameter '%s' outside of the unit's forward, where it"
            " has its own dtype and its gradient is this rank's alone. A penalty on parameters is"
            " the same on all ranks, and right. Otherwise call the module and not its forward(),"
            " and use register_forward_method(module, name) for other methods",
            unit.name,
            param.fqn,
        )


# what `Unit.initialize` takes
GRADIENT_HOOKS: Final = (_gradient_arrived, _gradient_arrived_at_rest)
