"""Accumulation of gradients without communication: the scope `no_sync`, and `reduce_gradients`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal

import torch
from torch import nn

from composable.api.scopes import units_in
from composable.checked import checked
from composable.compilation import untraced
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.step.observer import Observer, notify
from composable.engine.step.root import end_interrupted, land_held, launch_held
from composable.errors import PhaseError
from composable.torch_private import in_backward

Level = Literal["all", "replicate"]

# for sharded units; replicated ones always hold
_LEVELS: Final[dict[Level, SyncMode]] = {"all": SyncMode.HOLD, "replicate": SyncMode.HOLD_SHARDS}


@checked
@contextmanager
def no_sync(module: nn.Module, *, enabled: bool = True, level: Level = "all") -> Iterator[None]:
    """Let backwards inside the scope accumulate gradients on each rank.

    The first backward outside of the scope reduces the sum, so the gradients of several
    micro-batches are communicated once. Backward must run inside the scope; forward may run inside
    the scope or before it. All ranks open the scope around the same backwards. If scopes nest, the
    innermost scope that covers a unit decides, so backward reduces in a scope with `enabled=False`
    inside another. An exception that leaves the scope ends it.

    Until they are reduced, gradients are whole on every rank. The `grad` of a sharded parameter is
    a `DTensor` with a `Partial` placement; the `grad` of a replicated parameter is this rank's own.
    `zero_grad` clears both. Optimizers and `clip_grad_norm_` raise an error for them. If only
    earlier micro-batches used a parameter, on any rank, its gradient is reduced with the others.

    A forward or backward that raises drops the accumulated gradients, because some of them may be
    incomplete. One rank without a process group accumulates gradients as usual.

    Args:
        module: an annotated module, or one that contains some. Other units are not affected.
        enabled: False reduces in every backward, as without the scope.
        level: "all" reduces nothing. "replicate" is for hybrid sharding: every backward
            reduce-scatters gradients, and only the all-reduce over the replicas waits.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        ArgumentError: there is no such level.

    Example:
        >>> for number, batch in enumerate(batches, start=1):
        ...     with no_sync(model, enabled=number % 4 != 0):
        ...         (loss_of(model, batch) / 4).backward()
        ...     if number % 4 == 0:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    units = units_in("no_sync", module)
    scope = object()
    try:
        for unit in units:
            mode = _LEVELS[level] if unit.is_sharded else SyncMode.HOLD
            unit.gradients.accumulation.open_scope(scope, mode if enabled else SyncMode.REDUCE)
        yield
    finally:
        for unit in units:
            unit.gradients.accumulation.close_scope(scope)


@untraced
@checked
def reduce_gradients(module: nn.Module) -> None:
    """Reduce the gradients accumulated on each rank under `no_sync`, without another backward.

    All ranks call it together, outside of forward and backward, after the same backwards.

    Args:
        module: an annotated module, or one that contains some. All units of its model are reduced.
            Other models keep their accumulated gradients.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward.

    Example:
        >>> with no_sync(model):
        ...     for batch in batches:
        ...         loss_of(model, batch).backward()
        >>> reduce_gradients(model)
        >>> optimizer.step()
    """
    launch_reductions(module)()


@untraced
@torch.no_grad()
def launch_reductions(model: nn.Module) -> Callable[[], None]:
    """Begin what `reduce_gradients` does.

    Returns:
        The end of it.
    """
    units = units_in("reduce_gradients", model)
    end_interrupted(units)
    running = [u for u in units if u.step.calls or (u.root is not None and u.root.step.running)]
    if in_backward() or running:
        where = "a backward" if in_backward() else f"the forward of unit '{running[0].name}'"
        raise PhaseError(
            f"reduce_gradients was called inside {where}, where gradients are still to come. Call"
            " it when backward() has returned; or leave it out, and run the last backward outside"
            " of no_sync"
        )
    managed = [param.at_rest for unit in units for param in unit.params]
    notify(Observer.communicates, "reduce", managed)
    return partial(land_held, launch_held(units))
