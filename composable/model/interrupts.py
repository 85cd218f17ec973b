"""Whether a call of a module is still under way, and who is told when one ends without a word; knows no annotation.

Note [Calls that end without a word]
torch tells forward hooks of exceptions, but not of `KeyboardInterrupt` and the like. Two things tell of those. What a pre-hook
returns is held by the frame that called it: when the frame goes, so does that, and whoever made it is told; this is where most
interrupted calls are cleaned up, as soon as the exception has been handled. And whoever comes to a module whose last call was
not closed looks whether that call is still on the stack; this needs nobody to let go of anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from composable.compilation import untraced


@untraced
def calls_of(module: nn.Module) -> int:
    """How many calls of `module` are under way on this thread's stack."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if frame.f_code.co_name == "_call_impl":
            calls += frame.f_locals.get("self") is module
        elif frame.f_code.co_name == "call_bracketed":
            calls += frame.f_locals.get("module") is module
        frame = frame.f_back
    return calls


class Inputs(tuple[Any, Any]):
    """What a pre-hook returns: positional and keyword arguments. See Note [Calls that end without a word]."""

    when_gone: Callable[[], None] | None = None

    @untraced
    def __del__(self) -> None:
        if self.when_gone is not None:
            self.when_gone()
