"""`apply_optimizer_in_backward`: an optimizer that backward steps, unit by unit; knows not when that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from composable.device.parameter_labels import label_of
from composable.device.private import in_backward
from composable.errors import OptimizerError, PhaseError
from composable.runtime.accumulation import Accumulation
from composable.runtime.averaging import Averaging
from composable.runtime.early_steps import EarlySteps, note_optimizer, stepped_in_backward
from composable.runtime.handle import HANDLES
from composable.runtime.optimizer_hooks import Form, after_loading
from composable.runtime.ownership import holder_of
from composable.runtime.resting_form import pair_of
from composable.runtime.torchs_clipping import look_after_torchs_clipping

_THEIRS: Final = ("params", "param_names")
_STEPPABLE: Final = (Form.SHARDED.name, Form.WHOLE.name, Form.REPLICATED.name)


class OptimizerInBackward(Optimizer):
    """What `apply_optimizer_in_backward` returns: an optimizer of `torch.optim` for all that only reads it or sets its
    hyper-parameters: schedulers, state dicts, `torch.distributed.checkpoint`. Backward steps; `step()` finds nothing to do.

    Args:
        optimizer_class: as given there.
        params: as given there.
        optimizer_kwargs: as given there.
        named: the parameters, and what to call them in messages.

    Attributes:
        lost: names of what a backward had stepped on this rank that raised then. Nothing is stepped before it is empty again:
            after `load_state_dict` or `resume`.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler sets `grad_scale`, which refuses it by name

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Sequence[nn.Parameter] | Sequence[tuple[str, nn.Parameter]],
        optimizer_kwargs: dict[str, Any],
        named: Sequence[tuple[nn.Parameter, str]],
    ) -> None:
        whole = optimizer_class(params, **optimizer_kwargs)
        super().__init__(whole.param_groups, whole.defaults)
        self._class, self._kwargs = optimizer_class, dict(optimizer_kwargs)
        self._steppers: dict[tuple[int, ...], Optimizer] = {}
        self._early = EarlySteps(named, self._step_some)
        self._windows: list[Accumulation] = []
        note_optimizer(self, shown=True)
        self.register_load_state_dict_post_hook(_after_loading)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of what a backward that raised had stepped on this rank; empty again after `load_state_dict` or `resume`."""
        return self._early.lost

    def _attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have all gradients brought here, each by whom it comes from."""
        sharded: dict[int, Accumulation] = {}
        whole: dict[int, Accumulation] = {}
        for handle in list(HANDLES):
            for param in handle.parameters.params:
                whole[id(param.sharded)] = handle.gradients.accumulation
            for group in handle.gradients.groups:
                sharded.update({id(parameter): handle.gradients.accumulation for parameter in group.sharded})
        for parameter in parameters:
            window = sharded.get(id(parameter))
            pair = pair_of(parameter)
            holder = holder_of(parameter if pair is None else pair.plain)
            if window is None and isinstance(holder, Averaging):
                window = whole[id(parameter)] = holder.reducer.local.accumulation
                if holder.communicator.size == 1:
                    self._enlist(window)
                    window = None
            if window is None:
                self._early.wait_for(parameter, whole.get(id(parameter)))
            else:
                self._early.belong_to(window, [parameter])
                self._enlist(window)

    def _enlist(self, window: Accumulation) -> None:
        if self._early not in window.early:
            window.early = (*window.early, self._early)
            self._windows.append(window)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _step_some(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step some of the parameters, together always the same ones."""
        (group,) = self.param_groups
        settings = {key: value for key, value in group.items() if key not in _THEIRS}
        key = tuple(map(id, parameters))
        stepper = self._steppers.get(key)
        first = stepper is None
        if stepper is None:
            stepper = self._steppers[key] = self._class(list(parameters), **self._kwargs)
            note_optimizer(stepper, shown=False)
        stepper.param_groups[0].update(settings)
        stepper.state = self.state
        stepper.step()
        increment_version(list(parameters))  # autograd must hear of it, whatever the implementation
        self._opt_called = True  # or schedulers of torch would say that nobody has stepped
        if first:
            self._refuse_shared_numbers(stepper.param_groups[0], settings)

    def _refuse_shared_numbers(self, group: dict[str, Any], before: dict[str, Any]) -> None:
        for key, value in group.items():
            if key not in _THEIRS and value is not before.get(key):
                raise OptimizerError(
                    f"apply_optimizer_in_backward: {self._class.__name__} wrote '{key}' to its parameter group, a number "
                    "for all parameters of a step. Here they are stepped one unit after the other; step this one after backward"
                )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step what has a gradient: after a backward, nothing.

        Args:
            closure: refused, because its backward would step already.

        Raises:
            OptimizerError: there is a closure.
        """
        if closure is not None:
            raise OptimizerError(
                "apply_optimizer_in_backward: step() was given a closure, whose backward would step already. Call it without"
            )
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if found:
            self._step_some(found)
        return None

    def resume(self) -> None:
        """Step again after a backward that raised, with parameters as they are; all ranks call it.

        Replicated parameters may differ between ranks then, and shards of one parameter may be of two steps. Loading a
        checkpoint into the model and into this optimizer leaves neither, and needs no `resume`.
        """
        self._early.lost = ()

    def remove(self) -> None:
        """Backward steps nothing any more; state stays readable. Done twice is done once."""
        if in_backward():
            raise PhaseError("apply_optimizer_in_backward: remove() was called inside a backward. Call it between steps")
        self._early.leave()
        for window in self._windows:
            window.early = tuple(each for each in window.early if each is not self._early)
        self._windows = []

    # --- what does not go together ------------------------------------------------------------------------------------

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

    @property
    def grad_scale(self) -> NoReturn:
        """What a `torch.amp.GradScaler` sets, which raises an `OptimizerError`: backward has stepped already."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, scale: object) -> None:
        raise OptimizerError(
            "apply_optimizer_in_backward: a GradScaler came to step this optimizer, but backward has stepped already, with "
            "gradients that were scaled and may have been infinite. Without the scaler, in float32 or bfloat16, or with an "
            "optimizer that steps after backward; load the last checkpoint first"
        )

    def __reduce__(self) -> NoReturn:
        raise OptimizerError(
            "apply_optimizer_in_backward: what it returned cannot be copied or pickled, since it belongs to parameters. Save "
            "its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()


def _after_loading(optimizer: Optimizer) -> None:
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.resume()
        for stepper in optimizer._steppers.values():
            after_loading(stepper)


def _name_of(parameter: nn.Parameter, given: str) -> str:
    label = label_of(parameter)
    if label is not None:
        return f"parameter '{label[1]}' of unit '{label[0]}'"
    holder = holder_of(parameter)
    if isinstance(holder, Averaging):
        return f"parameter '{holder.parameters.name_of(parameter)}' of unit '{holder.name}'"
    return f"parameter '{given}'" if given else f"a parameter of shape {tuple(parameter.shape)}"


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
        if label is not None and label[2] not in _STEPPABLE:
            raise OptimizerError(
                f"apply_optimizer_in_backward: parameter '{label[1]}' of unit '{label[0]}' {Form[label[2]].value}, from "
                "model.parameters()"
            )
        found.setdefault(id(parameter), (name, parameter))
    if not found:
        raise OptimizerError("apply_optimizer_in_backward was given no parameter")
    return list(found.values())


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    optimizer_kwargs: dict[str, Any] | None = None,
) -> OptimizerInBackward:
    """Let backward step parameters, unit by unit, as soon as gradients are reduced, and give their memory back at once.

    For parameters of `fully_shard`, of `replicate` and of neither, in any mix; call it after annotating, and again for
    parameters with other settings. Parameters are afterwards what an optimizer that steps after backward makes of them, bit
    by bit, but there are never more gradients than those of about one unit, or of a few buckets. (On accelerators, replicated
    parameters are stepped when backward ends.) Gradients are None when backward has returned.

    Under `no_sync`, and in `weighted_gradients(more=True)`, nothing is stepped before the window ends. A backward that raises
    may have stepped a part of the model, on each rank perhaps another one: a warning in the log `composable` names it, and
    `lost` of what is returned. Nothing is stepped then before a checkpoint has been loaded, or `resume()` called.

    Args:
        optimizer_class: of `torch.optim`, or your own if it steps each parameter by itself and needs no closure.
        params: parameters as they are registered, `model.parameters()`, or with their names.
        optimizer_kwargs: arguments of the class.

    Returns:
        An optimizer to save, load and schedule: what it holds in `param_groups` counts in every step.

    Raises:
        OptimizerError: a parameter is not registered any more, or is stepped in backward already; the class steps all
            parameters together.
        PhaseError: inside of a backward; and by backward, after one that raised.

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
    named = [(parameter, _name_of(parameter, name)) for name, parameter in found]
    optimizer = OptimizerInBackward(optimizer_class, given, optimizer_kwargs or {}, named)
    optimizer._attach(parameters)
    look_after_torchs_clipping()
    return optimizer
