"""What a communication hook of the user's is handed, and what comes back; knows no unit, and not when that is.

Note [Hooks]
A hook replaces a reduction and its divisions. torch's own, and those written for DistributedDataParallel, ask a bucket for its
gradients as one flat tensor and return a future of what becomes of it. So that is what they get here, without anything of ours
in the message: who had gradients at all travels by itself where there is a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives import HookGroup
from composable.errors import CommHookError, CommunicationError, first_line

Hook = Callable[[Any, Any], Any]


class GradientBucketForHooks:
    """Gradients that are reduced together, as a hook sees them: what `torch.distributed.GradBucket` is for DDP, and more.

    Attributes:
        fqns: names of the parameters, below the module that the hook was registered for.
        scale: what the sum over the ranks is multiplied by where there is no hook.
    """

    __slots__ = ("_buffer", "_group", "_index", "_last", "_members", "_shapes", "fqns", "scale")

    def __init__(
        self,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        fqns: Sequence[str],
        index: int,
        *,
        last: bool,
        scale: float,
        group: HookGroup,
    ) -> None:
        self._buffer = buffer
        self._members = tuple(parameters)
        self._shapes = tuple(shapes)
        self._index = index
        self._last = last
        self._group = group
        self.fqns = tuple(fqns)
        self.scale = scale

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the ranks that reduce these gradients; it is for hooks only."""
        return self._group.group

    def index(self) -> int:
        """A number that no other parameters have, nor these in another order, however often buckets are filled anew."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients, one behind the other, flat."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Work on another tensor from here on."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, each with its parameter's shape."""
        sizes = [shape.numel() for shape in self._shapes]
        pieces = self._buffer[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def parameters(self) -> list[Tensor]:
        return list(self._members)

    def is_last(self) -> bool:
        """Whether no bucket follows in this backward."""
        return self._last


class CommHook:
    """A hook, and how it is called.

    Args:
        state: what it was registered with.
        group: None where there is one rank, and it is not called.

    Attributes:
        name: of the function, for messages.
    """

    __slots__ = ("_group", "_hook", "_state", "name")

    def __init__(self, hook: Hook, state: Any, group: HookGroup | None) -> None:
        self._hook = hook
        self._state = state
        self._group = group
        self.name: str = name_of_hook(hook)

    @property
    def group(self) -> HookGroup:
        """That it communicates over."""
        assert self._group is not None
        return self._group

    def start(self, bucket: GradientBucketForHooks, label: str) -> Any:
        """Call it. A state that is None, or whose `process_group` is, means the ranks that reduce these gradients.

        Raises:
            CommunicationError: a collective that it waited for failed.
        """
        state = self._state
        fills = state is not None and getattr(state, "process_group", state) is None
        if fills:
            state.process_group = bucket.group
        try:
            return self._hook(bucket.group if state is None else state, bucket)
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise  # the hook's own
            self._raise_failed(label, error)
        finally:
            if fills:
                state.process_group = None  # or it would keep the group from ending

    def _raise_failed(self, label: str, error: Exception) -> NoReturn:
        raise CommunicationError(
            f"the communication hook '{self.name}' failed in the {label}: {first_line(error)}\nLook for the first error among "
            "all ranks."
        ) from error

    def finish(self, result: Any, bucket: GradientBucketForHooks, into: Tensor, label: str) -> None:
        """Wait for what the hook returned, and put it into a flat tensor.

        Raises:
            CommHookError: it is no such tensor.
            CommunicationError: what the hook waited for failed.
        """
        value = result
        wait = None if isinstance(result, Tensor) else getattr(result, "wait", None)
        if wait is not None:  # what `then` returns is no `torch.futures.Future`, but like one
            try:
                value = wait()
            except RuntimeError as error:
                self._raise_failed(label, error)
            if isinstance(value, (list, tuple)) and len(value) == 1:  # what the future of a collective brings
                (value,) = value
        self._check(value, bucket, into)
        if value.data_ptr() != into.data_ptr() or value.dtype != into.dtype or not value.is_contiguous():
            into.copy_(value.reshape(-1))

    def _check(self, value: Any, bucket: GradientBucketForHooks, into: Tensor) -> None:
        said = ""
        if not isinstance(value, Tensor):
            said = f"{type(value).__name__}"
        elif value.numel() != into.numel():
            said = f"a tensor of {value.numel()} elements"
        elif value.dtype != into.dtype and not (value.is_floating_point() and into.is_floating_point()):
            said = f"a tensor of {value.dtype}"
        elif value.device != into.device:
            said = f"a tensor on {value.device}"
        if said:
            raise CommHookError(
                f"the communication hook '{self.name}' returned {said} for bucket {bucket.index()} ('{bucket.fqns[0]}' to "
                f"'{bucket.fqns[-1]}'). It must return the reduced gradients, {into.numel()} elements of {into.dtype} on "
                f"{into.device}, as a tensor or a torch.futures.Future of one"
            )


def name_of_hook(hook: Any) -> str:
    return str(getattr(hook, "__name__", None) or type(hook).__name__)
