"""How a verb that fails leaves no trace: an undo stack and a snapshot of the tree; knows no verb and no registry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, TypeVar

from torch import nn

from composable.errors import AnnotationError

# Parameters, buffers, children and all kinds of hooks: whatever tables this version of torch gives to a module.
_TABLES: Final = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
# Recurrent modules keep a list of their parameters next to the table.
_LISTS: Final = ("_flat_weights",)

_PATIENCE: Final = 16  # interrupts while a verb is taken back

_Callback = TypeVar("_Callback", bound=Callable[[], object])


class Snapshot:
    """The attributes and tables of every module below `roots`, and the attributes of parameters; no tensor is copied."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}
        self._saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in modules.values():
            attributes = dict(vars(module))
            held = [attributes[name] for name in (*_TABLES, *_LISTS) if isinstance(attributes.get(name), (dict, set, list))]
            self._saved.append((module, attributes, [(table, table.copy()) for table in held]))
        parameters = {id(p): p for module in modules.values() for p in module.parameters(recurse=False)}
        self._marked = [(parameter, dict(vars(parameter))) for parameter in parameters.values()]

    def restore(self) -> None:
        """Put everything back into the very same objects, since handles of hooks point at them."""
        for module, attributes, tables in self._saved:
            vars(module).clear()
            vars(module).update(attributes)
            for table, content in tables:
                table.clear()
                if isinstance(table, list):
                    table.extend(content)
                else:
                    table.update(content)
        for parameter, marks in self._marked:
            vars(parameter).clear()
            vars(parameter).update(marks)


class Transaction:
    """One verb that is running: on which modules, with which state, and how to take back what it did so far."""

    def __init__(self, name: str, modules: tuple[nn.Module, ...], state: Any, call_site: str) -> None:
        self.name = name
        self.modules = modules
        self.state = state
        self.call_site = call_site
        self.undo = ExitStack()
        self.nested: list[tuple[nn.Module, Any]] = []  # annotations that were finished inside this one

    def covers(self, name: str, module: nn.Module) -> bool:
        return self.name == name and any(module is other for other in self.modules)


# Innermost last. Context variables, so that verbs running in other threads do not see each other.
_noted: ContextVar[tuple[Transaction, ...]] = ContextVar("verbs_that_run", default=())
_undone: ContextVar[Transaction | None] = ContextVar("the_verb_that_failed", default=None)


def running() -> tuple[Transaction, ...]:
    """The transactions that are open now, innermost last.

    An interrupt may come before a note is taken back: what counts is whether the transaction is on this thread's stack.
    """
    return tuple(filter(_on_stack, _noted.get()))


def is_rolling_back() -> bool:
    """Whether a verb has failed and is being taken back now: the snapshot will put everything back that modules held."""
    undone = _undone.get()
    return undone is not None and _on_stack(undone)


def _on_stack(transaction: Transaction) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is run.__code__ and frame.f_locals["transaction"] is transaction:
            return True
        frame = frame.f_back
    return False


def run(transaction: Transaction, body: Callable[[], Any], roots: Iterable[nn.Module]) -> Any:
    """Call `body` with `transaction` open; if it raises, everything it did to the modules below `roots` is taken back."""
    outer = running()
    before = Snapshot(roots)
    try:
        _noted.set((*outer, transaction))
        result = body()
        _noted.set(outer)
        return result
    except BaseException as error:
        _undone.set(transaction)
        interrupt = _insist(transaction.undo.close, f"while {transaction.name} was taken back", error)
        interrupt = _insist(before.restore, "", error) or interrupt
        _noted.set(outer)
        _undone.set(None)
        if interrupt is not None and isinstance(error, Exception):
            raise interrupt from error
        raise


def _insist(step: Callable[[], object], meanwhile: str, error: BaseException) -> BaseException | None:
    """Do what must be done to its end, through any interrupt; returns the interrupt."""
    interrupt = None
    for _ in range(_PATIENCE):
        try:
            step()
            break
        except Exception as second:
            # The first error is the one to see; the stack has run to its end all the same.
            error.add_note(f"{meanwhile}: {type(second).__name__}: {second}")
            break
        except BaseException as second:
            interrupt = second
    return interrupt


def through_interrupts(step: Callable[[], object]) -> BaseException | None:
    """Call `step` again and again until no interrupt ends it; returns the last interrupt."""
    interrupt = None
    for _ in range(_PATIENCE):
        try:
            step()
            break
        except Exception:
            raise
        except BaseException as error:
            interrupt = error
    return interrupt


def to_its_end(step: Callable[[], object]) -> None:
    """Call `step`, and once more if an interrupt ended it, which is raised afterwards; a second one ends it for good."""
    try:
        step()
    except Exception:
        raise
    except BaseException:
        step()
        raise


def on_undo(callback: _Callback) -> _Callback:
    """Inside a verb: have `callback` called when the verb fails further on, or when it is removed later.

    Callbacks run in the reverse of the order in which they were given; one that an interrupt ended is called again.
    Returns `callback`, so this is a decorator too.

    Args:
        callback: called without arguments. It takes back one thing that the verb has done.

    Example::

        @contract()
        def name_layers(module):
            handle = module.register_forward_hook(show_name)
            on_undo(handle.remove)

    Raises:
        AnnotationError: no verb is running.
    """
    open_now = running()
    if not open_now:
        raise AnnotationError("on_undo() was called while no verb is running; call it inside a contract() function")
    open_now[-1].undo.callback(to_its_end, callback)
    return callback
