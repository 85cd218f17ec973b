"""`contract` makes verbs, `registry` reads what was applied to a module, `remove` undoes it.

While a verb runs, `on_undo` collects callbacks. If the verb raises, they run in reverse, and a
snapshot of the tables of all modules restores what they do not cover. If the verb succeeds, its
record keeps the callbacks, and `remove` runs them. A verb that applies verbs to submodules owns
these annotations: undoing the outer one undoes the inner ones.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile
from threading import Lock
from types import FrameType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from composable.checked import arguments_of, checked
from composable.compilation import unwrapped
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    ArgumentError,
    ClashError,
    NamesChangedError,
    NotAnnotatedError,
    describe_module,
    few,
    kind_of,
)

# the attribute of a module that holds its records, by the verb's name
_RECORDS: Final = "_composable_annotations"
_NO_RECORDS: Final[Mapping[str, Annotation]] = MappingProxyType({})

P = ParamSpec("P")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
Target = TypeVar("Target", bound=nn.Module | Sequence[nn.Module])
Callback = TypeVar("Callback", bound=Callable[[], object])


class Verb(Protocol, Generic[P, S_co]):
    """A function that annotates a module, or a list of modules as one, and returns its argument."""

    __name__: str

    def __call__(self, module: Target, /, *args: P.args, **kwargs: P.kwargs) -> Target:
        """Annotate `module`, and return it."""
        ...

    def state(self, module: nn.Module | Sequence[nn.Module]) -> S_co | None:
        """Return the verb's state for `module`, or for a list that was annotated as one.

        Returns None if the verb was not applied.

        Raises:
            AnnotationError: `module` is not a module, or is a list of modules that were annotated
                separately.
        """


# --- names of modules ---------------------------------------------------------------------------

# The FQN of every module below the root of an open `naming()`, by the module's id.
_names: ContextVar[Mapping[int, str]] = ContextVar("composable_names", default=MappingProxyType({}))

_LIBRARIES: Final = ("composable.", "torch.")


@contextmanager
def naming(root: nn.Module) -> Iterator[None]:
    """Within the block, messages and records call the modules below `root` by their FQN."""
    names = {id(module): name for name, module in root.named_modules()}
    token = _names.set({**names, **_names.get()})
    try:
        yield
    finally:
        _names.reset(token)


def known_fqn(module: nn.Module) -> str | None:
    """The FQN of `module` under the outermost open `naming` that contains it, or None."""
    return _names.get().get(id(module))


def find_fqn(module: nn.Module) -> str | None:
    """The FQN of `module` for an error message, or None if none is found.

    It is that of an open `naming`, or of a model in the variables of the calling code. The search
    is slow.
    """
    fqn = known_fqn(module)
    if fqn:
        return fqn
    # The root of an open `naming` has the FQN "" there, but the caller may hold a larger model
    # around it.
    for frame in _user_frames():
        # By type, because isinstance would load lazy proxies.
        models = [
            value
            for value in (*frame.f_locals.values(), *frame.f_globals.values())
            if issubclass(type(value), nn.Module) and value is not module
        ]
        names: list[str] = [
            name for model in models for name, below in model.named_modules() if below is module
        ]
        if names:
            return max(names, key=len)  # the name in the outermost of these models
    return fqn


def module_name(module: nn.Module, fqn: str | None = None) -> str:
    """`'layers.3'` if the FQN is given or can be found, otherwise the class's name: `Block`."""
    fqn = fqn or find_fqn(module)
    return f"'{fqn}'" if fqn else type(module).__name__


def calling_site() -> str:
    """File and line of the innermost call from outside the libraries, as in `train.py:41`."""
    for frame in _user_frames():
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return "an unknown place"


def _user_frames() -> Iterator[FrameType]:
    """The stack frames of code that belongs to no library, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_LIBRARIES):
            yield frame
        frame = frame.f_back


# --- records ------------------------------------------------------------------------------------


# What a copy of a record has of it: the first five fields.
_State = tuple[str, Mapping[str, Any], str, Any, str | None]


@dataclass(slots=True, eq=False)
class Annotation:
    """The record of one call of a verb.

    A copy of the module, by `copy.deepcopy` or pickling, has a copy of the record. `copy.deepcopy`
    copies bound methods and partials with the objects in them, so that a record which has only such
    callbacks can be removed from the copy, too. Other callbacks would change the original module:
    `remove` refuses such a copy, and what was pickled. Arguments that are more than a number or a
    string are named by their type in a copy.

    Attributes:
        name: the verb's name.
        kwargs: the arguments of the call, by name, as they were given.
        call_site: file and line of the call, as in `train.py:41`.
        state: the verb's state; see `contract`.
        fqn: the FQN of the module (the first one of a list), if it was known at the call.
        modules: while the verb runs, its modules; then only those of a list, so that a single
            module and its record form no reference cycle.
        before_removal: see `contract`.
        copied: it is a copy, and its callbacks are not.
        nested: annotations made inside this one, with their (first) modules.
        callbacks: those of `on_undo` and of nested annotations.
    """

    name: str
    kwargs: Mapping[str, Any]
    call_site: str
    state: Any
    fqn: str | None = None
    modules: tuple[nn.Module, ...] = ()
    before_removal: Callable[[list[Any]], object] | None = None
    copied: bool = False
    nested: list[tuple[nn.Module, Annotation]] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kwargs = MappingProxyType(dict(self.kwargs))

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in _in_words(self.kwargs).items())
        return f"<{self.name}({given}) at {self.call_site}>"

    def covers(self, name: str, module: nn.Module) -> bool:
        """Whether this is a running call of the verb `name` on `module`."""
        return self.name == name and any(module is other for other in self.modules)

    def records(self) -> Iterator[Annotation]:
        """This one and the nested ones that were not removed separately."""
        yield self
        for module, record in self.nested:
            if record.is_on(module):
                yield from record.records()

    def is_on(self, module: nn.Module) -> bool:
        """Whether this is the record of its verb on `module`."""
        return records_of(module).get(self.name) is self

    def put_on(self, modules: tuple[nn.Module, ...]) -> None:
        """The verb succeeded: register the record."""
        self.modules = modules if len(modules) > 1 else ()
        for module in modules:
            # A new mapping each time, so that the snapshot of an outer verb can restore the
            # previous one.
            vars(module)[_RECORDS] = {**vars(module).get(_RECORDS, {}), self.name: self}

    def undo_by(self, callback: Callable[[], object], *, last: bool = False) -> None:
        """Have `callback` called, too, when the annotation is removed: `on_undo`, after the verb.

        Args:
            callback: undoes one thing.
            last: after all others; else before them.
        """
        self.callbacks.insert(0 if last else len(self.callbacks), callback)

    def undo(self) -> None:
        """Run the callbacks, the last one first; all of them, also if one raises."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback)
            self.callbacks = []

    def undo_on(self, module: nn.Module) -> None:
        """Run the callbacks and unregister the record, also if one raises.

        Does nothing if the record is not registered.
        """
        if not self.is_on(module):
            return
        try:
            self.undo()
        finally:
            for other in self.modules or (module,):
                records = dict(records_of(other))
                records.pop(self.name, None)
                if records:
                    vars(other)[_RECORDS] = records
                else:
                    drop_attribute(other, _RECORDS)

    def __getstate__(self) -> _State:
        return self.name, _in_words(self.kwargs), self.call_site, self.state, self.fqn

    def __setstate__(self, state: _State) -> None:
        Annotation.__init__(self, *state, copied=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Annotation:
        duplicate = memo[id(self)] = Annotation(*self.__getstate__(), copied=True)
        duplicate.before_removal = self.before_removal
        duplicate.state = copy.deepcopy(self.state, memo)
        duplicate.modules = copy.deepcopy(self.modules, memo)
        duplicate.nested = copy.deepcopy(self.nested, memo)
        if all(map(_is_copied_whole, self.callbacks)):
            duplicate.callbacks = copy.deepcopy(self.callbacks, memo)
            duplicate.copied = self.copied or any(record.copied for _, record in duplicate.nested)
        return duplicate


def _is_copied_whole(callback: Callable[[], object]) -> bool:
    """Whether `copy.deepcopy` copies what the callback changes.

    Of a function it copies neither defaults nor the closure.
    """
    function = callback.func if isinstance(callback, partial) else callback
    return isinstance(function, MethodType) or (
        type(function) is FunctionType and function is not callback and function.__closure__ is None
    )


def _in_words(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keep numbers and strings as they are, and name the types of other values.

    The others may hold parts of the model or process groups, or be lambdas.
    """
    plain = (bool, int, float, str, torch.dtype, type(None))
    return {
        key: value if isinstance(value, plain) else f"<{type(value).__name__}>"
        for key, value in kwargs.items()
    }


def records_of(module: nn.Module) -> Mapping[str, Annotation]:
    """Return the annotations of `module`: `registry`, for what the library asks often."""
    records = vars(module).get(_RECORDS)
    return _NO_RECORDS if records is None else MappingProxyType(records)


@checked
def registry(module: nn.Module) -> Mapping[str, Annotation]:
    """Return the annotations of `module` by the verb's name, in the order of the calls.

    The mapping is read-only. It is empty if there are no annotations. It does not yet contain a
    verb that is running.

    Example::

        >>> fully_shard(model.head)
        >>> registry(model.head)["fully_shard"].call_site
        'train.py:41'
    """
    return records_of(module)


# --- undo ---------------------------------------------------------------------------------------

# Innermost last. A context variable, so that verbs in other threads are not seen.
_running: ContextVar[tuple[Annotation, ...]] = ContextVar("composable_running_verbs", default=())

# Parameters, buffers, children and hooks: the tables that this version of torch gives to every
# module.
_TABLES: Final = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))
)
_LISTS: Final = ("_flat_weights",)  # recurrent modules keep their parameters in a list, too

# By verb that runs, in any thread: whether Python's garbage collector was enabled before. The
# collector is the process's, so that the last verb to end does what the first one has found.
_PAUSES: Final[list[bool]] = []
_PAUSING: Final = Lock()


@contextmanager
def _outer_verb(target: Any) -> Iterator[None]:
    """Name modules from `target`, and pause Python's garbage collector.

    Nearly all objects that a verb makes live on. To look through them many times takes as long as
    to make them.
    """
    with _PAUSING:
        _PAUSES.append(gc.isenabled())
        gc.disable()
    try:
        with naming(target) if isinstance(target, nn.Module) else nullcontext():
            yield
    finally:
        with _PAUSING:
            if _PAUSES.pop():
                gc.enable()


def _snapshot(roots: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that puts all modules below `roots` back into the state that they have now.

    That is their attributes and tables, and their parameters' attributes. No tensor is copied.
    """
    modules = list({id(module): module for root in roots for module in root.modules()}.values())
    tables = [m._parameters.values() for m in modules]
    parameters = {id(p): p for p in chain.from_iterable(tables) if p is not None}
    attributes = [(owner, dict(vars(owner))) for owner in (*modules, *parameters.values())]
    held = [vars(module).get(name) for module in modules for name in (*_TABLES, *_LISTS)]
    contents = [(table, table.copy()) for table in held if isinstance(table, (dict, set, list))]

    def restore() -> None:
        for owner, values in attributes:
            vars(owner).clear()
            vars(owner).update(values)
        for table, content in contents:  # the same objects: handles of hooks refer to them
            table.clear()
            if isinstance(table, list):
                table.extend(content)
            else:
                table.update(content)

    return restore


def on_undo(callback: Callback) -> Callback:
    """Inside a verb: register `callback` for when the verb fails later, or is removed.

    Callbacks run in reverse order. Returns `callback`.

    Args:
        callback: a function without arguments that undoes one change of the verb.

    Raises:
        AnnotationError: no verb is running.

    Example::

        @contract()
        def name_layers(module):
            handle = module.register_forward_hook(show_name)
            on_undo(handle.remove)
    """
    running = _running.get()
    if not running:
        raise AnnotationError(
            "on_undo() was called while no verb is running; call it inside a contract() function"
        )
    if not callable(callback):  # here, since `checked` would cost as much as many of the calls
        raise ArgumentError(f"on_undo: callback must be a function, got {kind_of(callback)}")
    running[-1].callbacks.append(callback)
    return callback


def add_attribute(module: nn.Module, name: str, value: object) -> None:
    """Inside a verb: set an attribute of this object, unless it has it. Undone with the verb."""
    if name not in vars(module):
        on_undo(partial(drop_attribute, module, name))
        vars(module)[name] = value


def drop_attribute(module: nn.Module, name: str) -> None:
    """Delete an attribute of this object, if it has it. For `on_undo`, by `partial`."""
    vars(module).pop(name, None)


@checked
def remove(module: Target, annotation: Verb[..., Any] | str | None = None) -> Target:
    """Undo annotations: revert what the verbs did, and delete their hooks and records.

    Without a verb, this removes all annotations of `module` and of the modules below. With a verb,
    it removes the verb's annotation of `module`, and those that the same call made on submodules,
    for example by a policy. If several modules were annotated as one unit, pass any of them. If a
    part of the removal raises, the other parts still run.

    Args:
        module: the annotated module, or list of modules.
        annotation: the verb or its name. None: all verbs.

    Returns:
        `module`.

    Raises:
        NotAnnotatedError: `module` has no such annotation, or neither it nor a module below has
            any.
        AnnotationError: a verb is running, or `module` is a copy whose annotation cannot be removed
            (see `Annotation`).

    Example::

        >>> remove(model)   # every rank has the full, plain parameters again
    """
    name = annotation.__name__ if callable(annotation) else annotation
    if running := _running.get():
        raise AnnotationError(
            f"remove() was called while {running[-1].name} is being applied. Remove first, then"
            " annotate"
        )
    given = modules_of("remove", module)
    if name is None:
        below = [each for top in given for each in top.modules()]
        # the last one first: it may have been made on top of the others
        found = [(each, record) for each in below for record in [*records_of(each).values()][::-1]]
        if not found:
            raise NotAnnotatedError(
                f"remove: {module_name(given[0])} has no annotation, and no module below has one"
            )
        _undo_all(found)
        return module
    first = given[0]
    record = records_of(first).get(name)
    if record is None:
        present = [
            f"{known} (at {record.call_site})" for known, record in records_of(first).items()
        ]
        there = f"what is there: {few(present)}" if present else "nothing was"
        raise NotAnnotatedError(f"{name} was not applied to {module_name(first)}; {there}")
    _undo_all([(first, record)])
    return module


def _undo_all(found: Sequence[tuple[nn.Module, Annotation]]) -> None:
    """Call `before_removal`, which may refuse, then undo these annotations, the first one first."""
    for _, record in found:
        if record.copied:
            raise AnnotationError(
                f"{record.name} cannot be removed from a copy of a module. Remove it before copying"
            )
    states: dict[Callable[[list[Any]], object], list[Any]] = {}
    for record in {id(r): r for _, outer in found for r in outer.records()}.values():
        if record.before_removal is not None:
            states.setdefault(record.before_removal, []).append(record.state)
    for before_removal, asked in states.items():
        before_removal(asked)
    with ExitStack() as stack:
        for module, record in reversed(found):
            stack.callback(record.undo_on, module)


# --- methods -------------------------------------------------------------------------------------


class Method:
    """The function `function(module, ...)` as the method `name` of one module.

    It holds the module weakly, so that the two form no cycle. A copy belongs to the copy of the
    module, and a pickle names the method.
    """

    __slots__ = ("_function", "_module", "_name")

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module = ref(module)
        self._name = name
        self._function = function

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise NotAnnotatedError(f"{self._name}: the module of this method is gone")
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the module."""
        return self._function(self._owner, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<method {self._name} of a {type(self._owner).__name__}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        return Method(copy.deepcopy(self._owner, memo), self._name, self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def bind_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Set a method on a module, unless the module or its class has an attribute of that name."""
    own = vars(module)
    taken = (own, own["_parameters"], own["_buffers"], own["_modules"])
    # Not `hasattr(module, name)`: some modules look names up in a child.
    if not hasattr(type(module), name) and not any(name in table for table in taken):
        own[name] = Method(module, name, function)


def unbind_method(module: nn.Module, name: str) -> None:
    """Delete a `Method` from a module, if it is still there. For `on_undo`, by `partial`."""
    if isinstance(vars(module).get(name), Method):
        del vars(module)[name]


# --- verbs --------------------------------------------------------------------------------------


@checked
def contract(
    *,
    state_cls: Callable[[], S] | None = None,
    before_removal: Callable[[list[S]], object] | None = None,
    clashes: Mapping[str, str] | Sequence[str] = (),
    equivalents: Mapping[str, str] | None = None,
    only_submodules_with: str | None = None,
) -> Callable[[Callable[Concatenate[Any, P], Any]], Verb[P, S]]:
    """Turn a function of a module, or of a list of modules, into a verb.

    Calls of the verb are recorded and can be removed.

    A verb can be applied once per module. It must keep the names and the order of parameters,
    buffers and modules. If it raises, the modules are restored, and the caller gets the exception.
    The idea of a contract with a state per module is from `torch.distributed._composable.contract`.

    Args:
        state_cls: called without arguments for every call of the verb; `verb.state(module)` returns
            the result, already while the function runs. Default: `types.SimpleNamespace`. It is
            copied and pickled with the module.
        before_removal: `remove` calls this function first, with the states of the annotation, and
            of nested annotations that have the same function. If it raises, nothing changes.
        clashes: names of verbs that cannot be on the same module; a mapping also has a sentence
            that says what to do instead.
        equivalents: maps keywords of other libraries to what to write instead: a keyword such as
            `policy=`, or a sentence.
        only_submodules_with: a keyword. If it is passed, the verb annotates only submodules, and
            leaves no record on its argument.

    Raises:
        AlreadyAnnotatedError: by the verb, if the module has this annotation.
        ClashError: by the verb, if one of `clashes` is on the module.
        NamesChangedError: by the verb, if the function renamed or reordered something.
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
    make_state: Callable[[], Any] = state_cls or SimpleNamespace

    def decorate(function: Callable[Concatenate[Any, P], Any]) -> Verb[P, S]:
        name = function.__name__
        signature = inspect.signature(function)

        @functools.wraps(function)
        def verb(*args: Any, **kwargs: Any) -> Any:
            arguments = arguments_of(name, signature, args, kwargs, equivalents or {})
            given = arguments.pop(next(iter(signature.parameters)))
            target = unwrapped(given)
            modules = modules_of(name, target)
            by_policy = arguments.get(only_submodules_with or "") is not None
            annotated = () if by_policy else modules
            for module in annotated:
                _admit(name, module, reasons)
            outer = _running.get()
            call_site = outer[-1].call_site if outer else calling_site()
            # The target of the outermost verb gives the names for everything inside.
            with _outer_verb(target) if not outer else nullcontext():
                record = Annotation(
                    name,
                    arguments,
                    call_site,
                    make_state(),
                    known_fqn(modules[0]),
                    annotated,
                    before_removal,
                )
                _apply(record, function, target, modules)
            record.put_on(annotated)
            nested, callbacks = record.nested, record.callbacks
            if annotated:
                nested, callbacks = [(modules[0], record)], [partial(record.undo_on, modules[0])]
            if outer:
                outer[-1].nested += nested
                outer[-1].callbacks += callbacks
            return given

        def state_of(module: nn.Module | Sequence[nn.Module]) -> Any:
            states = [_state_on(one, name) for one in modules_of(f"{name}.state", module)]
            if any(state is not states[0] for state in states):
                raise AnnotationError(
                    f"{name}.state() takes one module, or a list that was annotated as one; these"
                    " were annotated apart"
                )
            return states[0]

        verb.state = state_of  # type: ignore[attr-defined]
        return cast("Verb[P, S]", verb)

    return decorate


# --- the call of a verb -------------------------------------------------------------------------


def _apply(
    record: Annotation, function: Callable[..., Any], target: Any, modules: tuple[nn.Module, ...]
) -> None:
    """Call the verb's function. If it raises or breaks the contract, the modules are as before."""
    names = [names_of(module) for module in modules]
    restore = _snapshot(modules)
    token = _running.set((*_running.get(), record))
    try:
        returned = function(target, **record.kwargs)
        if returned is not None and returned is not target:
            raise AnnotationError(
                f"{record.name} returned a {type(returned).__name__}; an annotation works in place"
                " and must return what it was given, or nothing"
            )
        for module, old in zip(modules, names, strict=True):
            compare_names(record.name, module, old)
    except BaseException as error:
        try:
            record.undo()
        except Exception as second:
            said = f"{type(second).__name__}: {second}"
            error.add_note(f"while {record.name} was taken back: {said}")
        restore()
        raise
    finally:
        _running.reset(token)


def _admit(name: str, module: nn.Module, reasons: Mapping[str, str]) -> None:
    """Refuse a module that has this annotation, or one that clashes with it."""
    applied = records_of(module)
    if name in applied:
        record = applied[name]
        raise AlreadyAnnotatedError(
            f"{name} was already applied to {module_name(module, record.fqn)} (at"
            f" {record.call_site}); to apply it anew, call remove(module, {name}) first"
        )
    for running in _running.get():
        if running.covers(name, module):
            raise AlreadyAnnotatedError(
                f"{name} is being applied to {module_name(module)} (at {running.call_site})"
            )
    for other, reason in reasons.items():
        if other in applied:
            tail = reason or f"{name} cannot be applied to the same module"
            raise ClashError(
                f"{module_name(module, applied[other].fqn)} is managed by {other}; {tail}"
            )


def _state_on(module: nn.Module, name: str) -> Any:
    """The state of the verb `name` on `module`, also while the verb runs."""
    for running in reversed(_running.get()):
        if running.covers(name, module):
            return running.state
    record = records_of(module).get(name)
    return record.state if record is not None else None


def modules_of(verb: str, target: Any) -> tuple[nn.Module, ...]:
    """The modules of `target`, a module or a list of them, without wrappers of torch.compile."""
    target = unwrapped(target)
    if isinstance(target, nn.Module):
        return (target,)
    if not isinstance(target, (list, tuple)) or not target:
        got = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        got = f"an empty {got}" if isinstance(target, (list, tuple)) else got
        raise AnnotationError(f"{verb}() takes a module or a list of modules, and got {got}")
    seen: set[int] = set()
    for index, module in enumerate(target):
        if not isinstance(module, nn.Module):
            raise AnnotationError(
                f"{verb}() got a {type(module).__name__} at position {index} of its list of modules"
            )
        if id(module) in seen:
            raise AnnotationError(
                f"{verb}() got {module_name(module)} twice in its list of modules"
            )
        seen.add(id(module))
    return tuple(target)


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called; a plain `nn.ModuleList` or `nn.ModuleDict` cannot."""
    forward: Callable[..., object] = type(module).forward
    return forward is not nn.Module.forward or "forward" in vars(module)


def require_callable(
    module: nn.Module, *, so: str = "its parameters cannot be gathered around one"
) -> None:
    """Refuse a container without a forward of its own, such as a plain `nn.ModuleList`.

    `so` says what follows from that.
    """
    if not has_forward(module):
        what = describe_module(module, find_fqn(module))
        raise AnnotationError(
            f"{what} has no forward, so {so}; annotate its children, or pass policy="
        )


def names_of(root: nn.Module) -> dict[str, list[str]]:
    """The FQNs of all parameters, buffers and modules below `root`, in order.

    Each module is looked into once, so that trees with cycles or shared modules take linear time.
    Every registration of a tied parameter or a shared module is listed.
    """
    names: dict[str, list[str]] = {"parameters": [], "buffers": [], "modules": []}
    for fqn, module in root.named_modules():
        prefix = f"{fqn}." if fqn else ""
        for kind, found in names.items():
            found += [
                prefix + name
                for name, value in getattr(module, f"_{kind}").items()
                if value is not None
            ]
    return names


def compare_names(verb: str, root: nn.Module, before: Mapping[str, list[str]]) -> None:
    """Refuse a verb that changed `names_of(root)`."""
    after = names_of(root)
    for kind, old in before.items():
        new = after[kind]
        if old == new:
            continue
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
        start = len(list(alike))
        old, new = old[start:], new[start:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        raise NamesChangedError(
            f"{verb} changed the names of {kind} in {module_name(root)}, or their order; before: "
            f"{few(old) or 'nothing'}; after: {few(new) or 'nothing'}. It was taken back"
        )
