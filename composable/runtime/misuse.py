"""How a parameter came to be used while only its shard exists, in words for messages; changes nothing but an error's notes."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator, Sequence
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Final

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from composable.errors import ShardedParameterError
from composable.runtime.handle import Handle

_CALLING: Final = ("_call_impl", "_wrapped_call_impl", "__call__", "inner")  # how torch calls a module
_MIXED: Final = "got mixed torch.Tensor and DTensor"  # what DTensor says when it meets a plain tensor


def _method_on_stack(modules: Sequence[nn.Module]) -> str:
    """The outermost method of one of `modules` that is running; empty when none is."""
    found = ""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        code = frame.f_code
        owner = _first_argument(frame)
        if code.co_name not in _CALLING and any(owner is module and _is_method(module, code) for module in modules):
            found = code.co_name
        frame = frame.f_back
    return found


def outside_of_a_call(handle: Handle, modules: Sequence[nn.Module], inside: nn.Module) -> ShardedParameterError:
    """What to raise when `inside`, which has a parameter of the unit of `modules`, is called, and none of these is."""
    infos = [param.info for param in handle.parameters.params]
    name = next((info.fqn for info in infos if any(place.module is inside for place in info.places)), "")
    method = _method_on_stack(modules)
    here = type(modules[0]).__name__
    if method == "forward":
        advice = "call model(x), not model.forward(x), or register_forward_method(model, 'forward')"
    elif method:
        advice = f"{here}.{method} is not a forward: call register_forward_method(module, '{method}') first"
    elif isinstance(inside, ParametrizationList):
        advice = (
            f"it is a parametrization's, which computes whenever its result is read: read that in a forward of the annotated "
            f"module ({here}), or, to remove the parametrization, call remove(module, fully_shard) first"
        )
    else:
        advice = f"call the annotated module ({here}) itself, or annotate '{name.rpartition('.')[0]}' as a unit"
    return ShardedParameterError(
        f"parameter '{name}' of unit '{handle.name}' is sharded and was used outside a forward call; {advice}"
    )


def _first_argument(frame: FrameType) -> object:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _is_method(module: nn.Module, code: CodeType) -> bool:
    """Whether `code` is a method of the module's class, and not some function that takes a module first."""
    defined = [vars(cls)[code.co_name] for cls in type(module).__mro__ if code.co_name in vars(cls)]
    return any(getattr(inspect.unwrap(function), "__code__", None) is code for function in defined if callable(function))


def note_of_mixing(error: BaseException | None, handles: Sequence[Handle]) -> None:
    """Add a note in our words to DTensor's complaint that it met a plain tensor, if a sharded parameter was the DTensor.

    A hook after a forward that raised cannot raise anything else.

    Args:
        error: what a forward raised.
        handles: of the units whose parameters were at rest.
    """
    if not isinstance(error, RuntimeError) or _MIXED not in str(error):
        return
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)][::-1]
    at_rest = {
        id(param.sharded): (handle, param.info.fqn, param.info.places[0].module)
        for handle in handles
        for param in handle.parameters.params
    }
    for frame, line in frames:
        found = at_rest.get(next(_ids_among(frame, at_rest), 0)) or _named_in(frame, line, list(at_rest.values()))
        if found is not None:
            error.add_note(_explanation(*found, _reader([frame for frame, _ in frames], found[2])))
            return


Found = tuple[Handle, str, nn.Module]


def _ids_among(frame: FrameType, wanted: dict[int, Found]) -> Iterator[int]:
    return (id(value) for value in frame.f_locals.values() if id(value) in wanted)


def _named_in(frame: FrameType, line: int, candidates: Sequence[Found]) -> Found | None:
    """The parameter below the frame's module whose name the failing line spells, as in `self.conv1d.weight`.

    Where there is no source to read, its function says which names it uses.
    """
    owner = _first_argument(frame)
    if not isinstance(owner, nn.Module):
        return None
    text = linecache.getline(frame.f_code.co_filename, line)
    names = frame.f_code.co_names
    below = {id(module): name for name, module in owner.named_modules()}
    for handle, name, module in candidates:
        if id(module) not in below:
            continue
        path = f"{below[id(module)]}.{name.rpartition('.')[2]}"
        if path in text if text else all(part in names or part.isdigit() for part in path.split(".")):
            return handle, name, module
    return None


def _reader(frames: Sequence[FrameType], owner: nn.Module) -> str:
    """The class of the innermost module that was computing and holds `owner`."""
    for frame in frames:
        reader = _first_argument(frame)
        if isinstance(reader, nn.Module) and reader is not owner and any(below is owner for below in reader.modules()):
            return type(reader).__name__
    return ""


def _explanation(handle: Handle, name: str, owner: nn.Module, reader: str) -> str:
    fqn = f"{handle.fqn}.{name}" if handle.fqn else name
    who = reader or "module"
    return (
        f"parameter '{fqn}' of unit '{handle.name}' ({type(owner).__name__}) is sharded, and a {who} read it outside of a call "
        f"of that unit: it is whole only inside of one. Annotate the {who} that reads it as the unit, in place of "
        f"'{handle.name}'; with a policy, leave that one out"
    )
