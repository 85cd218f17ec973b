"""Explicit calls and scopes around annotated modules; each finds its units by traversal and decides nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from composable.compilation import untraced, untraced_alone, unwrapped
from composable.errors import NotAnnotatedError
from composable.model.contract import module_name, registry
from composable.model.hooks import dispatcher_of
from composable.model.traversal import REPLICATE, SHARD, get_states
from composable.plan.phases import Phase
from composable.runtime import last_units
from composable.runtime.handle import Handle


def _handles_in(verb: str, module: nn.Module) -> list[Handle]:
    handles = [state.handle for state in get_states(module)]
    if not handles:
        raise NotAnnotatedError(
            f"{verb}: no fully sharded module in this {type(module).__name__}; call fully_shard(module) first"
        )
    return handles


class Unsharding:
    """Gathers that were launched by `unshard`."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    @untraced
    def wait(self) -> None:
        """Return when the parameters are there. May be called again."""
        handles, self._handles = self._handles, []
        for handle in handles:
            if handle.phase is Phase.GATHERING:
                handle.wait_for_unshard()


@untraced
def unshard(module: nn.Module, *, async_op: bool = False) -> Unsharding:
    """Gather the parameters of every unit in `module` ahead of their use; the next forward frees them as usual.

    All ranks call it together.

    Args:
        module: an annotated module, or one that contains some.
        async_op: return at once; `wait()` on the result, or the forward, waits.

    Raises:
        NotAnnotatedError: no fully sharded module in `module`.

    Example:
        >>> pending = unshard(model, async_op=True)
        >>> batch = next(batches)
        >>> pending.wait()
    """
    handles = _handles_in("unshard", module)
    for handle in handles:
        last_units.free(handle)
        handle.drop_if_stale()
        handle.unshard()
    pending = Unsharding(handles)
    if not async_op:
        pending.wait()
    return pending


@untraced
def reshard(module: nn.Module) -> None:
    """Free the gathered parameters of every unit in `module` now, also those that are kept; the next use gathers them anew.

    Raises:
        NotAnnotatedError: no fully sharded module in `module`.
    """
    for handle in _handles_in("reshard", module):
        handle.reshard()


@contextmanager
def keep_unsharded(module: nn.Module) -> Iterator[None]:
    """Gather each unit in `module` at its first use, and free none before the scope ends: generation, evaluation.

    Parameters that an optimizer or an in-place operation changes inside the scope are gathered again at the next forward, on
    every rank. Writes that no version counter tells of (`parameter.data`, NumPy) are not seen before a backward has reduced the
    parameter's gradient: call `reshard(module)` after them, on every rank.

    Raises:
        NotAnnotatedError: no fully sharded module in `module`.

    Example:
        >>> with keep_unsharded(model), torch.no_grad():
        ...     for _ in range(100): tokens = extend(tokens, model(tokens))
    """
    handles = _handles_in("keep_unsharded", module)
    scope = object()
    try:
        for handle in handles:
            last_units.free(handle)
            handle.keep_for(scope)
        yield
    finally:
        for handle in handles:
            handle.keep_no_longer_for(scope)
            if not handle.kept_by and not handle.calls.depth:
                handle.reshard()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than forward compute with gathered parameters, as forward does.

    Args:
        module: an annotated module.
        name: of the method, e.g. "generate".

    Raises:
        NotAnnotatedError: the module is not annotated, or has no such method.

    Example:
        >>> register_forward_method(model, "generate")
        >>> model.generate(prompt)
    """
    module = unwrapped(module)
    here = type(module).__name__
    annotations = registry(module)
    if SHARD not in annotations and REPLICATE not in annotations:
        raise NotAnnotatedError(
            f"register_forward_method: {module_name(module)} is not annotated; call fully_shard or replicate on it first"
        )
    method = getattr(type(module), name, None)
    if not callable(method):
        names = [n for n in dir(type(module)) if not n.startswith("_") and callable(getattr(type(module), n))]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise NotAnnotatedError(f"register_forward_method: no method '{name}' on {here}{hint}")
    setattr(module, name, partial(call_bracketed, module, name))


@untraced_alone
def call_bracketed(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the class's method `name` on `module` inside the brackets of its annotations, checkpointing excepted."""
    dispatcher = dispatcher_of(module)
    method = getattr(type(module), name)
    if dispatcher is None:
        return method(module, *args, **kwargs)
    try:
        args, kwargs = dispatcher.before(module, args, kwargs, without="checkpoint")
        output = method(module, *args, **kwargs)
    except BaseException:
        dispatcher.after(module, args, None)
        raise
    return dispatcher.after(module, args, output)
