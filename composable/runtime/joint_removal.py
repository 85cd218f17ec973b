"""How ranks remove sharded units together: each has all values before any of them changes anything; knows no module.

Note [All or nobody]
An interrupt may come to any rank between any two lines. So there are two parts. In the first one all units are gathered, in one
step, and nothing that users see changes. Who is interrupted there, or told of somebody who was, gives it up, and everything is
as it was; all of them have opened the same steps. It ends with a vote. It is done to its end, through any interrupt, and so is
the second part, which is this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from composable.device.collectives import GatherPart
from composable.device.private import local_of
from composable.model.transaction import through_interrupts
from composable.plan.phases import Phase
from composable.runtime import last_units
from composable.runtime.handle import Handle
from composable.runtime.originals import Originals


class Leaving(Protocol):
    """A unit that is being removed."""

    @property
    def handle(self) -> Handle: ...

    @property
    def originals(self) -> Originals: ...


class _Gathering:
    """The first part, for `units`."""

    def __init__(self, units: Sequence[Leaving]) -> None:
        self._units = units
        self._handles = handles = [unit.handle for unit in units]
        # All numbers first, so that who is interrupted opens as many steps as the others.
        self._steps = {steps: steps.next_number for steps in {handle.tags.steps: None for handle in handles}}
        self._unsharded: list[Handle] = []  # for the removal: they were not before

    def run(self) -> None:
        self._open()
        for handle in self._handles:
            if not handle.parameters.registered.intact():
                handle.adopt_replaced()
            last_units.free(handle)
            handle.drop_if_stale()
            if handle.phase is not Phase.UNSHARDED:
                self._unsharded.append(handle)
                handle.unshard_in_step(for_user=True)
        for unit in self._units:
            handle, originals = unit.handle, unit.originals
            handle.wait_for_unshard()
            label = f"all-gather of unit '{handle.name}' as it rests"
            originals.exact_values = handle.parameters.gather_exact(handle.tags.removal, label)
            originals.whole_gradients = _whole_gradients(handle)

    def _open(self) -> None:
        for steps, number in self._steps.items():
            steps.catch_up(number)

    def vote(self) -> BaseException | None:
        """Hear that all have come so far, through any interrupt, which is returned: others may have heard this rank's vote."""
        communicator, checks = self._handles[0].mesh_info.all, self._handles[0].tags.checks
        before, steps = checks.mark(), checks.steps
        steps.met = -1

        def vote() -> None:
            if steps.met != steps.number:  # not all votes have come
                checks.go_back_to(before)
                communicator.min_max([0], label="vote on remove() across ranks", tags=checks)

        return through_interrupts(vote)

    def abort(self) -> None:
        self._open()
        for unit in self._units:
            unit.originals.exact_values = unit.originals.whole_gradients = ()
        for handle in self._unsharded:
            handle.withdraw()
            handle.reshard()
        for handle in self._handles:
            handle.tags.say_farewell("the removal of fully_shard was interrupted, or failed")


def remove_together(units: Sequence[Leaving], undo: Callable[[], object]) -> None:
    """Bring all values to all ranks, and then `undo`, or change nothing and raise. `undo` can be called again."""
    gathering: _Gathering | None = None
    try:
        gathering = _Gathering(units)
        gathering.run()
        interrupt = gathering.vote()
    except BaseException:
        through_interrupts(lambda: (gathering or _Gathering(units)).abort())
        raise
    interrupt = through_interrupts(undo) or interrupt
    if interrupt is not None:
        raise interrupt


def after_interrupt(units: Sequence[Leaving], *, begun: bool) -> None:
    """Of a removal: let the others who wait for this rank know.

    Args:
        begun: this rank has told them.
    """
    if not begun:
        _Gathering(units).abort()
    for unit in units:
        unit.handle.tags.steps.behind = True


def _whole_gradients(handle: Handle) -> list[Tensor | None]:
    """Over the unit's own communicator: who is interrupted in a collective of torch's own leaves the others waiting in it."""
    return [
        _whole(gradient, handle) if isinstance(gradient := param.sharded.grad, DTensor) else gradient
        for param in handle.parameters.params
    ]


@torch.no_grad()
def _whole(gradient: DTensor, handle: Handle) -> Tensor:
    communicator, local = handle.mesh_info.shard, local_of(gradient).detach().to(handle.mesh_info.device)
    placement = gradient.placements[handle.mesh_info.shard_dim]
    if not isinstance(placement, Shard):
        return local.clone()
    dim, shape = placement.dim, list(gradient.shape)
    largest = -(-shape[dim] // communicator.size)
    shapes = [
        [*shape[:dim], max(0, min(largest, shape[dim] - rank * largest)), *shape[dim + 1 :]]
        for rank in range(communicator.size)
    ]
    chunk = prod(shapes[0])
    shard, whole = local.new_zeros(chunk), local.new_empty(communicator.size * chunk)
    shard[: local.numel()].copy_(local.reshape(-1))
    parts = communicator.prepare([GatherPart(shard, whole, whole.numel())])
    communicator.all_gather(parts, label=f"all-gather of gradients of unit '{handle.name}'", tags=handle.tags.removal).wait()
    pieces = [whole[rank * chunk :][: prod(shape)].view(shape) for rank, shape in enumerate(shapes)]
    return torch.cat(pieces, dim)
