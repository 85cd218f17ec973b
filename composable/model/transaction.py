"""How a verb that fails leaves no trace: an undo stack and a snapshot of the tree; knows no verb and no registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from torch import nn

from composable.errors import AnnotationError

# Parameters, buffers, children and all kinds of hooks: whatever tables this version of torch gives to a module.
_TABLES: Final = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
# Recurrent modules keep a list of their parameters next to the table.
_LISTS: Final = ("_flat_weights",)

_Callback = TypeVar("_Callback", bound=Callable[[], object])


class Snapshot:
    """The attributes and tables of every module below `roots`; tensors themselves are not copied."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}
        self._saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in modules.values():
            attributes = dict(vars(module))
            held = [attributes[name] for name in (*_TABLES, *_LISTS) if isinstance(attributes.get(name), (dict, set, list))]
            self._saved.append((module, attributes, [(table, table.copy()) for table in held]))

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


class Transaction:
    """One verb that is running: on which modules, with which state, and how to take back what it did so far."""

    def __init__(self, name: str, modules: tuple[nn.Module, ...], state: Any, place: str) -> None:
        self.name = name
        self.modules = modules
        self.state = state
        self.place = place
        self.undo = ExitStack()
        self.nested: list[tuple[nn.Module, Any]] = []  # annotations that were finished inside this one

    def covers(self, name: str, module: nn.Module) -> bool:
        return self.name == name and any(module is other for other in self.modules)


# Innermost last. A context variable, so that verbs running in other threads do not see each other.
_running: ContextVar[tuple[Transaction, ...]] = ContextVar("verbs_that_run", default=())


def running() -> tuple[Transaction, ...]:
    """The transactions that are open now, innermost last."""
    return _running.get()


_taking_back: ContextVar[bool] = ContextVar("a_verb_failed", default=False)


def is_taking_back() -> bool:
    """Whether a verb has failed and is being taken back now: the snapshot will put everything back that modules held."""
    return _taking_back.get()


def run(transaction: Transaction, body: Callable[[], Any], roots: Iterable[nn.Module]) -> Any:
    """Call `body` with `transaction` open; if it raises, everything it did to the modules below `roots` is taken back."""
    before = Snapshot(roots)
    token = _running.set((*_running.get(), transaction))
    try:
        try:
            return body()
        finally:
            _running.reset(token)
    except BaseException as error:
        token_back = _taking_back.set(True)
        try:
            transaction.undo.close()
        except Exception as second:
            # The first error is the one to see; the stack has run to its end all the same.
            error.add_note(f"while {transaction.name} was taken back: {type(second).__name__}: {second}")
        finally:
            _taking_back.reset(token_back)
        before.restore()
        raise


def on_undo(callback: _Callback) -> _Callback:
    """Inside a verb: have `callback` called when the verb fails further on, or when it is removed later.

    Callbacks run in the reverse of the order in which they were given. Returns `callback`, so this is a decorator too.

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
    if not _running.get():
        raise AnnotationError("on_undo() was called while no verb is running; call it inside a contract() function")
    _running.get()[-1].undo.callback(callback)
    return callback
