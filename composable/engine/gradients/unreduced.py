"""`no_sync`: gradients that wait on their rank until they are reduced.

The gradient that backwards under `no_sync` accumulate *is* the `.grad` of the at-rest parameter, in
one of three forms. So users see it, `zero_grad` clears it, and there is no other copy.

| parameter at rest             | its gradient until it is reduced                                |
|-------------------------------|-----------------------------------------------------------------|
| a `DTensor`                   | a `DTensor` around this rank's whole gradient, `Partial`        |
| the same, under               | one around a shard, reduced over the shard dimension already,   |
| `no_sync(level="replicate")`  | `Partial` over the replicate dimension                          |
| the user's own, `replicate`   | this rank's whole gradient, as it is; a mark says so            |

The `full_tensor()` of a `Partial` mean is the gradient that would land if it were reduced now.

An accumulated gradient has the wider of the gradient dtype and the reduce dtype, as in FSDP2. If
parameters are in bfloat16 and reduced in float32, a sum of many backwards in bfloat16 would stop
growing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from operator import or_
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable.engine.gradients.reduction import Reducer
from composable.engine.params.form import ParamForm
from composable.engine.params.layout import Route
from composable.engine.params.param import ManagedParam, cut, keep_gradients_in, set_holds_unreduced
from composable.errors import PhaseError
from composable.tensors.dtensors import gradient_like, gradient_of_shards, is_unreduced
from composable.torch_private import gradient_hooks, local_of, local_tensor, locals_of


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

    def resume(self, former: Iterable[Accumulated]) -> None:
        """Go on with what waits in former buckets: users have moved or replaced parameters, or a
        unit came or went.
        """
        wanted: dict[ManagedParam, bool] = {}
        for each in former:
            if each.backwards and not set(each._params).isdisjoint(self._params):
                self.backwards = max(self.backwards, each.backwards)
                wanted.update(zip(each._params, each.wanted, strict=True))
        if self.backwards:
            self.wanted = tuple(wanted.get(param, False) for param in self._params)
            self._mark()

    def _mark(self) -> None:
        for at_rest in self._at_rest if self.marks else ():
            set_holds_unreduced(at_rest, holds=True)

    def end(self) -> None:
        """What waited is about to be reduced, or is dropped."""
        for at_rest in self._at_rest if self.marks else ():
            set_holds_unreduced(at_rest, holds=False)
        for at_rest in self._at_rest if self.dtype != self._reducer.precision.gradient else ():
            keep_gradients_in(self._reducer.precision.gradient, at_rest)
        self.forget()

    # --- gradients come --------------------------------------------------------------------------

    def begin(self, trainable: Sequence[bool]) -> None:
        """A backward, in which these parameters train, leaves gradients here."""
        self.backwards += 1
        self.wanted = tuple(map(or_, self.wanted or trainable, trainable))
        self._mark()

    def add(self, gradients: Sequence[Tensor | None], trainable: Sequence[bool]) -> None:
        """Add the gradients of the backward that `begin` was called for to what waits.

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
