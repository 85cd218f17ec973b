"""`DTensor`s around local tensors, and tensors of classes with FSDP2's extension protocol.

`DTensor`s are made without a collective. Tensors with the protocol are cut, copied and filled here;
how they are gathered is in `features/groups.py`. All functions also accept plain tensors. This file
also recognises tensors of packed bytes (`features/param_forms.py`). Nothing here depends on a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable.errors import AnnotationError, few, first_line
from composable.torch_private import dtensor_like, gather_rows, local_of
from composable.torch_private import wrap as wrap

PRE: Final = "fsdp_pre_all_gather"
POST: Final = "fsdp_post_all_gather"
RELEASE: Final = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

# --- DTensors -------------------------------------------------------------------------------------


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """A `DTensor` around `local` that is distributed as `like`."""
    return wrap(local, like.device_mesh, like.placements, like.shape, like.stride())


def gradient_like(local: Tensor, parameter: Tensor) -> Tensor:
    """`local` as a gradient of `parameter`: a `DTensor` of the same placements, or itself."""
    if not isinstance(parameter, DTensor):
        return local
    own = local_of(parameter)
    if local.shape == own.shape and local.stride() == own.stride() and local.dtype == own.dtype:
        return dtensor_like(local, parameter)  # the usual case, 5 us instead of 50
    return wrap_like(local, parameter)


def gradient_of_shards(local: Tensor, parameter: Tensor, first: int, shard_dim: int) -> Tensor:
    """A gradient that is reduced over the shard dimension of the mesh, and not yet over the
    replicate dimension. The unit's dimensions of the mesh begin with `first`.
    """
    assert isinstance(parameter, DTensor)
    placements = [
        each if dim < first or dim == shard_dim else Partial("avg")
        for dim, each in enumerate(parameter.placements)
    ]
    return wrap(local, parameter.device_mesh, placements, parameter.shape, parameter.stride())


def is_unreduced(gradient: Tensor | None) -> bool:
    """Whether `gradient`, of a `DTensor`, was accumulated under `no_sync` and is not the mean over
    all ranks yet.
    """
    return isinstance(gradient, DTensor) and any(
        placement.is_partial() for placement in gradient.placements
    )


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """Gather a whole copy of a parameter, gradient or optimizer state; all ranks of its mesh call
    this.

    One all-gather of one tensor, torch's own, which knows uneven shards and every placement. Even
    rows of tensors with the protocol are gathered by `gather_rows`.
    """
    if not isinstance(tensor, DTensor):
        return cloned(tensor.detach())
    local = local_of(tensor)
    if local.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    device, detached = tensor.device_mesh.device_type, tensor.detach()
    if local.device.type != device:  # it rests on the host
        detached = gradient_like(local.to(device), tensor)
    assert isinstance(detached, DTensor)
    cuts = {each: dim for dim, each in enumerate(tensor.placements) if not each.is_replicate()}
    if has_protocol(local) and cuts.keys() == {Shard(0)}:
        group = tensor.device_mesh.get_group(cuts[Shard(0)])
        if tensor.shape[0] % group.size() == 0:
            return gather_rows(local_of(detached), group)
    with torch.enable_grad():  # torch 2.11 raises without, in a dispatch mode
        whole: Tensor = detached.full_tensor()
    # Replicated, or over one rank, the whole is the local tensor itself.
    return cloned(whole) if whole.data_ptr() == local.data_ptr() else whole


def slices_at(
    place: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> tuple[tuple[int, int], ...] | None:
    """What the rank at `place` of a mesh holds of a whole tensor: along each dimension, the first
    index and the one after the last. None for placements of classes that torch does not document.
    """
    slices = [(0, size) for size in shape]
    for index, count, placement in zip(place, mesh.shape, placements, strict=True):
        if type(placement) is Shard:
            # as `torch.chunk` cuts what the dimensions of the mesh before this one have left
            start, stop = slices[placement.dim]
            rows = -(-(stop - start) // count)
            start = min(start + index * rows, stop)
            slices[placement.dim] = start, min(start + rows, stop)
        elif type(placement) is not Replicate:  # in another order of ranks
            return None
    return tuple(slices)


def describe_mesh(mesh: DeviceMesh) -> str:
    """Like `the (2,) cpu mesh of ranks 0, 1`."""
    return (
        f"the {tuple(mesh.shape)} {mesh.device_type} mesh of ranks"
        f" {few([str(r) for r in mesh.mesh.flatten().tolist()])}"
    )


# --- tensors with the extension protocol ----------------------------------------------------------


def has_protocol(tensor: Tensor) -> bool:
    """Whether `tensor`, a shard or a parameter that is to be cut, is gathered by its own methods.

    Raises:
        AnnotationError: it has one of the two only, or neither and `RELEASE`.
    """
    pre, post = hasattr(tensor, PRE), hasattr(tensor, POST)
    if hasattr(tensor, RELEASE) and not pre:
        raise AnnotationError(
            f"a {type(tensor).__name__} has {RELEASE}() and no {PRE}(); what is not gathered in its"
            " own form has nothing to release"
        )
    if pre != post:
        raise AnnotationError(
            f"a {type(tensor).__name__} has {PRE if pre else POST}() and no"
            f" {POST if pre else PRE}(); a parameter that is gathered in its own form has both"
        )
    return pre


def is_packed(tensor: Tensor) -> bool:
    """Whether a parameter, in any of its forms, has the attributes of a `Params4bit`."""
    return hasattr(tensor, "bnb_quantized") and hasattr(tensor, "quant_state")


@torch.no_grad()
def pieces_of(whole: Tensor, ranks: int) -> list[Tensor]:
    """The shards of a tensor with the protocol, cut by its own operators; empty ones are left out.

    Raises:
        AnnotationError: it cannot be cut into shards of the right shapes.
    """
    said = ""
    try:
        pieces = list(torch.chunk(whole, ranks, dim=0))
        expected = torch.empty(whole.shape, device="meta").chunk(ranks, dim=0)
        if [piece.shape for piece in pieces] != [piece.shape for piece in expected]:
            said = f"torch.chunk gives shapes {[tuple(piece.shape) for piece in pieces]}"
        elif not all(map(has_protocol, pieces)):
            said = f"torch.chunk gives tensors without {PRE}()"
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        said = f"torch.chunk raised {type(error).__name__}: {first_line(error)}"
    if said:
        raise AnnotationError(
            f"a {type(whole).__name__} of shape {tuple(whole.shape)} cannot be cut along dimension"
            f" 0 over {ranks} ranks: {said}. Shard over a number of ranks that divides it"
        )
    return pieces


@torch.no_grad()
def cut_along(whole: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """A rank's part, as `torch.chunk` cuts: a view of a plain tensor; else a copy, so that the
    whole is freed.
    """
    if has_protocol(whole):
        pieces = pieces_of(whole, ranks)
        if rank < len(pieces):
            return cloned(pieces[rank])
        return whole.new_zeros((0, *whole.shape[1:]))
    size = whole.shape[dim]
    chunk = -(-size // ranks)
    start = min(rank * chunk, size)
    return whole.narrow(dim, start, min(chunk, size - start))


@torch.no_grad()
def as_class_of(local: Tensor, value: Tensor) -> Tensor:
    """`value`, which may be plain, as a tensor of the class of a shard."""
    if type(value) is type(local) or not has_protocol(local):
        return value
    whole = local.new_zeros(value.shape, device=value.device)
    whole.copy_(value)
    return whole


def cloned(tensor: Tensor) -> Tensor:
    """A copy of a tensor that shares no memory with it. Of one with the protocol, a copy of
    what it is made of: `clone` of an `NF4Tensor` quantises again, and its `new_zeros` keeps
    some of the memory.

    Raises:
        AnnotationError: its class makes a copy of another class, which no one could gather.
    """
    if not hasattr(tensor, PRE):
        return tensor.clone()
    made = _rebuilt(tensor)
    if made is None:
        made = tensor.new_zeros(tensor.shape)
        made.copy_(tensor)
    if type(made) is not type(tensor):
        raise AnnotationError(
            f"a {type(tensor).__name__} cannot be copied: its new_zeros() makes a"
            f" {type(made).__name__}, which is not gathered in its own form. Let aten.new_zeros"
            " return the class in __torch_dispatch__"
        )
    return made


def _rebuilt(tensor: Tensor) -> Tensor | None:
    """A copy by the methods that torch.compile calls; None if the class has them in another form
    than torch's, which no other caller would notice.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    kind: Any = type(tensor)
    try:
        names, context = tensor.__tensor_flatten__()
        inner = {name: cloned(getattr(tensor, name)) for name in names}
        found = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        right = type(found) is kind and found.shape == tensor.shape
        return found if right and found.__tensor_flatten__()[1] == context else None
    except Exception:
        return None


def plain_parts(tensor: Any) -> list[Tensor]:
    """The strided tensors that hold a tensor's values: several for a wrapper subclass, such as
    quantised weights.
    """
    if isinstance(tensor, DTensor):
        return plain_parts(local_of(tensor))
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    return [tensor.detach()] if tensor.layout is torch.strided else []
