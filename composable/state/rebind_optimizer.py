"""`rebind_optimizer`: move an optimizer to the parameters that an annotation has registered.

The optimizer was built before the annotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from composable.checked import checked
from composable.compilation import unwrapped
from composable.contract.tree import registered_parameters
from composable.contract.values import TorchOptimizer
from composable.engine.params.param import PLAIN, label_of
from composable.engine.step.unit import at_rest, unit_of, units_below
from composable.errors import OptimizerError, few
from composable.features.param_forms import mesh_and_placements
from composable.tensors import whole_of, wrap
from composable.torch_private import local_of, step_hooks


@checked
@torch.no_grad()
def rebind_optimizer(module: nn.Module, optimizer: TorchOptimizer) -> None:
    """Make an optimizer hold the parameters that the model has after an annotation.

    The optimizer keeps its state and groups. Use this for an optimizer that you built before
    `fully_shard` or `replicate`, and after `remove` and an annotation with another plan. State with
    a parameter's shape is sharded like the parameter. All ranks call this together, before the next
    step.

    Args:
        module: the annotated model, or the plain one after `remove`.
        optimizer: any `torch.optim.Optimizer`.

    Raises:
        OptimizerError: the optimizer holds a parameter that neither is nor was registered in
            `module`, or it keeps state of whole matrices (`step_on_matrices`). Nothing changes.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> fully_shard(model)
        >>> rebind_optimizer(model, optimizer)
    """
    module = unwrapped(module)
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer)[0].values())
    if optimizer.state and any(getattr(owner, "keeps_whole_state", False) for owner in owners):
        raise OptimizerError(
            f"rebind_optimizer: {type(optimizer).__name__} keeps the state of whole matrices on the"
            " ranks that own them (step_on_matrices). Save it with get_optimizer_state_dict, and"
            " load it into a new optimizer"
        )
    with at_rest(units_below([module])):  # in `keep_unsharded`, too
        here = {
            (id(place.module), place.name): found
            for place, found in registered_parameters(module, stop=())
        }
    current = {id(parameter) for parameter in here.values()}

    def successor(parameter: Tensor) -> nn.Parameter | None:
        if id(parameter) in current:
            assert isinstance(parameter, nn.Parameter)
            return parameter
        label = label_of(parameter)
        places = () if label is None else label.places
        keys = ((id(owner()), name) for owner, name in places)
        found = next((here[key] for key in keys if key in here), None)
        return found if found is not None and _fits(found, parameter) else None

    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_former = {id(p): found for p in held if (found := successor(p)) is not None}
    lost = [
        str(label_of(parameter) or f"a parameter of shape {tuple(parameter.shape)}")
        for parameter in held
        if id(parameter) not in by_former
    ]
    if lost:
        raise OptimizerError(
            f"rebind_optimizer: {type(optimizer).__name__} holds {few(lost)}, which"
            f" {type(module).__name__} does not have. Pass the model whose parameters it was built"
            " from, or build it anew from model.parameters()"
        )
    for group in optimizer.param_groups:
        group["params"] = [by_former[id(parameter)] for parameter in group["params"]]
    for former in held:
        new = by_former[id(former)]
        if new is not former and former in optimizer.state:
            optimizer.state[new] = {
                key: _follow(value, former, new)
                for key, value in optimizer.state.pop(former).items()
            }


def _fits(found: Tensor, former: Tensor) -> bool:
    if found.shape == former.shape:
        return True
    # a plain part of a whole (`declare_part`), of which the other one knows the whole
    has_whole = isinstance(found, DTensor) != isinstance(former, DTensor)
    part = former if isinstance(found, DTensor) else found
    return has_whole and mesh_and_placements(part) is not None and found.ndim == former.ndim


def _follow(value: Any, former: Tensor, new: Any) -> Any:
    """Optimizer state of the former parameter's shape, distributed like the new one."""
    if not isinstance(value, Tensor) or value.shape != former.shape or not former.shape:
        return value
    if not isinstance(new, DTensor):
        return _whole_for(new, value)
    form, whole = PLAIN, value
    if isinstance(former, DTensor) or mesh_and_placements(former) is None:
        whole = whole_of(value)
    elif (unit := unit_of(new)) is not None:
        form = next(each.info.form for each in unit.params if id(each.at_rest) == id(new))
    cut = form.shard_like(whole, new, local_of(new).device)
    return cut.clone()  # no view of the whole


def _whole_for(new: Tensor, value: Tensor) -> Tensor:
    """All of `value`, or of a declared part what its ranks share."""
    found = mesh_and_placements(new)
    if found is None or not isinstance(value, DTensor):
        return whole_of(value)
    placements = [Replicate()] * len(found[1]) + [*value.placements[len(found[1]) :]]
    mesh = value.device_mesh
    return whole_of(wrap(local_of(value), mesh, placements, new.shape, new.stride()))
