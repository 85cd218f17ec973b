"""The hooks of one reducer on its parameters: what is done when a gradient is there; knows no backward.

Note [Hooks on parameters hold nothing] says why they refer weakly to what they call.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.errors import PhaseError
from composable.runtime.averaged_parameters import AveragedParameters
from composable.runtime.bucket import SENT, Bucket
from composable.runtime.bucket_order import OrderAgreement
from composable.runtime.gradient_hooks import call_when_accumulated, weakly
from composable.runtime.launch_order import LaunchOrder
from composable.runtime.local_gradients import Forms
from composable.runtime.sparse import SparseGradients


class BucketHooks:
    """These hooks.

    Args:
        averaged: the parameters.
        frozen: numbers of those that nothing is expected of any more.
        order: is told when gradients come.
        unit: its name.
    """

    def __init__(self, averaged: AveragedParameters, frozen: Container[int], order: LaunchOrder, unit: str) -> None:
        self._averaged = averaged
        self._frozen = frozen
        self._order = order
        self._unit = unit
        self._buckets: Sequence[Bucket] = ()
        self._forms: Forms | None = None
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def attach(self, buckets: Sequence[Bucket], rows: SparseGradients, agreement: OrderAgreement) -> None:
        """Wait for gradients that fill buckets, and for sparse ones."""
        self._buckets = buckets
        complete, failed = weakly(self._order.launch_complete), weakly(self._order.note_interrupt)
        unexpected = weakly(self._unexpected)
        parameters = self._averaged.everyone
        for number, bucket in enumerate(buckets):
            for slot, i in enumerate(bucket.members):
                hook = bucket.pending_gradients.hook(slot, complete, partial(unexpected, number), failed)
                if i not in self._frozen:
                    self._handles.append(call_when_accumulated(parameters[i], agreement.noting(i, hook)))
        for slot, i in enumerate(self._averaged.sparse):
            if i not in self._frozen:
                self._handles.append(call_when_accumulated(parameters[i], rows.hook(slot, weakly(self._order.open))))

    def attach_alone(self, forms: Forms) -> None:
        """On one rank, what has arrived is complete."""
        self._forms = forms
        deliver = weakly(self._deliver)
        trainable = [self._averaged.everyone[i] for i in self._averaged.dense if i not in self._frozen]
        self._handles = [call_when_accumulated(parameter, deliver) for parameter in trainable]

    def _deliver(self, parameter: nn.Parameter) -> None:
        if self._forms is not None:
            self._forms.deliver((parameter,), held=False)

    def detach(self) -> None:
        """Leave the parameters alone from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets = [], ()

    def _unexpected(self, number: int, slot: int) -> None:
        """The first gradient of a backward that came through no output, or one that came twice."""
        self._order.open()
        bucket = self._buckets[number]
        if bucket.pending_gradients.states[slot] == SENT:
            name = self._averaged.names[bucket.members[slot]]
            raise PhaseError(
                f"replicate(unit '{self._unit}'): parameter '{name}' got a second gradient in one backward, after its first "
                "had been sent. Reentrant checkpointing of a shared parameter does this; use checkpoint(module)."
            )
