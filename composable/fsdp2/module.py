"""`FSDPModule`: what trainers ask of a sharded module, and the methods that they call on it.

The class of a module stays what it is. `isinstance` is answered from the registry of annotations,
and an annotated module gets its methods as attributes of its own, which `remove` takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.distributed.fsdp import UnshardHandle
from typing_extensions import override

from composable.api import explicit_calls
from composable.checked import PositiveFloat, Takes, checked
from composable.comm.base import Comm
from composable.comm.supplied import SuppliedComm, with_symmetric_memory
from composable.compilation import unwrapped
from composable.config import MixedPrecisionPolicy
from composable.contract.contract import Method, bind_method, unbind_method
from composable.contract.tree import SHARD, annotation_of
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.step.observer import OBSERVERS, Observer
from composable.engine.step.root import roots_of
from composable.engine.step.unit import Unit, units_below
from composable.errors import AnnotationError, NotAnnotatedError, PhaseError, UnsupportedError
from composable.features import split_backwards
from composable.torch_private import FSDP2Module

# FSDP2 takes any value that is true or false, and scripts pass 0 and 1.
Flag = Annotated[bool | int, Takes("True or False", lambda value: value in (0, 1))]

_KEEP: Final = "set_reshard_after_backward(False)"

# --- what the setters have set -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reduction:
    """When the gradients of a unit are reduced.

    Attributes:
        sync, all_reduce: as `set_requires_gradient_sync` and `set_requires_all_reduce` set them.
        at_end: by `finalize_backward`, and not by backward.
    """

    sync: bool = True
    all_reduce: bool = True
    at_end: bool = False

    def mode(self, unit: Unit) -> SyncMode:
        if self.at_end or not self.sync or not (self.all_reduce or unit.is_sharded):
            return SyncMode.HOLD
        hybrid = bool(unit.mesh_info.replicas)
        return SyncMode.HOLD_SHARDS if hybrid and not self.all_reduce else SyncMode.REDUCE


_reductions: Final[WeakKeyDictionary[Unit, _Reduction]] = WeakKeyDictionary()

# Units that were annotated with reshard_after_forward=None. Those inside another one reshard; the
# outermost keeps its parameters until backward.
AUTOMATIC: Final[WeakSet[Unit]] = WeakSet()


# Units that the end of the next backward, or of `reduce_gradients`, frees.
_ends_keeping: Final[WeakKeyDictionary[Unit, None]] = WeakKeyDictionary()


class _EndOfKeeping(Observer):
    @override
    def gradients_landed(self) -> None:
        for unit in [*_ends_keeping]:
            unit.release(_KEEP)
        _ends_keeping.clear()


OBSERVERS.add(_EndOfKeeping())


def _set_reduction(unit: Unit, **changes: bool) -> None:
    former = _reductions.get(unit, _Reduction())
    now = _reductions[unit] = replace(former, **changes)
    if now != former:
        unit.gradients.accumulation.close_scope(_Reduction)
        mode = now.mode(unit)
        if mode is not SyncMode.REDUCE:
            unit.gradients.accumulation.open_scope(_Reduction, mode)


def _follow_schedule(units: Sequence[Unit]) -> None:
    """Serve a pipeline schedule that splits backwards.

    Before each of them, its stages ask to accumulate gradients.
    """
    for root in roots_of(units):
        asked = all(
            _reductions.get(unit, _Reduction()).mode(unit) is SyncMode.HOLD for unit in root.units
        )
        if asked:
            split_backwards.hold(root)
        else:
            split_backwards.end(root)


def _unit(name: str, module: Any) -> Unit:
    """Return the unit of an annotated module, or of a member of an annotated list."""
    if not isinstance(module, nn.Module):
        raise NotAnnotatedError(f"{name}: a {type(module).__name__} is no module")
    return explicit_calls.units_in(name, module, recurse=False)[0]


def _units(name: str, module: Any, recurse: Flag) -> list[Unit]:
    """Return its unit, and if `recurse` all units below, those of `replicate` among them."""
    unit = _unit(name, module)
    return units_below([unwrapped(module)]) if recurse else [unit]


def _sharded(name: str, module: Any, recurse: Flag) -> list[Unit]:
    return [unit for unit in _units(name, module, recurse) if unit.spec.verb == SHARD]


def _unit_on_one_mesh(name: str, module: Any) -> Unit:
    unit = _unit(name, module)
    if not unit.on_one_mesh:
        raise UnsupportedError(
            f"{name}: parameters of unit '{unit.name}' are on meshes of their own"
            " (shard_placement_fn), and FSDP2 does not know of which the setting is, either."
            " Annotate the modules that have them apart"
        )
    return unit


def _exchange(
    name: str, module: Any, given: Any, choose: Callable[[SuppliedComm], tuple[Any, Any]]
) -> None:
    """Let the unit gather and reduce by what `choose` returns: a pair of FSDP2's protocols."""
    unit = _unit_on_one_mesh(name, module)
    if not callable(given) or not hasattr(given, "allocate"):
        raise AnnotationError(
            f"{name} takes an object with allocate() that can be called, as torch's AllGather and"
            f" ReduceScatter, got {given!r}"
        )

    def exchange(comm: Comm) -> Comm:
        if comm.group is None:  # one rank, and no message
            return comm
        old = comm if isinstance(comm, SuppliedComm) else SuppliedComm(comm)
        return SuppliedComm(old.inner, *choose(old))

    unit.exchange_comms(exchange)


def _without_effect(name: str, why: str, refuse: bool) -> Callable[..., None]:
    """Make a method that accepts its arguments and has no effect, or raises."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        _unit(name, self)
        if refuse:
            raise UnsupportedError(f"{name}() of FSDP2 is not supported by composable; {why}")

    method.__name__ = name
    method.__doc__ = f"{'Raise `UnsupportedError`' if refuse else 'Have no effect'}: {why}."
    return method


# --- the class -----------------------------------------------------------------------------------


class _AsksRegistry(type):
    def __instancecheck__(cls, instance: object) -> bool:
        if cls is not FSDPModule or not isinstance(instance, nn.Module):
            return type.__instancecheck__(cls, instance)
        if annotation_of(instance) is not None:
            give_methods(instance)  # for those that composable's own verbs have annotated
            return True
        return isinstance(instance, FSDP2Module)  # torch's `replicate` makes some


class FSDPModule(metaclass=_AsksRegistry):
    """Answer for `torch.distributed.fsdp.FSDPModule`, over modules annotated by composable.

    `isinstance(module, FSDPModule)` is True for each module that was passed to `fully_shard` (of
    this package or composable's own) or to `replicate`, alone or in a list. It is False for modules
    below. The class of the module does not change. The methods are attributes of the module. If the
    module or its class already has an attribute of that name, call the method as
    `FSDPModule.unshard(module)`.

    Every method of torch's class exists here. It does the same as in torch, or it has no effect if
    it only affects speed, or it raises `UnsupportedError`.

    Raises:
        NotAnnotatedError: by each method, if the module is not annotated itself.

    Example:
        >>> fully_shard(model)
        >>> isinstance(model, FSDPModule)
        True
        >>> model.set_requires_gradient_sync(False)

    After FSDP2's class of this name, Zhao et al., "PyTorch FSDP" (VLDB 2023).
    """

    # --- parameters --------------------------------------------------------------------------

    @checked
    def unshard(self: Any, async_op: Flag = False) -> UnshardHandle | None:
        """All-gather the parameters of this module's unit, and of no unit below it.

        Args:
            async_op: return a handle at once. Its `wait()`, or the next forward, waits.
        """
        pending = explicit_calls.unshard(self, async_op=bool(async_op), recurse=False)
        return _Handle(pending.wait) if async_op else None

    def reshard(self: Any) -> None:
        """Free the gathered parameters of this module's unit, and of no unit below it.

        Raises:
            PhaseError: inside of the unit's own forward.
        """
        explicit_calls.reshard(self, recurse=False)

    @checked
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: Flag = True) -> None:
        """Decide whether parameters are freed after forward, from the next forward on.

        Args:
            reshard_after_forward: True or False. A number needs other groups of ranks, so only
                `fully_shard` accepts it.
            recurse: also for the units below.

        Raises:
            ArgumentError: `reshard_after_forward` is no bool.
        """
        for unit in _sharded("set_reshard_after_forward", self, recurse):
            AUTOMATIC.discard(unit)
            unit.set_reshard_after_forward(bool(reshard_after_forward))

    @checked
    def set_reshard_after_backward(
        self, reshard_after_backward: Flag, *, recurse: Flag = True
    ) -> None:
        """Decide whether parameters are freed after backward.

        If parameters are kept after backward, they are kept after forward, too. FSDP2 frees them
        after forward. After an optimizer has changed them, they are gathered again. FSDP2 computes
        with the old ones. True frees them at the end of the next backward or reduction, so the last
        micro-batch of an accumulation still uses them.

        Args:
            reshard_after_backward: whether to free them.
            recurse: also those of the units below.
        """
        for unit in _sharded("set_reshard_after_backward", self, recurse):
            if reshard_after_backward:
                if _KEEP in unit.kept_by:
                    _ends_keeping[unit] = None
                continue
            _ends_keeping.pop(unit, None)
            if unit.root is not None and unit.root.in_step:
                unit.keep(_KEEP, as_gathered=True)
            elif _KEEP not in unit.kept_by:
                unit.keep(_KEEP)

    # --- gradients ---------------------------------------------------------------------------

    @checked
    def set_requires_gradient_sync(
        self, requires_gradient_sync: Flag, *, recurse: Flag = True
    ) -> None:
        """Decide whether backwards reduce gradients, or accumulate them on this rank.

        Backward reads the setting. True also ends the effect of `set_requires_all_reduce(False)`.
        An exception does not reset the setting. `composable.no_sync` does the same as a scope.

        Args:
            requires_gradient_sync: whether to reduce.
            recurse: also the gradients of the units below.
        """
        units = _units("set_requires_gradient_sync", self, recurse)
        reduces = bool(requires_gradient_sync)
        for unit in units:
            _set_reduction(unit, sync=reduces, all_reduce=reduces)
        _follow_schedule(units)

    @checked
    def set_requires_all_reduce(self, requires_all_reduce: Flag, *, recurse: Flag = True) -> None:
        """Decide whether backwards of hybrid sharding reduce over the replicas, too.

        With False, they reduce over the ranks that shard together, and accumulate the result. On a
        mesh of one dimension it has no effect.

        Args:
            requires_all_reduce: whether to reduce over the replicas.
            recurse: also the gradients of the units below.
        """
        for unit in _units("set_requires_all_reduce", self, recurse):
            _set_reduction(unit, all_reduce=bool(requires_all_reduce))

    @checked
    def set_gradient_divide_factor(self, factor: PositiveFloat) -> None:
        """Divide the sum of this unit's gradients over all ranks by `factor`, not by their number.

        Args:
            factor: a positive number. Units below keep theirs.

        Raises:
            ArgumentError: `factor` is not positive.
            PhaseError: in the middle of a step. FSDP2 accepts this.
        """
        unit = _unit("set_gradient_divide_factor", self)
        unit.set_divisor(float(factor))

    @checked
    def set_reduce_scatter_divide_factor(self, factor: PositiveFloat) -> None:
        """Do the same as `set_gradient_divide_factor`, which replaces this method.

        Args:
            factor: a positive number.
        """
        _unit("set_reduce_scatter_divide_factor", self)
        FSDPModule.set_gradient_divide_factor(self, factor)

    @checked
    def set_manual_backward_finalization(self, enabled: Flag) -> None:
        """Decide whether `finalize_backward` reduces gradients, in place of the end of backward.

        Gradients of this module's unit and of those below are accumulated until then.

        Args:
            enabled: whether it does.
        """
        units = _units("set_manual_backward_finalization", self, recurse=True)
        for unit in units:
            _set_reduction(unit, at_end=bool(enabled))
        _follow_schedule(units)

    @checked
    def finalize_backward(self: Any, *, async_op: Flag = False) -> _Handle | None:
        """Reduce what backwards have accumulated, unless `set_requires_gradient_sync(False)` holds.

        All ranks call it together, after the same backwards.

        Args:
            async_op: launch the reductions, and return a handle. Its `wait()`, or the next forward,
                backward or optimizer step, puts the gradients on the parameters.

        Raises:
            PhaseError: inside of a forward or backward; or some units would be reduced, and others
                not.
        """
        units = _units("finalize_backward", self, recurse=True)
        waits = [not (held := _reductions.get(unit, _Reduction())).sync or not held.all_reduce
                 for unit in units]  # fmt: skip
        if any(waits) and not all(waits):
            at = units[waits.index(True)].name
            raise PhaseError(
                f"finalize_backward: gradients of unit '{at}' are to be accumulated, and those of"
                " other units are to be reduced. Set set_requires_gradient_sync alike on all of"
                " them"
            )
        land = None if any(waits) else explicit_calls.launch_reductions(self)
        handle = _Handle(land or (lambda: None))
        if async_op:
            return handle
        handle.wait()
        return None

    def synchronize_gradients(self: Any) -> None:
        """Reduce now what backwards have accumulated in this module; see `reduce_gradients`."""
        _unit("synchronize_gradients", self)
        explicit_calls.reduce_gradients(self)

    def reset_iter_state(self: Any) -> None:
        """Give up a step that failed on all ranks, as `composable.reset` does.

        Raises:
            PhaseError: the module is not the outermost one of its model.
        """
        unit = _unit("reset_iter_state", self)
        root = unit.root
        if root is not None and root.units[0] is not unit:
            raise PhaseError(
                f"reset_iter_state was called on unit '{unit.name}'; call it on the outermost"
                " sharded module, whose step it resets"
            )
        explicit_calls.reset(self)

    @checked
    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Have no effect: the recorded order is gathered ahead.

        Args:
            modules: which FSDP2 gathers ahead in forward.

        Raises:
            NotAnnotatedError: one of `modules` is not annotated.
        """
        for module in (self, *modules):
            _unit("set_modules_to_forward_prefetch", module)

    @checked
    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Have no effect: the recorded order is gathered ahead.

        Args:
            modules: which FSDP2 gathers ahead in backward.

        Raises:
            NotAnnotatedError: one of `modules` is not annotated.
        """
        for module in (self, *modules):
            _unit("set_modules_to_backward_prefetch", module)

    # --- communication -----------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather the parameters of this module's unit by `comm`, in its memory.

        All ranks call it, between two steps; units below keep theirs.

        Args:
            comm: torch's `AllGather`: `allocate(size, *, dtype, device)` returns the output, of
                which the input is a part, and `comm(output_tensor=..., input_tensor=...,
                group=..., async_op=...)` fills it and returns a work, or None.

        Raises:
            AnnotationError: `comm` has no `allocate`, or cannot be called.
            PhaseError: in the middle of a step.
            UnsupportedError: parameters of the unit are on meshes of their own.
        """
        _exchange("set_custom_all_gather", self, comm, lambda old: (comm, old.reductions))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter the gradients of this module's unit by `comm`, in its memory.

        As for `set_custom_all_gather`. The library requests sums from `comm`, and divides them
        afterwards.

        Args:
            comm: torch's `ReduceScatter`: `allocate` returns the input and the output, and `comm`
                is called with `op`, too.

        Raises:
            AnnotationError: `comm` has no `allocate`, or cannot be called.
            PhaseError: in the middle of a step.
            UnsupportedError: parameters of the unit are on meshes of their own.
        """
        _exchange("set_custom_reduce_scatter", self, comm, lambda old: (old.gathers, comm))

    @checked
    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather and reduce-scatter this module's unit in NCCL's symmetric memory.

        All ranks call it, between two steps; units below keep theirs. It takes NCCL 2.27.

        Args:
            backend: NCCL is the only one.

        Raises:
            MeshError: the process group's backend has no symmetric memory.
            PhaseError: in the middle of a step.
            UnsupportedError: the unit has custom communication, `backend` is another one, or
                parameters of the unit are on their own meshes.
        """
        name = "set_symm_mem_for_comm"
        unit = _unit_on_one_mesh(name, self)
        if backend != "NCCL":
            raise UnsupportedError(f"{name}: backend={backend!r}, and there is NCCL only")
        if isinstance(unit.mesh_info.shard, SuppliedComm):
            raise UnsupportedError(
                f"{name}: the communication of unit '{unit.name}' is one of the user's, or in"
                " symmetric memory, already"
            )
        unit.exchange_comms(with_symmetric_memory)

    def _get_fsdp_state(self) -> State:
        return State(_unit("_get_fsdp_state", self))


_NO_EFFECT: Final = {
    "set_is_last_backward": "every backward waits for what it reduces",
    "set_unshard_in_backward": "a unit that backward does not enter is freed at its end",
    "set_force_sum_reduction_for_comms": "gradients are summed, and scaled apart from that",
    "set_reduce_scatter_unused_params": "ranks may always use different parameters",
    "set_reduce_scatter_max_input_buffers": "one reduction is in flight during the next unit",
    "set_separate_reduce_scatter_group": "gathers and reductions share a process group",
    "set_allocate_memory_from_process_group_for_comm": "buffers are torch's",
    "set_post_optim_event": "gathers wait for what was launched before the forward",
    "_set_unshard_async_op": "streams are composable's",
}
_REFUSED: Final = {
    "set_all_reduce_hook": (
        "composable.register_comm_hook(module, state, hook) takes what reduces gradients itself"
    ),
    "set_keep_unsharded_storage": (
        "reshard_after_forward=False keeps parameters until backward is done"
    ),
}
for _name, _why in {**_NO_EFFECT, **_REFUSED}.items():
    setattr(FSDPModule, _name, _without_effect(_name, _why, refuse=_name in _REFUSED))

NAMES: Final = [
    name for name, value in vars(FSDPModule).items() if callable(value) and name[:2] != "__"
]


# --- methods of annotated modules ----------------------------------------------------------------


def give_methods(module: nn.Module) -> None:
    """Set the methods of `FSDPModule` on an annotated module, where it has no such names."""
    own = vars(module)
    if any(isinstance(own.get(name), Method) for name in NAMES):
        return
    annotation = annotation_of(module)
    assert annotation is not None
    annotation.undo_by(partial(_take_methods, module))
    for name in NAMES:
        bind_method(module, name, getattr(FSDPModule, name))


def _take_methods(module: nn.Module) -> None:
    for name in NAMES:
        unbind_method(module, name)


# --- handles and states --------------------------------------------------------------------------


class _Handle(UnshardHandle):
    """What `unshard(async_op=True)` and `finalize_backward(async_op=True)` return."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        self._wait()


class State:
    """What torch's pipelines and Automodel read of FSDP2's `fully_shard.state(module)`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _state_ctx(self) -> State:
        return self

    @property
    def all_states(self) -> list[State]:
        """Of the module's unit and those below."""
        return [State(unit) for unit in units_below(self._unit.modules)]

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.spec.mp_policy

    @property
    def _fsdp_param_groups(self) -> list[_Group]:
        return [_Group() for _ in self._unit.groups]

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what was accumulated below this unit, unless `no_sync` is open around the step.

        All ranks call it together.
        """
        if self._unit.gradients.accumulation.now is SyncMode.REDUCE:
            for module in self._unit.modules:
                explicit_calls.reduce_gradients(module)


class _Group:
    def post_backward(self) -> None:
        """Nothing: `_root_post_backward_final_callback` reduces all groups."""
