"""Gradients that are reduced by one message: from autograd's tensors to the gradients of at-rest parameters.

State machine, with everything that may affect it in this file:

| state        | `reduce`                       | `advance`                      | `land` | `drop` |
|--------------|--------------------------------|--------------------------------|--------|--------|
| EMPTY        | REDUCING                       | -                              | -      | EMPTY  |
| REDUCING     | -                              | ALL_REDUCING on a hybrid mesh  | EMPTY  | EMPTY  |
| ALL_REDUCING | -                              | -                              | EMPTY  | EMPTY  |

The first stage sums over the shard dimension (reduce-scatter), the second over the replicate dimension (all-reduce); a bucket has
the stages of its mesh. A gradient is copied in (cast to the reduce dtype, which the sum is computed in), reduced, scaled so that
the sum becomes a mean, and landed (cast to the gradient dtype, added to what is there).

Unused parameters. A rank without a gradient sends zeros and a zero flag, so that launches do not depend on which gradients
arrived. The sum of the flags says whether any rank had one: if none had, `.grad` stays as it was, on all ranks.

Accumulation. What backwards under `no_sync` leave *is* the gradient of the at-rest parameter: a `DTensor` with a `Partial`
placement around this rank's whole gradient, or the plain local gradient of a plain parameter. So users see it, `zero_grad`
clears it, and there is no other copy.

Ranks that ran other backwards. Behind the flags a message says how many backwards were accumulated since the last reduction. A
host compares the ranks when the message lands, since it has nothing to wait for; other devices in debug mode only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from operator import attrgetter, or_
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.comm.base import Work
from composable.comm.ledger import checksum, debug_enabled
from composable.comm.mesh import MeshInfo
from composable.engine.layout import ReduceLayout, Route, Slot, plan_reduction
from composable.engine.param import (
    ManagedParam,
    as_parameter,
    cut,
    gradient_like,
    gradient_of,
    gradient_of_shards,
    is_unreduced,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    set_holds_unreduced,
    trainability,
    unreduced_gradient,
)
from composable.engine.precision import Precision
from composable.errors import PhaseError, RanksDisagreeError
from composable.memory.elastic import ElasticBuffer
from composable.memory.offload import HostHome, wait_for_traffic
from composable.memory.torch_private import (
    as_tensors,
    chunk_cat,
    dtensor_around,
    gradient_hooks,
    hooks_after_accumulation,
    local_of,
)

if TYPE_CHECKING:
    from composable.engine.comm_hooks import HookStage


IN_PLACE_BYTES: Final = 1 << 20  # replicated gradients of this size on a host are reduced where they are: cheaper than a copy
_is_sparse: Final = attrgetter("is_sparse")
# Behind the flags travel the low bits of three numbers that must be equal on all ranks: the checksum of the label, how many
# backwards were accumulated, and how many forwards were run. A bit is sent as two elements, "it is 0" and "it is 1", of which
# each rank sets one. If the sums of both are not zero, two ranks differ; any dtype can tell that. The last element is 1 on a rank
# whose backward left out forwards; the numbers of forwards are compared only if some rank set it.
_BITS: Final = (4, 4, 2)
_NUMBERS: Final = 2 * sum(_BITS) + 1


def _numbers_of(counts: tuple[int, int, int, int]) -> list[float]:
    pairs = [
        float(count >> bit & 1 == value)
        for count, bits in zip(counts, _BITS, strict=False)
        for bit in range(bits)
        for value in (0, 1)
    ]
    return [*pairs, counts[-1]]


def _agree(sums: Sequence[float]) -> bool:
    """Whether all ranks sent the same numbers."""
    label, held, forwards = _BITS
    first = 2 * (label + held)
    return sums[:first].count(0.0) == label + held and (not sums[-1] or sums[first:-1].count(0.0) == forwards)


class BucketState(enum.Enum):
    """Where the gradients of a bucket are."""

    EMPTY = "nothing is in flight"
    REDUCING = "the first stage is in flight"
    ALL_REDUCING = "the all-reduce of a hybrid mesh is in flight"


def division_factors(dtype: torch.dtype, divisor: float) -> tuple[float, float]:
    """What gradients are divided by before and after their sum; the product is `divisor`.

    float16 overflows and underflows early: it is divided by about the square root before the sum, and by the rest after it.

    Example:
        >>> division_factors(torch.float16, 8), division_factors(torch.float32, 8)
        ((4.0, 2.0), (1.0, 8.0))
    """
    if dtype is not torch.float16 or divisor < 1.0:
        return 1.0, float(divisor)
    before = 2.0 ** math.floor((math.log2(divisor) + 1.0) / 2)
    while before > 1.0 and divisor % before and before * before > divisor:
        before /= 2
    return before, divisor / before


class GradBucket:
    """See the top of this file.

    Args:
        members: parameters with equal precision, device and mesh, and their slots.
        factor: what gradients are multiplied by as they come (`grad_reduce`), so that their mean is what was asked for.
        home: where gradients rest under CPU offload.

    Attributes:
        in_place: autograd accumulates on the very parameters that users see: what is there already is part of the gradient.
        trainable, trains: which of its parameters get a gradient; whether any does.
        held: the backwards whose gradients wait to be reduced.
        forwards: how many there were since the last backward, and 1 if this one leaves some out; set on a root's last bucket only.
        first_stage, second_stage: communication hooks in place of the collectives, see `composable.engine.comm_hooks`.
    """

    def __init__(
        self,
        members: Sequence[tuple[ManagedParam, Slot]],
        precision: Precision,
        device: torch.device,
        mesh_info: MeshInfo,
        *,
        factor: float = 1.0,
        home: HostHome | None = None,
    ) -> None:
        self.params = tuple(param for param, _ in members)
        self.slots = tuple(slot for _, slot in members)
        self.precision = precision
        self.device = device
        self.mesh_info = mesh_info
        self.state = BucketState.EMPTY
        self.first_stage: HookStage | None = None
        self.second_stage: HookStage | None = None
        self.held = 0
        self.forwards = (0, 0)
        self.label = "gradient reduction"
        self.at_rest = tuple(param.at_rest for param in self.params)
        self.compute = tuple(param.compute for param in self.params)
        self.in_place = all(map(lambda a, b: a is b, self.at_rest, self.compute))
        # What is accumulated on users' own parameters is a plain local gradient, which is marked; others say so by `Partial`.
        self._marks = all(param.at_rest is param.own for param in self.params)
        self._factor = 1.0 if self.in_place else factor  # in place, a tensor hook of the unit multiplies what arrives
        self.home = home
        self.shards = mesh_info.shard if mesh_info.shard.size > 1 else None
        self._replicas = mesh_info.replicate
        ranks = mesh_info.shard.size * (1 if self._replicas is None else self._replicas.size)
        self._before, self._after = division_factors(precision.reduce, ranks)
        self._alone = self.shards is None and self._replicas is None
        self._plans: dict[tuple[bool, tuple[bool, ...]], _Plan] = {}
        self._apart: dict[int, Tensor] = {}  # gradients that are reduced where autograd made them
        self._wanted: tuple[bool, ...] = ()  # which parameters trained when gradients were accumulated
        self._work: Work | None = None
        self._flat: Tensor | None = None
        self._missing: Sequence[int] = ()
        self._compares = debug_enabled() or not mesh_info.all.traits.on_stream
        self._counts = (0, 0, 0, 0)  # that the message says
        self._undecided: list[tuple[_Plan, list[int], Tensor, Tensor]] = []
        self._hold_shards = False
        self._hooks_wait = False  # under no_sync, where gradients land at once (one rank): post-accumulate hooks wait
        self._unhooked: dict[int, None] = {}  # parameters whose hooks wait
        self._means = False  # the first stage makes means over the shard dimension, in place of sums
        self._earlier: list[Tensor | None] = []  # in place, the gradients that were there before this backward
        self._absent: Sequence[int] = ()  # in place, those that no backward since the last reduction brought
        self._carried: list[tuple[int, Tensor]] = []  # shards of `no_sync(level="replicate")`, added before the second stage
        self.follow()

    def follow(self) -> None:
        """Parameters may have been frozen or unfrozen."""
        self.trainable = tuple(map(trainability, self.at_rest))
        self.trains = any(self.trainable)

    # --- what autograd left -----------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether backward has left gradients here that were neither reduced nor accumulated."""
        return any(gradient is not None for gradient in map(gradient_of, self.compute))

    def open(self) -> None:
        """A backward begins."""
        if self.in_place:
            self._earlier = list(map(gradient_of, self.at_rest))

    def _take(self) -> list[Tensor | None]:
        """Take the gradients of this backward off the compute parameters. In place, those that were there before stay."""
        gradients = list(map(gradient_of, self.compute))
        if self.in_place and self._earlier:
            for parameter, gradient, earlier in zip(self.compute, gradients, self._earlier, strict=True):
                if gradient is not earlier:
                    parameter.grad = None
        else:
            for parameter in self.compute:
                parameter.grad = None
        self._earlier = []
        there = [gradient for gradient in gradients if gradient is not None]
        if any(map(_is_sparse, there)):  # `torch.nn.functional.embedding(..., sparse=True)`
            gradients = [None if gradient is None else gradient.to_dense() for gradient in gradients]
        if self._factor != 1.0 and there:
            torch._foreach_mul_(there, self._factor)
        return gradients

    # --- accumulation -----------------------------------------------------------------------------------------------

    def hold(self, absent: Sequence[int] = ()) -> None:
        """Add this backward's gradients to what is accumulated on the at-rest parameters (`no_sync`).

        Args:
            absent: in place, indices of parameters that this backward brought no gradient for.
        """
        if self._alone:
            self._hooks_wait = True
            self._land_alone()
            return
        if not self.trains:
            return
        first = not self.held
        self._absent = [index for index in absent if first or index in self._absent]
        self.held += 1
        self._wanted = tuple(map(or_, self._wanted or self.trainable, self.trainable))
        if self._marks:
            self._hold_marked(first)
            return
        for index, gradient in enumerate(self._take()):
            at_rest = self.at_rest[index]
            before = at_rest.grad
            reduced = before is not None and not is_unreduced(before)
            if gradient is None and not (reduced and self.trainable[index]):
                continue
            if reduced:
                self._refuse_hooks_twice(index)
            if gradient is None:
                gradient = torch.zeros_like(self.compute[index])
            if before is None:
                at_rest.grad = unreduced_gradient(gradient.to(self.precision.gradient), at_rest)
            elif _is_whole(before):
                local_of(before).add_(gradient)
            else:
                # `before` is a mean already, cut into shards. Each rank adds `ranks` times its own shard to its own gradient: the
                # later mean divides by `ranks`, so `before` is in it once. Ranks without a gradient must do so, too.
                whole = gradient.to(self.precision.gradient)
                ranks = 1 if self.slots[index].route is Route.WHOLE else self.slots[index].num_shards
                cut(whole, self.slots[index], self.mesh_info.shard.rank).add_(local_of(before).to(whole.device), alpha=ranks)  # type: ignore[arg-type]
                at_rest.grad = unreduced_gradient(whole, at_rest)

    def _hold_marked(self, first: bool) -> None:
        gradients = [None] * len(self.at_rest) if self.in_place else self._take()  # in place autograd has added them
        for index, (at_rest, gradient) in enumerate(zip(self.at_rest, gradients, strict=True)):
            held = at_rest.grad
            if gradient is not None:
                if held is not None and first:
                    self._refuse_hooks_twice(index)
                at_rest.grad = gradient.to(self.precision.gradient) if held is None else held.add_(gradient)
            if first:
                set_holds_unreduced(at_rest, holds=True)

    def _refuse_hooks_twice(self, index: int) -> None:
        if gradient_hooks(self.at_rest[index]):
            raise PhaseError(
                f"parameter '{self.params[index].fqn}' has a reduced gradient, for which its tensor hooks were called; under "
                "no_sync more is added to it, and they would be called again for all of it. Call zero_grad() before the first "
                "backward under no_sync"
            )

    def _hold_no_more(self) -> None:
        if self.held and self._marks:
            for at_rest in self.at_rest:
                set_holds_unreduced(at_rest, holds=False)
        self.held, self._wanted = 0, ()

    def _take_held(self, *, shards: bool) -> list[Tensor | None]:
        """This backward's gradients together with what was accumulated; `shards`: also what is reduced over that dimension."""
        gradients = self._take()
        if not self.held or self.in_place:
            return gradients
        for index, at_rest in enumerate(self.at_rest):
            held = at_rest.grad
            if held is None or not (self._wanted[index] if self._marks else is_unreduced(held)):
                continue
            if self._marks or _is_whole(held):
                fresh, local = gradients[index], held if self._marks else local_of(held)  # type: ignore[arg-type]
                gradients[index] = local if fresh is None else local.add_(fresh)
            elif shards:
                self._carried.append((index, local_of(held)))  # type: ignore[arg-type]
            else:
                continue
            at_rest.grad = None
        return [None if gradient is None else gradient.to(self.precision.gradient) for gradient in gradients]

    # --- the message ------------------------------------------------------------------------------------------------

    def _plan_of(self, trainable: tuple[bool, ...]) -> _Plan:
        key = self.first_stage is None, trainable  # a hook gets all gradients in one tensor
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(self, trainable)
        return plan

    def reduce(self, absent: Sequence[int] = (), *, shards_only: bool = False) -> None:
        """Launch the reduction of what is here. All ranks call it at the same point of their program.

        Args:
            absent: as for `hold`.
            shards_only: reduce over the shard dimension only, and accumulate the result (`no_sync(level="replicate")`).
        """
        assert self.state is BucketState.EMPTY
        if not self.trains and not self.held:
            return
        if shards_only and self.shards is None:
            self.hold()
            return
        self._hooks_wait = shards_only and self._replicas is None
        if self._alone:
            self.held = 0
            self._land_alone()
            return
        shards_only = shards_only and self._replicas is not None
        self._hold_shards = shards_only
        trainable = tuple(map(or_, self._wanted, self.trainable)) if self._wanted else self.trainable
        self._absent = [index for index in absent if not self.held or index in self._absent]
        if self._compares:
            self._counts = (checksum(self.label), self.held, *self.forwards)
        gradients = self._take_held(shards=not shards_only)
        if shards_only:
            self._wanted, self.held = trainable, self.held + 1
        else:
            self._hold_no_more()
        plan = self._plan_of(trainable)
        if self._before != 1.0 and self.first_stage is None:
            gradients = [None if gradient is None else gradient / self._before for gradient in gradients]
        self.state = BucketState.REDUCING
        self._launch(plan, gradients)

    def _launch(self, plan: _Plan, gradients: list[Tensor | None]) -> None:
        layout, dtype = plan.layout, self.precision.reduce
        self._plan = plan
        carried = [index for index, _ in self._carried]
        self._missing = [index for index in layout.trainable if gradients[index] is None or index in self._absent]
        flat = torch.empty(layout.numel, dtype=dtype, device=self.device)
        unused = [index for index in self._missing if index not in carried]
        self._means = self._hold_shards or self.first_stage is not None or self.second_stage is not None
        if self.first_stage is not None:
            self._flat = flat.zero_()  # the hook does not write to the padding
            plan.put_flags(unused, self._counts, flat)
            terms = [
                torch.zeros_like(self.compute[index], dtype=dtype) if (term := gradients[index]) is None else term.to(dtype)
                for index in layout.trainable
            ]
            into = plan.views(flat, layout.trainable)
            self._work = self.first_stage.launch(layout.trainable, terms, into, plan.flags_of(flat), self.label)
            return
        if self.shards is None:
            plan.copy_in(gradients, unused, self._counts, flat.view(1, -1))
            self._flat = flat
            self._apart = {index: self._whole_gradient(index, gradients[index]) for index in plan.apart}
            apart = [g.permute(self.slots[i].order) if self.slots[i].order else g for i, g in self._apart.items()]
            assert self._replicas is not None
            self._work = self._replicas.all_reduce([*apart, flat], self.label, 1.0 / self._after)
            return
        pairs, kept = [], []
        for index, start in layout.direct:
            slot, gradient = self.slots[index], gradients[index]
            if gradient is None:
                gradient = torch.zeros(slot.shape, dtype=dtype, device=self.device)
            elif slot.order:
                gradient = gradient.permute(slot.order)
            kept.append(gradient.to(dtype).reshape(-1))  # cast each term: a sum is computed in the dtype of its terms
            pairs.append((flat[start : start + slot.chunk_numel], kept[-1]))
        message = plan.message
        message.allocate()
        plan.copy_in(gradients, unused, self._counts, message.tensor.data.view(self.shards.size, -1))
        pairs.append((flat[layout.row_start :], message.tensor.data))
        self._flat = flat
        scale = 1.0
        if self._replicas is None:
            scale = 1.0 / self._after
        elif self._means:
            scale = self._before / self.shards.size
        self._work = self.shards.reduce_scatter(pairs, self.label, scale)

    def _whole_gradient(self, index: int, gradient: Tensor | None) -> Tensor:
        """A gradient that is reduced without a copy into the message: dense, in the memory order of its parameter."""
        slot = self.slots[index]
        if gradient is None:
            return as_parameter(torch.zeros(slot.shape, dtype=self.precision.reduce, device=self.device), slot)
        if slot.order:
            return as_parameter(gradient.permute(slot.order).contiguous(), slot)
        return gradient.contiguous()

    def advance(self) -> bool:
        """On a hybrid mesh: wait for the first stage and launch the second. Returns whether there is one."""
        if self.state is not BucketState.REDUCING or self._replicas is None or self.shards is None or self._hold_shards:
            return False
        self._wait()
        flat = self._flat
        assert flat is not None
        if self._carried:
            # Means over the shard dimension of earlier backwards, brought to the scale of the first stage's result.
            factor = 1.0 if self._means else self.shards.size / self._before
            for index, shard in self._carried:
                start, numel, _, _ = self._plan.places[index]
                ordered = shard.permute(self.slots[index].order) if self.slots[index].order else shard
                flat[start : start + numel].add_(ordered.reshape(-1).to(flat.device), alpha=factor)
            self._carried = []
        self.state = BucketState.ALL_REDUCING
        label = f"{self.label} over replicas"
        if self.second_stage is not None:
            indices = [index for index in self._plan.layout.trainable if self._plan.places[index][1]]
            shards = self._plan.views(flat, indices)
            self._work = self.second_stage.launch(indices, shards, shards, self._plan.flags_of(flat), label)
        else:
            scale = 1.0 / (self._replicas.size if self._means else self._after)
            self._work = self._replicas.all_reduce([flat], label, scale)
        return True

    def _wait(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        finally:
            if self.shards is not None and self._flat is not None:
                self._plan.message.free()

    # --- landing ----------------------------------------------------------------------------------------------------

    def land(self) -> None:
        """Wait for the reduction and put the gradients on the at-rest parameters."""
        if self.state is BucketState.EMPTY:
            return
        self.advance()
        plan, missing = self._plan, self._missing
        delivered: Sequence[int] = plan.layout.trainable
        try:
            self._wait()
            assert self._flat is not None
            flags = plan.flags_of(self._flat)
            said = flags.tolist() if self._compares else []
            if said and not _agree(said[len(delivered) :]):
                self._refuse_ranks()
        except BaseException:
            self.drop()
            raise
        self.state = BucketState.EMPTY
        flat, self._flat = self._flat, None
        if missing:
            if self._hold_shards:
                delivered = [
                    index
                    for index, flag in zip(delivered, flags, strict=False)
                    if index not in missing or self.at_rest[index].grad is not None or bool(flag)
                ]
            elif self.mesh_info.all.traits.on_stream:
                # To read a flag would make the host wait for the device in the middle of backward.
                delivered = [index for index in delivered if index not in missing]
                self._undecided.append((plan, list(missing), flags.clone(), flat))
            else:
                used = dict(zip(delivered, said, strict=False))
                delivered = [index for index in delivered if index not in missing or used[index]]
        self._deliver(plan, flat, delivered)

    def decide(self) -> None:
        """At the end of a backward: read the flags that `land` did not wait for."""
        undecided, self._undecided = self._undecided, []
        for plan, missing, flags, flat in undecided:
            used = dict(zip(plan.layout.trainable, flags.tolist(), strict=False))
            self._deliver(plan, flat, [index for index in missing if used[index]])

    def _refuse_ranks(self) -> None:
        comm = self.shards if self._hold_shards and self.shards is not None else self.mesh_info.all
        said = []
        mine = self.label, *self._counts[1:]
        for rank, counts in enumerate(comm.all_gather_objects(mine, "exchange of what the ranks reduce")):
            label, held, forwards, incomplete = counts
            ran = f" and ran {forwards} forwards{', not all with a backward' * incomplete}" if forwards else ""
            said.append(f"rank {rank} accumulated {held} backwards{ran}{'' if label == self.label else f' before its {label}'}")
        raise RanksDisagreeError(
            f"{self.label}: the ranks brought gradients of different units or steps. Before it, {'; '.join(said)}. Every rank must run the "
            "same backwards, and the same of them under no_sync; forwards that are not trained on belong under torch.no_grad() "
            "or in evaluation mode. These gradients are dropped"
        )

    def _deliver(self, plan: _Plan, flat: Tensor, indices: Sequence[int]) -> None:
        if self.precision.gradient != flat.dtype:
            flat = flat.to(self.precision.gradient)
        if self.home is not None:
            (flat,) = self.home.take([flat])
        apart, self._apart = self._apart, {}
        if apart:
            fresh = [apart[index] if index in apart else plan.views(flat, (index,))[0] for index in indices]
        else:
            fresh = plan.views(flat, indices)
        if self._hold_shards:
            self._hold_on(indices, fresh)
        elif plan.specs:
            self._put(indices, [dtensor_around(t, plan.specs[i], plan.stand_in) for i, t in zip(indices, fresh, strict=True)])
        else:
            self._put(indices, [gradient_like(t, self.at_rest[i]) for i, t in zip(indices, fresh, strict=True)])

    def _put(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Add reduced gradients to those of the at-rest parameters, and call hooks of users."""
        parameters = [self.at_rest[index] for index in indices]
        with as_tensors():
            grads = list(map(gradient_of, parameters))
            hooked = any(map(gradient_hooks, parameters)) and not self.in_place
            after = any(getattr(hooks, "of_users", hooks) for hooks in map(hooks_after_accumulation, parameters))
        if self.home is not None and (hooked or after or any(grad is not None for grad in grads)):
            wait_for_traffic()
        for parameter, grad, gradient in zip(parameters, grads, gradients, strict=True):
            if hooked and gradient_hooks(parameter):
                gradient = run_gradient_hooks(parameter, gradient)
                grad = parameter.grad  # a hook may have changed it
            if grad is None:
                parameter.grad = gradient
            elif self.in_place:
                grad.copy_(gradient)  # it was part of the sum
            else:
                _add(parameter, grad, gradient)
        if self._hooks_wait and after:
            self._unhooked.update(dict.fromkeys(indices))
            self.held = max(self.held, 1)
        elif not self._hooks_wait and (after or self._unhooked):
            late, self._unhooked = self._unhooked, {}
            for index in dict.fromkeys([*indices, *late]):
                run_post_accumulate_hooks(self.at_rest[index])

    def _hold_on(self, indices: Sequence[int], fresh: Sequence[Tensor]) -> None:
        """Accumulate gradients that are reduced over the shard dimension only."""
        for index, local in zip(indices, fresh, strict=True):
            at_rest = self.at_rest[index]
            before = at_rest.grad
            if isinstance(before, DTensor) and is_unreduced(before):
                local_of(before).add_(local)
                continue
            if isinstance(before, DTensor):  # a mean, the same on every replica
                self._refuse_hooks_twice(index)
                local = local + local_of(before)
            at_rest.grad = gradient_of_shards(local, at_rest, self.mesh_info.shard_dim)

    def _land_alone(self) -> None:
        """One rank alone: nothing is summed. Gradients are cast as where there are other ranks."""
        there = [(index, gradient) for index, gradient in enumerate(self._take()) if gradient is not None]
        fresh = [gradient.to(self.precision.reduce).to(self.precision.gradient) for _, gradient in there]
        if self.home is not None:
            fresh = self.home.take(fresh)
        indices = [index for index, _ in there]
        self._put(indices, [gradient_like(t, self.at_rest[i]) for i, t in zip(indices, fresh, strict=True)])

    # --- giving up --------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """A step is lost: wait for what is in flight, and forget unreduced and accumulated gradients."""
        try:
            if self._work is not None:
                self._wait()
        finally:
            lost = self.held or self.state is not BucketState.EMPTY
            self._work = self._flat = None
            self.state = BucketState.EMPTY
            self._earlier = []
            self._undecided, self._carried, self._apart, self._unhooked = [], [], {}, {}
            for parameter in self.compute if not self.in_place else ():
                parameter.grad = None
            for parameter in self.at_rest:
                if is_unreduced(parameter.grad) or (lost and self._marks and not self._alone):
                    parameter.grad = None
            self._hold_no_more()


def _is_whole(gradient: Tensor | None) -> TypeGuard[DTensor]:
    """Whether `gradient` was accumulated before any stage of its reduction."""
    return isinstance(gradient, DTensor) and all(placement.is_partial() for placement in gradient.placements)


def _add(parameter: nn.Parameter, grad: Tensor, more: Tensor) -> None:
    if isinstance(grad, DTensor) and isinstance(more, DTensor):
        if grad.placements != more.placements:  # of a loss that was made from the at-rest parameter itself
            parameter.grad = grad = grad.redistribute(placements=more.placements)
        local_of(grad).add_(local_of(more))
    else:
        grad.add_(more)


class _Plan:
    """How a bucket's gradients travel while a given set of parameters trains.

    Attributes:
        places: for each trainable parameter, start and length of its sum in the flat gradient buffer, its shape and strides.
        message: the rows of the reduce-scatter, one per rank.
        apart: parameters whose gradients are reduced where autograd made them.
    """

    def __init__(self, bucket: GradBucket, trainable: tuple[bool, ...]) -> None:
        traits, precision = bucket.mesh_info.all.traits, bucket.precision
        smallest = min(precision.reduce.itemsize, precision.gradient.itemsize)
        # Large replicated gradients on a host are reduced in place, without a copy into the message.
        uncast = precision.compute == precision.reduce == precision.gradient
        in_place = uncast and bucket.shards is None and bucket.first_stage is None and not traits.on_stream
        self.apart = tuple(
            index
            for index, slot in enumerate(bucket.slots)
            if in_place and trainable[index] and slot.numel * precision.reduce.itemsize >= IN_PLACE_BYTES
        )
        layout: ReduceLayout = plan_reduction(
            bucket.slots,
            trainable,
            align=max(1, 64 // smallest),
            packed_align=max(1, traits.align // smallest),
            numbers=_NUMBERS,
            apart=self.apart,
        )
        self.layout = layout
        self._slots = bucket.slots
        self._ranks = ranks = 1 if bucket.shards is None else bucket.shards.size
        self._device = bucket.device
        begins = dict(layout.direct) | {index: layout.row_start + start for index, start, _ in layout.columns}
        self.places: dict[int, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {}
        for index in layout.trainable:
            slot = bucket.slots[index]
            local = as_parameter(
                torch.empty(slot.local_shape(bucket.mesh_info.shard.rank), dtype=torch.float32, device="meta"), slot
            )
            self.places[index] = (begins.get(index, 0), local.numel(), tuple(local.shape), tuple(local.stride()))
        # Gradients that are wrapped as their parameters are can be wrapped quickly.
        self.specs: dict[int, Any] = {}
        self.stand_in = torch.empty(0, dtype=precision.gradient, device=bucket.device)
        alike = bucket.home is None and precision.gradient == precision.original
        if alike and all(isinstance(bucket.at_rest[index], DTensor) for index in layout.trainable):
            self.specs = {index: getattr(bucket.at_rest[index], "_spec", None) for index in layout.trainable}
        self.message = ElasticBuffer(ranks * layout.row_numel if ranks > 1 else 0, precision.reduce, bucket.device)
        # Which columns can be handed to `chunk_cat` as autograd made them.
        self._plain = all(
            slot.dim == 0 and not slot.order and slot.shape and (slot.route is not Route.WHOLE or ranks == 1)
            for slot in (bucket.slots[index] for index, _, _ in layout.columns)
        )
        # Zeros between two columns that start at multiples of the alignment.
        ends = [start + numel for _, start, numel in layout.columns]
        starts = [*(start for _, start, _ in layout.columns), layout.flags_start]
        self._gaps = [after - end for end, after in zip(ends, starts[1:], strict=True)]
        self._tail = layout.row_numel - layout.flags_start - len(layout.trainable) - _NUMBERS
        self._rows: dict[tuple[object, ...], Tensor] = {}
        self._zeros: dict[torch.dtype, list[Tensor | None]] = {}

    def _flags_in(self, dtype: torch.dtype, counts: tuple[int, int, int, int]) -> Tensor:
        """Flags that are all one, with the numbers and the padding behind them, in each row."""
        key = dtype, *(count % (1 << bits) for count, bits in zip(counts, (*_BITS, 1), strict=True))
        found = self._rows.get(key)
        if found is None:
            with torch.inference_mode(False):
                row = torch.tensor(self._flags((), counts), dtype=dtype).to(self._device, non_blocking=True)
                found = row.repeat(self._ranks, 1)
            self._rows[key] = found
        return found

    def _gaps_in(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The zeros behind each column."""
        found = self._zeros.get(dtype)
        if found is None:
            with torch.inference_mode(False):
                found = [torch.zeros(self._ranks, gap, dtype=dtype, device=self._device) if gap else None for gap in self._gaps]
            self._zeros[dtype] = found
        return found

    def _flags(self, unused: Sequence[int], counts: tuple[int, int, int, int]) -> list[float]:
        flags = [0.0 if index in unused else 1.0 for index in self.layout.trainable]
        return [*flags, *_numbers_of(counts), *[1.0] * self._tail]

    def views(self, flat: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """This rank's shards of these parameters' gradients, in a flat gradient buffer."""
        places, offset = self.places, flat.storage_offset()
        return [flat.as_strided(places[index][2], places[index][3], offset + places[index][0]) for index in indices]

    def flags_of(self, flat: Tensor) -> Tensor:
        """The flags in a flat gradient buffer, one for each trainable parameter, and the numbers behind them."""
        return flat[self.layout.row_start + self.layout.flags_start :][: len(self.layout.trainable) + _NUMBERS]

    def put_flags(self, unused: Sequence[int], counts: tuple[int, int, int, int], flat: Tensor) -> None:
        """Write the flags where no row of a message is copied in."""
        flags = self.flags_of(flat)
        flags.copy_(torch.tensor(self._flags(unused, counts)[: flags.numel()], dtype=flat.dtype), non_blocking=True)

    def copy_in(
        self, gradients: Sequence[Tensor | None], unused: Sequence[int], counts: tuple[int, int, int, int], rows: Tensor
    ) -> None:
        """Fill the rows, one per rank, with that rank's chunk of every gradient, cast to the dtype of `rows`, and the flags."""
        source = next((gradient.dtype for gradient in gradients if gradient is not None), rows.dtype)
        if unused:
            flags = torch.tensor(self._flags(unused, counts), dtype=source).to(self._device, non_blocking=True)
            flags = flags.expand(self._ranks, -1)
        else:
            flags = self._flags_in(source, counts)
        pieces: list[Tensor] = []
        for (index, _, _), gap in zip(self.layout.columns, self._gaps_in(source), strict=True):
            gradient, slot = gradients[index], self._slots[index]
            if gradient is None:
                gradient = torch.zeros(slot.shape, dtype=source, device=self._device)
            elif slot.order:
                gradient = gradient.permute(slot.order)
            pieces.append(gradient if self._plain else self._as_rows(slot, gradient))
            if gap is not None:
                pieces.append(gap)
        pieces.append(flags)
        chunk_cat(pieces, 0, self._ranks, out=rows)

    def _as_rows(self, slot: Slot, gradient: Tensor) -> Tensor:
        """A gradient in memory order as something that `chunk_cat` cuts into a row per rank."""
        ranks = self._ranks
        if slot.route is Route.WHOLE:
            return gradient.reshape(1, -1).expand(ranks, -1) if ranks > 1 else gradient.reshape(-1)
        if slot.dim == 0:
            return gradient
        if slot.even:
            return gradient.reshape(slot.outer, ranks, -1).transpose(0, 1).reshape(ranks, -1)
        rows = gradient.new_zeros(ranks, slot.chunk_numel)
        for rank in range(ranks):
            start, length = slot.extent(rank)
            if length:
                rows[rank, : slot.local_numel(rank)] = gradient.narrow(slot.dim, start, length).reshape(-1)
        return rows
