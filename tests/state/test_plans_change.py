"""Optimizers from before an annotation, and another plan in the middle of training: the losses go
on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, rebind_optimizer, refresh, registry, remove, replicate
from tests.helpers.compare import full
from tests.helpers.world import Pool, need_devices, spmd
from tests.state.models import PLANS, Block, Net, plain, train

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.01},
        ],
        lr=0.05,
    ),
}


def _undo(model: Net) -> None:
    for module in reversed(list(model.modules())):
        for verb in (fully_shard, replicate):
            if verb.__name__ in registry(module):
                remove(module, verb)


def _goes_on(plans: list[str], kind: str) -> None:
    expected = plain()
    reference = OPTIMIZERS[kind](expected)
    wanted = train(expected, reference, range(2 * (len(plans) + 1)))
    model = plain()
    optimizer = OPTIMIZERS[kind](model)
    losses = train(model, optimizer, range(2))
    for number, plan in enumerate(plans, start=1):
        if number > 1:
            _undo(model)
        PLANS[plan](model)
        rebind_optimizer(model, optimizer)
        losses += train(model, optimizer, range(2 * number, 2 * number + 2))
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    for (name, parameter), other in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(
            full(parameter.detach()).cpu(), other.detach().cpu(), rtol=1e-3, atol=1e-4, msg=name
        )
    for group, other_group in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {key: value for key, value in group.items() if key != "params"} == {
            key: value for key, value in other_group.items() if key != "params"
        }
        assert len(group["params"]) == len(other_group["params"])


_EXACT = [plan for plan in PLANS if plan != "mixed precision"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("plan", _EXACT)
def test_an_optimizer_of_before_the_annotation_goes_on(
    pool: Pool, plan: str, kind: str, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _goes_on, [plan], kind, device=device)


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.permutations(("fully_shard", "one unit", "hybrid", "replicate"), 2)),
)
def test_training_under_one_plan_goes_on_under_another(
    pool: Pool, first: str, second: str, device: str
) -> None:
    need_devices(device, 4)
    pool.run(4, _goes_on, [first, second, first], "AdamW", device=device)


class _Pair(nn.Module):
    """A parameter of the same name and shape as those below it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.eye(5))
        self.first, self.second = (nn.Linear(5, 5, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) @ self.weight


_ANEW: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "fully_shard": fully_shard,
    "one by one": lambda model: [fully_shard(module) for module in (model.second, model.first)],  # type: ignore[arg-type]
    "replicate": replicate,
}


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_units_that_were_annotated_one_by_one_are_distinguished(verb: Any) -> None:
    for anew, steps in itertools.product(_ANEW, (0, 1)):
        model, expected = _Pair(), _Pair()
        for module in (model.first, model.second):
            verb(module)
        optimizer, reference = (
            torch.optim.SGD([each.first.weight, each.second.weight], lr=0.1, momentum=0.9)
            for each in (model, expected)
        )

        def train(count: int, models: Any = ((model, optimizer), (expected, reference))) -> None:
            for each, stepped in models:
                for _ in range(count):
                    each(torch.eye(5)).square().mean().backward()
                    stepped.step()
                    stepped.zero_grad()

        train(steps)
        for module in (model.first, model.second):
            remove(module, verb)
        _ANEW[anew](model)
        rebind_optimizer(model, optimizer)
        held = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        assert held == [id(model.first.weight), id(model.second.weight)], anew
        train(1)
        for (name, parameter), other in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            torch.testing.assert_close(
                full(parameter.detach()), other.detach(), msg=f"{anew} {name}"
            )


@spmd(ranks=2)
def test_state_is_cut_like_the_parameter() -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    fully_shard(model, policy={Block})
    rebind_optimizer(model, optimizer)
    for parameter in model.parameters():
        average = optimizer.state[parameter]["exp_avg"]
        assert isinstance(parameter, DTensor)
        assert isinstance(average, DTensor)
        assert average.placements == parameter.placements
        assert average.to_local().shape == parameter.to_local().shape
        assert average.to_local().untyped_storage().nbytes() == average.to_local().nbytes, (
            "the whole is freed"
        )
    rebind_optimizer(model, optimizer)  # again: nothing to do
    train(model, optimizer, range(1))


@spmd(ranks=2)
def test_frozen_replaced_and_moved_parameters_are_adopted_at_once() -> None:
    model = fully_shard(plain(), policy={Block})
    model.blocks[0].scale = nn.Parameter(torch.full_like(full(model.blocks[0].scale.detach()), 2.0))
    model.blocks[1].up.weight.requires_grad_(False)
    refresh(model)
    assert isinstance(model.blocks[0].scale, DTensor)
    assert full(model.blocks[0].scale.detach()).item() == 2.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen = full(model.blocks[1].up.weight.detach()).clone()
    train(model, optimizer, range(1))
    assert torch.equal(full(model.blocks[1].up.weight.detach()), frozen)
    model.double()
    refresh(model)
    assert model.blocks[0].scale.dtype == torch.float64
    model.load_state_dict(plain(1).double().state_dict(), assign=True)
    refresh(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@spmd(ranks=2)
def test_muon_on_shards_is_that_of_one_process() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has it since 2.9")
    # Newton-Schulz runs in bfloat16, on DTensors: products of shards may round otherwise than those
    # of whole matrices.
    tolerance = 0.02
    for shape in ((6, 8), (3, 8), (16, 16), (8, 6)):
        expected, model = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
        model.load_state_dict(expected.state_dict())
        fully_shard(model)
        for each in (expected, model):
            optimizer = torch.optim.Muon(each.parameters(), lr=0.1)
            for step in range(3):
                batch = torch.randn(4, shape[1], generator=torch.Generator().manual_seed(step))
                each(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(
            full(model.weight.detach()), expected.weight.detach(), rtol=0, atol=tolerance
        )
