"""Which root a call of a unit's module belongs to, and when a tree of units is planned anew; decides no order of units."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

from torch import nn

from composable.model.traversal import get_replicated_states, get_states, names_below
from composable.runtime.membership import Member, Membership
from composable.runtime.mesh_info import refuse_other_replicas
from composable.runtime.root import Root
from composable.runtime.step import Unit


class Planned(Unit, Member, Protocol):
    """What is asked of a unit."""

    root: Root | None
    former: Root | None
    enclosing: weakref.ref[Any] | None


def root_for_call(unit: Planned, module: nn.Module) -> Root:
    """The root of a forward of `module`, which is called now."""
    root = unit.root
    at_rest = root is None or not root.running
    if root is not None and at_rest and root.membership.changed():
        former, root = root, _become_root(unit, module)  # which may refuse what came
        former.invalidate()
    if root is None:
        root = _become_root(unit, module)
    forward, called = root.forward, root.forward.call
    if called is not None and (called is module or sys.exception() is not forward.handled) and forward.is_left(module):
        root.recover_from_interrupt()
        at_rest = True
    if at_rest:
        root.check_hooks()
        if unit.enclosing is not None and (outer := unit.enclosing()) is not None:
            outer.check_hooks()
    return root


def _become_root(unit: Planned, module: nn.Module) -> Root:
    """Plan `module` and everything below it as one tree. A later forward of a module above plans anew."""
    units: list[Planned] = get_states(module)
    if unit not in units:  # annotated in a list, and called through a member that does not hold the others
        units = [unit]
    names = names_below(module)
    for each in units:
        each.handle.rename(names.get(id(each.modules[0]), each.handle.fqn))
    membership = Membership(module, [each for each in units if each.handle.mesh_info.mesh is not None])
    membership.check()
    refuse_other_replicas((each.name, each.handle.mesh_info) for each in units)
    for former in dict.fromkeys([each.root or each.former for each in units]):
        if former is not None and former.backward.iteration is not None and former.backward.iteration.lost_backward:
            former.abort("its backward did not finish")
    around = dict.fromkeys([module, *(below for each in units for below in each.modules)])
    replicated = {id(state): state for each in around for state in get_replicated_states(each)}
    root = Root(module, units, membership, list(replicated.values()))
    for each in reversed(units):  # this one last: until it has the root, a forward plans anew
        each.root, each.former = root, None
    return root
