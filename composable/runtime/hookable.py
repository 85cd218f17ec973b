"""Units as who registers communication hooks sees them, of either verb; knows neither hooks nor what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch.distributed as dist
from torch import nn

from composable.runtime.accumulation import Accumulation
from composable.runtime.averaging import Averaging
from composable.runtime.gradients import UnitGradients, reduce_by
from composable.runtime.hooked_stages import StageHooks
from composable.runtime.hooked_units import ALL_REDUCE, REDUCE_SCATTER, HookedUnits, UnitHook, refuse_sparse
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.sharded_unit import ShardedUnit

STAGES: Final = (REDUCE_SCATTER, ALL_REDUCE)


class Replicas:
    """A replicated unit."""

    def __init__(self, unit: Averaging) -> None:
        self._unit = unit
        self.name = unit.name
        self.modules: Sequence[nn.Module] = unit.parameters.modules

    @property
    def mesh_info(self) -> MeshInfo:
        assert self._unit.mesh_info is not None
        return self._unit.mesh_info

    @property
    def accumulation(self) -> Accumulation:
        return self._unit.reducer.local.accumulation

    @property
    def is_there(self) -> bool:
        """Whether it was not removed."""
        return self._unit.current is not None

    @property
    def waits_for_backward(self) -> bool:
        return any(forwards.left for forwards in self._unit.forwards)

    @property
    def stages(self) -> tuple[str, ...]:
        """In which its gradients are reduced."""
        return (ALL_REDUCE,)

    def group_of(self, stage: str) -> dist.ProcessGroup | None:
        """The ranks that a stage is made over; None for one alone."""
        return _group_of_all(self.mesh_info)

    def hook_of(self, stage: str) -> UnitHook | None:
        return self._unit.hook

    def hooked_by(self, hooked: HookedUnits, prefix: str) -> UnitHook:
        """Its part of a registration.

        Args:
            prefix: of the names of its parameters.
        """
        return hooked.add_replicas(self._unit, prefix)

    def put(self, hook: UnitHook | None, stage: str) -> None:
        """From the next backward on."""
        self._unit.hook = hook
        self._unit.renew(self._unit.parameters.registered)

    def refuse_gradients(self) -> None:
        """Raise if hooks could not take them."""
        parameters = self._unit.reducer.parameters
        refuse_sparse(self.name, [parameters.names[i] for i in parameters.sparse])


class Shards:
    """A fully sharded unit."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        self.name = unit.name
        self.modules: Sequence[nn.Module] = unit.modules
        self._gradients: UnitGradients = unit.handle.gradients

    @property
    def mesh_info(self) -> MeshInfo:
        return self._unit.handle.mesh_info

    @property
    def accumulation(self) -> Accumulation:
        return self._gradients.accumulation

    @property
    def is_there(self) -> bool:
        """Whether it was not removed."""
        return self._unit.spec is not None

    @property
    def waits_for_backward(self) -> bool:
        return False  # nothing was made in forward that a hook would change

    @property
    def stages(self) -> tuple[str, ...]:
        """In which its gradients are reduced: two on a hybrid mesh."""
        mesh = self.mesh_info.mesh
        return (REDUCE_SCATTER,) if mesh is None or mesh.ndim == 1 else (REDUCE_SCATTER, ALL_REDUCE)

    def group_of(self, stage: str) -> dist.ProcessGroup | None:
        """The ranks that a stage is made over; None for one alone."""
        mesh_info = self.mesh_info
        mesh = mesh_info.mesh
        if mesh is None or mesh.ndim == 1:
            return _group_of_all(mesh_info)
        dim = mesh_info.shard_dim if stage == REDUCE_SCATTER else 1 - mesh_info.shard_dim
        return None if mesh.size(dim) == 1 else mesh.get_group(dim)

    def hook_of(self, stage: str) -> UnitHook | None:
        hooks = self._gradients.comm_hooks
        return None if hooks is None else hooks.at(stage)

    def hooked_by(self, hooked: HookedUnits, prefix: str) -> UnitHook:
        """Its part of a registration, as `Replicas.hooked_by`."""
        return hooked.add_shards(self._gradients, prefix)

    def put(self, hook: UnitHook | None, stage: str) -> None:
        """From the next backward on."""
        root = self._unit.root
        if root is not None and root.backward.is_open:
            root.abort("its backward did not finish")
        reduce_by(self._gradients, (self._gradients.comm_hooks or StageHooks()).changed(stage, hook))


def _group_of_all(mesh_info: MeshInfo) -> dist.ProcessGroup | None:
    return None if mesh_info.group is None or mesh_info.all.size == 1 else mesh_info.group()
