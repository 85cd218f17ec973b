"""Frozen parameters: they cost no gradient, no memory for one and no reduction, and what they are
when backward comes decides.

The parity of parameters that stay frozen is in test_compositions and the battery.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import checkpoint, fully_shard, keep_unsharded, no_sync, replicate, unshard
from composable.comm.backends import comms_wrapped_by
from composable.engine.params.param_group import ShardedState
from composable.engine.step.unit import units_below
from composable.traversal import get_handles
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import all_full, assert_mean_gradients, full
from tests.helpers.world import Pool, current_device, spmd

WIDTH = 12


class Adapted(nn.Module):
    """A frozen layer of small integers with its scale, a frozen one, and a low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.quantised = nn.Parameter(
            torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.frozen(x @ self.quantised.to(x.dtype) / 9) + self.up(self.down(x))  # type: ignore[no-any-return]


class Base(nn.Sequential):
    """All of it frozen."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    base = [Base(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False) for _ in range(2)]
    return nn.Sequential(Adapted(), base[0], Adapted(), base[1], nn.Linear(WIDTH, 2)).to(
        current_device()
    )


def _batch(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + turn)
    return torch.randn(3, WIDTH, generator=generator).to(current_device())


@spmd(ranks=2)
def test_frozen_parameters_have_no_gradient_no_memory_for_one_and_no_reduction() -> None:
    model = _model()
    fully_shard(model, policy={Adapted, Base})
    for turn in range(2):
        model(_batch(dist.get_rank(), turn)).sum().backward()
    for groups in get_handles(model):
        for group in groups:
            assert group.state is ShardedState.SHARDED
    for unit in units_below([model]):
        for bucket in unit.gradients.buckets:
            trained = [
                p for p, trains in zip(bucket.at_rest, bucket.trainable, strict=True) if trains
            ]
            assert bool(bucket.reducer.plans) == bool(trained), "no reduction"
            local = sum(parameter.to_local().numel() for parameter in trained)  # type: ignore[attr-defined]
            whole = sum(parameter.numel() for parameter in trained)
            gaps = 16 * (1 + len(trained))  # between parameters, and flags
            for plan in bucket.reducer.plans.values():
                assert plan.layout.numel <= local + gaps
                assert plan.message.tensor.numel() <= whole + 2 * gaps
    for parameter in model.parameters():
        assert (parameter.grad is not None) is parameter.requires_grad


@spmd(ranks=2)
def test_a_frozen_unit_to_which_no_backward_comes_is_not_gathered_in_backward() -> None:
    log = Log()
    model = nn.Sequential(*(Base(nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
    model[:2].requires_grad_(False)
    with comms_wrapped_by(partial(Recording, log=log)):
        fully_shard(model.to(current_device()), policy={Base}, reshard_after_forward=True)
    for turn in range(2):
        output = model(_batch(dist.get_rank(), turn))
        before = len(log.labels())
        output.sum().backward()
        gathered = [label for label in log.labels()[before:] if "all-gather" in label]
        assert gathered == ["all-gather of unit '3'", "all-gather of unit '2'"]


@spmd(ranks=2)
def test_a_frozen_unit_that_is_kept_after_forward_sees_what_is_written_to_it() -> None:
    model, plain = _model(), _model()
    fully_shard(model, policy={Adapted, Base}, reshard_after_forward=False)
    for each in (model, plain):
        each(_batch(0, 0)).sum().backward()
        with torch.no_grad():
            each[1][0].weight.mul_(2)  # type: ignore[index]
    torch.testing.assert_close(model(_batch(0, 1)), plain(_batch(0, 1)))
    state = {
        name: full(tensor) * (3 if tensor.is_floating_point() else 1)
        for name, tensor in model.state_dict().items()
    }
    for each in (model, plain):
        each.load_state_dict(state)
    torch.testing.assert_close(model(_batch(0, 2)), plain(_batch(0, 2)))
    for each in (model, plain):
        each.zero_grad()
        each[1].requires_grad_(True)  # type: ignore[index]
        each(_batch(0, 0)).sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None), name
        if expected.grad is not None and actual.grad is not None:
            torch.testing.assert_close(full(actual.grad), expected.grad, msg=name)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_what_was_planned_for_other_frozen_parameters_is_dropped(verb: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(current_device())
    model = copy.deepcopy(plain)
    verb(model)
    for turn in range(12):
        for each in (plain, model):
            for number, layer in enumerate(each):
                layer.requires_grad_(bool((turn % 7 + 1) >> number & 1))
            each.zero_grad()
            each(_batch(dist.get_rank(), turn)).square().mean().backward()
        assert_mean_gradients(plain, model)
    (unit,) = units_below([model])
    buckets = unit.gradients.buckets or unit.root.post_backward.buckets.buckets
    assert all(0 < len(bucket.reducer.plans) <= 4 for bucket in buckets)


# --- frozen and unfrozen in the middle of a step ------------------------------------------------


class Adapters(nn.Module):
    """A frozen base with an adapter that can be switched off, as PEFT's `disable_adapter` does: it
    freezes the adapter, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5, bias=False)
        self.head, self.on = nn.Linear(5, 2), True

    def switch(self, on: bool) -> None:
        self.on = on
        self.adapter.requires_grad_(on)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return self.head(torch.tanh(y + self.adapter(x) if self.on else y))  # type: ignore[no-any-return]


def _a_reference_between(model: Adapters, x: Tensor, *, grad: bool) -> Tensor:
    """DPO with the reference computed after the policy."""
    y = model(x)
    model.switch(False)
    with torch.set_grad_enabled(grad):
        reference = model(x).detach()
    model.switch(True)
    return (y - reference).square().mean() + y.mean()


def _switched(model: Adapters, x: Tensor) -> Tensor:
    y = model(x)
    model.switch(False)
    model.switch(True)
    return y.square().mean()


def _frozen_before_backward(model: Adapters, x: Tensor) -> Tensor:
    model.head.requires_grad_(True)
    y = model(x)
    model.head.requires_grad_(False)
    return y.square().mean()


def _unfrozen_before_backward(model: Adapters, x: Tensor) -> Tensor:
    model.head.requires_grad_(False)
    y = model(x)
    model.head.requires_grad_(True)
    return y.square().mean()


def _frozen_for_one_of_two_forwards(model: Adapters, x: Tensor) -> Tensor:
    model.adapter.requires_grad_(False)
    y = model(x)
    model.adapter.requires_grad_(True)
    return (y + model(x.sin())).square().mean()


PROGRAMS: Final[dict[str, Callable[[Adapters, Tensor], Tensor]]] = {
    "a reference without gradients": partial(_a_reference_between, grad=False),
    "a reference with gradients": partial(_a_reference_between, grad=True),
    "switched off and on": _switched,
    "frozen before backward": _frozen_before_backward,
    "unfrozen before backward": _unfrozen_before_backward,
    "frozen for one of two forwards": _frozen_for_one_of_two_forwards,
}


def _next_to_shards(model: Adapters) -> None:
    replicate(model.adapter)
    fully_shard(model)


def _recomputed(model: Adapters) -> None:
    checkpoint(model.adapter)
    fully_shard(model, policy={nn.Linear})


def _in_other_dtypes(verb: Callable[..., object], model: Adapters) -> None:
    verb(model, mp_policy=torch.float64)  # of a model in float32: compute parameters are casts


PLANS: Final[dict[str, Callable[[Adapters], object]]] = {
    "one unit": fully_shard,
    "units": partial(fully_shard, policy={nn.Linear}, reshard_after_forward=True),
    "kept": partial(fully_shard, policy={nn.Linear}, reshard_after_forward=False),
    "replicated": replicate,
    "replicated, cast": partial(_in_other_dtypes, replicate),
    "sharded, cast": partial(_in_other_dtypes, fully_shard),
    "next to shards": _next_to_shards,
    "recomputed": _recomputed,
}


def _freeze_in_the_middle(program: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, annotate in PLANS.items():
        torch.manual_seed(0)
        plain = Adapters().to(torch.float32 if "cast" in name else torch.float64)
        model = Adapters().to(plain.head.weight.dtype)
        model.load_state_dict(plain.state_dict())
        if "cast" in name:
            plain.double()
        annotate(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(3):
            batches = [
                torch.randn(
                    3,
                    5,
                    generator=torch.Generator().manual_seed(10 * step + other),
                    dtype=torch.float64,
                )
                for other in range(ranks)
            ]
            for x in batches:
                (PROGRAMS[program](plain, x) / ranks).backward()
            x = batches[rank]
            if step == 2:
                with no_sync(model):
                    (PROGRAMS[program](model, x) / 2).backward()
            (PROGRAMS[program](model, x) / (2 if step == 2 else 1)).backward()
            found = [p.grad for p in model.parameters()]
            expected = [p.grad for p in plain.parameters()]
            assert [g is None for g in found] == [g is None for g in expected], (
                f"{name}, step {step}"
            )
            there = zip(
                all_full([g for g in found if g is not None]),
                [g for g in expected if g is not None],
                strict=True,
            )
            tolerance = (1e-4, 1e-6) if "cast" in name else (1e-9, 1e-11)
            for one, other in there:
                torch.testing.assert_close(
                    one.double(),
                    other,
                    rtol=tolerance[0],
                    atol=tolerance[1],
                    msg=f"{name}, step {step}",
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_frozen_when_backward_comes_decides(pool: Pool, program: str) -> None:
    pool.run(2, _freeze_in_the_middle, program)


def test_what_is_frozen_when_backward_comes_decides_on_three_ranks(pool: Pool) -> None:
    pool.run(3, _freeze_in_the_middle, "a reference without gradients")


class Recomputed(nn.Module):
    """A frozen part before one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tower.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x).sin())  # which saves what it gets, if that needs gradients


@spmd(ranks=2)
def test_a_recomputation_does_as_its_own_forward_did_and_not_as_the_last_one() -> None:
    """Of a frozen unit's outputs: these need gradients in the second forward only, whose backward
    comes first.
    """
    torch.manual_seed(0)
    plain, ours = (Recomputed().to(current_device(), torch.float64) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    for verb in (checkpoint, partial(fully_shard, policy={nn.Linear})):
        verb(ours)
    x = torch.randn(3, 4, dtype=torch.float64, device=current_device())
    for _ in range(2):
        for model in (plain, ours):
            first, second = model(x), model(x.clone().requires_grad_())
            second.square().sum().backward()
            first.sum().backward()
        assert_mean_gradients(plain, ours)


def _frozen_as_shown(way: str) -> None:
    """Parts are frozen, and unfrozen, where modules hold whole parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(current_device(), torch.float64)
    ours = copy.deepcopy(plain)
    fully_shard(ours, policy={nn.Linear})
    at_rest = [list(part.parameters()) for part in ours]
    x = torch.randn(3, 4, dtype=torch.float64, device=current_device())
    for step, freezes in enumerate([True, False, True, False]):
        part = step // 2
        plain[part].requires_grad_(not freezes)
        with ExitStack() as stack:
            if way == "unshard":
                unshard(ours)
            else:
                stack.enter_context(keep_unsharded(ours))
            if way == "by what is at rest":
                for parameter in at_rest[part]:
                    parameter.requires_grad_(not freezes)
            else:
                ours[part].requires_grad_(not freezes)
            if way == "before the scope ends":
                stack.close()
            if way == "evaluated first":
                with torch.no_grad():
                    ours(x)
            losses = [model(x).square().sum() for model in (plain, ours)]
            for loss in losses:
                loss.backward()
        assert_mean_gradients(plain, ours)
        for model in (plain, ours):
            model.zero_grad()


@pytest.mark.parametrize(
    "way",
    ["unshard", "keep_unsharded", "evaluated first", "before the scope ends", "by what is at rest"],
)
def test_what_is_frozen_where_modules_hold_whole_parameters_is_frozen(pool: Pool, way: str) -> None:
    pool.run(2, _frozen_as_shown, way)
