"""One reduction that a hook of the user's makes, in place of a collective; knows no gradient, and not what follows.

Note [When hooks are called]
On an accelerator a hook is called where the sum would be launched: what it launches goes on by itself, in the order of the
calls, and backward runs meanwhile. On a host that would not do. Hooks that go on when a first collective is there do so on
threads of the backend, so the next bucket's collective and the second one of this bucket would come in an order that differs
from rank to rank; and a backward that raises on one rank would leave the others in a collective that nobody can take back. So
there hooks are called at the end of backward, one after the other, when all ranks have said to each other that they have come
to it (`Start`), and each is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from composable.device.collectives import Communicator, HookGroup, ScaledInput, TagSequence
from composable.device.comm_hooks import CommHook, GradientBucketForHooks
from composable.errors import ComposableError
from composable.runtime.hop import Hop

_NOTHING: Final = object()  # in place of what a hook returned
_NOWHERE: Final = torch.empty(0, device="cpu")


class Start:
    """What all ranks say to each other before a backward's hooks are called: numbers, and whether the hooks' group is lost.

    Attributes:
        check: raises if the numbers, summed, say that hooks must not be called.
    """

    __slots__ = ("_group", "_hop", "_message", "_numbers", "_reads_freely", "check")

    def __init__(self, communicator: Communicator, group: HookGroup) -> None:
        self._hop = Hop(communicator)
        self._group = group
        self.check: Callable[[Tensor], None] = _accept
        self._reads_freely = communicator.capabilities.reads_freely
        self._numbers = self._message = _NOWHERE

    def launch(self, numbers: Tensor, label: str, tags: TagSequence | None = None) -> None:
        """Say them."""
        self._numbers = numbers
        self._message = torch.cat([numbers, numbers.new_full((1,), float(self._group.lost))])
        self._hop.all_reduce(self._message, f"{label}: who has gradients", tags=tags)

    def wait(self) -> None:
        """All have said theirs: `numbers` are the sum."""
        if not self._hop.in_flight:
            return
        self._hop.wait()
        self._numbers.copy_(self._message[:-1])
        if self._reads_freely:
            self.check(self._numbers)
            if self._message[-1]:
                self._group.renew()

    def abort(self) -> None:
        self._hop.abort()


class HookedHop:
    """A `Hop` whose sum a hook makes.

    Args:
        start: common to all hops of one backward.
        says: what this one says there; nothing if another one does.
        bucket_of: what the hook is handed, from a flat tensor.
        at_launch: the hook is called when it is launched, see Note [When hooks are called].
    """

    __slots__ = ("_at_launch", "_bucket", "_bucket_of", "_hook", "_into", "_label", "_returned", "_says", "_start", "in_flight")

    def __init__(
        self,
        hook: CommHook,
        start: Start,
        says: Callable[[], Tensor] | None,
        bucket_of: Callable[[Tensor], GradientBucketForHooks],
        *,
        at_launch: bool,
    ) -> None:
        self._hook = hook
        self._start = start
        self._says = says
        self._bucket_of = bucket_of
        self._at_launch = at_launch
        self._bucket: GradientBucketForHooks | None = None
        self._returned: Any = _NOTHING
        self._into = _NOWHERE
        self._label = ""
        self.in_flight = False

    def all_reduce(
        self,
        message: Tensor,
        label: str,
        scaled_input: ScaledInput | None = None,
        tags: TagSequence | None = None,
    ) -> None:
        """Launch: in place."""
        self._into, self._label = message, label
        self.in_flight = True
        if self._says is not None:
            self._start.launch(self._says(), label, tags)
        if self._at_launch:
            self._call()

    def progress(self) -> bool:
        return False  # others may not have come to it

    @torch.no_grad()
    def wait(self) -> None:
        """The mean is there afterwards, or whatever the hook makes."""
        self.in_flight = False
        self._start.wait()
        try:
            if not self._at_launch:
                self._call()
            assert self._bucket is not None
            self._hook.finish(self._returned, self._bucket, self._into, self._label)
        except BaseException as error:
            self._drop()
            if not self._at_launch:
                self._hook.group.give_up(error)
            raise
        self._drop()

    def _call(self) -> None:
        # Another view: what becomes of it, `resize_` for example, is no matter of the message.
        self._bucket = self._bucket_of(self._into.view(-1))
        self._returned = self._hook.start(self._bucket, self._label)

    def _drop(self) -> None:
        self._bucket, self._returned, self._into = None, _NOTHING, _NOWHERE

    def abort(self) -> None:
        """The result is not wanted. The backend may write to it whenever it comes, so it is waited for."""
        self.in_flight = False
        bucket, returned, into = self._bucket, self._returned, self._into
        self._drop()
        try:
            self._start.abort()
        finally:
            if bucket is not None and returned is not _NOTHING:
                with suppress(ComposableError):
                    self._hook.finish(returned, bucket, into, self._label)


def _accept(_: Tensor) -> None:
    return None
