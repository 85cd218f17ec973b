"""Gradients that weigh as much as what they are the mean of: the scope `weighted_gradients`; moves nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn

from composable.api.accumulation import units_in
from composable.device.private import in_backward
from composable.errors import AnnotationError, PhaseError, closest
from composable.runtime.weighted_window import Number
from composable.runtime.weights import WeighedUnits, factor_of

_SCALES: Final = ("gradients", "loss")


@contextmanager
def weighted_gradients(
    model: nn.Module, *, weight: float | Tensor, more: bool = False, scale: str = "gradients"
) -> Iterator[Number | None]:
    """Let backwards inside the scope bring gradients of the mean over everything that all ranks have, not the mean of means.

    Each rank's loss is a mean over what it has: its tokens, say, of which ranks have different numbers. With their number as
    `weight` every gradient is the sum of weight times gradient over all ranks, divided by the sum of all weights. All ranks
    enter the scope together, each with its own weight; it is put around backward, and may be around forward, too.

    A rank whose weight is zero counts nothing: its gradients are zeros, even where its loss is infinite or NaN. A `grad_reduce`
    of units does not count inside the scope, unless it is the loss that is scaled.

    With `more=True` the next scope of the same model goes on with the same mean, whether or not `no_sync` is around them: what
    is there already is scaled to its share. A step begins with cleared gradients (`zero_grad()`); optimizers refuse to step
    before the scope without `more` has come.

    Args:
        model: an annotated module, or one that contains some. Units may be on different meshes, if one of them has all ranks.
        weight: this rank's, for this micro-batch, not negative: a number, or a tensor with one element, which the host does not
            read if it is on an accelerator.
        more: whether more micro-batches of this step follow.
        scale: "gradients", or "loss" where a forward mixes tokens of several ranks and their gradients cannot be told apart
            (expert or context parallelism): then multiply each rank's loss by what the scope yields.

    Yields:
        With `scale="loss"` the factor of this rank's loss, a number or, on an accelerator, a tensor without dimensions; None
        otherwise.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        AnnotationError: the weight is negative, infinite or no number; there is no such `scale`; no unit has all ranks.
        PhaseError: inside of another such scope, or of a backward; units hold gradients that were not weighted; all weights of
            all ranks are zero (on accelerators, where nobody reads them, gradients are zeros then).
        RanksDisagreeError: the weight of another rank was refused; ranks are in different micro-batches of a step.

    Example:
        >>> with weighted_gradients(model, weight=batch.n_tokens):
        ...     mean_loss_per_token(model, batch).backward()

    After `num_items_in_batch` of Hugging Face's Trainer, which divides sums of losses by a number of tokens that the program
    has to bring together itself.
    """
    if scale not in _SCALES:
        near = "".join(f"; did you mean '{name}'?" for name in closest(str(scale), _SCALES))
        raise AnnotationError(f"weighted_gradients: scale must be 'gradients' or 'loss', got {scale!r}{near}")
    if in_backward():
        raise PhaseError(
            "weighted_gradients was entered inside a backward, of which some gradients are there already. Enter it before"
        )
    units = WeighedUnits(*units_in("weighted_gradients", model))
    window = units.window()
    window.more = more
    value, refused = _checked(weight, reads=units.mesh_info.all.capabilities.reads_freely)
    goes_on = False
    try:
        total = units.agree(window, value, refused, last=not more)
        units.enter(window, value if scale == "gradients" else None, total)
        yield factor_of(value, total, units.mesh_info.all.size).value if scale == "loss" else None
        goes_on = more
    except Exception as error:
        if window.refused:
            goes_on = window.goes_on  # nobody waits, and who tries again finds the micro-batches before
        else:
            units.give_up(f"{type(error).__name__} left weighted_gradients")
        raise
    finally:
        try:
            units.leave(window, goes_on=goes_on)
        except BaseException:
            units.leave(window, goes_on=goes_on)  # whole, if an interrupt has ended it
            raise


def _checked(weight: object, *, reads: bool) -> tuple[Number, str]:
    """The weight, and why it is refused.

    Args:
        reads: whether the host may read what is on devices.
    """
    value: object = weight
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        if not reads and weight.get_device() >= 0:  # a host has no number
            return weight, ""
        value = weight.item()
    if isinstance(value, int | float) and not isinstance(weight, bool) and 0 <= value < math.inf:
        return float(value), ""
    return 0.0, (
        "weighted_gradients: weight must be a number that is not negative, e.g. of the tokens that this rank's loss is the "
        f"mean of; got {weight!r}. Gradients are as they were before, on all ranks"
    )
