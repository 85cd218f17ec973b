"""The second hop of one unit's gradients on a hybrid mesh, made by a hook of the user's; knows no order of units.

Note [Hooks over replicas]
A hook in place of the all-reduce over replicas is handed what landed of the first hop: means over the ranks of one replica, of
each parameter the rows that this rank owns, which are the same ones on all ranks of its group. It makes means over replicas, as
a hook of DistributedDataParallel does, so nothing is divided after it. What ranks say about who has a gradient at all lands
with these rows; from there it goes on by itself (`Start`). Parameters that a rank owns no rows of are in none of its buckets,
nor in those of its group: hooks are not written for matrices without rows. For a unit of such parameters none is called.
On a host the hook is called, and waited for, where the second hop is launched, see Note [When hooks are called]. Whoever fails
there leaves the ranks of its group in a collective; those that it shares a replica with may have nothing to wait for any more,
and would take the step for a whole one. So each says to these that its hook has returned, and waits for their word where it
waits for the hop: whose hook failed tells them that it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.collectives import Communicator, TagSequence
from composable.device.flat_parameters import FlatParameters
from composable.device.private import local_of
from composable.runtime.hooked_hop import HookedHop, Start
from composable.runtime.hooked_units import UnitHook, has_rows
from composable.runtime.hop import Hop

_NOWHERE: Final = torch.empty(0, device="cpu")


class HookedReplicas:
    """A `Hop` over replicas whose sum, and division, a hook makes.

    Args:
        replicas: the ranks that it is made over.
        shards: the ranks of one replica.

    Attributes:
        shard_tags: of messages to these.
        in_flight: whether it was launched, and neither waited for nor aborted since.
    """

    __slots__ = (
        "_at_launch", "_flags", "_hop", "_indices", "_message", "_numbers", "_orders", "_pending", "_returned", "_shapes",
        "_start", "_views", "in_flight", "shard_tags"
    )  # fmt: skip

    def __init__(
        self,
        flat: FlatParameters,
        sharded: Sequence[nn.Parameter],
        trainable: Sequence[bool],
        hook: UnitHook,
        replicas: Communicator,
        shards: Communicator,
    ) -> None:
        slots = flat.layout.slots
        self._indices = [index for index, wanted in enumerate(trainable) if wanted and has_rows(sharded[index])]
        of_these = [sharded[index] for index in self._indices]
        self._shapes = [local_of(parameter).shape for parameter in of_these if isinstance(parameter, DTensor)]
        self._orders = [slots[index].order for index in self._indices]
        fqns = [hook.prefix + slots[index].name for index in self._indices]
        self._at_launch = not replicas.capabilities.looked_after
        self._start = Start(replicas, hook.units.hook.group)
        bucket_of = partial(hook.bucket_of_shards, of_these, self._shapes, fqns, replicas.size)
        self._hop = HookedHop(hook.units.hook, self._start, self._says, bucket_of, at_launch=self._at_launch)
        self._returned = None if self._at_launch or shards.size == 1 else Hop(shards)
        self.shard_tags: TagSequence | None = None
        self._pending = False  # the hook has not been waited for
        self._views: list[Tensor] = []  # of what has landed, meanwhile
        self._message = self._numbers = self._flags = _NOWHERE
        self.in_flight = False

    @torch.no_grad()
    def launch(self, landed: dict[int, Tensor], flags: Tensor, tags: TagSequence, label: str) -> None:
        """Hand over what has landed. The means will be there, too.

        Args:
            landed: the means over shards by the number of their parameter, as they are in memory.
            flags: of the parameters, as all shards have summed them.
        """
        shapes = zip(self._indices, self._shapes, self._orders, strict=True)
        self._views = [_in_order(landed[index], shape, order) for index, shape, order in shapes]
        self._flags = flags
        self._numbers = flags.to(torch.float32, copy=True)
        self.in_flight = self._pending = True
        if self._views:
            self._message = torch.cat([view.reshape(-1) for view in self._views])
            self._hop.all_reduce(self._message, label, None, tags)
        else:
            self._start.launch(self._numbers, label, tags)
        if not self._at_launch:
            self._land()
        if self._returned is not None:
            self._returned.all_reduce(torch.ones(1), f"{label}: whose hooks have returned", tags=self.shard_tags)

    def _says(self) -> Tensor:
        return self._numbers

    @torch.no_grad()
    def _land(self) -> None:
        if not self._pending:
            return
        if self._views:
            self._hop.wait()
            pieces = self._message.split([shape.numel() for shape in self._shapes])
            torch._foreach_copy_(self._views, [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)])
        else:
            self._start.wait()
        self._flags.copy_(self._numbers)
        self._drop()

    def _drop(self) -> None:
        self._views, self._pending = [], False
        self._message = self._numbers = self._flags = _NOWHERE

    def wait(self) -> None:
        """The means are where the shards' were."""
        self.in_flight = False
        self._land()
        if self._returned is not None:
            self._returned.wait()

    def abort(self) -> None:
        """The means are not wanted."""
        self.in_flight = False
        try:
            self._hop.abort()
            if self._returned is not None:
                self._returned.abort()
        finally:
            self._drop()


def _in_order(landed: Tensor, shape: torch.Size, order: Sequence[int]) -> Tensor:
    """A view in the parameter's shape of what lies in another order of dimensions."""
    if not order:
        return landed.view(shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return landed.view([shape[dim] for dim in order]).permute(inverse)
