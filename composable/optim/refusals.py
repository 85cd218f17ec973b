"""Refuse gradients and parameters that a step or a clipping would take for others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from composable.engine.params.param import ParamLabel, holds_unreduced, labels_of
from composable.errors import ComposableError


def is_trained(parameter: Tensor, label: ParamLabel) -> bool:
    """Whether steps of `parameter` reach its unit's module. An original parameter with a gradient
    is used elsewhere, too.
    """
    return label.form == "at_rest" or (label.form == "original" and parameter.grad is not None)


def refuse_unreduced(
    caller: str, parameters: Iterable[Tensor], error: type[ComposableError]
) -> None:
    """Raise if a gradient was accumulated under `no_sync` and not reduced: each rank has another
    one.
    """
    parameters = list(parameters)
    for parameter, label in zip(parameters, labels_of(parameters), strict=True):
        if label is None or not (label.holds_unreduced or isinstance(parameter, DTensor)):
            continue
        if holds_unreduced(parameter):
            raise error(
                f"{caller}: the gradient of {label} is this rank's alone, since it was accumulated"
                " under no_sync and not reduced. Run the last backward outside of no_sync, or call"
                " reduce_gradients(model), on all ranks"
            )
