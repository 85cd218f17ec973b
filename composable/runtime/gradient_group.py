"""The gradients of one unit, precision and device, which are held or reduced together; knows no phase and no gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from operator import or_

import torch
from torch import nn

from composable.device.collectives import TagSequence
from composable.device.flat_parameters import FlatParameters
from composable.device.held_gradients import HeldGradients
from composable.device.parameter_forms import summand_over_replicas_like
from composable.device.sharded_gradients import take_gradients
from composable.device.user_hooks import call_hooks_after_accumulation
from composable.runtime.hooked_reduction import HookedReduction
from composable.runtime.hooked_stages import StageHooks, hooked_reduction
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.reduction import Reduction
from composable.runtime.terms import Terms


class GradientGroup:
    """The gradients of a `DtypeGroup`: what is held of earlier backwards, and a reduction for each set that is trainable.

    Args:
        divisor: what sums of gradients are divided by; None for the number of ranks.

    Attributes:
        trainable: for each parameter, as `follow` was told.
        trains: whether any of them gets a gradient.
        nbytes: of the gradients that a backward brings.
        terms: these, as they go into sums.
        reductions: by what is trainable, the dtype of its gradients, whether these are held afterwards, and the divisor.
        comm_hooks: of the user's, which make stages of reductions; see `reduce_by`.
        undecided: whether gradients that have been reduced wait for `decide`.
        large_reductions: reductions whose gradients' memory is large enough.
    """

    __slots__ = (
        "_alone", "_communicator", "_flat", "_held", "_like_summands", "_reduction", "_replicas", "_unsharded", "_wanted",
        "comm_hooks", "large_reductions", "nbytes", "reductions", "sharded", "terms", "trainable", "trains", "undecided"
    )  # fmt: skip

    def __init__(
        self,
        flat: FlatParameters,
        sharded: Sequence[nn.Parameter],
        unsharded: Sequence[nn.Parameter],
        mesh_info: MeshInfo,
        divisor: float | None = None,
    ) -> None:
        self._flat = flat
        self.sharded = sharded
        self._unsharded = unsharded
        self._alone = mesh_info.mesh is None
        self._communicator = mesh_info.shard
        self._replicas = mesh_info.replicate
        self._like_summands = partial(summand_over_replicas_like, mesh_info.shard_dim)
        self.terms = Terms(flat, mesh_info.all.size, divisor)
        self.trainable: tuple[bool, ...] = ()
        self.trains = False
        self.nbytes = 0
        self.undecided = False
        self.comm_hooks: StageHooks | None = None
        self.large_reductions: list[Reduction | HookedReduction] = []
        self.reductions: dict[tuple[tuple[bool, ...], torch.dtype, bool, float | None], Reduction | HookedReduction] = {}
        self._reduction: Reduction | HookedReduction | None = None  # of what is trainable now
        self._held: HeldGradients | None = None  # while gradients of earlier backwards are
        self._wanted: tuple[bool, ...] = ()  # for each parameter, whether one of these may have brought a gradient

    def follow(self, trainable: tuple[bool, ...]) -> None:
        """Unsharded parameters require the gradients that are wanted of the sharded ones."""
        self.trainable = trainable
        for parameter, wanted in zip(self._unsharded, trainable, strict=True):
            parameter.requires_grad_(wanted)
        self.trains = any(trainable)
        self.nbytes = sum(compress([parameter.nbytes for parameter in self._unsharded], trainable))
        self._reduction = self.reductions.get((trainable, self._flat.compute_dtype, False, self.terms.divisor))

    @property
    def holds_gradients(self) -> bool:
        """Whether a gradient has arrived that was not reduced."""
        return any(parameter.grad is not None for parameter in self._unsharded)

    def go_on_holding(self) -> None:
        """Gradients of earlier backwards may be held: they have been since before this group was made."""
        if self._alone:
            return
        self._held = HeldGradients(self.sharded, self._flat.layout.slots, self._flat.rank, self._flat.device)
        self._wanted = self.trainable

    def hold(self) -> None:
        """Add what is here to what is held."""
        if not self.trains:
            return
        if self._alone:  # so the sum is there at once, as it is where autograd makes it
            reduction = self._reduction_of(self.trainable, self._flat.compute_dtype)
            reduction.keep(self.terms.arrived(take_gradients(self._unsharded)))
            for parameter in reduction.finish():
                call_hooks_after_accumulation(parameter)
            return
        if self._held is None:
            self.go_on_holding()
        self._wanted = tuple(map(or_, self._wanted, self.trainable))
        assert self._held is not None
        self._held.add(self.terms.held(take_gradients(self._unsharded)), self.trainable)

    def reduce(self, tags: TagSequence, label: str) -> None:
        """Launch the reduction of what is here, and of what is held."""
        if self._held is not None:
            self._reduce_held(self._held, tags, label)
            return
        if not self.trains:
            return
        if self.terms.factor is not None:
            terms = self.terms.arrived(take_gradients(self._unsharded))
            self._reduction_of(self.trainable, self._flat.reduce_dtype).launch(terms, tags, label)
            return
        reduction = self._reduction
        if reduction is None:
            reduction = self._reduction_of(self.trainable, self._flat.compute_dtype, divisor=self.terms.divisor)
            self._reduction = reduction
        reduction.launch(take_gradients(self._unsharded), tags, label)

    def reduce_shards(self, tags: TagSequence, label: str) -> None:
        """Launch the first hop of the reduction of what is here alone: it is held, cut as the parameters are."""
        if not self.trains and self._held is None:
            return
        if self._held is None:
            self.go_on_holding()
        assert self._held is not None
        self._wanted = tuple(map(or_, self._wanted, self.trainable))
        gradients = self._held.take(self.terms.held(take_gradients(self._unsharded)))
        self._reduction_of(self._wanted, self._flat.gradient_dtype, held=True).launch(gradients, tags, label)

    def _reduce_held(self, held: HeldGradients, tags: TagSequence, label: str) -> None:
        """What has been frozen since it brought a gradient is reduced with the others."""
        self._held = None
        gradients = held.take(self.terms.held(take_gradients(self._unsharded)))
        trainable = tuple(map(or_, self._wanted, self.trainable))
        reduction = self._reduction_of(trainable, self._flat.gradient_dtype)
        if self._replicas is None:
            reduction.launch(gradients, tags, label)
            return
        shards = held.take_shards()
        for index, shard in enumerate(shards):
            if gradients[index] is None and shard is not None:  # or else nobody would look for it
                gradients[index] = torch.zeros_like(self._unsharded[index], dtype=self._flat.gradient_dtype)
        reduction.launch(gradients, tags, label, shards)

    def _reduction_of(
        self, trainable: tuple[bool, ...], source: torch.dtype, *, held: bool = False, divisor: float | None = None
    ) -> Reduction | HookedReduction:
        """The reduction of the parameters that are `trainable`.

        Args:
            source: the dtype of their gradients.
            held: over the shards alone.
            divisor: what their sum is divided by; None makes it a mean.
        """
        reduction = self.reductions.get((trainable, source, held, divisor))
        if reduction is None:
            replicas, like = (None, self._like_summands) if held else (self._replicas, None)
            of_these = self._flat, self.sharded, self._communicator, trainable, source, replicas, like
            reduction = (
                Reduction(*of_these, divisor) if self.comm_hooks is None else hooked_reduction(self.comm_hooks, *of_these)
            )
            self.reductions[trainable, source, held, divisor] = reduction
            if reduction.worth_releasing:
                self.large_reductions.append(reduction)
        return reduction

    def all_reduce(self, tags: TagSequence, label: str) -> None:
        """Wait for the first hop of the reduction, and launch the second."""
        for reduction in self.reductions.values():
            reduction.all_reduce(tags, label)

    def finish(self) -> list[nn.Parameter]:
        """Wait for the reduction; the sharded parameters have their gradients then. Returns those with hooks to be called."""
        waiting = []
        for reduction in self.reductions.values():
            waiting += reduction.finish()
            self.undecided = self.undecided or reduction.undecided is not None
        return waiting

    def decide(self) -> list[nn.Parameter]:
        """Look whether other ranks had the gradients that are missing on this one. Makes the host wait."""
        self.undecided = False
        return [parameter for reduction in self.reductions.values() for parameter in reduction.decide()]

    def drop_gradients(self) -> None:
        """Forget what was not reduced yet."""
        take_gradients(self._unsharded)
        if self._held is not None:
            self._held.drop()
            self._held = None

    def drop_reduction(self) -> None:
        """Wait for the reduction, if one is in flight, and forget it."""
        for reduction in self.reductions.values():
            reduction.drop()


def reduce_by(group: GradientGroup, hooks: StageHooks | None) -> None:
    """From here on `hooks` reduce, or the communicators again. Nothing is in flight; the terms are to be weighed anew."""
    group.comm_hooks = hooks
    group.reductions.clear()
    group.large_reductions.clear()
    group.terms.become(means=hooks is not None)
    if group.trainable:
        group.follow(group.trainable)
