"""Activation checkpointing of one module as a bracket; knows nothing of parameters and shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointError, noop_context_fn

from composable.compilation import call_compiled, running_compiler, untraced, untraced_alone
from composable.device.private import checkpoint_generator, explain_mismatches
from composable.device.running_statistics import RunningStatistics
from composable.model.contract import registry
from composable.model.naming import module_name
from composable.runtime.open_forwards import OpenForwards

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class RecomputeOptions:
    """What `torch.utils.checkpoint.checkpoint` takes, by the same names."""

    preserve_rng_state: bool
    context_fn: Contexts | None
    determinism_check: str
    debug: bool
    early_stop: bool


_recomputed: list[nn.Module] = []  # that run again now, innermost last


def is_recomputed(module: nn.Module) -> bool:
    """Whether a checkpointed module runs again, itself and not only as a part of another one."""
    return any(module is other for other in _recomputed)


def _explain(module: nn.Module, error: BaseException) -> None:
    """Say in a note whose second run torch complains of."""
    if not any("run again" in note for note in getattr(error, "__notes__", ())):  # by a module inside
        applied = registry(module).get("checkpoint")
        name = f"{module_name(module, applied.fqn if applied else None)} ({type(module).__name__})"
        error.add_note(
            f"checkpoint: forward of {name} was run again in backward, and did not do what it had done before. It must "
            "not depend on what it changes itself, or on anything that has changed since. "
            "checkpoint(module, debug=True) shows the operators of both runs"
        )


class RecomputeBracket:
    """Saves nothing of a module's forward but its inputs, and runs forward again when backward asks for the rest.

    The second run goes through the module's hooks again, all but this bracket: annotations outside it see it happen.
    """

    outermost = True

    def __init__(self, options: RecomputeOptions) -> None:
        self.options = options
        self._forwards = OpenForwards()
        self._recomputing = 0
        self._statistics = RunningStatistics()

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_forwards": OpenForwards(), "_recomputing": 0, "_statistics": RunningStatistics()}

    @untraced_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._recomputing:
            self._open(module, args, kwargs, running_compiler())
        return args, kwargs

    @untraced
    def _open(self, module: nn.Module, args: Any, kwargs: Any, compiler: Any) -> None:
        options = self.options
        generator = checkpoint_generator(
            partial(self._again, module, compiler),
            (
                options.preserve_rng_state,
                options.context_fn or noop_context_fn,
                options.determinism_check,
                options.debug,
                options.early_stop,
            ),
            args,
            kwargs,
        )
        self._forwards.enter(generator)
        explain_mismatches(generator, partial(_explain, module))

    @untraced
    def _again(self, module: nn.Module, compiler: Any, *args: Any, **kwargs: Any) -> None:
        self._recomputing += 1
        before, counted = len(_recomputed), self._statistics.cloned
        _recomputed.append(module)
        try:
            self._statistics.show_clones(module)
            call_compiled(compiler, module, args, kwargs)
        except CheckpointError as error:
            _explain(module, error)
            raise
        finally:
            self._statistics.restore(counted)
            del _recomputed[before:]
            self._recomputing -= 1

    def leave(self, module: nn.Module, output: Any) -> Any:
        if not self._recomputing:
            self._forwards.leave()
        return output

    def on_error(self, module: nn.Module) -> None:
        if not self._recomputing:
            self._forwards.close()

    @untraced
    def on_interrupt(self) -> None:
        self._recomputing = 0
        self._statistics.restore(0)
        self._forwards.close_all()
