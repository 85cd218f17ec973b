"""Traversal of annotated modules, for users."""

from __future__ import annotations

from typing import Any

from torch import nn

from composable.checked import checked
from composable.contract.contract import records_of
from composable.contract.tree import REPLICATE, SHARD, walk

__all__ = ["get_fully_sharded_modules", "get_handles", "get_root_states", "get_states"]


@checked
def get_fully_sharded_modules(root: nn.Module) -> list[nn.Module]:
    """Return the fully sharded modules in `root`, in order.

    For modules annotated as one unit, return the first of them. `replicate`d subtrees are left out
    with everything in them, except that `root` itself may be replicated.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> get_fully_sharded_modules(model)[0] is model
        True
    """
    return [module for module, _ in _sharded_units(root)]


@checked
def get_states(root: nn.Module) -> list[Any]:
    """Return the `Unit` of each of `get_fully_sharded_modules(root)`.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> len(get_states(model)) == len(get_fully_sharded_modules(model))
        True
    """
    return [state for _, state in _sharded_units(root)]


@checked
def get_handles(root: nn.Module) -> list[Any]:
    """Return the param groups of each of `get_states(root)`.

    There is one entry per unit, also for a unit without parameters.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> for groups in get_handles(model):
        ...     print([len(group.params) for group in groups])
    """
    return [state.groups for state in get_states(root)]


@checked
def get_root_states(root: nn.Module) -> list[Any]:
    """Return the units of the topmost fully sharded modules in `root`.

    These are its own, or those of the subtrees if it has none.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> get_root_states(model) == get_states(model)[:1]
        True
    """
    units = get_states(root)
    annotated = [module for unit in units for module in unit.modules]
    inside = {below for top in annotated for below in top.modules() if below is not top}
    return [unit for unit in units if unit.modules[0] not in inside]


def _sharded_units(root: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the first module and the state of each sharded unit in `root`."""
    units: dict[int, tuple[nn.Module, Any]] = {}
    for _, module in walk(root, stop=(REPLICATE,)):
        annotation = records_of(module).get(SHARD)
        if annotation is not None:
            units.setdefault(id(annotation.state), (module, annotation.state))
    return list(units.values())
