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
from composable.model.interrupts import calls_of
from composable.model.naming import find_fqn
from composable.model.traversal import REPLICATE, SHARD, get_all_sharded_states, get_replicated_states
from composable.runtime.accumulation import Pass
from composable.runtime.hookable import STAGES, Replicas, Shards
from composable.runtime.hooked_units import HookedUnits, UnitHook
from composable.runtime.mesh_info import MeshInfo

_VERB: Final = "register_comm_hook"
_ROOM: Final = 300  # bytes of what a rank says


class CommHookHandle:
    """What `register_comm_hook` returns. As a context manager it removes the hook at the end of its body."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Reduce gradients as before the hook, from the next backward on. All ranks do so together; done twice is done once.
        Where one rank does so alone, the next backward fails on all ranks of a host; elsewhere nobody compares."""
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
    An index belongs to parameters in one order, and to no others when buckets are filled anew.

    Of a sharded unit the bucket has the whole gradients, in the dtype that they are summed in, and the hook returns them
    reduced, on every rank, which takes its shards. `parameters()` are those that rest: with an `offload_policy` on the host,
    while the gradients are on the device, and what the hook returns must be there, too.

    Hybrid sharding reduces in two stages, each of which takes a hook. In place of "reduce_scatter" a hook reduces whole
    gradients over the ranks of one replica, as above. In place of "all_reduce" it reduces shards over the replicas: the bucket
    has the means over the ranks of one replica, of each parameter the rows that this rank owns.

    Hooks communicate over `bucket.group`, which nothing else uses. A `state` of None is that group, and so is a
    `state.process_group` of None. On accelerators hooks are called while backward runs; on hosts, too, for
    sharded units, and at its end for replicated ones, one after the other, when all ranks have come there: no hook is called
    where a rank has left the backward, and the others are told of one that raises.

    `grad_reduce` and `weighted_gradients` multiply gradients before the hook sees them, so that its mean is what they ask for.
    A backward under `no_sync` calls no hook, and the one that ends the window hands over the whole sum; under
    `no_sync(level="replicate")` the hook of the first stage is called each time. One rank alone calls no hook.

    All ranks register the same hook together, between steps.

    Args:
        module: a replicated or a fully sharded module. The hook is for its unit, and for those of the same verb inside.
        hook: what reduces. The same on all ranks.
        state: its first argument. One state is for one registration, if it remembers something by `bucket.index()`.
        stage: of the reduction. Replicated gradients have one stage, "all_reduce", and so do sharded ones,
            "reduce_scatter": leave it out there. Hybrid sharding has both, so say which one.

    Returns:
        A handle whose `remove()` takes the hook away.

    Raises:
        NotAnnotatedError: `module` is neither replicated nor fully sharded.
        AlreadyAnnotatedError: a unit has a hook for this stage.
        AnnotationError: the hook cannot be called; there is no such stage, or there are two and none is said; a parameter has
            sparse gradients.
        MeshError: units are on different meshes.
        PhaseError: a forward waits for its backward; inside of a backward, or of `no_sync`.
        RanksDisagreeError: another rank refuses, or registers another hook.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> handle = register_comm_hook(model, bf16_compress_hook)

    After `DistributedDataParallel.register_comm_hook`, which takes `state` first.
    """
    module = unwrapped(module)
    units = _units_of(module)
    mesh_info, stages = units[0].mesh_info, units[0].stages
    stage = stages[0] if stage is None and len(stages) == 1 else stage
    said = stage if len(stages) > 1 and isinstance(stage, str) else ""
    with _refused_by_all(f"{name_of_hook(hook)}{said and f' for {said}'}", _meeting_place(mesh_info)):
        stage = _checked(hook, stage, units[0])
        for unit in units:
            _refuse_unit(unit, mesh_info, stage)
            _refuse_moment(_VERB, unit)
    parent = units[0].group_of(stage)
    group = None if parent is None else hook_group_of(parent, mesh_info.device)
    hooked = HookedUnits(CommHook(hook, state, group), said)
    names = {id(below): name for name, below in module.named_modules()}
    hooks = [unit.hooked_by(hooked, f"{name}." if (name := names.get(id(unit.modules[0]))) else "") for unit in units]
    undo = partial(_change, units, [None] * len(units), stage)
    try:
        _change(units, hooks, stage)
    except BaseException:
        undo()
        raise
    return CommHookHandle(partial(_remove, units, undo))


_Unit = Replicas | Shards


def _units_of(module: nn.Module) -> Sequence[_Unit]:
    """The unit of `module`, and those of the same verb inside."""
    annotations = registry(module)
    if REPLICATE in annotations:
        replicated = dict.fromkeys([annotations[REPLICATE].state, *get_replicated_states(module)])
        return [Replicas(state.averaging) for state in replicated]
    if SHARD in annotations:
        sharded = dict.fromkeys([annotations[SHARD].state, *get_all_sharded_states(module)])
        return [Shards(state) for state in sharded]
    raise NotAnnotatedError(
        f"{_VERB}: {describe_module(module, find_fqn(module))} is not annotated; call replicate(module) or fully_shard(module) "
        "first. Of units without a module around them, each takes a hook of its own"
    )


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


def _checked(hook: Any, stage: Any, unit: _Unit) -> str:
    """The stage, if there is such a one in which gradients of `unit` are reduced."""
    stages = unit.stages
    if not callable(hook):
        raise AnnotationError(
            f"{_VERB}: a hook is called as hook(state, bucket), and {type(hook).__name__} cannot be called. It stands before "
            "its state: register_comm_hook(module, hook, state)"
        )
    if stage in stages:
        return str(stage)
    if len(stages) > 1 and stage is None:
        raise AnnotationError(
            f"{_VERB}: gradients of unit '{unit.name}' are reduced in two stages: 'reduce_scatter' among the ranks that hold "
            "one replica together, and 'all_reduce' of shards among the replicas. Say which of them the hook replaces: "
            "stage='all_reduce', for example. A hook for the other one is registered by itself"
        )
    if stage in STAGES:
        kind = "replicated" if stages == ("all_reduce",) else "sharded"
        raise AnnotationError(f"{_VERB}: {kind} gradients are reduced in one stage, '{stages[0]}'; leave stage= out")
    near = "".join(f"; did you mean '{name}'?" for name in closest(str(stage), stages))
    known = " or ".join([*(f"'{name}'" for name in stages), *(["None"] if len(stages) == 1 else [])])
    raise AnnotationError(f"{_VERB}: stage must be {known}, got {stage!r}{near}")


def _refuse_unit(unit: _Unit, mesh_info: MeshInfo, stage: str) -> None:
    hook = unit.hook_of(stage)
    if hook is not None:
        where = f" for {hook.units.stage}" if hook.units.stage else ""
        raise AlreadyAnnotatedError(
            f"{_VERB}: unit '{unit.name}' has the communication hook '{hook.name}'{where} already. Remove it first, by the "
            "handle that registering it returned"
        )
    if isinstance(unit, Replicas):  # a verb that shards takes no sparse ones
        unit.refuse_gradients()
    if (unit.mesh_info.place, unit.mesh_info.replicas) != (mesh_info.place, mesh_info.replicas):
        raise MeshError(
            f"{_VERB}: unit '{unit.name}' is on another mesh than the module that the hook is for. Register a hook for each, "
            "with a state of its own"
        )


def _refuse_moment(what: str, unit: _Unit) -> None:
    accumulation = unit.accumulation
    when = ""
    if in_backward():
        when = "inside of a backward"
    elif any(calls_of(module) for module in unit.modules):
        when = "inside of its forward"
    elif accumulation.in_window or accumulation.now is not Pass.REDUCES:
        when = "inside of a window of no_sync, whose gradients would be reduced in another way than they were made for"
    elif unit.waits_for_backward:
        when = "between a forward and its backward; what is not trained on belongs under torch.no_grad()"
    if when:
        raise PhaseError(f"{what}: unit '{unit.name}' is {when}. Do it between two steps")


def _change(units: Sequence[_Unit], hooks: Sequence[UnitHook | None], stage: str) -> None:
    for unit, hook in zip(units, hooks, strict=True):
        if unit.is_there:
            unit.put(hook, stage)


def _remove(units: Sequence[_Unit], undo: Callable[[], None]) -> None:
    for unit in units:
        if unit.is_there:
            _refuse_moment("remove a communication hook", unit)
    undo()
