"""Look at gradients of parameters in the messages that are about to reduce them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from composable.comm.base import Columns
from composable.comm.launch import Launch, LaunchKind
from composable.seams import Param, ReducePlan, label_of


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
    plan: ReducePlan = launch.sender
    parts = plan.gradients_in(sent)
    if not parts:
        return None
    named = [(_name_of(plan.at_rest[index]), each) for index, each in parts.items()]
    return Message(sent, named, [plan.at_rest[index] for index in parts])


def _name_of(parameter: Tensor) -> str:
    label = label_of(parameter)
    return "" if label is None else label.fqn
