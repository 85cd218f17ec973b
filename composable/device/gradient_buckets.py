"""Flat memory in which gradients live from step to step, and the views of it that users see as `grad`; knows no communicator.

Note [Gradients in buckets]
Autograd makes a new gradient wherever `grad` is None; it is divided and copied into the bucket, and `grad` becomes a view
of the bucket. Where `grad` is that view already, autograd adds to it in place and nothing is copied. A gradient that was
somewhere else before backward began is somebody's: it stays where it is (external), and gets the result copied back.
What nobody accumulates to is overwritten, so somebody who kept it would see it change. Use counts tell: then the keeper
gets the memory, and the bucket new one.

Where backwards only add up what a later one sums over the ranks, the first of them brings new gradients into the bucket
(`hold`): what autograd adds later goes there by itself, and nothing is copied when the sum is made.

A new gradient that has a bucket to itself and may be divided as it is read (`Scaling.input_factor`) need not be copied: the
sum is made of it (`scaled_input`) and lands in the bucket, and only then `grad` becomes the view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Final

import torch
from torch import Tensor, nn

from composable.device.kept_gradients import GradientUsers
from composable.device.means_apart import NO_MEANS, Mean, MeansApart
from composable.device.private import storage_key
from composable.plan.scaling import Scaling

Strides = tuple[int, ...]

_NOWHERE: Final = torch.empty(0, device="cpu")  # in place of what is not made yet
_gradient_of = attrgetter("grad")
_is_sparse = attrgetter("is_sparse")
_exhaust: Final = deque[object](maxlen=0).extend  # run an iterator to its end, in C


def gradient_strides(parameter: Tensor) -> Strides | None:
    """How autograd lays out a new gradient of `parameter`; None means contiguous."""
    if parameter.is_contiguous():
        return None
    like = torch.empty_like(parameter, device="meta")
    return None if like.is_contiguous() else tuple(like.stride())


class GradientBucket:
    """Gradients that are summed in one dtype, on one device. In a backward: `open`, `collect`, `finish`, `resolve_unused`.

    Args:
        strides: of each gradient, the same on all ranks; None means contiguous. Where autograd's own differ from them the
            gradient cannot be a view of the bucket, and is external in every backward.
        scaling: how gradients are divided; whether a sum may be made of one where it lies.
        flags: numbers at the end of the message that are none of the gradients'.
        apart: they are in memory of their own instead.
        dtype: of the message, if it is not the parameters'. A gradient in another one cannot be a view of the bucket, either.

    Attributes:
        undecided: what slots held before that are missing on this rank, until `resolve_unused`.
        means: those that the message must not round.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        strides: Sequence[Strides | None],
        *,
        scaling: Scaling = Scaling(),  # noqa: B008 - frozen
        flags: int = 0,
        apart: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self._strides = tuple(strides)
        self._before, self._after = scaling.before, scaling.after
        self._sizes = [parameter.numel() for parameter in parameters]
        self._flag_count = flags
        self._apart = apart
        self._dtype = dtype or self.parameters[0].dtype
        self.means = MeansApart([p for p in self.parameters if p.dtype != self._dtype])
        self._mismatched = [k for k, p in enumerate(parameters) if p.dtype != self._dtype or gradient_strides(p) != strides[k]]
        self._input_factor = scaling.input_factor if len(self._sizes) == 1 and not flags else None
        self._message = self._body = self.flags = _NOWHERE
        self.views = [_NOWHERE] * len(parameters)
        self._users: GradientUsers  # of the message
        # Of one backward:
        self.scaled_input: tuple[Tensor, float] | None = None  # what to sum instead of the message, and the factor
        self._external: dict[int, None] = {}
        self._keeps_graph = False
        self._returns: list[tuple[Tensor, Tensor]] = []  # where results are copied to, and from
        self.undecided: dict[int, Tensor | None] = {}

    def _make(self) -> None:
        """New memory. The old one belongs to those who hold gradients in it."""
        self._message = _NOWHERE  # until everything is made: an interrupt may come in between
        first, numel = self.parameters[0], sum(self._sizes)
        with torch.inference_mode(False), torch.no_grad():
            message = torch.empty(numel + self._flag_count * (not self._apart), dtype=self._dtype, device=first.device)
            self._body, self.flags = message[:numel], message[numel:]
            if self._apart:
                self.flags = message.new_empty(self._flag_count)
            pieces = self._body.split(self._sizes)
            shaped = [
                piece.view(parameter.shape) if strides is None else piece.as_strided(parameter.shape, strides)
                for piece, parameter, strides in zip(pieces, self.parameters, self._strides, strict=True)
            ]
            # `.data`: to autograd and to users they are tensors like others, which may be detached in place.
            self.views = [view.data for view in shaped]
            del pieces, shaped
        self._users = GradientUsers(message, self.views)
        self._message = message

    @property
    def message(self) -> Tensor:
        """What `collect` returned."""
        return self._message

    def _kept_by_somebody(self, slots: Sequence[int]) -> bool:
        """Whether somebody may still read what an earlier backward left in `slots`, none of which is a `grad` now."""
        return self._users.keep_any(slots)

    # --- a backward -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Backward begins: a gradient that is there already, and not in the bucket, will stay where it is."""
        self._external = dict.fromkeys(self._mismatched)
        if self.means.known:
            self.means.put_aside()
        gradients = list(map(_gradient_of, self.parameters))
        if not all(map(is_, gradients, repeat(None))):
            if {*map(storage_key, self.views)} != {storage_key(self._message)}:
                # `module.to` gives gradients other memory in place: to another device and back, say.
                self._message, self.views = _NOWHERE, [_NOWHERE] * len(gradients)
            for k, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
                if gradient is not None and gradient is not view:
                    self._external[k] = None
        self._keeps_graph = torch.is_grad_enabled()

    def hold(self) -> None:
        """Bring new gradients into the bucket, where later backwards add to them, if nobody keeps that memory."""
        if self._message is _NOWHERE:
            self._make()
        gradients = list(map(_gradient_of, self.parameters))
        fresh = [
            k
            for k, (gradient, view) in enumerate(zip(gradients, self.views, strict=True))
            if not (gradient is None or gradient is view or k in self._external or gradient.is_sparse or gradient.requires_grad)
        ]
        if fresh and self._kept_by_somebody(fresh):
            if any(map(is_, gradients, self.views)):
                return  # they stay where autograd put them
            self._make()
        if fresh:
            torch._foreach_copy_([self.views[k] for k in fresh], [gradients[k] for k in fresh])
            for k in fresh:
                self.parameters[k].grad = self.views[k]

    def collect(self, missing: Sequence[int]) -> Tensor:
        """Bring the gradients into the bucket.

        Args:
            missing: slots without a gradient in this backward; what they had before counts, or else zero.

        Returns:
            The message to be summed over the ranks, in place, or from everybody's `scaled_input`. The caller fills its
            end, `flags`.
        """
        if self._message is _NOWHERE:
            self._make()
        gradients = list(map(_gradient_of, self.parameters))
        outside: Sequence[int] = range(len(gradients))
        if any(map(is_, gradients, self.views)):
            outside = [k for k in outside if gradients[k] is not self.views[k]]
        if outside and self._kept_by_somebody(outside):
            for k, gradient in enumerate(gradients):
                if gradient is self.views[k]:
                    self._external[k] = None  # it stays in the old memory
            self._make()
            outside = range(len(gradients))
        self.undecided = {k: gradients[k] for k in missing}
        for k in missing:
            if gradients[k] is self.views[k]:
                self.undecided[k] = gradients[k].clone()
        if len(outside) < len(gradients) or any(map(is_, gradients, repeat(None))):
            for k in outside:
                if gradients[k] is None:
                    self.views[k].zero_()
            outside = [k for k in outside if gradients[k] is not None]
        if self._input_factor is not None and outside and self._can_be_term(gradients[0]):
            self.scaled_input = gradients[0], self._input_factor
            return self._message
        self._copy_in([gradients[k] for k in outside], [self.views[k] for k in outside])
        self._place(gradients, outside)
        return self._message

    def _can_be_term(self, gradient: Tensor) -> bool:
        """Whether the sum can be made of the gradient as it is."""
        return (
            not self._external
            and not self.undecided
            and gradient.layout is torch.strided
            and gradient.stride() == self.views[0].stride()
            and gradient.is_contiguous()
            and not gradient.requires_grad
        )

    def _copy_in(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        if any(map(_is_sparse, sources)):
            sources = [source.to_dense() if source.is_sparse else source for source in sources]
        if len(targets) == len(self.views) == 1 and self._before != 1.0:
            torch.div(sources[0], self._before, out=targets[0])  # it may be large: one pass over the memory, not two
            return
        if targets:
            torch._foreach_copy_(targets, sources)
        if self._before != 1.0:
            self._body.div_(self._before)

    def _place(self, gradients: Sequence[Tensor], outside: Sequence[int]) -> None:
        """Make views of the bucket the gradients that arrived, or note where their results have to be copied to."""
        external, unresolved, parameters, views = self._external, self.undecided, self.parameters, self.views
        if self._keeps_graph:  # under `create_graph` a gradient keeps its graph, and gets the mean as its value
            external = {**external, **{k: None for k in outside if gradients[k].requires_grad}}
        self._returns = []
        if not external and not unresolved and len(outside) == len(views):
            _exhaust(map(setattr, parameters, repeat("grad"), views))
            return
        for k in outside:
            if k in unresolved:
                continue
            if k in external and not gradients[k].is_sparse:
                self._returns.append((gradients[k].data, views[k]))
            else:
                parameters[k].grad = views[k]

    def finish(self) -> None:
        """The message has been summed: gradients that arrived on this rank are ready afterwards."""
        if self._after != 1.0:
            self._body.div_(self._after)
        if self.scaled_input is not None:
            if self.parameters[0].grad is self.scaled_input[0]:  # else somebody took it away meanwhile
                self.parameters[0].grad = self.views[0]
            self.scaled_input = None
        if self._returns:
            returns, self._returns = self._returns, []
            torch._foreach_copy_([target for target, _ in returns], [source for _, source in returns])

    def resolve_unused(self, used: Sequence[bool]) -> None:
        """Decide about the slots that were missing on this rank; what was missing on all ranks stays as it was.

        Args:
            used: for each slot, whether any rank had a gradient.
        """
        for k, before in self.undecided.items():
            parameter, view = self.parameters[k], self.views[k]
            if before is not None and parameter.grad is view:
                if not used[k]:
                    view.copy_(before)
            elif not used[k]:
                continue
            elif before is not None and not before.is_sparse:
                before.data.copy_(view)
            elif k in self._mismatched:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad = view
        self.undecided = {}

    def drop(self) -> None:
        """Forget a backward that did not end."""
        if self.means.aside:
            self.means.put_back()
        self.scaled_input = None
        self._returns = []
        self.undecided = {}

    def release(self) -> None:
        """Give the memory back, if no gradient is in it."""
        if self._message is _NOWHERE or self.undecided or not all(map(is_, map(_gradient_of, self.parameters), repeat(None))):
            return
        self._message = self._body = self.flags = _NOWHERE
        self.views = [_NOWHERE] * len(self.parameters)
        del self._users  # which holds the views

    def adopt_from(self, others: dict[nn.Parameter, Tensor], means: Mapping[nn.Parameter, Mean] = NO_MEANS) -> None:
        """Move gradients here that are views of other buckets, by parameter. What users hold stays the tensor that it is.

        Args:
            means: what is known of them there.
        """
        self.means = MeansApart([p for p in self.parameters if p.dtype != self._dtype], means)
        for k, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or gradient is not others.pop(parameter, None) or k in self._mismatched:
                continue
            if self._message is _NOWHERE:
                self._make()
            self.views[k].copy_(gradient)
            gradient.data = self.views[k]
            self.views[k] = gradient
