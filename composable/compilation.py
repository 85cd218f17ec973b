"""Mark functions that torch.compile must not trace, and find the module inside a compiled wrapper.

Private parts of torch.compile are used only in this file. All of them exist in torch 2.11.0, 2.13.0
and 2.14.1.

Note [Between graphs]
Our callbacks move memory, count and communicate with other ranks. They must run uncompiled, between
compiled graphs. Dynamo, which traces Python for torch.compile, meets a function in two ways. If it
finds a call of the function while it traces the caller, an attribute of the function decides. If
untraced code calls the function, the interpreter asks Dynamo before it runs the frame; a mark on
the function's code then decides, for this frame and the frames below it. `torch.compiler.disable`
sets the attribute, but uses a wrapper instead of the mark. A wrapper costs 0.8 us in every call,
also in models that are not compiled, and creating it imports Dynamo, which takes a second. Marks
cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_WHY: Final = (
    "composable gathers parameters and reduces gradients between compiled graphs; fullgraph=True"
    " can hold what is inside one annotated module: for block in model.blocks:"
    " block.compile(fullgraph=True)"
)
_frames: Final[Any] = torch._C._dynamo.eval_frame


def untraced(function: F) -> F:
    """Let torch.compile run `function`, and all that it calls, as it is."""
    return _mark(function, callees="SKIP")


def untraced_alone(function: F) -> F:
    """Let torch.compile run `function` as it is, and see what it calls."""
    return _mark(function, callees="DEFAULT")


def traceable(function: F) -> F:
    """Let torch.compile see what `function` does where it traces a call of it, and run it as it is
    where code calls it.
    """
    return _mark_code(function, callees="DEFAULT")


def _mark_code(function: F, callees: str) -> F:
    strategy = _frames._FrameExecStrategy(
        _frames._FrameAction.SKIP, _frames._FrameAction.__members__[callees]
    )
    _frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def _mark(function: F, callees: str) -> F:
    _mark_code(function, callees)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    return function


# What compiles the frames that this thread is about to run; None where nothing does. Known inside
# `untraced_alone` only.
running_compiler: Final[Callable[[], Any]] = _frames.get_eval_frame_callback


def call_compiled(compiler: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` with `compiler` at work: what runs twice must be compiled both times, or
    neither.

    A call from inside a backward is outside of the compiled region that called forward, and there
    is no public way back in.
    """
    if compiler is None:
        return function(*args, **kwargs)
    prior = _frames.set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        _frames.set_eval_frame(prior)


def is_traced() -> bool:
    """Whether torch.compile traces now, for code that it asks while it does, not what it traces.

    `torch.compiler.is_compiling` says so from torch 2.13 on.
    """
    guards = sys.modules.get("torch._guards")
    return torch.compiler.is_compiling() or (
        guards is not None and guards.CompileContext.try_get() is not None
    )


def backward_is_compiled() -> bool:
    """Whether compiled autograd runs the backward that this is called in. There is no public way to
    ask.
    """
    return getattr(
        sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False
    )


def backward_will_be_compiled() -> bool:
    """Whether compiled autograd would run a backward that began here."""
    return getattr(
        sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False
    )


def unwrapped(module: Any) -> Any:
    """The module itself, if `module` is what `torch.compile` returned for it; of a list, its
    members.
    """
    if type(module) in (list, tuple):
        return type(module)(map(unwrapped, module))
    dynamo = sys.modules.get("torch._dynamo")
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def drop_compiled() -> None:
    """Let everything be compiled anew: graphs do not notice hooks that come later, and would
    compute without them.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    # Dynamo may be here and idle, since optimizers import it. To reset it then would import
    # inductor, which takes seconds.
    if frames is not None and frames.input_codes.seen:
        torch.compiler.reset()
