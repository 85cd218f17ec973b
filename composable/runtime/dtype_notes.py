"""Names what has another dtype than its unit computes in, where a forward fails for that; changes an error's notes alone."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType
from typing import Final

import torch
from torch import nn

_SAID: Final = ("scalar type", "dtype")  # by torch's operators, where dtypes do not go together
_BUFFER: Final = (
    "Give MixedPrecisionPolicy buffer_dtype='{dtype}', or let the module keep its dtype with full_precision_classes=({kind},)"
)
_PARAMETER: Final = "It is not the unit's, so nothing casts it: do not ignore it, or cast what meets it in forward"


def note_of_dtypes(error: BaseException | None, module: nn.Module, low: torch.dtype | None, unit: str) -> None:
    """Add a note to an operator's complaint of dtypes: which buffer or parameter on the way to it is not in the unit's.

    A hook after a forward that raised cannot raise anything else.

    Args:
        error: what the forward of `module` raised.
        low: the dtype that its unit computes in; None: in that of its parameters.
    """
    if low is None or not isinstance(error, RuntimeError) or not any(words in str(error) for words in _SAID):
        return
    if any("computes in" in note for note in getattr(error, "__notes__", ())):
        return  # of a unit inside
    names = {id(below): name for name, below in module.named_modules()}
    for frame, _ in [*walk_tb(error.__traceback__)][::-1]:
        owner = _module_of(frame)
        if owner is None or id(owner) not in names:
            continue
        for kind, name, dtype in _others(owner, low):
            fqn = f"{names[id(owner)]}.{name}" if names[id(owner)] else name
            short = str(low).removeprefix("torch.")
            here = type(owner).__name__
            advice = _BUFFER.format(dtype=short, kind=here) if kind == "buffer" else _PARAMETER
            error.add_note(f"{kind} '{fqn}' of a {here} is {dtype}, where unit '{unit}' computes in {low}. {advice}")
            return


def _module_of(frame: FrameType) -> nn.Module | None:
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return first if isinstance(first, nn.Module) else None


def _others(module: nn.Module, low: torch.dtype) -> Iterator[tuple[str, str, torch.dtype]]:
    """What the module itself holds in another floating-point dtype, as it is seen there."""
    for kind, named in (("buffer", module.named_buffers(recurse=False)), ("parameter", module.named_parameters(recurse=False))):
        for name, _ in named:
            tensor = getattr(module, name)
            if tensor.is_floating_point() and tensor.dtype != low:
                yield kind, name, tensor.dtype
