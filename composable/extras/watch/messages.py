"""Gradients of parameters, in the messages in which they are about to be reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from composable.comm.base import Label
from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.gradients.reduction import Plan
from composable.engine.params.param import ManagedParam


class Message(NamedTuple):
    """A message of gradients.

    Attributes:
        bucket: that sends it; None of a sparse gradient.
        tensors: what is sent.
        gradients: parts of these, with the names of their parameters.
        params: the parameters at rest.
    """

    bucket: GradBucket | None
    tensors: Sequence[Tensor]
    gradients: list[tuple[str, Tensor]]
    params: Sequence[Tensor]


def message_of(label: str, args: Sequence[Any]) -> Message | None:
    """The gradients that are about to be reduced.

    Args:
        label: of the message; that of a second stage does not say who sends it.
        args: of `GroupComm._start`, which launches the message.

    Returns:
        None if the message is not known, as those of communication hooks.
    """
    bucket = label.sender() if isinstance(label, Label) else None
    if isinstance(bucket, ManagedParam):
        named = [(bucket.fqn, each) for each in args[-1]]
        return Message(None, args[-1], named, [bucket.at_rest])
    if not isinstance(bucket, GradBucket):
        return None
    kind, tensors = args[0], args[-1]
    plan = _plan_of(bucket, kind, tensors)
    if plan is None:
        return None
    params = [bucket.at_rest[index] for index in plan.layout.trainable]
    return Message(bucket, tensors, _named(bucket, plan, kind, tensors), params)


def _plan_of(bucket: GradBucket, kind: str, tensors: Sequence[Tensor]) -> Plan | None:
    plans = bucket.reducer.plans
    if kind != "all_reduce":
        return next((each for each in plans.values() if each.sent is tensors[-1]), None)
    likely = plans.get(bucket.trainable)
    candidates = [likely, *plans.values()] if likely is not None else [*plans.values()]
    return next((each for each in candidates if each.layout.numel == tensors[0].numel()), None)


def _named(
    bucket: GradBucket, plan: Plan, kind: str, tensors: Sequence[Tensor]
) -> list[tuple[str, Tensor]]:
    layout, params = plan.layout, bucket.params
    if kind == "all_reduce":
        views = plan.views(tensors[0], layout.trainable)
        return [
            (params[index].fqn, view) for index, view in zip(layout.trainable, views, strict=True)
        ]
    direct = zip(layout.direct, tensors, strict=False)
    return [
        *((params[index].fqn, term) for (index, _), term in direct),
        *(
            (params[index].fqn, plan.rows[:, start : start + numel])
            for index, start, numel in layout.columns
        ),
    ]
