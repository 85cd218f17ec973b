"""What to call a module, and where a call came from, in messages; reads the tree and the stack, and changes neither."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Final

from torch import nn

from composable.errors import AnnotationError, describe_module

# For each naming() that is open, outermost first: the FQN of every module below its root, by the module's id.
_open: ContextVar[tuple[dict[int, str], ...]] = ContextVar("names_in_use", default=())

_LIBRARIES: Final = ("composable", "torch")
_USERS_OWN: Final = "composable.demo"  # written as a user would write it


@contextmanager
def naming(root: nn.Module) -> Iterator[None]:
    """Within the block, modules below `root` are called by their FQN in messages and records.

    Example::

        with naming(model):
            for module, overrides in policy.select(model).items():
                my_verb(module, **overrides)
    """
    names = {id(module): name for name, module in root.named_modules()}
    token = _open.set((*_open.get(), names))
    try:
        yield
    finally:
        _open.reset(token)


def known_fqn(module: nn.Module) -> str | None:
    """The FQN of `module` under the outermost `naming` that has it; None where there is none."""
    return next((names[id(module)] for names in _open.get() if id(module) in names), None)


def find_fqn(module: nn.Module) -> str | None:
    """The FQN of `module`, from an open `naming` or else from a model that the caller holds; None if neither has it.

    This looks through the local and global variables of the calling code, so it is for messages of errors only.
    """
    fqn = known_fqn(module)
    if fqn:
        return fqn
    # A module that is the root of an open naming may well have a name in a model around it.
    for frame in _users_frames():
        held = [value for scope in (frame.f_locals, frame.f_globals) for value in list(scope.values())]
        names: list[str] = [
            name
            for root in held
            if issubclass(type(root), nn.Module) and root is not module  # proxies answer isinstance by loading
            for name, below in root.named_modules()
            if below is module
        ]
        if names:
            return max(names, key=len)  # as seen from the outermost of the models that are held
    return fqn


def module_name(module: nn.Module, fqn: str | None = None) -> str:
    """`'layers.3'` when the FQN is given or can be found, else the name of the class: `Block`."""
    fqn = fqn or find_fqn(module)
    return f"'{fqn}'" if fqn else type(module).__name__


def require_callable(module: nn.Module, *, so: str = "its parameters cannot be gathered around one") -> None:
    """Refuse a container that has no forward of its own; subclasses of containers that have one are fine.

    Args:
        so: what follows from having no forward, for the message.

    Raises:
        AnnotationError: `module` cannot be called.
    """
    forward: Callable[..., object] = type(module).forward
    if forward is nn.Module.forward and "forward" not in vars(module):
        what = describe_module(module, find_fqn(module))
        raise AnnotationError(f"{what} has no forward, so {so}; annotate its children, or pass policy=")


def calling_site() -> str:
    """File and line of the call that led here from outside the libraries, as in `train.py:41`."""
    for frame in _users_frames():
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return "an unknown place"


def _users_frames() -> Iterator[FrameType]:
    """The frames on the stack that belong to no library, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _within(name, _USERS_OWN) or not any(_within(name, library) for library in _LIBRARIES):
            yield frame
        frame = frame.f_back


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
