"""Pipelines that split each backward into one for inputs and one for weights (zero-bubble
schedules).

Such a schedule computes gradients of weights with `torch.autograd.grad`, for the tensors that
`parameters()` returns, and assigns `.grad` itself. No hook is called. Instead, the stages call
methods that say when gradients are accumulated and when they are reduced (`composable.fsdp2`):

| a stage asks | `hold` or `end` |
|---|---|
| to accumulate, before each of these backwards | `hold`: modules show compute parameters; what was assigned since the last call is accumulated |
| to reduce, or `reduce_gradients` is called | `end`: what was assigned is accumulated, modules hold at-rest parameters |

A lost step also ends this state, because the reason `BY_HAND` belongs to the step.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from composable.engine.step.observer import OBSERVERS, Observer
from composable.engine.step.root import Root, planned_roots
from composable.engine.step.unit import Need, Unit, unit_of
from composable.errors import OptimizerError
from composable.torch_private import split_backward_schedule

# Called when a schedule that splits backwards calls a forward (`composable.fsdp2`).
ON_SPLIT: Final[list[Callable[[], None]]] = []

# Roots whose last forward was called by such a schedule (its class), without a `hold` since. The
# optimizer's step refuses that: all ranks come to it, and to a forward one stage after another.
_split_by: Final[WeakKeyDictionary[Root, str]] = WeakKeyDictionary()


class _Schedules(Observer):
    @override
    def begins_forward(self, root: Root) -> None:
        _split_by.pop(root, None)
        schedule = split_backward_schedule()
        if schedule and _needs_hooks(root.units):
            _split_by[root] = schedule
            for call in ON_SPLIT:
                call()

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        if what == "reduce":
            units = [unit for each in parameters if (unit := unit_of(each)) is not None]
            for root in planned_roots(list(dict.fromkeys(units))):
                end(root)


def _needs_hooks(units: Sequence[Unit]) -> bool:
    """Whether gradients that are assigned by hand would be lost, or be this rank's alone."""
    return any(
        Need.BY_HAND not in unit.step.needed_by
        and (unit.mesh_info.all.size > 1 or unit.computes_apart)
        for unit in units
    )


def _is_held(root: Root) -> bool:
    return Need.BY_HAND in root.units[0].step.needed_by


@torch.no_grad()
def hold(root: Root) -> None:
    """Before a backward of one of these schedules, if one runs; see the top of this file.

    All ranks call it outside of forward and backward.
    """
    if root.step.running or not (root in _split_by or _is_held(root)):
        return
    for unit in root.units:
        unit.need(Need.BY_HAND)
        unit.unshard()
    for unit in root.units:
        unit.wait_for_unshard()
        unit.show()
    root.post_backward.hold()
    _split_by.pop(root, None)


@torch.no_grad()
def end(root: Root) -> None:
    """Modules hold at-rest parameters again, and on these is what was assigned."""
    if not _is_held(root):
        return
    root.post_backward.hold()
    for unit in root.units:
        unit.hide()
        unit.end_need(Need.BY_HAND)
        unit.free()


def refuse_split(step: str, units: Sequence[Unit]) -> None:
    """An optimizer is about to step parameters of these units.

    Raises:
        OptimizerError: a schedule has assigned gradients that nothing reduces.
    """
    for unit in units if _split_by else ():
        if unit.root is not None and unit.root in _split_by:
            raise OptimizerError(
                f"{step}: unit '{unit.name}' was called by {_split_by[unit.root]}, which takes"
                " gradients of weights by torch.autograd.grad and assigns .grad itself: nothing"
                " reduces them over the ranks. Annotate the module of the stage itself, or use a"
                " schedule that calls backward(), such as Schedule1F1B or ScheduleInterleaved1F1B"
            )


OBSERVERS.add(_Schedules())
