"""Hooks of users that reduce gradients in place of the library: `register_comm_hook`; moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch import nn

from composable.api.all_or_none import everybody_says
from composable.compilation import untraced, unwrapped
from composable.device.collectives import Communicator, LocalCommunicator, communicator_of, hook_group_of
from composable.device.comm_hooks import CommHook, Hook, name_of_hook
from composable.device.private import in_backward
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    ComposableError,
    MeshError,
    NotAnnotatedError,
    PhaseError,
    RanksDisagreeError,
    closest,
    describe_module,
    first_line,
)
from composable.model.contract import registry
from composable.model.naming import find_fqn
from composable.model.traversal import REPLICATE, SHARD, get_replicated_states
from composable.runtime.accumulation import Pass
from composable.runtime.averaging import Averaging
from composable.runtime.hooked_units import HookedUnits, UnitHook, refuse_sparse
from composable.runtime.mesh_info import MeshInfo

_STAGES: Final = ("reduce_scatter", "all_reduce")
_VERB: Final = "register_comm_hook"
_ROOM: Final = 300  # bytes of what a rank says


class CommHookHandle:
    """What `register_comm_hook` returns. As a context manager it removes the hook at the end of its body."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Reduce gradients as before the hook, from the next backward on. All ranks do so together; done twice is done once."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> CommHookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@untraced
def register_comm_hook(module: nn.Module, hook: Hook, state: Any = None, *, stage: str | None = None) -> CommHookHandle:
    """Let `hook` reduce gradients in place of the library: compress them, count them, or keep them on their rank.

    The hook is called as `hook(state, bucket)` and returns the reduced gradients, or a `torch.futures.Future` of them. It
    replaces the sum over the ranks *and* its division, so it usually makes a mean. Those of
    `torch.distributed.algorithms.ddp_comm_hooks` run as they are.

    `bucket` has what `torch.distributed.GradBucket` has: `buffer()` is the gradients as one flat tensor, which the hook may
    write to, `gradients()` are views of it, `parameters()`, `index()`, `is_last()`, `set_buffer(tensor)`. It also knows the
    names of its parameters (`fqns`), what the sum would be multiplied by without a hook (`scale`), and its ranks (`group`).
    An index belongs to a set of parameters, and to no other one when buckets are filled anew.

    Hooks communicate over `bucket.group`, which nothing else uses. A `state` of None is that group, and so is a
    `state.process_group` of None. On accelerators hooks are called while backward runs; on hosts at its end, one after the
    other: there no hook is called where a rank has left the backward, and the others are told of one that raises.

    `grad_reduce` and `weighted_gradients` multiply gradients before the hook sees them, so that its mean is what they ask for.
    A backward under `no_sync` calls no hook, and the one that ends the window hands over the whole sum. One rank alone calls
    no hook.

    All ranks register the same hook together, between steps.

    Args:
        module: a replicated module. The hook is for its unit, and for the replicated units inside.
        hook: what reduces. The same on all ranks.
        state: its first argument. One state is for one registration, if it remembers something by `bucket.index()`.
        stage: "all_reduce", or None: `replicate` has no other one.

    Returns:
        A handle whose `remove()` takes the hook away.

    Raises:
        NotAnnotatedError: `module` is not replicated.
        AlreadyAnnotatedError: a unit has a hook.
        AnnotationError: the hook cannot be called; there is no such stage; a parameter has sparse gradients.
        MeshError: units are on different meshes.
        PhaseError: a forward waits for its backward; inside of a backward, or of `no_sync`.
        RanksDisagreeError: another rank refuses, or registers another hook.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> handle = register_comm_hook(model, bf16_compress_hook)

    After `DistributedDataParallel.register_comm_hook`, which takes `state` first.
    """
    module = unwrapped(module)
    units, prefixes = _units_of(module)
    mesh_info = units[0].mesh_info
    assert mesh_info is not None
    communicator = _meeting_place(mesh_info)
    with _refused_by_all(name_of_hook(hook), communicator):
        _refuse_arguments(hook, stage)
        for unit in units:
            _refuse_unit(unit, mesh_info)
            _refuse_moment(_VERB, unit)
    parent = None if mesh_info.group is None else mesh_info.group()
    group = None if parent is None or communicator.size == 1 else hook_group_of(parent, mesh_info.device)
    hooked = HookedUnits(CommHook(hook, state, group))
    undo = partial(_change, units, [None] * len(units))
    try:
        _change(units, [hooked.add(unit, prefix) for unit, prefix in zip(units, prefixes, strict=True)])
    except BaseException:
        undo()
        raise
    return CommHookHandle(partial(_remove, units, undo))


def _units_of(module: nn.Module) -> tuple[list[Averaging], list[str]]:
    """What averages the gradients of `module` and of the replicated modules inside, and how names of their parameters begin."""
    annotations = registry(module)
    if REPLICATE not in annotations:
        called = describe_module(module, find_fqn(module))
        if SHARD in annotations:
            raise NotAnnotatedError(f"{_VERB}: {called} is fully sharded; hooks are for replicated modules so far")
        raise NotAnnotatedError(f"{_VERB}: {called} is not replicated; call replicate(module) first")
    names = {id(below): name for name, below in module.named_modules()}
    states = [annotations[REPLICATE].state, *get_replicated_states(module)]
    units = [state.averaging for state in dict.fromkeys(states)]
    found = [names.get(id(unit.parameters.modules[0]), "") for unit in units]
    return units, [f"{name}." if name else "" for name in found]


def _meeting_place(mesh_info: MeshInfo) -> Communicator:
    group = None if mesh_info.group is None else mesh_info.group()
    return LocalCommunicator() if group is None else communicator_of(group, mesh_info.device)


@contextmanager
def _refused_by_all(name: str, communicator: Communicator) -> Iterator[None]:
    """What one rank refuses in the body all refuse, and so they do if the hooks' names differ."""
    label = f"check of {_VERB}() across ranks"
    try:
        yield
    except ComposableError as error:
        everybody_says(f"refuses: {first_line(error)}", communicator, label, _ROOM)
        raise
    said = everybody_says(f"registers {name}", communicator, label, _ROOM)
    for rank, text in enumerate(said):
        if text != said[communicator.rank]:
            raise RanksDisagreeError(
                f"{_VERB}: rank {rank} {text}, and rank {communicator.rank} {said[communicator.rank]}; no rank registers a "
                "hook. All ranks register the same hooks, in the same order"
            )


def _refuse_arguments(hook: Any, stage: Any) -> None:
    if not callable(hook):
        raise AnnotationError(
            f"{_VERB}: a hook is called as hook(state, bucket), and {type(hook).__name__} cannot be called. It stands before "
            "its state: register_comm_hook(module, hook, state)"
        )
    if stage is None or stage == "all_reduce":
        return
    if stage == "reduce_scatter":
        raise AnnotationError(f"{_VERB}: replicated gradients are reduced in one stage, 'all_reduce'; leave stage= out")
    near = "".join(f"; did you mean '{name}'?" for name in closest(str(stage), _STAGES))
    raise AnnotationError(f"{_VERB}: stage must be 'all_reduce' or None, got {stage!r}{near}")


def _refuse_unit(unit: Averaging, mesh_info: MeshInfo) -> None:
    reducer = unit.reducer
    if unit.hook is not None:
        raise AlreadyAnnotatedError(
            f"{_VERB}: unit '{unit.name}' has the communication hook '{unit.hook.name}' already. Remove it first, by the "
            "handle that registering it returned"
        )
    refuse_sparse(unit.name, [reducer.parameters.names[i] for i in reducer.parameters.sparse])
    if unit.mesh_info is None or unit.mesh_info.place != mesh_info.place:
        raise MeshError(
            f"{_VERB}: unit '{unit.name}' is on another mesh than the module that the hook is for. Register a hook for each, "
            "with a state of its own"
        )


def _refuse_moment(what: str, unit: Averaging) -> None:
    accumulation = unit.reducer.local.accumulation
    when = ""
    if in_backward():
        when = "inside of a backward"
    elif accumulation.in_window or accumulation.now is not Pass.REDUCES:
        when = "inside of a window of no_sync, whose gradients would be reduced in another way than they were made for"
    elif any(forwards.left for forwards in unit.forwards):
        when = "between a forward and its backward; what is not trained on belongs under torch.no_grad()"
    if when:
        raise PhaseError(f"{what}: unit '{unit.name}' is {when}. Do it between two steps")


def _change(units: Sequence[Averaging], hooks: Sequence[UnitHook | None]) -> None:
    for unit, hook in zip(units, hooks, strict=True):
        if unit.current is not None:  # else it was removed
            unit.hook = hook
            unit.renew(unit.parameters.registered)


def _remove(units: Sequence[Averaging], undo: Callable[[], None]) -> None:
    for unit in units:
        if unit.current is not None:
            _refuse_moment("remove a communication hook", unit)
    undo()
