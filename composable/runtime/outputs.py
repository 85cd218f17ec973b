"""Where backward will go through what a unit's forward returned; knows neither the order of units nor other units.

Note [What a call was given]
Backward runs the newest nodes first, so a call's nodes run after those of calls that began later, and before older ones. A
tensor that a call returns but did not make (a decoder's memory, a list of losses that grows) belongs to an older call: when
backward goes through it, the call that handed it on is over, and the one that made it is not. So nothing is asked of it.
A call that made nothing of what it returns gets a node of its own: other ranks may have gone another way through it, and
where backward enters a unit must not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable.device.private import made_since
from composable.errors import OutputError
from composable.model.hooks import before_gradient
from composable.model.values import map_tensors, tensors_in, with_a_node
from composable.runtime.handle import Handle


class Entry:
    """Called before backward goes through one call's outputs; several outputs count once."""

    __slots__ = ("_counted", "_handle", "_versions")

    def __init__(self, handle: Handle, count: bool) -> None:
        self._handle = handle
        self._counted = count
        self._versions = handle.versions.seen

    def __call__(self, *gradients: Tensor) -> None:
        if self._counted:
            self._counted = False
            self._handle.uses -= 1
        self._handle.on_backward(torch.is_grad_enabled())
        versions = self._handle.versions
        if self._versions is not versions.seen:
            versions.tell_of_writes(self._versions, self._handle.name)
            self._versions = versions.seen


def watch(handle: Handle, output: Any, since: int, *, count: bool) -> tuple[Any, bool]:
    """Ask to be called before backward goes through `output`.

    Args:
        since: the number of autograd's next node when the call began.
        count: whether it is a forward, and no recomputation.

    Returns:
        What the caller gets, and whether the parameters must outlive forward.
    """
    opaque: list[Any] = []
    entry = Entry(handle, count)
    made_here = partial(made_since, since)
    found = aliased = seen = given = False
    for tensor in tensors_in(output, opaque):
        seen = True
        own = handle.parameters.aliased_by(tensor)
        aliased = aliased or own
        if not tensor.requires_grad:
            continue
        if (own or tensor.grad_fn is not None) and before_gradient(tensor, entry, made_here):
            found = True
        else:
            given = True
    if given and not found and count and handle.slots:
        output = map_tensors(output, with_a_node)
        found = _announce(tensors_in(output), entry, made_here)
    if found:
        handle.uses += count
    elif opaque and not seen and handle.parameters.trainable:
        kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in opaque))
        raise OutputError(
            f"fully_shard(unit '{handle.name}'): forward returned {kinds}, in which no tensor that requires grad was "
            "found; its backward cannot be tracked. Return tensors, containers, dataclasses or objects with attributes."
        )
    # Whatever reaches the loss by another way than the outputs still finds its parameters.
    return output, aliased or (not found and handle.parameters.trainable)


def _announce(tensors: Iterable[Tensor], entry: Entry, made_here: Callable[[Any], bool]) -> bool:
    found = False
    for tensor in tensors:
        if tensor.grad_fn is not None:
            found = before_gradient(tensor, entry, made_here) or found
    return found
