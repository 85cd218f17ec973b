"""Hooks of the engine and of users on parameters: when autograd has accumulated, and when gradients
land.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from composable.compilation import untraced
from composable.torch_private import gradient_hooks, hooks_after_accumulation

T = TypeVar("T")

# --- the engine's hooks on what autograd accumulates on -----------------------------------------

# The table of a parameter's post-accumulate hooks, and a key and a hook in it.
Arrival = tuple[OrderedDict[int, Any], int, Callable[[Tensor], None]]


def ignore_arrivals(arrivals: Iterable[Arrival]) -> None:
    """Let autograd not call these hooks: an empty table costs a tenth of a call of Python."""
    for table, key, _ in arrivals:
        if type(table) is OrderedDict:  # nearly always; plain operations take half the time
            table.pop(key, None)
            continue
        try:  # noqa: SIM105, `suppress` takes calls of Python
            OrderedDict.__delitem__(table, key)  # past the methods of `DeferredHooks`
        except KeyError:
            pass  # it is ignored already


def listen_to_arrivals(arrivals: Iterable[Arrival]) -> None:
    """The inverse of `ignore_arrivals`. May be called twice."""
    for table, key, hook in arrivals:
        if type(table) is OrderedDict:
            table[key] = hook
        else:  # past the methods of `DeferredHooks`
            OrderedDict.__setitem__(table, key, hook)


def hook_gradients(
    parameters: Iterable[nn.Parameter], hook: Callable[[Tensor], Tensor]
) -> list[Callable[[], object]]:
    """Let `hook` change gradients before autograd accumulates them; returns what undoes it."""
    undo: list[Callable[[], object]] = []
    for parameter in parameters:
        trains = parameter.requires_grad
        if parameter.is_floating_point() or parameter.is_complex():
            # a frozen one takes no hook, and may be unfrozen later
            parameter.requires_grad_(True)
            # Set anew: `model.to()` gives a DTensor another tensor of C++, which knows no hooks.
            parameter._backward_hooks = gradient_hooks(parameter)
            undo.append(parameter.register_hook(hook).remove)
            parameter.requires_grad_(trains)
    return undo


# --- hooks of users on at-rest parameters -------------------------------------------------------


def _of_users(table: T) -> T | OrderedDict[int, Any]:
    """The hooks of users in such a table."""
    return table.of_users if isinstance(table, DeferredHooks) else table


def move_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """`target` has the hooks of `source`, and `source` none. What removes a hook knows its table,
    so the tables move.
    """
    tensor_hooks, after = gradient_hooks(source), _of_users(hooks_after_accumulation(source))
    source._backward_hooks = None
    source._post_accumulate_grad_hooks = OrderedDict()  # None would leave the hooks in C++
    if tensor_hooks:
        target._backward_hooks = tensor_hooks
    if after:
        target._post_accumulate_grad_hooks = after


def run_gradient_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What the parameter's tensor hooks make of a gradient that lands, as autograd would ask
    them.
    """
    with torch.no_grad():
        for hook in list((gradient_hooks(parameter) or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def post_accumulate_hooks(parameter: nn.Parameter) -> OrderedDict[int, Any]:
    """The table of such hooks that users have put on an at-rest parameter: the one to which they
    will add more.
    """
    hooks = hooks_after_accumulation(parameter)
    if hooks is None:
        hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
    return _of_users(hooks)


def run_post_accumulate_hooks(parameter: nn.Parameter) -> None:
    """Call the post-accumulate hooks of an at-rest parameter, when its reduced gradient is
    there.
    """
    with torch.no_grad():
        for hook in list(post_accumulate_hooks(parameter).values()):
            hook(parameter)


_OF_ENGINE: Final = -1  # the key of the engine's hook; those of users count from 0


class DeferredHooks(OrderedDict[int, Any]):
    """The post-accumulate hooks of a replicated parameter on which autograd itself accumulates.

    Autograd calls every hook in the table as soon as the local gradient is there. Users mean the
    reduced one. torch's C++ code reads the dict itself, and users add and remove hooks by the
    methods: so the dict holds the engine's hook only, and the methods keep the users' in
    `of_users`, from where they are called when the reduction has landed.
    """

    def __init__(self, users: OrderedDict[int, Any] | None) -> None:
        super().__init__()
        self.of_users: OrderedDict[int, Any] = OrderedDict() if users is None else users
        # The handle that removes a hook refers weakly to the dict that it was added to: this one,
        # which must outlive its use.
        self.of_users.deferred = self  # type: ignore[attr-defined]

    @property
    def of_engine(self) -> Any:
        """The hook that autograd calls; None after `undo`."""
        return super().get(_OF_ENGINE)

    @of_engine.setter
    def of_engine(self, hook: Any) -> None:
        super().__setitem__(_OF_ENGINE, hook)

    @override
    def __setitem__(self, key: int, hook: Any) -> None:
        self.of_users[key] = hook

    @override
    def __delitem__(self, key: int) -> None:
        del self.of_users[key]

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.of_users


def defer_hooks(
    parameter: nn.Parameter, arrived: Callable[[Tensor], None]
) -> tuple[Arrival, Callable[[], None]]:
    """Call `arrived` when autograd has accumulated, and the hooks of users when they are run; also
    returns the inverse.
    """
    users = _of_users(hooks_after_accumulation(parameter))
    deferred = getattr(users, "deferred", None)
    if deferred is None:  # an empty one is false, and handles of users know it
        deferred = DeferredHooks(users)
    hook = deferred.of_engine = untraced(arrived)
    parameter._post_accumulate_grad_hooks = deferred

    def undo() -> None:
        ignore_arrivals([(deferred, _OF_ENGINE, hook)])
        if hooks_after_accumulation(parameter) is deferred:
            parameter._post_accumulate_grad_hooks = deferred.of_users  # type: ignore[union-attr]

    return (deferred, _OF_ENGINE, hook), undo
