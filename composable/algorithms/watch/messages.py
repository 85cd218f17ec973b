"""Gradients of parameters, in the messages in which they are about to be reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.gradients.reduction import Plan
from composable.engine.step.unit import Unit


def buckets_of(units: Iterable[Unit]) -> dict[str, tuple[Unit, GradBucket]]:
    """Units and their buckets, by the label of the messages."""
    found: dict[str, tuple[Unit, GradBucket]] = {}
    for unit in units:
        by_arrival = [] if unit.root is None else unit.root.post_backward.buckets.buckets
        own = [each for each in by_arrival if each.unit is unit.gradients]
        found |= {each.reducer.label: (unit, each) for each in (*unit.gradients.buckets, *own)}
    return found


def gradients_in(bucket: GradBucket, args: Sequence[Any]) -> Iterable[tuple[str, Tensor]] | None:
    """The gradients in a message, with the names of their parameters.

    Args:
        bucket: that sends it.
        args: of `GroupComm._start`, which launches it.

    Returns:
        None if the message is not known, as those of communication hooks.
    """
    kind, tensors = args[0], args[-1]
    plan = _plan_of(bucket, kind, tensors)
    return None if plan is None else _named(bucket, plan, kind, tensors)


def _plan_of(bucket: GradBucket, kind: str, tensors: Sequence[Tensor]) -> Plan | None:
    plans = bucket.reducer.plans
    if kind != "all_reduce":
        return next((each for each in plans.values() if each.sent is tensors[-1]), None)
    likely = plans.get(bucket.trainable)
    candidates = [likely, *plans.values()] if likely is not None else [*plans.values()]
    return next((each for each in candidates if each.layout.numel == tensors[0].numel()), None)


def _named(
    bucket: GradBucket, plan: Plan, kind: str, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    layout, params = plan.layout, bucket.params
    if kind == "all_reduce":
        views = plan.views(tensors[0], layout.trainable)
        for index, view in zip(layout.trainable, views, strict=True):
            yield params[index].fqn, view
        return
    for (index, _), term in zip(layout.direct, tensors, strict=False):
        yield params[index].fqn, term
    for index, start, numel in layout.columns:
        yield params[index].fqn, plan.rows[:, start : start + numel]
