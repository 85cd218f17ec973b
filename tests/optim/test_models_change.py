"""Whatever happens to a model, an optimizer on its shards goes on like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, remove, step_on_shards
from composable.errors import OptimizerError
from tests.helpers.world import Pool, current_device, need_devices
from tests.optim.twins import Block, Twins, local, make_twins, sharded_model, train

ADAMW: Final = ("AdamW", {"foreach": True})
LOOP: Final = ("AdamW", {"foreach": False})


def _after_steps(twins: Twins, *numbers: int) -> None:
    for number in numbers:
        twins.step(number)


def _moved_parameters() -> None:
    """Memory that parameters have left is not stepped."""
    twins = make_twins(*LOOP)
    _after_steps(twins, 0, 1)

    def assign(model: nn.Module, optimizer: Optimizer) -> None:
        blocks = model.get_submodule("blocks")
        old = list(blocks.parameters())
        blocks.load_state_dict({name: value.clone() for name, value in blocks.state_dict().items()}, assign=True)
        new = {id(one): other for one, other in zip(old, blocks.parameters(), strict=True)}
        assert not any(one is other for one, other in zip(old, new.values(), strict=True))
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        for parameter in old:
            optimizer.state.pop(parameter, None)

    twins.both(assign)
    _after_steps(twins, 2, 3)


def _moved_data() -> None:
    """The same parameter objects, whose data moved into memory of another dtype and back."""
    twins = make_twins(*ADAMW)
    _after_steps(twins, 0, 1)
    before = [local(p).data_ptr() for p in twins.models[1].blocks.parameters()]  # type: ignore[union-attr]
    twins.both(lambda model, _: model.blocks.double().float())  # type: ignore[union-attr, operator]
    moved = [local(p).data_ptr() for p in twins.models[1].blocks.parameters()]  # type: ignore[union-attr]
    assert moved != before
    for optimizer in twins.optimizers:
        optimizer.step()  # gradients moved along
    twins.check("moved")
    _after_steps(twins, 2, 3)


def _annotation_removed() -> None:
    twins = make_twins(*ADAMW)
    _after_steps(twins, 0, 1)
    for model in twins.models:
        remove(model, fully_shard)
    whole = [parameter.detach().clone() for parameter in twins.models[1].parameters()]
    for optimizer in twins.optimizers:
        with pytest.raises(OptimizerError, match="was replaced when the annotation was removed"):
            optimizer.step()
    for parameter, expected in zip(twins.models[1].parameters(), whole, strict=True):
        assert torch.equal(parameter, expected), "a refused step changes nothing"


def _next_forward_uses_new_values() -> None:
    for reshard in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block()).to(current_device())
        fully_shard(model, policy={Block}, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
        step_on_shards(optimizer)
        x = torch.ones(2, 6, device=current_device())
        for _ in range(3):
            before = model(x)
            before.sum().backward()
            optimizer.step()
            with torch.no_grad():
                after = model(x)
            plain = nn.Sequential(Block(), Block()).to(current_device())
            whole = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
            plain.load_state_dict(whole)
            torch.testing.assert_close(after, plain(x).detach())
            assert not torch.allclose(before, after)


def _gradients_are_released() -> None:
    """Nothing of a step keeps gradients alive."""
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step_on_shards(optimizer)
    for number in range(2):
        optimizer.zero_grad()
        train(model, number)
        optimizer.step()
        assert all(local(parameter).grad is None for parameter in model.parameters() if isinstance(parameter, DTensor))


SCENARIOS: Final[dict[str, Callable[[], None]]] = {
    scenario.__name__.strip("_"): scenario
    for scenario in (
        _moved_parameters,
        _moved_data,
        _annotation_removed,
        _next_forward_uses_new_values,
        _gradients_are_released,
    )
}


def _run(name: str) -> None:
    SCENARIOS[name]()


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_optimizer_on_shards_follows_its_model(pool: Pool, name: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _run, name, device=device)
