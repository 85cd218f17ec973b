"""Numbers of the simulated accelerator: drawn in the order of the host's calls, and rounded alike
wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import sim
from tests.helpers.world import Pool, current_device


def _draw(slowly: bool) -> list[Tensor]:
    """Numbers of a stream that may be slow, numbers of one that does not wait for it, and these
    again.
    """
    side = torch.Stream(current_device())
    torch.manual_seed(7)
    with side:
        if slowly:
            sim.native.sleep(50_000)
        first = torch.rand(3)
    state = sim.get_rng_state()
    second = torch.rand(3)
    sim.set_rng_state(state)
    again = torch.nn.functional.dropout(torch.ones(64)), torch.rand(3)
    sim.set_rng_state(state)
    return [first, second, *again, torch.nn.functional.dropout(torch.ones(64))]


def _draws() -> None:
    sim.native.clear_host_waits()
    one, other = _draw(slowly=False), _draw(slowly=True)
    assert not sim.native.places_of_host_waits(), (
        "to read the state makes the host wait for nothing"
    )
    sim.synchronize()
    for expected, found in zip(one, other, strict=True):
        assert torch.equal(expected, found)
    first, second, dropped, third, again = one
    assert torch.equal(dropped, again)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert set(dropped.tolist()) == {0.0, 2.0}


def test_random_numbers_depend_on_the_order_of_the_hosts_calls_alone(pool: Pool) -> None:
    pool.run(1, _draws)


def _of_halves(values: Tensor) -> Tensor:
    values = values.bfloat16()
    return values.add(values.square(), alpha=0.37)


def _of_a_list_of_halves(values: Tensor) -> Tensor:
    values = values.half()
    torch._foreach_add_([values], [values.square()], alpha=0.37)
    return values


def _of_a_fused_step(values: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(values.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
    for _ in range(4):
        parameter.grad = parameter.detach() ** 3
        optimizer.step()
    return parameter.detach()


def _rounds() -> None:
    torch.manual_seed(0)
    values = torch.randn(321)
    ways: list[Callable[[Tensor], Tensor]] = [_of_halves, _of_a_list_of_halves, _of_a_fused_step]
    for way in ways:
        whole = way(values)
        for start in range(0, 321, 3):
            assert torch.equal(whole[start : start + 3], way(values[start : start + 3].clone())), (
                way.__name__,
                start,
            )


def test_an_element_is_rounded_alike_wherever_it_lies(pool: Pool) -> None:
    pool.run(1, _rounds)


def _exchanges() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.arange(size) + 10 * rank
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent)
    assert found.tolist() == [10 * other + rank for other in range(size)]
    total = torch.full((2,), float(rank))
    dist.reduce(total, 1)
    assert total.tolist() == [sum(range(size)) if rank == 1 else rank] * 2


def test_ranks_exchange_and_reduce_to_one(pool: Pool) -> None:
    pool.run(3, _exchanges)
