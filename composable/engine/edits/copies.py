"""Copies of annotated modules: `copy.deepcopy` gives a module that is annotated alike, pickling a
plain one.

torch copies a module's tables: the hooks, the registry and the parameters. The units behind them
are copied empty, and filled when the whole module has been copied: then every module and parameter
of a unit has its copy in the memo, in whatever order the tables were visited. Annotated modules
have a `__deepcopy__` and a `__reduce_ex__` of their own for this, since torch calls nothing when it
has copied a module. No message is sent: meshes and communicators are shared, and shards are copied
where they are.

As in one process, a copy has no gradients, no step under way, and is in no scope.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.contract.contract import drop_attribute, registry, remove
from composable.contract.naming import module_name
from composable.contract.tree import REPLICATE, SHARD, states_below
from composable.engine.params.dtensors import dtensor_parameter
from composable.engine.params.param import ManagedParam, copy_attributes
from composable.engine.params.protocol import cloned
from composable.errors import AnnotationError
from composable.memory.torch_private import local_of

_KEY: Final = "composable"  # in the memo of a deepcopy, beside ids


class Copied(Protocol):
    """A unit that is copied with its modules, as far as this file looks."""

    modules: tuple[nn.Module, ...]
    params: list[ManagedParam]

    @property
    def is_sharded(self) -> bool: ...

    def refuse_copy(self) -> None: ...

    def refuse_pickling(self) -> None: ...

    def buffers_shown(self) -> list[tuple[Tensor, Tensor]]: ...

    def relate(self, unit: Any, twins: Mapping[Any, Any]) -> None: ...

    def fill(self, unit: Any, memo: dict[Any, Any], *, plain: bool) -> None: ...

    def follow_places(self, unit: Any, memo: dict[Any, Any]) -> None: ...

    def choose_rest(self) -> None: ...


C = TypeVar("C", bound=Copied)


class _Copies:
    """What one `copy.deepcopy` has copied. It may meet several annotated modules that lie apart.

    Attributes:
        twins: the copies of units.
        depth: annotated modules whose copying is under way.
        plain: the copy shares the tensors and is about to lose its annotations.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self.twins: dict[Copied, Any] = {}
        self.prepared: dict[Copied, None] = {}
        self.depth = 0
        self.plain = plain

    def prepare(self, units: Iterable[Copied], memo: dict[Any, Any]) -> None:
        """Before tables are copied: whichever form of a parameter they hold now, the copy gets the
        at-rest one.
        """
        for unit in units:
            if unit in self.prepared:
                continue
            self.prepared[unit] = None
            unit.refuse_copy()
            for cast, buffer in unit.buffers_shown():
                memo[id(cast)] = buffer if self.plain else copy.deepcopy(buffer, memo)
            for param in unit.params:
                at_rest = param.at_rest
                if isinstance(at_rest, DTensor) and id(at_rest) not in memo:
                    memo[id(at_rest.device_mesh)] = at_rest.device_mesh  # of optimizer state, too
                    memo[id(at_rest)] = _copy_of(at_rest)
                elif at_rest.grad is not None and id(at_rest) not in memo:
                    # torch copies gradients of subclasses, and fails if these have another dtype
                    gradient, at_rest.grad = at_rest.grad, None
                    try:
                        copy.deepcopy(at_rest, memo)
                    finally:
                        at_rest.grad = gradient
                if param.registered is param.compute and param.compute is not at_rest:
                    memo[id(param.compute)] = (
                        at_rest if self.plain else copy.deepcopy(at_rest, memo)
                    )

    def finish(self, memo: dict[Any, Any]) -> None:
        """After tables were copied: fill the units all of whose modules have a copy now."""
        copied = {
            unit: twin
            for unit, twin in self.twins.items()
            if unit.modules and all(id(each) in memo for each in unit.modules)
        }
        for unit, twin in copied.items():
            twin.relate(unit, copied)
        # Sharded units first: they decide how others rest.
        for unit, twin in sorted(copied.items(), key=lambda pair: not pair[0].is_sharded):
            if not twin.modules:
                twin.fill(unit, memo, plain=self.plain)
            elif not self.plain:
                twin.follow_places(unit, memo)
                twin.choose_rest()  # what is around it may have been copied later


def attach_copying(module: nn.Module) -> None:
    """Let `copy.deepcopy` and pickle call this file for `module`. They look for both methods on the
    object.
    """
    vars(module).update(__deepcopy__=partial(_copy, module), __reduce_ex__=partial(_reduce, module))


def detach_copying(module: nn.Module) -> None:
    """The inverse of `attach_copying`."""
    for name in ("__deepcopy__", "__reduce_ex__"):
        drop_attribute(module, name)


def twin_of(unit: C, twin: C, memo: dict[Any, Any]) -> C:
    """Note that `twin`, still empty, is the copy of `unit`.

    It stays empty, and its hooks do nothing, where only a part of the unit's module is copied.
    """
    copies: _Copies = memo.setdefault(_KEY, _Copies())
    noted: C = copies.twins.setdefault(unit, twin)
    return noted


def _copy(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    copies: _Copies = memo.setdefault(_KEY, _Copies())
    own = [registry(module)[verb].state for verb in (SHARD, REPLICATE) if verb in registry(module)]
    copies.prepare(own if copies.depth else states_below([module]), memo)
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
    for unit in states_below([module]):
        unit.refuse_pickling()
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    plain = copy.deepcopy(module, {**shared, _KEY: _Copies(plain=True)})  # type: ignore[dict-item]
    for below in plain.modules():
        for verb in reversed([*registry(below)]):
            if verb in registry(below) and not registry(below)[verb].copied:
                remove(below, verb)
    return operator.getitem, ([plain], 0)


def _copy_of(parameter: DTensor) -> nn.Parameter:
    """Without its gradient, as torch copies parameters; torch's copy of a `DTensor` has a copy of
    the mesh.
    """
    made = dtensor_parameter(
        cloned(local_of(parameter)), parameter.device_mesh, parameter.placements,
        parameter.shape, parameter.stride(), requires_grad=parameter.requires_grad,
    )  # fmt: skip
    assert isinstance(parameter, nn.Parameter)
    copy_attributes(parameter, made)
    return made
