"""`step_on_shards`: element-wise optimizers step the local shards of DTensors, with the same results, and in less host time.

A hook before `step` may change the arguments of the call, the first of which is the optimizer itself. The hook here puts a
stand-in in its place: an object that shares the optimizer's attributes and code, but whose `param_groups` and `state` hold
local tensors. So torch's code steps local tensors, and users, hooks, closures, schedulers and checkpoints see the optimizer
with its DTensors. The stand-in makes its groups when the code asks for them: after all hooks, and after the closure.

Nothing is kept from one step to the next. State that exists is handed over as the local tensors that it consists of; state
that a step has created, or exchanged for other tensors, is wrapped as DTensors like its parameter when the step is over.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable.engine.param import gradient_like, gradient_of, holds_unreduced, is_unreduced, label_of
from composable.errors import OptimizerError
from composable.memory.torch_private import local_of, step_hooks

ELEMENTWISE: Final = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.ASGD,
    optim.RMSprop,
    optim.Rprop,
)
_WHOLE: Final = {
    "Adafactor": "it factors whole matrices",
    "LBFGS": "it takes inner products over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it steps the rows that sparse gradients name",
}
_NOTHING: Final = object()
_placements_of: Final = attrgetter("placements")
State = dict[str, Any]

# --- one step ---------------------------------------------------------------------------------------------------------


class _NotLocal(Exception):
    """There is a parameter that has no equal local step."""


class _LocalStep:
    """The groups and the state that an optimizer's code sees in one step: local tensors in place of DTensors.

    Lists and maps instead of one loop, since this runs for every parameter in every step: 1 us each, of which half is state.

    Args:
        keep_loop: step by torch's loop where a group does not say how. That is what torch chooses for DTensors; for local
            tensors on an accelerator it would choose `foreach`, which may round in another way.
        check_state: state may have come from elsewhere since the last step.

    Raises:
        _NotLocal: nothing was changed.
    """

    def __init__(self, optimizer: Optimizer, *, keep_loop: bool, check_state: bool) -> None:
        self.groups: list[State] = []
        self.state: Any = defaultdict(dict)
        self._users_state = optimizer.state
        self._parameters: list[DTensor] = []
        self._locals: list[Tensor] = []
        self._shown: list[State] = []  # the state of `_locals`
        self._new: list[Tensor] = []  # plain parameters without state
        try:
            for group in optimizer.param_groups:
                shown = {**group, "params": self._localise(optimizer, group["params"])}
                if keep_loop and group.get("foreach", True) is None and not group.get("fused"):
                    shown["foreach"] = False
                self.groups.append(shown)
            if check_state:
                self._check_state()
        except _NotLocal:
            self._drop_gradients()
            raise
        self._before = [dict(shown) for shown in self.groups]
        self._handed = self._values()

    def _localise(self, optimizer: Optimizer, parameters: list[Tensor]) -> list[Tensor]:
        """What to step in place of `parameters`: those that have a gradient. torch's code passes over the others."""
        gradients: list[Any] = list(map(gradient_of, parameters))
        parameters = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in gradients if gradient is not None]
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if plain:
            gradients = list(map(gradient_of, sharded))
        if set(map(type, gradients)) - {DTensor}:
            raise _NotLocal
        if list(map(_placements_of, gradients)) != list(map(_placements_of, sharded)):
            refuse_unreduced(optimizer, sharded)
            raise _NotLocal
        locals_, parts = list(map(local_of, sharded)), list(map(local_of, gradients))
        if set(map(type, locals_ + parts)) - {Tensor}:
            raise _NotLocal
        states: list[State | None] = list(map(self._users_state.get, sharded))
        if not all(states):
            # Without dimensions, new state per element would look like state per parameter.
            for index, (local, state) in enumerate(zip(locals_, states, strict=True)):
                if not state and not local.dim():
                    locals_[index], parts[index] = local.view(1), parts[index].view(1)
        shown = [{key: local_of(v) if type(v) is DTensor else v for key, v in (state or {}).items()} for state in states]
        self._parameters += sharded
        self._locals += locals_
        self._shown += shown
        self.state.update(zip(locals_, shown, strict=True))
        try:
            for local, part in zip(locals_, parts, strict=True):
                local.grad = part
        except RuntimeError:  # it has another dtype or shape
            raise _NotLocal from None
        known = {parameter: self._users_state[parameter] for parameter in plain if parameter in self._users_state}
        self.state.update(known)
        self._new += [parameter for parameter in plain if parameter not in known]
        return locals_ + plain

    def _check_state(self) -> None:
        """A fused kernel does not compare the sizes of state and parameter: it would take the wrong elements."""
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            for value in self._users_state.get(parameter, {}).values():
                if isinstance(value, DTensor):
                    fits = value.placements == parameter.placements and local_of(value).shape == local.shape
                else:
                    fits = not isinstance(value, Tensor) or not value.dim()
                if not fits:
                    raise _NotLocal

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._shown)))

    def _drop_gradients(self) -> None:
        for local in self._locals:
            local.grad = None

    def finish(self, optimizer: Optimizer) -> None:
        """Give gradients up, and let the optimizer's groups and state say what the step has left in those that it saw."""
        self._drop_gradients()
        users = self._users_state
        if optimizer.state is not users:
            return  # an error ended the step, and other state was loaded since
        for group, shown, before in zip(optimizer.param_groups, self.groups, self._before, strict=False):
            group.update({key: value for key, value in shown.items() if value is not before.get(key, _NOTHING)})
        fresh = {id(parameter): self.state[parameter] for parameter in self._new if parameter in self.state}
        values = self._values()
        # State is written to in place in most steps.
        changed = len(values) != len(self._handed) or not all(map(is_, values, self._handed))
        if changed:
            pairs = zip(self._parameters, self._shown, strict=True)
            fresh.update({id(parameter): {} for parameter, shown in pairs if shown and parameter not in users})
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups) if fresh else ():
            if id(parameter) in fresh:  # in the order in which torch enters them
                users[parameter] = fresh[id(parameter)]
        if changed:
            handed = iter(self._handed)
            for parameter, local, shown in zip(self._parameters, self._locals, self._shown, strict=True):
                _tell(users.get(parameter, {}), shown, handed, parameter, local)


def _tell(state: State, shown: State, handed: Iterator[Any], parameter: DTensor, stepped: Tensor) -> None:
    """Let the state of a parameter say what a step has left in that of `stepped`, to which the next of `handed` were given."""
    before, known = dict(state), dict(zip(state, handed))  # noqa: B905  # `handed` goes on to the next parameter
    by_id = {id(value): before[key] for key, value in known.items()}
    for key in [key for key in state if key not in shown]:
        del state[key]
    for key, value in shown.items():
        if value is known.get(key, _NOTHING):
            continue
        if id(value) in by_id:  # tensors changed places
            state[key] = by_id[id(value)]
        elif isinstance(value, Tensor) and (value.dim() or isinstance(before.get(key), DTensor)):
            if value.shape != stepped.shape:
                raise OptimizerError(
                    f"step_on_shards: the optimizer keeps '{key}' of shape {tuple(value.shape)} as state of a parameter, which "
                    "is neither one value per element nor one number; so it does not step element by element. Call remove() on "
                    "what step_on_shards returned, and make a new optimizer"
                )
            state[key] = gradient_like(value.view(local_of(parameter).shape), parameter)
        else:
            state[key] = value


def refuse_unreduced(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise if a gradient was accumulated under `no_sync` and not reduced: ranks would step by different gradients."""
    for parameter in parameters:
        gradient, label = parameter.grad, label_of(parameter)
        if label is not None and gradient is not None and (is_unreduced(gradient) or holds_unreduced(parameter)):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step: the gradient of parameter '{label.fqn}' of unit '{label.unit}' is this "
                "rank's alone, since it was accumulated under no_sync and not reduced. Run the last backward before a step "
                "outside of no_sync, or call reduce_gradients(model), on all ranks. No parameter was changed."
            )


# --- the stand-in -----------------------------------------------------------------------------------------------------


class ShardStepping:
    """An optimizer steps its local shards until `remove()` is called. Made by `step_on_shards`, or at a first step.

    Args:
        asked: the user asked for it. Then the optimizer chooses its implementation (`foreach` or a loop) by the local tensors;
            otherwise it keeps the one that it has for DTensors, so that every bit of the result is the same.
    """

    def __init__(self, optimizer: Optimizer, *, asked: bool = True) -> None:
        self.asked = asked
        self._step: _LocalStep | None = None  # of the step that runs
        self._optimizer = weakref.ref(optimizer)  # whose hooks hold this object
        self._before = optimizer.register_step_pre_hook(self._put_stand_in)
        self._after = optimizer.register_step_post_hook(self._finish_step)
        self._loaded = optimizer.register_load_state_dict_post_hook(self._on_load)
        self._check_state = True
        self._keep_next_to_step(optimizer)

    def remove(self) -> None:
        """Let the optimizer step DTensors from now on. Its state stays where it is. May be called again."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._finish(optimizer)
            _left_alone.add(optimizer)
        for hook in (self._before, self._after, self._loaded):
            hook.remove()

    def _put_stand_in(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_stand_in(optimizer):
            return None  # a step that calls the step of its base class
        self._finish(optimizer)  # of a step that an error ended
        # A hook after this one would be handed the stand-in: this step then takes DTensors, and the next one does not.
        is_last = next(reversed(step_hooks(optimizer)[0]), None) == self._before.id
        # Tensors that are made in inference mode have no version counter.
        special = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or _differentiable(optimizer)
        if special or not is_last or not args or args[0] is not optimizer:
            return None
        kind: Any = type(optimizer)
        stand_in = object.__new__(_stand_in_class(kind))
        stand_in.__dict__ = optimizer.__dict__
        stand_in.optimizer, stand_in.state, stand_in.stepping = optimizer, optimizer.state, self
        return (stand_in, *args[1:]), kwargs

    def _open(self, stand_in: Any) -> list[State]:
        """Make the state of the stand-in, and the groups that it shows."""
        optimizer: Optimizer = stand_in.optimizer
        self._finish(optimizer)  # if the code asks twice
        try:
            with torch.no_grad():
                self._step = _LocalStep(optimizer, keep_loop=not self.asked, check_state=self._check_state)
        except _NotLocal:
            stand_in.state = optimizer.state
            return optimizer.param_groups
        self._check_state = False
        stand_in.state = self._step.state
        return self._step.groups

    def _finish_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_stand_in(optimizer):
            return
        if args and is_stand_in(args[0]):
            # Hooks after this one are handed it, too, and see what the user's optimizer has.
            args[0].stepping, args[0].state = None, optimizer.state
        self._finish(optimizer)
        self._keep_next_to_step(optimizer)

    def _finish(self, optimizer: Optimizer) -> None:
        step, self._step = self._step, None
        if step is not None:
            with torch.no_grad():
                step.finish(optimizer)

    def _on_load(self, optimizer: Optimizer) -> None:
        self._check_state = True

    def _keep_next_to_step(self, optimizer: Optimizer) -> None:
        """Last of the hooks before a step, first of those after it."""
        before, after = step_hooks(optimizer)
        if self._before.id in before and self._after.id in after:
            before.move_to_end(self._before.id)
            after.move_to_end(self._after.id, last=False)


def is_stand_in(optimizer: object) -> bool:
    """Whether `optimizer` stands in a step for the one that the user has."""
    return hasattr(type(optimizer), "stepping")


@cache
def _stand_in_class(kind: Any) -> Any:
    """A class with the code of `kind`, but with groups and state of its own."""

    def param_groups(self: Any) -> Any:
        return self.optimizer.param_groups if self.stepping is None else self.stepping._open(self)

    # Slots, because the dictionary of attributes is the optimizer's own; they hide its entries. torch's code reads `state`
    # for every parameter, so that it is no property.
    slots = ("optimizer", "state", "stepping")
    return type(kind.__name__, (kind,), {"__slots__": slots, "param_groups": property(param_groups)})


# --- which optimizers -------------------------------------------------------------------------------------------------

_left_alone: Final[WeakSet[Optimizer]] = WeakSet()  # `remove()` was called


def step_on_shards(optimizer: Optimizer, *, elementwise: bool = False) -> ShardStepping:
    """Let an optimizer step the local shards of its parameters, with the same results.

    A step on DTensors costs the host some 20 us for every operation on every parameter. An element-wise optimizer does not need
    to know that its tensors are shards: its own code, unchanged, is handed plain local tensors. `param_groups`, `state`, state
    dicts, schedulers, hooks, closures and gradient scalers see what they saw before: the parameters and their state, as
    DTensors. Parameters that are not DTensors are stepped as they are.

    The optimizers listed below do so from their first step of sharded parameters; `step_on_shards(optimizer).remove()`, at any
    time, makes one step DTensors as torch does. Call it for an optimizer that is not listed, after `remove`, or on an
    accelerator for torch's default of `foreach`, which torch does not choose over DTensors. Copies of an optimizer have to be
    told again. For speed, make the optimizer with `fused=True`.

    Args:
        optimizer: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, ASGD, RMSprop or Rprop of `torch.optim`, in any
            implementation (`foreach`, `fused`, `capturable`), or a subclass that leaves `step` alone.
        elementwise: you vouch for an optimizer that is not on this list: it evaluates the closure first, then reads
            `param_groups`, and updates each element from that element of the parameter, of its gradient and of its state
            alone, and from numbers.

    Returns:
        What undoes it: `.remove()`. Calling `step_on_shards` twice on one optimizer returns the same.

    Raises:
        OptimizerError: the optimizer does not step element by element, or is not known, or is `differentiable`.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> step_on_shards(optimizer)
    """
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"step_on_shards: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_elementwise(optimizer, elementwise)
    if _differentiable(optimizer):
        raise OptimizerError(
            f"step_on_shards: this {type(optimizer).__name__} is differentiable: its steps become part of a graph that local "
            "tensors would be missing from; leave step_on_shards out, or differentiable=True"
        )
    stepping = _stepping_of(optimizer)
    if stepping is None:
        _left_alone.discard(optimizer)
        return ShardStepping(optimizer)
    stepping.asked = True
    return stepping


def step_on_shards_unasked(optimizer: Optimizer) -> bool:
    """Do so for an optimizer that holds shards and is about to step, if the result is known to be the same.

    Returns:
        Whether it steps its shards.
    """
    if _stepping_of(optimizer) is not None:
        return True
    if optimizer in _left_alone or _known_base(type(optimizer)) is None or _differentiable(optimizer):
        return False
    ShardStepping(optimizer, asked=False)
    return True


def _stepping_of(optimizer: Optimizer) -> ShardStepping | None:
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer)[0].values())
    return next((owner for owner in owners if isinstance(owner, ShardStepping)), None)


def _differentiable(optimizer: Optimizer) -> bool:
    return any(group.get("differentiable", False) for group in (optimizer.defaults, *optimizer.param_groups))


def _known_base(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The optimizer on the list whose code `kind` steps with."""

    def code(each: type[Optimizer]) -> tuple[object, object]:
        return inspect.unwrap(each.step), getattr(each, "_init_group", None)

    base = next((each for each in reversed(ELEMENTWISE) if issubclass(kind, each)), None)
    return base if base is not None and code(kind) == code(base) else None


def _check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    name = type(optimizer).__name__
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _WHOLE and kind.__module__.startswith("torch.optim"):
            raise OptimizerError(
                f"step_on_shards: {name} does not step element by element: {_WHOLE[kind.__name__]}; leave step_on_shards out. "
                "Parameters that another optimizer could step can be given to one of their own."
            )
    if vouched or _known_base(type(optimizer)) is not None:
        return
    base = next((kind for kind in reversed(ELEMENTWISE) if isinstance(optimizer, kind)), None)
    what = f"{name} is not known here" if base is None else f"{name} changes how {base.__name__} steps"
    raise OptimizerError(
        f"step_on_shards: {what}. If it updates each element from that element of the parameter, its gradient and its state "
        "alone, say so: step_on_shards(optimizer, elementwise=True); otherwise leave it out."
    )
