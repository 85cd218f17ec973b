"""Predicts a step's peak of memory from shapes.

Must not run what it predicts, save for the activations of one forward.

Arithmetic that can be checked with a pencil: what lives all the time (parameters, gradients,
AdamW's two states), what a forward leaves for backward (activations), and what is passing through
(unsharded parameters and gradients of the units at hand).
"""

from __future__ import annotations

from typing import Final

import torch
from models import Task
from torch import Tensor


def saved_bytes(task: Task) -> int:
    """Bytes that autograd keeps after one un-annotated forward, parameters and inputs of the model
    not counted.
    """
    owned = {
        tensor.untyped_storage().data_ptr()
        for tensor in [*task.model.parameters(), *task.model.buffers()]
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = task.loss(task.model, 0)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return size


# buffers that units of one layout take turns in: one is computed with, one is on its way
TURNS: Final = 2
BLOCKS: Final = 2  # messages of a rank that are filled or read at the same time

AROUND: Final = (
    # bytes that a process which trains on a host has at rest above its tensors: workspaces of BLAS,
    # the allocator
    45e6
)

PREDICTABLE: Final = ("un-annotated", "composable", "composable-keep", "composable-replicate")


def predicted(contender: str, task: Task, *, size: int, activations: int) -> float:
    """Peak bytes of a rank's process on a host in a step of AdamW after the first one; `peak.py`
    predicts an accelerator's.

    Args:
        contender: one of `PREDICTABLE`.
        ways: ranks that parameters are cut over.
        activations: what `saved_bytes` found.
    """
    units = [module for module in task.model.modules() if isinstance(module, task.units)]
    sizes = [sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in units]
    total = float(sum(p.numel() * p.element_size() for p in task.model.parameters()))
    root, unit, one_unit = total - sum(sizes), max(sizes), activations / len(units)
    # While a unit's backward runs, the gradients of its activations are about as large as they are.
    activity = activations + one_unit + AROUND
    if contender == "un-annotated":
        # Backward trades activations for gradients, linearly enough: one end decides.
        return 3 * total + max(activity, total + AROUND)
    if contender == "composable-replicate":
        return 4 * total + activity  # gradients live in buckets, which stay
    # On the host, memory for what passes through is kept and used again, so it is there all the
    # time.
    gathered = root + TURNS * unit if contender == "composable" else total
    # Gradients of two units (one grows, one is being reduced), and what of them is on its way to
    # other ranks.
    reducing = 2 * unit + BLOCKS * unit * (size - 1) / size
    return 4 * total / size + gathered + reducing + activity
