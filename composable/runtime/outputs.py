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
from composable.model.hooks import before_gradient, before_node
from composable.model.values import map_tensors, tensors_in, with_a_node
from composable.runtime.parameters import UnitParameters
from composable.runtime.shard_versions import ShardVersions


class Entry:
    """Called before backward goes through one call's outputs; several outputs count once."""

    __slots__ = ("_counted", "_outputs", "_seen")

    def __init__(self, outputs: UnitOutputs, count: bool) -> None:
        self._outputs = outputs
        self._counted = count
        self._seen = outputs.versions.seen

    def __call__(self, *gradients: Tensor) -> None:
        outputs = self._outputs
        if self._counted:
            self._counted = False
            outputs.pending -= 1
        outputs.on_backward(torch.is_grad_enabled())
        versions = outputs.versions
        if self._seen is not versions.seen:
            versions.tell_of_writes(self._seen, outputs.unit)
            self._seen = versions.seen


class UnitOutputs:
    """The outputs of one unit, through which backward will come to it.

    Attributes:
        pending: forwards whose backward has not been entered yet.
        on_backward: called when backward is about to go through an output, and told whether it builds a graph.
    """

    __slots__ = ("_unit_parameters", "on_backward", "pending", "unit", "versions")

    def __init__(self, parameters: UnitParameters, versions: ShardVersions) -> None:
        self._unit_parameters = parameters
        self.versions = versions
        self.unit = ""
        self.pending = 0
        self.on_backward: Callable[[bool], None] = _ignore

    def rename(self, unit: str) -> None:
        """Take the unit's name for messages."""
        self.unit = unit

    def watch(self, output: Any, since: int, *, count: bool) -> tuple[Any, bool]:
        """Ask to be called before backward goes through `output`.

        Args:
            since: the number of autograd's next node when the call began.
            count: whether it is a forward, and no recomputation.

        Returns:
            What the caller gets, and whether the parameters must outlive forward.
        """
        entry = Entry(self, count)
        if type(output) is Tensor and not output._is_view():  # nearly always, and then it is no parameter either
            node = output.grad_fn
            if node is not None and made_since(since, node):
                before_node(node, entry)
                self.pending += count
                return output, False
        opaque: list[Any] = []
        parameters = self._unit_parameters
        made_here = partial(made_since, since)
        found = aliased = seen = given = False
        for tensor in tensors_in(output, opaque):
            seen = True
            own = parameters.aliased_by(tensor)
            aliased = aliased or own
            if not tensor.requires_grad:
                continue
            if (own or tensor.grad_fn is not None) and before_gradient(tensor, entry, made_here):
                found = True
            else:
                given = True
        if given and not found and count and parameters.params:
            output = map_tensors(output, with_a_node)
            found = _announce(tensors_in(output), entry, made_here)
        if found:
            self.pending += count
        elif opaque and not seen and parameters.trainable:
            kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in opaque))
            raise OutputError(
                f"fully_shard(unit '{self.unit}'): forward returned {kinds}, in which no tensor that requires grad was "
                "found; its backward cannot be tracked. Return tensors, containers, dataclasses or objects with attributes."
            )
        # Whatever reaches the loss by another way than the outputs still finds its parameters.
        return output, aliased or (not found and parameters.trainable)


def _announce(tensors: Iterable[Tensor], entry: Entry, made_here: Callable[[Any], bool]) -> bool:
    found = False
    for tensor in tensors:
        if tensor.grad_fn is not None:
            found = before_gradient(tensor, entry, made_here) or found
    return found


def _ignore(builds_graph: bool) -> None:
    return None
