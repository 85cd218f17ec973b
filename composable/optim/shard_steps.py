"""`step_on_shards`: element-wise optimizers step the local shards of DTensors.

The results are the same as over DTensors, in less host time. A stand-in (`stand_in.py`) gives
torch's code local tensors, while users see the optimizer with its DTensors.

Nothing is kept from one step to the next, so memory that users take away from parameters or state
is free at once.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain, compress, islice
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from composable.checked import checked
from composable.engine.params.param import gradient_of
from composable.errors import OptimizerError
from composable.optim.shared import refuse_unreduced
from composable.optim.stand_in import STEPPINGS, StandIn, State, Stepping
from composable.tensors.dtensors import gradient_like
from composable.torch_private import (
    as_tensors,
    local_of,
    locals_of,
    placed_alike,
    tree_flatten,
    tree_unflatten,
)

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
        """Take gradients to local tensors, unless they cannot be stepped so: then None."""
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

    def _drop_gradients(self) -> None:
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            if local is not parameter:
                local.grad = None

    def hand_to(self, stand_in: StandIn, state: Any) -> Any:
        """What the code sees from now on in place of `state`; itself, if the code has set it."""
        self._stand_in = stand_in
        return self.state if state is self._users_state else state

    def left(self) -> Any:
        """The state that the code has left, which may be another object."""
        return self._stand_in.state

    def finish(self, optimizer: Optimizer) -> None:
        """Give gradients up, and let the optimizer's groups and state say what the step has left.

        The step has left it in the groups and the state that it saw.
        """
        self._drop_gradients()
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


# --- the stand-in -------------------------------------------------------------------------------


class ShardStepping(Stepping):
    """An optimizer steps its local shards until `remove()` is called.

    Made by `step_on_shards`, or at a first step. Where a group does not say how it steps, torch
    chooses `foreach` or a loop by the device, for local tensors as for DTensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._step: LocalStep | None = None  # of the step that runs
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._on_load))
        self._check_state = True

    def remove(self) -> None:
        """Let the optimizer step DTensors from now on.

        Its state stays where it is. May be called again.
        """
        if (optimizer := self._optimizer()) is not None:
            self._finish(optimizer)
            STEPPINGS[optimizer] = None
            self._detach(optimizer)

    @override
    def _follow_to(self, copied: Optimizer, memo: dict[int, Any]) -> None:
        ShardStepping(copied)

    @override
    def _takes(self, optimizer: Optimizer) -> bool:
        # A hook after this one would be handed the stand-in: this step then takes DTensors, and the
        # next one does not. Tensors that are made in inference mode have no version counter.
        return self._is_last and not (
            torch.compiler.is_compiling()
            or torch.is_inference_mode_enabled()
            or Stepping.is_differentiable(optimizer)
        )

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
    def _finish(self, optimizer: Optimizer) -> None:
        step, self._step = self._step, None
        if step is not None:
            with torch.no_grad():
                step.finish(optimizer)

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
            stepping.remove()
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
