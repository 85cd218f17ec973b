"""Deprecation of public names and arguments: they warn for two minor versions (docs/policy.md).

Decorate a deprecated function or class with `typing_extensions.deprecated`, which warns and which
type checkers know. With `renamed_argument`, a function accepts the old and the new name of an
argument.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_argument(
    old: str, new: str, *, gone_in: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Take keyword `old` for `new`, with a `DeprecationWarning`, until version `gone_in`.

    Example:
        >>> @renamed_argument("enable", "enabled", gone_in="0.3")
        ... def no_sync(module, *, enabled=True): ...

    Raises:
        TypeError: at the call, if both names are given.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{name}() got {old}= and {new}=, which are one argument")
                warnings.warn(
                    f"{name}({old}=) is now {new}=; the old name goes in composable {gone_in}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
