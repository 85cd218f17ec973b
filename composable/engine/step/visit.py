"""The hooks around forwards of a unit's modules, and the hooks through which backward enters it.

The hooks call `Unit`, which holds the parameters and gradients of its modules, and `Root`, which
decides the order of the step. Neither of the two calls a hook.

If an output of a forward uses memory that is freed after forward, it is replaced by a copy. The
autograd nodes that a unit's forward created for its outputs are where backward enters the unit.

Only outputs that the call created (`node._sequence_nr()` at least the number at entry) trigger the
pre-backward hook. An input that is returned unchanged, such as a decoder's `memory`, belongs to the
call that created it: hooking it here would unshard this unit too early. If a call created none of
its outputs, they get a node that does nothing, because other ranks may have computed outputs in
this unit, and all ranks must enter the same units in backward.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.compilation import backward_is_compiled, untraced
from composable.contract.values import map_tensors, tensors_in
from composable.engine.params.param import ManagedParam
from composable.engine.params.precision import cast, moved
from composable.engine.step.compiled import guarded
from composable.engine.step.observer import OBSERVERS, Observer, notify
from composable.engine.step.root import Root, plan_root, root_for_call
from composable.engine.step.unit import Need, Unit, UnitCall
from composable.errors import OutputError, PhaseError
from composable.memory.elastic import comes_and_goes
from composable.tensors import plain_parts
from composable.torch_private import current_node, in_backward, innermost, made_since, next_node

logger = logging.getLogger("composable")
_WARNED: Final[WeakSet[Unit]] = WeakSet()  # units whose gradients at rest were warned of

_PLAIN: Final = (Tensor, nn.Parameter)
_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_LEAVES: Final = (
    "unit '%s': forward returned a parameter, or a view of one, whose memory is freed when the"
    " forward ends. Return a clone of it, or return it in a container or dataclass. It is"
)
# key in the metadata of an autograd node
_CALLBACKS: Final = "composable: callbacks before gradients"


class Visit:
    """The bracket around forwards of one unit's modules (`composable.contract.hooks`)."""

    __slots__ = ("_is_entering", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        # `pre_forward` runs, or it raised and has cleaned up, so that `on_error` has nothing to do
        self._is_entering = False

    @untraced
    def pre_forward(
        self, module: nn.Module, args: Any, kwargs: Any, *, computes: bool = True
    ) -> tuple[Any, Any]:
        """Pre-forward.

        | the call | gathers | then |
        |---|---|---|
        | is of a forward | `Root.pre_forward`: the unit, and others ahead | it has a root |
        | repeats what checkpointing dropped | the unit alone: no order is recorded | it has none |

        Backward needs the unit next after a recomputation, so that nothing is freed behind it.

        Args:
            computes: False if the unit takes part in communication only.
        """
        unit, self._is_entering = self.unit, True
        root = unit.root
        if root is not None and _recomputes(unit, root):
            call = UnitCall(unit, unit.step, module, next_node(), None)
            if root.in_step:  # not in the second half of a split backward
                before = _before_recomputation(root, call)
                # so that it repeats what its forward did
                if before is None or before.anchors:
                    enters = unit.trains or root.order.enters_frozen(unit)
                    call.take_place(None, outermost=False, is_entered=enters)
                for each in OBSERVERS["pre_forward"]:
                    each(root, call)
            unit.unshard()
            unit.wait_for_unshard()
        else:
            root = root_for_call(unit, module, computes=computes)  # may reset: forget all calls
            call = UnitCall(unit, unit.step, module, next_node(), root)
            for each in OBSERVERS["pre_forward"]:
                each(root, call)
            root.pre_forward(call, (args, kwargs) if computes else None)
        self._is_entering = False
        unit.push_call(call)
        policy, device = unit.spec.mp_policy, unit.mesh_info.device
        # also where torch's checkpoint around the root runs it again
        if (call.outermost or unit is root.top) and device.type not in ("cpu", "meta"):
            args, kwargs = moved((args, kwargs), device)
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast((args, kwargs), policy.param_dtype)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Post-forward."""
        unit = self.unit
        call, grad = unit.step.calls[-1], torch.is_grad_enabled()
        try:
            unit.pop_call()
            if unit.spec.mp_policy.output_dtype is not None:
                output = cast(output, unit.spec.mp_policy.output_dtype)
            if grad:
                output, keep = self._watch(output, call)
            elif call.outermost:
                output, keep = owned(output, unit.name), False
            else:  # until the root's forward ends
                keep = lends(output, unit.aliases)
            end_call(call, keep=keep)
        except BaseException:
            if call.root is not None:
                call.root.on_error(unit)  # of the outermost forward, also if its end raised
            raise
        return output

    def _watch(self, output: Any, call: UnitCall) -> tuple[Any, bool]:
        """Let `pre_backward` be called before backward goes through `output`, at the nodes that
        this call made; at one node, for the outer call first. Returns it, and whether parameters
        must outlive forward.
        """
        unit = self.unit
        root = call.root
        if root is not None and not root.eager_because:
            return owned(output, unit.name) if call.outermost else output, False
        counted = root is not None and bool(unit.params)
        output, found, aliases, opaque = watch(
            output, call.since, partial(pre_backward, call), unit.aliases,
            counted=counted, anchors=call.anchors, leaves=unit.name if call.outermost else "",
        )  # fmt: skip
        if not found:
            if opaque and unit.trains and unit.is_sharded:
                raise OutputError(
                    f"unit '{unit.name}': forward returned {', '.join(opaque)}, in which no tensor"
                    " that requires grad was found, so backward cannot be followed to the unit."
                    " Return tensors, containers, dataclasses or objects with attributes"
                )
            return output, aliases or unit.trains
        if root is not None:  # backward comes once, however often parts run again
            call.await_backward()
            output = guarded(output, root)
        return output, aliases

    @untraced
    def on_error(self, module: nn.Module) -> None:
        """Forward, or a hook around it, raised. Called for the innermost module first."""
        unit = self.unit
        raised, self._is_entering = self._is_entering, False
        calls = unit.step.calls
        if unit.root is not None and unit.root.runs_elsewhere and not in_backward():
            return  # this call was refused, and is not the one under way
        # `pre_forward` raised, and what it called has cleaned up; or a reset has forgotten the call
        if raised or not calls or calls[-1].module is not module:
            return
        root = calls[-1].root
        if root is None:  # checkpointing stops a recomputation by an exception, when it has enough
            end_call(unit.pop_call(), keep=False)
        else:
            error = sys.exception()
            assert error is not None
            notify(Observer.raises, root, calls[-1], error)
            unit.pop_call()
            unit.end_forward()
            root.on_error(unit)


def _recomputes(unit: Unit, root: Root) -> bool:
    """Whether a forward that begins repeats what checkpointing dropped: it runs inside of a
    backward of its own root. (A model without a root, which checkpointing around it runs again, has
    its first forward there.)
    """
    if not root.eager_because:  # the compiler reduces the gradients: there is no iteration
        return in_backward() or backward_is_compiled()
    # The second half of a split backward runs outside of a step.
    return in_backward() and (root.in_step or Need.BY_HAND in unit.step.needed_by)


def end_call(call: UnitCall, *, keep: bool) -> None:
    """A call has computed. `keep`: parameters must outlive forward."""
    root = call.root or call.unit.root
    if root is not None:  # a part that runs again may have none since the tree changed
        for each in OBSERVERS["post_forward"]:
            each(root, call, keep)
        if call.root is root:  # otherwise it recomputes, and backward needs the unit next
            root.post_forward(call, keep=keep)


# --- backward ------------------------------------------------------------------------------------


@untraced
def pre_backward(call: UnitCall, *_: object) -> None:
    """Backward is about to go through an output that `call` made."""
    unit = call.unit
    if unit.modules:
        # anew, if a unit came or went since the forward
        root = unit.root or plan_root(unit)
        root.pre_backward(call)
    elif unit.is_sharded and unit.spec.params:
        raise PhaseError(
            f"fully_shard was removed from unit '{unit.name}' between a forward and its backward:"
            " the parameters that this backward goes to are no longer the module's. Run the"
            " backward first, or the forward again"
        )


def _before_recomputation(root: Root, again: UnitCall) -> UnitCall | None:
    """Checkpointing is about to run a forward again, for the node that backward is at.

    If some ranks skip the last unit of the checkpointed part, ranks come here from different nodes.
    So backward enters the unit now, and before it those around it: on all ranks in one order,
    before the recomputation gathers others.

    Returns:
        The call that is run again; None if it ran without gradients (reentrant checkpointing).
    """
    calls, entered = root.step.history, list[UnitCall]()  # the last call, and those around it
    for index in range(bisect_right(calls, current_node(), key=attrgetter("since")) - 1, -1, -1):
        call = calls[index]
        if call.watched and (not entered or entered[-1].unit in call.unit.relations.ran_inside):
            entered.append(call)
        if call.unit is again.unit:
            with torch.no_grad():  # of the backward; recomputations have gradients
                for each in reversed(entered):
                    pre_backward(each)
            return call
    return None


def _gradient_arrived(unit: Unit, param: ManagedParam) -> None:
    """Autograd has accumulated a gradient on what modules compute with."""
    (unit.root or plan_root(unit)).on_gradient(unit, param)


def _gradient_arrived_at_rest(unit: Unit, param: ManagedParam) -> None:
    """Autograd has accumulated on an at-rest parameter that modules do not compute with."""
    if unit.gradients.mesh_info_of(param).all.size == 1:
        return  # one rank's gradient is right wherever it came
    root = unit.root
    if root is not None:  # none before the first forward: a penalty alone
        root.on_gradient_at_rest(unit, param)
    # Shards are DTensors there, which torch does not mix with a batch.
    if not isinstance(param.at_rest, DTensor) and unit not in _WARNED:
        _WARNED.add(unit)
        logger.warning(
            "unit '%s': a gradient came to parameter '%s' outside of the unit's forward, where it"
            " has its own dtype and its gradient is this rank's alone. A penalty on parameters is"
            " the same on all ranks, and right. Otherwise call the module and not its forward(),"
            " and use register_forward_method(module, name) for other methods",
            unit.name,
            param.fqn,
        )


# what `Unit.initialize` takes
GRADIENT_HOOKS: Final = (_gradient_arrived, _gradient_arrived_at_rest)


# --- outputs: where backward comes back ---------------------------------------------------------


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

    | a tensor in the output | has a node | what becomes of it |
    |---|---|---|
    | was computed in this call (`made_since`) | yes | `entry` is a hook of its node |
    | is, or views, a compute parameter (`aliases`) | maybe | a hook of the node, or of the tensor |
    | was an input, and is returned unchanged | maybe | no hook: it belongs to another call |
    | needs no gradient | no | no hook |
    | in an object that is no container of tensors | - | not seen; its class is in `opaque` |

    If no tensor got a hook, but an input was returned in a call that is `counted`, a view with a
    node of its own takes the input's place. With `anchors`, so does a sum with zero for a constant.

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


# --- outputs: what the caller keeps -------------------------------------------------------------


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


# --- outputs: callbacks in backward -------------------------------------------------------------


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
