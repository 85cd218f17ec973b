"""An object that stands in for an optimizer in a step, with parameters and state of its own.

A hook before `step` may change the arguments of the call, the first of which is the optimizer
itself. The hook here puts a stand-in in its place: an object that shares the optimizer's attributes
and code, but whose `param_groups` and `state` hold other tensors. Users, hooks, closures,
schedulers and checkpoints see the optimizer with its DTensors. The stand-in makes its groups when
the code asks for them: after all hooks, and after the closure.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable.contract.values import parameters_of
from composable.engine.params.param import copy_attributes
from composable.errors import OptimizerError
from composable.optim.shared import refuse_unreduced
from composable.torch_private import step_hooks

State = dict[str, Any]


class StandIn(Protocol):
    """What stands in for `optimizer`, see `_stand_in_class`; `stepping` says what it holds."""

    optimizer: Optimizer
    state: Any
    stepping: Any


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
        self._keep_next_to_step(optimizer)
        # Python's `copy` and pickle look for methods on an object first
        vars(optimizer).update(__deepcopy__=self._copy, __reduce_ex__=self._reduce)
        STEPPINGS[optimizer] = self

    def _detach(self, optimizer: Optimizer) -> None:
        """The inverse of the constructor."""
        for handle in self._handles:
            handle.remove()
        for name in ("__deepcopy__", "__reduce_ex__"):
            vars(optimizer).pop(name, None)

    # --- what every kind of them needs -----------------------------------------------------------

    @staticmethod
    def of(optimizer: Optimizer) -> Stepping | None:
        """What hands the code of `optimizer` other tensors, if anything does."""
        return STEPPINGS.get(optimizer)

    @staticmethod
    def stand_in_of(optimizer: Optimizer, stepping: Any, state: Any) -> Any:
        """An object with the attributes of `optimizer`, whose groups `stepping._groups_for` makes.

        Args:
            state: what its code sees until it asks for its groups.
        """
        kind: Any = type(optimizer)
        made: Any = object.__new__(_stand_in_class(kind))
        made.__dict__ = optimizer.__dict__
        made.optimizer, made.state, made.stepping = optimizer, state, stepping
        return made

    @staticmethod
    def is_stand_in(optimizer: object) -> bool:
        """Whether `optimizer` stands in a step for the one that the user has."""
        return hasattr(type(optimizer), "stepping")

    @staticmethod
    def is_differentiable(optimizer: Optimizer) -> bool:
        """Whether steps become part of a graph, which other tensors would be missing from."""
        return any(
            group.get("differentiable", False)
            for group in (optimizer.defaults, *optimizer.param_groups)
        )

    @staticmethod
    def copy_attributes(parameter: Any, copy: Any) -> None:
        """Give a parameter that code is handed what users have set on `parameter`."""
        copy_attributes(parameter, copy)

    def _refuse_unreduced(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        refuse_unreduced(f"{type(optimizer).__name__}.step", parameters, OptimizerError)

    @abstractmethod
    def _takes(self, optimizer: Optimizer) -> bool:
        """Whether the step that begins is given other tensors."""

    @abstractmethod
    def _groups_for(self, stand_in: StandIn) -> tuple[list[State], Any]:
        """The groups that its code is given, which asks now, and the state."""

    @abstractmethod
    def _finish(self, optimizer: Optimizer) -> None:
        """The step has ended. Called once more before the next one, for one that an error ended."""

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

    def _reduce(self, protocol: int) -> Any:
        """What is pickled is stepped as torch does where it is loaded."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return type(optimizer).__reduce_ex__(optimizer, protocol)

    # --- steps -----------------------------------------------------------------------------------

    def _put_stand_in(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.is_stand_in(optimizer):
            return None  # a step that calls the step of its base class
        self._give_up(optimizer)
        if not args or args[0] is not optimizer or not self._takes(optimizer):
            return None
        return self._arguments_for(
            (self.stand_in_of(optimizer, self, optimizer.state), *args[1:]), kwargs
        )

    def _arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What its code is called with: a stand-in, and what the user has passed."""
        return args, kwargs

    def _give_up(self, optimizer: Optimizer) -> None:
        """End a step that an error has ended, if there is one."""
        self._finish(optimizer)

    @property
    def _is_last(self) -> bool:
        """Whether no hook before a step comes after this object's."""
        optimizer = self._optimizer()
        return (
            optimizer is None or next(reversed(step_hooks(optimizer)[0]), None) == self._before.id
        )

    def _finish_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.is_stand_in(optimizer):
            return
        self._finish(optimizer)
        if args and self.is_stand_in(args[0]):
            # Hooks after this one are handed it, too, and see what the user's optimizer has.
            args[0].stepping, args[0].state = None, optimizer.state
        self._keep_next_to_step(optimizer)

    def _keep_next_to_step(self, optimizer: Optimizer) -> None:
        """Last of the hooks before a step, first of those after it."""
        before, after = step_hooks(optimizer)
        if self._before.id in before and self._after.id in after:
            before.move_to_end(self._before.id)
            after.move_to_end(self._after.id, last=False)


# What steps an optimizer; None if its user wants it to step as torch does.
STEPPINGS: Final[WeakKeyDictionary[Optimizer, Stepping | None]] = WeakKeyDictionary()


@cache
def _stand_in_class(kind: Any) -> Any:
    """A class with the code of `kind`, but with groups and state of its own."""

    def param_groups(self: Any) -> Any:
        if self.stepping is None:
            return self.optimizer.param_groups
        groups, self.state = self.stepping._groups_for(self)
        return groups

    # Slots, because the dictionary of attributes is the optimizer's own; they hide its entries.
    # torch's code reads `state` for every parameter, so that it is no property.
    slots = ("optimizer", "state", "stepping")
    return type(
        kind.__name__, (kind,), {"__slots__": slots, "param_groups": property(param_groups)}
    )
