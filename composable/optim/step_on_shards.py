"""Which optimizers step on shards, asked or not, and how their code comes to see local tensors; knows no arithmetic.

Note [The stand-in]
A hook before `step` may change the arguments of the call, the first of which is the optimizer itself. Ours puts a stand-in in
its place: an object that shares the optimizer's attributes and code, but shows groups and state of its own. So torch's code
steps local tensors, while the optimizer that hooks, closures and schedulers know is never touched, whatever happens in between.
The stand-in's groups are made when the code asks for them: after all hooks, and after the closure.

Note [Not asked]
An optimizer of the list below does so from its first step of sharded parameters, since every bit of the result is the same.
It keeps the implementation, too, that torch would have chosen: over DTensors that is the loop, unless `foreach` or `fused` was
said. One that was asked chooses anew, over what it is handed.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from composable.device.private import step_code, step_hooks
from composable.errors import OptimizerError
from composable.optim.stepping import Plan
from composable.runtime.optimizer_hooks import at_first_step

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


_left_alone: Final[WeakSet[Optimizer]] = WeakSet()


class ShardStepping:
    """An optimizer steps on its local shards until `remove()` is called. Made by `step_on_shards`, or by a first step.

    Args:
        optimizer: the one that does.
        asked: whether somebody asked for it.
    """

    def __init__(self, optimizer: Optimizer, *, asked: bool = True) -> None:
        self._asked = asked
        # Not a reference: state would live until the garbage collector found the cycle.
        self._optimizer = weakref.ref(optimizer)
        self._plan: Plan | None = None
        self._is_open = False
        self._before = optimizer.register_step_pre_hook(self._stand_in)
        self._after = optimizer.register_step_post_hook(self._finish)
        self._others: tuple[RemovableHandle, ...] = (
            optimizer.register_state_dict_pre_hook(self._close),
            optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: self._close(optimizer)),
        )
        self._keep_next_to_step(optimizer)

    def remove(self) -> None:
        """The optimizer steps its parameters as they are from now on; its state stays where it is. May be called again."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._close(optimizer)
            _left_alone.add(optimizer)
        for hook in (self._before, self._after, *self._others):
            hook.remove()
        self._plan = None

    def ask(self) -> None:
        """It was asked for, if it was not before; see Note [Not asked]."""
        if not self._asked:
            self._asked = True
            self._plan = None

    # --- around a step ----------------------------------------------------------------------------------------------

    def _stand_in(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if optimizer is not self._optimizer():
            return None  # the stand-in itself: a step that calls the step of its base class
        self._close(optimizer)
        # A hook after this one would be handed the stand-in: this step goes the usual way, the next one will not.
        followed = next(reversed(step_hooks(optimizer)[0]), self._before.id) != self._before.id
        mine = bool(args) and args[0] is optimizer
        # Tensors made in inference mode do not count what is written to them, and a plan has to know.
        unfit = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or _differentiable(optimizer)
        if followed or not mine or unfit:
            return None
        kind: Any = type(optimizer)
        stand_in = object.__new__(_stand_in_class(kind))
        stand_in.__dict__ = optimizer.__dict__
        stand_in.stepping, stand_in.optimizer = self, optimizer
        return (stand_in, *args[1:]), kwargs

    def _finish(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer is not self._optimizer():
            return
        if args and args[0] is not optimizer:
            args[0].stepping = None  # hooks after this one are handed it, too
        self._close(optimizer)
        self._keep_next_to_step(optimizer)

    def _keep_next_to_step(self, optimizer: Optimizer) -> None:
        """Last of the hooks before a step, first of those after it."""
        before, after = step_hooks(optimizer)
        if self._before.id in before and self._after.id in after:
            before.move_to_end(self._before.id)
            after.move_to_end(self._after.id, last=False)

    def _close(self, optimizer: Optimizer) -> None:
        """Let the user's state say what the last step left behind, also one that an error ended."""
        if self._is_open and self._plan is not None:
            self._is_open = False
            with torch.no_grad():
                self._plan.close(optimizer)

    # --- what the stand-in shows ------------------------------------------------------------------------------------

    def groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The groups to step now."""
        self._close(optimizer)
        with torch.no_grad():
            if self._plan is None or not self._plan.holds(optimizer):
                self._plan = None
                self._plan = Plan(optimizer, chooses=self._asked)
            self._is_open = True
            return self._plan.open(optimizer)

    def state(self, optimizer: Optimizer) -> Any:
        """The state that goes with `groups`; the user's outside of a step."""
        return self._plan.state if self._is_open and self._plan is not None else optimizer.state


@cache
def _stand_in_class(kind: Any) -> Any:
    """A class with the code of `kind`, which looks up groups and state elsewhere."""

    def param_groups(self: Any) -> Any:
        return self.optimizer.param_groups if self.stepping is None else self.stepping.groups(self.optimizer)

    def state(self: Any) -> Any:
        return self.optimizer.state if self.stepping is None else self.stepping.state(self.optimizer)

    # Slots, because the dictionary of attributes is the optimizer's own.
    names = {"__slots__": ("optimizer", "stepping"), "param_groups": property(param_groups), "state": property(state)}
    return type(kind.__name__, (kind,), names)


def _differentiable(optimizer: Optimizer) -> bool:
    return any(group.get("differentiable", False) for group in (optimizer.defaults, *optimizer.param_groups))


# --- the verb ---------------------------------------------------------------------------------------------------------


def step_on_shards(optimizer: Optimizer, *, elementwise: bool = False) -> ShardStepping:
    """Let an optimizer step the local shards of its parameters, many at once, with the very same results; or refuse it.

    A step on DTensors pays the host for every operation on every parameter. An element-wise optimizer does not need to
    know that its tensors are shards: from here on its own code, unchanged, is handed plain local tensors, and where
    neighbouring shards of a unit agree in everything, one tensor for all of them. Every bit of the result is what it would
    have been. `param_groups`, `state`, state dicts, schedulers, hooks, closures and gradient scalers see what they saw before:
    the parameters and their state, as DTensors, under their own keys. Parameters that are not sharded are stepped as they are.

    The optimizers listed below need not be asked: they do so from their first step of sharded parameters.
    `step_on_shards(optimizer).remove()`, at any time, makes one step DTensors as torch does, for good; copies have to be told
    anew. Call it for an optimizer that is not listed, after that, or on an accelerator for torch's default of `foreach`, which
    it does not choose over DTensors and unasked does not take here either.

    Args:
        optimizer: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, ASGD, RMSprop or Rprop of `torch.optim`, in any
            implementation (`foreach`, `fused`, `capturable`), or a subclass that leaves `step` alone.
        elementwise: you vouch for an optimizer that is not on this list: it evaluates the closure first, then reads
            `param_groups`, and updates each element from that element of the parameter, of its gradient and of its state
            alone, and from numbers. It is handed flat stretches: parts of a parameter, or several, whose shapes are not theirs.

    Returns:
        What undoes it: `.remove()`. Calling `step_on_shards` twice on one optimizer returns the same.

    Raises:
        OptimizerError: the optimizer does not step element by element, or nobody knows whether it does, or it is
            `differentiable`.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> step_on_shards(optimizer)

    FSDP1 (Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277) gave its optimizers one flat parameter per unit, at the price of
    parameters and state dicts that were flat, too; see decision 9.
    """
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"step_on_shards: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_elementwise(optimizer, elementwise)
    if _differentiable(optimizer):
        raise OptimizerError(
            f"step_on_shards: this {type(optimizer).__name__} is differentiable: its steps become part of a graph that local "
            "tensors would be missing from; leave step_on_shards out, or differentiable=True"
        )
    there = _stepping_of(optimizer)
    if there is None:
        _left_alone.discard(optimizer)
        return ShardStepping(optimizer)
    there.ask()
    return there


def _stepping_of(optimizer: Optimizer) -> ShardStepping | None:
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer)[0].values())
    return next((owner for owner in owners if isinstance(owner, ShardStepping)), None)


@at_first_step
def _without_being_asked(optimizer: Optimizer) -> None:
    if optimizer not in _left_alone and _stepping_of(optimizer) is None:
        known = _known_base(type(optimizer)) is not None
        if known and not _differentiable(optimizer):
            ShardStepping(optimizer, asked=False)


def _known_base(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The optimizer on the list whose code `kind` steps with."""
    base = next((each for each in reversed(ELEMENTWISE) if issubclass(kind, each)), None)
    return base if base is not None and step_code(kind) == step_code(base) else None


def _check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    name = type(optimizer).__name__
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _WHOLE and kind.__module__.startswith("torch.optim"):
            raise OptimizerError(
                f"step_on_shards: {name} does not step element by element: {_WHOLE[kind.__name__]}; leave step_on_shards out. "
                "Parameters that another optimizer could step can be given to one of their own."
            )
    if vouched:
        return
    if _known_base(type(optimizer)) is not None:
        return
    base = next((kind for kind in reversed(ELEMENTWISE) if isinstance(optimizer, kind)), None)
    what = f"{name} is not known here" if base is None else f"{name} changes how {base.__name__} steps"
    raise OptimizerError(
        f"step_on_shards: {what}. If it updates each element from that element of the parameter, its gradient and its state "
        "alone, say so: step_on_shards(optimizer, elementwise=True); otherwise leave it out."
    )
