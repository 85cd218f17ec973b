"""`fully_shard` with the arguments and defaults of torch's, and the functions next to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from composable.api import data_parallel
from composable.api.arguments import Placement
from composable.api.explicit_calls import register_forward_method
from composable.api.mesh import Mesh, MeshDims, MeshPlan
from composable.checked import checked
from composable.contract.contract import Target, modules_of, registry
from composable.contract.tree import SHARD, annotation_of
from composable.engine.step.unit import Unit
from composable.errors import NotAnnotatedError
from composable.fsdp2.module import AUTOMATIC, FSDPModule, State, give_methods
from composable.torch_private import FSDP2Module


def fully_shard(
    module: Target,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: MeshDims | None = None,
) -> Target:
    """Shard a module as `composable.fully_shard` does, called as torch's `fully_shard` is.

    If defaults differ, this function has torch's. It does not compare weights across ranks: each
    rank keeps its part of its own weights. Without a mesh, all ranks train on the accelerator, if
    there is one. If torchrun started the process and there is no process group, this function
    creates it. The class of the module does not change; see `FSDPModule`. After the forward of the
    root, sharded parameters are registered, while torch leaves plain ones. You may annotate a
    module around modules that have already run; in torch, the next forward raises an error.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a mesh of one dimension, or of two for hybrid sharding. With two, the second dimension
            shards.
        reshard_after_forward: None reshards all units but the outermost one. True, False and a
            number are as for `composable.fully_shard`.
        shard_placement_fn: `fn(parameter) -> Shard | ShardPlacementResult | None`. If you pass
            None, or the function returns None, the parameter gets `Shard(0)` as in torch, even if
            this leaves ranks empty.
        mp_policy: torch's policy of dtypes.
        offload_policy: torch's policy of offload.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: which dimensions of `mesh` are data parallel, as for `composable.fully_shard`.
            If it names no dimension to shard over, this function calls `composable.replicate`.
            Parameters may also be plain tensors.

    Returns:
        `module`.

    Raises:
        AnnotationError: as `composable.fully_shard`.
        MeshError: `dp_mesh_dims` names no dimension of the mesh.

    Example:
        >>> for block in model.blocks: fully_shard(block)
        >>> fully_shard(model)
        >>> model.set_requires_gradient_sync(False)

    After `torch.distributed.fsdp.fully_shard`.
    """
    over: Mesh = _default_mesh() if mesh is None else mesh
    options: dict[str, Any] = {
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "dp_mesh_dims": dp_mesh_dims,
        "sync_module_states": "off",
    }
    modules = modules_of("fully_shard", module)
    if getattr(dp_mesh_dims, "replicate", None) and not getattr(dp_mesh_dims, "shard", None):
        data_parallel.replicate(module, mesh=over, broadcast_buffers=False, **options)
        for each in modules:
            give_methods(each)
        return module
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2 and dp_mesh_dims is None:
        over = MeshPlan(mesh, shard_dim=1)  # whatever the names of its dimensions say
    data_parallel.fully_shard(
        module,
        mesh=over,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=_along_rows if shard_placement_fn is None else shard_placement_fn,
        **options,
    )
    unit: Unit = registry(modules[0])[SHARD].state
    for each in modules:
        give_methods(each)
    inner = [other for other in unit.relations.below if other in AUTOMATIC]
    for other in inner:
        other.set_reshard_after_forward(True)
    # last: the units have left the tree then
    registry(modules[0])[SHARD].undo_by(partial(_may_be_outermost, inner), last=True)
    if reshard_after_forward is None:
        AUTOMATIC.add(unit)
    return module


def _along_rows(parameter: nn.Parameter) -> None:
    """FSDP2's default: dimension 0 of each parameter is sharded."""


def _may_be_outermost(units: list[Unit]) -> None:
    """Let units whose outer unit was removed keep their parameters until backward again."""
    for unit in units:
        if (
            unit.modules
            and unit in AUTOMATIC
            and {*unit.relations.around} <= {unit.relations.number}
        ):
            unit.set_reshard_after_forward(None)


def _default_mesh() -> DeviceMesh | None:
    """Return all ranks, on the accelerator if there is one, as torch does.

    None stands for all ranks on the host.
    """
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized() or accelerator is None:
        return None
    return init_device_mesh(accelerator.type, (dist.get_world_size(),))


_TORCHS: Final[Any] = fsdp.fully_shard  # whatever torch.distributed.fsdp holds later on


def _state(module: nn.Module) -> Any:
    """Return what torch's pipelines read of FSDP2's state; None if `module` is not annotated.

    Of modules that torch's own `fully_shard` has annotated, the state is torch's.
    """
    if (annotation := annotation_of(module)) is not None:
        return State(annotation.state)
    # torch's function leaves an attribute on modules that have no state
    return _TORCHS.state(module) if isinstance(module, FSDP2Module) else None


fully_shard.state = _state  # type: ignore[attr-defined]


@checked
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than forward run with gathered parameters, as forward does.

    On a module that is not annotated it does nothing, like torch's function.

    Args:
        module: any module.
        method_name: e.g. "generate".

    Raises:
        NotAnnotatedError: the module has no such method.

    Example:
        >>> register_fsdp_forward_method(model, "generate")

    After `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    if isinstance(module, FSDPModule):
        register_forward_method(module, method_name)


@checked
def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Have no effect: all models of a process share streams.

    Args:
        modules: annotated ones.

    Raises:
        NotAnnotatedError: one of them is not annotated.

    Example:
        >>> share_comm_ctx([first_stage, second_stage])

    After `torch.distributed.fsdp.share_comm_ctx`.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise NotAnnotatedError(
                f"share_comm_ctx takes modules annotated by fully_shard, got a"
                f" {type(module).__name__} that is not"
            )
