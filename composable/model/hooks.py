"""When we are called back, and in which order annotations nest; knows modules and autograd nodes, never a tensor's contents.

Note [One dispatcher, brackets inside]
A module has one pair of forward hooks of ours, however many annotations it has. Each annotation is a bracket: what it does
before and after forward. The order of nesting is declared once, in `OUTERMOST_FIRST`, and does not depend on the order in
which the verbs were called.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composable.compilation import drop_compiled, running_compiler, untraced, untraced_alone
from composable.model.interrupts import Inputs, calls_of

_WAITING: Final = "composable: called before gradients"  # in a node's metadata

OUTERMOST_FIRST: Final = ("fully_shard", "replicate", "offload_activations", "checkpoint")


class Bracket(Protocol):
    """What one annotation does around a module's forward."""

    @property
    def outermost(self) -> bool:
        """Whether nobody around cleans up after an interrupt, so that it pays to notice at once. Asked after `enter`."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before forward; returns the inputs that forward gets."""

    def leave(self, module: nn.Module, output: Any) -> Any:
        """After forward; returns the output that the caller gets."""

    def on_error(self, module: nn.Module) -> None:
        """Forward, or something around it, raised."""

    def on_interrupt(self) -> None:
        """An interrupt ended the calls that are open: neither `leave` nor `on_error` will come for them."""


class _Call:
    """One call of a module: which brackets were entered and not left, and which exception was being handled already."""

    __slots__ = ("entered", "handled")

    @untraced
    def __init__(self) -> None:
        self.entered: list[Bracket] = []
        self.handled = sys.exception()


class Dispatcher:
    """The one pair of hooks of a module."""

    __slots__ = ("_calls", "_handles", "_ordered", "brackets")

    def __init__(self, module: nn.Module) -> None:
        self.brackets: dict[str, Bracket] = {}
        self._ordered: tuple[Bracket, ...] = ()
        self._calls: list[_Call] = []
        self._handles: list[RemovableHandle] = []
        self._attach(module)

    def _attach(self, module: nn.Module) -> None:
        before = module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(self.after, always_call=True)
        self._handles = [before, after]

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        return self._like({name: copy.deepcopy(bracket, memo) for name, bracket in self.brackets.items()}, memo)

    def _like(self, brackets: dict[str, Bracket], memo: dict[int, Any]) -> Dispatcher:
        twin = Dispatcher.__new__(Dispatcher)
        memo[id(self)] = twin
        twin.brackets = brackets
        twin._ordered = ()
        twin._calls = []
        twin._handles = copy.deepcopy(self._handles, memo)
        twin._sort()
        return twin

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"brackets": self.brackets, "_calls": [], "_handles": self._handles, "_ordered": self._ordered}

    def _sort(self) -> None:
        known = [name for name in OUTERMOST_FIRST if name in self.brackets]
        others = [name for name in self.brackets if name not in OUTERMOST_FIRST]
        self._ordered = tuple(self.brackets[name] for name in (*known, *others))

    def add(self, name: str, bracket: Bracket) -> None:
        self.brackets[name] = bracket
        self._sort()

    def drop(self, name: str) -> None:
        self.brackets.pop(name, None)
        self._sort()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def keys(self) -> tuple[int, int]:
        """The places of the two among a module's hooks."""
        return self._handles[0].id, self._handles[1].id

    def attached_to(self, module: nn.Module) -> bool:
        """Whether the hooks are still where they were put; users do clear hooks."""
        before, after = self.keys
        return before in module._forward_pre_hooks and after in module._forward_hooks

    @untraced_alone
    def before(self, module: nn.Module, args: Any, kwargs: Any, without: str = "") -> tuple[Any, Any]:
        if self._calls and calls_of(module) <= 1:
            self._drop_interrupted()
        call = _Call()
        self._calls.append(call)
        skipped = self.brackets.get(without) if without else None
        watched = False
        for bracket in self._ordered:
            if bracket is skipped:
                continue
            # Noted first: a bracket whose entry fails half-way is asked to clean up too.
            call.entered.append(bracket)
            args, kwargs = bracket.enter(module, args, kwargs)
            watched = watched or bracket.outermost
        if not watched or without or running_compiler() is not None:
            return args, kwargs
        inputs = Inputs((args, kwargs))
        inputs.when_gone = partial(self._let_go, module, call)
        return inputs

    def _let_go(self, module: nn.Module, call: _Call) -> None:
        """What `before` returned is gone, and with it, most likely, the call."""
        if call in self._calls and not calls_of(module):
            self._drop_interrupted()

    def _drop_interrupted(self) -> None:
        """Calls ended without a word: torch tells hooks of ordinary exceptions only."""
        for bracket in reversed(self._ordered):
            bracket.on_interrupt()
        self._calls.clear()

    @untraced
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:
            return output  # a hook that somebody put before ours raised
        call = self._calls[-1]  # and there it stays until all is done: whoever finds it there knows that it is not
        if output is None and sys.exception() is not call.handled:
            for bracket in reversed(call.entered):
                bracket.on_error(module)
            self._calls.pop()
            return None
        for bracket in reversed(call.entered):
            try:
                output = bracket.leave(module, output)
            except Exception:
                for outer in reversed(call.entered[: call.entered.index(bracket)]):
                    outer.on_error(module)
                self._calls.pop()
                raise
        self._calls.pop()
        return output


@untraced
def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """The dispatcher attached to `module`, found through its hooks."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Dispatcher):
            return owner
    return None


def attach(module: nn.Module, name: str, bracket: Bracket) -> None:
    """Add an annotation's bracket to `module`."""
    dispatcher = dispatcher_of(module) or Dispatcher(module)
    dispatcher.add(name, bracket)
    drop_compiled()  # what was compiled around this module calls no hooks of it, and would not notice these


def detach(module: nn.Module, name: str) -> None:
    """The inverse of `attach`, however far that came: whoever may be interrupted notes it before."""
    dispatcher = dispatcher_of(module)
    if dispatcher is not None:
        dispatcher.drop(name)
        if not dispatcher.brackets:
            dispatcher.detach()


def after_call(module: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` when the call of `module` whose hooks run now has ended, or raised."""

    @untraced
    def once(*_: Any) -> None:
        waiting.remove()
        callback()

    waiting = module.register_forward_hook(once, always_call=True)


class Guard:
    """Stands before the forward of modules whose parameters are at rest: refuses it, or lets it begin with others."""

    __slots__ = ("_handle", "hooks", "refuse")

    def __init__(self, module: nn.Module, refuse: Callable[[nn.Module], None]) -> None:
        self.refuse = refuse
        self._handle = module.register_forward_pre_hook(self, prepend=True)
        self.hooks = cast("OrderedDict[int, Any]", module._forward_pre_hooks)

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        self.refuse(module)

    @property
    def key(self) -> int:
        """The guard's place in `hooks`."""
        return self._handle.id

    def remove(self) -> None:
        self._handle.remove()


class EdgeHooks:
    """Changes what goes into the forward of a module that is not annotated, and what comes out of it."""

    __slots__ = ("_handles",)

    def __init__(
        self,
        module: nn.Module,
        inputs: Callable[[nn.Module, Any, Any], tuple[Any, Any]],
        output: Callable[[nn.Module, Any, Any], Any],
    ) -> None:
        before = module.register_forward_pre_hook(inputs, with_kwargs=True)
        self._handles = [before, module.register_forward_hook(output)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class GuardRow:
    """The guards of one unit, which come and go together.

    Modules that are used as they should be pay nothing: the guards step aside while the parameters are unsharded.
    """

    __slots__ = ("_places",)

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._places = tuple((guard.hooks, guard.key, guard) for guard in guards)

    def step_aside(self) -> None:
        for hooks, key, _ in self._places:
            hooks.pop(key, None)

    def stand(self) -> None:
        for hooks, key, guard in self._places:
            hooks[key] = guard
            if len(hooks) > 1:
                hooks.move_to_end(key, last=False)  # before hooks of the user


def _any_node(node: Any) -> bool:
    return True


def before_gradient(tensor: Tensor, callback: Callable[..., None], where: Callable[[Any], bool] = _any_node) -> bool:
    """Call `callback` before backward goes through `tensor`, also when it is a view that is written to later.

    An in-place write on a view gives the view a new node and leaves the old one out of the graph, but it cannot leave
    out the node of the view's base. So views are watched at both. A leaf may be a parameter, which lives on when its graph is
    gone: what waits there goes when it has been called.

    Of several callbacks at one node the last one is called first. They come from calls that returned the same tensor, one
    inside the other, and in the order in which backward goes through calls the outer one is first. On another rank the outer
    call may have made a tensor of its own of it, and all ranks must go through calls in one order.

    Args:
        where: the nodes that count.

    Returns:
        Whether there is a place where to call it.
    """
    node = tensor.grad_fn
    if node is None:

        @untraced
        def once(gradient: Tensor) -> None:
            waiting.remove()
            callback(gradient)

        waiting = tensor.register_hook(once)
        return True
    if not where(node):
        return False
    before_node(node, callback)
    if tensor._is_view() and tensor._base is not None:
        base = tensor._base.grad_fn
        if base is not None and where(base):
            before_node(base, callback)
    return True


def before_node(node: Any, callback: Callable[..., None]) -> None:
    """`before_gradient` of a tensor that is no leaf and no view, and that `node` made."""
    waiting = node.metadata.get(_WAITING)
    if waiting is None:
        waiting = node.metadata[_WAITING] = []
        node.register_prehook(partial(_call_in_turn, waiting))
    waiting.insert(0, callback)


@untraced
def _call_in_turn(callbacks: Sequence[Callable[..., None]], gradients: Any) -> None:
    for callback in callbacks:
        callback(gradients)
