"""Scopes of `no_sync` around forward alone or backward alone, and one rank that raises: ranks meet again in the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, no_sync, replicate
from composable.errors import CommunicationError
from tests.helpers.annotated import PATIENCE, next_to_shards, replicated, sharded
from tests.helpers.leaving import Layers, Planned, leave
from tests.helpers.world import Pool


def _around_shards(model: Layers, *, reshard: bool | None = None, **options: Any) -> None:
    fully_shard(model[2], reshard_after_forward=reshard, **options)
    replicate(model, **options)


def _around_freed_shards(model: Layers, **options: Any) -> None:
    """What is gathered in backward, too, tells ranks of losses in the step itself."""
    _around_shards(model, reshard=True, **options)


_SCHEMES: Final[dict[str, Callable[..., None]]] = {
    "sharded": sharded,
    "replicated": replicated,
    "next to shards": next_to_shards,
    "around shards": _around_shards,
    "around freed shards": _around_freed_shards,
}
_APART: Final = {1: 0, 3: 1}
_IN_A_ROW: Final = ({1: 0, 2: 0, 3: 1}, {1: 2, 2: 0}, {1: 0, 2: 2}, {1: 2, 2: 2})
_REDUCING_FIRST: Final = ({1: 2, 2: 0}, {1: 2, 2: 2})


def _train(
    model: nn.Module, scope: str, lost: Mapping[int, int], fails: int | None, layer: int = 2
) -> tuple[list[Tensor], dict[int, str]]:
    """Parameters after six steps of three micro-batches each, and what steps ended with.

    Args:
        scope: what `no_sync` is around.
        lost: steps, and the micro-batch in whose forward a rank raises.
        fails: the rank that raises; None for one process that leaves those steps out.
        layer: in which it does.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    errors = {}
    for step in range(6):
        batches = torch.randn(3, 4, 8, generator=generator)
        if fails is None and step in lost:
            continue
        try:
            for number, x in enumerate(batches):
                holds = fails is not None and number < 2
                failing = fails == dist.get_rank() and lost.get(step) == number
                with no_sync(model) if holds and scope in ("forward", "both") else nullcontext():
                    if failing:
                        with model[layer].register_forward_pre_hook(lambda *_: leave()):
                            model(x)
                    y = model(x)
                    if scope == "both":
                        y.square().mean().backward()
                if scope != "both":
                    with no_sync(model) if holds and scope == "backward" else nullcontext():
                        y.square().mean().backward()
            optimizer.step()
        except (Planned, CommunicationError) as error:
            errors[step] = f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], errors


def _lose(scheme: str, scope: str, lost: Mapping[int, int], layer: int = 2) -> None:
    torch.manual_seed(0)
    model = Layers()
    plain = copy.deepcopy(model)
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    _SCHEMES[scheme](model, mesh=group)
    found, errors = _train(model, scope, lost, 0, layer)
    assert [*errors] == [*lost], errors
    for error in errors.values():
        assert error.startswith("Planned: as planned" if dist.get_rank() == 0 else "CommunicationError: rank "), errors
    expected, _ = _train(plain, scope, lost, None)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]
    torch.testing.assert_close(whole, expected)
    dist.barrier(group)


@pytest.mark.host
@pytest.mark.parametrize("scope", ["forward", "backward", "both"])
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_forward_that_raises_costs_all_ranks_one_step_wherever_the_scope_is(pool: Pool, scheme: str, scope: str) -> None:
    pool.run(2, _lose, scheme, scope, _APART)


def _lose_each(scheme: str, scope: str, patterns: Sequence[Mapping[int, int]], layer: int) -> None:
    for lost in patterns:
        _lose(scheme, scope, lost, layer)


@pytest.mark.host
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("scope", ["forward", "backward", "both"])
def test_a_replicated_part_that_raises_before_or_after_the_shards_inside_it_costs_all_ranks_one_step(
    pool: Pool, scope: str, layer: int
) -> None:
    patterns = (_APART, {1: 1, 3: 2}, {1: 2, 2: 0})
    pool.run(2, _lose_each, "around shards", scope, patterns if layer else (*patterns, _IN_A_ROW[0]), layer)


def _evaluate() -> None:
    model = Layers()
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    _around_shards(model, mesh=group)
    x = torch.ones(2, 8)
    for step in range(3):
        failing = step == 1 and dist.get_rank() == 0
        with torch.no_grad(), model[0].register_forward_pre_hook(leave) if failing else nullcontext():
            if step != 1:
                model(x)
                continue
            with pytest.raises((Planned, CommunicationError)):
                model(x)
    model(x).square().mean().backward()


@pytest.mark.host
def test_an_evaluation_that_raises_before_the_shards_inside_a_replicated_module_is_told_to_who_waits_for_them(
    pool: Pool,
) -> None:
    pool.run(2, _evaluate)


@pytest.mark.host
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_steps_lost_in_a_row_cost_all_ranks_the_same(pool: Pool, scheme: str) -> None:
    pool.run(2, _lose, scheme, "both", _IN_A_ROW[0])


def _lose_alike(scope: str, lost: Mapping[int, int]) -> bool:
    """Whether steps lost by replicas cost nothing else; if not, every later one fails on all ranks."""
    torch.manual_seed(0)
    model = Layers()
    plain = copy.deepcopy(model)
    replicated(model, mesh=dist.new_group(timeout=timedelta(seconds=PATIENCE)))
    found, errors = _train(model, scope, lost, 0)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, [*errors])
    assert of_all == [of_all[0]] * len(of_all), errors
    if [*errors] == [*lost]:
        torch.testing.assert_close(found, _train(plain, scope, lost, None)[0])
        return True
    assert [*errors] == [*range(min(lost), 6)], errors
    return False


def _lose_all_alike(scope: str, patterns: Sequence[Mapping[int, int]]) -> list[bool]:
    return [_lose_alike(scope, lost) for lost in patterns]


@pytest.mark.host
def test_replicas_that_lose_any_steps_in_a_row_with_a_scope_around_both_halves_lose_nothing_else(pool: Pool) -> None:
    assert pool.run(2, _lose_all_alike, "both", _IN_A_ROW) == [[True] * len(_IN_A_ROW)] * 2


@pytest.mark.host
def test_replicas_that_lose_steps_in_a_row_with_a_scope_around_forward_meet_again_or_fail_by_name(pool: Pool) -> None:
    pool.run(2, _lose_all_alike, "forward", _IN_A_ROW)


@pytest.mark.host
def test_replicas_that_lose_a_reducing_micro_batch_first_meet_again_with_a_scope_around_backward(pool: Pool) -> None:
    assert pool.run(2, _lose_all_alike, "backward", _REDUCING_FIRST) == [[True] * len(_REDUCING_FIRST)] * 2


@pytest.mark.host
def test_four_ranks_meet_again_where_a_scope_is_around_backward_alone(pool: Pool) -> None:
    pool.run(4, _lose, "next to shards", "backward", _APART)


def _evaluation_raises() -> list[str]:
    """On rank 0, behind its last gather: the others have nothing to hear of."""
    torch.manual_seed(0)
    model = Layers()
    fully_shard(model, policy={type(model[0])})
    x, failed = torch.ones(2, 8), []
    with no_sync(model):
        model(x).sum().backward()
    model(x).sum().backward()
    model.zero_grad()
    hook = model.register_forward_hook(leave) if dist.get_rank() == 0 else None
    with torch.no_grad():
        if hook is None:
            model(x)
        else:
            with pytest.raises(Planned):
                model(x)
            hook.remove()
    dist.barrier()
    for step in range(3):
        try:
            model(x).sum().backward()
        except CommunicationError as error:
            failed.append(f"{step}: {error}")
        model.zero_grad()
    return failed


@pytest.mark.host
def test_an_evaluation_that_raises_on_one_rank_costs_no_step_though_a_scope_was_used_before(pool: Pool) -> None:
    assert pool.run(2, _evaluation_raises) == [[], []]
