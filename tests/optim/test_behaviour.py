"""Whatever is done to an optimizer besides stepping it, an optimizer on shards goes on like any other."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from composable import step_on_shards
from tests.helpers.world import Pool, current_device, need_devices
from tests.optim.twins import Twins, assert_same, local, make_twins, sharded_model, train

ADAMW: Final = ("AdamW", {"foreach": True})
LOOP: Final = ("AdamW", {"foreach": False})


def _after_steps(twins: Twins, *numbers: int) -> None:
    for number in numbers:
        twins.step(number)


# --- state dicts ------------------------------------------------------------------------------------------------------


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict after a journey through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def _state_dicts_cross() -> None:
    """Saved with and loaded without, and the other way round."""
    twins = make_twins(*LOOP)
    _after_steps(twins, 0, 1)
    plain, quick = (_saved(optimizer.state_dict()) for optimizer in twins.optimizers)
    assert plain.keys() == quick.keys()
    assert plain["param_groups"] == quick["param_groups"]
    twins.optimizers[0].load_state_dict(quick)
    twins.optimizers[1].load_state_dict(plain)
    twins.check("after loading")
    _after_steps(twins, 2, 3)


def _state_loaded_by_reference() -> None:
    """A state dict that was not saved holds the tensors themselves."""
    twins = make_twins(*ADAMW)
    _after_steps(twins, 0, 1)
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _after_steps(twins, 2)
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    _after_steps(twins, 3)


def _a_step_back() -> None:
    """What was loaded in the middle counts, not what went before."""
    twins = make_twins(*ADAMW)
    _after_steps(twins, 0)
    early = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
    _after_steps(twins, 1, 2)
    for optimizer, state in zip(twins.optimizers, early, strict=True):
        optimizer.load_state_dict(state)
    _after_steps(twins, 3)
    assert {float(state["step"]) for state in twins.optimizers[1].state.values()} == {2.0}


def _distributed_state_dicts() -> None:
    twins = make_twins(*LOOP)
    states = [get_optimizer_state_dict(m, o) for m, o in zip(twins.models, twins.optimizers, strict=True)]
    twins.check("what looking at empty state leaves behind")
    _after_steps(twins, 0, 1)
    states = [get_optimizer_state_dict(m, o) for m, o in zip(twins.models, twins.optimizers, strict=True)]
    assert list(states[0]["state"]) == list(states[1]["state"])
    for name, expected in states[0]["state"].items():
        for key, value in expected.items():
            assert_same(value, states[1]["state"][name][key], f"{key} of {name}")
    states = [copy.deepcopy(state) for state in states]
    _after_steps(twins, 2)
    for model, optimizer, state in zip(twins.models, twins.optimizers, reversed(states), strict=True):
        set_optimizer_state_dict(model, optimizer, state)
    _after_steps(twins, 3)


# --- edits ------------------------------------------------------------------------------------------------------------


def _edits_of_state() -> None:
    twins = make_twins(*ADAMW)
    _after_steps(twins, 0, 1)

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
        twins.both(edit)
        _after_steps(twins, 2 + 2 * number, 3 + 2 * number)


def _edits_of_gradients() -> None:
    twins = make_twins(*ADAMW)
    for number in range(4):
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            optimizer.zero_grad()
            train(model, number)
            if number == 1:
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if isinstance(p, DTensor)], 0.01)
            for index, parameter in enumerate(model.parameters()):
                if parameter.grad is not None and number == 2 and index % 2:
                    parameter.grad = parameter.grad * 0.5
                if number == 3 and index % 5 == 0:
                    parameter.grad = None
            optimizer.step()
        twins.check(f"step {number}")


def _groups_that_change() -> None:
    twins = make_twins(*LOOP)
    extra = nn.Parameter(torch.ones(3, device=current_device()))
    _after_steps(twins, 0)

    def froze(model: nn.Module, optimizer: Optimizer) -> None:
        frozen = model.blocks[1].second.weight  # type: ignore[union-attr]
        frozen.requires_grad_(True)  # type: ignore[union-attr, operator]
        optimizer.add_param_group({"params": [nn.Parameter(extra.clone())], "lr": 0.5})

    twins.both(froze)
    for optimizer in twins.optimizers:
        optimizer.param_groups[-1]["params"][0].grad = torch.ones_like(extra)
    _after_steps(twins, 1, 2)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["weight_decay"] = 0.5, 0.0
    _after_steps(twins, 3)
    assert not torch.equal(twins.optimizers[1].param_groups[-1]["params"][0], extra)


# --- what surrounds a step --------------------------------------------------------------------------------------------


def _hooks_and_closures() -> None:
    twins = make_twins(*ADAMW)
    optimizer = twins.optimizers[1]
    groups, parameters = optimizer.param_groups, [p for group in optimizer.param_groups for p in group["params"]]
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
        return train(twins.models[1], len(seen))

    optimizer.register_step_pre_hook(lambda _, args, kwargs: look("before", args))
    optimizer.register_step_post_hook(lambda _, args, kwargs: look("after", args))
    for _ in range(3):
        number = len(seen) + 2  # what the closure will take it for
        twins.optimizers[0].zero_grad()
        expected = train(twins.models[0], number)
        twins.optimizers[0].step()
        assert torch.equal(expected, optimizer.step(closure))  # type: ignore[arg-type]
        twins.check(f"step {number}")
    assert seen == ["before", "closure", "after"] * 3


def _schedulers() -> None:
    for make in (lambda o: StepLR(o, 2, 0.5), lambda o: OneCycleLR(o, 0.1, total_steps=8)):
        twins = make_twins(*ADAMW, opt_in=False)
        before = make(twins.optimizers[0]), make(twins.optimizers[1])
        twins.handle = step_on_shards(twins.optimizers[1])
        for number in range(4):
            twins.step(number)
            for scheduler in before:
                scheduler.step()
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in twins.optimizers]
        assert rates[0] == rates[1]
        after = make(twins.optimizers[0]), make(twins.optimizers[1])
        twins.step(5)
        for scheduler in after:
            scheduler.step()
        twins.step(6)


def _scaled_gradients() -> None:
    """What a scaler notes on the optimizer reaches its fused kernels: skipped steps, and gradients unscaled in place."""
    twins = make_twins("AdamW", {"fused": True})
    for number, overflow in enumerate((0.0, 1.0, 0.0)):
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            plain = [group for group in optimizer.param_groups if not isinstance(group["params"][0], DTensor)]
            optimizer.zero_grad()
            train(model, number)
            for group in plain:
                for parameter in group["params"]:
                    parameter.grad = None
            optimizer.found_inf = torch.tensor(overflow, device=current_device())  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        twins.check(f"step {number}")


def _errors() -> None:
    """A step that fails in a closure, and one that fails in the arithmetic, leave an optimizer that goes on."""
    twins = make_twins(*LOOP)
    _after_steps(twins, 0)
    optimizer = twins.optimizers[1]
    groups = optimizer.param_groups

    def fail() -> float:
        raise KeyError("in the closure")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    assert optimizer.param_groups is groups
    twins.check("after a failed closure")
    _after_steps(twins, 1)
    for each in twins.optimizers:
        each.param_groups[-1]["betas"] = 0.9  # found when the other groups were stepped already
        with pytest.raises(TypeError):
            each.step()
        each.param_groups[-1]["betas"] = (0.9, 0.999)
        each.state_dict()
    twins.check("after failed arithmetic")
    _after_steps(twins, 2, 3)


def _on_and_off() -> None:
    twins = make_twins(*LOOP)
    for number in range(6):
        if number % 2:
            twins.handle.remove()
            twins.handle.remove()
        else:
            twins.handle = step_on_shards(twins.optimizers[1])
            assert step_on_shards(twins.optimizers[1]) is twins.handle
        twins.step(number)
    hooks = twins.optimizers[1]._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert not hooks


class _Exchanging(Optimizer):
    """Two tensors of its state change places in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["one"], state["other"] = torch.zeros_like(parameter), torch.ones_like(parameter)
                state["one"], state["other"] = state["other"], state["one"]
                state["one"].add_(parameter.grad)
                parameter.sub_(0.1 * state["one"])


def _exchanged_state() -> None:
    models = sharded_model(), sharded_model()
    one, other = (_Exchanging(model.parameters(), {}) for model in models)
    twins = Twins(models, (one, other), step_on_shards(other, elementwise=True))
    _after_steps(twins, 0, 1, 2, 3)


SCENARIOS: Final[dict[str, Callable[[], None]]] = {
    scenario.__name__.strip("_"): scenario
    for scenario in (
        _state_dicts_cross,
        _state_loaded_by_reference,
        _a_step_back,
        _distributed_state_dicts,
        _edits_of_state,
        _edits_of_gradients,
        _groups_that_change,
        _hooks_and_closures,
        _schedulers,
        _scaled_gradients,
        _errors,
        _exchanged_state,
        _on_and_off,
    )
}


def _run(name: str) -> None:
    SCENARIOS[name]()


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_optimizer_on_shards_is_like_any_other(pool: Pool, name: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _run, name, device=device)
