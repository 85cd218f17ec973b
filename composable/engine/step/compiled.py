"""Compiled autograd: a compiler records a backward, and runs it later.

Compiled autograd records a graph of all nodes and hooks, but the graph does not contain the end of
the backward. So the engine raises an error, with one exception: for models that are only
replicated, the compiler can reduce the gradients, too (`DECISIONS.traced`, `features/traced.py`).
`Root.eager_because` holds the reason why it does not, as of the last forward. If the compiler
reduces, it is empty, and the backward does not call the engine.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor

from composable.compilation import backward_is_compiled, backward_will_be_compiled
from composable.contract.values import map_tensors
from composable.engine.step.observer import DECISIONS
from composable.errors import DifferentiationError

if TYPE_CHECKING:
    from composable.engine.step.root import Root

NOT_ON: Final = "it was not on when the forward began"


def why_not(root: Root) -> str:
    """Why the compiler does not reduce the gradients of a forward that begins; empty if it does."""
    return DECISIONS.traced(root) if backward_will_be_compiled() else root.agreed.untraced or NOT_ON


def guarded(output: Any, root: Root) -> Any:
    """What a forward returns, so that a compiler that is about to record a backward through it is
    refused.
    """
    if not backward_will_be_compiled():
        return output
    return map_tensors(output, partial(_guarded, refuse=partial(_refuse, root)))


def refuse_compiled(root: Root) -> None:
    """Raise if the compiler runs this backward."""
    if backward_is_compiled():
        _refuse(root)


def _refuse(root: Root) -> NoReturn:
    raise DifferentiationError(
        f"compiled autograd runs this backward, and {root.eager_because or NOT_ON}. Gradients would"
        " have to be reduced outside of its graph, and it does not tell when it ends. Compile the"
        " model or its blocks, and leave compiled autograd off"
    )


class _Uncompiled(torch.autograd.Function):
    """The identity, which compiled autograd may not record.

    It unpacks what nodes have saved before it calls any of their hooks, and would fail at a
    parameter that is not gathered.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, refuse: Any) -> Tensor:
        ctx.refuse = refuse
        return x.detach()  # and no view of `x`: users may write to it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        ctx.refuse()  # asked for when the node is recorded, in torch 2.11 to 2.14


def _guarded(tensor: Tensor, refuse: Any) -> Tensor:
    if tensor.grad_fn is None:
        return tensor
    outcome: Tensor = _Uncompiled.apply(tensor, refuse)  # type: ignore[no-untyped-call]
    return outcome
