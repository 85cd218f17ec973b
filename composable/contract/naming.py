"""Names in messages, and the checks of a verb's call: its target, its keywords, and the FQNs it
must not change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, MappingProxyType
from typing import Any, Final

from torch import nn

from composable.compilation import unwrapped
from composable.errors import (
    AnnotationError,
    NamesChangedError,
    describe_module,
    few,
)

# The FQN of every module below the root of an open `naming()`, by the module's id.
_names: ContextVar[Mapping[int, str]] = ContextVar("composable_names", default=MappingProxyType({}))

_LIBRARIES: Final = ("composable.", "torch.")


# --- names of modules ---------------------------------------------------------------------------


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
    """The FQN of `module` for an error message, or None: from an open `naming`, or from a model in
    the variables of the calling code. The search is slow.
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
    """`'layers.3'` if the FQN is given or can be found, otherwise the name of the class:
    `Block`.
    """
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


# --- the call of a verb -------------------------------------------------------------------------


def modules_of(verb: str, target: Any) -> tuple[nn.Module, ...]:
    """The modules that `target`, a module or a list of modules, stands for; without wrappers of
    torch.compile.
    """
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
    """Refuse a container without a forward of its own, such as a plain `nn.ModuleList`; `so` says
    what follows from that.
    """
    if not has_forward(module):
        what = describe_module(module, find_fqn(module))
        raise AnnotationError(
            f"{what} has no forward, so {so}; annotate its children, or pass policy="
        )


# --- names that a verb must keep ----------------------------------------------------------------


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
        start = next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        old, new = old[start:], new[start:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        raise NamesChangedError(
            f"{verb} changed the names of {kind} in {module_name(root)}, or their order; before: "
            f"{few(old) or 'nothing'}; after: {few(new) or 'nothing'}. It was taken back"
        )
