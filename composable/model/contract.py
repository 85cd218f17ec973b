"""What was said about which module: the registry, and `contract`, which makes verbs; knows no verb's meaning.

Note [Transactions]
A verb either happens as a whole or not at all. What it does is taken back by the callbacks that it gave to `on_undo`
and by a snapshot of the tree (`transaction.py`). When it succeeds, its undo stack is kept in the record, and running it
*is* `remove`. A verb that applies verbs to other modules owns those annotations: they are taken back with it.

Note [Copies]
A record travels with its module through `copy.deepcopy` and pickling, but its undo stack stays behind, since its
callbacks would change the original. See `record.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, cast

from torch import nn

from composable.compilation import unwrapped
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    ClashError,
    NotAnnotatedError,
    few,
)
from composable.model import transaction as transactions
from composable.model.arguments import arguments_of, compare_names, modules_of, names_of
from composable.model.naming import (
    calling_site,
    find_fqn,
    known_fqn,
    module_name,
    naming,
    require_callable,
)
from composable.model.record import KEY, Annotation
from composable.model.transaction import Transaction, on_undo

__all__ = [
    "Annotation",
    "Verb",
    "contract",
    "find_fqn",
    "known_fqn",
    "module_name",
    "naming",
    "on_undo",
    "registry",
    "remove",
    "require_callable",
]

_NOTHING: Final[Mapping[str, Annotation]] = MappingProxyType({})

P = ParamSpec("P")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
Target = TypeVar("Target", bound=nn.Module | Sequence[nn.Module])


class Verb(Protocol, Generic[P, S_co]):
    """A function that annotates a module, or a list of modules as one, and returns what it was given."""

    __name__: str

    def __call__(self, module: Target, /, *args: P.args, **kwargs: P.kwargs) -> Target: ...

    def state(self, module: nn.Module | Sequence[nn.Module]) -> S_co | None:
        """What this verb keeps about `module`, or about a list that was annotated as one; None where it was not applied.

        Never writes.

        Raises:
            AnnotationError: not a module, or a list of modules that were annotated apart.
        """


def registry(module: nn.Module) -> Mapping[str, Annotation]:
    """What was applied to `module`, by the verb's name, in the order in which it was applied; empty when nothing was.

    The mapping cannot be written to, and `module` is not changed by asking. It does not contain what is being applied:
    a verb's record is made when the verb has succeeded.

    Example::

        >>> fully_shard(model.head)
        >>> registry(model.head)["fully_shard"].call_site
        'train.py:41'
    """
    records = vars(module).get(KEY)
    return MappingProxyType(records) if records else _NOTHING


def contract(
    *,
    state_cls: Callable[[], S] | None = None,
    clashes: Mapping[str, str] | Sequence[str] = (),
    equivalents: Mapping[str, str] | None = None,
    only_submodules_with: str | None = None,
) -> Callable[[Callable[Concatenate[Any, P], Any]], Verb[P, S]]:
    """Turn a function of a module, or of a list of modules, into a verb: it is recorded and can be removed.

    The verb can be applied once per module. It must keep the names and the order of parameters, buffers and modules. If
    it raises, the modules are as they were before, and the exception goes on to the caller. The idea of a contract with
    a state per module is that of `torch.distributed._composable.contract`; the transaction is ours.

    Args:
        state_cls: called without arguments for every call of the verb; `verb.state(module)` gives the result, already
            while the function runs. Default: a `types.SimpleNamespace`. It is copied and pickled with the module. If its
            class has a function `around_removal(states, undo)`, `remove` calls that, and it calls `undo`, which may be called
            again, or raises. After an interrupt `remove` calls its `removal_was_interrupted(states, begun)`.
        clashes: names of verbs that exclude this one on the same module, or a mapping from such names to a sentence
            that says why and what to do instead.
        equivalents: for keyword arguments that people know from elsewhere: what to write here instead, as in `policy=`,
            or a sentence of several words that says it.
        only_submodules_with: a keyword with which the verb annotates other modules only: then it leaves no record on its
            argument.

    Raises:
        AlreadyAnnotatedError: by the verb, when it was applied to the module before.
        ClashError: by the verb, when one of `clashes` is on the module.
        NamesChangedError: by the verb, when the function renamed or reordered something.
        UnknownArgumentError: by the verb, for arguments that the function does not have.

    Example::

        @contract(clashes=["fully_shard"])
        def log_calls(module, *, level="info"):
            handle = module.register_forward_hook(lambda *_: print(level, "called"))
            on_undo(handle.remove)
            log_calls.state(module).level = level

        log_calls(model.head, level="debug")
        remove(model.head, log_calls)
    """
    reasons = clashes if isinstance(clashes, Mapping) else dict.fromkeys(clashes, "")
    known_elsewhere = equivalents or {}

    def decorate(function: Callable[Concatenate[Any, P], Any]) -> Verb[P, S]:
        name = function.__name__
        run_body: Callable[..., Any] = function
        signature = inspect.signature(function)
        first, *others = signature.parameters.values()

        @functools.wraps(function)
        def verb(*args: Any, **kwargs: Any) -> Any:
            if not args and first.name in kwargs:
                args = (kwargs.pop(first.name),)
            if not args:
                raise AnnotationError(f"{name}() takes a module or a list of modules, and got nothing")
            given, *positional = args
            target = unwrapped(given)
            asked = arguments_of(name, first.name, others, positional, kwargs, known_elsewhere)
            modules = modules_of(name, target)
            spreads = only_submodules_with is not None and asked.get(only_submodules_with) is not None
            for module in () if spreads else modules:
                _admit(name, module, reasons)
            outer = transactions.running()
            call_site = outer[-1].call_site if outer else calling_site()
            state = state_cls() if state_cls is not None else SimpleNamespace()
            this = Transaction(name, () if spreads else modules, state, call_site)

            def body() -> None:
                names = [names_of(module) for module in modules]
                returned = run_body(target, **asked)
                if returned is not None and returned is not target:
                    raise AnnotationError(
                        f"{name} returned a {type(returned).__name__} in place of what it was given; "
                        "an annotation works on the module itself and must return it, or nothing"
                    )
                for module, before in zip(modules, names, strict=True):
                    compare_names(name, module, before)
                # Part of what is taken back, too: an interrupt may come after it.
                if spreads:
                    if outer:
                        outer[-1].nested.extend(this.nested)
                        outer[-1].undo.push(this.undo)
                    return
                record = Annotation(this, asked, known_fqn(modules[0]))
                if outer:
                    outer[-1].undo.callback(transactions.to_its_end, partial(record.undo_on, modules[0]))
                    outer[-1].nested.append((modules[0], record))
                for module in modules:
                    record.put_on(module)

            # What the outermost verb was called with gives the names for all that happens inside.
            named = naming(target) if isinstance(target, nn.Module) and not outer else nullcontext()
            with named:
                transactions.run(this, body, modules)
            return given

        def state_of(module: nn.Module | Sequence[nn.Module]) -> Any:
            states = [_state_on(one, name) for one in modules_of(f"{name}.state", module)]
            if any(state is not states[0] for state in states):
                raise AnnotationError(
                    f"{name}.state() takes one module, or a list that was annotated as one; these were annotated apart"
                )
            return states[0]

        verb.state = state_of  # type: ignore[attr-defined]
        return cast("Verb[P, S]", verb)

    return decorate


def remove(module: Target, annotation: Verb[..., Any] | str) -> Target:
    """Take an annotation back: what the verb did is undone, its hooks and its record are gone.

    What the verb annotated on its part, as with a policy, is removed too. Of modules that were annotated as one, any
    may be given; the annotation is removed from all of them. All of it is undone even when a part of that raises.

    Args:
        module: a module that was annotated, or the list that was.
        annotation: the verb or its name.

    Returns:
        What it was given.

    Raises:
        NotAnnotatedError: there is no such annotation on `module`.
        AnnotationError: called by a verb that runs, or `module` is a copy and the verb's state cannot undo on copies.

    Example::

        >>> remove(model, fully_shard)   # every rank has the full, plain parameters again
    """
    begun: list[bool] = []
    name = annotation if isinstance(annotation, str) else annotation.__name__
    try:
        _remove(module, name, begun)
    except Exception:
        raise
    except BaseException:
        transactions.through_interrupts(partial(_note_interrupt, module, name, bool(begun)))
        raise
    return module


def _by_kind(record: Annotation) -> dict[type, list[Any]]:
    found: dict[type, list[Any]] = {}
    for state in record.states():
        found.setdefault(type(state), []).append(state)
    return found


def _note_interrupt(module: nn.Module | Sequence[nn.Module], name: str, begun: bool) -> None:
    """Other ranks may remove what this one has not begun to: tell those who count what ranks do together."""
    record = registry(modules_of("remove", module)[0]).get(name)
    for kind, states in _by_kind(record).items() if record is not None else ():
        note = getattr(kind, "removal_was_interrupted", None)
        if note is not None:
            note(states, begun)


def _remove(module: nn.Module | Sequence[nn.Module], name: str, begun: list[bool]) -> None:
    if transactions.running():
        raise AnnotationError(
            f"remove(..., {name}) was called while {transactions.running()[-1].name} is being applied; "
            "it could not be taken back if that failed. Remove first, then annotate"
        )
    first = modules_of("remove", module)[0]
    record = registry(first).get(name)
    if record is None:
        present = [f"{known} (at {record.call_site})" for known, record in registry(first).items()]
        there = f"what is there: {few(present)}" if present else "nothing was"
        raise NotAnnotatedError(f"{name} was not applied to {module_name(first)}; {there}")
    record.check_removable(first)
    undo = partial(record.undo_on, first)
    for kind, states in _by_kind(record).items():
        around = getattr(kind, "around_removal", None)
        undo = partial(around, states, undo) if around is not None else undo
    begun.append(True)
    undo()


def _state_on(module: nn.Module, name: str) -> Any:
    """The state of the verb `name` on `module`, also while the verb runs; None where it was not applied."""
    for transaction in reversed(transactions.running()):
        if transaction.covers(name, module):
            return transaction.state
    record = registry(module).get(name)
    return record.state if record is not None else None


def _admit(name: str, module: nn.Module, reasons: Mapping[str, str]) -> None:
    applied = registry(module)
    if name in applied:
        record = applied[name]
        raise AlreadyAnnotatedError(
            f"{name} was already applied to {module_name(module, record.fqn)} (at {record.call_site}); to apply it anew, call "
            f"remove(module, {name}) first"
        )
    for transaction in transactions.running():
        if transaction.covers(name, module):
            raise AlreadyAnnotatedError(f"{name} is being applied to {module_name(module)} (at {transaction.call_site})")
    for other, reason in reasons.items():
        if other in applied:
            tail = reason or f"{name} cannot be applied to the same module"
            raise ClashError(f"{module_name(module, applied[other].fqn)} is managed by {other}; {tail}")
