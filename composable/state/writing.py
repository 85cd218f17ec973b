"""Write to a model what a load gives it: memory, dtypes, and this rank's rows of a folder.

The plan (`folder_plan.py`) has already decided what is written, and checked that it fits. Nothing
is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable.comm import is_distributed
from composable.engine.params.param import move_hooks
from composable.engine.step.unit import unit_of
from composable.features.forms import is_packed
from composable.state.folder import Box, Files
from composable.state.folder_plan import Copied, FolderPlan, Packed, box_of, rows_of
from composable.state.hub_names import Converted, is_of_transformers, kept_dtypes
from composable.state.whole import tensors_at_rest, whole_parameter
from composable.torch_private import apply_to_tensors, local_tensor


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """As `Module.to_empty`, but tied tensors stay tied, and what has memory keeps it."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    unit = unit_of(parameter)
                    offloaded = unit is not None and unit.is_sharded and unit.spec.grouping.on_host
                    empty = torch.empty_like(parameter, device="cpu" if offloaded else device)
                    made[id(parameter)] = new = whole_parameter(empty, parameter)
                    move_hooks(parameter, new)
                setattr(module, name, made[id(parameter)])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[id(buffer)]


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a folder has, as `from_pretrained(dtype=)` does.

    These are parameters and buffers of floating-point numbers. Buffers that are in no state dict,
    as rotary frequencies are, keep their dtype, and so does what a model of transformers declares
    to be computed in float32.
    """
    state = tensors_at_rest(model)
    kept = kept_dtypes(model, state, dtype) if is_of_transformers(model) else {}
    wanted: dict[int, tuple[Tensor, torch.dtype]] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not is_packed(tensor):
            for each in (tensor, tensor.grad):
                if each is not None:
                    wanted[id(each)] = each, kept.get(name, dtype)
    apply_to_tensors(
        model, lambda tensor: tensor.to(wanted[id(tensor)][1]) if id(tensor) in wanted else tensor
    )


@torch.no_grad()
def write(model: nn.Module, plan: FolderPlan) -> None:
    """Read this rank's part of everything, one file after another.

    Each of them is closed when it is done.
    """
    files, steps = plan.files, plan.steps()
    state = tensors_at_rest(model)  # it may have been cast, or given memory
    last = {file: number for number, (paths, _) in enumerate(steps) for file in paths}
    for number, (paths, step) in enumerate(_in_view(steps)):
        match step:
            case Copied(target, source):
                _put(model, target, state[target], partial(files.read, source))
            case Packed(target, names):
                _hand_over(model, target, {of: files.read(name) for of, name in names.items()})
            case Converted():
                _convert(model, step, files, state)
        for file in paths:
            if last[file] == number:
                files.close(file)


def _convert(model: nn.Module, step: Converted, files: Files, state: Mapping[str, Tensor]) -> None:
    rows = rows_of(step, [state[target] for target in step.targets])
    if rows is not None and rows.start == rows.stop:
        return  # none of these experts is on this rank
    values = step.convert(model, files.read, rows)
    for target in step.targets:
        value = values.pop(target)

        def part(box: Box, value: Tensor = value) -> Tensor:
            return value[tuple(box)] if rows is None else value[(slice(None), *box[1:])]

        _put(model, target, state[target], part)


def _put(model: nn.Module, target: str, tensor: Tensor, read: Callable[[Box], Tensor]) -> None:
    """Write what `read` gives for a box into one tensor, however it rests."""
    box = box_of(tensor)
    if box is None:
        _hand_over(model, target, {target: read(())})
    elif (local := local_tensor(tensor)).numel():
        local.copy_(read(box))


def _hand_over(model: nn.Module, target: str, wholes: Mapping[str, Tensor]) -> None:
    """Load one parameter or buffer, or what is named below it."""
    path = target.rpartition(".")[0]
    values = {name.removeprefix(f"{path}."): whole for name, whole in wholes.items()}
    model.get_submodule(path).load_state_dict(values, strict=False)


def _in_view(items: Sequence[Any]) -> Iterable[Any]:
    """Yield the items, with a bar on the standard error if a person is there to see rank 0's."""
    first = not is_distributed() or torch.distributed.get_rank() == 0
    if not first or not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.progress import track  # noqa: PLC0415
    except ImportError:
        return items
    return track(items, "load", console=Console(stderr=True), transient=True)
