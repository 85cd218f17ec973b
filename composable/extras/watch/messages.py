"""Gradients of parameters, in the messages in which they are about to be reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from composable.comm.base import Columns
from composable.comm.launch import Launch, LaunchKind
from composable.seams import Param, Plan, label_of


class Message(NamedTuple):
    """A message of gradients.

    Attributes:
        tensors: what is sent.
        gradients: parts of these, with the names of their parameters.
        params: the parameters at rest.
    """

    tensors: Sequence[Tensor]
    gradients: list[tuple[str, Tensor]]
    params: Sequence[Tensor]


def message_of(launch: Launch, tensors: Columns) -> Message | None:
    """The gradients that are about to be reduced.

    Args:
        launch: of any kind.
        tensors: outputs and inputs, or what is reduced in place.

    Returns:
        None for other launches. These are no gradients, or sums of the first stage, or they are
        what a communication hook sends, or copies in memory that somebody supplies.
    """
    sent = tensors[-1] if tensors else ()
    if launch.kind is LaunchKind.GATHER_SPARSE:
        param: Param = launch.sender
        return Message(sent, [(param.fqn, each) for each in sent], [param.at_rest])
    if launch.kind is not LaunchKind.REDUCE:
        return None
    plan: Plan = launch.sender
    layout, at_rest = plan.layout, plan.at_rest
    params = [at_rest[index] for index in layout.trainable]
    if len(tensors) == 1:
        views = plan.views(sent[0], layout.trainable)
        found = [*zip(layout.trainable, views, strict=True)]
    elif sent[-1] is plan.sent:
        direct = zip(layout.direct, sent, strict=False)
        found = [
            *((index, term) for (index, _), term in direct),
            *(
                (index, plan.rows[:, start : start + numel])
                for index, start, numel in layout.columns
            ),
        ]
    else:
        return None
    return Message(sent, [(_name_of(at_rest[index]), each) for index, each in found], params)


def _name_of(parameter: Tensor) -> str:
    label = label_of(parameter)
    return "" if label is None else label.fqn
