"""Units that are planned anew after a rank has lost a window of accumulation: all ranks still know that it ended, and how."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, no_sync, replicate
from composable.errors import CommunicationError
from tests.helpers.annotated import PATIENCE
from tests.helpers.leaving import Layer, Layers, Planned, leave
from tests.helpers.world import Pool

_LOST: Final = 1  # the step that is lost
_ANEW: Final = 2  # the first step of units planned anew


class Outer(nn.Sequential):
    """Layers and one more, which is not there before it is called."""

    def __init__(self) -> None:
        super().__init__(Layers(), Layer(8, 8))


def _sharded(model: Outer, **options: Any) -> None:
    fully_shard(model, policy={Layer, Layers}, **options)


def _next_to_shards(model: Outer, **options: Any) -> None:
    replicate(model[0].get_submodule("1"), **options)
    _sharded(model, **options)


def _around_it(model: Outer, step: int, mesh: Any) -> nn.Module:
    """The inner module first, and then the one above."""
    return model[0] if step < _ANEW else model


def _joined(model: Outer, step: int, mesh: Any) -> nn.Module:
    """A module that has been annotated comes to the one that is called."""
    if step == _ANEW:
        model[0].append(model[1])
    return model[0]


_ANEW_BY: Final[dict[str, Callable[[Outer, int, Any], nn.Module]]] = {"above": _around_it, "joined": _joined}


def _train(
    model: Outer, mesh: Any, called: Callable[[Outer, int, Any], nn.Module], scope: str, where: tuple[str, int]
) -> tuple[list[Tensor], dict[int, str]]:
    """Parameters after five steps of three micro-batches each, and what steps ended with.

    Args:
        mesh: None for one process that leaves the lost step out.
        called: what a step calls.
        scope: what `no_sync` is around.
        where: rank 0 raises: in which half, and of which micro-batch.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    errors = {}
    for step in range(5):
        batches = torch.randn(3, 4, 8, generator=generator)
        if mesh is None and step == _LOST:
            continue
        module = called(model, step, mesh)
        try:
            for number, x in enumerate(batches):
                held = mesh is not None and number < 2
                failing = mesh is not None and step == _LOST and dist.get_rank() == 0 and number == where[1]
                with no_sync(model) if held and scope in ("forward", "both") else nullcontext():
                    if failing and where[0] == "forward":
                        with model[0].get_submodule("2").register_forward_pre_hook(leave):
                            module(x)
                    if failing:
                        x = x.clone().requires_grad_()
                        x.register_hook(leave)  # after all gradients have arrived
                    loss = module(x).square().mean()
                    if scope == "both":
                        loss.backward()
                if scope != "both":
                    with no_sync(model) if held and scope == "backward" else nullcontext():
                        loss.backward()
            optimizer.step()
        except (Planned, CommunicationError) as error:
            errors[step] = f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], errors


_SCHEMES: Final[dict[str, Callable[..., None]]] = {"sharded": _sharded, "next to shards": _next_to_shards}
_WHERE: Final[Mapping[str, tuple[str, int]]] = {"both": ("backward", 1), "forward": ("backward", 0), "backward": ("forward", 0)}


def _lose(scheme: str, anew: str) -> None:
    for scope, where in _WHERE.items():
        torch.manual_seed(0)
        model = Outer()
        plain = copy.deepcopy(model)
        group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
        _SCHEMES[scheme](model, mesh=group)
        found, errors = _train(model, group, _ANEW_BY[anew], scope, where)
        case = f"{scheme}, {anew}, {scope}, rank {dist.get_rank()}: {errors}"
        assert [*errors] == [_LOST], case
        expected, _ = _train(plain, None, _ANEW_BY[anew], scope, where)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]
        torch.testing.assert_close(whole, expected, msg=case)
        dist.barrier(group)


@pytest.mark.host
@pytest.mark.parametrize("anew", _ANEW_BY)
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_units_that_are_planned_anew_after_a_lost_window_meet_in_the_next_step(pool: Pool, scheme: str, anew: str) -> None:
    pool.run(2, _lose, scheme, anew)
