"""Accumulation of gradients without communication: the scope `no_sync`, and its explicit end; moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from composable.compilation import untraced, unwrapped
from composable.errors import AnnotationError, NotAnnotatedError, closest
from composable.model.traversal import get_all_sharded_states, get_replicated_states
from composable.runtime.accumulation import Pass
from composable.runtime.explicit_end import reduce_held

_LEVELS: Final = {"all": Pass.HOLDS, "replicate": Pass.HOLDS_SHARDS}  # what backwards do with the gradients of shards


def units_in(verb: str, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The sharded and the replicated units of `model`.

    Raises:
        NotAnnotatedError: it has none.
    """
    model = unwrapped(model)
    sharded, replicated = get_all_sharded_states(model), get_replicated_states(model)
    if not sharded and not replicated:
        raise NotAnnotatedError(
            f"{verb}: no fully sharded or replicated module in this {type(model).__name__}; call fully_shard(module) or "
            "replicate(module) first"
        )
    return sharded, replicated


@contextmanager
def no_sync(model: nn.Module, *, enabled: bool = True, level: str = "all") -> Iterator[None]:
    """Let backwards inside the scope add up gradients on each rank, and the first one outside of it average the sum.

    What is accumulated over several micro-batches crosses the network once. It is decided when backward runs: forward may run
    inside the scope or before it. All ranks do the same. Scopes nest: the innermost one that a unit is in decides, so one with
    `enabled=False` inside of another averages. An exception that leaves the scope ends it.

    Until they are averaged, gradients are whole on every rank. A sharded parameter's `grad` is a `DTensor` with a `Partial`
    placement then, a replicated parameter's is this rank's own; `zero_grad` clears both. Optimizers, and `clip_grad_norm_`,
    refuse them by name. Parameters are gathered and freed as without the scope. A parameter that only earlier micro-batches
    used, on any rank, is averaged with the others.

    A forward or backward that raises drops what is held: some of its gradients may be there by halves. On one rank without a
    process group nothing is held.

    Args:
        model: an annotated module, or one that contains some; of units elsewhere nothing changes.
        enabled: False averages in every backward, as without a scope.
        level: "all", or "replicate" to leave out sums among replicas only: shards are reduced in every backward, and what is
            replicated is held.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        AnnotationError: there is no such level.

    Example:
        >>> for number, batch in enumerate(batches, start=1):
        ...     with no_sync(model, enabled=number % 4 != 0):
        ...         (loss_of(model, batch) / 4).backward()
        ...     if number % 4 == 0:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    if level not in _LEVELS:
        near = "".join(f"; did you mean '{name}'?" for name in closest(str(level), _LEVELS))
        raise AnnotationError(f"no_sync: level must be 'all' or 'replicate', got {level!r}{near}")
    sharded, replicated = units_in("no_sync", model)
    scope = object()
    held = [unit.averaging.reducer.local.accumulation for unit in replicated]
    kept_whole = [unit.handle.gradients.accumulation for unit in sharded]
    try:
        for accumulation in held:
            accumulation.open_scope(scope, Pass.HOLDS if enabled else Pass.REDUCES)
        for accumulation in kept_whole:
            accumulation.open_scope(scope, _LEVELS[level] if enabled else Pass.REDUCES)
        yield
    finally:
        for accumulation in (*held, *kept_whole):
            accumulation.close_scope(scope)


@untraced
def reduce_gradients(model: nn.Module) -> None:
    """Average what backwards under `no_sync` have left on each rank, without another backward.

    All ranks call it together, outside of forward and backward. It compares what the ranks hold first: where none holds
    anything, nothing else happens.

    Args:
        model: an annotated module, or one that contains some; units elsewhere hold what they hold.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        PhaseError: a forward or a backward is under way.
        RanksDisagreeError: the ranks hold gradients of different backwards; these are dropped.

    Example:
        >>> with no_sync(model):
        ...     for batch in batches:
        ...         loss_of(model, batch).backward()
        >>> reduce_gradients(model)
        >>> optimizer.step()
    """
    reduce_held(*units_in("reduce_gradients", model))
