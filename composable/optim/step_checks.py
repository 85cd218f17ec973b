"""Check every optimizer before it steps, in one global hook. Raise an error if the step would train
nothing, or would make the ranks differ:

* An optimizer that holds parameters which were replaced: by the annotation, by an assignment or its
  adoption, or by `remove`.
* A gradient that was accumulated under `no_sync` and not reduced: ranks would step by different
  gradients.
* A parameter that backward steps (`apply_optimizer_in_backward`).

The hook also lets an optimizer that is known to step element by element step its local shards
(`shard_steps`). A second hook, after the step, bumps the version counters of what was stepped,
which `fused` implementations do not: the engine compares them to see that what it has gathered is
out of date. Units that are kept unsharded are gathered again at once: all ranks step here, and
inside of such scopes each rank may call units in an order of its own.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable.comm.backends import is_distributed
from composable.comm.base import tell_when
from composable.compilation import untraced
from composable.contract.values import parameters_of
from composable.engine.params.param import labels_of
from composable.engine.step.root import ROOTS, UNLANDED, Phase, land_held
from composable.engine.step.unit import Unit, unit_of, written
from composable.errors import OptimizerError
from composable.features.split_backwards import refuse_split
from composable.optim.in_backward import is_part_of_backward, stepped_in_backward
from composable.optim.refusals import is_trained, refuse_unreduced
from composable.optim.shard_steps import StandIn, Stepping, step_on_shards_unasked
from composable.torch_private import as_tensors, steps_its_base

_OTHER: Final = (
    "was replaced on its module, by an annotation, by load_state_dict(assign=True), by an"
    " assignment, or by the next forward's shard of what was assigned, after the optimizer was"
    " made. Make the optimizer after that"
)
_REPLACED: Final = {
    "original": _OTHER,
    "replaced": _OTHER,
    "compute": (
        "is what modules compute with: the optimizer was made inside a forward or backward, or"
        " before an annotation came around both replicated and sharded modules. Make it after"
        " annotating, and between steps"
    ),
    "removed": "was replaced when the annotation was removed. Make the optimizer anew",
}
# While an optimizer steps: the parameters of units that it holds, those of them that had a gradient
# before, and units that are kept unsharded.
_Stepped = tuple[list[Tensor], list[Tensor], list[Unit]]
_managed: Final[WeakKeyDictionary[Optimizer, _Stepped]] = WeakKeyDictionary()


@untraced
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if isinstance(optimizer, StandIn) or steps_its_base(optimizer):
        return  # the optimizer's own step was checked
    if (stepping := Stepping.of(optimizer)) is not None:
        stepping.keep_next_to_step(optimizer)  # users may have registered hooks since
    step = f"{type(optimizer).__name__}.step"
    parameters = parameters_of(optimizer)
    runs_in_backward = is_part_of_backward(optimizer)
    if not runs_in_backward and (name := stepped_in_backward(parameters)) is not None:
        raise OptimizerError(
            f"{step}: {name} is stepped in backward already, since apply_optimizer_in_backward."
            " Give this optimizer other parameters, or call remove() on what that returned"
        )
    labelled = [
        (parameter, label)
        for parameter, label in zip(parameters, labels_of(parameters), strict=True)
        if label is not None
    ]
    for parameter, label in labelled:
        if label.form != "at_rest" and not is_trained(parameter, label):
            raise OptimizerError(
                f"{step}: {label} {_REPLACED[label.form]}, from model.parameters(), or call"
                " rebind_optimizer(). The step would train nothing"
            )
    managed = [parameter for parameter, label in labelled if label.form == "at_rest"]
    if not managed:
        return
    if UNLANDED and not runs_in_backward:
        land_held()
    owners = dict.fromkeys([label.owner for _, label in labelled if label.owner is not None])
    units = [unit for owner in owners if (unit := owner()) is not None]
    for unit in units:
        if unit.is_offloaded:  # asked here, since a call for each unit would take longer
            unit.refuse_offloaded(step)
    refuse_split(step, units)
    if not runs_in_backward:
        for root in dict.fromkeys([unit.root for unit in units if unit.root is not None]):
            root.end_unseen()
    plain = [parameter for parameter in managed if not isinstance(parameter, DTensor)]
    if plain and is_distributed() and dist.get_world_size() > 1:
        refuse_unreduced(step, plain, OptimizerError)
    # which looks at gradients by itself
    if len(plain) < len(managed) and not step_on_shards_unasked(optimizer):
        refuse_unreduced(step, managed, OptimizerError)
    kept = [unit for unit in units if unit.kept_by]
    _managed[optimizer] = managed, _with_gradients(managed), kept


# How often the optimizer has stepped that steps first in each step; there may be several.
_steps = 0
_first: ref[Optimizer] | None = None


def _when() -> str:
    """For errors of collectives: the part of which step runs now."""
    of = f" of step {_steps}"
    phases = [root.phase for root in ROOTS]
    if Phase.BACKWARD in phases:
        return f" in the backward{of}"
    if any(root.running for root in ROOTS):
        return f" in the forward{of}"
    if Phase.WAITING in phases:
        return f" after the forward{of}"
    return "" if _first is None else f" in step {_steps}"


tell_when(_when)


@untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    global _steps, _first
    if steps_its_base(optimizer):
        return  # its own step has not ended
    if _first is None or (first := _first()) is None:
        _steps, _first = 1, ref(optimizer)
    elif first is optimizer:
        _steps += 1
    managed, before, kept = _managed.pop(optimizer, ([], [], []))
    # Those without a gradient were not stepped: a graph that needs their values stays valid. Some
    # optimizers drop gradients as they go, and a closure may have brought them.
    stepped = before or _with_gradients(managed)
    if stepped:
        increment_version(stepped)
    if kept:
        changed = {unit_of(parameter) for parameter in stepped}
        written([unit for unit in kept if unit in changed])


def _with_gradients(parameters: list[Tensor]) -> list[Tensor]:
    with as_tensors():
        return [parameter for parameter in parameters if parameter.grad is not None]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
