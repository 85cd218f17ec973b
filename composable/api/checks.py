"""Parameters and modules that an annotation cannot manage: those of another annotation, of torch's
wrappers, of TorchScript.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from composable.api.arguments import dim_without_padding, has_own_class, ranks_after_forward
from composable.api.mesh import MeshPlan, is_alone, part_of
from composable.comm.backends import is_distributed
from composable.comm.mesh_info import communication_device
from composable.contract.contract import add_attribute, find_fqn, module_name
from composable.contract.tree import REPLICATE, SHARD, Managed
from composable.engine.gradients.sparse import is_sparse_lookup
from composable.engine.params.param import ParamInfo, label_of
from composable.engine.step.unit import Unit
from composable.errors import AnnotationError, ClashError, TiedParametersError, describe_module, few
from composable.features.param_forms import mesh_and_placements, refusal_of
from composable.tensors import cloned, describe_mesh, has_protocol, is_packed, pieces_of
from composable.torch_private import hooks_after_accumulation, local_of

logger = logging.getLogger("composable")

_DONE: Final = {SHARD: "sharded", REPLICATE: "replicated"}

# --- parameters of other annotations -------------------------------------------------------------


def _owner_of(parameter: nn.Parameter) -> tuple[Unit, ParamInfo] | None:
    """The unit that manages `parameter`, or managed it until it registered another one in its
    place.
    """
    label = label_of(parameter)
    if label is None or label.owner is None or label.form == "removed":
        return None
    unit = label.owner()
    if unit is None or not unit.modules:
        return None
    infos = {place: info for info in unit.spec.params for place in info.places}
    for param in unit.params:  # some may have been tied to others, or untied, since
        info = infos.get(param.info.places[0], param.info)
        forms = (param.original(), param.own, *(place.registered for place in info.places))
        if any(parameter is form for form in forms):
            return unit, info
    return None


def full_name(managed: Managed[Any] | ParamInfo) -> str:
    """The parameter's FQN in the whole model, as far as it is known."""
    place = managed.places[0]
    owner = find_fqn(place.module)
    return f"{owner}.{place.name}" if owner else managed.fqn


def tied_to_replicated(
    verb: str,
    modules: Sequence[nn.Module],
    parameters: Sequence[Managed[nn.Parameter]],
    mesh: DeviceMesh | None,
) -> list[tuple[Unit, Managed[nn.Parameter]]]:
    """The parameters that stay with a replicated unit which has them already, under a tie.

    `replicate` leaves to it what any other replicated unit has, `fully_shard` what a unit inside
    `modules` has.
    """
    below = {id(each) for module in modules for each in module.modules()}
    tied = []
    for managed in parameters:
        owner = _owner_of(managed.tensor)
        if owner is None:
            continue
        unit, info = owner
        by, first = unit.spec.verb, unit.modules[0]
        of_owner = {id(each): fqn for top in unit.modules for fqn, each in top.named_modules()}
        if all(id(module) in of_owner for module in modules):
            inner = module_name(modules[0], of_owner[id(modules[0])])
            hint = ", or use policy=" if by == verb else ""
            raise AnnotationError(
                f"{inner} is inside already-{_DONE[by]} '{unit.name}'; annotate children"
                f" first{hint}"
            )
        shared = next((place for place in managed.places if place in info.places), None)
        if shared is not None:
            raise AnnotationError(
                f"{verb}: {describe_module(shared.module, shared.fqn.rpartition('.')[0])} is in two"
                f" units: unit '{unit.name}' ({type(first).__name__}) has {_DONE[by]} its"
                f" parameters already. Annotate it before both, {by}(shared), or both modules as"
                f" one unit: {verb}([a, b]). A slice such as model[:2] is a module of its own,"
                " which the model never calls: annotate the list [*model[:2]] instead"
            )
        refusals = {
            _SHARDED_APART: by == SHARD,
            _REPLICATED_APART: verb == SHARD and any(id(m) not in below for m in unit.modules),
            _ON_ANOTHER_MESH: verb == REPLICATE and unit.spec.mesh_info.mesh != mesh,
            _CAST_APART: unit.spec.mp_policy.param_dtype not in (None, managed.tensor.dtype),
        }
        for why, refused in refusals.items():
            if refused:
                raise TiedParametersError(
                    f"parameter '{full_name(managed)}' is tied to '{full_name(info)}', which {why}"
                )
        tied.append((unit, managed))
    return tied


_SHARDED_APART: Final = (
    "was sharded as part of another unit already. Annotate both modules alike, as one unit:"
    " fully_shard([a, b]) or replicate([a, b]); or name the units in policy=, which keeps tied"
    " parameters together"
)
_REPLICATED_APART: Final = (
    "is replicated; it cannot be sharded, too. Annotate a module around both, which leaves the"
    " parameter replicated, or both modules alike, as one unit: replicate([a, b]) or"
    " fully_shard([a, b])"
)
_ON_ANOTHER_MESH: Final = (
    "is replicated over another mesh. Pass the same mesh to both, or annotate both modules as one"
    " unit: replicate([a, b])"
)
# The cast is there while the unit is entered; another one would compute with the user's parameter.
_CAST_APART: Final = (
    "is replicated, and cast in the forward of that unit only. Annotate both modules as one unit:"
    " replicate([a, b]); or name the units in policy=, which keeps tied parameters together"
)

# --- parameters that no annotation can manage ----------------------------------------------------


def _is_stepped_in_backward(parameter: nn.Parameter) -> bool:
    hooks: Mapping[int, Any] = hooks_after_accumulation(parameter) or {}
    ours = any(isinstance(getattr(hook, "__self__", None), Optimizer) for hook in hooks.values())
    # torch's `_apply_optimizer_in_backward`
    return ours or hasattr(parameter, "_in_backward_optimizers")


def refuse_lazy(tensors: Sequence[Managed[Any]]) -> None:
    for managed in tensors:
        if is_lazy(managed.tensor):
            kind = "parameter" if isinstance(managed.tensor, nn.Parameter) else "buffer"
            raise AnnotationError(
                f"{kind} '{full_name(managed)}' is uninitialised; run a lazy module once before"
                " annotating it"
            )


def refuse_dtensor(verb: str, managed: Managed[nn.Parameter], over: MeshPlan | None) -> None:
    """Raise for what is no tensor-parallel parameter beside the dimensions of `over`."""
    given = mesh_and_placements(managed.tensor)
    if given is None:
        return
    name, parameter, (own_mesh, placements) = full_name(managed), managed.tensor, given
    what = f"parameter '{name}' is a DTensor already ({placements})"
    if not isinstance(parameter, DTensor):
        what = f"parameter '{name}' is declared as a part ({placements})"
        if verb == REPLICATE:
            raise AnnotationError(
                f"{what}; replicate() would leave a plain tensor, and state dicts would take it"
                " for the whole. Call fully_shard(), or make it a DTensor"
            )
    if over is None or own_mesh.get_coordinate() is None:
        raise AnnotationError(
            f"{what}, over {describe_mesh(own_mesh)}, of which this rank is none."
            " Leave it out with ignored_params"
        )
    if any(placement.is_partial() for placement in placements):
        raise AnnotationError(
            f"{what}; a tensor-parallel parameter is cut or Replicate over each dimension of its"
            " mesh. Redistribute it before, or leave it out with ignored_params"
        )
    beside, mesh = part_of(own_mesh, over.dims_beside(own_mesh, placements)), over.mesh
    own = [dist.get_rank()] if beside is None else beside.mesh.flatten().tolist()
    ranks = mesh.mesh.flatten().tolist()
    both = [rank for rank in own if rank in ranks]
    if both != [dist.get_rank()]:
        raise AnnotationError(
            f"{what} over {describe_mesh(own_mesh)}, and {verb} was to distribute it"
            f" over {describe_mesh(mesh)}, which share ranks {both}. Make it a DTensor over"
            " another dimension of one mesh, as parallelize_module(model, mesh['tp'], plan) does,"
            " and pass mesh=mesh['dp']; or leave it out with ignored_params"
        )
    if isinstance(parameter, DTensor) and _half_or_all(name, local_of(parameter)):
        raise AnnotationError(
            f"{what}, around a {type(local_of(parameter)).__name__} that is gathered in a form of"
            " its own; tensor-parallel parameters are gathered as they are. Leave it out with"
            " ignored_params"
        )
    if isinstance(parameter, DTensor) and not local_of(parameter).is_contiguous():
        raise AnnotationError(
            f"{what}, whose local tensor is not contiguous; it cannot be cut. Make it contiguous"
            " before distributing it"
        )


def refuse_unfit(verb: str, parameters: Sequence[Managed[nn.Parameter]]) -> None:
    """Raise for parameters that `verb` cannot manage over any mesh."""
    for managed in parameters:
        parameter = managed.tensor
        if _is_stepped_in_backward(parameter):
            raise AnnotationError(
                f"parameter '{full_name(managed)}' is stepped in backward since"
                " apply_optimizer_in_backward, which would go on with what is replaced, or was not"
                " averaged. Annotate first"
            )
        for place in managed.places:
            if not isinstance(place.module._parameters, dict):
                raise AnnotationError(
                    f"{verb}: parameter '{full_name(managed)}' of a {type(place.module).__name__}"
                    " cannot be managed: modules of TorchScript register parameters in their own"
                    " way. Annotate a module that is not scripted, or leave it out with"
                    " ignored_params"
                )
        if verb != SHARD or not is_distributed():
            continue
        own_class = has_own_class(parameter)
        if own_class and is_packed(parameter):
            if said := refusal_of(full_name(managed), parameter):
                raise AnnotationError(said)
        elif own_class and not _half_or_all(full_name(managed), parameter):
            raise AnnotationError(
                f"parameter '{full_name(managed)}' is of class {type(parameter).__name__}; only a"
                " plain nn.Parameter can be cut, and what its class adds would be lost. Leave it"
                " out with ignored_params, or give the class fsdp_pre_all_gather() and"
                " fsdp_post_all_gather()"
            )
        lookups = [place.module for place in managed.places if is_sparse_lookup(place.module)]
        if parameter.requires_grad and len(lookups) == len(managed.places):
            kind = type(lookups[0]).__name__
            raise AnnotationError(
                f"parameter '{full_name(managed)}' gets sparse gradients ({kind}, sparse=True);"
                f" gradients of sharded parameters are dense. Call replicate() on the {kind}"
                " before, or make it with sparse=False"
            )


def _half_or_all(name: str, tensor: Tensor) -> bool:
    """Whether `tensor` is gathered in a form of its own. Raises for half of the protocol."""
    try:
        return has_protocol(tensor)
    except AnnotationError as error:
        raise AnnotationError(f"parameter '{name}': {error}") from None


def refuse_unfit_extension(
    managed: Managed[nn.Parameter],
    dim: int | None,
    over: MeshPlan,
    settings: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Raise for a parameter with FSDP2's extension protocol that cannot be cut over a mesh."""
    parameter = managed.tensor
    if not has_own_class(parameter) or is_packed(parameter):
        return
    name, is_strided = full_name(managed), not parameter.is_contiguous()
    ranks = ranks_after_forward(settings["reshard_after_forward"])
    pass_a_bool = "Pass reshard_after_forward=True, False or None"
    leaves = settings["grouping"].on_host and communication_device(over.mesh, device).type != "cpu"
    refusals = (
        (dim != 0, f"cut along dimension {dim}", "shard_placement_fn must return Shard(0)"),
        (is_strided, "cut while it is not contiguous", "Make it contiguous before"),
        (ranks is not None, f"kept over {ranks} ranks after forward", pass_a_bool),
        (leaves, "offloaded", "Leave offload_policy out"),
    )
    for refused, what, instead in refusals:
        if refused:
            raise AnnotationError(
                f"parameter '{name}' ({type(parameter).__name__}) is gathered in a form of its own,"
                f" and cannot be {what}. {instead}, or leave it out with ignored_params"
            )
    try:
        # as each rank does whose shard is not empty
        cloned(pieces_of(parameter, over.num_shards)[0])
    except AnnotationError as error:
        raise AnnotationError(
            f"parameter '{name}': {error}, or leave it out with ignored_params"
        ) from None


def refuse_dtensor_offload(
    parameters: Sequence[Managed[nn.Parameter]], device: torch.device
) -> None:
    """Raise for tensor-parallel parameters that were to rest on the host, beside `device`."""
    found = [managed for managed in parameters if mesh_and_placements(managed.tensor) is not None]
    if found and device.type != "cpu":
        raise AnnotationError(
            f"parameter '{full_name(found[0])}' is tensor parallel, and offload_policy was passed:"
            f" they do not work together on {device.type}. Leave offload_policy out, or annotate"
            " the modules with tensor-parallel parameters apart, without it"
        )


def warn_of_gradients(parameters: Sequence[Managed[nn.Parameter]]) -> None:
    """Log that gradients from before the annotation are dropped: they may be one rank's, or a
    mean.
    """
    found = [f"'{full_name(managed)}'" for managed in parameters if managed.tensor.grad is not None]
    if found:
        logger.warning(
            "fully_shard: %s had gradients from before the annotation, which are dropped: nothing"
            " tells whether they were averaged over the ranks. Run backward after annotating",
            few(found),
        )


# Of meshes of one rank; a warning for each call of the verb would be one for each layer.
_WARNED: Final[WeakSet[dist.ProcessGroup]] = WeakSet()


def warn_of_one_rank(
    verb: str, module: nn.Module, mesh: DeviceMesh, parameters: Sequence[Managed[nn.Parameter]]
) -> None:
    """Log that a mesh of one rank shards nothing and averages nothing, while there are more
    ranks.
    """
    if not is_alone(mesh, (each.tensor for each in parameters)):
        return
    world, group = dist.get_world_size(), mesh.get_group(0)
    if group in _WARNED:
        return
    _WARNED.add(group)
    logger.warning(
        "%s: the mesh has one rank, and the world has %d: the %s is %s over this rank alone, and"
        " its gradients are not averaged with others. That is right for what this rank alone has,"
        " as a stage of a pipeline. Else pass a mesh of more ranks; in Lightning,"
        " ModelParallelStrategy(data_parallel_size=%d, tensor_parallel_size=1)",
        verb, world, type(module).__name__, _DONE[verb], world,
    )  # fmt: skip


def warn_of_padding(units: Iterable[Unit]) -> None:
    """Log the first large parameter that leaves ranks empty, and what to write: experts that are
    stacked in one parameter, and that `shard_placement_fn` or FSDP2's defaults shard by experts.
    """
    groups = [(unit, group) for unit in units for group in unit.groups if group.shard is not None]
    for unit, group in groups:
        itemsize = group.precision.compute.itemsize
        for param, slot in group.members:
            found = dim_without_padding(slot.shape, slot.dim, slot.num_shards, itemsize)
            if found is not None:
                (best, times), whole = found, tuple(param.at_rest.shape)
                best = slot.order[best] if slot.order else best
                logger.warning(
                    "fully_shard: parameter '%s' of unit '%s', %s, is sharded along dimension %d,"
                    " which leaves some of %d ranks empty: gathered, and in messages, it takes %.1f"
                    " times its size. Shard it along dimension %d: shard_placement_fn=lambda"
                    " parameter: Shard(%d) if parameter.shape == %s else None",
                    slot.name, unit.name, whole, slot.cut_dim, slot.num_shards, times, best, best,
                    whole,
                )  # fmt: skip
                return


# --- wrappers and verbs of torch ----------------------------------------------------------------

# Which of torch's verbs were applied to a module. torch has no public way to ask.
_contract: Final[Any] = sys.modules.get("torch.distributed._composable.contract")
_applied_by_torch: Final[Any] = getattr(_contract, "_get_registry", None)
_APPLIED: Final[str | None] = getattr(_contract, "REGISTRY_KEY", None)  # where they are noted
_IGNORED_BY_DDP: Final = "_ddp_params_and_buffers_to_ignore"


def refuse_wrapped(
    verb: str, modules: Sequence[nn.Module], parameters: Sequence[Managed[nn.Parameter]]
) -> None:
    """Raise if DDP, FSDP1 or a verb of torch manages some of `parameters`, on or below
    `modules`.
    """
    managed = {id(each.tensor) for each in parameters}
    for fqn, below in [named for module in modules for named in module.named_modules()]:
        cure, left_out = "Leave one of the two out", set[str]()
        if isinstance(below, DistributedDataParallel):
            by = "is a DistributedDataParallel already"
            cure = f"Do not wrap: annotate the {type(below.module).__name__} in its place"
            left_out = {f"module.{name}" for name in below.parameters_to_ignore}
        elif isinstance(below, fsdp.FullyShardedDataParallel):
            by = "is managed by torch's FullyShardedDataParallel already"
        elif torchs := _verb_of_torch(below):
            by = f"is managed by torch's {torchs} already"
        else:
            continue
        if any(id(p) in managed for n, p in below.named_parameters() if n not in left_out):
            where = f"'{fqn}'" if fqn else "the module"
            raise ClashError(f"{verb}: {where} {by}, and gradients would be averaged twice. {cure}")


def replicated_by_torch(modules: Sequence[nn.Module]) -> dict[nn.Module, None]:
    """Modules below `modules` that torch's `replicate` manages: `fully_shard` leaves them alone, as
    torch's does.
    """
    below = [each for module in modules for each in module.modules() if each not in modules]
    tops = [each for each in below if _verb_of_torch(each) == REPLICATE]
    return {each: None for top in tops for each in top.modules()}


def _verb_of_torch(module: nn.Module) -> str:
    applied = (_applied_by_torch and _applied_by_torch(module)) or ()
    if isinstance(applied, _AppliedHere):
        return ""
    return next((name for name in (SHARD, REPLICATE) if name in applied), "")


_BY_ACCELERATE: Final = {
    SHARD: "accelerate, and the Trainer of transformers, take it as it is, and save it, if they are"
    " asked for FSDP2 after composable.fsdp2.install()",
    REPLICATE: "With accelerate, prepare it by accelerator.prepare_model(model,"
    " evaluation_mode=True), which does not wrap",
}


class _RefusesDDP:
    """In place of the names that DDP reads from a module to ignore: the call that would wrap the
    module raises.
    """

    def __init__(self, verb: str, module: str) -> None:
        self._verb, self._module = verb, module

    def __iter__(self) -> Iterator[Any]:
        raise ClashError(
            f"DistributedDataParallel around {self._module}: {self._verb} averages its gradients"
            " already, and they would be averaged twice. Do not wrap it: train the module as it"
            f" is. {_BY_ACCELERATE[self._verb]}"
        )


class _AppliedHere(dict[str, str]):
    """In place of the names of torch's verbs that were applied to a module: all of them were.

    On the module they raise, and around it they leave it, and all below it, to the verb here.
    """


def refuse_torch_around(verb: str, modules: Sequence[nn.Module]) -> None:
    """Inside a verb: let `DistributedDataParallel(module)`, and verbs of torch on it, raise.

    Names that the user gave DDP to ignore stay.
    """
    for module in modules:
        refusal = _RefusesDDP(verb, f"this {type(module).__name__}")
        add_attribute(module, _IGNORED_BY_DDP, refusal)
        if _APPLIED is not None:
            add_attribute(module, _APPLIED, _AppliedHere({SHARD: verb, REPLICATE: verb}))
