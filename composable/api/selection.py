"""Which parameters and modules an annotation is about: ignored parameters, units that a policy
picks, and what they share.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Final

from torch import Tensor, nn

from composable.contract.contract import find_fqn, has_forward, module_name, require_callable
from composable.contract.tree import REPLICATE, SHARD, Managed, Place, T, walk
from composable.errors import (
    AnnotationError,
    PolicyError,
    closest,
    describe_module,
    did_you_mean,
    few,
)
from composable.policies import PolicyLike, by_all_names, select_modules

logger = logging.getLogger("composable")

# What `ignored_params` takes: one of these may stand without a list around it.
Ignored = Iterable[Any] | nn.Module | nn.Parameter | str | None


def ids_of_ignored(modules: Sequence[nn.Module], ignored: Ignored) -> dict[int, None]:
    """The ids of the parameters that `ignored` stands for: parameters, modules, FQNs and globs.

    A name or glob that no parameter has may be of buffers, as in the lists that DDP takes.

    Raises:
        AnnotationError: an FQN or glob matches nothing.
    """
    if ignored is None or (isinstance(ignored, Sequence) and not ignored):
        return {}
    if isinstance(ignored, (str, nn.Module, nn.Parameter)):
        ignored = [ignored]
    named, buffers = (
        [
            (f"{fqn}.{name}".lstrip("."), tensor)
            for module in modules
            for fqn, below in by_all_names(module)
            for name, tensor in getattr(below, table).items()
            if tensor is not None
        ]
        for table in ("_parameters", "_buffers")
    )
    result: dict[int, None] = {}
    for item in ignored:
        # Those that lie elsewhere are of another call: trainers give one set to all calls.
        if isinstance(item, nn.Parameter):
            found: list[Tensor] = [item]
        elif isinstance(item, nn.Module):
            found = list(item.parameters())
        elif isinstance(item, str):
            found = _matching(item, named) or _matching(item, buffers)
            if not found:
                names = [name for fqn, _ in (*named, *buffers) for name in _around(fqn)]
                near = closest(item.rstrip(".*"), names, limit=3)
                hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else ""
                raise AnnotationError(f"ignored_params: pattern '{item}' matched nothing{hint}")
        else:
            raise AnnotationError(
                "ignored_params takes parameters, modules, FQNs and globs, got"
                f" {type(item).__name__}"
            )
        result.update((id(p), None) for p in found)
    return result


def _matching(pattern: str, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    return [tensor for fqn, tensor in named if any(fnmatchcase(n, pattern) for n in _around(fqn))]


def _around(fqn: str) -> list[str]:
    """The FQNs of the modules around a parameter or buffer, and its own."""
    return list(accumulate(fqn.split("."), "{}.{}".format))


# --- policies -----------------------------------------------------------------------------------


def select_callable(
    verb: str, policy: PolicyLike, root: nn.Module, allowed: Collection[str], **so: str
) -> dict[nn.Module, dict[str, Any]]:
    """What `policy` picks below `root`, without containers that have no forward, which are logged.

    Args:
        allowed: the keywords that it may override.
        so: for `require_callable`, if it picks nothing but such containers.
    """
    picked = select_modules(policy, root)
    found = {module: overrides for module, overrides in picked.items() if has_forward(module)}
    if not found:
        require_callable(next(iter(picked)), **so)
    passed = [describe_module(each, find_fqn(each)) for each in picked if each not in found]
    if passed:
        said = "%s: the policy picks %s; containers without a forward are passed over"
        logger.warning(said, verb, few(passed))
    for module, overrides in found.items():
        if unknown := [keyword for keyword in overrides if keyword not in allowed]:
            near = did_you_mean(unknown[0], allowed)
            raise PolicyError(
                f"{verb}: the policy overrides '{unknown[0]}' for {module_name(module)}"
                f"{f'{near} A' if near else '; a'} policy may override: {', '.join(allowed)}"
            )
    return found


def picked_units(
    verb: str, modules: Sequence[nn.Module], policy: PolicyLike | None, allowed: Sequence[str]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules below an annotated one that become units of their own, in order, with their
    overrides.

    Modules that are annotated already, and those inside them, are left as they are.
    """
    if policy is None:
        return {}
    if len(modules) > 1:
        raise AnnotationError(
            f"{verb}: a policy picks units below one module; it cannot be given with a list"
        )
    picked = select_callable(verb, policy, modules[0], allowed)
    reachable = {id(m) for _, m in walk(modules[0], stop=(SHARD, REPLICATE))} - {id(modules[0])}
    return {
        module: overrides
        for module, overrides in picked.items()
        if id(module) in reachable and not isinstance(module, _READ_BY_PARENT)
    }


# The class of `nn.MultiheadAttention.out_proj`, whose parent reads its parameters and never calls
# it.
_READ_BY_PARENT: Final = nn.modules.linear.NonDynamicallyQuantizableLinear


def refuse_read_by_parent(module: nn.Module) -> None:
    if isinstance(module, _READ_BY_PARENT):
        raise AnnotationError(
            "fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without being"
            " called, so nothing would gather its parameters; annotate the MultiheadAttention"
            " instead"
        )


# --- units --------------------------------------------------------------------------------------


def by_unit(
    modules: Sequence[nn.Module], picked: Sequence[nn.Module], everything: Sequence[Managed[T]]
) -> list[list[Managed[T]]]:
    """The parameters, or buffers, of the unit `modules`, then those of each unit in `picked`, with
    FQNs relative to their unit.

    A parameter that is tied across units goes to the innermost unit that contains all its places:
    it is unsharded whenever one of them computes.
    """
    if not picked:
        return [list(everything)]
    chains = enclosing_units(modules[0], picked)
    names = {id(m): name for name, m in modules[0].named_modules()}
    shares: list[list[Managed[T]]] = [[] for _ in range(len(picked) + 1)]
    for managed in everything:
        common = chains[id(managed.places[0].module)]
        for place in managed.places[1:]:
            common = tuple(unit for unit in common if unit in chains[id(place.module)])
        owner = common[-1] if common else 0
        prefix = names[id(picked[owner - 1])] + "." if owner else ""
        places = tuple(
            Place(place.module, place.name, place.fqn.removeprefix(prefix))
            for place in managed.places
        )
        shares[owner].append(Managed(managed.tensor, places))
    return shares


def enclosing_units(root: nn.Module, picked: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """For every module below `root`, by its id: the picked units around it, outermost first,
    counted from 1.
    """
    number = {id(module): index + 1 for index, module in enumerate(picked)}
    chains: dict[int, tuple[int, ...]] = {}

    def visit(module: nn.Module, chain: tuple[int, ...]) -> None:
        if id(module) in number:
            chain = (*chain, number[id(module)])
        # reached on another path: only units on all paths enclose it and what is below it
        if id(module) in chains:
            known = chains[id(module)]
            chain = tuple(unit for unit in known if unit in chain)
            if chain == known:
                return
        chains[id(module)] = chain
        for child in module.children():
            visit(child, chain)

    visit(root, ())
    return chains
