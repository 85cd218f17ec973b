"""Parameters that modules about to be sharded share with replicated ones inside, which keep them; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.model.traversal import ManagedParameter, get_replicated_states, managed_parameters
from composable.runtime.ownership import holder_of
from composable.runtime.replicated_unit import ReplicatedUnit


def tied_to_replicated(modules: Sequence[nn.Module], mesh: DeviceMesh | None) -> list[tuple[ReplicatedUnit, ManagedParameter]]:
    """The parameters in `modules` that no annotation below them manages but by a tie, and the replicated unit that does.

    Units that are not inside `modules` do not count, nor parameters that cannot rest as DTensors on `mesh`.
    """
    inside = [state for module in modules for state in get_replicated_states(module)]
    if not inside:
        return []
    found = [(holder_of(managed.parameter), managed) for managed in managed_parameters([("", module) for module in modules])]
    return [
        (holder, managed)
        for holder, managed in found
        if isinstance(holder, ReplicatedUnit)
        and any(holder is unit for unit in inside)
        and (mesh is None or holder.can_rest(managed.parameter, mesh))
    ]
