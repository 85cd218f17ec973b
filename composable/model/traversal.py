"""Who owns which parameter, and in which order annotated modules come; reads the tree and the registry, changes neither.

Note [Order]
Everything is in left-to-right depth-first order, the order of `.modules()`. It is the same on every rank, and the same
whether modules were annotated one by one or by a policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from torch import nn

from composable.model.contract import registry

SHARD: Final = "fully_shard"
REPLICATE: Final = "replicate"


@dataclass(frozen=True, slots=True)
class NamedPlace:
    """A place in the module tree where a parameter is registered, and its FQN."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """A parameter that an annotation takes charge of, with every place where it is registered (tied weights: several)."""

    parameter: nn.Parameter
    places: tuple[NamedPlace, ...]

    @property
    def fqn(self) -> str:
        return self.places[0].fqn


def walk(root: nn.Module, prefix: str = "", *, stop: Collection[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """FQN and module for `root` and everything below it, each module once, in the order of `.modules()`.

    Args:
        stop: annotations whose modules, other than `root`, are not entered.
    """
    seen: dict[int, None] = {}

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        if module is not root and any(verb in registry(module) for verb in stop):
            return
        seen[id(module)] = None
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{name}.{child_name}" if name else child_name)

    yield from visit(root, prefix)


def managed_parameters(modules: Sequence[tuple[str, nn.Module]], *, ignored: Collection[int] = ()) -> list[ManagedParameter]:
    """The parameters of `modules` (prefix, module) that no annotation below them manages.

    Args:
        ignored: ids of parameters to leave alone.
    """
    found: dict[int, tuple[nn.Parameter, list[NamedPlace]]] = {}
    for prefix, root in modules:
        for name, module in walk(root, prefix, stop=(SHARD, REPLICATE)):
            for parameter_name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in ignored:
                    continue
                fqn = f"{name}.{parameter_name}" if name else parameter_name
                found.setdefault(id(parameter), (parameter, []))[1].append(NamedPlace(module, parameter_name, fqn))
    return [ManagedParameter(parameter, tuple(places)) for parameter, places in found.values()]


def get_fully_sharded_modules(root: nn.Module) -> list[nn.Module]:
    """The modules below and including `root` that own a handle, in order; of modules annotated as one unit, the first.

    Subtrees under a `replicate`d module are left alone, whatever is inside them; the sole exception is `root` itself.
    """
    return [module for module, _ in _units(root)]


def get_states(root: nn.Module) -> list[Any]:
    """The states of `get_fully_sharded_modules(root)`, in the same order."""
    return [state for _, state in _units(root)]


def _units(root: nn.Module) -> list[tuple[nn.Module, Any]]:
    units: dict[int, tuple[nn.Module, Any]] = {}
    for _, module in walk(root, stop=(REPLICATE,)):
        annotations = registry(module)
        if SHARD in annotations:
            state = annotations[SHARD].state
            units.setdefault(id(state), (module, state))
    return list(units.values())


def get_replicated_states(root: nn.Module) -> list[Any]:
    """The states of all `replicate`d modules below and including `root`, in order, whatever is around them."""
    return _all_states(root, REPLICATE)


def get_all_sharded_states(root: nn.Module) -> list[Any]:
    """The states of all fully sharded modules below and including `root`, also of those inside replicated ones."""
    return _all_states(root, SHARD)


def _all_states(root: nn.Module, verb: str) -> list[Any]:
    found = [registry(module)[verb].state for module in root.modules() if verb in registry(module)]
    return list({id(state): state for state in found}.values())


def get_handles(root: nn.Module) -> list[Any]:
    """The handles of the units below and including `root`, in order; a unit without parameters has one too."""
    return [state.handle for state in get_states(root)]


def get_root_states(root: nn.Module) -> list[Any]:
    """The states of the topmost fully sharded modules: `root`'s own, or those of the trees below a root without one."""
    tops: dict[int, Any] = {}

    def visit(module: nn.Module) -> None:
        annotations = registry(module)
        if SHARD in annotations:
            state = annotations[SHARD].state
            tops.setdefault(id(state), state)
        elif REPLICATE not in annotations or module is root:
            for child in module.children():
                visit(child)

    visit(root)
    return list(tops.values())


def names_below(root: nn.Module) -> Mapping[int, str]:
    """FQN of every module below `root`, by the module's id."""
    return {id(module): name for name, module in root.named_modules()}


class TreeWatch:
    """Tells quickly whether modules came, went or were exchanged below `root`, the number of parameters changed, or `replicate`
    was removed from a module."""

    def __init__(self, root: nn.Module) -> None:
        modules = [module for _, module in walk(root, stop=(REPLICATE,))]
        below = {id(child): child for module in modules for child in module.children()}
        self._replicated = [child for child in below.values() if REPLICATE in registry(child)]
        # Live views, flattened and compared in C: it is asked before every forward of a root.
        self._children = [module._modules.values() for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._before = self._now()

    def _now(self) -> tuple[list[nn.Module | None], int]:
        return list(chain.from_iterable(self._children)), sum(map(len, self._parameters))

    def changed(self) -> bool:
        return self._before != self._now() or not all(REPLICATE in registry(module) for module in self._replicated)


def registered_parameters(root: nn.Module) -> Iterator[tuple[NamedPlace, nn.Parameter]]:
    """Every registration of a parameter in `root` and below, but for subtrees under a `replicate`d module."""
    for prefix, module in walk(root, stop=(REPLICATE,)):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield NamedPlace(module, name, f"{prefix}.{name}" if prefix else name), parameter
