"""Copies of annotated modules: `copy.deepcopy` returns a module with the same annotations, and
pickling stores a plain module.

torch copies a module's tables: the hooks, the registry and the parameters. The units of these
modules are first copied empty. They are filled when the whole module has been copied, because only
then the memo has a copy of every module and parameter of a unit, whatever the order of the tables.
For this, annotated modules have their own `__deepcopy__` and `__reduce_ex__`, since torch calls no
hook after it has copied a module. No message is sent: meshes and communicators are shared, and each
rank copies its own shards.

As in one process, a copy has no gradients, no step in progress, and is in no scope.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor

from composable.contract.contract import drop_attribute, module_name, registry, remove
from composable.contract.tree import states_below
from composable.engine.edits.annotations import choose_rest
from composable.engine.edits.loading import refuse_pickling
from composable.engine.params.param import STEPPED_BY, ManagedParam, ParamInfo, replacement_of
from composable.engine.step.unit import RANK0_ONLY, Unit
from composable.engine.step.visit import GRADIENT_HOOKS
from composable.errors import AnnotationError, PhaseError
from composable.tensors import cloned, wrap_like
from composable.torch_private import local_of

_KEY: Final = "composable"  # in the memo of a deepcopy, beside ids


class _Copies:
    """What one `copy.deepcopy` has copied. It may meet several annotated modules that lie apart.

    Attributes:
        memoized: units of annotated modules that were met.
        depth: annotated modules whose copying is under way.
        plain: the copy shares the tensors, which are in the memo, and is about to lose its
            annotations.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self.memoized: dict[Unit, None] = {}
        self.depth = 0
        self.plain = plain

    def memoize(self, units: Iterable[Unit], memo: dict[Any, Any]) -> None:
        """Before tables are copied: whichever form of a parameter they hold now, the copy gets the
        at-rest one.
        """
        for unit in units:
            if unit in self.memoized:
                continue
            self.memoized[unit] = None
            unit.refuse_offloaded("copy.deepcopy")
            if unit.shown_by == RANK0_ONLY:
                raise PhaseError(
                    f"copy.deepcopy of unit '{unit.name}' inside of {unit.shown_by}: the other"
                    " ranks would copy what they had before the edits of rank 0. Copy the model"
                    " outside of the scope"
                )
            for cast, buffer in unit.buffers_shown():
                memo[id(cast)] = copy.deepcopy(buffer, memo)
            for param in unit.params:
                at_rest = param.at_rest
                if id(at_rest) not in memo:
                    # torch copies gradients of subclasses, and fails if these have another dtype
                    gradient, at_rest.grad = at_rest.grad, None
                    try:
                        memo[id(at_rest)] = _copy_of(param, memo)
                    finally:
                        at_rest.grad = gradient
                memo[id(param.compute)] = memo[id(at_rest)]  # which modules may hold now
            for param in unit.refrozen() if not self.plain else ():
                # after `unshard()` or in a scope, where the original follows later
                memo[id(param.at_rest)].requires_grad_(param.compute.requires_grad)

    def finish(self, memo: dict[Any, Any]) -> None:
        """After tables were copied: fill the units all of whose modules have a copy now."""
        copied: dict[Unit, Unit] = {
            unit: memo[id(unit)]
            for unit in self.memoized
            if all(id(each) in memo for each in unit.modules)
        }
        for unit, duplicate in copied.items():
            duplicate.relations.copy_from(unit.relations, copied)
        # Sharded units first: they decide how others rest.
        for unit, duplicate in sorted(copied.items(), key=lambda pair: not pair[0].is_sharded):
            if duplicate.modules:
                _follow_places(unit, duplicate, memo)
                choose_rest(duplicate)  # what is around it may have been copied later
                continue
            duplicate.is_copy(unit.name, copy.deepcopy(unit.undo, memo))
            if not self.plain:  # which is only to be removed
                _fill(unit, duplicate, memo)


def _fill(unit: Unit, duplicate: Unit, memo: dict[Any, Any]) -> None:
    """Make `duplicate` a unit of the copies of all modules of `unit`."""
    pairs = [
        (param, copy.deepcopy(param, memo)) for param in unit.params if param.registered is not None
    ]
    for param, other in pairs:
        other.start_as(param, _info_of_copy(param, memo))
    params = [other for _, other in pairs]
    spec = copy.deepcopy(replace(unit.spec, params=(), mesh_info=unit.mesh_info), memo)
    spec = replace(spec, params=tuple(param.info for param in params))
    duplicate.initialize(spec, GRADIENT_HOOKS, copy.deepcopy(unit.watch, memo), params)
    for module in duplicate.modules:
        attach_copying(module)
    choose_rest(duplicate)
    if not duplicate.groups:
        duplicate.build()
    duplicate.reduce_by(copy.deepcopy(unit.gradients.stages, memo))
    for param, other in pairs:
        memo[id(param.at_rest)] = other.at_rest


def _follow_places(unit: Unit, duplicate: Unit, memo: dict[Any, Any]) -> None:
    """Places of tied parameters were copied after the unit's own modules."""
    params, grew = [param for param in unit.params if param.registered is not None], False
    for param, other in zip(params, duplicate.params, strict=False):
        info = _info_of_copy(param, memo)
        if len(info.places) > len(other.info.places):
            other.set_info(info)
            grew = True
    if grew:
        duplicate.build()  # others read it now


def _info_of_copy(param: ManagedParam, memo: dict[Any, Any]) -> ParamInfo:
    places = tuple(place for place in param.info.places if id(place.module) in memo)
    info: ParamInfo = copy.deepcopy(replace(param.info, places=places), memo)
    return info


def attach_copying(module: nn.Module) -> None:
    """Let `copy.deepcopy` and pickle call this file for `module`. They look for both methods on the
    object.
    """
    vars(module).update(__deepcopy__=partial(_copy, module), __reduce_ex__=partial(_reduce, module))


def detach_copying(module: nn.Module) -> None:
    """The inverse of `attach_copying`."""
    for name in ("__deepcopy__", "__reduce_ex__"):
        drop_attribute(module, name)


def _copy(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    copies: _Copies = memo.setdefault(_KEY, _Copies())
    copies.memoize(states_below([module]), memo)
    copies.depth += 1
    detach_copying(module)
    try:
        made = copy.deepcopy(module, memo)
    finally:
        attach_copying(module)
        copies.depth -= 1
    if not (copies.plain or registry(made)):
        raise AnnotationError(
            f"copy.deepcopy of {module_name(module)}: the __deepcopy__ of {type(module).__name__}"
            " leaves out hooks, and the copy would not be annotated. Copy the module before it is"
            " annotated, and annotate the copy"
        )
    if not copies.depth:
        copies.finish(memo)
    return made


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle a copy without annotations, around the same parameters and buffers."""
    if sys._getframe(1).f_code is copy.copy.__code__:  # which asks objects as pickle does
        raise AnnotationError(
            f"copy.copy of {module_name(module)}: both would hold the same tables of parameters,"
            " hooks and annotations, and what a step does to one would happen to the other."
            " copy.deepcopy(module) makes a copy that is annotated alike; to share parameters,"
            " register the module itself at both places"
        )
    tensors = [*module.parameters(), *module.buffers()]
    for unit in states_below([module]):
        refuse_pickling(unit)
        tensors += [param.at_rest for param in unit.params]  # modules may hold casts now
        tensors += [buffer for _, buffer in unit.buffers_shown()]
    memo: dict[Any, Any] = {id(tensor): tensor for tensor in tensors}
    memo[_KEY] = _Copies(plain=True)
    plain = copy.deepcopy(module, memo)
    for below in plain.modules():
        for verb in reversed([*registry(below)]):
            if verb in registry(below) and not registry(below)[verb].copied:
                remove(below, verb)
    return operator.getitem, ([plain], 0)


def _copy_of(param: ManagedParam, memo: dict[Any, Any]) -> nn.Parameter:
    """Torch's copy of a `DTensor` has a copy of the mesh."""
    parameter = param.at_rest
    if not isinstance(parameter, DTensor):
        return copy.deepcopy(parameter, memo)
    memo[id(parameter.device_mesh)] = parameter.device_mesh  # of optimizer state, too
    made = replacement_of(parameter, wrap_like(cloned(local_of(parameter)), parameter))
    vars(made).pop(STEPPED_BY, None)
    param.info.form.finish_copy(made, memo)
    return made
