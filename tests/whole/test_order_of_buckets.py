"""`replicate`: buckets follow the order in which gradients become ready, which is agreed once, and few are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pytest
import torch.distributed as dist

from composable.device.collectives import Communicator, TagSequence, communicators_wrapped_by
from composable.runtime.buckets import HOST_IN_FLIGHT
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import averaged_gradients
from tests.helpers.means import Parts, assert_means, batch_of, twins
from tests.helpers.world import Pool, need_devices


class _Counting(Recording):
    """Also notes when ranks tell each other an order."""

    def min_max(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> tuple[list[int], list[int]]:
        if label.startswith("exchange of the order"):
            self._log.add("exchange", label)
        return self._inner.min_max(values, label=label, tags=tags)


def _observed(log: Log) -> Callable[[Communicator], Communicator]:
    return lambda communicator: _Counting(communicator, log)


_CAP: Final = 160 / (1 << 20)  # bytes: one layer of the model in a bucket


def _launches(orders: Sequence[Sequence[int]]) -> tuple[list[list[str]], int]:
    """For each step the labels of its launches, and how often the ranks agreed on an order."""
    log, steps = Log(), []
    with communicators_wrapped_by(_observed(log)):
        plain, ours = twins(Parts, bucket_cap_mb=_CAP)
    log.events.clear()
    for step, order in enumerate(orders):
        for model in (plain, ours):
            model.zero_grad()
            model(batch_of(step), order).sum().backward()
        assert_means(averaged_gradients(plain), ours)
        steps.append(log.labels())
        exchanges = log.labels("exchange")
        log.events[:] = [event for event in log.events if event[0] == "exchange"]
    return steps, len(exchanges)


def _layers(labels: Sequence[str]) -> str:
    return "".join(label.partition("layers.")[2][0] for label in labels)


def _in_orders(by_rank: Sequence[Sequence[Sequence[int]]]) -> tuple[list[str], int]:
    steps, exchanges = _launches(by_rank[dist.get_rank()])
    return [_layers(labels) for labels in steps], exchanges


def test_buckets_follow_the_order_in_which_gradients_become_ready(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    orders = [[2, 0, 1]] * 3
    for launched, exchanges in pool.run(2, _in_orders, [orders, orders], device=device):
        assert launched == ["210", "102", "102"]
        assert exchanges == 1


def test_buckets_are_filled_anew_once_and_not_when_the_graph_changes(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    orders = [[2, 0, 1], [0, 1, 2], [1, 2, 0], [1, 2, 0]]
    for launched, exchanges in pool.run(2, _in_orders, [orders, orders], device=device):
        assert launched == ["210", "102", "102", "102"]
        assert exchanges == 1


def test_ranks_with_other_orders_of_readiness_launch_the_same_buckets(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    by_rank = [[[2, 0, 1], [0, 1, 2], [2, 1, 0]], [[1, 2, 0], [2, 0, 1], [0, 1, 2]]]
    ours, theirs = pool.run(2, _in_orders, by_rank, device=device)
    assert ours == theirs == (["210", "102", "102"], 1)


def test_the_order_is_that_of_the_first_backward_that_some_rank_completes(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    by_rank = [[[0, 2], [0, 2], [0, 2]], [[0], [1, 0, 2], [0]]]
    for launched, exchanges in pool.run(2, _in_orders, by_rank, device=device):
        assert launched == ["210", "210", "201"]
        assert exchanges == 1


def _freezing() -> tuple[list[str], int]:
    log, launched = Log(), []
    with communicators_wrapped_by(_observed(log)):
        plain, ours = twins(Parts, bucket_cap_mb=_CAP)
    log.events.clear()
    for step, frozen in enumerate([(), (), (0,), (), (1,), ()]):
        for model in (plain, ours):
            for index, layer in enumerate(model.layers):  # type: ignore[union-attr,arg-type]
                layer.requires_grad_(index not in frozen)
            model.zero_grad()
            model(batch_of(step), [2, 0, 1]).sum().backward()
        assert_means(averaged_gradients(plain), ours)
        launched.append(_layers(log.labels()))
        exchanges = log.labels("exchange")
        log.events[:] = [event for event in log.events if event[0] == "exchange"]
    return launched, len(exchanges)


def test_what_is_agreed_outlives_freezing_and_unfreezing(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    for launched, exchanges in pool.run(2, _freezing, device=device):
        assert launched == ["210", "102", "12", "102", "02", "102"]
        assert exchanges == 1


def _in_flight() -> list[int]:
    log = Log()
    with communicators_wrapped_by(_observed(log)):
        _, ours = twins(lambda: Parts(6), bucket_cap_mb=_CAP)
    counts, flying = [], 0
    log.events.clear()
    for step in range(2):
        # Nobody but the first rank has a gradient for the first bucket: the others launch everything at the end.
        ours(batch_of(step), range(6 if dist.get_rank() == 0 else 5)).sum().backward()
    for event, _ in log.events:
        flying += {"launch": 1, "wait": -1}.get(event, 0)
        counts.append(flying)
    return counts


@pytest.mark.host
@pytest.mark.beyond_sim("it is no host")
def test_a_host_keeps_few_buckets_in_flight_also_if_others_launch_theirs_at_the_end(pool: Pool) -> None:
    for counts in pool.run(2, _in_flight):
        assert max(counts) <= HOST_IN_FLIGHT < 6
        assert counts[-1] == 0
