"""The values that users pass to `fully_shard` and `replicate`, checked and made into what a
`UnitSpec` holds.

torch's own policy objects are accepted in place of ours. A field of theirs that we do not know is
refused by name unless it has its default: no setting is dropped silently.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Annotated, Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composable.api.mesh import MeshPlan
from composable.checked import Takes
from composable.config import GRAD_DTYPE, CPUOffloadPolicy, MixedPrecisionPolicy
from composable.contract.contract import find_fqn, has_forward, module_name, require_callable
from composable.contract.tree import REPLICATE, SHARD, Managed, managed_buffers, walk
from composable.engine.params.precision import BufferHolder
from composable.errors import (
    AnnotationError,
    MeshError,
    PolicyError,
    closest,
    describe_module,
    did_you_mean,
    few,
    kind_of,
    what_is_there,
)
from composable.features.param_forms import mesh_and_placements
from composable.memory.streams import has_streams
from composable.policies import PolicyLike, by_all_names, select_modules

logger = logging.getLogger("composable")

# Bytes that a parameter takes for nothing, from which on another dimension than 0 is sharded: those
# of small ones are not worth the copies that it costs.
PADDING: Final = 1 << 20

MixedPrecision = Annotated[
    MixedPrecisionPolicy | fsdp.MixedPrecisionPolicy | torch.dtype | str | None,
    Takes(
        "a MixedPrecisionPolicy (composable's or torch's), or a floating-point dtype or its name,"
        " e.g. 'bf16'"
    ),
]
Offload = Annotated[
    CPUOffloadPolicy | fsdp.OffloadPolicy | None,
    Takes(
        "a CPUOffloadPolicy (composable's or torch's), or None for parameters that rest on the"
        " mesh's device"
    ),
]
# What `shard_placement_fn` returns may name a mesh for the parameter; `Any`: torch's
# `ShardPlacementResult`.
Placement = Callable[[nn.Parameter], Shard | tuple[Shard | None, DeviceMesh] | Any | None]

# What `ignored_params` takes: one of these may stand without a list around it.
Ignored = Iterable[Any] | nn.Module | nn.Parameter | str | None

# Gradients whose dtype torch's policy leaves open were reduced in `param_dtype` before torch 2.15;
# since then in the dtype of `.grad`.
_FOLLOWS_GRAD_DTYPE = torch.__version__ >= "2.15"


def _known_fields(verb: str, argument: str, value: Any, known: Sequence[str]) -> dict[str, Any]:
    """The `known` fields of one of torch's policy objects; others must have their defaults."""
    for field in fields(value):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in known and getattr(value, field.name) != default:
            raise AnnotationError(
                f"{verb}: {argument} sets '{field.name}' of torch's {type(value).__name__}, which"
                f" composable does not support; of that class it takes {', '.join(known)}. Leave"
                f" '{field.name}' at its default"
            )
    return {name: getattr(value, name) for name in known}


# --- ignored parameters, policies ----------------------------------------------------------------


def ids_of_ignored(modules: Sequence[nn.Module], ignored: Ignored) -> dict[int, None]:
    """The ids of the parameters that `ignored` stands for: parameters, modules, FQNs and globs.

    A name or glob that no parameter has may be of buffers, as in the lists that DDP takes.

    Raises:
        AnnotationError: an FQN or glob matches nothing.
    """
    if ignored is None or (isinstance(ignored, Sequence) and not ignored):
        return {}
    if isinstance(ignored, (str, nn.Module, nn.Parameter)):
        ignored = [ignored]
    named, buffers = (
        [
            (f"{fqn}.{name}".lstrip("."), tensor)
            for module in modules
            for fqn, below in by_all_names(module)
            for name, tensor in getattr(below, table).items()
            if tensor is not None
        ]
        for table in ("_parameters", "_buffers")
    )
    result: dict[int, None] = {}
    for item in ignored:
        # Those that lie elsewhere are of another call: trainers give one set to all calls.
        if isinstance(item, nn.Parameter):
            found: list[Tensor] = [item]
        elif isinstance(item, nn.Module):
            found = list(item.parameters())
        elif isinstance(item, str):
            found = _matching(item, named) or _matching(item, buffers)
            if not found:
                names = [name for fqn, _ in (*named, *buffers) for name in _around(fqn)]
                near = closest(item.rstrip(".*"), names, limit=3)
                hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else ""
                raise AnnotationError(f"ignored_params: pattern '{item}' matched nothing{hint}")
        else:
            raise AnnotationError(
                "ignored_params takes parameters, modules, FQNs and globs, got"
                f" {type(item).__name__}"
            )
        result.update((id(p), None) for p in found)
    return result


def _matching(pattern: str, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    return [tensor for fqn, tensor in named if any(fnmatchcase(n, pattern) for n in _around(fqn))]


def _around(fqn: str) -> list[str]:
    """The FQNs of the modules around a parameter or buffer, and its own."""
    return list(accumulate(fqn.split("."), "{}.{}".format))


def own_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a unit: `modules`, and those below that have no annotation around them."""
    return [each for top in modules for _, each in walk(top, stop=(SHARD, REPLICATE))]


def select_callable(
    verb: str, policy: PolicyLike, root: nn.Module, allowed: Collection[str], **so: str
) -> dict[nn.Module, dict[str, Any]]:
    """What `policy` picks below `root`, without containers that have no forward, which are logged.

    Args:
        allowed: the keywords that it may override.
        so: for `require_callable`, if it picks nothing but such containers.
    """
    picked = select_modules(policy, root)
    found = {module: overrides for module, overrides in picked.items() if has_forward(module)}
    if not found:
        require_callable(next(iter(picked)), **so)
    passed = [describe_module(each, find_fqn(each)) for each in picked if each not in found]
    if passed:
        said = "%s: the policy picks %s; containers without a forward are passed over"
        logger.warning(said, verb, few(passed))
    for module, overrides in found.items():
        if unknown := [keyword for keyword in overrides if keyword not in allowed]:
            near = did_you_mean(unknown[0], allowed)
            raise PolicyError(
                f"{verb}: the policy overrides '{unknown[0]}' for {module_name(module)}"
                f"{f'{near} A' if near else '; a'} policy may override: {', '.join(allowed)}"
            )
    return found


def picked_units(
    verb: str, modules: Sequence[nn.Module], policy: PolicyLike | None, allowed: Sequence[str]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules below an annotated one that become units of their own, in order, with their
    overrides.

    Modules that are annotated already, and those inside them, are left as they are.
    """
    if policy is None:
        return {}
    if len(modules) > 1:
        raise AnnotationError(
            f"{verb}: a policy picks units below one module; it cannot be given with a list"
        )
    picked = select_callable(verb, policy, modules[0], allowed)
    reachable = set(map(id, own_modules(modules))) - {id(modules[0])}
    return {
        module: overrides
        for module, overrides in picked.items()
        if id(module) in reachable and not isinstance(module, _READ_BY_PARENT)
    }


# The class of `nn.MultiheadAttention.out_proj`, whose parent reads its parameters and never calls
# it.
_READ_BY_PARENT: Final = nn.modules.linear.NonDynamicallyQuantizableLinear


def refuse_read_by_parent(module: nn.Module) -> None:
    if isinstance(module, _READ_BY_PARENT):
        raise AnnotationError(
            "fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without being"
            " called, so nothing would gather its parameters; annotate the MultiheadAttention"
            " instead"
        )


# --- mixed precision ----------------------------------------------------------------------------


def precision_policy(verb: str, value: Any) -> MixedPrecisionPolicy:
    """The policy that an argument stands for."""
    if isinstance(value, fsdp.MixedPrecisionPolicy):
        known = ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
        if hasattr(value, "param_dtype_override_fn"):  # since torch 2.15
            known.append("param_dtype_override_fn")
        settings = _known_fields(verb, "mp_policy", value, known)
        if settings["reduce_dtype"] is None and _FOLLOWS_GRAD_DTYPE:
            settings["reduce_dtype"] = GRAD_DTYPE
        value = MixedPrecisionPolicy(**settings)
    elif not isinstance(value, MixedPrecisionPolicy):
        value = MixedPrecisionPolicy(param_dtype=value)
    policy: MixedPrecisionPolicy = value
    return policy


def exact_modules(
    modules: Sequence[nn.Module], precision: MixedPrecisionPolicy
) -> tuple[nn.Module, ...]:
    """The modules of a unit that keep their dtype (`full_precision_classes`), without those inside
    of others.
    """
    below = own_modules(modules)
    found = dict.fromkeys(each for each in below if isinstance(each, precision.exact_classes))
    inside = {id(each) for module in found for each in module.modules() if each is not module}
    return tuple(module for module in found if id(module) not in inside)


def ids_of_exact(modules: Sequence[nn.Module], precision: MixedPrecisionPolicy) -> set[int]:
    """The ids of all modules in and below `modules` that keep their dtype, in any unit."""
    every = [each for module in modules for each in module.modules()]
    kept = [each for each in every if isinstance(each, precision.exact_classes)]
    return {id(below) for module in kept for below in module.modules()}


def inherited_policies(
    modules: Sequence[nn.Module], picked: Iterable[nn.Module], precision: MixedPrecisionPolicy
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """The policies of units that are picked below `modules`, where no override says otherwise.

    Outputs are cast only where they leave the annotated module. Units inside a module that keeps
    its dtype keep theirs.
    """
    policy = replace(precision, output_dtype=None)
    exact = exact_modules(modules, precision)
    within = {id(below) for module in exact for below in module.modules() if below is not module}
    return {unit: policy.in_full_precision() if id(unit) in within else policy for unit in picked}


def buffer_holders(
    modules: Sequence[nn.Module], precision: MixedPrecisionPolicy, top: Sequence[nn.Module]
) -> tuple[BufferHolder, ...]:
    """The modules of a unit whose buffers are cast: any may get some later. Names of buffers are
    relative to `top`.
    """
    asked = precision.buffer_dtype
    if asked is None:
        return ()
    below = dict.fromkeys(own_modules(modules))
    if not isinstance(asked, Mapping):
        exact = ids_of_exact(modules, precision)
        return tuple(BufferHolder(each, asked) for each in below if id(each) not in exact)
    named: dict[nn.Module, dict[str, torch.dtype]] = {}
    for fqn, module, name in _floating_point_buffers(top):
        for glob, dtype in asked.items():
            if module in below and fnmatchcase(fqn, glob):
                named.setdefault(module, {})[name] = dtype
    return tuple(BufferHolder(module, dtypes) for module, dtypes in named.items())


def _floating_point_buffers(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module, str]]:
    """FQN, module and name of every place of a floating-point buffer."""
    return [
        (f"{prefix}.{name}" if prefix else name, module, name)
        for top in modules
        for prefix, module in by_all_names(top)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_floating_point()
    ]


def refuse_unknown_buffers(
    verb: str, modules: Sequence[nn.Module], precision: MixedPrecisionPolicy
) -> None:
    """Raise for names in `buffer_dtype` that match no floating-point buffer."""
    if not isinstance(precision.buffer_dtype, Mapping):
        return
    names = [fqn for fqn, _, _ in _floating_point_buffers(modules)]
    for glob in precision.buffer_dtype:
        if not any(fnmatchcase(fqn, glob) for fqn in names):
            raise AnnotationError(
                f"{verb}: buffer_dtype names '{glob}', which matches no floating-point buffer;"
                f" {what_is_there(glob, names)}"
            )


# --- offload, placements, reshard_after_forward -------------------------------------------------


def offload_policy_of(
    verb: str, value: Any, local_device: torch.device | None
) -> CPUOffloadPolicy | None:
    """The policy that an argument stands for, if any. `local_device`: of the parameters, if there
    is no process group.
    """
    # torch's way to say that nothing is offloaded
    if value is None or type(value) is fsdp.OffloadPolicy:
        return None
    if isinstance(value, fsdp.CPUOffloadPolicy):
        value = CPUOffloadPolicy(**_known_fields(verb, "offload_policy", value, ("pin_memory",)))
    policy: CPUOffloadPolicy = value
    if local_device is not None and has_streams(local_device):
        raise AnnotationError(
            f"{verb}: offload_policy needs a process group. Without one nothing is sharded, and"
            f" parameters stay where they are, on {local_device}. Call"
            " torch.distributed.init_process_group first, for one process alone, too; or leave"
            " offload_policy out"
        )
    return policy


def warn_of_no_offload(device: torch.device) -> None:
    if not has_streams(device):
        logger.warning(
            "fully_shard: offload_policy has no effect where ranks compute on the CPU: parameters"
            " are in the host's memory anyway. To compute on an accelerator, pass a mesh of it"
        )


def ranks_after_forward(value: bool | int | None) -> int | None:
    """The number of ranks that `reshard_after_forward` says; None where it says something else."""
    return None if isinstance(value, bool) else value


def check_reshard_after_forward(plan: MeshPlan | None, value: bool | int | None) -> None:
    """Raise for a number that does not divide that of the ranks that shard together."""
    ranks = ranks_after_forward(value)
    if plan is not None and ranks is not None and (ranks < 1 or plan.num_shards % ranks):
        raise MeshError(
            f"reshard_after_forward={value}: parameters are sharded over {plan.num_shards} ranks,"
            f" which {value} does not divide."
        )


def dim_without_padding(
    shape: Sequence[int], dim: int, ranks: int, itemsize: int
) -> tuple[int, float] | None:
    """The dimension to shard in place of `dim`, if that leaves ranks empty at a cost of a mebibyte
    or more; and how many times its size a tensor takes along `dim`.

    Every rank reserves as much as the largest shard, in gathered parameters and in messages.
    """
    numel = math.prod(shape)
    if not shape or not numel:
        return None
    reserved = [numel // size * -(size // -ranks) * ranks for size in shape]
    best = min(range(len(shape)), key=reserved.__getitem__)
    here = reserved[dim]
    if (here - numel) * itemsize < PADDING or 2 * here < 3 * reserved[best]:
        return None  # another dimension does not save much
    return best, here / numel


def has_own_class(parameter: nn.Parameter) -> bool:
    """Whether a parameter is neither a plain one nor a `DTensor`."""
    return type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor)


def _largest_part(parameter: nn.Parameter) -> Sequence[int]:
    """The largest shape that a tensor-parallel rank has, so that these ranks choose alike; nothing
    of a declared part, of which a rank knows its own shape only.
    """
    shape = list(parameter.shape)
    if not isinstance(parameter, DTensor):
        return shape if mesh_and_placements(parameter) is None else ()
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            shape[dim] = -(-shape[dim] // size)
    return shape


def placement_of(
    managed: Managed[nn.Parameter], choose: Placement | None, ranks: int
) -> tuple[int | None, DeviceMesh | MeshPlan | None]:
    """The dimension along which a parameter is sharded, and its mesh if that is not the unit's.

    The dimension is None for a parameter without dimensions.

    Args:
        choose: `shard_placement_fn`. None: dimension 0, unless a large parameter would leave ranks
            empty, as experts that are stacked in one and are fewer than ranks.
        ranks: that shard together.
    """
    parameter = managed.tensor
    if choose is None and not has_own_class(parameter):
        shape = _largest_part(parameter)
        found = dim_without_padding(shape, 0, ranks, parameter.element_size())
        return (0 if parameter.ndim else None) if found is None else found[0], None
    mesh: Any = None
    placement: Any = choose(parameter) if choose is not None else None
    if hasattr(placement, "mesh_info"):  # torch's `ShardPlacementResult`
        info, placement = placement.mesh_info, placement.placement
        mesh = MeshPlan(info.mesh, info.shard_mesh_dim)
    elif isinstance(placement, tuple) and len(placement) == 2:
        placement, mesh = placement
        if not isinstance(mesh, DeviceMesh):
            raise AnnotationError(
                "shard_placement_fn must return a pair of a Shard, or None, and a DeviceMesh; got"
                f" {kind_of(mesh)} as the mesh of '{managed.fqn}'"
            )
    if parameter.ndim == 0:
        return None, mesh
    if placement is None:
        return 0, mesh
    if not isinstance(placement, Shard):
        raise AnnotationError(
            f"shard_placement_fn must return Shard or None, got {type(placement).__name__} for"
            f" '{managed.fqn}'"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise AnnotationError(
            f"shard_placement_fn returned {placement} for '{managed.fqn}', which has"
            f" {parameter.ndim} dimensions"
        )
    return dim, mesh


# --- buffers and devices ------------------------------------------------------------------------


def refuse_elsewhere(verb: str, tensors: Sequence[Managed[Any]], device: torch.device) -> None:
    """Raise for tensors that are neither on `device` nor on the meta device."""
    for managed in tensors:
        here = managed.tensor.device
        fits = here.type == device.type and here.index in (None, device.index)
        if here.type != "meta" and not fits:
            raise AnnotationError(
                f"{verb}: '{managed.fqn}' is on {here}, and the ranks of the mesh communicate on"
                f" {device}; call module.to('{device}') before annotating it"
            )


def move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for managed in managed_buffers(modules):
        if managed.tensor.device.type not in ("meta", device.type):
            moved = managed.tensor.to(device)
            for place in managed.places:
                place.module._buffers[place.name] = moved
