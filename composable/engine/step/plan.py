"""Which root a call of a unit has, and which units that root consists of.

A root is planned when the outermost annotated module is called, and again after a unit or a module
came or went below it:

| units | are |
|---|---|
| below the modules of the unit that is called | units of its root |
| of these, units that are or were below another annotated model, too | shared: they have a root of their own, whichever model calls them, because the gradients of a parameter must be reduced by one object |
| replicated next to shards elsewhere, with a parameter that modules below read | units of the root |

A plan depends only on annotations. It does not depend on which models are alive, because ranks may
collect a dropped model at different times.
"""  # noqa: E501

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import get_ident
from traceback import walk_stack

import torch
from torch import nn

from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.step.prepare import modules_calling
from composable.engine.step.root import Phase, Root, Step, reset_interrupted, roots_of
from composable.engine.step.unit import Unit, rename_below, unit_of, units_below
from composable.torch_private import in_backward


def plan_root(unit: Unit) -> Root:
    """Plan the modules of `unit` and what is below them as one tree.

    1. Find the units, as the table at the top of this file says, and name them below the modules.
    2. Their former roots give up backwards that have raised. A former root of the same units goes
       on: modules that are not annotated have changed.
    3. Otherwise make a root, which the units follow from now on.
    """
    units = units_below(unit.modules)
    relations = unit.relations
    inside = (each.relations.number for each in relations.below)
    known = {relations.number, *relations.around, *inside}
    shared = [
        each
        for each in units
        if not known.issuperset(each.relations.around.keys() - {each.relations.number})
    ]
    owners = [unit_of(each) for module in unit.modules for each in module.parameters()]
    units += [owner for owner in owners if owner is not None and owner.kind is UnitKind.BESIDE]
    units = [each for each in dict.fromkeys(units) if each not in shared]
    rename_below(unit.modules, units)
    for former in roots_of(units):
        if not in_backward():  # checkpointing runs a part again: the backward goes on
            former.give_up_backward()
        if former.top is unit and set(former.units) == set(units):
            former.watch_tree(shared)
            return former
    root = Root(unit, units, shared, root_of)
    for each in units:
        each.follow_root(root)
    for each in shared:
        each.relations.share()
    return root


def root_of(unit: Unit) -> Root:
    """The root that `unit` has, or gets."""
    return unit.root or plan_root(unit)


def planned_roots(units: Sequence[Unit]) -> list[Root]:
    """The roots of these units; units that have none get one."""
    for unit in units:
        root_of(unit)
    return roots_of(units)


def launch_held(units: Sequence[Unit]) -> list[Root]:
    """Launch the reduction of what these units accumulated under `no_sync`. Returns their roots,
    which `land_held` waits for.
    """
    roots = planned_roots(units)
    for root in roots:
        root.give_up_backward()
        root.launch_held()
    return roots


def root_for_call(unit: Unit, module: nn.Module, *, computes: bool) -> Root:
    """The root of a forward of `module` that begins.

    | the root of `unit` | is |
    |---|---|
    | none | planned |
    | in a forward of this thread, which calls `unit` | kept |
    | in a forward of another thread, which is in it | refused: a step is one thread's |
    | in a forward that an interrupt has ended without a word | reset |
    | in a backward of another thread | refused |
    | in a backward that raised | reset |
    | in no forward, and modules below have changed | planned anew |
    """
    root = unit.root
    if root is None:
        return plan_root(unit)
    if root.step.running:
        first = root.step.thread.get(None)
        if first != get_ident() and not in_backward():
            if _is_on_a_stack(root.step):
                root.refuse_second_thread(first)
        else:
            forward = root.step.forward
            assert forward is not None
            # not `computes`: `join` and `skipped` enter it without a call on the stack
            if forward.module is not module or not computes or _is_called_inside_its_call(module):
                return root
        # an interrupt has ended the forward, in another thread or before it is entered again here
        reset_interrupted(root, "its forward did not end", entering=module)
    else:
        if root.phase is Phase.BACKWARD and not in_backward() and (first := _runs_backward()):
            root.refuse_second_thread(first)
        root.give_up_backward()
    # from where it was planned, as on ranks whose modules are as before
    if root.tree_changed() and plan_root(root.top) is not root:
        root.forget()
    return root_of(unit)


def prepare_roots(units: Sequence[Unit]) -> None:
    """These are about to be gathered outside of forwards. Follow what users have changed now, on
    all ranks: a forward of one rank alone would gather again what it finds changed.
    """
    with torch.no_grad():
        for root in planned_roots(units):
            # what is shown, offloaded or between two of its modules holds other tensors, on purpose
            if root.phase in (Phase.IDLE, Phase.WAITING) and not any(
                unit.kept_by or unit.shown_by or unit.is_offloaded or unit.step.to_run
                for unit in root.units
            ):
                root.prepare()


def _is_called_inside_its_call(module: nn.Module) -> bool:
    """Whether a call of `module` is on the stack around the one that begins: a forward that calls
    itself, or `generate` in the role of a forward.
    """
    return modules_calling("_call_impl", "_call_as_forward").count(module) > 1


def _is_on_a_stack(step: Step) -> bool:
    """Whether the forward's thread is in it, and was not interrupted there."""
    forward, frame = step.forward, sys._current_frames().get(step.thread.get(None, 0))
    # it begins or ends
    return forward is None or (
        frame is not None
        and forward.module in modules_calling("_call_impl", "_call_as_forward", frame=frame)
    )


def _runs_backward() -> int | None:
    """Another thread that waits in a backward."""
    for thread, frame in sys._current_frames().items():
        names = [each.f_code.co_name for each, _ in walk_stack(frame)]
        if thread != get_ident() and "_engine_run_backward" in names:
            return thread
    return None
