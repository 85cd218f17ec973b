"""The gradients of parameters that share a message: from autograd's tensors to the gradients of
at-rest parameters.

`reduce` takes them off the compute parameters and launches a `Reduction`; `land` waits for it and
puts the sums on the at-rest parameters, cast to the gradient dtype and added to what is there. If
no rank had a gradient of a parameter, `.grad` stays as it was, on all ranks.

Memory. A bucket is *in place* if autograd accumulates on the very parameters that users see.

| case                             | in place | autograd's gradient | memory of what lands         |
|----------------------------------|----------|---------------------|------------------------------|
| shards, a cast, `replicate` in a | no       | is taken off        | views of the flat buffer,    |
| tree with shards                 |          |                     | which own it together        |
| `replicate` alone                | yes      | is taken off        | as above                     |
| ... and some of the bucket were  | yes      | stays, as a part of | its own: the sum is copied   |
| there before this backward       |          | the sum             | to it                        |
| `gradient_as_bucket_view`        | yes      | is a view of memory | the same view; the plan owns |
|                                  |          | of the plan         | it from step to step         |

What backwards under `no_sync` leave *is* the gradient of the at-rest parameter, in one of three
forms. So users see it, `zero_grad` clears it, and there is no other copy (`Accumulated`).

| parameter at rest             | its gradient until it is reduced                                |
|-------------------------------|-----------------------------------------------------------------|
| a `DTensor`                   | a `DTensor` around this rank's whole gradient, `Partial`        |
| the same, under               | one around a shard, reduced over the shard dimension already,   |
| `no_sync(level="replicate")`  | `Partial` over the replicate dimension                          |
| the user's own, `replicate`   | this rank's whole gradient, as it is; a mark says so            |

A `Partial` of a mean reads as what would land if it were reduced now.

What waits has the wider of the gradient and the reduce dtype, as in FSDP2: of bfloat16 parameters
that are reduced in float32, a sum of many backwards in bfloat16 would stop growing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import compress, repeat
from operator import is_, is_not, or_
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.comm.base import scale_sums
from composable.comm.mesh_info import MeshInfo
from composable.engine.gradients.reduction import Reducer, Reduction
from composable.engine.params.layout import Route, Slot
from composable.engine.params.param import (
    ManagedParam,
    ParamForm,
    cut,
    gradient_of,
    keep_gradients_in,
    post_accumulate_hooks,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    set_holds_unreduced,
    trainability,
)
from composable.engine.params.param_group import ParamGroup
from composable.errors import PhaseError
from composable.memory.offload import wait_for_traffic
from composable.tensors import gradient_like, gradient_of_shards, is_unreduced
from composable.torch_private import (
    as_tensors,
    dtensors_around,
    gradient_hooks,
    local_of,
    local_tensor,
    locals_of,
    placed_alike,
)


class SyncMode(enum.Enum):
    """What happens to a unit's gradients when its reduction is due."""

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


class GradBucket:
    """See the top of this file.

    Args:
        group: has the parameters.
        members: those of the bucket, and their slots.
        mesh_info: the ranks over which they are reduced.
        factor: what gradients are multiplied by as they come (`grad_reduce`), so that their mean is
            what was asked for.
        keeps: gradients live in the bucket from step to step.

    Attributes:
        reducer: sends the message.
        reduction: the message in flight; None if there is none.
        in_place: autograd accumulates on the very parameters that users see: what is there already
            is part of the gradient.
        trainable: which of its parameters get a gradient.
        accumulated: gradients that wait to be reduced.
    """

    def __init__(
        self,
        group: ParamGroup,
        members: Sequence[tuple[ManagedParam, Slot]],
        mesh_info: MeshInfo,
        *,
        factor: float = 1.0,
        keeps: bool = False,
    ) -> None:
        self.params = tuple(param for param, _ in members)
        self.at_rest = tuple(param.at_rest for param in self.params)
        self.compute = tuple(param.compute for param in self.params)
        slots = [slot for _, slot in members]
        self._are_whole = all(param.info.form.is_whole for param in self.params)
        self.in_place = all(map(is_, self.at_rest, self.compute))
        # What is added to a gradient that is there must not be in its memory already.
        keeps = keeps and self.in_place and group.precision.reduce == group.precision.gradient
        # Local tensors of the user's DTensors have memory of their own.
        keeps = keeps and self._are_whole
        self.reducer = Reducer(
            self.at_rest, slots, group.precision, group.device, mesh_info, keeps=keeps
        )
        self.reduction: Reduction | None = None
        self._to_rest = group.to_rest
        self.accumulated = Accumulated(self.params, self.reducer)
        # in place, a tensor hook of the unit multiplies what arrives
        self._factor = 1.0 if self.in_place else factor
        # in place, some gradients were there before this backward
        self._stay = False
        # Under no_sync users' post-accumulate hooks wait for its end, also where gradients land
        # before: on one rank, or by level="replicate" on a mesh without replicas.
        self._hooks_wait = False
        self._hooks_due: dict[int, None] = {}  # parameters whose hooks wait
        # sums that have landed, whose rows were not read yet, and parameters that need it
        self._undecided: list[tuple[Reduction, list[int]]] = []
        # tables to which users add hooks, see `has_post_accumulate_hooks`
        self._post_accumulate_hooks = list(map(post_accumulate_hooks, self.at_rest))
        self.rename("")  # the unit has a name for it later
        self.follow()

    def text_of(self, unit_name: str) -> str:
        """The text of its launches, in a unit with this name."""
        return f"gradient reduction of unit '{unit_name}'"

    def rename(self, unit_name: str) -> None:
        """Its unit has this name from now on."""
        self.reducer.rename(self.text_of(unit_name), unit_name)

    def follow(self) -> None:
        """Parameters may have been frozen or unfrozen."""
        self.trainable = tuple(map(trainability, self.at_rest))
        # in place, a frozen one keeps what earlier backwards have brought
        self._taken = (
            tuple(compress(self.compute, self.trainable)) if self.in_place else self.compute
        )

    @property
    def has_post_accumulate_hooks(self) -> bool:
        """Whether users have put such hooks on any of the at-rest parameters."""
        return any(self._post_accumulate_hooks)

    # --- what autograd left ----------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether backward has left gradients here; in place, also if they have landed earlier."""
        return any(map(is_not, map(gradient_of, self.compute), repeat(None)))

    def look(self) -> bool:
        """Before gradients come, or outside of backwards: whether some are there. In place they
        stay, as a part of the sum.
        """
        there = self.has_gradients
        self._stay = there and self.in_place
        return there

    def _take(self) -> list[Tensor | None]:
        """Take the gradients of this backward off the compute parameters. In place, all stay if
        some were there before, and the sums will be copied to them.
        """
        gradients = list(map(gradient_of, self.compute))
        # `torch.nn.functional.embedding(..., sparse=True)`; None is not sparse
        if any(map(getattr, gradients, repeat("is_sparse"), repeat(False))):
            for parameter in self.compute:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_dense()
            gradients = list(map(gradient_of, self.compute))
        if not self._stay:
            for parameter in self._taken:
                parameter.grad = None
        self._stay = False
        if not self._are_whole:
            reduce = self.reducer.precision.reduce
            gradients = [
                param.info.form.local_gradient(gradient, reduce)
                for param, gradient in zip(self.params, gradients, strict=True)
            ]
        return gradients if self._factor == 1.0 else self._multiplied(gradients)

    def _multiplied(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of this backward times what `grad_reduce` asks for, in the reduce dtype: in a
        lower one each term of the sum would be rounded. `scale_sums` says why not by foreach on a
        host.
        """
        dtype = self.reducer.precision.reduce
        multiplied = [None if gradient is None else gradient.to(dtype) for gradient in gradients]
        there = [gradient for gradient in multiplied if gradient is not None]
        if there and self.reducer.mesh_info.all.traits.on_stream:
            torch._foreach_mul_(there, self._factor)
        else:
            scale_sums(there, self._factor)
        return multiplied

    # --- accumulation and reduction --------------------------------------------------------------

    def reduce(self, mode: SyncMode = SyncMode.REDUCE, absent: Sequence[int] = ()) -> None:
        """Launch the reduction of what is here, or accumulate it. All ranks call it at the same
        point of their program.

        | mode        | on a hybrid mesh               | shards alone   | replicas alone |
        |-------------|--------------------------------|----------------|----------------|
        | REDUCE      | both stages                    | one stage      | one stage      |
        | HOLD_SHARDS | the first stage; its sums wait | as REDUCE      | as HOLD        |
        | HOLD        | this rank's gradients wait     | likewise       | likewise       |

        What happens to what waits (`accumulated`), with the gradients of this backward:

        | mode | gradients that wait whole | sums of the first stage that wait |
        |---|---|---|
        | REDUCE | are added to those of this backward | are `carried` to the second stage |
        | HOLD | those of this backward are added to them | wait on |
        | HOLD_SHARDS | are added to those of this backward | the new sum is added to them |

        Args:
            absent: in place, indices of parameters that this backward brought no gradient for.
        """
        reducer, waiting = self.reducer, self.accumulated
        if not waiting.backwards and not any(self.trainable):
            return
        self._hooks_wait = mode is not SyncMode.REDUCE
        if reducer.is_alone:
            self._land_alone()
            return
        if mode is SyncMode.HOLD_SHARDS and reducer.shard_comm is None:
            mode = SyncMode.HOLD
        if mode is SyncMode.HOLD:
            waiting.note_backward(self.trainable)
            if not self.in_place:  # there autograd has added them
                waiting.add(self._take(), self.trainable)
            return
        assert self.reduction is None
        shards_only = mode is SyncMode.HOLD_SHARDS and reducer.mesh_info.replicate is not None
        trainable = (
            tuple(map(or_, waiting.wanted, self.trainable)) if waiting.wanted else self.trainable
        )
        held = waiting.backwards
        carried: Sequence[tuple[int, Tensor]] = ()
        gradients = self._take()
        if waiting.backwards:
            absent = ()  # what waits is part of the sum
            if not self.in_place:
                gradients, carried = waiting.take(gradients)
        if shards_only:
            carried = ()  # what is reduced over the shard dimension stays, and this is added to it
            waiting.note_backward(self.trainable)
        else:
            for index, _ in carried:
                self.at_rest[index].grad = None
            if waiting.backwards:
                waiting.end()
        plan = reducer.plan_of(trainable)
        self.reduction = Reduction(
            reducer, plan, gradients, held,
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
            reduction.land()
        except BaseException:
            self.drop()
            raise
        self.reduction = None
        delivered: Sequence[int] = reduction.plan.layout.trainable
        missing = reduction.missing
        if reduction.shards_only:  # what waits already keeps its place: zeros are added to it
            missing = [index for index in missing if self.at_rest[index].grad is None]
        if missing:
            delivered = [index for index in delivered if index not in missing]
            self._undecided.append((reduction, missing))
        self._deliver(reduction, delivered)
        if not self.reducer.mesh_info.all.traits.on_stream:
            self.decide()  # elsewhere the host would wait for the device in the middle of backward

    def decide(self) -> None:
        """At the end of a backward: read the rows that `land` did not wait for."""
        undecided, self._undecided = self._undecided, []
        for reduction, missing in undecided:
            used = reduction.used()
            if found := [index for index in missing if used[index]]:
                self._deliver(reduction, found)

    # --- landing ---------------------------------------------------------------------------------

    def _deliver(self, reduction: Reduction, indices: Sequence[int]) -> None:
        plan = reduction.plan
        dtype = self.accumulated.dtype if reduction.shards_only else self.reducer.precision.gradient
        (flat,) = self._to_rest([reduction.flat.to(dtype)])
        fresh = plan.views(flat, indices)
        if reduction.shards_only:
            if any(self.at_rest[index].grad is not None for index in indices):
                wait_for_traffic()  # the host may add to them
            self.accumulated.add_shards(indices, fresh)
        elif plan.specs:
            specs = [plan.specs[index] for index in indices]
            self._put(indices, dtensors_around(fresh, specs, plan.stand_in))
        else:
            self._put(indices, self._wrapped(indices, fresh))

    def _wrapped(self, indices: Sequence[int], fresh: Sequence[Tensor]) -> list[Tensor]:
        if not isinstance(self.at_rest[0], DTensor):  # all of a bucket rest alike
            return list(fresh)
        return [gradient_like(t, self.at_rest[i]) for i, t in zip(indices, fresh, strict=True)]

    def _put(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Add reduced gradients to those of the at-rest parameters, and call hooks of users."""
        everyone = len(indices) == len(self.at_rest)
        parameters = self.at_rest if everyone else [self.at_rest[index] for index in indices]
        after = self.has_post_accumulate_hooks
        with as_tensors():
            grads = list(map(gradient_of, parameters))
            # in place autograd has called them
            hooked = any(map(gradient_hooks, parameters)) and not self.in_place
            merges = hooked or any(map(is_not, grads, repeat(None)))
            if not merges:  # nearly always
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
        if merges or after:
            wait_for_traffic()  # of gradients that rest on the host
        if merges:
            self._merge(parameters, grads, gradients)
        if after:
            self._hooks_due.update(dict.fromkeys(indices))
        if self._hooks_due and not self._hooks_wait:
            self.run_hooks()

    def run_hooks(self) -> None:
        """Call post-accumulate hooks of users for what has landed, under `no_sync`, too. No message
        depends on them: other ranks may have none.
        """
        due, self._hooks_due = self._hooks_due, {}
        for index in due:
            run_post_accumulate_hooks(self.at_rest[index])

    def _merge(
        self,
        parameters: Sequence[nn.Parameter],
        grads: Sequence[Tensor | None],
        gradients: Sequence[Tensor],
    ) -> None:
        """Put `gradients` where `grads` are, and ask tensor hooks of users if there are some."""
        for parameter, grad, gradient in zip(parameters, grads, gradients, strict=True):
            if not self.in_place and gradient_hooks(parameter):
                gradient = run_gradient_hooks(parameter, gradient)
                grad = parameter.grad  # a hook may have changed it
            if grad is None or self.reducer.keeps:
                parameter.grad = gradient
            elif self.in_place:  # it was part of the sum
                if placed_alike([grad], [gradient]):
                    grad.copy_(gradient)
                else:  # a `DTensor` in other placements
                    parameter.grad = gradient
            else:
                _add(parameter, grad, gradient)

    def _land_alone(self) -> None:
        """One rank alone: nothing is summed. Gradients are cast as where there are other ranks."""
        there = [
            (index, gradient) for index, gradient in enumerate(self._take()) if gradient is not None
        ]
        precision = self.reducer.precision
        fresh = [gradient.to(precision.reduce).to(precision.gradient) for _, gradient in there]
        indices = [index for index, _ in there]
        self._put(indices, self._wrapped(indices, self._to_rest(fresh)))

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
            local = self.in_place and (begun or reduction is not None)
            # of what waits under no_sync, plain tensors are known by the mark alone
            lost = local or (self.accumulated.marks and self.accumulated.backwards)
            self._undecided, self._hooks_due = [], {}
            for parameter in self.compute if not self.in_place else ():
                parameter.grad = None
            for parameter in self.at_rest:
                if is_unreduced(parameter.grad) or lost:
                    parameter.grad = None
            self.accumulated.end()


def _add(parameter: nn.Parameter, grad: Tensor, more: Tensor) -> None:
    if isinstance(grad, DTensor) and isinstance(more, DTensor):
        if grad.placements != more.placements:
            # of a loss that was made from the at-rest parameter itself
            parameter.grad = grad = grad.redistribute(placements=more.placements)
        local_of(grad).add_(local_of(more))
    else:
        grad.add_(more)


# --- under no_sync ------------------------------------------------------------------------------


class Accumulated:
    """The gradients of one bucket that wait to be reduced.

    Attributes:
        marks: what is accumulated is plain, and marked as such; otherwise `Partial` says so.
        backwards: that brought them.
        wanted: which parameters trained in any of these.
        dtype: of what `add` and `add_shards` leave. In place, autograd adds in the gradient dtype.
    """

    def __init__(self, params: Sequence[ManagedParam], reducer: Reducer) -> None:
        self._params = params
        self._at_rest = tuple(param.at_rest for param in params)
        self._reducer = reducer
        self.marks = all(param.at_rest is param.own for param in params)
        precision = reducer.precision
        self.dtype = torch.promote_types(precision.reduce, precision.gradient)
        self.forget()

    def forget(self) -> None:
        """Nothing waits any more."""
        self.backwards = 0
        self.wanted: tuple[bool, ...] = ()

    def resume(self, former: Sequence[Accumulated]) -> None:
        """Go on with what waits in former buckets: users have moved or replaced parameters, or a
        unit came or went.
        """
        wanted: dict[ManagedParam, bool] = {}
        for each in former:
            if each.backwards and not set(each._params).isdisjoint(self._params):
                self.backwards = max(self.backwards, each.backwards)
                wanted.update(zip(each._params, each.wanted, strict=True))
        plain = [
            param for each in former if each.marks and each.backwards for param in each._params
        ]
        for index, param in enumerate(self._params):
            gradient = self._at_rest[index].grad
            if not self.marks and gradient is not None and param in plain:
                # It is on a DTensor now, which says `Replicate`.
                self._show(index, self._unreduced(index, local_tensor(gradient)))
        if self.backwards:
            self.wanted = tuple(wanted.get(param, False) for param in self._params)
            self._mark(holds=True)

    def _mark(self, *, holds: bool) -> None:
        for at_rest in self._at_rest if self.marks else ():
            set_holds_unreduced(at_rest, holds=holds)

    def end(self) -> None:
        """What waited is about to be reduced, or is dropped."""
        self._mark(holds=False)
        for at_rest in self._at_rest if self.dtype != self._reducer.precision.gradient else ():
            keep_gradients_in(self._reducer.precision.gradient, at_rest)
        self.forget()

    # --- gradients come --------------------------------------------------------------------------

    def note_backward(self, trainable: Sequence[bool]) -> None:
        """A backward, in which these parameters train, leaves gradients here."""
        self.backwards += 1
        self.wanted = tuple(map(or_, self.wanted or trainable, trainable))
        self._mark(holds=True)

    def add(self, gradients: Sequence[Tensor | None], trainable: Sequence[bool]) -> None:
        """Add the gradients of the backward that was noted last to what waits.

        | what is on the parameter               | then                                            |
        |----------------------------------------|-------------------------------------------------|
        | nothing                                | the gradient waits                              |
        | what waits, in no sum yet              | the gradient is added to it                     |
        | a mean, whole on each rank (`marks`)   | likewise: it is a term of the next mean         |
        | this rank's shard of a sum or mean     | the gradient waits; the shard, times the number |
        |                                        | of shards, is added to its part of it           |

        The reduction to come divides by as many ranks as it sums over. So in the last case each
        rank of the shard dimension adds its own shard, all replicas the same. A mean becomes a term
        of the next one on all ranks alike, also without a gradient here: other ranks may have one.
        """
        for index, gradient in enumerate(gradients):
            at_rest = self._at_rest[index]
            before = at_rest.grad
            unreduced = self.backwards > 1 if self.marks else is_unreduced(before)
            reduced = before is not None and not unreduced
            if gradient is None and (self.marks or not (reduced and trainable[index])):
                continue
            if reduced:
                self._refuse_hooks_twice(index)
            if gradient is None:  # other ranks may have one
                gradient = self._reducer.dense(index, None)
            form, dtype = self._params[index].info.form, self.dtype
            if before is None:
                self._show(index, self._unreduced(index, gradient.to(dtype)))
            elif self.marks or _is_whole(before, form):
                before = before.to(dtype)  # marked ones that were reduced earlier have another
                self._show(index, before)
                local_tensor(before).add_(gradient)
            else:
                whole, slot = gradient.to(dtype), self._reducer.slots[index]
                # of a parameter that each rank has whole, that is all of it
                ranks = 1 if slot.route is Route.WHOLE else slot.num_shards
                mean = local_of(before).to(whole.device)  # type: ignore[arg-type]
                cut(whole, slot, self._reducer.mesh_info.shard.rank).add_(mean, alpha=ranks)
                self._show(index, self._unreduced(index, whole))

    def _show(self, index: int, gradient: Tensor) -> None:
        """Let users see what waits as the gradient of their parameter."""
        at_rest = self._at_rest[index]
        if gradient.dtype != self._reducer.precision.gradient:
            at_rest.grad_dtype = None  # torch would refuse it otherwise; `end` undoes this
        at_rest.grad = gradient

    def _unreduced(self, index: int, whole: Tensor) -> Tensor:
        at_rest = self._at_rest[index]
        if self.marks:
            return gradient_like(whole, at_rest)
        return self._params[index].info.form.unreduced(whole, at_rest)

    def add_shards(self, indices: Sequence[int], fresh: Sequence[Tensor]) -> None:
        """Add gradients that are reduced over the shard dimension."""
        for index, local in zip(indices, fresh, strict=True):
            at_rest = self._at_rest[index]
            before = at_rest.grad
            if isinstance(before, DTensor) and is_unreduced(before):
                local_of(before).add_(local)
                continue
            if isinstance(before, DTensor):  # a mean, the same on every replica
                self._refuse_hooks_twice(index)
                local = local + local_of(before)
            form, shard_dim = self._params[index].info.form, self._reducer.mesh_info.shard_dim
            self._show(index, gradient_of_shards(local, at_rest, form.ndim, form.ndim + shard_dim))

    def _refuse_hooks_twice(self, index: int) -> None:
        if gradient_hooks(self._at_rest[index]):
            raise PhaseError(
                f"parameter '{self._params[index].fqn}' has a reduced gradient, for which its"
                " tensor hooks were called; under no_sync more is added to it, and they would be"
                " called again for all of it. Call zero_grad() before the first backward under"
                " no_sync"
            )

    # --- they are reduced ------------------------------------------------------------------------

    def take(
        self, gradients: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[tuple[int, Tensor]]]:
        """Whole gradients to be reduced: those of this backward, and with them what waited; and
        shards, by index, that are reduced over the shard dimension already.
        """
        carried: list[tuple[int, Tensor]] = []
        for index, at_rest in enumerate(self._at_rest):
            held = at_rest.grad
            # a marked gradient whose parameter trained in none of these backwards is from an
            # earlier step
            if held is None or not (self.wanted[index] if self.marks else is_unreduced(held)):
                continue
            if not self.marks and not _is_whole(held, self._params[index].info.form):
                carried.append((index, local_of(held)))  # type: ignore[arg-type]
                continue
            fresh, (local,) = gradients[index], locals_of([held])
            gradients[index] = local if fresh is None else local.add_(fresh)
            at_rest.grad = None
        dtype = self.dtype
        return [None if gradient is None else gradient.to(dtype) for gradient in gradients], carried


def _is_whole(gradient: Tensor | None, form: ParamForm) -> TypeGuard[DTensor]:
    """Whether `gradient` was accumulated before any stage of its reduction."""
    return isinstance(gradient, DTensor) and all(
        placement.is_partial() for placement in gradient.placements[form.ndim :]
    )
