"""What an optimizer steps as one tensor is no longer than what stays in a host's caches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable import ShardStepping, fully_shard, step_on_shards
from composable.optim import spans
from composable.optim.spans import LONGEST
from tests.helpers.world import Pool, current_device, need_devices
from tests.optim.twins import (
    OPTIMIZERS,
    Twins,
    flags_of,
    local,
    make_twins,
    run_lengths,
    stepped_by_torch,
    torch_steps_dtensors,
)


class _Many(nn.Module):
    """One unit: on two ranks five of its matrices are nearly as long as a run may be, and the last one alone is longer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = 2 * LONGEST // 5 // 1024 // 2 * 2
        self.weights = nn.ParameterList([*(torch.randn(rows, 256) for _ in range(7)), torch.randn(6 * rows, 256)])

    def forward(self) -> Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def _most_slices(handle: ShardStepping) -> int:
    """Tensors that were stepped last in place of one parameter."""
    plan = handle._plan
    assert plan is not None
    return max(len(span.stepped) for span in plan._spans)


def _lengths(flag: str) -> tuple[list[int], int]:
    models = _Many().to(current_device()), _Many().to(current_device())
    for model in models:
        fully_shard(model)
    flags = {flag: True} if flag else {}
    one, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, **flags) for model in models)  # type: ignore[arg-type]
    twins = Twins(models, (stepped_by_torch(one), other), step_on_shards(other))
    for _ in range(2):
        for model in models:
            model().backward()
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.check("after two steps")
    return sorted(run_lengths(twins.handle)), _most_slices(twins.handle)


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
@pytest.mark.parametrize("flag", ["", "foreach", "fused"])
def test_runs_end_before_they_are_too_long_and_change_no_bit(pool: Pool, flag: str, device: str) -> None:
    need_devices(device, 2)
    assert pool.run(2, _lengths, flag, device=device) == [([1, 2, 5], 1 if flag else 2)] * 2


def _train_in_slices(name: str) -> int:
    slices = 1
    kind = OPTIMIZERS[name][0]
    with mock.patch.object(spans, "LONGEST", 256):
        for flag in flags_of(kind):
            if not torch_steps_dtensors(kind, flag):
                continue
            twins = make_twins(name, flag)
            for step in range(3):
                twins.step(step)
            twins.step(3, skipped=2)
            twins.step(4, keep=True)
            twins.both(lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
            twins.step(5)
            slices = max(slices, _most_slices(twins.handle))
            twins.handle.remove()
            twins.step(6)  # state is where the parameters' own code looks for it
    return slices


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Rprop"])  # which torch cannot step on DTensors
def test_no_bit_depends_on_whether_a_parameter_is_stepped_in_slices(pool: Pool, name: str, device: str) -> None:
    need_devices(device, 2)
    assert min(pool.run(2, _train_in_slices, name, device=device)) > 1, "no parameter was stepped in slices"


class _Lazy(Optimizer):
    """A user's optimizer that refuses gradients which are not finite, and makes its state bit by bit."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("count", 0)
                if not local(parameter.grad).isfinite().all():
                    raise ValueError("a gradient is not finite")
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                state["count"] += 1
                state["mean"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.1 * state["mean"])


class _Exchanging(Optimizer):
    """Two tensors of its state change places in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["one"], state["other"] = torch.zeros_like(parameter), torch.ones_like(parameter)
                state["one"], state["other"] = state["other"], state["one"]
                state["one"].add_(parameter.grad)
                parameter.sub_(0.1 * state["one"])


def _twins(kind: type[Optimizer]) -> Twins:
    models = tuple(fully_shard(nn.Linear(24, 40)) for _ in range(2))
    models[1].load_state_dict(models[0].state_dict())
    one, other = (kind(model.parameters(), {}) for model in models)
    step_on_shards(one, elementwise=True).remove()
    return Twins((models[0], models[1]), (one, other), step_on_shards(other, elementwise=True))


def _backward(model: nn.Module, step: int) -> None:
    model(torch.randn(4, 24, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def _an_error_between_slices() -> int:
    with mock.patch.object(spans, "LONGEST", 256):
        twins = _twins(_Lazy)
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            _backward(model, 0)
            local(model.weight.grad).view(-1)[-1] = torch.nan
            with pytest.raises(ValueError, match="not finite"):
                optimizer.step()
            optimizer.zero_grad()
            _backward(model, 1)
            optimizer.step()
        assert [state["count"] for state in twins.optimizers[1].state.values()] == [1, 1]
        return _most_slices(twins.handle)


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
def test_an_error_between_slices_leaves_no_state_by_halves(pool: Pool) -> None:
    assert min(pool.run(2, _an_error_between_slices)) > 1


def _exchange(longest: int) -> None:
    with mock.patch.object(spans, "LONGEST", longest):
        twins = _twins(_Exchanging)
        for step in range(4):
            for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
                _backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
            twins.check(f"step {step}")


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
@pytest.mark.parametrize("longest", [256, LONGEST])
def test_state_may_change_places(pool: Pool, longest: int) -> None:
    pool.run(2, _exchange, longest)
