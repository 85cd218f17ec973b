"""`apply_optimizer_in_backward`: backward steps each parameter as soon as its reduced gradient is there, and frees it.

A post-accumulate hook on every parameter does it. The engine calls such hooks of the parameters that it manages when the
reduced gradient lands; autograd calls those of other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from composable.engine.param import label_of
from composable.errors import OptimizerError, PhaseError
from composable.memory.torch_private import in_backward

_NOT_SETTINGS: Final = ("params", "param_names")


class OptimizerInBackward(Optimizer):
    """What `apply_optimizer_in_backward` returns: an optimizer of `torch.optim` for everything that reads it or sets its
    hyper-parameters: schedulers, state dicts, `torch.distributed.checkpoint`. Backward steps; `step()` finds nothing to do.

    Args:
        optimizer_class: as given there.
        params: as given there.
        optimizer_kwargs: as given there.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Sequence[nn.Parameter] | Sequence[tuple[str, nn.Parameter]],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        whole = optimizer_class(params, **optimizer_kwargs)
        super().__init__(whole.param_groups, whole.defaults)
        self.state.update(whole.state)  # that some have from the start
        self._class, self._kwargs = optimizer_class, dict(optimizer_kwargs)
        self._steppers: dict[int, Optimizer] = {}
        parameters = self.param_groups[0]["params"]
        self._ids = frozenset(map(id, parameters))  # of tensors that `param_groups` keeps alive
        self._hooks: list[RemovableHandle] = []
        for parameter in parameters:
            trains = parameter.requires_grad
            parameter.requires_grad_(True)  # or torch refuses the hook; it may train later
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
            parameter.requires_grad_(trains)
        _alive.add(self)

    def _on_gradient(self, parameter: Tensor) -> None:
        """The reduced gradient of `parameter` is there."""
        if id(parameter) not in self._ids:
            raise PhaseError(
                f"apply_optimizer_in_backward: {_name_of(parameter)} took the place of one that is stepped in backward, and is "
                "not stepped itself. Call remove() on what apply_optimizer_in_backward returned, and the function again, after "
                "annotating and after replacing parameters"
            )
        if parameter.grad is not None:
            self._step_one(parameter)
            parameter.grad = None

    def _step_one(self, parameter: Tensor) -> None:
        settings = {key: value for key, value in self.param_groups[0].items() if key not in _NOT_SETTINGS}
        stepper = self._steppers.get(id(parameter))
        if stepper is None:
            stepper = self._steppers[id(parameter)] = self._class([parameter], **self._kwargs)
            _steppers.add(stepper)
        group = stepper.param_groups[0]
        group.update(settings)
        stepper.state = self.state
        stepper.step()
        increment_version(parameter)  # for autograd, since fused implementations do not
        self._opt_called = True  # or torch's schedulers warn that there was no step
        for key, value in group.items():
            if key not in _NOT_SETTINGS and value is not settings.get(key):
                raise OptimizerError(
                    f"apply_optimizer_in_backward: {self._class.__name__} wrote '{key}' to its parameter group, a number for "
                    "all parameters of a step. In backward each parameter is stepped by itself; step this optimizer after "
                    "backward"
                )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step parameters that have a gradient: after a backward, none.

        Args:
            closure: refused, because its backward would step already.

        Raises:
            OptimizerError: there is a closure.
        """
        if closure is not None:
            raise OptimizerError(
                "apply_optimizer_in_backward: step() was given a closure, whose backward would step already. Call it without"
            )
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self._step_one(parameter)
        return None

    def remove(self) -> None:
        """Let backward step nothing any more. State stays readable. May be called again."""
        if in_backward():
            raise PhaseError("apply_optimizer_in_backward: remove() was called inside a backward. Call it between steps")
        for hook in self._hooks:
            hook.remove()
        _alive.discard(self)

    def _name_of(self, parameter: Tensor) -> str | None:
        """What messages call `parameter`, if it is one of these."""
        return _name_of(parameter) if id(parameter) in self._ids else None

    # --- what is refused ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the first one: call `apply_optimizer_in_backward` again for other parameters.

        Args:
            param_group: as torch's optimizers take it.

        Raises:
            OptimizerError: there is a group already.
        """
        if self.param_groups:
            raise OptimizerError(
                "apply_optimizer_in_backward takes no second parameter group: call it again for other parameters, with other "
                "settings"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> NoReturn:
        raise OptimizerError(
            "apply_optimizer_in_backward: what it returned cannot be copied or pickled, since it belongs to parameters. Save "
            "its state_dict()"
        )


_alive: Final[WeakSet[OptimizerInBackward]] = WeakSet()
_steppers: Final[WeakSet[Optimizer]] = WeakSet()


def stepped_in_backward(parameters: Iterable[Tensor]) -> str | None:
    """The name of the first of `parameters` that is stepped in backward; None if none is."""
    optimizers = list(_alive)
    if not optimizers:  # as in most programs
        return None
    names = (optimizer._name_of(parameter) for parameter in parameters for optimizer in optimizers)
    return next((name for name in names if name is not None), None)


def is_part_of_backward(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is what steps in backward, or what users hold of it."""
    return isinstance(optimizer, OptimizerInBackward) or optimizer in _steppers


def _name_of(parameter: Tensor) -> str:
    label = label_of(parameter)
    if label is not None:
        return f"parameter '{label.fqn}' of unit '{label.unit}'"
    return f"a parameter of shape {tuple(parameter.shape)}"


# --- the function -----------------------------------------------------------------------------------------------------


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    optimizer_kwargs: dict[str, Any] | None = None,
) -> OptimizerInBackward:
    """Let backward step parameters as soon as their gradients are reduced, and free the gradients at once.

    For parameters of `fully_shard`, of `replicate` and of neither, in any mix. Call it after annotating, and again for
    parameters with other settings. Parameters are what an optimizer that steps after backward makes of them, but there are
    never more gradients than those of about one unit, or of a few buckets. Gradients are None when backward has returned.

    Under `no_sync` nothing is stepped before the backward that reduces. A backward that raises may have stepped a part of the
    model, on each rank another one: load the last checkpoint before going on. A `GradScaler` cannot be used.

    Args:
        optimizer_class: of `torch.optim`, or your own if it steps each parameter by itself and needs no closure.
        params: parameters as they are registered, `model.parameters()`, or with their names.
        optimizer_kwargs: arguments of the class.

    Returns:
        An optimizer to save, load and schedule: what it holds in `param_groups` counts in every step.

    Raises:
        OptimizerError: a parameter is not registered any more, or is stepped in backward already; the class steps all
            parameters together.
        PhaseError: called inside a backward.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> optimizer = apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-3})
        >>> model(x).sum().backward()  # and the parameters have been stepped

    After `torch.distributed.optim._apply_optimizer_in_backward`, whose arguments it has.
    """
    if in_backward():
        raise PhaseError("apply_optimizer_in_backward was called inside a backward. Call it between steps")
    kind: object = optimizer_class
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise OptimizerError(
            f"apply_optimizer_in_backward takes a class of optimizers first, e.g. torch.optim.AdamW, got {kind!r}"
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise OptimizerError(
            "apply_optimizer_in_backward: LBFGS takes inner products over all parameters, and computes the loss again in its "
            "step. Step it after backward"
        )
    found = _checked(params)
    parameters = [parameter for _, parameter in found]
    if (taken := stepped_in_backward(parameters)) is not None:
        raise OptimizerError(
            f"apply_optimizer_in_backward: {taken} is stepped in backward already. Call remove() on what the first call "
            "returned, or give this one other parameters"
        )
    given: Any = found if all(name for name, _ in found) else parameters
    return OptimizerInBackward(optimizer_class, given, optimizer_kwargs or {})


def _checked(params: object) -> list[tuple[str, nn.Parameter]]:
    """The parameters, with the names that came with them."""
    if isinstance(params, (nn.Module, nn.Parameter)) or not isinstance(params, Iterable):
        raise OptimizerError(
            f"apply_optimizer_in_backward takes parameters, e.g. model.parameters(), not a {type(params).__name__}"
        )
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for each in params:
        name, parameter = each if isinstance(each, tuple) and len(each) == 2 else ("", each)
        if not isinstance(parameter, nn.Parameter):
            cure = "; call it once for each parameter group" if isinstance(each, dict) else ""
            raise OptimizerError(
                f"apply_optimizer_in_backward takes parameters, e.g. model.parameters(), not a {type(each).__name__}{cure}"
            )
        label = label_of(parameter)
        if label is not None and label.form != "at_rest":
            raise OptimizerError(
                f"apply_optimizer_in_backward: {_name_of(parameter)} is not registered any more, or only while modules "
                "compute. Pass model.parameters(), after annotating and outside of forward and backward"
            )
        found.setdefault(id(parameter), (name, parameter))
    if not found:
        raise OptimizerError("apply_optimizer_in_backward was given no parameter")
    return list(found.values())
