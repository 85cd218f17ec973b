"""Which parameters a verb is about: ignored ones, those of each unit, tied ones. Reads the tree; shards nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from composable.api.ties import enclosing_units, innermost_of_all, refuse_tied_outside
from composable.errors import AnnotationError, PolicyError, closest
from composable.model.contract import module_name
from composable.model.traversal import ManagedParameter, managed_parameters


def ids_of_ignored(modules: Sequence[nn.Module], ignored: Iterable[Any]) -> dict[int, None]:
    """The ids of the parameters that `ignored` stands for: parameters, modules, FQNs and globs.

    Raises:
        AnnotationError: an item matches no parameter, or is of another type.
    """
    if isinstance(ignored, (str, nn.Module, nn.Parameter)):
        ignored = [ignored]
    named = [(fqn, p) for module in modules for fqn, p in module.named_parameters(remove_duplicate=False)]
    modules_by_name = [(fqn, m) for module in modules for fqn, m in module.named_modules()]
    known = {id(p): None for _, p in named}
    result: dict[int, None] = {}
    for item in ignored:
        if isinstance(item, nn.Parameter):
            if id(item) not in known:
                raise AnnotationError(f"ignored_params: a parameter of shape {tuple(item.shape)} is not in the module")
            found = [item]
        elif isinstance(item, nn.Module):
            found = list(item.parameters())
            if found and not any(id(p) in known for p in found):
                raise AnnotationError(f"ignored_params: a {type(item).__name__} is not inside the module")
        elif isinstance(item, str):
            found = [p for fqn, p in named if fnmatchcase(fqn, item)]
            found += [p for fqn, m in modules_by_name if fqn and fnmatchcase(fqn, item) for p in m.parameters()]
            if not found:
                names = [fqn for fqn, _ in named] + [fqn for fqn, _ in modules_by_name if fqn]
                near = difflib.get_close_matches(item.rstrip(".*"), names, n=3)
                hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else ""
                raise AnnotationError(f"ignored_params: pattern '{item}' matched nothing{hint}")
        else:
            raise AnnotationError(f"ignored_params takes parameters, modules, FQNs and globs, got {type(item).__name__}")
        result.update((id(p), None) for p in found)
    return result


def check_keywords(verb: str, picked: Mapping[nn.Module, Mapping[str, Any]], allowed: Sequence[str]) -> None:
    """Refuse overrides that a policy may not set."""
    for module, overrides in picked.items():
        for keyword in overrides:
            if keyword not in allowed:
                near = closest(keyword, allowed)
                hint = f"; did you mean '{near[0]}'? A" if near else "; a"
                raise PolicyError(
                    f"{verb}: the policy overrides '{keyword}' for {module_name(module)}{hint} policy may override: "
                    f"{', '.join(allowed)}"
                )


def parameters_by_unit(
    modules: Sequence[nn.Module], picked: Sequence[nn.Module], ignored: Mapping[int, None]
) -> list[list[ManagedParameter]]:
    """The parameters of the unit `modules`, then those of each unit in `picked`, in order, with FQNs below their unit.

    A parameter tied across units goes to the innermost unit that holds all its places: there it is whole whenever one of
    them computes.

    Raises:
        TiedParametersError: a place of the parameter is in a unit that is sharded already.
    """
    prefixes = _prefixes(modules)
    everything = managed_parameters(list(zip(prefixes, modules, strict=True)), ignored=ignored)
    refuse_tied_outside(modules, everything)
    if not picked:
        return [everything]
    chains = enclosing_units(modules[0], picked)
    shares: list[list[ManagedParameter]] = [[] for _ in range(len(picked) + 1)]
    names = {id(m): name for name, m in modules[0].named_modules()}
    for managed in everything:
        owner = innermost_of_all(managed, chains)
        prefix = names[id(picked[owner - 1])] + "." if owner else ""
        shares[owner].append(_below(managed, prefix))
    return shares


def _prefixes(modules: Sequence[nn.Module]) -> list[str]:
    """Modules annotated together need names apart; one module needs none."""
    return [""] if len(modules) == 1 else [str(index) for index in range(len(modules))]


def _below(managed: ManagedParameter, prefix: str) -> ManagedParameter:
    places = tuple(type(place)(place.module, place.name, place.fqn.removeprefix(prefix)) for place in managed.places)
    return ManagedParameter(managed.parameter, places)
