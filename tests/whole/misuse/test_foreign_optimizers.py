"""Optimizers that hold parameters which nothing trains are reported at their step, and optimizers
that do not are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import clip_grad_norm_, fully_shard, rebind_optimizer, remove, replicate
from composable.errors import ClippingError, OptimizerError, PhaseError
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, spmd


def _model() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    device = current_device()
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(device), torch.ones(
        2, 3, device=device
    )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _before_the_annotation() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = _model()
    optimizer = _optimizer(model)
    return fully_shard(model, policy={nn.Linear}), optimizer


def _before_parameters_were_replaced() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, x = _model()
    fully_shard(model, policy={nn.Linear})
    optimizer = _optimizer(model)
    model(x).sum().backward()
    optimizer.step()  # what it holds has been looked up
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    return model, optimizer


def _before_an_assignment_was_adopted() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, x = _model()
    fully_shard(model, policy={nn.Linear})
    model(x).sum().backward()
    model.zero_grad()
    model[0].weight = nn.Parameter(full(model[0].weight.detach()) * 2)
    optimizer = _optimizer(model)
    return model, optimizer


def _before_the_annotation_was_removed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = _model()
    fully_shard(model)
    optimizer = _optimizer(model)
    remove(model, fully_shard)
    return model, optimizer


def _inside_a_forward() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, x = _model()
    fully_shard(model)
    made: list[torch.optim.Optimizer] = []
    with model[1].register_forward_pre_hook(lambda *_: made.append(_optimizer(model))):
        model(x)
    return model, made[0]


def _before_an_annotation_came_around_both() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = _model()
    replicate(model[0])
    optimizer = _optimizer(model[0])
    return fully_shard(model), optimizer


MADE: Final[dict[str, tuple[Callable[[], tuple[nn.Module, torch.optim.Optimizer]], str]]] = {
    "before the annotation": (
        _before_the_annotation,
        "parameter 'weight' of unit '0' was replaced on its module, by an annotation",
    ),
    "before parameters were replaced": (
        _before_parameters_were_replaced,
        "parameter 'weight' of unit '0' was replaced on",
    ),
    "before an assignment was adopted": (
        _before_an_assignment_was_adopted,
        "parameter 'weight' of unit '0' was replaced on",
    ),
    "before the annotation was removed": (
        _before_the_annotation_was_removed,
        (
            "parameter '0.weight' of unit '(root)' was replaced when the annotation was removed."
            " Make the optimizer anew"
        ),
    ),
    "before an annotation came around both": (
        _before_an_annotation_came_around_both,
        (
            "parameter 'weight' of unit '0' is what modules compute with: the optimizer was made"
            " inside a forward or backward, or before an annotation came around both replicated and"
            " sharded modules. Make it after annotating, and between steps,"
        ),
    ),
    "inside a forward": (
        _inside_a_forward,
        (
            "parameter '0.weight' of unit '(root)' is what modules compute with: the optimizer was"
            " made inside a forward"
        ),
    ),
}


@pytest.mark.parametrize("when", MADE)
@spmd(ranks=2)
def test_an_optimizer_that_would_train_nothing_is_refused_and_its_parameters_are_not_clipped(
    when: str,
) -> None:
    model, optimizer = MADE[when][0]()
    x = _model()[1]
    with torch.no_grad():
        before = model(x)
    model(x).sum().backward()
    stale = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [
        None if parameter.grad is None else full(parameter.grad).clone()
        for parameter in (*stale, *model.parameters())
    ]
    with pytest.raises(
        ClippingError, match=r"parameter '(0\.)?weight' of unit .* is not the one that is trained"
    ):
        clip_grad_norm_(stale, 1e-3)
    after = [
        None if parameter.grad is None else full(parameter.grad)
        for parameter in (*stale, *model.parameters())
    ]
    torch.testing.assert_close(after, gradients, rtol=0, atol=0)
    with pytest.raises(OptimizerError) as caught:
        optimizer.step()
    assert str(caught.value).startswith(f"SGD.step: {MADE[when][1]}")
    assert str(caught.value).endswith(
        "from model.parameters(), or call rebind_optimizer(). The step would train nothing"
    )
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert clip_grad_norm_(model, 1e-3) > 0
    another = _optimizer(model)
    another.step()
    with torch.no_grad():
        assert not torch.equal(model(x), before), "one that is made anew trains"


@pytest.mark.parametrize("plan", ["fully_shard", "hybrid", "replicate beside shards", "replicate"])
@spmd(ranks=2)
def test_an_optimizer_of_a_parameter_that_was_assigned_trains_once_it_is_rebound(plan: str) -> None:
    model, x = _model()
    if plan == "replicate beside shards":
        replicate(model[0])
    hybrid = init_device_mesh(x.device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    (
        replicate(model)
        if plan == "replicate"
        else fully_shard(model, mesh=hybrid if plan == "hybrid" else None)
    )
    model(x).sum().backward()
    model.zero_grad()
    assigned = model[0].weight = nn.Parameter(full(model[0].weight.detach()) * 2)
    optimizer = _optimizer(model)
    model(x).sum().backward()
    if plan != "replicate":  # where what was assigned is trained itself
        assert model[0].weight is not assigned
        with pytest.raises(OptimizerError, match="The step would train nothing"):
            optimizer.step()
        rebind_optimizer(model, optimizer)
    before = full(model[0].weight.detach()).clone()
    optimizer.step()
    assert not torch.equal(full(model[0].weight.detach()), before)


@spmd(ranks=2)
def test_an_optimizer_of_a_parameter_that_another_module_uses_as_well_is_left_alone() -> None:
    model, x = _model()
    other = nn.Linear(3, 5, device=x.device)
    other.weight = model[0].weight
    optimizer = _optimizer(other)
    fully_shard(model)
    before = other.weight.detach().clone()
    other(x).sum().backward()
    optimizer.step()
    assert not torch.equal(other.weight, before)


def _made_before(verb: Callable[..., nn.Module]) -> None:
    model, x = _model()
    optimizer = _optimizer(model)
    verb(model)
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    remove(model, verb)
    optimizer.step()


def test_an_optimizer_made_before_the_users_own_parameters_were_annotated_trains(
    pool: Pool,
) -> None:
    pool.run(2, _made_before, replicate)
    _made_before(fully_shard)  # without a group


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_torchs_optimizer_in_backward_behind_the_annotation_is_refused(
    verb: Callable[..., nn.Module],
) -> None:
    model = nn.Linear(3, 3).to(current_device())
    verb(model)
    for parameter in model.parameters():  # as torch's function marks them
        parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
    with pytest.raises(PhaseError, match="_apply_optimizer_in_backward"):
        model(torch.ones(2, 3, device=current_device()))
