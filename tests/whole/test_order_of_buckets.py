"""`replicate`: buckets follow the order in which gradients become ready, which is agreed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch.distributed as dist
from torch import Tensor

from composable.comm import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import averaged_gradients
from tests.helpers.means import Parts, assert_means, batch_of, twins
from tests.helpers.world import Pool, need_devices


class _Counting(Recording):
    """Also notes when ranks agree on an order."""

    def broadcast(self, tensors: Sequence[Tensor], label: str, src: int = 0) -> None:
        if label == "broadcast of the order of buckets":
            self._log.add("agreement", label)
        self._inner.broadcast(tensors, label, src)


_CAP: Final = 160 / (1 << 20)  # bytes: one layer of the model in a bucket


def _launches(by_rank: Sequence[Sequence[Sequence[int]]], frozen: Sequence[Sequence[int]] = ((),)) -> tuple[list[str], int]:
    """The layers whose gradients each step launches, in order, and how often the ranks agreed on an order."""
    log, launched = Log(), []
    with comms_wrapped_by(lambda comm: _Counting(comm, log)):
        plain, ours = twins(Parts, bucket_cap_mb=_CAP)
    log.events.clear()
    orders = by_rank[dist.get_rank()]
    for step, order in enumerate(orders):
        for model in (plain, ours):
            for index, layer in enumerate(model.layers):  # type: ignore[union-attr,arg-type]
                layer.requires_grad_(index not in frozen[step % len(frozen)])
            model.zero_grad()
            model(batch_of(step), order).sum().backward()
        assert_means(averaged_gradients(plain), ours)
        launched.append("".join(label.partition("layers.")[2][0] for label in log.labels()))
        agreements = log.labels("agreement")
        log.events[:] = [event for event in log.events if event[0] == "agreement"]
    return launched, len(agreements)


def test_buckets_follow_the_order_in_which_gradients_become_ready(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    orders = [[2, 0, 1]] * 3
    for launched, agreements in pool.run(2, _launches, [orders, orders], device=device):
        assert launched == ["210", "102", "102"]
        assert agreements == 1


def test_buckets_are_filled_anew_once_and_not_when_the_graph_changes(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    orders = [[2, 0, 1], [0, 1, 2], [1, 2, 0], [1, 2, 0]]
    for launched, agreements in pool.run(2, _launches, [orders, orders], device=device):
        assert launched == ["210", "102", "102", "102"]
        assert agreements == 1


def test_ranks_with_other_orders_of_readiness_launch_the_same_buckets(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    by_rank = [[[2, 0, 1], [0, 1, 2], [2, 1, 0]], [[1, 2, 0], [2, 0, 1], [0, 1, 2]]]
    ours, theirs = pool.run(2, _launches, by_rank, device=device)
    assert ours == theirs == (["210", "102", "102"], 1)


def test_what_is_agreed_outlives_freezing_and_unfreezing(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    for launched, agreements in pool.run(2, _launches, [[[2, 0, 1]] * 6] * 2, [(), (), (0,), (), (1,), ()], device=device):
        assert launched == ["210", "102", "12", "102", "02", "102"]
        assert agreements == 1
