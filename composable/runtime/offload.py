"""Offload of one module's activations as a bracket; knows nothing of streams, copies and shards.

Note [Offload and recomputation]
Autograd gives what it saves to the innermost hooks alone. Checkpointing inside of an offloaded module saves inputs only, and
these leave the device. An offloaded module inside of a checkpointed one keeps its activations on the host, and what is around
it is recomputed. Where both are on one module, offload is outside: what checkpointing computes again is for itself, so the
bracket stands aside then.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from composable.compilation import untraced
from composable.device.saved_tensors import Savings, restore
from composable.device.streams import any_has_streams
from composable.runtime.open_forwards import OpenForwards
from composable.runtime.recompute import is_recomputed


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """What leaves the device, and whereto."""

    min_bytes: int
    pin_memory: bool


def _held_below(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@untraced
def _saving(savings: Savings) -> Generator[None, None, None]:
    with saved_tensors_hooks(savings.save, restore):
        yield


class OffloadBracket:
    """Lets autograd save copies on the host of what a module's forward makes.

    Args:
        name: of the module, for messages of errors.
    """

    outermost = True

    def __init__(self, options: OffloadOptions, name: str) -> None:
        self.options = options
        self.name = name
        self._forwards = OpenForwards()

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "name": self.name, "_forwards": OpenForwards()}

    @untraced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if any_has_streams() and not is_recomputed(module):
            savings = Savings(
                partial(_held_below, module),
                self.name,
                min_bytes=self.options.min_bytes,
                pin_memory=self.options.pin_memory,
            )
            self._forwards.enter(_saving(savings))
        return args, kwargs

    @untraced
    def leave(self, module: nn.Module, output: Any) -> Any:
        if self._forwards and not is_recomputed(module):
            self._forwards.leave()
        return output

    @untraced
    def on_error(self, module: nn.Module) -> None:
        if not is_recomputed(module):
            self._forwards.close()

    @untraced
    def on_interrupt(self) -> None:
        self._forwards.close_all()
