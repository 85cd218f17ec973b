"""Refuses wrappers and verbs of torch's around modules that average their gradients themselves; knows no gradient.

Note [A second average]
Trainers wrap whatever they are given: accelerate's `prepare`, and with it the Trainer of transformers. Of gradients that two
average some are divided twice, and nobody says so. DDP looks for a list of names to ignore on the module that it is given; what
stands there instead refuses to be read, so that the call that wraps is the one that fails. A wrapper around a module *above*
ours reads no such list, so each call of a replicated module asks, too. A wrapper that was there before is found at annotation:
where ours is around its forward, each call would ask before the wrapper runs.
torch's own verbs (`fully_shard`, two called `replicate`) and `FullyShardedDataParallel` look for notes of each other on
modules. What stands there instead refuses the verb on the module itself; from further above they leave the module and all below
it alone, as they do with each other's, and both train what is theirs.
Modules inside hold our parameters, too, and are marked alike. A copy of such a one alone is nobody's: it is not marked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composable.device.parameter_swap import Place
from composable.device.private import NAMES_OF_VERBS, STATES_OF_VERBS, active_ddp, flattened_by_torch
from composable.errors import ClashError
from composable.model.traversal import ManagedParameter

_DDP: Final = "DistributedDataParallel"
_TORCHS: Final = ("fully_shard", "replicate")  # verbs that average
_FRAMES: Final = 8  # further away nobody asks
_TWICE: Final = "and gradients would be averaged twice"
_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"  # on a module: the names that DDP leaves alone


def _refused(wrapper: str, verb: str, module: str) -> ClashError:
    cure = "train the module as it is"
    if wrapper == _DDP:
        cure += ". With accelerate, prepare it by accelerator.prepare_model(model, evaluation_mode=True), which does not wrap"
    else:
        cure += f", or call remove(module, {verb}) before"
    return ClashError(
        f"{wrapper} around {module}: {verb} averages its gradients already, and they would be averaged twice. "
        f"Do not wrap it: {cure}"
    )


class _Unreadable:
    """In place of names to ignore."""

    def __init__(self, verb: str, module: str, travels: bool) -> None:
        self._verb = verb
        self._module = module
        self._travels = travels

    def __iter__(self) -> Iterator[str]:
        raise _refused(_DDP, self._verb, self._module)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Unreadable, (self._verb, self._module, True)) if self._travels else (list, ())


def _refuse_torch(verb: str, module: str, name: str) -> None:
    raise _refused(f"torch's {name}", verb, module)


def refuse_wrapping(modules: Sequence[nn.Module], verb: str, places: Sequence[Place]) -> Iterator[Callable[[], None]]:
    """Let `DistributedDataParallel` and torch's verbs raise on `modules`, and on those inside that hold parameters.

    Yields:
        what takes it back, one after the other.
    """
    inside = {id(place.module): place.module for place in places}
    for module in modules:
        inside.pop(id(module), None)
        yield _mark(module, verb, annotated=True)
    for module in inside.values():
        yield _mark(module, verb, annotated=False)


def _mark(module: nn.Module, verb: str, *, annotated: bool) -> Callable[[], None]:
    """Let all that average on `module` raise; returns the inverse. Names that the user gave DDP to ignore stay."""
    said = f"this {type(module).__name__}"
    undo_notes = _keep_from_torch(module, partial(_refuse_torch, verb, said), travels=annotated)
    if _IGNORED in vars(module):
        return undo_notes
    setattr(module, _IGNORED, _Unreadable(verb, said, annotated))

    def undo() -> None:
        vars(module).pop(_IGNORED, None)
        undo_notes()

    return undo


def refuse_wrapped(modules: Sequence[nn.Module], verb: str, parameters: Sequence[ManagedParameter]) -> None:
    """Raise when something of torch's, on or below `modules`, averages what `verb` is about to take.

    Raises:
        ClashError: the module has been wrapped before it is annotated.
    """
    managed = {id(each.parameter): None for each in parameters}
    for module in modules:
        for fqn, below in module.named_modules():
            wrapper = _wrapper_on(below)
            if wrapper is None or not any(id(p) in managed for p in _averaged_by(below)):
                continue
            where = f"'{fqn}'" if fqn else "the module"
            if wrapper == _DDP:
                inside = type(below.get_submodule("module")).__name__
                said = f"is a {wrapper} already, {_TWICE}. Do not wrap: annotate the {inside} in its place"
            else:
                said = f"is managed by torch's {wrapper} already, {_TWICE}. Leave one of the two out"
            raise ClashError(f"{verb}: {where} {said}")
        for fqn, parameter in module.named_parameters():
            if id(parameter) in managed and flattened_by_torch(parameter):
                raise ClashError(
                    f"{verb}: parameter '{fqn}' is managed by torch's FullyShardedDataParallel already, {_TWICE}. Leave one of "
                    "the two out"
                )


def _wrapper_on(module: nn.Module) -> str | None:
    """What of torch's was applied to `module` itself."""
    if isinstance(module, DistributedDataParallel):
        return _DDP
    return next((name for name in _applied_by_torch(module) if name in _TORCHS), None)


def _averaged_by(wrapper: nn.Module) -> list[nn.Parameter]:
    if not isinstance(wrapper, DistributedDataParallel):
        shards = "fully_shard" in _applied_by_torch(wrapper)
        return [parameter for parameter in wrapper.parameters() if isinstance(parameter, DTensor) or not shards]
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    inside = wrapper.get_submodule("module")
    return [parameter for fqn, parameter in inside.named_parameters() if fqn not in ignored]


def refuse_inside(module: nn.Module, verb: str, name: str, parameters: Collection[nn.Parameter]) -> None:
    """Raise when the forward of a wrapper around `module` is running, and it has not been told to ignore `parameters`.

    Raises:
        ClashError: DDP would average them, too.
    """
    wrapper = active_ddp()
    if wrapper is None:
        return
    taken = {id(p): None for p in _averaged_by(wrapper)}
    if any(id(parameter) in taken for parameter in parameters):
        raise _refused(_DDP, verb, f"unit '{name}' ({type(module).__name__})")


# --- torch's own verbs ----------------------------------------------------------------------------------------------------


def _applied_by_torch(module: nn.Module) -> tuple[str, ...]:
    """The names of torch's own verbs that were applied to `module`."""
    return tuple(vars(module).get(NAMES_OF_VERBS, ())) if NAMES_OF_VERBS is not None else ()


def _asked_by_fsdp1(note: object) -> bool:
    """Whether a `FullyShardedDataParallel` asks that is being made around the module with `note`. It asks all modules below in
    the same way, and some functions that only read ask so, too."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            break
        seen = frame.f_locals
        if frame.f_code.co_name == "__init__" and type(seen.get("self")).__name__ == "FullyShardedDataParallel":
            wrapped = seen.get("module")
            return isinstance(wrapped, nn.Module) and any(held is note for held in vars(wrapped).values())
        frame = frame.f_back
    return False


class _Note(dict[Any, Any]):
    """What torch's verbs keep about a module. One that is about to be applied looks itself up in it, by its function first.
    One that is applied further above looks for the name of the other, and leaves the module alone, and all below it."""

    def __init__(self, held: Mapping[Any, Any], refuse: Callable[[str], None], travels: bool) -> None:
        super().__init__(held)
        self._refuse = refuse
        self._travels = travels

    def __contains__(self, verb: object) -> bool:
        name = getattr(verb, "__name__", None)
        if name in _TORCHS:
            self._refuse(name)
        if verb in _TORCHS and _asked_by_fsdp1(self):
            self._refuse("FullyShardedDataParallel")
        return verb in _TORCHS or super().__contains__(verb)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Note, (dict(self), self._refuse, True)) if self._travels else (dict, (dict(self),))


def _keep_from_torch(module: nn.Module, refuse: Callable[[str], None], *, travels: bool) -> Callable[[], None]:
    """Let torch's `fully_shard`, `replicate` and `FullyShardedDataParallel`, applied further above, leave `module` and all
    below it alone; returns the inverse.

    Args:
        refuse: called with the name of a verb of torch's that is about to be applied to `module` itself. May raise.
        travels: whether all this holds for copies of the module, too.
    """
    held = vars(module)
    if STATES_OF_VERBS is None or NAMES_OF_VERBS is None or isinstance(held.get(STATES_OF_VERBS), _Note):
        return _nothing
    keys = (STATES_OF_VERBS, NAMES_OF_VERBS)
    before = {key: held.get(key) for key in keys}
    for key in keys:
        held[key] = _Note(before[key] or {}, refuse, travels)

    def undo() -> None:
        for key in keys:
            content = dict(held.get(key, ()))  # with what else was applied in the meantime
            held.pop(key, None)
            if content or before[key] is not None:
                held[key] = content

    return undo


def _nothing() -> None:
    return None
