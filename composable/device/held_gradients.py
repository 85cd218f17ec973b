"""Gradients that a later backward reduces, added up on their rank, as users see them; knows no communicator and no unit.

Note [Held gradients are summands]
What is held rests as the gradient of the sharded parameter: a `DTensor` whose placements say `Partial("avg")`, around this
rank's whole gradient. So users see that it is there and what it means, `zero_grad` clears it, scaling scales it, and whoever
redistributes it gets the mean. Between two backwards there is nothing else: what became of `.grad` in between is what counts.
A gradient from before, reduced already, goes into the sum: it is the mean over ranks of one that has n times the shard where
this rank's shard is, and zeros elsewhere. It does so on every rank, also where a backward brought nothing for the parameter: of
those that have the same shard none may keep it apart, since the others add but their part of it to the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.flat_parameters import as_parameter
from composable.device.parameter_forms import cut, summand_like
from composable.device.parameter_labels import label_of
from composable.device.private import dtensor_like, gradient_hooks, local_of
from composable.errors import PhaseError
from composable.plan.layout import Slot
from composable.plan.routes import Route


def is_held(gradient: Tensor | None) -> bool:
    """Whether a gradient is this rank's summand of one that has not been reduced."""
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def held_part(parameter: nn.Parameter) -> Tensor | None:
    """This rank's summand of the parameter's gradient, if that is held whole."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and all(placement.is_partial() for placement in gradient.placements):
        return local_of(gradient)
    return None


def refuse_hooks_again(parameter: nn.Parameter) -> None:
    """What was reduced before goes into a sum that is about to be held; raise if the user's hooks would meet it twice."""
    if gradient_hooks(parameter):
        unit, name, _ = label_of(parameter) or ("", "", "")
        raise PhaseError(
            f"parameter '{name}' of unit '{unit}' has a gradient that was reduced, and hooks (register_hook) that were called "
            "for it; under no_sync more is added to it, and they would be called again for all of it. Call zero_grad() before "
            "the first backward under no_sync, or leave no_sync out"
        )


class HeldGradients:
    """What the sharded parameters of one dtype hold. `add` as often as there are backwards, then `take`."""

    __slots__ = ("_device", "_forms", "_rank", "_sharded", "_slots")

    def __init__(self, sharded: Sequence[nn.Parameter], slots: Sequence[Slot], rank: int, device: torch.device) -> None:
        self._device = device  # that gradients come from
        self._sharded = tuple(sharded)
        self._slots = tuple(slots)
        self._rank = rank
        self._forms: list[DTensor | None] = [None] * len(self._slots)  # without memory

    @torch.no_grad()
    def add(self, fresh: Sequence[Tensor | None], trainable: Sequence[bool]) -> None:
        """Add gradients of unsharded parameters to what is held.

        Args:
            trainable: for each, whether some rank may have one.
        """
        sums, terms = [], []
        for index, (parameter, gradient) in enumerate(zip(self._sharded, fresh, strict=True)):
            held = held_part(parameter)
            if gradient is None:
                before, slot = parameter.grad, self._slots[index]
                if not isinstance(before, DTensor) or is_held(before) or not trainable[index]:
                    continue
                # What was reduced before goes into the sum on all ranks, or on none.
                gradient = as_parameter(local_of(before).new_zeros(slot.shape, device=self._device), slot)
            if held is None:
                self._put(index, parameter, gradient)
            else:
                sums.append(held)
                terms.append(gradient)
        if sums:
            torch._foreach_add_(sums, terms)

    def _put(self, index: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        before, slot = parameter.grad, self._slots[index]
        if before is not None:
            assert isinstance(before, DTensor)
            if not is_held(before):
                refuse_hooks_again(parameter)
            alpha = 1 if slot.route is Route.WHOLE else slot.num_shards
            cut(gradient, slot, self._rank).add_(local_of(before).to(gradient.device), alpha=alpha)
        form = self._forms[index]
        if form is None:
            held = summand_like(gradient, parameter)
            self._forms[index] = dtensor_like(gradient.new_empty(0), held, held.device)
        else:
            held = dtensor_like(gradient, form, None if form.device == gradient.device else form.device)
        parameter.grad = held

    @torch.no_grad()
    def take(self, fresh: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What is held and `fresh` together; nothing is held afterwards."""
        taken = list(fresh)
        sums, terms = [], []
        for index, parameter in enumerate(self._sharded):
            held = held_part(parameter)
            if held is None:
                continue
            parameter.grad = None
            gradient, taken[index] = taken[index], held
            if gradient is not None:
                sums.append(held)
                terms.append(gradient)
        if sums:
            torch._foreach_add_(sums, terms)
        return taken

    def take_shards(self) -> list[Tensor | None]:
        """What is held of each shard, summed over the shards and not over replicas; nothing of these is held afterwards."""
        taken: list[Tensor | None] = []
        for parameter in self._sharded:
            gradient = parameter.grad
            taken.append(local_of(gradient) if isinstance(gradient, DTensor) and is_held(gradient) else None)
            if taken[-1] is not None:
                parameter.grad = None
        return taken

    def drop(self) -> None:
        """Hold nothing any more."""
        for parameter in self._sharded:
            if is_held(parameter.grad):
                parameter.grad = None
