"""The outputs of forwards. If an output uses memory that is freed after forward, it is replaced by
a copy. The autograd nodes that a unit's forward created for its outputs are where backward enters
the unit.

Only outputs that the call created (`node._sequence_nr()` at least the number at entry) trigger the
pre-backward hook. An input that is returned unchanged, such as a decoder's `memory`, belongs to the
call that created it: hooking it here would unshard this unit too early. If a call created none of
its outputs, they get a node that does nothing, because other ranks may have computed outputs in
this unit, and all ranks must enter the same units in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from composable.compilation import untraced
from composable.contract.values import map_tensors, tensors_in
from composable.errors import OutputError
from composable.memory.elastic import comes_and_goes
from composable.tensors.protocol import plain_parts
from composable.torch_private import innermost, made_since

_PLAIN: Final = (Tensor, nn.Parameter)
_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_LEAVES: Final = (
    "unit '%s': forward returned a parameter, or a view of one, whose memory is freed when the"
    " forward ends. Return a clone of it, or return it in a container or dataclass. It is"
)
# key in the metadata of an autograd node
_CALLBACKS: Final = "composable: callbacks before gradients"


class Watched(NamedTuple):
    """What watching the outputs of one call found.

    Attributes:
        output: what the caller gets.
        found: backward will come through one of them.
        aliases: one of them is, or views, a compute parameter, which must outlive forward then.
        opaque: types of objects in which no tensor was found, and which cannot be looked into.
    """

    output: Any
    found: bool
    aliases: bool = False
    opaque: tuple[str, ...] = ()


def _inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or of a wrapper that autograd knows nothing of (`vmap`, a subclass), the tensors
    inside that have the graph.
    """
    yield tensor if tensor.requires_grad else innermost(tensor)
    if type(tensor) in _PLAIN or tensor.grad_fn is not None:
        return
    for inside in vars(tensor).values():
        if isinstance(inside, Tensor):
            yield from _inner_tensors(inside)


def watch(
    output: Any,
    since: int,
    entry: Callable[..., None],
    aliases: Callable[[Tensor], bool],
    *,
    counted: bool = True,
    anchors: bool = False,
    leaves: str = "",
) -> Watched:
    """Call `entry` before backward goes through `output`.

    Args:
        since: the number of autograd's next node when the call began.
        aliases: whether a tensor lies in the memory of a compute parameter.
        counted: it is a forward of a unit with parameters, and no recomputation.
        anchors: an output that needs no gradient gets a node, too (a constant, where other ranks
            computed something).
        leaves: of an outermost call, the name of its unit: the caller gets what is `owned`.
    """
    if (
        type(output) is Tensor
        and not output._is_view()
        and (node := output.grad_fn) is not None
        and made_since(since, node)
    ):  # nearly always
        before_node(node, entry)
        return Watched(output, found=True)
    opaque: list[Any] = []
    tensors = [inner for each in tensors_in(output, opaque) for inner in _inner_tensors(each)]
    if leaves and any(map(_comes_and_goes, tensors)):
        output = owned(output, leaves)
        tensors = [inner for each in tensors_in(output) for inner in _inner_tensors(each)]
    found = aliased = given = False
    for tensor in tensors:
        own = not leaves and aliases(tensor)
        aliased = aliased or own
        if not tensor.requires_grad:
            continue
        if (own or tensor.grad_fn is not None) and before_gradient(tensor, entry, since):
            found = True
        else:
            given = True
    if not found and (anchors or (given and counted)):
        output = map_tensors(output, _with_a_node if given else _with_an_anchor)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                found = before_gradient(tensor, entry, since) or found
    kinds = () if tensors else tuple(dict.fromkeys(type(value).__name__ for value in opaque))
    return Watched(output, found=found, aliases=aliased, opaque=kinds)


def _with_a_node(tensor: Tensor) -> Tensor:
    has_node = tensor.requires_grad and tensor.layout is torch.strided
    return tensor.view_as(tensor) if has_node else tensor


def _with_an_anchor(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or not (
        tensor.is_floating_point() or tensor.is_complex()
    ):
        return tensor
    return tensor + torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)


# --- what the caller keeps ----------------------------------------------------------------------


def owned(output: Any, unit_name: str) -> Any:
    """`output` of an outermost forward with copies of all that is, or views, compute parameters:
    their memory is freed, and filled again, while the caller has it. Copies are of what is viewed,
    so that a scalar holds no unit; with gradients autograd records them.

    Raises:
        OutputError: one cannot be copied, or its copy cannot be put in its place.
    """
    if type(output) is Tensor and output.grad_fn is not None and not output._is_view():
        return output  # it was computed, as nearly always
    if not any(map(_comes_and_goes, tensors_in(output))):
        return output
    grad = torch.is_grad_enabled()  # `inference_mode(False)` turns gradients on
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            output = map_tensors(output, _copy, into_objects=True)
        except Exception as error:
            raise OutputError(f"{_LEAVES % unit_name} not to be copied: {error}") from error
    if any(map(_comes_and_goes, tensors_in(output))):
        raise OutputError(f"{_LEAVES % unit_name} in an object where no copy can take its place")
    return output


def lends(output: Any, aliases: Callable[[Tensor], bool]) -> bool:
    """Whether `output` has what lies in the memory of a compute parameter."""
    return any(aliases(part) for tensor in tensors_in(output) for part in _parts(tensor))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensor, or what has the values of one without a storage of its own."""
    if type(tensor) not in _PLAIN:
        inside = [each for each in vars(tensor).values() if isinstance(each, Tensor)]
        return [*plain_parts(tensor), *inside]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    return [tensor.values() if tensor.layout in _COMPRESSED else tensor]


def _comes_and_goes(tensor: Tensor) -> bool:
    try:
        return any(comes_and_goes(innermost(part).untyped_storage()) for part in _parts(tensor))
    except (NotImplementedError, RuntimeError):
        return False  # tensors without storage: nested, wrappers


def _copy(tensor: Tensor) -> Tensor:
    if not _comes_and_goes(tensor):
        return tensor
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        once = tensor
        for dim, stride in enumerate(tensor.stride()):  # `expand`ed: each element once
            once = once if stride else once.narrow(dim, 0, min(1, tensor.shape[dim]))
        if once is not tensor:
            return once.clone().expand_as(tensor)
    return tensor.clone()


# --- callbacks in backward ----------------------------------------------------------------------


def before_gradient(tensor: Tensor, callback: Callable[..., None], since: int = 0) -> bool:
    """Call `callback` before backward goes through `tensor`, which requires gradients. Returns
    whether there is a node that was made since the one with this number was next, or a leaf, where
    it is called.

    A view is watched at its own node and at its base's. If a caller writes to the view in place,
    its node is replaced by one that leads to the base's node, and backward does not run the old
    one. A callback at a leaf is called once and is then removed, because a leaf may be a parameter,
    which outlives the graph.

    Several callbacks at one node are called in reverse order. They come from nested modules that
    return the same tensor, and backward enters the outer module first. Another rank may see
    different tensors there, and all ranks must use one order.
    """
    node = tensor.grad_fn
    if node is None:

        @untraced
        def once(gradient: Tensor) -> None:
            handle.remove()
            callback(gradient)

        handle = tensor.register_hook(once)
        return True
    if not made_since(since, node):
        return False
    before_node(node, callback)
    base = tensor._base  # None unless it is a view
    if base is not None and base.grad_fn is not None and made_since(since, base.grad_fn):
        before_node(base.grad_fn, callback)
    return True


def before_node(node: Any, callback: Callable[..., None]) -> None:
    """Call `callback` before backward runs `node`, before the callbacks that were added earlier."""
    metadata = node.metadata
    callbacks = metadata.get(_CALLBACKS)
    if callbacks is None:
        callbacks = metadata[_CALLBACKS] = []
        node.register_prehook(partial(_call_each, callbacks))
    callbacks.insert(0, callback)


@untraced
def _call_each(callbacks: Sequence[Callable[..., None]], gradients: Any) -> None:
    for callback in callbacks:
        callback(gradients)
