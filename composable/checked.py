"""`checked` compares the arguments of a public function with its type annotations.

If an argument has a wrong type or is out of range, an `ArgumentError` is raised before anything
runs. It names the function, the argument, what the argument accepts, and the value that was passed.
Only annotations are read, so a type checker and the function refuse the same calls. `Literal` lists
the accepted strings, and `Takes` adds conditions that a type cannot express, as in `PositiveInt`.

These annotations are checked: classes, unions, `None`, `Literal`, `Annotated` with a `Takes`,
`Callable`, `type[...]`, and the containers of `collections.abc`. Members are checked only in lists
and tuples, because an iterator can be read only once, and lists of parameters are long. `Any` and
the methods of a protocol are not checked.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from itertools import repeat
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn

from composable.compilation import traceable, untraced
from composable.errors import (
    ArgumentError,
    UnknownArgumentError,
    closest,
    did_you_mean,
    kind_of,
    with_article,
)

F = TypeVar("F", bound=Callable[..., Any])
Test = Callable[[Any], bool]

# --- what annotations say beyond types -----------------------------------------------------------


class Takes(NamedTuple):
    """In `Annotated[kind, Takes(...)]`: what is taken of a kind.

    Attributes:
        words: what the argument must be, for messages.
        fits: whether a value of the kind is taken; None: all of them are.
    """

    words: str
    fits: Test | None = None


# In `Annotated`: the function that reads the argument checks it, and says more than a type can.
ELSEWHERE: Final = Takes("anything")

PositiveInt = Annotated[int, Takes("a whole number of at least 1", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, Takes("a whole number of at least 0", lambda value: value >= 0)]
PositiveFloat = Annotated[
    float, Takes("a positive number that is not infinite", lambda value: 0 < value < math.inf)
]
Fraction = Annotated[float, Takes("a number from 0 to 1", lambda value: 0 <= value <= 1)]
RealDtype = Annotated[
    torch.dtype,
    Takes(
        "a torch.dtype of floating-point numbers (such as torch.bfloat16)",
        lambda value: value.is_floating_point,
    ),
]

# --- annotations ---------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What one annotation takes, as a function and in words."""

    fits: Test
    words: str
    choices: tuple[str, ...] = ()  # strings, one of which may have been meant


def is_bool(value: Any) -> bool:
    """Whether it is True or False, of Python or of NumPy."""
    # NumPy's comparisons give its own; the package is not imported for that
    return type(value) is bool or (
        type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy"
    )


def _is_int(value: Any) -> bool:
    return type(value) is int or (not isinstance(value, bool) and isinstance(value, Integral))


def _is_number(value: Any) -> bool:
    is_real = type(value) is float or (not isinstance(value, bool) and isinstance(value, Real))
    return is_real and not math.isnan(value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and value != ""


_ANYTHING: Final = _Kind(lambda _: True, "anything")
_KNOWN: Final[dict[Any, _Kind]] = {
    Any: _ANYTHING,
    object: _ANYTHING,
    NoneType: _Kind(lambda value: value is None, "None"),
    bool: _Kind(is_bool, "True or False"),
    int: _Kind(_is_int, "a whole number"),
    float: _Kind(_is_number, "a number"),
    str: _Kind(lambda value: isinstance(value, str), "a string"),
    nn.Module: _Kind(lambda value: isinstance(value, nn.Module), "a module (nn.Module)"),
    nn.Parameter: _Kind(lambda value: isinstance(value, nn.Parameter), "a parameter"),
    Tensor: _Kind(lambda value: isinstance(value, Tensor), "a tensor"),
    torch.dtype: _Kind(lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
    os.PathLike: _Kind(_is_path, "a path (a string that is not empty, or os.PathLike)"),
}
_NO_CONTAINERS: Final = (str, bytes, Tensor, Mapping)


def _read(hint: Any) -> _Kind:
    """Read what an annotation takes."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return _read(hint.__bound__ or Any)
    if origin is Annotated:
        return _narrowed(_read(args[0]), next(m for m in args[1:] if isinstance(m, Takes)))
    if origin is Literal:
        choices = tuple(each for each in args if isinstance(each, str))
        known = frozenset(args)
        return _Kind(lambda value: _is_in(value, known), _or([*map(repr, args)]), choices)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is type:
        return _subclass(args[0])
    kind = hint if origin is None else origin
    if kind in _KNOWN:
        return _KNOWN[kind]
    if kind is Callable:
        return _function(args)
    if getattr(kind, "_is_protocol", False):
        return _protocol(kind)
    if issubclass(kind, Iterable) and kind.__module__ in ("collections.abc", "builtins"):
        return _container(kind, args)
    return _Kind(lambda value: isinstance(value, kind), with_article(kind.__name__))


def _narrowed(base: _Kind, takes: Takes) -> _Kind:
    if takes is ELSEWHERE:
        return _ANYTHING
    fits, more = base.fits, takes.fits
    both = fits if more is None else lambda value: fits(value) and more(value)
    return _Kind(both, takes.words, base.choices)


def _is_in(value: Any, known: frozenset[Any]) -> bool:
    return isinstance(value, (str, int)) and value in known


def _union(args: Sequence[Any]) -> _Kind:
    if any((get_origin(each) or each) is os.PathLike for each in args):
        args = [each for each in args if each is not str]
    kinds = [_read(each) for each in sorted(args, key=lambda each: each is NoneType)]
    tests = tuple(kind.fits for kind in kinds)

    def test(value: Any) -> bool:
        for fits in tests:  # noqa: SIM110 - `any` costs more
            if fits(value):
                return True
        return False

    words = list(dict.fromkeys(kind.words for kind in kinds))
    return _Kind(test, _or(words), tuple(each for kind in kinds for each in kind.choices))


def _or(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _plural(words: str) -> str:
    _, noun, *rest = words.split(" ")
    return " ".join([f"{noun}es" if noun.endswith("s") else f"{noun}s", *rest])


def _protocol(kind: type) -> _Kind:
    """Take what can be called, where the protocol is of a function; else anything."""
    if "__call__" not in vars(kind):
        return _ANYTHING
    named = "__name__" in getattr(kind, "__annotations__", {})
    return _Kind(
        lambda value: is_function(value) and (not named or hasattr(value, "__name__")),
        with_article(kind.__name__.lower()),
    )


def _subclass(of: Any) -> _Kind:
    return _Kind(
        lambda value: isinstance(value, type) and issubclass(value, of),
        f"a class of {'modules' if of is nn.Module else of.__name__ + 's'}",
    )


def _function(args: tuple[Any, ...]) -> _Kind:
    """Take a function that can be called with as many arguments as the annotation has."""
    count = len(args[0]) if args and isinstance(args[0], list) else None
    words = "a function" if count is None else f"a function of {count} argument{'s' * (count != 1)}"
    return _Kind(lambda value: is_function(value) and (count is None or takes(value, count)), words)


def is_function(value: Any) -> bool:
    """Whether it can be called, and is no module: where a function is asked for that is a slip."""
    return callable(value) and not isinstance(value, nn.Module)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether `function` can be called with `count` arguments."""
    try:
        inspect.signature(function).bind(*repeat(None, count))
    except ValueError:
        return True  # a builtin that does not tell
    except TypeError:
        return False
    return True


def _container(kind: type, args: tuple[Any, ...]) -> _Kind:
    if issubclass(kind, Mapping):
        what = "a dict" if kind is dict else "a mapping, such as a dict"
        return _Kind(lambda value: isinstance(value, kind), what)
    member = args[0] if args and args[0] is not Ellipsis else Any
    if kind is tuple and len(args) == 2 and args[1] is not Ellipsis:
        first, second = map(_read, args)
        return _Kind(
            lambda value: (
                isinstance(value, list | tuple)
                and len(value) == 2
                and first.fits(value[0])
                and second.fits(value[1])
            ),
            f"a pair ({first.words}, {second.words})",
        )
    inner = _read(member)
    if inner is _ANYTHING:
        return _Kind(lambda value: hasattr(type(value), "__iter__"), "a list")
    words = f"a list of {'modules' if member is nn.Module else _plural(inner.words)}"
    if issubclass(kind, Sequence):
        fits = inner.fits
        return _Kind(
            lambda value: (
                _holds_members(value)
                and (not isinstance(value, list | tuple) or all(map(fits, value)))
            ),
            words,
        )
    return _Kind(_holds_members, words)


def _holds_members(value: Any) -> bool:
    """Whether it can be iterated over, and is none of what has members by accident."""
    kind = type(value)
    return kind in (list, tuple) or (
        hasattr(kind, "__iter__") and not isinstance(value, _NO_CONTAINERS)
    )


# --- calls ---------------------------------------------------------------------------------------


class _Checks:
    """What a function takes, argument by argument.

    Attributes:
        positional: tests of the arguments that may be given by position, in order.
        by_name: tests of those that may be given by name, by the number that is given by position.
        needed: those that have no default, by the same number.
        hidden: how many a call has before those of the signature, as `self` is one.
    """

    @untraced
    def __init__(self, function: Callable[..., Any]) -> None:
        owner, _, name = function.__qualname__.split(".<locals>.")[-1].rpartition(".")
        self.name = owner if name == "__init__" else f"{owner}.{name}" if owner else name
        self.hidden = int(bool(owner))
        signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
        parameters = list(signature.parameters.values())
        if self.hidden:
            hints[parameters[0].name] = Any
        self.signature = signature.replace(parameters=parameters[self.hidden :])
        self.kinds = {each.name: _read(hints.get(each.name, Any)) for each in parameters}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        tests = [(each.name, self.kinds[each.name].fits) for each in named]
        count = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in named)
        self.positional = [fits for _, fits in tests[:count]]
        self.by_name = [dict(tests[given:]) for given in range(count + 1)]
        self.needed = [
            {each.name for each in named[given:] if each.default is each.empty}
            for given in range(count + 1)
        ]

    @untraced
    def are_right(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call gives what is needed, and nothing that is not taken.

        False also if it gives some of `*others` or `**options`: `refuse` looks at these.
        """
        count = len(args)
        if count > len(self.positional):
            return False
        for fits, value in zip(self.positional, args):  # noqa: B905 - most calls give some
            if not fits(value):
                return False
        if kwargs:
            tests = self.by_name[count]
            for name, value in kwargs.items():
                if name not in tests or not tests[name](value):
                    return False
        needed = self.needed[count]
        return not needed or kwargs.keys() >= needed

    @untraced
    def refuse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise for the first argument that is not taken. All are, if none raises."""
        self.check(arguments_of(self.name, self.signature, args[self.hidden :], kwargs))

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise for the first of some arguments that is not taken."""
        for name, value in arguments.items():
            kind = self.kinds.get(name, _ANYTHING)
            parameter = self.signature.parameters.get(name)
            is_many = parameter is not None and parameter.kind is parameter.VAR_POSITIONAL
            for each in value if is_many else (value,):
                if not kind.fits(each):
                    near = did_you_mean(each, kind.choices) if isinstance(each, str) else ""
                    raise ArgumentError(
                        f"{self.name}: {name} must be {kind.words}, got {kind_of(each)}{near}"
                    )


_is_dynamo_compiling: Final = torch.compiler.is_dynamo_compiling
checks_of: Final = cache(_Checks)  # what a function takes is read once


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Compare arguments, by name, with the annotations of `function`.

    For verbs, which tell other ranks of an error; others are `checked`.

    Raises:
        ArgumentError: one is of another kind, or out of its range.
    """
    checks_of(inspect.unwrap(function)).check(arguments)


def checked(function: F) -> F:
    """Compare the arguments of every call with the annotations of `function`, before it runs.

    Annotations are read in the first call. A call costs about half a microsecond more. Where
    torch.compile traces the call nothing is compared: that would break the graph.

    Raises:
        ArgumentError: by the function, if an argument is of another kind, or out of its range.
        UnknownArgumentError: by the function, for arguments that it does not have, and for those
            that are missing.
    """
    found: _Checks | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if _is_dynamo_compiling():
            return function(*args, **kwargs)
        if found is None:
            found = checks_of(function)
        if not found.are_right(args, kwargs):
            found.refuse(args, kwargs)
        return function(*args, **kwargs)

    # `untraced` marks the code of one function, and not that of all that are checked
    whole: Any = call
    whole.__code__ = call.__code__.replace()  # type: ignore[attr-defined]
    return traceable(call)  # type: ignore[return-value]


def arguments_of(
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    equivalents: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Sort the arguments of one call by name.

    Args:
        name: of the function.
        signature: of the function.
        args: given by position.
        keywords: given by name.
        equivalents: see `contract`.

    Raises:
        UnknownArgumentError: the function does not have one of them, or lacks one.
    """
    parameters = signature.parameters.values()
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    unknown = next((key for key in keywords if key not in takes), None)
    if unknown is not None and rest is None:
        if here := (equivalents or {}).get(unknown):
            advice = here if " " in here else f"use {here} instead"
        else:
            near = "".join(f"did you mean '{each}'? " for each in closest(unknown, takes))
            others = ", ".join(takes[1:] if equivalents is not None else takes) or "none"
            advice = f"{near}{'It' if near else 'it'} takes: {others}"
        raise UnknownArgumentError(f"{name}() has no argument '{unknown}'; {advice}")
    try:
        arguments = dict(signature.bind(*args, **keywords).arguments)
    except TypeError as error:
        keys = ", ".join([*takes[:1], *(f"{each}=" for each in takes[1:])])
        raise UnknownArgumentError(f"{name}(): {error}; call it as {name}({keys})") from None
    more = arguments.pop(rest, {}) if rest else {}
    return {**arguments, **more}
