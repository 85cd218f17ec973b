"""Our hooks on parameters, which autograd calls when a gradient is there; knows neither units nor buckets.

Note [Hooks on parameters hold nothing]
A parameter holds the hooks that wait for its gradient where Python's collector does not look. A hook that leads back to its
parameter, by however many steps, keeps both alive for good, and with them the whole model. So such hooks refer weakly to
what they call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composable.compilation import untraced


def call_when_accumulated(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Let autograd call `hook` with `parameter` when a backward has added to its gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of a bound method that keeps its object from nothing; nothing happens once that is gone.

    See Note [Hooks on parameters hold nothing].
    """
    assert isinstance(method, MethodType)
    reference, function = ref(method.__self__), method.__func__

    @untraced
    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            function(found, *args)

    return call


class Watch:
    """Calls at a gradient that nobody expects. Those that are expected launch nothing: see Note [Launch points]."""

    __slots__ = ("_at_share", "_call", "_left", "expecting")

    def __init__(self, call: Callable[[], None]) -> None:
        self.expecting = False
        self._call = weakly(call)
        self._left = 0
        self._at_share = self._call

    def count(self, nbytes: int, at_share: Callable[[], None]) -> None:
        """Call `at_share`, which must hold nothing that leads here, once so much of what is expected has arrived."""
        self._at_share = at_share
        self._left = nbytes

    @untraced
    def arrived(self, parameter: Tensor) -> None:
        """Autograd finished one parameter's gradient. Runs for every parameter: most calls do nothing."""
        if not self.expecting:
            self._call()
        elif self._left > 0:
            self._left -= parameter.nbytes
            if self._left <= 0:
                self._at_share()
