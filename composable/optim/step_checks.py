"""Checks of every optimizer before it steps, in one global hook: what would train nothing, or apart on every rank, is refused.

* An optimizer that holds parameters which were replaced: by the annotation, by an assignment, or by `remove`.
* A gradient that was accumulated under `no_sync` and not reduced: ranks would step by different gradients.
* A gradient of a unit that was annotated before there was a process group: every rank would train it alone.
* A parameter that backward steps (`apply_optimizer_in_backward`).

The hook also lets an optimizer that is known to step element by element step its local shards (`local_steps`). A second hook,
after the step, bumps the version counters of what was stepped, which `fused` implementations do not: the engine compares them
to see that what it has gathered is out of date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composable.comm import is_distributed
from composable.compilation import untraced
from composable.engine.param import ParamLabel, gradient_of, label_of, unit_mesh_of, unit_of
from composable.errors import MeshError, OptimizerError
from composable.memory.torch_private import as_tensors
from composable.optim.in_backward import is_part_of_backward, stepped_in_backward
from composable.optim.local_steps import is_stand_in, refuse_unreduced, step_on_shards_unasked

if TYPE_CHECKING:
    from composable.engine.unit import Unit

_OTHER: Final = (
    "was replaced on its module, by an annotation, by load_state_dict(assign=True) or by an assignment, after the optimizer was "
    "made. Make the optimizer after that"
)
_REPLACED: Final = {
    "original": _OTHER,
    "replaced": _OTHER,
    "compute": "is what modules compute with: the optimizer was made inside a forward or backward, or before an annotation "
    "came around both replicated and sharded modules. Make it after annotating, and between steps",
    "removed": "was replaced when the annotation was removed. Make the optimizer anew",
}
_NO_CHANGE: Final = "No parameter was changed."
# While an optimizer steps: the parameters of units that it holds, and those of them that had a gradient before.
_managed: Final[WeakKeyDictionary[Optimizer, tuple[list[Tensor], list[Tensor]]]] = WeakKeyDictionary()


@untraced
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if is_stand_in(optimizer):
        return  # a step that calls the step of its base class: the optimizer itself was checked
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    runs_in_backward = is_part_of_backward(optimizer)
    if not runs_in_backward and (name := stepped_in_backward(parameters)) is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__}.step: {name} is stepped in backward already, since apply_optimizer_in_backward. Give "
            f"this optimizer other parameters, or call remove() on what that returned. {_NO_CHANGE}"
        )
    labels = list(map(label_of, parameters))
    if {label.form for label in labels if label is not None} - {"at_rest"}:
        for parameter, label in zip(parameters, labels, strict=True):
            _refuse_replaced(optimizer, label, parameter.grad)
        labels = [None if label is None or label.form != "at_rest" else label for label in labels]
    managed = [parameter for parameter, label in zip(parameters, labels, strict=True) if label is not None]
    if not managed:
        return
    for unit in () if runs_in_backward else dict.fromkeys(map(unit_of, managed)):
        if unit is not None:
            _refuse_starved(optimizer, unit)
    sharded = [parameter for parameter in managed if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in managed if not isinstance(parameter, DTensor)]
    if plain and is_distributed() and dist.get_world_size() > 1:
        _refuse_annotated_alone(optimizer, plain)
        refuse_unreduced(optimizer, plain)
    if sharded and not step_on_shards_unasked(optimizer):  # which looks at gradients by itself
        refuse_unreduced(optimizer, sharded)
    _managed[optimizer] = managed, _with_gradients(managed)


@untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    managed, before = _managed.pop(optimizer, ([], []))
    # Those without a gradient were not stepped: a graph that needs their values stays valid. Some optimizers drop gradients as
    # they go, and a closure may have brought them.
    stepped = before or _with_gradients(managed)
    if stepped:
        increment_version(stepped)


def _with_gradients(parameters: list[Tensor]) -> list[Tensor]:
    with as_tensors():
        gradients = list(map(gradient_of, parameters))
    return [parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None]


def _refuse_replaced(optimizer: Optimizer, label: ParamLabel | None, gradient: Tensor | None) -> None:
    if label is None or label.form == "at_rest" or (label.form == "original" and gradient is not None):
        return  # an original parameter with a gradient is used outside of its module as well
    raise OptimizerError(
        f"{type(optimizer).__name__}.step: parameter '{label.fqn}' of unit '{label.unit}' {_REPLACED[label.form]}, from "
        f"model.parameters(). The step would train nothing. {_NO_CHANGE}"
    )


def _refuse_starved(optimizer: Optimizer, unit: Unit) -> None:
    """Zero-bubble schedules ask autograd for gradients of inputs and of weights, and assign `.grad` themselves."""
    if unit.starved and not unit.fed and unit.mesh_info.all.size > 1:
        raise OptimizerError(
            f"{type(optimizer).__name__}.step: backward went through unit '{unit.name}', and brought no gradient to any of its "
            "parameters: torch.autograd.grad() was asked for other gradients, as zero-bubble pipeline schedules do, which assign "
            f".grad themselves. Such gradients are not reduced over the ranks. Use a schedule that calls backward(). {_NO_CHANGE}"
        )
    unit.fed = unit.starved = False


def _refuse_annotated_alone(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and unit_mesh_of(parameter) is None and (label := label_of(parameter)) is not None:
            raise MeshError(
                f"{type(optimizer).__name__}.step: unit '{label.unit}' was annotated before there was a process group: each of "
                f"the {dist.get_world_size()} ranks would train it alone. Call remove() and annotate again, after "
                f"init_process_group; to train on this rank alone, pass mesh=DeviceMesh(device, [{dist.get_rank()}])"
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
