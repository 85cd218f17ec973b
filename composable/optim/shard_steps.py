"""`step_on_shards`: element-wise optimizers step the local shards of DTensors.

The results are the same as over DTensors, in less host time. A hook before `step` may change the
arguments of the call, the first of which is the optimizer itself. The hook here puts a stand-in in
its place: an object with the class, the code and the attributes of the optimizer, but whose
`param_groups` and `state` hold local tensors. Users, hooks, closures, schedulers and checkpoints
see the optimizer with its DTensors. The stand-in makes its groups when the code asks for them:
after all hooks, and after the closure.

Nothing is kept from one step to the next, so memory that users take away from parameters or state
is free at once.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain, compress, islice
from operator import is_
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from composable.checked import checked
from composable.contract.values import parameters_of
from composable.engine.params.param import copy_attributes, gradient_of
from composable.errors import OptimizerError
from composable.optim.refusals import refuse_unreduced
from composable.tensors import gradient_like
from composable.torch_private import (
    as_tensors,
    local_of,
    locals_of,
    placed_alike,
    step_hooks,
    tree_flatten,
    tree_unflatten,
)

State = dict[str, Any]

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
# names, since older versions of torch lack some
_WHOLE: Final = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_NOTHING: Final = object()
CONTAINERS: Final = (list, tuple, dict)  # of state
# What steps an optimizer; None if its user wants it to step as torch does.
STEPPINGS: Final[WeakKeyDictionary[Optimizer, Stepping | None]] = WeakKeyDictionary()

# --- the stand-in -------------------------------------------------------------------------------


class StandIn:
    """Has the class and the attributes of an optimizer in a step, but other groups and state.

    Attributes:
        optimizer: the user's.
        state: what the code of the optimizer sees.
        stepping: makes the groups that it sees; None after the step.
    """

    __slots__ = ()  # those of the attributes are in each class that is made of this one
    optimizer: Optimizer
    state: Any
    stepping: Any

    @classmethod
    def of(cls, optimizer: Optimizer, stepping: Any, state: Any) -> Any:
        """Make one whose state is `state` until `stepping._groups_for` makes its groups."""
        kind: Any = type(optimizer)
        made: Any = object.__new__(_stand_in_class(kind))
        made.__dict__ = optimizer.__dict__
        made.optimizer, made.state, made.stepping = optimizer, state, stepping
        return made

    @property
    def param_groups(self) -> Any:
        """What the code of the optimizer steps."""
        if self.stepping is None:
            return self.optimizer.param_groups
        groups, self.state = self.stepping._groups_for(self)
        return groups


@cache
def _stand_in_class(kind: Any) -> Any:
    # Slots, because the dictionary of attributes is the optimizer's own; they hide its entries.
    # torch's code reads `state` for every parameter, so that it is no property. Python refuses two
    # bases with slots, and `kind` may have some.
    slots = ("optimizer", "state", "stepping")
    return type(kind.__name__, (StandIn, kind), {"__slots__": slots})


class Stepping(ABC):
    """Hands the code of an optimizer other tensors than users see.

    Attributes:
        keeps_whole_state: its state is that of whole matrices, on the ranks that own them.
    """

    keeps_whole_state = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # whose hooks hold this object
        self._before = optimizer.register_step_pre_hook(self._put_stand_in)
        self._after = optimizer.register_step_post_hook(self._finish_step)
        self._handles = [self._before, self._after]
        self.keep_next_to_step(optimizer)
        vars(optimizer)["__deepcopy__"] = self._copy  # Python looks for it on an object first
        STEPPINGS[optimizer] = self

    # --- what every kind of them needs -----------------------------------------------------------

    @staticmethod
    def of(optimizer: Optimizer) -> Stepping | None:
        """What hands the code of `optimizer` other tensors, if anything does."""
        return STEPPINGS.get(optimizer)

    @staticmethod
    def is_differentiable(optimizer: Optimizer) -> bool:
        """Whether steps become part of a graph, which other tensors would be missing from."""
        return any(
            group.get("differentiable", False)
            for group in (optimizer.defaults, *optimizer.param_groups)
        )

    @staticmethod
    def copy_attributes(parameter: Any, copy: Any) -> None:
        """Copy what users have set on `parameter` to one that the optimizer's code gets instead."""
        copy_attributes(parameter, copy)

    def _refuse_unreduced(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        refuse_unreduced(f"{type(optimizer).__name__}.step", parameters, OptimizerError)

    @abstractmethod
    def _takes(self, optimizer: Optimizer) -> bool:
        """Whether the step that begins gets other tensors."""

    @abstractmethod
    def _groups_for(self, stand_in: StandIn) -> tuple[list[State], Any]:
        """Make the groups and the state for the optimizer's code, when it asks for its groups."""

    @abstractmethod
    def _finish(self, optimizer: Optimizer) -> None:
        """End the step. Called once more before the next one, since an error may have ended it."""

    # --- copies ----------------------------------------------------------------------------------

    @abstractmethod
    def _follow_to(self, copied: Optimizer, memo: dict[int, Any]) -> None:
        """Step a copy of the optimizer, too; its state is that of `_state_to_copy`."""

    def _state_to_copy(self, optimizer: Optimizer) -> Any:
        """What Python copies of the state."""
        return optimizer.state

    def __deepcopy__(self, memo: dict[int, Any]) -> Stepping:
        return self  # in the hooks of an optimizer that copies all of its attributes

    def _copy(self, memo: dict[int, Any]) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        for parameter in parameters_of(optimizer):
            if isinstance(parameter, DTensor):
                # torch's copy of a DTensor has a copy of its mesh, without process groups
                memo[id(parameter.device_mesh)] = parameter.device_mesh
        memo[id(optimizer)] = copied = object.__new__(type(optimizer))
        kept = {**optimizer.__getstate__(), "state": self._state_to_copy(optimizer)}
        copied.__setstate__(copy.deepcopy(kept, memo))
        for hooks in vars(copied).values():
            for handle in self._handles if isinstance(hooks, OrderedDict) else ():
                hooks.pop(handle.id, None)
        self._follow_to(copied, memo)
        return copied

    # --- steps -----------------------------------------------------------------------------------

    def _put_stand_in(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(optimizer, StandIn):
            return None  # a step that calls the step of its base class
        self._give_up(optimizer)
        if args[0] is not optimizer or not self._takes(optimizer):
            return None
        return self._arguments_for(
            (StandIn.of(optimizer, self, optimizer.state), *args[1:]), kwargs
        )

    def _arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the optimizer's code: a stand-in, and what the user has passed."""
        return args, kwargs

    def _give_up(self, optimizer: Optimizer) -> None:
        """End a step that an error has ended, if there is one."""
        self._finish(optimizer)

    def _finish_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if isinstance(optimizer, StandIn):
            return
        self._finish(optimizer)
        if isinstance(args[0], StandIn):
            # Hooks after this one get it, too, and see what the user's optimizer has.
            args[0].stepping, args[0].state = None, optimizer.state

    def keep_next_to_step(self, optimizer: Optimizer) -> None:
        """Run last of the hooks before the next step, and first of those after it."""
        before, after = step_hooks(optimizer)
        if self._before.id in before and self._after.id in after:
            before.move_to_end(self._before.id)
            after.move_to_end(self._after.id, last=False)


# --- one step ------------------------------------------------------------------------------------


class _NotLocal(Exception):
    """There is a parameter that has no equal local step."""


class LocalStep:
    """The groups and the state that an optimizer's code sees in one step.

    They have local tensors in place of DTensors. Parameters without a gradient are left out, as
    torch's code does. Lists and maps instead of one loop, since this runs for every parameter in
    every step.

    Args:
        groups: of the optimizer, with the parameters that are stepped so.
        check_state: state may have come from elsewhere since the last step.

    Raises:
        _NotLocal: nothing was changed.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[State], *, check_state: bool) -> None:
        kind: Any = type(optimizer)
        with as_tensors():
            found = [list(map(gradient_of, group["params"])) for group in groups]
        has = [[gradient is not None for gradient in each] for each in found]
        stepped = [
            list(compress(group["params"], each)) for group, each in zip(groups, has, strict=True)
        ]
        self._parameters: list[Tensor] = list(chain.from_iterable(stepped))
        gradients: list[Any] = list(chain.from_iterable(map(compress, found, has)))
        if not placed_alike(gradients, self._parameters):
            refuse_unreduced(f"{kind.__name__}.step", self._parameters, OptimizerError)
            raise _NotLocal
        self._locals, parts = locals_of(self._parameters), locals_of(gradients)
        if set(map(type, chain(self._locals, parts))) - {Tensor, nn.Parameter}:
            raise _NotLocal
        self._users_state: Any = optimizer.state
        states = list(map(self._users_state.get, self._parameters))
        if check_state:
            self._check_state()
        if not all(states):
            # Without dimensions, new state per element would look like state per parameter.
            for index, (parameter, state) in enumerate(zip(self._parameters, states, strict=True)):
                if not state and not parameter.dim() and isinstance(parameter, DTensor):
                    for tensors in (self._locals, parts):
                        tensors[index] = tensors[index].view(1)
        self._shown: list[State] = [dict(state or ()) for state in states]
        for shown in self._shown:
            for key, value in shown.items():
                if type(value) is DTensor:
                    shown[key] = local_of(value)
                elif isinstance(value, CONTAINERS):
                    leaves, tree = tree_flatten(value)
                    shown[key] = tree_unflatten(locals_of(leaves), tree)
        # torch's optimizers write to state in place once it is there, but SGD may have kept None;
        # others may exchange tensors.
        in_place = all(states) and self.knows(kind) and not issubclass(kind, optim.SGD)
        self._handed = None if in_place else self._values()
        self.state: Any = defaultdict(dict, zip(self._locals, self._shown, strict=True))
        if not in_place:
            self.state |= of_no_tensor(self._users_state)
        self._stand_in: Any = self
        try:
            for local, part in zip(self._locals, parts, strict=True):
                local.grad = part
        except RuntimeError:  # it has another dtype or shape
            self._drop_gradients()
            raise _NotLocal from None
        locals_ = iter(self._locals)
        self.groups: list[State] = []
        for group, parameters in zip(groups, stepped, strict=True):
            self.groups.append({**group, "params": list(islice(locals_, len(parameters)))})
        self._before = list(map(dict, self.groups))

    @classmethod
    def begin(
        cls, optimizer: Optimizer, groups: Sequence[State], *, check_state: bool
    ) -> LocalStep | None:
        """Give the local tensors their gradients; None if they have no equal local step."""
        try:
            return cls(optimizer, groups, check_state=check_state)
        except _NotLocal:
            return None

    @staticmethod
    @cache
    def knows(kind: Any) -> bool:
        """Whether `kind` steps with the code of an optimizer on the list."""

        def code(each: type[Optimizer]) -> tuple[object, object]:
            return inspect.unwrap(each.step), getattr(each, "_init_group", None)

        base = next((each for each in reversed(ELEMENTWISE) if issubclass(kind, each)), None)
        return base is not None and code(kind) == code(base)

    def _check_state(self) -> None:
        """Raise `_NotLocal` for state of another shape or placement than its parameter.

        A fused kernel does not compare sizes: it would take the wrong elements.
        """
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            values = [
                v
                for v in self._users_state.get(parameter, {}).values()
                if isinstance(v, Tensor) and v.dim()
            ]
            alike = placed_alike(values, [parameter] * len(values))
            if not alike or any(each.shape != local.shape for each in locals_of(values)):
                raise _NotLocal

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._shown)))

    def _drop_gradients(self, *, clears: bool = False) -> None:
        """Take the gradients off local tensors.

        Args:
            clears: a parameter whose local gradient the step has cleared loses its own, too.
        """
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            if local is not parameter:
                if clears and local.grad is None:
                    parameter.grad = None
                local.grad = None

    def hand_to(self, stand_in: StandIn, state: Any) -> Any:
        """What the code sees from now on in place of `state`; itself, if the code has set it."""
        self._stand_in = stand_in
        return self.state if state is self._users_state else state

    def left(self) -> Any:
        """The state that the code has left, which may be another object."""
        return self._stand_in.state

    def finish(self, optimizer: Optimizer, *, raised: bool = False) -> None:
        """Give gradients up, and let the optimizer's groups and state say what the step has left.

        The step has left it in the groups and the state that it saw. If it has `raised`, the
        gradients of parameters may be newer.
        """
        self._drop_gradients(clears=not raised)
        if optimizer.state is not self._users_state:
            return  # an error ended the step, and other state was loaded since
        groups = zip(optimizer.param_groups, self.groups, self._before, strict=False)
        for group, shown, before in groups:
            for key, value in shown.items():
                if value is not before.get(key, _NOTHING):
                    group[key] = value
        if self._handed is None:
            return
        left = self.left()
        self._users_state |= of_no_tensor(left)
        # the code may have put other dictionaries in their place
        self._shown = [left.get(local) or {} for local in self._locals]
        values = self._values()
        same = len(values) == len(self._handed) and all(map(is_, values, self._handed))
        if same and not any(isinstance(each, CONTAINERS) for each in values):
            return  # containers are passed again: what is in them may have changed
        for parameter, local, shown in zip(
            self._parameters, self._locals, self._shown, strict=True
        ):
            if shown or parameter in self._users_state:
                _tell(self._users_state.setdefault(parameter, {}), shown, parameter, local)


def of_no_tensor(state: Any) -> Any:
    """What an optimizer keeps by keys that are no parameters."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _tell(state: State, shown: State, parameter: Tensor, stepped: Tensor) -> None:
    """Let the state of a parameter say what a step has left in that of `stepped`."""
    before = dict(zip(state, locals_of(state.values()), strict=True))
    for key in [key for key in state if key not in shown]:
        del state[key]
    for key, value in shown.items():
        if value is before.get(key, _NOTHING):
            continue
        if isinstance(value, CONTAINERS):
            leaves, tree = tree_flatten(value)
            placed = [_placed(each, None, key, parameter, stepped) for each in leaves]
            state[key] = tree_unflatten(placed, tree)
        else:
            state[key] = _placed(value, state.get(key), key, parameter, stepped)


def _placed(value: Any, former: Any, key: str, parameter: Tensor, stepped: Tensor) -> Any:
    """State of a local tensor as that of its parameter."""
    per_element = isinstance(value, Tensor) and (value.dim() or isinstance(former, DTensor))
    if not per_element or not isinstance(parameter, DTensor):
        return value
    if value.shape == stepped.shape:
        return gradient_like(value.view(local_of(parameter).shape), parameter)
    raise OptimizerError(
        f"step_on_shards: the optimizer keeps '{key}' of shape {tuple(value.shape)} as state of a"
        " parameter, which is neither one value per element nor one number; so it does not step"
        " element by element. Call step_on_shards(optimizer, enabled=False), and make a new"
        " optimizer"
    )


# --- on shards -----------------------------------------------------------------------------------


class ShardStepping(Stepping):
    """An optimizer steps its local shards.

    Made by `step_on_shards`, or at a first step. Where a group does not say how it steps, torch
    chooses `foreach` or a loop by the device, for local tensors as for DTensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._step: LocalStep | None = None  # of the step that runs
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._on_load))
        self._check_state = True

    def remove(self, optimizer: Optimizer) -> None:
        """Let the optimizer step DTensors from now on. Its state stays where it is."""
        self._finish(optimizer)
        for handle in self._handles:
            handle.remove()
        del vars(optimizer)["__deepcopy__"]

    @override
    def _follow_to(self, copied: Optimizer, memo: dict[int, Any]) -> None:
        ShardStepping(copied)

    @override
    def _takes(self, optimizer: Optimizer) -> bool:
        # A hook after this object's, which another hook has just registered, would get the
        # stand-in. Tensors that are made in inference mode have no version counter.
        declines = (
            next(reversed(step_hooks(optimizer)[0])) != self._before.id
            or torch.is_inference_mode_enabled()
            or Stepping.is_differentiable(optimizer)
        )
        if declines:  # a step on shards looks at its gradients
            self._refuse_unreduced(optimizer, parameters_of(optimizer))
        return not (declines or torch.compiler.is_compiling())

    @override
    def _groups_for(self, stand_in: StandIn) -> tuple[list[State], Any]:
        optimizer, state = stand_in.optimizer, stand_in.state
        if self._step is not None:  # the code asks twice
            self._finish(optimizer)
            state = optimizer.state
        with torch.no_grad():
            self._step = LocalStep.begin(
                optimizer, optimizer.param_groups, check_state=self._check_state
            )
        if self._step is None:
            return optimizer.param_groups, state
        self._check_state = False
        return self._step.groups, self._step.hand_to(stand_in, state)

    @override
    def _give_up(self, optimizer: Optimizer) -> None:
        self._finish(optimizer, raised=True)

    @override
    def _finish(self, optimizer: Optimizer, *, raised: bool = False) -> None:
        step, self._step = self._step, None
        if step is not None:
            with torch.no_grad():
                step.finish(optimizer, raised=raised)

    def _on_load(self, optimizer: Optimizer) -> None:
        self._check_state = True


# --- which optimizers ---------------------------------------------------------------------------


@checked
def step_on_shards(
    optimizer: Optimizer, *, enabled: bool = True, elementwise: bool = False
) -> None:
    """Let an optimizer step the local shards of its parameters, with the same results.

    A step on DTensors costs the host some 20 us for every operation on every parameter. This
    function passes plain local tensors to the unchanged code of an element-wise optimizer. Your
    code, hooks, closures, schedulers, state dicts and gradient scalers still see the parameters and
    their state as DTensors. Parameters that are not DTensors are stepped as they are.

    The optimizers listed below do so from their first step of sharded parameters. After
    `step_on_shards(optimizer, enabled=False)`, which you can call at any time, the optimizer steps
    DTensors as torch does, and keeps its state. Call `step_on_shards` for an optimizer that is not
    listed, or to step local shards again. A copy of an optimizer steps like the original.

    Args:
        optimizer: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, ASGD, RMSprop or Rprop
            of `torch.optim`, in any implementation (`foreach`, `fused`, `capturable`), or a
            subclass that leaves `step` alone.
        enabled: False lets the optimizer step DTensors from now on.
        elementwise: you confirm that an optimizer that is not on this list steps element by
            element. It evaluates the closure first, and then reads `param_groups`. It updates each
            element only from that element of the parameter, of its gradient and of its state, and
            from numbers.

    Raises:
        OptimizerError: the optimizer does not step element by element, is not known, or is
            `differentiable`.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> step_on_shards(optimizer)
    """
    kind: Any = type(optimizer)
    name = kind.__name__
    stepping = STEPPINGS.get(optimizer)
    if stepping is not None and not isinstance(stepping, ShardStepping):
        raise OptimizerError(
            f"step_on_shards: this {name} steps whole matrices (step_on_matrices), and what is no"
            " matrix on its shards. Leave step_on_shards out"
        )
    if not enabled:
        if stepping is not None:
            stepping.remove(optimizer)
        STEPPINGS[optimizer] = None
        return
    for base in kind.__mro__:
        if base.__name__ in _WHOLE and base.__module__.startswith("torch.optim"):
            raise OptimizerError(
                f"step_on_shards: {name} does not step element by element. Leave step_on_shards"
                " out, or give parameters that another optimizer could step to one of their own"
            )
    if not elementwise and not LocalStep.knows(kind):
        raise OptimizerError(
            f"step_on_shards: {name} is not known here, or changes how its base class steps. If it"
            " updates each element from that element of the parameter, its gradient and its state"
            " alone, say so: step_on_shards(optimizer, elementwise=True); otherwise leave it out"
        )
    if Stepping.is_differentiable(optimizer):
        raise OptimizerError(
            f"step_on_shards: this {name} is differentiable: its steps become part of a graph that"
            " local tensors would be missing from. Leave step_on_shards out, or"
            " differentiable=True"
        )
    if stepping is None:
        ShardStepping(optimizer)


def step_on_shards_unasked(optimizer: Optimizer) -> bool:
    """Do so for an optimizer that is about to step, if the result is known to be the same.

    Returns:
        Whether it steps its shards.
    """
    kind: Any = type(optimizer)
    decided = optimizer in STEPPINGS
    if not decided and LocalStep.knows(kind) and not Stepping.is_differentiable(optimizer):
        ShardStepping(optimizer)
    return STEPPINGS.get(optimizer) is not None
