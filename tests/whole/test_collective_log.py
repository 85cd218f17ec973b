"""Which collectives one training step takes, in which order, and what is computed while they travel."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import checkpoint, fully_shard, replicate
from composable.comm import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import Pool, current_device, need_devices

LAYERS = 4
WIDTH = 160  # so that a unit is more than the smallest message


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def _model(log: Log) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.Linear(WIDTH, 3)).to(current_device())
    for name, module in model.named_children():
        # Inner modules: hooks on a unit's own module would lie around or inside its gather by their order of creation.
        inner = module.linear if isinstance(module, Layer) else module
        inner.register_forward_hook(lambda *_, name=name: log.add("forward", name))
        inner.register_full_backward_pre_hook(lambda *_, name=name: log.add("backward", name))
    return model


def _gather(unit: object) -> str:
    return f"all-gather of unit '{unit}'"


def _reduction(unit: object) -> str:
    return f"gradient reduction of unit '{unit}'"


def _step(model: nn.Module, log: Log) -> None:
    log.events.clear()
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(2, WIDTH, generator=generator).to(current_device()).requires_grad_()).sum().backward()


def _log_of(how: str, steps: int) -> list[tuple[str, str]]:
    """The events of the last of some steps."""
    log = Log()
    model = _model(log)
    with comms_wrapped_by(partial(Recording, log=log)):
        if how == "checkpoint first":
            checkpoint(model, policy={Layer})
        if how == "by hand":
            for layer in reversed(model[:LAYERS]):
                fully_shard(layer, reshard_after_forward=True)
            fully_shard(model, reshard_after_forward=True)
        elif how == "replicate":
            replicate(model, policy={Layer}, bucket_cap_mb=0.05)
        else:
            fully_shard(model, policy={Layer}, reshard_after_forward=how != "kept")
        if how == "checkpoint last":
            checkpoint(model, policy={Layer})
    for _ in range(steps):
        _step(model, log)
    return log.events


_UNITS = ("(root)", *map(str, range(LAYERS)))


@pytest.mark.parametrize("how", ["by policy", "by hand", "checkpoint first", "checkpoint last"])
@pytest.mark.parametrize("steps", [1, 3])
def test_with_resharding_each_unit_is_gathered_twice_and_reduced_once(pool: Pool, how: str, steps: int, device: str) -> None:
    need_devices(device, 2)
    for events in pool.run(2, _log_of, how, steps, device=device):
        counts = Counter(Log(events).labels())
        # The root's parameters are needed last in forward and first in backward, yet it is no exception.
        assert counts == {_gather(unit): 2 for unit in _UNITS} | {_reduction(unit): 1 for unit in _UNITS}


@pytest.mark.parametrize("steps", [1, 3])
def test_without_resharding_each_unit_is_gathered_once_and_reduced_once(pool: Pool, steps: int, device: str) -> None:
    need_devices(device, 2)
    for events in pool.run(2, _log_of, "kept", steps, device=device):
        counts = Counter(Log(events).labels())
        assert counts == {_gather(unit): 1 for unit in _UNITS} | {_reduction(unit): 1 for unit in _UNITS}


def test_manual_annotation_and_a_policy_give_the_same_log(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    by_policy = pool.run(2, _log_of, "by policy", 3, device=device)
    assert by_policy == pool.run(2, _log_of, "by hand", 3, device=device)


def test_gradients_are_reduced_while_earlier_units_compute_backward(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    for how in ("by policy", "kept"):
        for events in pool.run(2, _log_of, how, 3, device=device):
            for layer in range(1, LAYERS):
                assert str(layer - 1) in Log(events).while_in_flight(_reduction(layer), "backward")


def test_replicated_gradients_are_reduced_while_backward_runs(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    ours, theirs = pool.run(2, _log_of, "replicate", 3, device=device)
    assert Log(ours).labels() == Log(theirs).labels()
    last = ours.index(("backward", "0"))
    assert [event for event in ours[:last] if event[0] == "launch"]
