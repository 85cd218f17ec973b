"""Buckets of gradients that are all-reduced as they fill: what `replicate` runs on. Knows parameters and a wire, not modules.

Note [The same collectives on every rank]
Buckets are launched strictly in their order, and all of them in every backward: a rank that has no gradient for a parameter
contributes zeros. The last message carries a flag per parameter, so that everybody learns which ones were used
somewhere; the gradient of one that nobody used stays as it was. No search through the graph, no flag for the user to set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composable.device.collectives import Arrival, Wire
from composable.device.private import at_end_of_backward
from composable.errors import CommunicationError, PhaseError
from composable.plan.buckets import fill_buckets
from composable.plan.scaling import division_factors

FIRST_BUCKET_BYTES: Final = 1 << 20  # communication starts early


class _Bucket:
    """Some parameters whose gradients travel together."""

    def __init__(self, members: Sequence[int], parameters: Sequence[nn.Parameter], direct: bool) -> None:
        self.members = tuple(members)
        self.direct = direct
        self.sizes = [parameters[i].numel() for i in members]
        self.missing = len(self.members)  # gradients still to come in this backward
        self.launched = False
        self.message: Tensor | None = None
        self.arrival: Arrival | None = None

    def reset(self) -> None:
        self.missing = len(self.members)
        self.launched = False
        self.message = None
        self.arrival = None


class Reducer:
    """Averages the gradients of `parameters` over a wire while backward runs.

    Args:
        parameters: in the order of their FQNs; gradients are expected roughly in the reverse of it.
        cap_bytes: bytes a bucket may hold.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], wire: Wire, *, cap_bytes: int, unit: str
    ) -> None:
        self.parameters = tuple(parameters)
        self.names = tuple(names)
        self.unit = unit
        self._wire = wire
        self._trainable = [i for i, p in enumerate(parameters) if p.requires_grad]
        self._buckets = self._make_buckets(cap_bytes)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._flags = [0.0] * len(self._trainable)
        self._position = {i: position for position, i in enumerate(self._trainable)}
        self._next = 0
        self.in_backward = False
        self._hooks: list[RemovableHandle] = []
        if wire.ways > 1:
            for i in self._trainable:
                hook = parameters[i].register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))
                self._hooks.append(hook)

    def _make_buckets(self, cap_bytes: int) -> list[_Bucket]:
        order = list(reversed(self._trainable))
        parameters = self.parameters
        sizes = [parameters[i].numel() * parameters[i].element_size() for i in order]
        kinds = [(parameters[i].dtype, parameters[i].device) for i in order]
        large = [size >= self._wire.direct_bytes and size > 0 for size in sizes]
        # A large gradient is reduced where it is; the small ones around it fill the buckets.
        grouped = fill_buckets(
            sizes,
            [(kind, index if is_large else -1) for index, (kind, is_large) in enumerate(zip(kinds, large, strict=True))],
            cap=cap_bytes,
            first_cap=min(cap_bytes, FIRST_BUCKET_BYTES),
        )
        # A bucket is complete when its last gradient is, so that is where it stands in the order.
        grouped.sort(key=lambda positions: positions[-1])
        return [_Bucket([order[p] for p in positions], parameters, large[positions[0]]) for positions in grouped]

    def detach(self) -> None:
        """Leave the parameters alone from here on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def fits(self, parameters: Sequence[nn.Parameter | None]) -> bool:
        """Whether these are still the parameters, and as trainable as they were."""
        return (
            len(parameters) == len(self.parameters)
            and all(new is old for new, old in zip(parameters, self.parameters, strict=True))
            and self._trainable == [i for i, p in enumerate(self.parameters) if p.requires_grad]
        )

    # --- backward ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Backward has reached this module, or one of its parameters: what is not here at its end counts as zero."""
        if not self.in_backward and self._wire.ways > 1:
            self.in_backward = True
            at_end_of_backward(self._close)

    def _arrived(self, i: int) -> None:
        self.open()
        bucket = self._bucket_of[i]
        if bucket.launched:
            raise PhaseError(
                f"replicate(unit '{self.unit}'): parameter '{self.names[i]}' got a second gradient in one backward, after its "
                "first had been sent. Reentrant checkpointing of a shared parameter does this; use checkpoint(module)."
            )
        if not self._flags[self._position[i]]:
            self._flags[self._position[i]] = 1.0
            bucket.missing -= 1
            while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._launch(self._buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        gradients = [self._gradient_or_zeros(i) for i in bucket.members]
        before, _ = self._factors(gradients[0].dtype)
        if bucket.direct and gradients[0].is_contiguous() and before == 1.0:
            message = gradients[0]
        else:
            message = torch.cat([gradient.reshape(-1) for gradient in gradients])
            if before != 1.0:
                message /= before
        names = self.names[bucket.members[0]], self.names[bucket.members[-1]]
        label = f"gradient all-reduce of unit '{self.unit}' ('{names[0]}' to '{names[1]}')"
        bucket.message = message
        bucket.launched = True
        bucket.arrival = self._wire.all_reduce(message, label=label)
        self._next += 1

    def _gradient_or_zeros(self, i: int) -> Tensor:
        parameter = self.parameters[i]
        if parameter.grad is None:
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad

    def _factors(self, dtype: torch.dtype) -> tuple[float, float]:
        return division_factors(str(dtype).removeprefix("torch."), self._wire.ways)

    def _close(self) -> None:
        if not self.in_backward:
            return
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        flags = torch.tensor(self._flags, device=self.parameters[0].device) if self.parameters else torch.empty(0)
        arrival = self._wire.all_reduce(flags, label=f"usage flags of unit '{self.unit}'")
        unused: list[int] = []
        if 0.0 in self._flags:
            arrival.wait()
            unused = [i for i, flag in zip(self._trainable, flags.tolist(), strict=True) if not flag]
        for bucket in self._buckets:
            self._finish(bucket, unused)
        arrival.wait()
        self.reset()

    def _finish(self, bucket: _Bucket, unused: Sequence[int]) -> None:
        assert bucket.arrival is not None
        assert bucket.message is not None
        bucket.arrival.wait()
        message = bucket.message
        _, after = self._factors(message.dtype)
        message.mul_(1.0 / after)
        pieces = [message] if len(bucket.members) == 1 else message.split(bucket.sizes)
        targets, sources = [], []
        for i, piece in zip(bucket.members, pieces, strict=True):
            parameter = self.parameters[i]
            if i in unused:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = piece.view(parameter.shape)
            elif parameter.grad is not piece:
                targets.append(parameter.grad)
                sources.append(piece.view(parameter.shape))
        if targets:
            torch._foreach_copy_(targets, sources)

    def reset(self) -> None:
        """Back to the state before a backward; what is in flight has been waited for."""
        for bucket in self._buckets:
            bucket.reset()
        self._flags = [0.0] * len(self._trainable)
        self._next = 0
        self.in_backward = False

    def unwind(self) -> None:
        """After a backward that raised: wait for what is in flight and forget it."""
        try:
            for bucket in self._buckets:
                if bucket.arrival is not None:
                    bucket.arrival.wait()
        except CommunicationError:
            pass  # the error that ended the backward has been reported already
        finally:
            self.reset()
