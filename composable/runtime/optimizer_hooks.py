"""Hooks around steps of optimizers: whose step writes to which parameters of units, and which nothing trains; knows no unit.

Note [State of a parameter without dimensions]
`torch.distributed.checkpoint` spreads a full state dict as the state that it replaces was spread. But it leaves tensors without
dimensions plain: the counters that optimizers keep, and by mistake the moments of a sharded parameter without dimensions. An
optimizer cannot mix those with a gradient that is spread. What was spread after the last step, and is plain now, is spread
again before the next one.

Note [Stale parameters]
What was gathered is a copy, and must not be computed with after the shards have changed. Two signs count, each enough: the
version counter of a shard changed, or gradients of the unit were reduced, after which programs write in ways of their own.
Version counters alone do not tell of optimizers: an in-place operation on a DTensor bumps the counter of the wrapper, one on
its local tensor another, and `foreach` and `fused` optimizers bump none. So a step is written down here, as a write to each
parameter that it had a gradient for; a step of an optimizer that holds none of a unit's parameters is no sign at all.
Gathering anew takes all ranks, so they must decide alike: reductions are collectives themselves, and steps and writes are
the program's, which has to do them on every rank. Tags of gathers hold how often the unit was gathered anew, so that ranks
which decide differently wait for each other, and time out by name, and do not compute with parts of different times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composable.compilation import untraced
from composable.device.held_gradients import is_held
from composable.device.parameter_forms import like_parameter
from composable.device.parameter_labels import label, label_of, unlabel
from composable.device.private import as_tensors, local_of
from composable.errors import ClippingError, OptimizerError
from composable.runtime.accumulation import any_window_open
from composable.runtime.early_steps import is_asked_to_step, may_step, stepped_in_backward
from composable.runtime.mesh_info import is_left_alone, left_alone
from composable.runtime.weighted_window import unfinished

_gradient: Final = attrgetter("grad")


class Form(Enum):
    """What a parameter is to a unit; the value says so of one that an optimizer holds, and what to do if it should not."""

    SHARDED = "is sharded"
    WHOLE = "is the user's own, on one rank without a process group"
    UNSHARDED = (
        "is held as the unsharded copy that a module shows while it computes: the optimizer was made inside a forward or "
        "backward. Make it between steps"
    )
    ORIGINAL = "was replaced by a sharded one when fully_shard was called. Make the optimizer after annotating"
    REPLACED = (
        "was replaced on its module, by load_state_dict(assign=True) or an assignment, after the optimizer was made. Load "
        "without assign=True, which keeps the parameters, or make the optimizer anew"
    )
    REPLICATED = "is replicated, and rests as a DTensor because others are sharded"
    COMPUTING = (
        "is what modules compute with. A DTensor stands in its place since one annotation covers both replicated and sharded "
        "modules. Make the optimizer after annotating, and between steps"
    )
    REMOVED = "went when fully_shard was removed. Make the optimizer anew"


_TRAINED: Final = (Form.SHARDED.name, Form.REPLICATED.name)
_OWN: Final = (*_TRAINED, Form.WHOLE.name)

_written: int = 0  # notes, ever


def note(parameter: nn.Parameter, form: Form, unit: str, fqn: str) -> None:
    """Remember what `parameter` is to a unit, from now on."""
    global _written
    _written += 1
    label(parameter, unit, fqn, form.name)


def drop_note(parameter: nn.Parameter) -> None:
    """`parameter` is the user's own again."""
    global _written
    _written += 1
    unlabel(parameter)


def refuse_not_trained(function: str, parameters: Iterable[Tensor]) -> None:
    """Raise if another parameter is trained in place of one of `parameters`.

    Raises:
        ClippingError: the gradient of the other one would not be clipped.
    """
    for parameter in parameters:
        found = label_of(parameter) if isinstance(parameter, nn.Parameter) else None
        if found is None or found[2] in _OWN or (found[2] == Form.ORIGINAL.name and parameter.grad is not None):
            continue  # an original with a gradient is used elsewhere, too
        unit, fqn, _ = found
        raise ClippingError(
            f"{function}: parameter '{fqn}' of unit '{unit}' is not the one that is trained, whose gradient would not be "
            "clipped: it is from before its module was annotated, or was replaced since, or stands there only while modules "
            "compute. Pass the model, or model.parameters() as of now. No gradient was changed."
        )


class _Holding:
    """What one optimizer holds, looked up once. It refers to no parameter: hooks of a parameter may lead to the optimizer,
    and one that is referred to weakly cannot be cast or moved."""

    def __init__(self, parameters: list[nn.Parameter], former: _Holding | None) -> None:
        self._written = _written
        self._ids = list(map(id, parameters))  # of one that went, an id may come again; then it is noted again, too
        self._sharded: list[int] = []
        self.foreign: list[int] = []
        self._alone: list[int] = []  # of units without a mesh
        self._moving: list[int] = []
        self._points: list[int] = []  # sharded, without dimensions
        self._spread: dict[int, list[Any]] = {}  # of these, the state that is spread as they are; as of the last step
        self.loaded = True  # state may have come from elsewhere since the last step
        self._stepped = False
        if former is not None and former._ids == self._ids:
            self._spread = former._spread
        for index, parameter in enumerate(parameters):
            found = label_of(parameter)
            if found is not None and found[2] in _TRAINED:
                self._sharded.append(index)
                if not parameter.ndim:
                    self._points.append(index)
            elif found is not None and found[2] not in _OWN:
                self.foreign.append(index)
            elif found is not None:  # Form.WHOLE
                self._alone.append(index)

    def is_of(self, parameters: list[nn.Parameter]) -> bool:
        """Whether it was looked up for just these, and would be the same today."""
        return self._written == _written and not self.foreign and self._ids == list(map(id, parameters))

    def refuse_left_alone(self, parameters: list[nn.Parameter]) -> None:
        """Raise if gradients of units are this rank's, because these were annotated before there was a group."""
        if self._alone and is_left_alone(None):
            for parameter in [parameters[index] for index in self._alone]:
                if parameter.grad is not None:
                    raise left_alone("fully_shard", (label_of(parameter) or ("",))[0])

    def before_step(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        """Some optimizers drop gradients as they go."""
        if not self._stepped:
            self._stepped = True
            if self._sharded:
                for call in _at_first_step:
                    call(optimizer)
        if self.loaded:
            if type(optimizer).__module__.startswith("torch.optim"):
                self._refuse_whole_state(optimizer, parameters)
            self.loaded = False
        self._moving = self._with_gradients(parameters)
        for index in self._points:
            state = optimizer.state.get(parameters[index], {})
            for key in self._spread.get(index, ()):
                value = state.get(key)
                if isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.ndim:
                    state[key] = like_parameter(value, parameters[index])

    def _refuse_whole_state(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        for parameter in (parameters[index] for index in self._sharded):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.ndim:
                    continue
                if value.shape == parameter.shape:
                    _refuse_whole(optimizer, parameter, str(key))

    def after_step(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        for index in self._points:
            state = optimizer.state.get(parameters[index], {})
            self._spread[index] = [key for key, value in state.items() if isinstance(value, DTensor)]
        moved = self._moving or self._with_gradients(parameters)
        if moved:
            increment_version([parameters[index] for index in moved])

    def _with_gradients(self, parameters: list[nn.Parameter]) -> list[int]:
        with as_tensors():
            gradients = list(map(_gradient, [parameters[index] for index in self._sharded]))
        return [index for index, gradient in zip(self._sharded, gradients, strict=True) if gradient is not None]


_holdings: WeakKeyDictionary[Optimizer, _Holding] = WeakKeyDictionary()
_at_first_step: Final[list[Callable[[Optimizer], None]]] = []


def at_first_step(call: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """Call this before an optimizer's first step of sharded parameters, and again when others have come since."""
    _at_first_step.append(call)
    return call


def _look_up(optimizer: Optimizer) -> tuple[_Holding, list[nn.Parameter]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    holding = _holdings.get(optimizer)
    if holding is None:
        optimizer.register_load_state_dict_post_hook(after_loading)
    if holding is None or not holding.is_of(parameters):
        holding = _holdings[optimizer] = _Holding(parameters, holding)
    return holding, parameters


def after_loading(optimizer: Optimizer) -> None:
    """Its state has come from elsewhere."""
    holding = _holdings.get(optimizer)
    if holding is not None:
        holding.loaded = True


@untraced
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    holding, parameters = _look_up(optimizer)
    for index in holding.foreign:
        _refuse_foreign(optimizer, parameters[index])
    holding.refuse_left_alone(parameters)
    if (name := stepped_in_backward(parameters)) is not None and not may_step(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__}.step: {name} is stepped in backward already, since apply_optimizer_in_backward. Give "
            "this optimizer other parameters, or call remove() on what that returned. No parameter was changed."
        )
    if any_window_open():
        _refuse_held(optimizer, parameters)
    if (parameter := unfinished(parameters)) is not None and not is_asked_to_step(optimizer):
        _refuse_unfinished(optimizer, parameter)
    holding.before_step(optimizer, parameters)


@untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    holding, parameters = _look_up(optimizer)
    holding.after_step(optimizer, parameters)


def _refuse_foreign(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    found = label_of(parameter)
    assert found is not None
    unit, fqn, form = found
    if form == Form.ORIGINAL.name and parameter.grad is not None:
        return  # it is used elsewhere, too
    raise OptimizerError(
        f"{type(optimizer).__name__}.step: parameter '{fqn}' of unit '{unit}' {Form[form].value}, from model.parameters(). "
        "The step would train nothing; no parameter was changed."
    )


def _refuse_held(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """DTensor would average such gradients by itself, one by one, and they would stay for the next step."""
    for parameter in parameters:
        found = label_of(parameter)
        if found is not None and is_held(parameter.grad):
            unit, fqn, _ = found
            raise OptimizerError(
                f"{type(optimizer).__name__}.step: the gradient of parameter '{fqn}' of unit '{unit}' is this rank's alone: it "
                "was made under no_sync, and no backward since has averaged it over the ranks. Run the last backward before a "
                "step outside of no_sync, or call reduce_gradients(model), on all ranks. No parameter was changed."
            )


def _refuse_unfinished(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    unit, fqn, _ = label_of(parameter) or ("", "", "")
    name = f"parameter '{fqn}' of unit '{unit}'" if fqn else f"a parameter of shape {tuple(parameter.shape)}"
    raise OptimizerError(
        f"{type(optimizer).__name__}.step: the gradient of {name} is not complete: weighted_gradients(..., more=True) said "
        "that more micro-batches of this step follow. Leave more=True out of the last one. No parameter was changed."
    )


def _refuse_whole(optimizer: Optimizer, parameter: nn.Parameter, key: str) -> None:
    found = label_of(parameter)
    assert found is not None
    assert isinstance(parameter, DTensor)
    unit, fqn, _ = found
    raise OptimizerError(
        f"{type(optimizer).__name__}.step: the state '{key}' of parameter '{fqn}' of unit '{unit}' is a plain tensor of shape "
        f"{tuple(parameter.shape)}, of which this rank's part of the parameter has {tuple(local_of(parameter).shape)}: "
        "optimizer.load_state_dict() does not spread a full state dict. Make the optimizer anew and load, between zero_grad() "
        "and backward(), with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, optimizer, state_dict, "
        "options=StateDictOptions(full_state_dict=True)), which takes what get_optimizer_state_dict gave. No parameter was "
        "changed."
    )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
