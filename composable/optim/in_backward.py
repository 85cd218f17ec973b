"""`apply_optimizer_in_backward`: step each parameter as soon as its gradient is reduced.

The gradient is freed after the step.

A post-accumulate hook on every parameter makes the step. For parameters that the engine manages,
the engine calls these hooks when the reduced gradient lands. For other parameters, autograd calls
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NoReturn, Self
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from composable.checked import checked
from composable.compilation import untraced
from composable.engine.params.param import STEPPED_BY, label_of
from composable.engine.step.observer import DECISIONS, OBSERVERS, Observer
from composable.errors import DifferentiationError, OptimizerError, PhaseError, kind_of
from composable.torch_private import backward_id, in_backward

_NAME: Final = "apply_optimizer_in_backward"
_alive: Final[WeakSet[OptimizerInBackward]] = WeakSet()
_steppers: Final[WeakSet[Optimizer]] = WeakSet()
# since gradients have landed on all parameters
_stepped: Final[dict[OptimizerInBackward, None]] = {}


class OptimizerInBackward(Optimizer):
    """What `apply_optimizer_in_backward` returns. Backward steps; `step()` finds nothing to do.

    Schedulers, state dicts and `torch.distributed.checkpoint` can use it like an optimizer of
    `torch.optim`.

    Args:
        stepper: an optimizer over the parameters. It steps one parameter at a time.

    Attributes:
        after_step: called at the end of each backward that has stepped any of the parameters. If
            several optimizers have the same function, it is called once.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> optimizer = apply_optimizer_in_backward(
        ...     torch.optim.AdamW, model.parameters(), {"lr": 1e-3}
        ... )
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    """

    def __init__(self, stepper: Optimizer) -> None:
        super().__init__(stepper.param_groups, stepper.defaults)
        self.state = stepper.state  # some have state from the start
        self._stepper = stepper
        _steppers.add(stepper)
        _alive.add(self)
        parameters = self.param_groups[0]["params"]
        self.ids = frozenset(map(id, parameters))  # of tensors that `param_groups` keeps alive
        self._hooks: list[RemovableHandle] = []
        self._stepped_in: dict[int, int] = {}  # by parameters' ids: the last backward
        self.after_step: list[Callable[[], object]] = []
        for parameter in parameters:
            trains = parameter.requires_grad
            parameter.requires_grad_(True)  # or torch refuses the hook; it may train later
            hook = partial(_on_gradient, ref(self))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(trains)
            setattr(parameter, STEPPED_BY, _KeptOptimizer(self))

    def call_after_steps(self, call: Callable[[], object]) -> Callable[[], object]:
        """See `after_step`; returns what ends it.

        Args:
            call: is called after each step.
        """
        self.after_step.append(call)
        return partial(self.after_step.remove, call)

    def on_gradient(self, parameter: Tensor) -> None:
        """Step the parameter, whose reduced gradient is there, and free the gradient.

        Args:
            parameter: one of the optimizer's.
        """
        if id(parameter) not in self.ids:
            _refuse_replaced(parameter)
        if parameter.grad is not None:
            backward = backward_id()
            if self._stepped_in.get(id(parameter)) == backward != -1:
                raise DifferentiationError(
                    f"{_NAME}: {label_of(parameter) or 'a parameter'} was stepped in this backward,"
                    " and has got another gradient: the loss reads it outside of its module, too,"
                    " as a penalty does. Use weight_decay, or step after backward"
                )
            self._stepped_in[id(parameter)] = backward
            self._step_one(parameter)
            parameter.grad = None

    def _step_one(self, parameter: Tensor) -> None:
        settings = self.param_groups[0]
        group = {**settings, "params": [parameter]}
        self._stepper.param_groups, self._stepper.state = [group], self.state
        self._stepper.step()
        if self.after_step:
            _stepped[self] = None
        increment_version(parameter)  # for autograd, since fused implementations do not
        self._opt_called = True  # or torch's schedulers warn that there was no step
        for key, value in group.items():
            if key != "params" and value is not settings.get(key):
                raise OptimizerError(
                    f"{_NAME}: {type(self._stepper).__name__} wrote '{key}' to its parameter group,"
                    " a number for all parameters of a step. Step this optimizer after backward"
                )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step parameters that have a gradient. After a backward, none has one.

        Args:
            closure: refused, because its backward would step already.

        Raises:
            OptimizerError: there is a closure.
        """
        if closure is not None:
            raise OptimizerError(
                f"{_NAME}: step() was given a closure, whose backward would step already. Call it"
                " without"
            )
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self._step_one(parameter)
        _end_step()
        return None

    def remove(self) -> None:
        """Stop stepping in backward. The state stays readable. You may call this again."""
        _refuse_in_backward("remove()")
        for hook in self._hooks:
            hook.remove()
        for parameter in self.param_groups[0]["params"]:
            vars(parameter).pop(STEPPED_BY, None)
        _alive.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error for a second group.

        Call `apply_optimizer_in_backward` again for other parameters.

        Args:
            param_group: as torch's optimizers take it.

        Raises:
            OptimizerError: there is a group already.
        """
        if self.param_groups:
            raise OptimizerError(
                f"{_NAME} takes no second parameter group: call it again for other parameters and"
                " settings"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> NoReturn:
        raise OptimizerError(
            f"{_NAME}: what it returned cannot be copied or pickled. Save its state_dict()"
        )


class _KeptOptimizer:
    """The attribute of a parameter that keeps the optimizer, whether the user does or not.

    Its hook does not: torch keeps hooks where Python's garbage collector does not look, and both
    would stay for ever, with the model.
    """

    def __init__(self, optimizer: OptimizerInBackward) -> None:
        self._optimizer = optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy, and what a file holds, is not stepped


# Dynamo takes optimizers to be capturable, and cannot make their state inside of a graph
@untraced
def _on_gradient(to_optimizer: ref[OptimizerInBackward], parameter: Tensor) -> None:
    optimizer = to_optimizer()
    if optimizer is None:  # all that it stepped were replaced
        _refuse_replaced(parameter)
    optimizer.on_gradient(parameter)


def _refuse_replaced(parameter: Tensor) -> NoReturn:
    raise PhaseError(
        f"{_NAME}: {_name_of(parameter)} took the place of one that is stepped in backward,"
        " and is not stepped itself. Call remove() on what the function returned, and the"
        " function again, after annotating and replacing parameters"
    )


def _end_step() -> None:
    calls = dict.fromkeys(call for optimizer in _stepped for call in optimizer.after_step)
    _stepped.clear()
    for call in calls:
        call()


class _EndOfStep(Observer):
    @override
    def gradients_landed(self) -> None:
        _end_step()


OBSERVERS.add(_EndOfStep())


def counted_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Whether the backwards that step one of `parameters` are counted."""
    ids = set(map(id, parameters))
    return any(optimizer.after_step and not ids.isdisjoint(optimizer.ids) for optimizer in _alive)


DECISIONS.answer(counts_backwards=counted_in_backward)


def stepped_in_backward(parameters: Iterable[Tensor]) -> str | None:
    """The name of the first of `parameters` that is stepped in backward; None if none is."""
    if not _alive:  # as in most programs
        return None
    stepped: frozenset[int] = frozenset().union(*(optimizer.ids for optimizer in _alive))
    return next((_name_of(parameter) for parameter in parameters if id(parameter) in stepped), None)


def is_part_of_backward(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is what steps in backward, or what users hold of it."""
    return isinstance(optimizer, OptimizerInBackward) or optimizer in _steppers


def _name_of(parameter: Tensor) -> str:
    return str(label_of(parameter) or f"a parameter of shape {tuple(parameter.shape)}")


def _refuse_in_backward(what: str) -> None:
    if in_backward():
        raise PhaseError(f"{_NAME}: {what} was called inside a backward. Call it between steps")


@checked
def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> OptimizerInBackward:
    """Let backward step parameters as soon as their gradients are reduced.

    Each gradient is freed at once. Parameters of `fully_shard`, of `replicate` and of neither are
    allowed, in any mix. Call this after you annotate, and again for parameters with other settings.
    The parameters get the same values as with a step after backward, but at any time gradients
    exist only for about one unit, or for a few buckets. When backward returns, gradients are None.

    Under `no_sync`, only the backward that reduces steps. If a backward raises, it may have stepped
    a part of the model, and perhaps another part on each rank. Load the last checkpoint before you
    continue. You cannot use a `GradScaler`. If a penalty in the loss reads parameters outside of
    their modules, they get a second gradient, and backward raises an error: use `weight_decay`.

    Args:
        optimizer_class: a class of `torch.optim`, or your own class if it steps each parameter
            separately and needs no closure.
        params: the registered parameters, such as `model.parameters()`, or pairs with their names.
        optimizer_kwargs: keyword arguments of the class.

    Returns:
        An optimizer to save, load and schedule. Every step uses the values in its `param_groups`.

    Raises:
        OptimizerError: a parameter is no longer registered, or backward already steps it; the class
            steps all parameters together.
        PhaseError: called inside a backward.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> optimizer = apply_optimizer_in_backward(
        ...     torch.optim.AdamW, model.parameters(), {"lr": 1e-3}
        ... )
        >>> model(x).sum().backward()  # and the parameters have been stepped

    After `torch.distributed.optim._apply_optimizer_in_backward`, whose arguments it has.
    """
    _refuse_in_backward("it")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise OptimizerError(
            f"{_NAME}: {optimizer_class.__name__} steps all parameters together. Pass a class that"
            " steps each parameter by itself, such as torch.optim.AdamW"
        )
    given: list[Any] = list(params)
    parameters = [each[1] if isinstance(each, tuple) else each for each in given]
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise OptimizerError(
                f"{_NAME}: params must be parameters, e.g. model.parameters(), got"
                f" {kind_of(parameter)}. Call it once for each parameter group"
            )
        label = label_of(parameter)
        if label is not None and label.form != "at_rest":
            raise OptimizerError(
                f"{_NAME}: {label} is not registered any more, or only while modules compute. Pass"
                " model.parameters(), after annotating and outside of forward and backward"
            )
    if (taken := stepped_in_backward(parameters)) is not None:
        raise OptimizerError(
            f"{_NAME}: {taken} is stepped in backward already. Call remove() on what the first call"
            " returned, or give this one other parameters"
        )
    return OptimizerInBackward(optimizer_class(given, **(optimizer_kwargs or {})))
