"""Whatever is done to an optimizer besides stepping it, an optimizer on shards goes on like any
other.
"""

from __future__ import annotations

import io
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable import fully_shard, remove, step_on_shards
from composable.errors import OptimizerError
from composable.torch_private import step_hooks
from tests.helpers.world import current_device, spmd
from tests.optim.copies import (
    Exchanging,
    Sign,
    groups_of,
    local,
    make_copies,
    plain_copies,
    sharded_model,
    step_beside_plain_copies,
    train,
)

ADAMW: Final = ("AdamW", {"foreach": True})
LOOP: Final = ("AdamW", {"foreach": False})


# --- state dicts --------------------------------------------------------------------------------


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict after a journey through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


@spmd(ranks=2)
def test_state_dicts_cross() -> None:
    """Saved with and loaded without, and the other way round."""
    copies = make_copies(*LOOP)
    copies.steps(0, 1)
    plain, quick = (_saved(optimizer.state_dict()) for optimizer in copies.optimizers)
    assert plain.keys() == quick.keys()
    assert plain["param_groups"] == quick["param_groups"]
    copies.optimizers[0].load_state_dict(quick)
    copies.optimizers[1].load_state_dict(plain)
    copies.check("after loading")
    copies.steps(2, 3)


# --- edits --------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_edits_of_state() -> None:
    copies = make_copies(*ADAMW)
    copies.steps(0, 1)

    def in_place(model: nn.Module, optimizer: Optimizer) -> None:
        for index, state in enumerate(optimizer.state.values()):
            if index % 3 == 0:
                local(state["exp_avg"]).mul_(0.5)
                state["step"].fill_(7.0)

    def replaced(model: nn.Module, optimizer: Optimizer) -> None:
        for index, state in enumerate(optimizer.state.values()):
            if index % 4 == 0:
                state["exp_avg_sq"] = state["exp_avg_sq"].detach().clone()
                state["step"] = torch.tensor(3.0)

    def unseen(model: nn.Module, optimizer: Optimizer) -> None:
        list(optimizer.state.values())[1]["step"].data.fill_(11.0)

    def forgotten(model: nn.Module, optimizer: Optimizer) -> None:
        del optimizer.state[list(optimizer.state)[2]]
        optimizer.state[list(optimizer.state)[3]].clear()

    for number, edit in enumerate((in_place, replaced, unseen, forgotten)):
        copies.both(edit)
        copies.steps(2 + 2 * number, 3 + 2 * number)


@spmd(ranks=2)
def test_groups_that_change() -> None:
    copies = make_copies(*LOOP)
    extra = nn.Parameter(torch.ones(3, device=current_device()))
    copies.steps(0)

    def froze(model: nn.Module, optimizer: Optimizer) -> None:
        frozen = model.blocks[1].second.weight  # type: ignore[union-attr]
        frozen.requires_grad_(True)  # type: ignore[union-attr, operator]
        optimizer.add_param_group({"params": [nn.Parameter(extra.clone())], "lr": 0.5})

    copies.both(froze)
    for optimizer in copies.optimizers:
        optimizer.param_groups[-1]["params"][0].grad = torch.ones_like(extra)
    copies.steps(1, 2)
    for optimizer in copies.optimizers:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["weight_decay"] = 0.5, 0.0
    copies.steps(3)
    assert not torch.equal(copies.optimizers[1].param_groups[-1]["params"][0], extra)


# --- what surrounds a step ----------------------------------------------------------------------


@spmd(ranks=2)
def test_hooks_and_closures() -> None:
    copies = make_copies(*ADAMW)
    optimizer = copies.optimizers[1]
    groups, parameters = (
        optimizer.param_groups,
        [p for group in optimizer.param_groups for p in group["params"]],
    )
    seen: list[str] = []

    def look(where: str, args: tuple[Any, ...]) -> None:
        for one in (optimizer, args[0]):
            assert one.param_groups is groups, where
            assert one.state is optimizer.state, where
        assert all(any(key is p for p in parameters) for key in optimizer.state), where
        seen.append(where)

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        look("closure", (optimizer,))
        return train(copies.models[1], len(seen))

    def hook(stepped: Optimizer, *_: Any) -> None:
        """In the first step, after all hooks that were there before it."""
        if stepped is optimizer and not seen:
            optimizer.register_step_pre_hook(lambda _, args, kwargs: look("before", args))

    optimizer.register_step_post_hook(lambda _, args, kwargs: look("after", args))
    with register_optimizer_step_pre_hook(hook):
        for _ in range(3):
            number = len(seen) + 2  # what the closure will take it for
            copies.optimizers[0].zero_grad()
            expected = train(copies.models[0], number)
            copies.optimizers[0].step()
            assert torch.equal(expected, optimizer.step(closure))  # type: ignore[arg-type]
            copies.check(f"step {number}")
    assert seen == ["before", "closure", "after"] * 3


@spmd(ranks=2)
def test_schedulers() -> None:
    for make in (lambda o: StepLR(o, 2, 0.5), lambda o: OneCycleLR(o, 0.1, total_steps=8)):
        copies = make_copies(*ADAMW, opt_in=False)
        before = make(copies.optimizers[0]), make(copies.optimizers[1])
        step_on_shards(copies.optimizers[1])
        for number in range(4):
            copies.step(number)
            for scheduler in before:
                scheduler.step()
        rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in copies.optimizers
        ]
        assert rates[0] == rates[1]
        after = make(copies.optimizers[0]), make(copies.optimizers[1])
        copies.step(5)
        for scheduler in after:
            scheduler.step()
        copies.step(6)


@spmd(ranks=2)
def test_scaled_gradients() -> None:
    """What a scaler notes on the optimizer reaches its fused kernels: skipped steps, and gradients
    unscaled in place.
    """
    copies = make_copies("AdamW", {"fused": True})
    for number, overflow in enumerate((0.0, 1.0, 0.0)):
        for model, optimizer in zip(copies.models, copies.optimizers, strict=True):
            plain = [
                group
                for group in optimizer.param_groups
                if not isinstance(group["params"][0], DTensor)
            ]
            optimizer.zero_grad()
            train(model, number)
            for group in plain:
                for parameter in group["params"]:
                    parameter.grad = None
            optimizer.found_inf = torch.tensor(overflow, device=current_device())  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        copies.check(f"step {number}")


@spmd(ranks=2)
def test_errors() -> None:
    """A step that fails in a closure, and one that fails in the arithmetic, leave an optimizer that
    goes on.
    """
    copies = make_copies(*LOOP)
    copies.steps(0)
    optimizer = copies.optimizers[1]
    groups = optimizer.param_groups

    def fail() -> float:
        raise KeyError("in the closure")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    assert optimizer.param_groups is groups
    copies.check("after a failed closure")
    copies.steps(1)
    for each in copies.optimizers:
        each.param_groups[-1]["betas"] = 0.9  # found when the other groups were stepped already
        with pytest.raises(TypeError):
            each.step()
        each.param_groups[-1]["betas"] = (0.9, 0.999)
        each.state_dict()
    copies.check("after failed arithmetic")
    copies.steps(2, 3)


@spmd(ranks=2)
def test_annotation_removed() -> None:
    copies = make_copies(*ADAMW)
    copies.steps(0, 1)
    for model in copies.models:
        remove(model, fully_shard)
    whole = [parameter.detach().clone() for parameter in copies.models[1].parameters()]
    for optimizer in copies.optimizers:
        with pytest.raises(OptimizerError, match="was replaced when the annotation was removed"):
            optimizer.step()
    for parameter, expected in zip(copies.models[1].parameters(), whole, strict=True):
        assert torch.equal(parameter, expected), "a refused step changes nothing"


@spmd(ranks=2)
def test_gradients_are_released() -> None:
    """Nothing of a step keeps gradients alive."""
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step_on_shards(optimizer)
    for number in range(2):
        optimizer.zero_grad()
        train(model, number)
        optimizer.step()
        assert all(
            local(parameter).grad is None
            for parameter in model.parameters()
            if isinstance(parameter, DTensor)
        )


# --- what is known to step on shards ------------------------------------------------------------


class Named(optim.AdamW):
    """A subclass that steps like its base."""

    __slots__ = ("note",)


def test_a_subclass_that_steps_like_its_base_is_accepted() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = Named([parameter])
    step_on_shards(optimizer)
    step_on_shards(optimizer)  # twice is as good as once
    assert len(step_hooks(optimizer)[0]) == 1
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert parameter.sum() < 4


@spmd(ranks=2)
def test_an_optimizer_that_is_vouched_for_steps_on_shards() -> None:
    """One that keeps numbers as state, makes new tensors, and writes to its groups and to
    itself.
    """
    for kind in (Sign, Exchanging):
        model = sharded_model()
        groups = groups_of(model, 0.1, apart=False)
        optimizer, reference = kind(groups, {"lr": 0.1}), kind(plain_copies(groups), {"lr": 0.1})
        step_on_shards(optimizer, elementwise=True)
        step_beside_plain_copies(model, optimizer, reference)
        rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, reference)]
        assert rates[0] == rates[1]
        assert optimizer.calls == reference.calls == 5
