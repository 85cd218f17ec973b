"""`local_steps`: replicas that train apart, and an outer optimizer that steps by their mean
difference (DiLoCo).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Optimizer

from composable import (
    CPUOffloadPolicy,
    apply_optimizer_in_backward,
    clip_grad_norm_,
    fully_shard,
    local_steps,
    no_sync,
    reduce_gradients,
    remove,
)
from composable.comm.backends import comms_wrapped_by
from composable.errors import (
    OptimizerError,
    PhaseError,
)
from tests.algorithms.replicas import (
    WORLDS,
    annotated,
    assert_same_parameters,
    average_by_hand,
    backward,
    batch,
    by_hand,
    grid,
    local,
)
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import Pool, need_devices, spmd
from tests.state.models import Block, plain

_sgd = partial(SGD, lr=0.1, momentum=0.5)
_nesterov = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
_adam = partial(Adam, lr=0.02, eps=1e-3)  # a small eps would make of rounding errors whole steps


def _step(model: nn.Module, optimizer: Optimizer, step: int, replica: int) -> None:
    backward(model, step, replica)
    optimizer.step()
    optimizer.zero_grad()


class _OuterByHand:
    """The arithmetic of `Note [Outer steps]`, over copies of the model in one process."""

    def __init__(
        self, every: int, outer: Callable[[Any], Optimizer], delay: int = 0, keep: float = 0.0
    ) -> None:
        self.backup = plain()
        self._outer = outer(self.backup.parameters())
        self._every, self._delay, self._keep = every, delay, keep

    @torch.no_grad()
    def __call__(self, step: int, models: list[Any]) -> None:
        if (step + 1 + self._delay) % self._every == 0:
            for backup, *copies in zip(
                self.backup.parameters(), *(model.parameters() for model in models), strict=True
            ):
                backup.grad = backup - torch.stack(copies).mean(0)
        if (step + 1) % self._every == 0:
            self._outer.step()
            for backup, *copies in zip(
                self.backup.parameters(), *(model.parameters() for model in models), strict=True
            ):
                for parameter in copies:
                    parameter.copy_(self._keep * parameter + (1 - self._keep) * backup)


# --- the same arithmetic ------------------------------------------------------------------------


def _as_by_hand(
    plan: str, replicas: int, outer: Any, delay: int, keep: float, offload: bool
) -> None:
    model, replica = annotated(plan, replicas)
    optimizer = _sgd(model.parameters())
    local_steps(model, optimizer, every=3, outer=outer, delay=delay, keep=keep, offload=offload)
    for step in range(7):
        _step(model, optimizer, step, replica)
    expected = by_hand(replicas, 7, _sgd, _OuterByHand(3, outer, delay, keep))
    assert_same_parameters(model, expected[replica])


@pytest.mark.parametrize("outer", [_nesterov, _adam], ids=["nesterov", "adam"])
@pytest.mark.parametrize(("plan", "ranks", "replicas"), WORLDS)
def test_rounds_are_those_of_loops_over_replicas(
    pool: Pool, plan: str, ranks: int, replicas: int, outer: Any, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _as_by_hand, plan, replicas, outer, 0, 0.0, False, device=device)


@pytest.mark.parametrize(
    ("delay", "keep", "offload"), [(1, 0.0, False), (2, 0.5, False), (0, 0.0, True), (1, 0.5, True)]
)
def test_messages_may_be_sent_early_and_backups_be_on_the_host(
    pool: Pool, delay: int, keep: float, offload: bool, device: str
) -> None:
    need_devices(device, 4)
    pool.run(4, _as_by_hand, "hybrid", 2, _nesterov, delay, keep, offload, device=device)


@spmd(ranks=4)
def test_parameters_that_rest_on_the_host_take_outer_steps_there() -> None:
    mesh = grid(2)
    model = fully_shard(plain(), mesh=mesh, policy={Block}, offload_policy=CPUOffloadPolicy())
    optimizer = _sgd(model.parameters())
    local_steps(model, optimizer, every=2, outer=_nesterov, delay=1)
    for step in range(4):
        _step(model, optimizer, step, mesh.get_local_rank("replicate"))
    assert_same_parameters(model, by_hand(2, 4, _sgd, _OuterByHand(2, _nesterov, delay=1))[0])


@spmd(ranks=4)
def test_replicated_units_inside_hybrid_ones_are_reduced_inside_their_replica() -> None:
    _as_by_hand("replicate inside hybrid", 2, _nesterov, 0, 0.0, False)


@spmd(ranks=4)
def test_islands_that_are_annotated_by_themselves_take_outer_steps_over_ranks_outside() -> None:
    mesh = grid(2)
    model = fully_shard(plain(), mesh=mesh["shard"], policy={Block})
    optimizer = _sgd(model.parameters())
    local_steps(model, optimizer, every=2, over=mesh["replicate"], outer=_nesterov)
    for step in range(4):
        _step(model, optimizer, step, mesh.get_local_rank("replicate"))
    assert_same_parameters(model, by_hand(2, 4, _sgd, _OuterByHand(2, _nesterov))[0])


@spmd(ranks=4)
def test_accumulation_and_clipping_are_those_of_a_replica() -> None:
    model, replica = annotated("hybrid", 2)
    optimizer = _sgd(model.parameters())
    local_steps(model, optimizer, every=2, outer=_nesterov)
    expected, by_hand_ = [copy.deepcopy(plain()) for _ in range(2)], _OuterByHand(2, _nesterov)
    optimizers = [_sgd(each.parameters()) for each in expected]
    for step in range(4):
        for level in ("all", "replicate"):
            with no_sync(model, level=level):
                backward(model, step, replica)
        backward(model, step + 50, replica)
        norm = clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for index, each in enumerate(expected):
            for number in (step, step, step + 50):
                backward(each, number, index)
            alone = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            if index == replica:
                torch.testing.assert_close(norm, alone)
            optimizers[index].step()
            optimizers[index].zero_grad()
        by_hand_(step, expected)
    assert_same_parameters(model, expected[replica])


@spmd(ranks=4)
def test_bfloat16_parameters_have_bfloat16_backups() -> None:
    mesh = grid(2)
    model = fully_shard(plain().to(torch.bfloat16), mesh=mesh, policy={Block})
    optimizer = SGD(model.parameters(), lr=0.5)
    outer = local_steps(model, optimizer, every=1, outer=partial(SGD, lr=1.0))
    expected = [local(parameter) - 0.25 for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, mesh.get_local_rank("replicate"))
    optimizer.step()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(local(parameter), value)
    assert all(backup.dtype is torch.bfloat16 for backup in outer.state_dict()["backups"].values())


# --- messages -----------------------------------------------------------------------------------


@spmd(ranks=4)
def test_nothing_travels_between_replicas_until_the_round_ends_with_one_message_per_unit() -> None:
    log, between = Log(), Log()

    def record(comm: Any) -> Any:
        apart = (
            comm.size == 2
            and abs(
                dist.get_process_group_ranks(comm.group)[1]
                - dist.get_process_group_ranks(comm.group)[0]
            )
            == 2
        )
        return Recording(comm, between if apart or comm.size == 4 else log)

    with comms_wrapped_by(record):
        model, replica = annotated("hybrid", 2)
        optimizer = _sgd(model.parameters())
        local_steps(model, optimizer, every=3, delay=1)
        names = ["(root)", *(f"blocks.{index}" for index in range(3))]
        for step in range(3):
            between.events.clear()
            _step(model, optimizer, step, replica)
            messages = [f"outer step of unit '{name}'" for name in names]
            assert between.labels() == (messages if step == 1 else []), step
            assert between.labels("wait") == (messages if step == 2 else []), step
    assert any("gradient reduction" in label for label in log.labels())


@spmd(ranks=4)
def test_frozen_parameters_are_not_sent_and_unfrozen_ones_are_refused() -> None:
    model, replica = annotated("hybrid", 2)
    model.blocks[0].requires_grad_(False)
    optimizer = _sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    outer = local_steps(model, optimizer, every=2)
    assert not any(name.startswith("blocks.0.") for name in outer.state_dict()["backups"])
    _step(model, optimizer, 0, replica)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(
        PhaseError, match=r"^local_steps: 'blocks\.0\.scale'.* was unfrozen or added since"
    ):
        _step(model, optimizer, 1, replica)


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["hybrid", "replicate"])
@spmd(ranks=[2, 4])
def test_the_end_of_the_context_averages_and_gives_back_synchronous_training(plan: str) -> None:
    replicas = dist.get_world_size() if plan == "replicate" else 2
    model, replica = annotated(plan, replicas)
    optimizer = SGD(model.parameters(), lr=0.1)
    with local_steps(model, optimizer, every=4, delay=3):
        for step in range(2):
            _step(model, optimizer, step, replica)
    for step in range(2, 5):
        _step(model, optimizer, step, replica)

    def together(step: int, models: list[Any]) -> None:
        if step >= 1:
            average_by_hand(models)  # with SGD, the same as the mean of gradients

    assert_same_parameters(model, by_hand(replicas, 5, partial(SGD, lr=0.1), together)[0])


@spmd(ranks=2)
def test_an_exception_that_leaves_the_context_keeps_replicas_apart() -> None:
    model, replica = annotated("replicate", 2)
    optimizer = _sgd(model.parameters())
    outer = local_steps(model, optimizer, every=4)
    _step(model, optimizer, 0, replica)
    with pytest.raises(ZeroDivisionError), outer:
        raise ZeroDivisionError
    backward(model, 1, replica)
    mine = model.blocks[0].scale.grad
    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    assert not torch.equal(*gathered)
    optimizer.zero_grad()
    outer.remove()
    outer.remove()


@spmd(ranks=2)
@pytest.mark.parametrize("plan", ["replicate", "hybrid"])
def test_hooks_on_parameters_are_called_once_per_backward(plan: str) -> None:
    model, replica = annotated(plan, 2)
    optimizer = _sgd(model.parameters())
    calls = dict.fromkeys(model.parameters(), 0)

    def count(parameter: nn.Parameter) -> None:
        calls[parameter] += 1

    for parameter in calls:
        parameter.register_post_accumulate_grad_hook(count)
    with local_steps(model, optimizer, every=2):
        for step in range(3):
            _step(model, optimizer, step, replica)
            assert set(calls.values()) == {step + 1}
    _step(model, optimizer, 3, replica)
    assert set(calls.values()) == {4}


@spmd(ranks=2)
def test_local_steps_end_after_the_annotation_was_removed() -> None:
    model, replica = annotated("replicate", 2)
    optimizer = _sgd(model.parameters())
    outer = local_steps(model, optimizer, every=4)
    _step(model, optimizer, 0, replica)
    remove(model, "replicate")
    outer.remove()
    for step in range(4):
        _step(model, optimizer, step, replica)
    assert outer.steps == 1


# --- which steps count --------------------------------------------------------------------------


def _halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return parameters[::2], parameters[1::2]


def _both_in_backward(model: nn.Module) -> list[Optimizer]:
    return [
        apply_optimizer_in_backward(SGD, half, {"lr": 0.1, "momentum": 0.5})
        for half in _halves(model)
    ]


def _one_in_backward(model: nn.Module) -> list[Optimizer]:
    first, second = _halves(model)
    return [_sgd(second), apply_optimizer_in_backward(SGD, first, {"lr": 0.1, "momentum": 0.5})]


def _none_in_backward(model: nn.Module) -> list[Optimizer]:
    return [_sgd(half) for half in _halves(model)]


@spmd(ranks=2)
@pytest.mark.parametrize("plan", ["replicate", "hybrid"])
@pytest.mark.parametrize("start", [_both_in_backward, _one_in_backward, _none_in_backward])
def test_a_step_counts_when_all_optimizers_have_made_it(
    plan: str, start: Callable[[nn.Module], list[Optimizer]]
) -> None:
    for backwards in (False, True):
        model, replica = annotated(plan, 2)
        optimizers = start(model)
        outer = local_steps(model, optimizers[::-1] if backwards else optimizers, every=2)
        for step in range(5):
            backward(model, step, replica)
            for each in optimizers:
                each.step()
                each.zero_grad()
        assert outer.steps == 5
        assert_same_parameters(model, by_hand(2, 5, _sgd, _OuterByHand(2, _nesterov))[replica])


@spmd(ranks=2)
@pytest.mark.parametrize("plan", ["replicate", "hybrid"])
def test_backwards_that_step_nothing_do_not_count(plan: str) -> None:
    model, replica = annotated(plan, 2)
    optimizer = apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    with local_steps(model, optimizer, every=4) as outer:
        with no_sync(model):
            backward(model, 0, replica)
        assert outer.steps == 0
        reduce_gradients(model)
        assert outer.steps == 1
        hidden: list[torch.Tensor] = []
        handle = model.blocks[0].register_forward_hook(lambda _, __, out: hidden.append(out))
        torch.autograd.grad(model(batch(0, replica)[0]).sum(), hidden)
        handle.remove()
        assert outer.steps == 1
        backward(model, 1, replica)
        assert outer.steps == 2
    backward(model, 2, replica)
    assert outer.steps == 2


@spmd(ranks=2)
@pytest.mark.parametrize("plan", ["replicate", "hybrid"])
def test_an_optimizer_that_was_not_passed_may_step_first_and_not_after_a_round(plan: str) -> None:
    model, replica = annotated(plan, 2)
    first, second = _none_in_backward(model)
    with local_steps(model, second, every=2) as outer:
        for step in range(5):
            backward(model, step, replica)
            for each in (first, second):
                each.step()
                each.zero_grad()
    assert outer.steps == 5
    model, replica = annotated(plan, 2)
    first, second = _none_in_backward(model)
    local_steps(model, first, every=2)
    for step in range(2):
        backward(model, step, replica)
        first.step()
        with pytest.raises(OptimizerError, match="Pass all optimizers") if step else nullcontext():
            second.step()
        first.zero_grad()
        second.zero_grad()


class _Counting(SGD):
    """With a number in its group and one of its own that count steps, and steps that no learning
    rate scales.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5, momentum=0.5)
        self.param_groups[0].update(k=0, total=torch.zeros(()))
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += 1
            torch._foreach_mul_([local(p).detach() for p in group["params"]], 0.5)


@spmd(ranks=2)
@pytest.mark.parametrize("plan", ["replicate", "hybrid"])
def test_looking_at_the_state_changes_nothing(plan: str) -> None:
    models = []
    for looks in (False, True):
        model, replica = annotated(plan, 2)
        optimizer = _sgd(model.parameters())
        outer = local_steps(model, optimizer, every=2, outer=_Counting)
        for step in range(5):
            if looks:
                state = outer.state_dict()
                (group,) = state["groups"]
                assert (group["k"], group["total"].item(), outer.outer.calls) == (step // 2,) * 3
                assert all("momentum_buffer" in each for each in state["outer"].values())
            _step(model, optimizer, step, replica)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(local(one), local(other))


# --- state --------------------------------------------------------------------------------------


def _resumes(plan: str, replicas: int, delay: int, at: int, outer: Any, folder: str) -> None:
    """One checkpoint per replica, inside a round, where replicas differ; and with a message under
    way.
    """

    def start() -> tuple[Any, Optimizer, Any]:
        model, _ = annotated(plan, replicas)
        optimizer = _sgd(model.parameters())
        return model, optimizer, local_steps(model, optimizer, every=3, outer=outer, delay=delay)

    mesh = grid(replicas)
    replica, group = mesh.get_local_rank("replicate"), mesh.get_group("shard")
    where = {"checkpoint_id": f"{folder}/{replica}", "process_group": group}
    model, optimizer, steps = start()
    for step in range(at):
        _step(model, optimizer, step, replica)
    saved = copy.deepcopy(optimizer.state_dict())
    dcp.save({"model": model.state_dict(), "outer": steps.state_dict()}, **where)
    for step in range(at, 8):
        _step(model, optimizer, step, replica)

    again, optimizer, steps = start()
    state = {"model": again.state_dict(), "outer": steps.state_dict()}
    dcp.load(state, **where)
    again.load_state_dict(state["model"])
    optimizer.load_state_dict(saved)
    steps.load_state_dict(state["outer"])
    for step in range(at, 8):
        _step(again, optimizer, step, replica)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(local(one), local(other)), name


@pytest.mark.parametrize(("delay", "at"), [(0, 1), (0, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize(
    ("plan", "ranks", "replicas", "outer"),
    [("hybrid", 4, 2, _nesterov), ("replicate", 2, 2, _adam)],
)
def test_it_resumes_exactly_from_one_checkpoint_per_replica(
    pool: Pool,
    plan: str,
    ranks: int,
    replicas: int,
    outer: Any,
    delay: int,
    at: int,
    device: str,
    tmp_path: Path,
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _resumes, plan, replicas, delay, at, outer, str(tmp_path), device=device)


@spmd(ranks=4)
def test_state_is_sharded_as_the_parameters_are_and_known_by_name() -> None:
    model, replica = annotated("hybrid", 2)
    optimizer = _sgd(model.parameters())
    outer = local_steps(model, optimizer, every=1)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(2):
        state = outer.state_dict()
        assert sorted(state["backups"]) == sorted(state["outer"]) == sorted(names)
        momentum, weight = (
            state["outer"]["blocks.0.up.weight"]["momentum_buffer"],
            model.blocks[0].up.weight,
        )
        assert isinstance(momentum, DTensor)
        assert (momentum.placements, momentum.to_local().shape) == (
            weight.placements,
            weight.to_local().shape,
        )
        _step(model, optimizer, 0, replica)
    state["backups"].pop("blocks.0.up.weight")
    with pytest.raises(KeyError, match=r"local_steps: 'blocks\.0\.up\.weight' is in only one"):
        outer.load_state_dict(state)
