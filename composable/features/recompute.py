"""Activation checkpointing of one module, as a bracket around its forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from composable.compilation import call_compiled, running_compiler, untraced, untraced_alone
from composable.features.activations import recomputing
from composable.torch_private import checkpoint_generator

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class RecomputeOptions(NamedTuple):
    """What `torch.utils.checkpoint.checkpoint` takes, by the same names."""

    preserve_rng_state: bool
    context_fn: Contexts | None
    determinism_check: str
    debug: bool
    early_stop: bool


class RecomputeBracket:
    """Saves a module's inputs only, and runs its forward again when backward asks for the rest.

    The second run goes through the module's hooks again, but for this bracket: the annotations
    around it see it.
    """

    def __init__(self, options: RecomputeOptions) -> None:
        self._options = options._replace(context_fn=options.context_fn or noop_context_fn)
        self._open: list[Any] = []  # generators of forwards that are under way, innermost last
        self._recomputing = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": [], "_recomputing": 0}

    @untraced_alone
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._recomputing:
            self._begin(module, args, kwargs, running_compiler())
        return args, kwargs

    @untraced
    def _begin(self, module: nn.Module, args: Any, kwargs: Any, compiler: Any) -> None:
        generator = checkpoint_generator(
            partial(self._again, module, compiler), *self._options, *args, **kwargs
        )
        self._open.append(generator)
        next(generator)

    @untraced
    def _again(self, module: nn.Module, compiler: Any, *args: Any, **kwargs: Any) -> None:
        self._recomputing += 1
        statistics = _hide_statistics(module)
        try:
            with recomputing(module):
                call_compiled(compiler, module, args, kwargs)
        finally:
            for norm, name, buffer in statistics:
                norm._buffers[name] = buffer
            self._recomputing -= 1

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if not self._recomputing:
            with suppress(StopIteration):
                next(self._open.pop())
        return output

    def on_error(self, module: nn.Module) -> None:
        if not self._recomputing and self._open:
            self._open.pop().close()


def _hide_statistics(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Let norms that train count into clones while they run again: each batch counts once.

    What the second run counts cannot be written back: autograd has saved the statistics, and would
    notice.
    """
    hidden = []
    for norm in module.modules():
        if (
            "running_mean" in norm._buffers
            and norm.training
            and getattr(norm, "track_running_stats", True)
        ):
            for name, buffer in norm._buffers.items():
                if buffer is not None:
                    hidden.append((norm, name, buffer))
                    norm._buffers[name] = buffer.clone()
    return hidden
