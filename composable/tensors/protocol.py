"""Tensors of classes with FSDP2's extension protocol: how they are cut, copied and filled. How they
are gathered is in `features/groups.py`. All functions also accept plain tensors. This file also
recognises tensors of packed bytes (`features/forms.py`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable.errors import AnnotationError, first_line
from composable.torch_private import local_of

PRE: Final = "fsdp_pre_all_gather"
POST: Final = "fsdp_post_all_gather"
RELEASE: Final = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


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
