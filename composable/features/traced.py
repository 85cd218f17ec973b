"""Reductions of `replicate` that the compiler sees.

They are one functional all-reduce per gradient, in compiled autograd's graph.

Compiled autograd records a whole backward, with the hooks of parameters, as one graph. It tells
nobody when that backward ends, so the engine cannot reduce buckets there. In its place a hook on
each parameter reduces the gradient as soon as it is accumulated, and the compiler may merge the
all-reduces, move them and overlap them with the rest of the graph.

Whether that happens is decided when the forward begins. Then the engine watches no outputs in that
forward, and takes no part in the backward. See docs/decisions/0016-traced-reductions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch.distributed._functional_collectives import all_reduce

from composable.compilation import backward_is_compiled, traceable
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.gradients.reduction import division_factors
from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.params.param import DeferredHooks
from composable.engine.step.observer import DECISIONS, open_scope
from composable.engine.step.root import Root
from composable.errors import DifferentiationError
from composable.features.hook_stages import hooks_of
from composable.torch_private import hooks_after_accumulation

if TYPE_CHECKING:
    from torch import Tensor

    from composable.engine.params.param_group import ParamGroup
    from composable.engine.step.unit import Unit

logger = logging.getLogger("composable")

_FELL_BACK: Final = (
    "an earlier backward of this model was not compiled, although compiled autograd was on in its"
    " forward"
)


class TracedReduction:
    """Called by autograd, or traced by the compiler, when one parameter's gradient is accumulated.

    Attributes:
        ordinary: the engine's hook, which this one stands in front of.
        users: post-accumulate hooks of users, which see the reduced gradient.
        group: the ranks to reduce over; None for one rank.
        before, after: what the gradient is divided by before and after the sum.
    """

    def __init__(self, unit: Unit, group: ParamGroup, hooks: DeferredHooks) -> None:
        self.ordinary = hooks.of_engine
        self.users = hooks.of_users
        comm = unit.mesh_info.all
        self.group = comm.group if comm.size > 1 else None
        self.before, self.after = division_factors(group.precision.reduce, comm.size)
        self.accumulation = unit.gradients.accumulation
        self._unit = ref(unit)  # weak: torch holds this where the garbage collector does not look

    @traceable
    def __call__(self, parameter: Tensor) -> None:
        """Reduce the gradient of `parameter`."""
        if not (torch.compiler.is_dynamo_compiling() or backward_is_compiled()):
            unit = self._unit()
            if unit is not None and (root := unit.root) is not None:
                _fall_back(root)
            self.ordinary(parameter)
            return
        if self.accumulation.now is not SyncMode.REDUCE:
            raise DifferentiationError(
                "compiled autograd runs a backward under no_sync, whose forward began outside of"
                " it. Leave no_sync out: every backward adds its mean to what is there, so the sum"
                " is the same"
            )
        if self.group is not None:
            gradient: Any = parameter.grad
            gradient.copy_(all_reduce(gradient / self.before, "sum", self.group) / self.after)
        for hook in list(self.users.values()):
            hook(parameter)


def trace_reductions(root: Root) -> str:
    """Let the compiler reduce the gradients of a forward of `root` that begins.

    Returns why it cannot, or an empty string.
    """
    reason = root.agreed.untraced or _obstacle(root)
    if not reason:
        for unit, group, hooks in _hooks_of(root):
            if not isinstance(hooks.of_engine, TracedReduction):
                hooks.of_engine = TracedReduction(unit, group, hooks)
    return reason


def _hooks_of(root: Root) -> Iterator[tuple[Unit, ParamGroup, DeferredHooks]]:
    """Yield the hooks by which the engine is notified of gradients, with the parameters' unit."""
    for unit in root.units:
        for group in unit.groups:
            for param in group.params:
                hooks = hooks_after_accumulation(param.at_rest)
                if isinstance(hooks, DeferredHooks):
                    yield unit, group, hooks


def _obstacle(root: Root) -> str:
    if open_scope() is not None:
        return "a join scope is open, in which ranks without data follow the engine's reductions"
    for unit in root.units:
        if unit.kind in (UnitKind.SHARDED, UnitKind.BESIDE):
            return f"unit '{unit.name}' has shards, or is replicated beside some"
        if any(param.compute is not param.at_rest for param in unit.params):
            return f"unit '{unit.name}' has a mixed precision policy (torch.autocast works)"
        if any(not param.info.form.is_whole for param in unit.params):
            return f"unit '{unit.name}' has tensor-parallel parameters"
        if hooks_of(unit.gradients):
            return f"unit '{unit.name}' has a communication hook"
        if unit.gradients.sparse:
            return f"unit '{unit.name}' has sparse gradients"
        if DECISIONS.counts_backwards(param.at_rest for param in unit.params):
            return f"local_steps counts the backwards that step unit '{unit.name}'"
        held = unit.gradients.holds or root.post_backward.buckets.backwards
        if held or unit.gradients.accumulation.now is not SyncMode.REDUCE:
            return f"unit '{unit.name}' accumulates gradients under no_sync"
    return ""


def _fall_back(root: Root) -> None:
    """Put the engine's hooks back: autograd itself runs a backward.

    This is for good if the compiler was to get that backward.
    """
    for _, _, hooks in _hooks_of(root):
        if isinstance(hooks.of_engine, TracedReduction):
            hooks.of_engine = hooks.of_engine.ordinary
    if not root.eager_because:
        root.stop_tracing(_FELL_BACK)
        logger.warning(
            "unit '%s': compiled autograd was on when the forward began, and its backward was not"
            " compiled. Gradients are reduced as usual, in this and in all later backwards",
            root.name,
        )


DECISIONS.answer(traced=trace_reductions)
