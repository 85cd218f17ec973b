"""Refuses `DistributedDataParallel` around modules that average their gradients themselves; knows no gradient.

Note [A second average]
Trainers wrap whatever they are given: accelerate's `prepare`, and with it the Trainer of transformers. Of gradients that two
average some are divided twice, and nobody says so. DDP looks for a list of names to ignore on the module that it is given; what
stands there instead refuses to be read, so that the call that wraps is the one that fails. A wrapper around a module *above*
ours reads no such list, so each call of a replicated module asks, too. A wrapper that was there before is found at annotation:
where ours is around its forward, each call would ask before the wrapper runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable.device.private import active_ddp
from composable.errors import ClashError
from composable.model.traversal import ManagedParameter

_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"  # on a module: the names that DDP leaves alone


def _refused(verb: str, module: str) -> ClashError:
    return ClashError(
        f"DistributedDataParallel around {module}: {verb} averages its gradients already, and they would be averaged twice. "
        "Do not wrap it: train the module as it is. With accelerate, prepare it by accelerator.prepare_model(model, "
        "evaluation_mode=True), which does not wrap"
    )


class _Unreadable:
    """In place of names to ignore."""

    def __init__(self, verb: str, module: str) -> None:
        self._verb = verb
        self._module = module

    def __iter__(self) -> Iterator[str]:
        raise _refused(self._verb, self._module)


def refuse_wrapping(module: nn.Module, verb: str) -> Callable[[], None]:
    """Let `DistributedDataParallel(module)` raise; returns the inverse. Names that the user gave DDP to ignore stay."""
    if _IGNORED in vars(module):
        return _nothing
    setattr(module, _IGNORED, _Unreadable(verb, f"this {type(module).__name__}"))

    def undo() -> None:
        vars(module).pop(_IGNORED, None)

    return undo


def refuse_wrapped(modules: Sequence[nn.Module], verb: str, parameters: Sequence[ManagedParameter]) -> None:
    """Raise when a wrapper on or below `modules` averages what `verb` is about to take.

    Raises:
        ClashError: the module of the wrapper has been wrapped before it is annotated.
    """
    managed = {id(each.parameter): None for each in parameters}
    for module in modules:
        for fqn, wrapper in module.named_modules():
            if isinstance(wrapper, DistributedDataParallel) and any(id(p) in managed for p in _averaged_by(wrapper)):
                where = f"'{fqn}' is" if fqn else "the module is"
                raise ClashError(
                    f"{verb}: {where} a DistributedDataParallel already, and gradients would be averaged twice. Do not wrap: "
                    f"annotate the {type(wrapper.module).__name__} in its place"
                )


def _averaged_by(wrapper: nn.Module) -> list[nn.Parameter]:
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
        raise _refused(verb, f"unit '{name}' ({type(module).__name__})")


def _nothing() -> None:
    return None
