"""How one unit's gradients of one dtype are reduced, from autograd's tensors to the shards; knows no order of units.

Note [The way of a gradient]
It is copied in (cast, divided by the first factor), reduce-scattered over the shards, on a hybrid mesh all-reduced over the
replicas, and landed (multiplied by the second factor, cast, added to what is there). What ranks say about who has a gradient at
all goes the same way.

Note [One division]
Gradients are divided by all ranks that they are summed over, by the first factor before the first hop and by the second one
after the last: nothing is divided in between. A reduce-scatter multiplies what it writes; what an all-reduce has summed is
multiplied afterwards. Only where a factor rounds nothing, and the communicator reads what it sends anyway, it multiplies what
goes into the last hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from composable.device.collectives import Communicator, ReducePart, TagSequence
from composable.device.flat_parameters import FlatParameters
from composable.device.host_home import wait_for_traffic
from composable.device.parameter_forms import gradient_like
from composable.device.private import gradient_hooks
from composable.device.sharded_gradients import GradientRows, GradientShards, landed_in
from composable.device.user_hooks import hooked, with_hooks
from composable.plan.layout import plan_reduction
from composable.plan.scaling import scaling_of
from composable.runtime.hooked_replicas import HookedReplicas
from composable.runtime.hop import Hop


class Reduction:
    """Reduces one `FlatParameters`' gradients. `launch` and `finish` alternate; with replicas, `all_reduce` comes between.

    Args:
        communicator: of the first hop.
        source: the dtype of the gradients that are launched.
        replicas: of the second hop, if the parameters are not only sharded but replicated, too.
        divisor: what sums are divided by; None for the number of ranks, which makes them means.
        by_hook: in place of `replicas`: their mean is made by a hook of the user's.

    Attributes:
        divided: whether it is launched in two parts, of which `give_back` waits for the first.
        undecided: while gradients that are missing on this rank wait for `decide` to read whether others had them, which these
            are, and what all ranks wrote.
    """

    __slots__ = (
        "_by_hook",
        "_carried",
        "_casts",
        "_dtype",
        "_last_hop",
        "_missing",
        "_over_replicas",
        "_over_shards",
        "_packed",
        "_plan",
        "_reads_freely",
        "_reordered",
        "_rows",
        "_scale",
        "_scaling",
        "_sharded",
        "_shards",
        "_whole",
        "divided",
        "flat",
        "undecided"
    )  # fmt: skip

    def __init__(
        self,
        flat: FlatParameters,
        sharded: Sequence[nn.Parameter],
        communicator: Communicator,
        trainable: Sequence[bool],
        source: torch.dtype,
        replicas: Communicator | None = None,
        like: Callable[[Tensor, Tensor], Tensor] | None = None,
        divisor: float | None = None,
        by_hook: HookedReplicas | None = None,
    ) -> None:
        self.flat = flat
        self._sharded = sharded
        capabilities = communicator.capabilities
        smallest = min(dtype.itemsize for dtype in (flat.dtype, flat.compute_dtype, flat.reduce_dtype))
        self._plan = plan_reduction(
            flat.layout,
            trainable=trainable,
            even_only=capabilities.even_only,
            align=max(1, capabilities.packed_align // smallest),
            divided_numel=-(-capabilities.divided_bytes // flat.reduce_dtype.itemsize),
        )
        self.divided = self._plan.first > 0
        ranks = communicator.size * (1 if replicas is None else replicas.size)
        alone = ranks == 1 and like is None and by_hook is None
        self._rows = None if alone else GradientRows(flat, self._plan, communicator.size, source)
        self._dtype = flat.reduce_dtype
        self._casts = self._dtype != source
        reads = replicas is None or replicas.capabilities.reads_scaled_inputs
        self._scaling = scaling_of(flat.precision.reduce, ranks, divisor=divisor, reads_inputs=reads)
        self._over_shards = Hop(communicator)
        self._over_replicas = None if replicas is None else Hop(replicas)
        self._by_hook = by_hook
        self._last_hop: Hop | HookedReplicas = by_hook or self._over_replicas or self._over_shards
        # What parts of the first hop are multiplied by, and whether the terms may be; see Note [One division].
        last = replicas is None
        self._scale = (1.0 / self._scaling.after, self._scaling.input_factor is not None) if last else (1.0, False)
        self._packed: tuple[ReducePart, ...] = ()  # the message of rows, if there is one
        self._shards = GradientShards(flat, sharded, self._plan, like)
        self._carried: Sequence[Tensor | None] = ()  # shards that go into the second hop, too
        self._missing: list[int] = []
        self._reads_freely = communicator.capabilities.reads_freely
        self.undecided: tuple[list[int], Tensor] | None = None
        self._reordered = [(index, slot.order) for index, slot in enumerate(flat.layout.slots) if slot.order]
        self._whole: list[tuple[int, Tensor]] = []

    def launch(
        self,
        gradients: Sequence[Tensor | None],
        tags: TagSequence,
        label: str,
        carried: Sequence[Tensor | None] = (),
    ) -> None:
        """Start to reduce.

        Args:
            gradients: one per slot, of the unsharded parameter's shape; None where autograd gave none.
            carried: means over the shards from earlier backwards, to be averaged over the replicas with this one's.
        """
        self._carried = carried
        if self._by_hook is not None:
            self._by_hook.shard_tags = tags
        rows = self._rows
        if rows is None:
            self.keep(gradients)
            return
        if self._reordered:
            gradients = list(gradients)
            for index, order in self._reordered:
                gradient = gradients[index]
                gradients[index] = None if gradient is None else gradient.permute(order)
        if self._scaling.before != 1.0:
            gradients = [None if g is None else g / self._scaling.before for g in gradients]
        by_rows = bool(self._plan.flagged) and not self._plan.direct
        if by_rows:  # what sums land in gets memory when gradients have given theirs back
            rows.buffer.allocate()
            self._missing = rows.copy_in(gradients)
            del gradients
        self._shards.refresh()
        if self._plan.flagged and (not self._packed or self._packed[0].out is not self._shards.row):
            self._packed = (ReducePart(rows.buffer.tensor, self._plan.row_numel, self._shards.row, *self._scale),)
        if by_rows:
            self._over_shards.reduce_scatter(self._packed, self.flat.pool, label, tags)
            return
        parts = [*self._direct_parts(gradients), *self._packed]
        if self.divided:
            first = self._plan.first
            self._over_shards.reduce_scatter(parts[:first], self.flat.pool, label, tags)
            parts = parts[first:]
        if self._packed:
            rows.buffer.allocate()
            self._missing = rows.copy_in(gradients)
        self._over_shards.reduce_scatter(parts, self.flat.pool, label, tags)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """`launch`, of a rank that is alone."""
        self._whole = [(i, g) for i in self._plan.flagged if (g := gradients[i]) is not None]

    def _direct_parts(self, gradients: Sequence[Tensor | None]) -> list[ReducePart]:
        parts = []
        slots = self.flat.layout.slots
        for index, out in zip(self._plan.direct, self._shards.direct, strict=True):
            slot, gradient = slots[index], gradients[index]
            if gradient is None:
                gradient = torch.zeros(slot.shape, dtype=self._dtype, device=self.flat.device)
            elif self._casts:  # each term, since a sum is computed in the dtype of its terms
                gradient = gradient.to(self._dtype)
            parts.append(ReducePart(gradient.reshape(-1), slot.chunk_numel, out, *self._scale))
        return parts

    def give_back(self) -> None:
        """Wait for what was launched first, and give its messages back; `finish`, or `all_reduce`, is still to come."""
        if self._over_shards.in_flight and self._rows is not None:
            self._over_shards.wait_for_first()
            if not self.divided:
                self._rows.buffer.free()

    def all_reduce(self, tags: TagSequence, label: str) -> None:
        """Wait for the first hop, and launch the second. Nothing happens without a `launch`."""
        if not self._over_shards.in_flight or self._rows is None or self._last_hop is self._over_shards:
            return
        self._over_shards.wait()
        self._rows.buffer.free()
        if self._carried:
            # Means of earlier backwards are brought to the scale of what has landed: sums over the shards, divided before this
            # hop, and multiplied after it if no hop of ours follows. In front of a hook both together make means.
            landed = self._over_shards.communicator.size / self._scaling.before * self._scale[0]
            self._shards.add_shards(self._carried, landed)
            self._carried = ()
        if self._by_hook is not None:
            flags = self._shards.row[self._plan.flags_start :][: len(self._plan.flagged)]
            self._by_hook.launch(landed_in(self._shards, self._plan, self.flat), flags, tags, label)
            return
        assert self._over_replicas is not None
        factor = self._scaling.input_factor
        for sums in self._shards.reduced:
            self._over_replicas.all_reduce(sums, label, None if factor is None else (sums, factor), tags)

    def finish(self) -> list[nn.Parameter]:
        """Wait for the sum and put it on the sharded parameters. Nothing happens without a `launch`.

        Returns:
            The parameters that got a gradient and have hooks which wait for it.
        """
        if self._whole:
            whole, self._whole = self._whole, []
            parameters = [self._sharded[index] for index, _ in whole]
            # To both dtypes, as where there are other ranks.
            gradients = [gradient.to(self._dtype).to(self.flat.gradient_dtype) for _, gradient in whole]
            if self.flat.home is not None:
                gradients = self.flat.home.take(gradients)
                if any(p.grad is not None or gradient_hooks(p) for p in parameters) or with_hooks(parameters):
                    wait_for_traffic()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                _add_gradient(parameter, gradient)
            return with_hooks(parameters)
        if not self._last_hop.in_flight or self._rows is None:
            return []
        self._last_hop.wait()
        if self._over_replicas is not None and self._scaling.input_factor is None and self._scaling.after != 1.0:
            torch._foreach_mul_(self._shards.reduced, 1.0 / self._scaling.after)
        if not self._shards.in_place:
            self._shards.take_from_row()
        delivered: Sequence[int] = self._plan.flagged
        if self._missing:
            flags = self._shards.row[self._plan.flags_start :]
            if self._reads_freely:
                unused = self._unused(self._missing, flags)
                delivered = [i for i in delivered if i not in unused]
            else:
                delivered = [i for i in delivered if i not in self._missing]
                self.undecided = self._missing, flags.clone()
        self._rows.buffer.free()
        if not self._shards.in_place:
            self._shards.close()
        return self._shards.deliver(delivered)

    def _unused(self, missing: Sequence[int], flags: Tensor) -> list[int]:
        assert self._rows is not None
        said = flags.tolist()
        return [i for i in self._rows.flags.unused(missing, said) if not self._shards.takes_in(i)]

    def decide(self) -> list[nn.Parameter]:
        """Read it, and put the means on the parameters that somebody used; returns what `finish` does."""
        if self.undecided is None:
            return []
        (missing, flags), self.undecided = self.undecided, None
        unused = self._unused(missing, flags)
        return self._shards.deliver([i for i in missing if i not in unused])

    @property
    def worth_releasing(self) -> bool:
        """Whether the gradients' memory is large enough for `release` to pay."""
        return self._shards.worth_releasing

    def release(self) -> None:
        """Give the memory of gradients back that nobody holds any more."""
        if not self._over_shards.in_flight and not self._last_hop.in_flight:
            self._shards.release()

    def drop(self) -> None:
        """Forget what is in flight."""
        self._whole = []
        self.undecided = None
        try:
            self._over_shards.abort()
            self._last_hop.abort()
        finally:
            if self._rows is not None:
                self._rows.buffer.free()
                self._shards.close(lost=True)


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Put a whole gradient on a parameter of which this rank holds everything."""
    fresh: Tensor = gradient_like(gradient, parameter)
    if gradient_hooks(parameter):
        fresh = hooked(parameter, fresh)
    parameter.grad = fresh if parameter.grad is None else parameter.grad + fresh
