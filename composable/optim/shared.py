"""What clipping, gradient scalers and steps share: refusals of parameters, and numbers on which all
ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from composable.comm import backend_of, reduce_numbers
from composable.engine.params.param import ParamLabel, holds_unreduced, labels_of
from composable.errors import ComposableError

Groups = tuple[dist.ProcessGroup, ...]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors of one dtype and device, which one kernel can take."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


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


def groups_sharded_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> Groups:
    """The process groups over which the parts of a DTensor add up to the whole; none on a rank
    outside of its mesh.
    """
    if mesh.get_coordinate() is None:
        return ()
    sharded = [
        dim
        for dim, placement in enumerate(placements)
        if mesh.size(dim) > 1 and not placement.is_replicate()
    ]
    return tuple(map(mesh.get_group, sharded))


def reduce_over(group: dist.ProcessGroup, numbers: Tensor, text: str, *, largest: bool) -> Tensor:
    """The sum, or the largest, of all ranks' `numbers` (1-D), one by one, on the device that they
    are on here.

    Numbers on the host come from parameters under CPU offload, or from a pipeline stage without
    parameters, while other stages send from the accelerator: so the accelerator is preferred if it
    has a backend of its own.
    """
    device = numbers.device
    if device.type == "cpu" and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        if backend_of(group, accelerator) not in ("undefined", backend_of(group, device)):
            device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return reduce_numbers(numbers.to(device), group, largest=largest, text=text).to(numbers.device)
