"""`replicate`: buckets follow the order in which gradients become ready, which is agreed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch.distributed as dist

from composable.comm.backends import comms_wrapped_by
from composable.comm.launch import Launch
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.means import Parts, batch_of, copies
from tests.helpers.world import Pool, need_devices


class _Counting(Recording):
    """Also notes when ranks agree on an order."""

    def min_max(self, values: Sequence[int], launch: Launch) -> tuple[list[int], list[int]]:
        if launch.text == "exchange of the order of buckets":
            self._log.add("agreement", launch.text)
        return self._inner.min_max(values, launch)


_CAP: Final = 160 / (1 << 20)  # bytes: one layer of the model in a bucket


def _launches(
    by_rank: Sequence[Sequence[Sequence[int]]], frozen: Sequence[Sequence[int]]
) -> tuple[list[str], int]:
    """The layers whose gradients each step launches, in order, and how often the ranks agreed on an
    order.
    """
    log, launched = Log(), []
    with comms_wrapped_by(lambda comm: _Counting(comm, log)):
        plain, ours = copies(Parts, bucket_cap_mb=_CAP)
    log.events.clear()
    orders = by_rank[dist.get_rank()]
    for step, order in enumerate(orders):
        for model in (plain, ours):
            for index, layer in enumerate(model.layers):  # type: ignore[union-attr,arg-type]
                layer.requires_grad_(index not in frozen[step % len(frozen)])
            model.zero_grad()
            model(batch_of(step), order).sum().backward()
        assert_mean_gradients(plain, ours)
        launched.append("".join(label.partition("layers.")[2][0] for label in log.labels()))
        agreements = log.labels("agreement")
        log.events[:] = [event for event in log.events if event[0] == "agreement"]
    return launched, len(agreements)


_ROUNDS: Final = [[2, 0, 1], [0, 1, 2], [1, 2, 0], [1, 2, 0]]
_CASES: Final[
    dict[str, tuple[Sequence[Sequence[Sequence[int]]], Sequence[Sequence[int]], list[str]]]
] = {
    # Orders by rank, the layers that are frozen by step, and the layers that each step launches.
    "buckets follow the order in which gradients become ready": (
        [[[2, 0, 1]] * 3] * 2, [()], ["210", "102", "102"],
    ),
    "they are filled anew once, and not when the graph changes": (
        [_ROUNDS] * 2, [()], ["210", "102", "102", "102"],
    ),
    "ranks with other orders of readiness launch the same": (
        [[[2, 0, 1], [0, 1, 2], [2, 1, 0]], [[1, 2, 0], [2, 0, 1], [0, 1, 2]]],
        [()], ["210", "102", "102"],
    ),
    "what is agreed outlives freezing and unfreezing": (
        [[[2, 0, 1]] * 6] * 2,
        [(), (), (0,), (), (1,), ()], ["210", "102", "12", "102", "02", "102"],
    ),
    "a layer that only some ranks run in the first backward waits for the end of each": (
        [[[0, 1, 2]] * 3, [[0, 2], [0, 1, 2], [0, 2]]],
        [()], ["210", "201", "201"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_all_ranks_launch_in_one_order_that_they_agree_on_once(
    pool: Pool, case: str, device: str
) -> None:
    need_devices(device, 2)
    by_rank, frozen, expected = _CASES[case]
    assert pool.run(2, _launches, by_rank, frozen, device=device) == [(expected, 1)] * 2
