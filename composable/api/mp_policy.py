"""What the user may pass as `mp_policy`, and what it becomes for which modules, parameters and buffers; casts nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import fsdp

from composable.config import DTYPES_BY_NAME, MixedPrecisionPolicy
from composable.device.buffer_swap import BufferHolder
from composable.errors import AnnotationError, closest, few
from composable.model.traversal import REPLICATE, SHARD, ManagedParameter, walk

MixedPrecision = MixedPrecisionPolicy | fsdp.MixedPrecisionPolicy | torch.dtype | str | None

CAN_KEEP: Final = hasattr(torch.Tensor, "grad_dtype")


def precision_policy(verb: str, value: Any) -> MixedPrecisionPolicy:
    """The policy that an argument stands for.

    Raises:
        AnnotationError: it is none, or asks for what this torch cannot do.
    """
    if isinstance(value, fsdp.MixedPrecisionPolicy):
        value = MixedPrecisionPolicy(
            param_dtype=value.param_dtype,
            reduce_dtype=value.reduce_dtype,
            output_dtype=value.output_dtype,
            cast_forward_inputs=value.cast_forward_inputs,
        )
    elif isinstance(value, torch.dtype) or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES_BY_NAME):
        value = MixedPrecisionPolicy(param_dtype=value)
    elif value is None:
        value = MixedPrecisionPolicy()
    if not isinstance(value, MixedPrecisionPolicy):
        raise AnnotationError(
            f"{verb}: mp_policy must be a MixedPrecisionPolicy (composable's or torch's), or a floating-point dtype or its "
            f"name, e.g. 'bf16'; got {value!r}"
        )
    if value.keep_grads_in_reduce_dtype and not CAN_KEEP:
        raise AnnotationError(
            f"{verb}: keep_grads_in_reduce_dtype needs a torch in which a gradient may have another dtype than its parameter "
            f"(Tensor.grad_dtype); this is torch {torch.__version__}. Leave it out, and gradients have the parameter's dtype"
        )
    return value


def precision_of_replicas(value: Any) -> MixedPrecisionPolicy:
    """The policy of a replicated unit.

    Raises:
        AnnotationError: it is none, or asks for what only sharded units have.
    """
    policy = precision_policy("replicate", value)
    if policy.keep_grads_in_reduce_dtype:
        raise AnnotationError(
            "replicate: keep_grads_in_reduce_dtype is for fully_shard: gradients of replicated ones have the parameter's "
            "dtype, and are cast to reduce_dtype for the sum alone. Leave it out, or pass fully_shard a mesh of (ranks, 1), "
            "whose shards are whole copies"
        )
    return policy


def exact_modules(modules: Sequence[nn.Module], precision: MixedPrecisionPolicy) -> list[nn.Module]:
    """The modules of a unit that keep their dtype, but for those inside of others."""
    found: dict[int, nn.Module] = {}
    inside: dict[int, None] = {}
    if precision.full_precision_classes and precision.param_dtype is not None:
        for module in modules:
            for _, below in walk(module, stop=(SHARD, REPLICATE)):
                if isinstance(below, precision.full_precision_classes) and id(below) not in inside:
                    found[id(below)] = below
                    inside |= {id(each): None for each in below.modules() if each is not below}
    return [module for key, module in found.items() if key not in inside]


def ids_of_exact(modules: Sequence[nn.Module], precision: MixedPrecisionPolicy) -> dict[int, None]:
    """Of all modules in and below `modules` that keep their dtype, in whatever unit they are."""
    if not precision.full_precision_classes or precision.param_dtype is None:
        return {}
    kept = [each for module in modules for each in module.modules() if isinstance(each, precision.full_precision_classes)]
    return {id(below): None for module in kept for below in module.modules()}


def inherited_inside(
    modules: Sequence[nn.Module], picked: Sequence[nn.Module], precision: MixedPrecisionPolicy
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """The policy of each unit that is picked below `modules`, unless it gets another one.

    What the caller gets is cast where it leaves the module that he annotates; units inside pass on what they compute. Those
    inside of modules that keep their dtype keep theirs.
    """
    policy = replace(precision, output_dtype=None)
    exact = exact_modules(modules, precision)
    within = {id(below): None for module in exact for below in module.modules() if below is not module}
    return {unit: policy.in_full_precision() if id(unit) in within else policy for unit in picked}


def is_exact(managed: ManagedParameter, exact: Collection[int], verb: str) -> bool:
    """Whether a parameter keeps its dtype, since it is in one of the modules with the ids `exact`.

    Raises:
        AnnotationError: it is tied to one that is in none.
    """
    kept = [place for place in managed.places if id(place.module) in exact]
    cast = [place for place in managed.places if id(place.module) not in exact]
    if kept and cast:
        raise AnnotationError(
            f"{verb}: parameter '{managed.fqn}' is tied: '{kept[0].fqn}' keeps its dtype, since full_precision_classes has the "
            f"class of its module or of one around it, and '{cast[0].fqn}' is cast. Untie them, or name the other class, "
            f"{type(cast[0].module).__name__}, too"
        )
    return bool(kept)


def buffer_holders(
    modules: Sequence[nn.Module], precision: MixedPrecisionPolicy, top: Sequence[nn.Module]
) -> tuple[BufferHolder, ...]:
    """The modules of a unit whose buffers are cast: any of them may have buffers, or get some.

    Args:
        top: the modules that were annotated; names of buffers are below them.
    """
    asked = precision.buffer_dtype
    if asked is None:
        return ()
    exact = ids_of_exact(modules, precision)
    below = {id(each): each for module in modules for _, each in walk(module, stop=(SHARD, REPLICATE))}
    holders = [BufferHolder(each, asked) for key, each in below.items() if key not in exact]
    if not isinstance(asked, Mapping):
        return tuple(holders)
    named: dict[int, dict[str, torch.dtype]] = {}
    for fqn, module, name in [found for each in top for found in _named_buffers(each) if id(found[1]) in below]:
        for glob, dtype in asked.items():
            if fnmatchcase(fqn, glob):
                named.setdefault(id(module), {})[name] = dtype
    return tuple(BufferHolder(below[key], dtypes) for key, dtypes in named.items())


def _named_buffers(top: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """FQN, module and name of every floating-point buffer, as often as it is registered."""
    return [
        (f"{prefix}.{name}" if prefix else name, module, name)
        for prefix, module in top.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_floating_point()
    ]


def refuse_unknown_buffers(verb: str, modules: Sequence[nn.Module], precision: MixedPrecisionPolicy) -> None:
    """Raise for names of buffers that no floating-point buffer has."""
    if not isinstance(precision.buffer_dtype, Mapping):
        return
    names = [fqn for module in modules for fqn, _, _ in _named_buffers(module)]
    for glob in precision.buffer_dtype:
        if not any(fnmatchcase(fqn, glob) for fqn in names):
            near = closest(glob, names, limit=3)
            hint = f"close to it: {', '.join(near)}" if near else f"there is: {few(names) if names else 'none'}"
            raise AnnotationError(f"{verb}: buffer_dtype names '{glob}', which matches no floating-point buffer; {hint}")
