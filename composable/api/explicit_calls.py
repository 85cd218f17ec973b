"""`unshard`, `reshard`, `no_sync`, `reduce_gradients`, `reset` and others for annotated modules.

Users call them besides forward and backward. These calls and scopes say when parameters are
unsharded, when gradients are reduced, and that a step is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from composable.checked import checked
from composable.compilation import untraced, untraced_alone, unwrapped
from composable.contract.contract import module_name
from composable.contract.hooks import dispatcher_of
from composable.contract.tree import SHARD, annotation_of
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.params.param_group import ShardedState
from composable.engine.step.observer import Observer, called, notify
from composable.engine.step.root import end_interrupted, land_held, launch_held, prepare_roots
from composable.engine.step.root import reset as reset_steps
from composable.engine.step.unit import Need, Unit, units_below
from composable.errors import NotAnnotatedError, PhaseError, did_you_mean
from composable.torch_private import in_backward


def units_in(
    verb: str, module: nn.Module, *, sharded: bool = False, recurse: bool = True
) -> list[Unit]:
    """Find the units of both verbs in `module`.

    If `sharded`, one of them must be of `fully_shard`; next to it, replicated parameters are no
    plain ones either. If not `recurse`, find the unit that `module` belongs to, and none below it.
    """
    module = unwrapped(module)
    if not recurse:
        annotation = annotation_of(module)
        if annotation is None:
            raise NotAnnotatedError(
                f"{verb}: {module_name(module)} is not annotated itself; call fully_shard(module)"
                " or replicate(module) first"
            )
        return [annotation.state]
    called(verb)
    units = units_below([module])
    if not any(unit.spec.verb == SHARD or not sharded for unit in units):
        kind, calls = "fully sharded", "fully_shard(module)"
        if not sharded:
            kind, calls = f"{kind} or replicated", f"{calls} or replicate(module)"
        raise NotAnnotatedError(
            f"{verb}: no {kind} module in this {type(module).__name__}; call {calls} first"
        )
    for unit in units:
        unit.refuse_offloaded(verb)
    return units


# --- unshard and reshard ------------------------------------------------------------------------


_ON_THEIR_WAY: Final = (ShardedState.UNSHARDING, ShardedState.UNSHARDED)


@contextmanager
def _none_kept_on_error(units: Sequence[Unit]) -> Iterator[None]:
    """Where an unshard raises, for want of memory, nothing of it stays gathered."""
    try:
        yield
    except BaseException:
        for unit in units:
            unit.hide()
        for unit in units:
            unit.free()
        raise


class Unsharding:
    """All-gathers that were launched by `unshard`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)

    @untraced
    def wait(self) -> None:
        """Wait for the parameters, and register them on their modules. May be called again."""
        units, self._units = self._units, []
        with _none_kept_on_error(units):
            for unit in units:
                # not resharded in the meantime
                if all(group.state in _ON_THEIR_WAY for group in unit.groups):
                    unit.wait_for_unshard()
                    unit.swap_in()


@untraced
@checked
def unshard(module: nn.Module, *, async_op: bool = False, recurse: bool = True) -> Unsharding:
    """All-gather the parameters of every unit in `module`.

    Until `reshard(module)`, modules hold whole plain parameters. A forward with gradients, or a
    backward, uses these parameters, and reshards them as usual. Forwards without gradients keep
    them unsharded. All ranks call this together. Resharding discards writes to unsharded
    parameters; to edit parameters, use `summon_full_params(module)`.

    Args:
        module: an annotated module, or one that contains some.
        async_op: return at once. `wait()` of the result, or the next forward, waits for the gather.
        recurse: False stands for the unit of `module` alone, which must be annotated itself.

    Raises:
        NotAnnotatedError: no fully sharded module in `module`.

    Example:
        >>> pending = unshard(model, async_op=True)
        >>> batch = next(batches)
        >>> pending.wait()
    """
    units = units_in("unshard", module, sharded=True, recurse=recurse)
    prepare_roots(units)
    with _none_kept_on_error(units):
        for unit in units:
            # in its own forward nothing changes: the end of that reshards as usual
            if not unit.step.calls:
                unit.keep(Need.EXPLICIT)
            unit.unshard()
    pending = Unsharding(units)
    if not async_op:
        pending.wait()
    return pending


@untraced
@checked
def reshard(module: nn.Module, *, recurse: bool = True) -> None:
    """Free the unsharded parameters of every unit in `module` now, including those that are kept.

    The next use gathers them again.

    Args:
        module: an annotated module, or one that contains some.
        recurse: False stands for the unit of `module` alone, which must be annotated itself.

    Raises:
        NotAnnotatedError: no fully sharded module in `module`.
        PhaseError: inside of a forward of a unit.

    Example:
        >>> unshard(model)
        >>> evaluate(model)
        >>> reshard(model)
    """
    units = units_in("reshard", module, sharded=True, recurse=recurse)
    end_interrupted(units)
    # a replicated one may run around them
    running = next((u for u in units if u.step.calls and u.spec.verb == SHARD), None)
    if running is not None:
        raise PhaseError(
            f"reshard was called inside of the forward of unit '{running.name}', which needs its"
            " parameters"
        )
    for unit in units:
        unit.hide()
        if not unit.step.calls:
            unit.reshard()


@checked
@contextmanager
def keep_unsharded(module: nn.Module) -> Iterator[None]:
    """Unshard every unit in `module` now, and reshard none before the scope ends.

    Use this for generation and evaluation. All ranks open the scope together. Inside the scope,
    modules hold whole plain parameters, and nothing needs to be gathered. Each rank may call any
    module, annotated or not, and read `model.head.weight`, as often as it likes.

    There is one limit. After a forward with gradients, or if a parameter has a gradient when the
    scope opens, modules hold whole parameters only in forwards of their units. `zero_grad` and
    clipping look for gradients on the sharded parameters.

    If an optimizer, an average, `summon_full_params`, `EMA.swap` or a loaded state dict changes
    parameters inside the scope, the library gathers them again at once, and modules still hold
    whole parameters. If an operator changes them, they are gathered again when their unit is
    called. The library does not follow writes that only one rank may have made (to a local tensor,
    `parameter.data`, NumPy). Call `reshard(module)` after them, on every rank. Resharding discards
    writes to whole parameters; to edit them, use `summon_full_params(module)`.

    Raises:
        NotAnnotatedError: no fully sharded module in `module`.

    Example:
        >>> with keep_unsharded(model), torch.no_grad():
        ...     for _ in range(100): tokens = extend(tokens, model(tokens))
    """
    units = units_in("keep_unsharded", module, sharded=True)
    prepare_roots(units)
    scope = object()
    shows = not any(param.at_rest.grad is not None for unit in units for param in unit.params)
    shown = [
        unit
        for unit in units
        if shows and not unit.step.calls and Need.EXPLICIT not in unit.kept_by
    ]
    try:
        for unit in units:
            unit.keep(scope)
            unit.unshard()
        for unit in units:
            unit.wait_for_unshard()
        for unit in shown:
            unit.show()
        yield
    finally:
        for unit in shown:
            unit.hide()
        for unit in units:
            unit.release(scope)


# --- methods other than forward -----------------------------------------------------------------


@checked
def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than forward run with unsharded parameters, as forward does.

    Args:
        module: an annotated module.
        name: the name of the method, e.g. "generate". The method is one of the module's class, or
            is set on the module.

    Raises:
        NotAnnotatedError: the module is not annotated, or has no such method.

    Example:
        >>> register_forward_method(model, "generate")
        >>> model.generate(prompt)
    """
    units_in("register_forward_method", module, recurse=False)
    module = unwrapped(module)
    kind = type(module)
    own = vars(module).get(name, getattr(kind, name, None))
    if not callable(own):
        public = [each for each in dir(kind) if not each.startswith("_")]
        near = did_you_mean(name, [each for each in public if callable(getattr(kind, each))])
        raise NotAnnotatedError(
            f"register_forward_method: no method '{name}' on {kind.__name__}{near}"
        )
    if getattr(own, "func", None) is not _call_as_forward:
        # bound as the attribute is: static methods, and those of the class, do not get the module
        setattr(module, name, partial(_call_as_forward, module, getattr(module, name)))


@untraced_alone
def _call_as_forward(
    module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a method inside the brackets of the module's annotations.

    Without that of checkpointing, which would run forward again in its place.
    """
    dispatcher = dispatcher_of(module)
    if dispatcher is None:
        return method(*args, **kwargs)
    try:
        args, kwargs = dispatcher.before(module, args, kwargs, without="checkpoint")
        output = method(*args, **kwargs)
    except BaseException:
        dispatcher.after(module, args, None)
        raise
    return dispatcher.after(module, args, output)


# --- accumulation of gradients ------------------------------------------------------------------


Level = Literal["all", "replicate"]


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
            reduces_shards = level == "replicate" and unit.is_sharded
            mode = SyncMode.HOLD_SHARDS if reduces_shards else SyncMode.HOLD
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
    notify(
        Observer.communicates, "reduce", [param.at_rest for unit in units for param in unit.params]
    )
    return partial(land_held, launch_held(units))


# --- lost steps -----------------------------------------------------------------------------


@untraced
@checked
def reset(module: nn.Module) -> None:
    """Give up a step that failed on all ranks.

    It shards the parameters again, and drops gradients that were not reduced. The next forward does
    the same by itself. Call it to free memory in an `except` block. It waits for the collectives
    that were launched, so all ranks call it together, after the same forwards and backwards. It
    does not help if one rank continues alone.

    Args:
        module: an annotated module, or one that contains some.

    Raises:
        NotAnnotatedError: no annotated module in `module`.

    Example:
        >>> try:
        ...     loss_of(model, batch).backward()
        ... except torch.OutOfMemoryError:
        ...     reset(model)
    """
    units_in("reset", module)
    reset_steps([unwrapped(module)])
