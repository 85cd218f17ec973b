"""`summon_full_params`: whole plain parameters inside the scope, and what becomes of edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    no_sync,
    summon_full_params,
)
from composable.errors import (
    ForeignParameterError,
    PhaseError,
    RanksDisagreeError,
)
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd
from tests.state.models import PLANS, Block, Net, plain, tokens

_CHOICES = [
    pytest.param({}, id="defaults"),
    pytest.param({"rank0_only": True}, id="rank0_only"),
    pytest.param({"offload_to_cpu": True}, id="offload_to_cpu"),
    pytest.param({"rank0_only": True, "offload_to_cpu": True}, id="rank0_only and offload_to_cpu"),
]


def _annotated(plan: str) -> Net:
    model = plain()
    PLANS[plan](model)
    return model


@pytest.mark.parametrize("choices", _CHOICES)
@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=[2, 4])
def test_edits_are_written_back(plan: str, choices: dict[str, bool]) -> None:
    model, expected = _annotated(plan), plain()
    edits = not choices.get("rank0_only") or dist.get_rank() == 0
    with torch.no_grad(), summon_full_params(model, **choices):
        if edits:
            assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
            for (name, value), whole in zip(
                model.named_parameters(), expected.parameters(), strict=True
            ):
                assert torch.equal(value.cpu(), whole.cpu()), name
                assert value.dtype == torch.float32
                assert value.is_cpu or not choices.get("offload_to_cpu")
            model.embed.weight[3] = 7.0
            model.blocks[1].scale.data.fill_(5.0)
    with torch.no_grad():
        expected.embed.weight[3] = 7.0
        expected.blocks[1].scale.fill_(5.0)
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, expected.state_dict()[name].cpu()), name
    model(tokens(0)).sum().backward()


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=2)
def test_edits_without_writeback_or_before_an_exception_are_dropped(plan: str) -> None:
    model = _annotated(plan)
    before = full_state_dict(model, rank0_only=False)
    with torch.no_grad(), summon_full_params(model, writeback=False):
        for parameter in model.parameters():
            parameter.zero_()

    def edit_and_fail() -> None:
        with torch.no_grad(), summon_full_params(model):
            model.blocks[0].up.weight.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        edit_and_fail()
    after = full_state_dict(model, rank0_only=False)
    # where the user's own parameters stay registered, an exception undoes nothing
    if plan != "replicate":
        assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=2)
def test_gradients_are_read_and_written(plan: str) -> None:
    model = _annotated(plan)
    model(tokens(dist.get_rank())).sum().backward()
    before = {
        name: full(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    with torch.no_grad(), summon_full_params(model, with_grads=True, rank0_only=True):
        if dist.get_rank() == 0:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.cpu(), before[name].cpu(), rtol=0, atol=0)
            model.blocks[0].up.weight.grad = torch.ones_like(model.blocks[0].up.weight)
            assert model.blocks[0].up.bias.grad is not None
            model.blocks[0].up.bias.grad.fill_(2.0)
            model.blocks[0].scale.grad = None
    assert (full(model.blocks[0].up.weight.grad) == 1).all()
    assert (full(model.blocks[0].up.bias.grad) == 2).all()
    assert model.blocks[0].scale.grad is None
    with summon_full_params(model):
        assert plan == "replicate" or all(
            parameter.grad is None for parameter in model.parameters()
        )


@pytest.mark.parametrize("choices", [_CHOICES[0], _CHOICES[3]])
@pytest.mark.parametrize(
    "plan", ["fully_shard", "hybrid", "replicate", "replicate inside fully_shard"]
)
@spmd(ranks=2)
def test_freezing_and_attributes_are_kept(plan: str, choices: dict[str, bool]) -> None:
    model, expected = plain(), plain()
    model.embed.weight.mark = ["before"]  # type: ignore[attr-defined]
    PLANS[plan](model)
    edits = not choices.get("rank0_only") or dist.get_rank() == 0
    with summon_full_params(model, **choices):
        assert model.head.weight.mark == ["before"]  # type: ignore[attr-defined]
        model.blocks[0].scale.mark = "inside"  # type: ignore[attr-defined]
        if edits:
            model.blocks[1].requires_grad_(False)
    expected.blocks[1].requires_grad_(False)
    assert model.blocks[0].scale.mark == "inside"  # type: ignore[attr-defined]
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in expected.parameters()
    ]
    model(tokens(0)).square().sum().backward()
    expected(tokens(0)).square().sum().backward()
    for (name, parameter), other in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(full(parameter.grad), other.grad, msg=name)
    with summon_full_params(model, writeback=False, **choices):
        model.requires_grad_(True)
    # The user's own parameters, and shards of ranks that see no whole ones, are what is edited
    # there.
    assert model.blocks[1].scale.requires_grad == (
        choices.get("rank0_only", False) and dist.get_rank() > 0
    )


def _tie(model: Net) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def _tie_in_a_new_module(model: Net) -> None:
    model.blocks[0].added = nn.Linear(5, 9)
    model.blocks[0].added.weight = model.blocks[0].up.weight


def _cast(model: Net) -> None:
    model.double()


def _register_hook(model: Net) -> None:
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_tie, r"'blocks\.1\.up\.weight' was tied to 'blocks\.0\.up\.weight' inside the scope"),
        (
            _tie_in_a_new_module,
            r"'blocks\.0\.added\.weight' was tied to 'blocks\.0\.up\.weight' inside the scope",
        ),
        (_cast, r"'embed\.weight' of unit '\(root\)' .* and is torch\.float64 after the scope"),
        (
            _register_hook,
            r"a hook was registered on parameter 'blocks\.0\.up\.weight' of unit 'blocks\.0'",
        ),
    ],
)
@spmd(ranks=2)
def test_what_shards_cannot_take_over_is_refused_at_the_end_on_all_ranks(
    edit: Any, said: str, rank0_only: bool
) -> None:
    model = _annotated("fully_shard")
    before = full_state_dict(model, rank0_only=False)
    first = dist.get_rank() == 0
    error = ForeignParameterError if first or not rank0_only else RanksDisagreeError

    def act() -> None:
        with torch.no_grad():
            model.blocks[2].up.weight.add_(1.0)
        edit(model)

    with pytest.raises(error, match=said), summon_full_params(model, rank0_only=rank0_only):
        act() if first or not rank0_only else None
    if edit is not _tie_in_a_new_module:
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(
            torch.equal(value, before[name])
            for name, value in full_state_dict(model, rank0_only=False).items()
        )
        model(tokens(0)).sum().backward()


@spmd(ranks=2)
def test_after_a_refused_edit_modules_hold_what_the_scope_around_shows() -> None:
    model = fully_shard(plain(), policy={Block})
    with keep_unsharded(model):
        with pytest.raises(ForeignParameterError, match="a hook"), summon_full_params(model):
            model.head.weight.register_hook(lambda gradient: gradient)
        assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.head.weight, DTensor)


@spmd(ranks=2)
def test_an_edit_of_a_tied_parameter_and_a_tie_to_a_parameter_of_the_users_own_are_kept() -> None:
    model = _annotated("replicate")
    with torch.no_grad(), summon_full_params(model):
        model.head.weight[0] = 3.0
        model.blocks[1].scale = model.blocks[0].scale
    assert model.blocks[1].scale is model.blocks[0].scale
    assert (model.embed.weight[0] == 3).all()
    model(tokens(0)).sum().backward()


@spmd(ranks=2)
def test_between_forward_and_backward_nothing_is_lost() -> None:
    model, expected = _annotated("fully_shard"), plain()
    loss = model(tokens(0)).square().sum()
    with summon_full_params(model):
        total = sum(parameter.detach().sum().item() for parameter in model.parameters())
    loss.backward()
    expected(tokens(0)).square().sum().backward()
    assert total == sum(parameter.detach().sum().item() for parameter in expected.parameters())
    for (name, parameter), other in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), other.grad, msg=name)


@spmd(ranks=2)
def test_scopes_nest_and_the_outer_one_decides() -> None:
    model = _annotated("fully_shard")
    with torch.no_grad(), summon_full_params(model, writeback=False):
        with summon_full_params(model.blocks[0]):
            model.blocks[0].scale.fill_(5.0)
        assert model.blocks[0].scale.item() == 5.0
    assert full(model.blocks[0].scale).item() != 5.0


@spmd(ranks=2)
def test_without_recurse_units_below_stay_sharded() -> None:
    model = _annotated("fully_shard")
    with summon_full_params(model, recurse=False):
        assert not isinstance(model.embed.weight, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor)


@spmd(ranks=2)
def test_a_step_inside_the_scope_is_refused_and_kept() -> None:
    model = _annotated("fully_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(tokens(0)).sum().backward()
    before = full(model.blocks[0].scale).item()
    with (
        pytest.raises(PhaseError, match="was written to inside the scope"),
        summon_full_params(model),
    ):
        optimizer.step()
    assert full(model.blocks[0].scale).item() != before


@spmd(ranks=2)
def test_a_parameter_registered_inside_the_scope_is_adopted_by_the_next_forward() -> None:
    model = _annotated("fully_shard")
    with summon_full_params(model):
        model.blocks[0].scale = nn.Parameter(torch.full((1,), 3.0, device=current_device()))
    model(tokens(0)).sum().backward()
    assert isinstance(model.blocks[0].scale, DTensor)
    assert full(model.blocks[0].scale).item() == 3.0


@spmd(ranks=2)
def test_accumulated_gradients_are_in_nobodys_way_unless_they_are_shown() -> None:
    model = _annotated("fully_shard")
    with no_sync(model):
        model(tokens(0)).sum().backward()
    with torch.no_grad(), summon_full_params(model):
        model.blocks[0].scale.fill_(2.0)
    assert full_state_dict(model, rank0_only=False)["blocks.0.scale"].item() == 2.0
    model(tokens(0)).sum().backward()


@spmd(ranks=2)
def test_gradients_of_another_dtype_are_sent_in_it() -> None:
    model = plain()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, keep_grads_in_reduce_dtype=True)
    fully_shard(model, policy={Block}, mp_policy=policy)
    model(tokens(0)).sum().backward()
    with torch.no_grad(), summon_full_params(model, with_grads=True, rank0_only=True):
        if dist.get_rank() == 0:
            gradient = model.blocks[0].up.bias.grad
            assert gradient is not None
            assert gradient.dtype == torch.bfloat16
            gradient.fill_(3.0)
    assert model.blocks[0].up.bias.grad is not None
    assert model.blocks[0].up.bias.grad.dtype == torch.bfloat16
    assert (full(model.blocks[0].up.bias.grad) == 3).all()
