"""Parameters that several units share: which of them one belongs to, and which ties are refused; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.errors import TiedParametersError
from composable.model.traversal import ManagedParameter, get_replicated_states, get_states, managed_parameters, walk
from composable.runtime.ownership import holder_of
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.shown_parameters import ShownParameters


def innermost_of_all(managed: ManagedParameter, chains: Mapping[int, tuple[int, ...]]) -> int:
    """The innermost unit that holds all places of a parameter, by its number; 0 if only the root does.

    Args:
        chains: what `enclosing_units` returned.
    """
    common = chains[id(managed.places[0].module)]
    for place in managed.places[1:]:
        other = chains[id(place.module)]
        common = tuple(unit for unit in common if unit in other)
    return common[-1] if common else 0


def enclosing_units(root: nn.Module, picked: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """For every module below `root`: the picked units around it, outermost first, counted from 1."""
    number = {id(module): index + 1 for index, module in enumerate(picked)}
    chains: dict[int, tuple[int, ...]] = {}

    def visit(module: nn.Module, chain: tuple[int, ...]) -> None:
        if id(module) in number:
            chain = (*chain, number[id(module)])
        if id(module) in chains:  # it is in several places: units that hold all of them count, for what is below it, too
            known = chains[id(module)]
            chain = tuple(unit for unit in known if unit in chain)
            if chain == known:
                return
        chains[id(module)] = chain
        for child in module.children():
            visit(child, chain)

    visit(root, ())
    return chains


def refuse_tied_outside(modules: Sequence[nn.Module], everything: Sequence[ManagedParameter]) -> None:
    """A plain parameter whose twin has been sharded with a unit below would silently stop being tied."""
    taken: dict[int, str] = {}
    for module in modules:
        for state in get_states(module):
            for fqn, original in state.originals.named(state.params):
                name = next((n for n, m in walk(module) if m is state.modules[0]), "")
                taken[id(original)] = f"{name}.{fqn}" if name else fqn
    for managed in everything:
        if id(managed.parameter) in taken:
            raise TiedParametersError(
                f"parameters '{taken[id(managed.parameter)]}' and '{managed.fqn}' are tied, but the first was sharded "
                "as part of another unit already. Annotate both modules as one unit: fully_shard([a, b]), or name the "
                "units in policy=, which keeps tied parameters together"
            )


def tied_to_replicated(modules: Sequence[nn.Module], mesh: DeviceMesh | None) -> list[tuple[ShownParameters, ManagedParameter]]:
    """The parameters in `modules` that no annotation below them manages but by a tie, and what the unit that does shows.

    Units that are not inside `modules` do not count, nor parameters that cannot rest as DTensors on `mesh`.
    """
    inside: list[ReplicatedUnit] = [state for module in modules for state in get_replicated_states(module)]
    if not inside:
        return []
    found = [(holder_of(managed.parameter), managed) for managed in managed_parameters([("", module) for module in modules])]
    return [
        (unit.shown, managed)
        for holder, managed in found
        for unit in inside
        if unit.averaging is holder and (mesh is None or unit.shown.can_rest(managed.parameter, mesh))
    ]
