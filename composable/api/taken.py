"""Parameters that another annotation has taken already, or that none can take: refused by name; decides nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.device.collectives import is_distributed
from composable.device.parameter_labels import label_of
from composable.errors import AnnotationError, TiedParametersError, few
from composable.model.contract import find_fqn, module_name
from composable.model.traversal import REPLICATE, ManagedParameter
from composable.runtime.averaging import Averaging
from composable.runtime.early_steps import stepped_in_backward
from composable.runtime.optimizer_hooks import Form
from composable.runtime.ownership import holder_of
from composable.runtime.sparse import is_sparse_lookup

logger = logging.getLogger("composable")

_DONE = {"fully_shard": "sharded", "replicate": "replicated"}


def refuse_taken(verb: str, modules: Sequence[nn.Module], parameters: Sequence[ManagedParameter]) -> None:
    """Refuse what `verb` cannot take charge of.

    Raises:
        AnnotationError: a parameter is uninitialised, a DTensor of somebody else's, or gets sparse gradients and would be
            sharded; or `modules` are inside annotated ones.
        TiedParametersError: a parameter is tied to one that the other verb has in another unit.
    """
    for managed in parameters:
        if stepped_in_backward((managed.parameter,)) is not None:
            raise AnnotationError(
                f"parameter '{_fqn(managed)}' is stepped in backward since apply_optimizer_in_backward, which would go on with "
                "what is replaced, or was not averaged. Annotate first"
            )
        home = label_of(managed.parameter)
        if home is not None and home[2] != Form.COMPUTING.name:
            _refuse_sharded(verb, managed, *home[:2])
        if isinstance(managed.parameter, DTensor):
            raise AnnotationError(
                f"parameter '{_fqn(managed)}' is a DTensor already ({managed.parameter.placements}); only plain parameters "
                f"can be {_DONE[verb]}. Leave it out with ignored_params"
            )
        if isinstance(managed.parameter, nn.parameter.UninitializedParameter):
            raise AnnotationError(f"parameter '{_fqn(managed)}' is uninitialised; run a lazy module once before annotating it")
        if verb == "fully_shard" and type(managed.parameter) is not nn.Parameter and is_distributed():
            kind = type(managed.parameter).__name__
            raise AnnotationError(
                f"parameter '{_fqn(managed)}' is of class {kind}; only a plain nn.Parameter can be cut, and what its class "
                "adds would be lost. Leave it out with ignored_params"
            )
        if verb == "fully_shard" and managed.parameter.requires_grad and is_distributed():
            _refuse_sparse(managed)
        holder = holder_of(managed.parameter)
        if isinstance(holder, Averaging):
            _refuse_replicated(verb, modules, managed, holder)


def _refuse_sparse(managed: ManagedParameter) -> None:
    """The gradients of a parameter that nothing but sparse lookups reads could not be scattered."""
    lookups = [place.module for place in managed.places if is_sparse_lookup(place.module)]
    if len(lookups) == len(managed.places):
        kind = type(lookups[0]).__name__
        raise AnnotationError(
            f"parameter '{_fqn(managed)}' gets sparse gradients ({kind}, sparse=True); gradients of sharded parameters are "
            f"dense. Call replicate() on the {kind} before, or make it with sparse=False"
        )


def _fqn(managed: ManagedParameter) -> str:
    """The parameter's name below the whole model, as far as that is known: with a policy, its own unit is only a part."""
    place = managed.places[0]
    owner = find_fqn(place.module)
    return f"{owner}.{place.name}" if owner else managed.fqn


def tell_of_gradients(parameters: Sequence[ManagedParameter]) -> None:
    """Log that gradients of parameters that are about to be sharded will be gone: they may be one rank's, or a mean."""
    found = [managed for managed in parameters if managed.parameter.grad is not None]
    if found:
        logger.warning(
            "fully_shard: %s had gradients from before the annotation, which are dropped: nothing tells whether they were "
            "averaged over the ranks. Run backward after annotating",
            few([f"'{_fqn(managed)}'" for managed in found]),
        )


def refuse_other_mesh(parameters: Sequence[ManagedParameter], mesh: DeviceMesh | None) -> None:
    """A parameter of two replicated units is averaged by one of them, so both must mean the same ranks.

    Raises:
        TiedParametersError: they do not.
    """
    for managed in parameters:
        holder = holder_of(managed.parameter)
        if isinstance(holder, Averaging) and holder.mesh_info is not None and holder.mesh_info.mesh != mesh:
            raise TiedParametersError(
                f"parameter '{_full_name(managed)}' is tied to '{_name_in(holder, managed.parameter)}', which is replicated "
                "over another mesh. Pass the same mesh to both, or annotate both modules as one unit: replicate([a, b])"
            )


def _name_in(holder: Averaging, parameter: nn.Parameter) -> str:
    fqn = find_fqn(holder.parameters.modules[0])
    name = holder.parameters.name_of(parameter)
    return f"{fqn}.{name}" if fqn else name


def _full_name(managed: ManagedParameter) -> str:
    outside = find_fqn(managed.places[0].module)
    return f"{outside}.{managed.places[0].name}" if outside else managed.fqn


def _refuse_sharded(verb: str, managed: ManagedParameter, unit: str, fqn: str) -> None:
    """The parameter belongs to a sharded unit: a parent's, or one that a tied weight is in."""
    if isinstance(managed.parameter, DTensor) or not is_distributed():
        inner = fqn.removesuffix(managed.fqn).rstrip(".")
        raise AnnotationError(f"'{inner}' is inside already-sharded '{unit}'; annotate children first, or use policy=")
    cure = (
        "Annotate both modules as one unit: fully_shard([a, b]), or name the units in policy=, which keeps tied parameters "
        "together"
        if verb == "fully_shard"
        else "Annotate both modules alike, as one unit: fully_shard([a, b]) or replicate([a, b])"
    )
    raise TiedParametersError(
        f"parameter '{_full_name(managed)}' is tied to '{fqn}', which was sharded as part of another unit already. {cure}"
    )


def _refuse_replicated(verb: str, modules: Sequence[nn.Module], managed: ManagedParameter, holder: Averaging) -> None:
    """The parameter belongs to a replicated unit around these modules, or is tied to one in another unit."""
    around = holder.parameters.modules
    inside = {id(below): None for module in around for below in module.modules()}
    if all(id(module) in inside for module in modules):
        raise AnnotationError(
            f"{module_name(modules[0])} is inside already-replicated {module_name(around[0])}; annotate children first"
            + (", or use policy=" if verb == REPLICATE else "")
        )
    if verb != REPLICATE:
        below = {id(below): None for module in modules for below in module.modules()}
        apart = any(id(module) not in below for module in around)
        raise TiedParametersError(
            f"parameter '{_full_name(managed)}' is tied to '{_name_in(holder, managed.parameter)}', which is replicated; it "
            "cannot be sharded, too. Annotate "
            + ("a module around both, which leaves the parameter replicated, or " if apart else "")
            + "both modules alike, as one unit: replicate([a, b]) or fully_shard([a, b])"
        )
