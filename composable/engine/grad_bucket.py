"""The gradients of parameters that share a message: from autograd's tensors to the gradients of
at-rest parameters.

`reduce` takes them off the compute parameters and launches a `Reduction`; `land` waits for it and
puts the sums on the at-rest parameters, cast to the gradient dtype and added to what is there. If
no rank had a gradient of a parameter, `.grad` stays as it was, on all ranks.

Accumulation. What backwards under `no_sync` leave *is* the gradient of the at-rest parameter: a
`DTensor` with a `Partial` placement around this rank's whole gradient, or the plain local gradient
of a plain parameter. So users see it, `zero_grad` clears it, and there is no other copy.

Memory. A bucket is *in place* if autograd accumulates on the very parameters that users see.

| case                             | in place | autograd's gradient | memory of what lands         |
|----------------------------------|----------|---------------------|------------------------------|
| shards, a cast, `replicate` in a | no       | is taken off        | views of the flat buffer,    |
| tree with shards                 |          |                     | which own it together        |
| `replicate` alone                | yes      | is taken off        | as above                     |
| ... a gradient was there before  | yes      | stays, as a part of | its own: the sum is copied   |
| this backward                    |          | the sum             | to it                        |
| replicated, large, on a host     | either   | is reduced where it | its own, as autograd made it |
| (`Plan.apart`)                   |          | is                  |                              |
| `gradient_as_bucket_view`        | yes      | is a view of        | the same view; the plan owns |
|                                  |          | `Plan.kept`         | it from step to step         |
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_, is_not, or_
from typing import Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable.comm.base import scale_sums
from composable.comm.mesh_info import MeshInfo
from composable.engine.layout import Route, Slot
from composable.engine.param import (
    ManagedParam,
    cut,
    gradient_like,
    gradient_of,
    gradient_of_shards,
    is_unreduced,
    set_holds_unreduced,
    trainability,
    unreduced_gradient,
)
from composable.engine.param_hooks import (
    post_accumulate_hooks,
    run_gradient_hooks,
    run_post_accumulate_hooks,
)
from composable.engine.precision import Precision
from composable.engine.reduction import Counts, Reducer, Reduction, counts_of
from composable.engine.tensor_parallel import ModelSpec, local_gradients, redistributed
from composable.errors import PhaseError
from composable.memory.offload import HostHome, wait_for_traffic
from composable.memory.torch_private import (
    as_tensors,
    dtensors_around,
    gradient_hooks,
    local_of,
    locals_of,
    placed_alike,
)

_NO_COUNTS: Final = Counts()


class SyncMode(enum.Enum):
    """What happens to a unit's gradients when backward leaves it."""

    REDUCE = "they are reduced, with all that was accumulated"
    HOLD = "they are accumulated on their rank (no_sync)"
    HOLD_SHARDS = (
        "they are reduced over the shard dimension and accumulated (no_sync(level='replicate'))"
    )


class Accumulation:
    """The scopes of `no_sync` that a unit is in; the innermost decides.

    Attributes:
        now: what a backward that runs now does.
    """

    __slots__ = ("_scopes", "now")

    def __init__(self) -> None:
        self.now = SyncMode.REDUCE
        self._scopes: dict[object, SyncMode] = {}

    def open_scope(self, scope: object, mode: SyncMode) -> None:
        self._scopes[scope] = self.now = mode

    def close_scope(self, scope: object) -> None:
        self._scopes.pop(scope, None)
        self.now = next(reversed(self._scopes.values()), SyncMode.REDUCE)


@dataclass(slots=True)
class Accumulated:
    """What is known of the gradients that wait to be reduced; dropped when they are.

    Attributes:
        backwards: that brought them.
        wanted: which parameters trained in any of these.
        absent: in place, indices of parameters that none of these brought.
    """

    backwards: int = 0
    wanted: tuple[bool, ...] = ()
    absent: Sequence[int] = ()


class GradBucket:
    """See the top of this file.

    Args:
        members: parameters with equal precision, device and mesh, and their slots.
        factor: what gradients are multiplied by as they come (`grad_reduce`), so that their mean is
            what was asked for.
        keeps: gradients live in the bucket from step to step (`gradient_as_bucket_view`).

    Attributes:
        reducer: sends the message.
        reduction: the message in flight; None if there is none.
        home: where gradients rest under CPU offload.
        in_place: autograd accumulates on the very parameters that users see: what is there already
            is part of the gradient.
        trainable, trains: which of its parameters get a gradient; whether any does.
        accumulated: gradients that wait to be reduced.
        forwards: a pair: how many forwards there were since the last backward, and 1 if this
            backward leaves some of them out. Set on a root's last bucket only.
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
        keeps: bool = False,
    ) -> None:
        self.params = tuple(param for param, _ in members)
        self.at_rest = tuple(param.at_rest for param in self.params)
        self.compute = tuple(param.compute for param in self.params)
        slots = [slot for _, slot in members]
        self.models = tuple(param.info.model for param in self.params)
        self.in_place = all(map(is_, self.at_rest, self.compute))
        # What is added to a gradient that is there must not be in its memory already.
        keeps = keeps and self.in_place and precision.reduce == precision.gradient
        keeps = keeps and not any(self.models)
        self.reducer = Reducer(
            self.at_rest, slots, precision, device, mesh_info,
            offloaded=home is not None, keeps=keeps,
        )  # fmt: skip
        self.reduction: Reduction | None = None
        self.home = home
        self.accumulated = Accumulated()
        self.forwards = (0, 0)
        # gradients land as DTensors
        self._wraps = any(isinstance(param, DTensor) for param in self.at_rest)
        # What is accumulated on users' own parameters is a plain local gradient, which is marked;
        # others say so by `Partial`.
        self._marks = all(param.at_rest is param.own for param in self.params)
        # in place, a tensor hook of the unit multiplies what arrives
        self._factor = 1.0 if self.in_place else factor
        # in place, the gradients that were there before this backward
        self._earlier: list[Tensor | None] = []
        # Gradients land, but users' post-accumulate hooks wait for the end of no_sync: one rank, or
        # level="replicate" on a mesh without replicas.
        self._hooks_wait = False
        self._unhooked: dict[int, None] = {}  # parameters whose hooks wait
        # Sums that have landed, flags that were not read yet, and of which parameters.
        self._undecided: list[tuple[Reduction, Tensor, list[int]]] = []
        # tables to which users add hooks, see `has_post_accumulate_hooks`
        self._post_accumulate_hooks = list(map(post_accumulate_hooks, self.at_rest))
        self.follow()

    def follow(self) -> None:
        """Parameters may have been frozen or unfrozen."""
        self.trainable = tuple(map(trainability, self.at_rest))
        self.trains = any(self.trainable)

    @property
    def has_post_accumulate_hooks(self) -> bool:
        """Whether users have put such hooks on any of the at-rest parameters."""
        return any(self._post_accumulate_hooks)

    # --- what autograd left ----------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether backward has left gradients here that were neither reduced nor accumulated."""
        return any(map(is_not, map(gradient_of, self.compute), repeat(None)))

    @property
    def lacks_gradients(self) -> bool:
        """Whether backward has not left a gradient for each parameter."""
        return any(map(is_, map(gradient_of, self.compute), repeat(None)))

    def open(self) -> None:
        """A backward begins."""
        if self.in_place:
            self._earlier = list(map(gradient_of, self.at_rest))

    def _take(self, as_they_came: Container[int] = ()) -> list[Tensor | None]:
        """Take the gradients of this backward off the compute parameters. In place, those that were
        there before stay.

        Args:
            as_they_came: indices of tensor-parallel parameters whose gradients keep their
                placements.
        """
        gradients = list(map(gradient_of, self.compute))
        if self.in_place and self._earlier:
            for parameter, gradient, earlier in zip(
                self.compute, gradients, self._earlier, strict=True
            ):
                if gradient is not earlier:
                    parameter.grad = None
        else:
            for parameter in self.compute:
                parameter.grad = None
        self._earlier = []
        if any(self.models):
            gradients = local_gradients(gradients, self.models, as_they_came)
        # `torch.nn.functional.embedding(..., sparse=True)`; None is not sparse
        if any(map(getattr, gradients, repeat("is_sparse"), repeat(False))):
            gradients = [
                None if gradient is None else gradient.to_dense() for gradient in gradients
            ]
            for parameter, gradient in zip(self.compute, gradients, strict=True):
                if parameter.grad is not None:
                    # it stays, and the reduced gradient will be copied to it
                    parameter.grad = gradient
        return gradients if self._factor == 1.0 else self._multiplied(gradients)

    def _multiplied(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of this backward times what `grad_reduce` asks for, in the reduce dtype: in a
        lower one each term of the sum would be rounded.
        """
        dtype = self.reducer.precision.reduce
        multiplied = [None if gradient is None else gradient.to(dtype) for gradient in gradients]
        there = [gradient for gradient in multiplied if gradient is not None]
        if there and self.reducer.mesh_info.all.traits.on_stream:
            torch._foreach_mul_(there, self._factor)
        else:
            scale_sums(there, self._factor)
        return multiplied

    # --- accumulation ----------------------------------------------------------------------------

    def _waiting(self, *, first: bool) -> dict[int, tuple[Placement, ...]]:
        """The gradients of this backward that add up to what is accumulated as they came, `Partial`
        over the user's dimensions (sequence parallel), by index: their placements there.

        Args:
            first: also those of which nothing is accumulated.
        """
        found = {}
        for index, model in enumerate(self.models if any(self.models) else ()):
            if model is None or (self._marks and model.ndim < model.mesh.ndim):
                continue
            held = self.at_rest[index].grad
            kept = model.placements_held(self.compute[index].grad)
            alike = isinstance(held, DTensor) and held.placements[: model.ndim] == kept
            if kept != model.kept and (alike or (first and held is None)):
                found[index] = kept
        return found

    def _settled(self, index: int, held: Tensor) -> Tensor:
        """An accumulated gradient with the user's placements over the user's dimensions."""
        model = self.models[index]
        if model is None or not isinstance(held, DTensor):
            return held
        at_rest = self.at_rest[index]
        if self._marks and isinstance(at_rest, DTensor):
            return redistributed(held, at_rest.placements)
        return redistributed(held, (*model.kept, *held.placements[model.ndim :]))

    def hold(self, absent: Sequence[int] = ()) -> None:
        """Add this backward's gradients to what is accumulated on the at-rest parameters
        (`no_sync`).

        Args:
            absent: in place, indices of parameters that this backward brought no gradient for.
        """
        if self.reducer.is_alone:
            self._hooks_wait = True
            self._land_alone()
            return
        if not self.trains:
            return
        left = self.accumulated
        first = not left.backwards
        left.absent = [index for index in absent if first or index in left.absent]
        left.backwards += 1
        left.wanted = tuple(map(or_, left.wanted or self.trainable, self.trainable))
        if self._marks:
            self._hold_marked(first)
            return
        waiting = self._waiting(first=True)
        for index, gradient in enumerate(self._take(waiting)):
            at_rest = self.at_rest[index]
            before = at_rest.grad
            reduced = before is not None and not is_unreduced(before)
            if gradient is None and not (reduced and self.trainable[index]):
                continue
            if reduced:
                self._refuse_hooks_twice(index)
            if gradient is None:
                (compute,) = locals_of([self.compute[index]])
                gradient = torch.zeros_like(compute)
            model = self.models[index]
            kept = waiting.get(index, () if model is None else model.kept)
            if before is None:
                at_rest.grad = unreduced_gradient(
                    gradient.to(self.reducer.precision.gradient), at_rest, model, kept
                )
            elif _is_whole(before, model):
                if index not in waiting:
                    at_rest.grad = before = self._settled(index, before)
                locals_of([before])[0].add_(gradient)
            else:
                # `before` is this rank's shard of what was reduced earlier. Each rank adds it
                # `ranks` times to its own gradient: the later mean divides by `ranks`, so it counts
                # once. Ranks without a gradient must do so, too.
                whole, slot = (
                    gradient.to(self.reducer.precision.gradient),
                    self.reducer.slots[index],
                )
                ranks = 1 if slot.route is Route.WHOLE else slot.num_shards
                mean = local_of(before).to(whole.device)  # type: ignore[arg-type]
                cut(whole, slot, self.reducer.mesh_info.shard.rank).add_(mean, alpha=ranks)
                at_rest.grad = unreduced_gradient(whole, at_rest, model, kept)

    def _hold_marked(self, first: bool) -> None:
        # in place autograd has added them
        waiting = {} if self.in_place else self._waiting(first=True)
        gradients = [None] * len(self.at_rest) if self.in_place else self._take(waiting)
        for index, (at_rest, gradient) in enumerate(zip(self.at_rest, gradients, strict=True)):
            held = at_rest.grad
            if gradient is not None:
                if held is not None and first:
                    self._refuse_hooks_twice(index)
                if held is None:
                    gradient = gradient.to(self.reducer.precision.gradient)
                    kept = waiting.get(index)
                    at_rest.grad = gradient_like(gradient, at_rest, kept)
                else:
                    if index not in waiting:
                        at_rest.grad = held = self._settled(index, held)
                    locals_of([held])[0].add_(gradient)
            if first:
                set_holds_unreduced(at_rest, holds=True)

    def _refuse_hooks_twice(self, index: int) -> None:
        if gradient_hooks(self.at_rest[index]):
            raise PhaseError(
                f"parameter '{self.params[index].fqn}' has a reduced gradient, for which its tensor"
                " hooks were called; under no_sync more is added to it, and they would be called"
                " again for all of it. Call zero_grad() before the first backward under no_sync"
            )

    def _hold_no_more(self) -> None:
        for at_rest in self.at_rest if self._marks else ():
            set_holds_unreduced(at_rest, holds=False)
        self.accumulated = Accumulated()

    def _take_held(self) -> tuple[list[Tensor | None], list[tuple[int, Tensor]]]:
        """This backward's gradients together with what was accumulated beside them; and what is
        reduced over the shard dimension already.
        """
        waiting = self._waiting(first=False)
        gradients = self._take(waiting)
        carried: list[tuple[int, Tensor]] = []
        for index, at_rest in enumerate(self.at_rest):
            held = at_rest.grad
            if held is None or not (
                self.accumulated.wanted[index] if self._marks else is_unreduced(held)
            ):
                continue
            if self._marks or _is_whole(held, self.models[index]):
                fresh = gradients[index]
                if index not in waiting:
                    held = self._settled(index, held)
                if fresh is not None:
                    locals_of([held])[0].add_(fresh)
                (gradients[index],) = locals_of([self._settled(index, held)])
            else:
                carried.append((index, local_of(held)))  # type: ignore[arg-type]
                continue
            at_rest.grad = None
        return [
            None if gradient is None else gradient.to(self.reducer.precision.gradient)
            for gradient in gradients
        ], carried

    # --- reduction -------------------------------------------------------------------------------

    def reduce(self, absent: Sequence[int] = (), *, shards_only: bool = False) -> None:
        """Launch the reduction of what is here. All ranks call it at the same point of their
        program.

        Args:
            absent: as for `hold`.
            shards_only: reduce over the shard dimension only, and accumulate the result
                (`no_sync(level="replicate")`).
        """
        reducer, left = self.reducer, self.accumulated
        assert self.reduction is None
        if not self.trains and not left.backwards:
            return
        if shards_only and reducer.shard_comm is None:
            self.hold()
            return
        self._hooks_wait = shards_only and reducer.replica_comm is None
        if reducer.is_alone:
            self.accumulated = Accumulated()
            self._land_alone()
            return
        shards_only = shards_only and reducer.replica_comm is not None
        trainable = tuple(map(or_, left.wanted, self.trainable)) if left.wanted else self.trainable
        counts = _NO_COUNTS
        if reducer.compares:
            counts = counts_of(reducer.label, left.backwards, self.forwards)
        carried: Sequence[tuple[int, Tensor]] = ()
        if left.backwards:
            absent = [index for index in absent if index in left.absent]
        if left.backwards and not self.in_place:
            gradients, carried = self._take_held()
        else:
            gradients = self._take()
        if shards_only:
            carried = ()  # what is reduced over the shard dimension stays, and this is added to it
            left.wanted, left.backwards = trainable, left.backwards + 1
        else:
            for index, _ in carried:
                self.at_rest[index].grad = None
            if left.backwards:
                self._hold_no_more()
        plan = reducer.plan_of(trainable)
        self.reduction = Reduction(
            reducer, plan, gradients, counts,
            absent=absent, carried=carried, shards_only=shards_only,
        )  # fmt: skip

    def advance(self) -> bool:
        """On a hybrid mesh: launch the second stage. Returns whether there is one."""
        return self.reduction is not None and self.reduction.advance()

    def land(self) -> None:
        """Wait for the reduction and put the gradients on the at-rest parameters."""
        reduction = self.reduction
        if reduction is None:
            return
        try:
            said = reduction.land()
        except BaseException:
            self.drop()
            raise
        self.reduction = None
        delivered: Sequence[int] = reduction.plan.layout.trainable
        missing = reduction.missing
        if missing and reduction.shards_only:
            flags = zip(delivered, reduction.pieces[reduction.plan.flags_piece], strict=False)
            delivered = [
                index
                for index, flag in flags
                if index not in missing or self.at_rest[index].grad is not None or bool(flag)
            ]
        elif missing and self.reducer.mesh_info.all.traits.on_stream:
            # To read a flag would make the host wait for the device in the middle of backward.
            delivered = [index for index in delivered if index not in missing]
            self._undecided.append(
                (reduction, reduction.pieces[reduction.plan.flags_piece].clone(), missing)
            )
        elif missing:
            used = dict(zip(delivered, said, strict=True))
            delivered = [index for index in delivered if index not in missing or used[index]]
            self._spare(reduction, [index for index in missing if not used[index]])
        self._deliver(reduction, delivered)

    def decide(self) -> None:
        """At the end of a backward: read the flags that `land` did not wait for."""
        undecided, self._undecided = self._undecided, []
        for reduction, flags, missing in undecided:
            used = dict(zip(reduction.plan.layout.trainable, flags.tolist(), strict=False))
            self._spare(reduction, [index for index in missing if not used[index]])
            self._deliver(reduction, [index for index in missing if used[index]])

    def _spare(self, reduction: Reduction, indices: Sequence[int]) -> None:
        """No rank has brought these gradients: those of earlier backwards are as they were."""
        for index in indices:
            gradient = self.at_rest[index].grad
            if gradient is not None and index in reduction.spared:
                gradient.copy_(reduction.spared[index])

    # --- landing ---------------------------------------------------------------------------------

    def _deliver(self, reduction: Reduction, indices: Sequence[int]) -> None:
        flat, dtype, plan = reduction.flat, self.reducer.precision.gradient, reduction.plan
        if dtype != flat.dtype:
            flat = flat.to(dtype)
        if self.home is not None:
            (flat,) = self.home.take([flat])
        fresh = reduction.shards(indices, flat)
        if reduction.shards_only:
            self._hold_on(indices, fresh)
        elif plan.specs:
            everyone = len(indices) == len(plan.specs)
            specs = plan.specs.values() if everyone else [plan.specs[index] for index in indices]
            self._put(indices, dtensors_around(fresh, specs, plan.stand_in))
        elif not self._wraps:
            self._put(indices, fresh)
        else:
            self._put(indices, self._wrapped(indices, fresh))

    def _wrapped(self, indices: Sequence[int], fresh: Sequence[Tensor]) -> list[Tensor]:
        return [gradient_like(t, self.at_rest[i]) for i, t in zip(indices, fresh, strict=True)]

    def _put(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Add reduced gradients to those of the at-rest parameters, and call hooks of users."""
        everyone = len(indices) == len(self.at_rest)
        parameters = self.at_rest if everyone else [self.at_rest[index] for index in indices]
        after = self.has_post_accumulate_hooks
        with as_tensors():
            grads = list(map(gradient_of, parameters))
            hooked = any(map(gradient_hooks, parameters)) and not self.in_place
            merges = hooked or any(map(is_not, grads, repeat(None)))
            if not merges:  # nearly always
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
        if self.home is not None and (merges or after):
            wait_for_traffic()
        if merges:
            self._merge(parameters, grads, gradients, hooked=hooked)
        if self._hooks_wait and after:
            self._unhooked.update(dict.fromkeys(indices))
            self.accumulated.backwards = max(self.accumulated.backwards, 1)
        elif not self._hooks_wait and (after or self._unhooked):
            late, self._unhooked = self._unhooked, {}
            for index in dict.fromkeys([*indices, *late]):
                run_post_accumulate_hooks(self.at_rest[index])

    def _merge(
        self,
        parameters: Sequence[nn.Parameter],
        grads: Sequence[Tensor | None],
        gradients: Sequence[Tensor],
        *,
        hooked: bool,
    ) -> None:
        """Put `gradients` where `grads` are, and ask tensor hooks of users if there are some."""
        for parameter, grad, gradient in zip(parameters, grads, gradients, strict=True):
            if hooked and gradient_hooks(parameter):
                gradient = run_gradient_hooks(parameter, gradient)
                grad = parameter.grad  # a hook may have changed it
            if grad is None or self.reducer.keeps:
                parameter.grad = gradient
            elif self.in_place:  # it was part of the sum
                if placed_alike([grad], [gradient]):
                    grad.copy_(gradient)
                else:
                    parameter.grad = gradient
            else:
                _add(parameter, grad, gradient)

    def _hold_on(self, indices: Sequence[int], fresh: Sequence[Tensor]) -> None:
        """Accumulate gradients that are reduced over the shard dimension only."""
        if self.home is not None and any(self.at_rest[index].grad is not None for index in indices):
            wait_for_traffic()  # the host adds to them
        for index, local in zip(indices, fresh, strict=True):
            at_rest = self.at_rest[index]
            before = at_rest.grad
            if isinstance(before, DTensor) and is_unreduced(before):
                local_of(before).add_(local)
                continue
            if isinstance(before, DTensor):  # a mean, the same on every replica
                self._refuse_hooks_twice(index)
                local = local + local_of(before)
            model, shard_dim = self.models[index], self.reducer.mesh_info.shard_dim
            first = 0 if model is None else model.ndim
            at_rest.grad = gradient_of_shards(local, at_rest, first, first + shard_dim)

    def _land_alone(self) -> None:
        """One rank alone: nothing is summed. Gradients are cast as where there are other ranks."""
        there = [
            (index, gradient) for index, gradient in enumerate(self._take()) if gradient is not None
        ]
        precision = self.reducer.precision
        fresh = [gradient.to(precision.reduce).to(precision.gradient) for _, gradient in there]
        if self.home is not None:
            fresh = self.home.take(fresh)
        indices = [index for index, _ in there]
        self._put(indices, self._wrapped(indices, fresh))

    # --- giving up -------------------------------------------------------------------------------

    def drop(self, *, begun: bool = False) -> None:
        """A step is lost: wait for what is in flight, and forget unreduced and accumulated
        gradients.

        Args:
            begun: backward has come here and nothing is reduced since, so that gradients in place
                are this rank's own.
        """
        reduction, self.reduction = self.reduction, None
        try:
            if reduction is not None:
                reduction.wait()
        finally:
            local = begun and self.in_place
            lost = local or self.accumulated.backwards or reduction is not None
            self._undecided, self._earlier, self._unhooked = [], [], {}
            for parameter in self.compute if not self.in_place else ():
                parameter.grad = None
            for parameter in self.at_rest:
                if is_unreduced(parameter.grad) or (
                    lost and self._marks and not self.reducer.is_alone
                ):
                    parameter.grad = None
            if self.accumulated.backwards:
                self._hold_no_more()


def _is_whole(gradient: Tensor | None, model: ModelSpec | None) -> TypeGuard[DTensor]:
    """Whether `gradient` was accumulated before any stage of its reduction."""
    return isinstance(gradient, DTensor) and all(
        placement.is_partial()
        for placement in gradient.placements[0 if model is None else model.ndim :]
    )


def _add(parameter: nn.Parameter, grad: Tensor, more: Tensor) -> None:
    if isinstance(grad, DTensor) and isinstance(more, DTensor):
        if grad.placements != more.placements:
            # of a loss that was made from the at-rest parameter itself
            parameter.grad = grad = grad.redistribute(placements=more.placements)
        local_of(grad).add_(local_of(more))
    else:
        grad.add_(more)
