"""`clip_grad_norm_`: its arguments, what it refuses, and in which order; how a norm is put together it does not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.compilation import untraced
from composable.device.held_gradients import is_held
from composable.device.parameter_labels import label_of
from composable.errors import ClippingError, NonFiniteError
from composable.optim.gradient_norm import Gradients, over_stages
from composable.runtime.accumulation import any_window_open
from composable.runtime.early_steps import stepped_in_backward
from composable.runtime.optimizer_hooks import refuse_not_trained
from composable.runtime.ownership import local_gradients

_EPSILON: Final = 1e-6  # torch's: keeps gradients of norm 0 finite


def _check_pipeline(group: object) -> None:
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        cure = '; of a mesh, pass mesh["pp"].get_group()' if isinstance(group, DeviceMesh) else ""
        raise ClippingError(f"clip_grad_norm_: pp_group must be a process group, got a {type(group).__name__}{cure}")
    if dist.get_rank(group) < 0:
        raise ClippingError(
            "clip_grad_norm_: this rank is not in pp_group. Pass the group of the pipeline that it is a stage of"
        )


def _refuse_local(parameters: Sequence[Tensor]) -> None:
    """Raise if a gradient is this rank's alone: ranks would scale by different numbers, or add up too much."""
    wanted = dict(zip(map(id, parameters), parameters, strict=True))
    local = [label_of(p) for p in parameters if isinstance(p, nn.Parameter) and is_held(p.grad)]
    found = [(unit, name) for unit, name, _ in filter(None, local)]
    found += [(unit, name) for parameter, unit, name in local_gradients() if id(parameter) in wanted]
    if found:
        unit, name = found[0]
        raise ClippingError(
            f"clip_grad_norm_: the gradient of parameter '{name}' of unit '{unit}' is this rank's alone: it was made under "
            "no_sync, and no backward since has averaged it over the ranks. Run the last backward before clipping outside of "
            "no_sync, or call reduce_gradients(model), on all ranks"
        )


# --- arguments --------------------------------------------------------------------------------------------------------


def _parameters_of(given: object) -> list[Tensor]:
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, Tensor):
        return [given]
    if not isinstance(given, Iterable):
        raise _not_parameters(given)
    parameters = list(given)
    for kind in dict.fromkeys(map(type, parameters)):
        if not issubclass(kind, Tensor):
            raise _not_parameters(next(item for item in parameters if type(item) is kind), "an iterable that holds a ")
    by_id = dict(zip(map(id, parameters), parameters, strict=True))
    return parameters if len(by_id) == len(parameters) else list(by_id.values())


def _not_parameters(found: object, inside: str = "a ") -> ClippingError:
    if isinstance(found, tuple):
        cure = "from named_parameters(), take the parameters alone: model.parameters()"
    elif isinstance(found, (torch.optim.Optimizer, dict)):
        cure = 'of an optimizer, pass the parameters: [p for group in optimizer.param_groups for p in group["params"]]'
    else:
        cure = "pass the model, or model.parameters()"
    return ClippingError(
        f"clip_grad_norm_ takes a module, a tensor or an iterable of tensors, not {inside}{type(found).__name__}; {cure}"
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise ClippingError(f"clip_grad_norm_: {name} must be a number, got {value!r}")
    try:
        return float(value)
    except ValueError:
        raise ClippingError(f"clip_grad_norm_: {name} must be a number, got {value!r}") from None


def _limit(max_norm: object) -> float:
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and not isinstance(max_norm, DTensor):
        max_norm = max_norm.item()
    limit = _number("max_norm", max_norm)
    if not limit >= 0:
        raise ClippingError(
            f"clip_grad_norm_: max_norm must not be negative or NaN, got {limit}: gradients would change their direction. "
            "To measure the norm only, pass float('inf')"
        )
    return limit


def _order(norm_type: object) -> float:
    order = _number("norm_type", norm_type)
    if not order > 0:
        raise ClippingError(
            f"clip_grad_norm_: norm_type must be a positive number or inf, got {order}: no other norm of a tensor can be put "
            "together from those of its shards"
        )
    return order


# --- the function -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@untraced
def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients down, in place, where their norm over all parameters and all ranks is above `max_norm`.

    What `torch.nn.utils.clip_grad_norm_` would do to the model before it was annotated. That function takes any mix of
    parameters, too; this one asks DTensors nothing, and returns a plain tensor. All ranks call it together, with the same
    parameters in the same order.

    Gradients that are plain tensors count once, because they are the same on all ranks, as `replicate` leaves them. Those of
    parameters that nobody manages (`ignored_params`) are yours to average before. Units on a part of the ranks that the rest of
    the model is on (experts) count once per part.

    Args:
        model_or_parameters: a module, a tensor, or an iterable of tensors; a list of the parameters made once is the fastest.
        max_norm: what the norm is afterwards at most.
        norm_type: the order of the norm: positive, or inf for the largest absolute value.
        error_if_nonfinite: raise where the norm is infinite or NaN, on all ranks alike and before anything is changed. It
            makes the host wait for an accelerator.
        pp_group: the process group of a pipeline, whose ranks have different parameters: the norm is that of all stages, and
            each of its ranks calls this, also one without parameters.

    Returns:
        The norm before clipping, the same on all ranks: a plain tensor without dimensions, in float64 if a trainable
        parameter is, and in float32 otherwise, also for half precision.

    Raises:
        ClippingError: an argument is unusable, a parameter is not the one that is trained, or a gradient is not spread over
            the ranks like its parameter.
        NonFiniteError: the norm is not finite, and `error_if_nonfinite` was set.

    Example:
        >>> loss.backward()
        >>> norm = clip_grad_norm_(model, 1.0)
        >>> optimizer.step()

    After Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (ICML 2013).
    """
    limit, order = _limit(max_norm), _order(norm_type)
    parameters = _parameters_of(model_or_parameters)
    _check_pipeline(pp_group)
    if not parameters:
        return torch.zeros(()) if pp_group is None else over_stages(torch.zeros(()), order, pp_group, None)
    if (name := stepped_in_backward(parameters)) is not None:
        raise ClippingError(
            f"clip_grad_norm_: {name} is stepped in backward (apply_optimizer_in_backward), as soon as its gradient is there "
            "and before the others are. Clip, or step in backward"
        )
    refuse_not_trained("clip_grad_norm_", parameters)
    if any_window_open():
        _refuse_local(parameters)
    gradients = Gradients(parameters)
    total = gradients.total_norm(order)
    if pp_group is not None:
        gradients.refuse_group(pp_group)
        total = over_stages(total, order, pp_group, total.device)
    if error_if_nonfinite and not total.isfinite():
        raise NonFiniteError(
            f"clip_grad_norm_: the norm of order {order:g} over all gradients is {total.item()}, so they cannot be scaled to "
            f"{limit:g}. They are as they were. Leave this step out (optimizer.zero_grad(), then the next batch); with a "
            "GradScaler, or to scale them nevertheless, pass error_if_nonfinite=False"
        )
    gradients.scale((limit / (total + _EPSILON)).clamp(max=1.0))
    return total
