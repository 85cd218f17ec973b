"""`offload_to_host`: a model and its optimizers leave the device between two phases of training."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable.api.explicit_calls import units_in
from composable.checked import checked
from composable.compilation import unwrapped
from composable.contract.values import map_tensors
from composable.engine.step.unit import Need, Unit, written
from composable.errors import AnnotationError, PhaseError
from composable.features.groups import refuse_extended
from composable.memory.offload import HostHome, free_cached_memory, wait_for_traffic
from composable.memory.streams import has_streams
from composable.state.whole import require_at_rest
from composable.torch_private import can_take_data, dtensor_like, local_of


class HostOffload:
    """What `offload_to_host` returns: a handle of a model on the host, and a context manager.

    Args:
        module: whose buffers rest there.
        units: whose shards do.
        optimizers: whose state does.

    Example:
        >>> handle = offload_to_host(model, optimizer)
        >>> rollouts = engine.generate(prompts)
        >>> handle.restore()
    """

    def __init__(
        self, module: nn.Module, units: list[Unit], optimizers: tuple[Optimizer, ...]
    ) -> None:
        self._model, self._optimizers = module, optimizers
        self._units = units
        self._shown = [unit for unit in units if Need.EXPLICIT in unit.kept_by]
        # by the ids of host tensors; it holds them, so that these ids stay theirs
        self._hosted: dict[int, tuple[Tensor, torch.device]] = {}

    def restore(self) -> None:
        """Bring everything back to the device. All ranks call it.

        The next step is the same as for a model that never left. You may call it again, also after
        it raised, for example because the device was out of memory. It then continues with what is
        still on the host.
        """
        if self._units:
            self._move(self._back)  # first: until all is here, some unit refuses to compute
        for unit in self._units:
            unit.restore()
        units, self._units, self._hosted = self._units, [], {}
        for unit in self._shown if units else ():
            unit.keep(Need.EXPLICIT)
        written(units)

    def __enter__(self) -> HostOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _offload(self) -> None:
        """Copy everything to the host and free it on the device."""
        devices = dict.fromkeys(unit.mesh_info.device for unit in self._units)
        homes = {
            device: HostHome(device, pin_memory=True) for device in devices if has_streams(device)
        }

        def to_host(tensor: Tensor) -> Tensor:
            home = homes.get(tensor.device)
            if home is None:
                return tensor
            host = home.take_one(tensor.detach())
            self._hosted[id(host)] = host, tensor.device
            return host

        for unit in self._units:
            unit.give_up_step()
            unit.forget_root()  # it holds shards
            unit.hide()
            unit.reshard()
            # otherwise the shards are on the host already
            leaves = unit.mesh_info.device in homes and not unit.spec.grouping.on_host
            unit.offload(homes[unit.mesh_info.device].take_one if leaves else None)
        self._move(to_host)
        wait_for_traffic()
        gc.collect()  # the roots that are forgotten form cycles
        for device in homes:
            free_cached_memory(device)

    def _back(self, tensor: Tensor) -> Tensor:
        known = self._hosted.get(id(tensor))
        return tensor if known is None else tensor.to(known[1])

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move buffers, and the states of optimizers, or nothing if a copy raises.

        Shared tensors stay shared.
        """
        moved: dict[int, tuple[Tensor, Tensor]] = {}  # from, which keeps its id meanwhile, and to

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor, move(tensor)
            return moved[id(tensor)][1]

        def any_kind(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return once(tensor)
            local = local_of(tensor)
            there = once(local)
            return tensor if there is local else dtensor_like(there, tensor)

        tables: list[dict[Any, Any]] = [module._buffers for module in self._model.modules()]
        for optimizer in self._optimizers:
            tables += optimizer.state.values()
        changes = [
            (table, key, map_tensors(value, any_kind))
            for table in tables
            for key, value in table.items()
        ]
        for table, key, value in changes:
            table[key] = value


@checked
@torch.no_grad()
def offload_to_host(module: nn.Module, *optimizers: Optimizer) -> HostOffload:
    """Let a model leave the device between two phases of training, for inference on that device.

    Shards, replicated parameters, reduced gradients, buffers and the optimizers' states go to
    pinned host memory. Device memory is freed, including the cache of torch's allocator. All ranks
    call this between two steps, and all of them restore the model. Until then, forwards, optimizer
    steps and the functions of this package raise an error for the model. You can read and save its
    parameters as tensors on the host. On ranks that compute on the host, nothing is copied.
    Parameters that no unit manages (`ignored_params`), states of communication hooks, and other
    objects that hold device tensors stay on the device.

    Args:
        module: an annotated module, or one that contains some.
        optimizers: the optimizers of the model.

    Returns:
        A handle whose `restore()` brings everything back. As a context manager, it does so at the
        end of its body. The next step has the same bits as for a model that never left. Only the
        buckets of `replicate` without shards are ordered again.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward, a backward or `summon_full_params`; gradients are
            accumulated and not reduced; or the model is already on the host.
        AnnotationError: replicated parameters are on a device whose tensors torch cannot move in
            place.

    Example:
        >>> with offload_to_host(model, optimizer):
        ...     rollouts = engine.generate(prompts)
        >>> handle = offload_to_host(model, optimizer)
        >>> handle.restore()

    verl, prime-rl and AReaL call this "sleep" and "wake".
    """
    module = unwrapped(module)
    units = units_in("offload_to_host", module)
    for unit in units:
        _refuse_offload(unit)
    require_at_rest("offload_to_host", units)
    offload = HostOffload(module, units, optimizers)
    try:
        offload._offload()
    except BaseException:
        wait_for_traffic()  # `restore` reads what is on its way to the host
        offload.restore()
        raise
    return offload


def _refuse_offload(unit: Unit) -> None:
    """Raise where a unit may not leave the device."""
    refuse_extended("offload_to_host", unit)
    if unit.shown_by or unit.gradients.has_unreduced:
        what = (
            f"inside of {unit.shown_by}"
            if unit.shown_by
            else "with accumulated gradients; call reduce_gradients(model) first, or zero_grad()"
        )
        raise PhaseError(
            f"offload_to_host was called on unit '{unit.name}' {what}. Call it between two steps"
        )
    if unit.is_sharded or unit.mesh_info.device.type == "cpu":
        return
    for param in unit.params:
        own = param.own
        if own is not None and not can_take_data(own, torch.empty(0, device="cpu")):
            raise AnnotationError(
                f"offload_to_host: parameter '{param.fqn}' of unit '{unit.name}' is replicated"
                f" on {own.device}, whose tensors torch cannot move in place. Shard it, or"
                " leave the model where it is"
            )
