"""Forward hooks of annotations. Backward is followed by the engine (`engine/step/visit.py`).

A module has one pair of forward hooks, however many annotations it has. Each annotation adds a
bracket: what it does before and after forward. `OUTERMOST_FIRST` gives the order in which brackets
nest; the order in which the verbs were called does not matter. torch.compile does not trace the
hooks; see `composable.compilation`.
"""

from __future__ import annotations

import sys
from typing import Any, Final, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.compilation import drop_compiled, untraced, untraced_alone

# Brackets of other verbs come last, in the order in which they were attached.
OUTERMOST_FIRST: Final = ("fully_shard", "replicate", "offload_activations", "checkpoint")


class Bracket(Protocol):
    """What one annotation does around a module's forward."""

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called before forward; returns the inputs of forward."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after forward; returns the output that the caller gets."""

    def on_error(self, module: nn.Module) -> None:
        """Called instead of `post_forward` if forward, `pre_forward`, or a bracket inside this one
        raised.
        """


# One call of a module: the brackets it has entered and not left, and the exception that was being
# handled at entry.
_Call = tuple[list[Bracket], BaseException | None]


class Dispatcher:
    """The pair of forward hooks of one module. Copied and pickled with it, together with the
    brackets, but not open calls.

    Attributes:
        brackets: by the name of their annotation, outermost first.
    """

    __slots__ = ("_calls", "brackets", "handles")

    def __init__(self, module: nn.Module) -> None:
        self.brackets: dict[str, Bracket] = {}
        self._calls: list[_Call] = []  # innermost last: a module may call itself
        self.handles: tuple[RemovableHandle, RemovableHandle] = (
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after, always_call=True),
        )

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"brackets": self.brackets, "_calls": [], "handles": self.handles}

    def add(self, name: str, bracket: Bracket) -> None:
        brackets = {**self.brackets, name: bracket}
        known: dict[str, Bracket] = {
            name: brackets[name] for name in OUTERMOST_FIRST if name in brackets
        }
        self.brackets = {**known, **brackets}

    def drop(self, name: str) -> None:
        self.brackets = {
            other: bracket for other, bracket in self.brackets.items() if other != name
        }
        if not self.brackets:
            for handle in self.handles:
                handle.remove()

    @untraced_alone
    def before(
        self, module: nn.Module, args: Any, kwargs: Any, without: str = ""
    ) -> tuple[Any, Any]:
        """Enter the brackets, outermost first, except for the one named `without`; that is for
        methods other than forward.
        """
        entered: list[Bracket] = []
        self._calls.append((entered, sys.exception()))
        for name, bracket in self.brackets.items():
            if name != without:
                # before `pre_forward`: a bracket whose `pre_forward` fails cleans up in `on_error`
                entered.append(bracket)
                args, kwargs = bracket.pre_forward(module, args, kwargs)
        return args, kwargs

    @untraced
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Leave the brackets, innermost first. torch also calls this if forward raised, or if a
        forward hook that runs before this one did.
        """
        if not self._calls:
            return output  # a user's hook raised before `before` was called
        entered, handled = self._calls[-1]
        if sys.exception() is not handled:
            self._fail(module)
            return None
        try:
            while entered:
                output = entered.pop().post_forward(module, output)
        except Exception:
            self._fail(module)
            raise
        self._calls.pop()
        return output

    def drop_calls(self, module: nn.Module, keep: int) -> None:
        """Close calls that a KeyboardInterrupt ended, as if forward had raised: torch does not tell
        forward hooks of it. The newest `keep` calls go on.
        """
        newest = self._calls[len(self._calls) - keep :]
        del self._calls[len(self._calls) - keep :]
        while self._calls:
            self._fail(module)
        self._calls += newest

    def _fail(self, module: nn.Module) -> None:
        entered, _ = self._calls[-1]
        try:
            while entered:
                entered.pop().on_error(module)
        finally:  # `drop_calls` does not come to it again
            self._calls.pop()


@untraced
def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Dispatcher):
            return owner
    return None


def attach(module: nn.Module, name: str, bracket: Bracket) -> None:
    dispatcher = dispatcher_of(module) or Dispatcher(module)
    dispatcher.add(name, bracket)
    drop_compiled()  # graphs compiled before would not call the hooks


def detach(module: nn.Module, name: str) -> None:
    """The inverse of `attach`. May be called twice, and before `attach`."""
    dispatcher = dispatcher_of(module)
    if dispatcher is not None:
        dispatcher.drop(name)


def drop_calls(module: nn.Module, keep: int = 0) -> None:
    dispatcher = dispatcher_of(module)
    if dispatcher is not None:
        dispatcher.drop_calls(module, keep)


def hooks_attached(module: nn.Module) -> bool:
    """Whether both hooks of the dispatcher are still registered on `module`; user code may have
    cleared them.
    """
    dispatcher = dispatcher_of(module)
    return dispatcher is not None and dispatcher.handles[1].id in module._forward_hooks
