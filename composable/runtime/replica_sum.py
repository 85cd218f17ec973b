"""The second hop of a reduction on a hybrid mesh: what each replica has summed, summed over the replicas; knows no gradient.

Note [One division]
Gradients are divided by all ranks that they are summed over, by the first factor before the first hop and by the second one
after the last: nothing is divided in between. Only where a factor rounds nothing, and the communicator reads what it sends
anyway, it multiplies what goes into the last hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composable.device.collectives import Communicator, TagSequence, Work
from composable.plan.scaling import Scaling


class ReplicaSum:
    """Sums over the replicas of a mesh.

    Args:
        communicator: among the ranks that have the same shards.
        scaling: of the whole way, see Note [One division].
    """

    __slots__ = ("_communicator", "_scaling")

    def __init__(self, communicator: Communicator, scaling: Scaling) -> None:
        self._communicator = communicator
        self._scaling = scaling

    def launch(self, sums: Sequence[Tensor], tags: TagSequence, label: str) -> Work:
        """Start to sum, in place. All ranks come to it at the same point of their program."""
        factor = self._scaling.input_factor
        flight = _Flight(sums, 1.0 / self._scaling.after if factor is None else 1.0)
        for tensor in sums:
            scaled_input = (tensor, factor) if factor is not None else None
            flight.works.append(self._communicator.all_reduce(tensor, label=label, scaled_input=scaled_input, tags=tags))
        return flight


class _Flight:
    __slots__ = ("_share", "_sums", "works")

    def __init__(self, sums: Sequence[Tensor], share: float) -> None:
        self._sums = sums
        self._share = share
        self.works: list[Work] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self._share != 1.0:
            torch._foreach_mul_(list(self._sums), self._share)

    def abort(self) -> None:
        for work in self.works:
            work.abort()
