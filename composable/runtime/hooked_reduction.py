"""How one unit's gradients of one dtype are reduced by a hook of the user's, and come to the shards; knows no order of units.

Note [Hooks and shards]
A hook in place of the reduce-scatter gets the whole gradients and returns them reduced, on every rank, of which each takes its
rows. So hooks that were written for an all-reduce need not be written anew, and gradients have the shapes of their parameters,
which PowerSGD wants. It costs what an all-reduce costs: twice the bytes of a reduce-scatter, before the hook compresses them.
On a host the hook is called, and waited for, where the reduction is launched: all ranks come to the same launches in the same
order, see Note [When hooks are called].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from composable.device.collectives import Communicator, ReducePart, Scratch, TagSequence
from composable.device.flat_parameters import FlatParameters
from composable.device.parameter_forms import cut
from composable.device.unused_parameters import UseFlags
from composable.runtime.hooked_hop import HookedHop, Start
from composable.runtime.hooked_replicas import HookedReplicas
from composable.runtime.hooked_units import UnitHook
from composable.runtime.reduction import Reduction

_NOWHERE: Final = torch.empty(0, device="cpu")


class _Done:
    """What needs no waiting."""

    def progress(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    abort = wait


class _TakesOwn:
    """In place of a communicator where every rank has the sums already: each takes its chunk of them."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.capabilities = replace(communicator.capabilities, divided_bytes=0)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> _Done:
        for part in parts:
            start = self.rank * part.chunk
            part.out.copy_(part.source[start : start + part.out.numel()])
        return _Done()


class HookedReduction:
    """A `Reduction` whose sum over the shards a hook makes.

    Args:
        replicas, like, by_hook: `Reduction`'s, of which one follows.
    """

    __slots__ = (
        "_at_launch", "_carried", "_hop", "_indices", "_message", "_missing", "_numbers", "_pending", "_reduction", "_shapes",
        "_start", "_uses", "divided", "flat"
    )  # fmt: skip

    def __init__(
        self,
        flat: FlatParameters,
        sharded: Sequence[nn.Parameter],
        communicator: Communicator,
        trainable: Sequence[bool],
        hook: UnitHook,
        replicas: Communicator | None = None,
        like: Callable[[Tensor, Tensor], Tensor] | None = None,
        by_hook: HookedReplicas | None = None,
    ) -> None:
        self.flat = flat
        self.divided = False
        self._indices = [index for index, wanted in enumerate(trainable) if wanted]
        of_these = [sharded[index] for index in self._indices]
        self._shapes = [parameter.shape for parameter in of_these]
        fqns = [hook.prefix + flat.layout.slots[index].name for index in self._indices]
        self._at_launch = not communicator.capabilities.looked_after
        self._uses = UseFlags(self._indices, torch.float32, flat.device)
        self._start = Start(communicator, hook.units.hook.group)
        bucket_of = partial(hook.bucket_of_shards, of_these, self._shapes, fqns, communicator.size)
        self._hop = HookedHop(hook.units.hook, self._start, self._says, bucket_of, at_launch=self._at_launch)
        own: Communicator = _TakesOwn(communicator)  # type: ignore[assignment]  # all that a reduction asks for
        divisor = 1.0 if replicas is None else float(replicas.size)
        self._reduction = Reduction(flat, sharded, own, trainable, flat.reduce_dtype, replicas, like, divisor, by_hook)
        self._carried: Sequence[Tensor | None] = ()
        self._pending: tuple[TagSequence, str] | None = None  # of a launch that has not come to the shards
        self._missing: list[int] = []
        self._message = self._numbers = _NOWHERE

    @torch.no_grad()
    def launch(
        self, gradients: Sequence[Tensor | None], tags: TagSequence, label: str, carried: Sequence[Tensor | None] = ()
    ) -> None:
        """Start to reduce; the arguments are `Reduction.launch`'s."""
        dtype, device = self.flat.reduce_dtype, self.flat.device
        found = [gradients[index] for index in self._indices]
        pieces = [
            torch.zeros(shape.numel(), dtype=dtype, device=device) if gradient is None else gradient.reshape(-1).to(dtype)
            for gradient, shape in zip(found, self._shapes, strict=True)
        ]
        self._missing = [index for index, gradient in zip(self._indices, found, strict=True) if gradient is None]
        self._message = torch.cat(pieces)
        self._numbers = self._uses.without(self._missing).clone()
        self._carried = carried
        self._pending = tags, label
        self._hop.all_reduce(self._message, label, None, tags)
        if not self._at_launch:
            self._land()

    def _says(self) -> Tensor:
        return self._numbers

    @torch.no_grad()
    def _land(self) -> None:
        """Wait for the hook; each rank takes its rows."""
        if self._pending is None:
            return
        self._hop.wait()
        (tags, label), self._pending = self._pending, None
        unused = self._uses.unused(self._missing, self._numbers.tolist()) if self._missing else []
        reduced: list[Tensor | None] = [None] * len(self.flat.layout.slots)
        pieces = self._message.split([shape.numel() for shape in self._shapes])
        for index, piece, shape in zip(self._indices, pieces, self._shapes, strict=True):
            if index not in unused:
                reduced[index] = piece.view(shape)
        self._add_carried(reduced)
        self._message = _NOWHERE
        self._reduction.launch(reduced, tags, label)

    def _add_carried(self, reduced: Sequence[Tensor | None]) -> None:
        """They are means, as what the hook made, of the rows that this rank takes; on the host where shards rest there."""
        carried, self._carried = self._carried, ()
        for whole, shard, slot in zip(reduced, carried, self.flat.layout.slots, strict=False):
            if whole is not None and shard is not None:
                cut(whole, slot, self.flat.rank).add_(shard.to(whole.device))

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        self._reduction.keep(gradients)

    def give_back(self) -> None:
        """The hook may still read the message."""

    def all_reduce(self, tags: TagSequence, label: str) -> None:
        """Wait for the hook, and launch the second hop if there is one."""
        self._land()
        self._reduction.all_reduce(tags, label)

    def finish(self) -> list[nn.Parameter]:
        """Wait, and put the means on the sharded parameters; returns what `Reduction.finish` does."""
        self._land()
        return self._reduction.finish()

    @property
    def undecided(self) -> tuple[list[int], Tensor] | None:
        return self._reduction.undecided

    def decide(self) -> list[nn.Parameter]:
        return self._reduction.decide()

    @property
    def worth_releasing(self) -> bool:
        return self._reduction.worth_releasing

    def release(self) -> None:
        if self._pending is None:
            self._reduction.release()

    def drop(self) -> None:
        """Forget what is in flight."""
        self._pending, self._carried = None, ()
        try:
            self._hop.abort()
        finally:
            self._message = _NOWHERE
            self._reduction.drop()
