"""Copies of an annotated model are annotated models of their own, and removing annotations gives a plain model back."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from composable import checkpoint, fully_shard, registry, remove, replicate
from composable.errors import CommunicationError, PhaseError
from composable.runtime import paired_places
from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import (
    anatomy,
    assert_same_training,
    distributed_training,
    full_parameters,
    joined_training,
    sgd,
)
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, current_device, need_devices

_CASES: Final = ("transformer with tied embedding", "recurrent", "odd sizes")
_SCHEMES: Final = (
    "fully_shard by policy",
    "fully_shard without resharding",
    "replicate",
    "fully_shard inside replicate",
    "checkpoint, then fully_shard",
)


def _step(model: nn.Module, case: Case, step: int) -> Tensor:
    loss = case.loss(model, *case.inputs(0, step, dist.get_rank(), current_device()))
    loss.backward()
    return loss.detach()


def _annotated(name: str, scheme: str) -> tuple[Case, nn.Module]:
    case = BATTERY[name]
    model = case.model(0, 0, current_device())
    SCHEMES[scheme].annotate(model, case)
    return case, model


# --- deepcopy ---------------------------------------------------------------------------------------------------------


def _annotate_around_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(current_device())
    fully_shard(model[0])
    twin = copy.deepcopy(model)
    batch = torch.randn(3, 4, device=current_device())
    for each in (model, twin):
        fully_shard(each)
        each(batch).sum().backward()
    gradients = [[parameter.grad.full_tensor() for parameter in each.parameters()] for each in (model, twin)]  # type: ignore[union-attr]
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_the_module_around_a_copy_of_a_sharded_one_can_be_annotated(pool: Pool) -> None:
    pool.run(2, _annotate_around_a_copy)


def _train_copy(name: str, scheme: str, steps_before: int) -> None:
    case, model = _annotated(name, scheme)
    for step in range(steps_before):
        _step(model, case, step)
        model.zero_grad()
    before = full_parameters(model)
    twin = copy.deepcopy(model)
    assert anatomy(twin) == anatomy(model)
    expected = joined_training(case, dist.get_world_size(), 2, 0)
    actual = distributed_training(case, twin, 2, 0)
    for parameter, value in expected.parameters.items():
        torch.testing.assert_close(actual.parameters[parameter], value, rtol=1e-9, atol=1e-11)
    # The original is as it was, and can still train.
    for parameter, value in full_parameters(model).items():
        assert torch.equal(value, before[parameter])
    again = distributed_training(case, model, 2, 0)
    for parameter, value in expected.parameters.items():
        torch.testing.assert_close(again.parameters[parameter], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize(("case", "steps_before"), [*zip(_CASES, (0, 1, 1), strict=True)])
def test_a_deepcopy_trains_alone_and_leaves_the_original_alone(
    pool: Pool, case: str, scheme: str, steps_before: int, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _train_copy, case, scheme, steps_before, device=device)


def _average() -> None:
    case, model = _annotated("transformer with tied embedding", "fully_shard by policy")
    plain = case.model(0, 0, current_device())
    averaged, expected = AveragedModel(model), AveragedModel(plain)
    optimizer = sgd(model)
    for step in range(3):
        _step(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        trained = full_parameters(model)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(trained[name])
        expected.update_parameters(plain)  # on accelerators torch's own is off by 1e-7: it divides by the steps in float32
    wholes = full_parameters(averaged.module)
    for name, parameter in expected.module.named_parameters():
        torch.testing.assert_close(wholes[name], parameter.detach(), rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        output = averaged(*case.inputs(0, 0, dist.get_rank(), current_device()))
    assert torch.isfinite(output).all()


def test_an_averaged_copy_follows_the_training(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _average, device=device)


# --- pickle -----------------------------------------------------------------------------------------------------------


def _pickled(scheme: str) -> str:
    """How pickling ends: "as the original" when the loaded model computes what the original does."""
    case, model = _annotated("transformer with tied embedding", scheme)
    try:
        loaded = pickle.loads(pickle.dumps(model))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    inputs = case.inputs(0, 0, dist.get_rank(), current_device())
    assert torch.equal(loaded(*inputs), model(*inputs))
    _step(model, case, 1)
    _step(loaded, case, 1)
    for (name, one), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(_local(one.grad), _local(other.grad)), name
    return "as the original"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("scheme", ["checkpoint, then fully_shard", "fully_shard by policy", "replicate"])
def test_a_pickled_model_is_loaded_annotated_or_refused_with_the_way_to_do_it(pool: Pool, scheme: str) -> None:
    for ending in pool.run(2, _pickled, scheme):
        assert ending == "as the original" or "state_dict" in ending


# --- remove -----------------------------------------------------------------------------------------------------------


def _traces(model: nn.Module) -> list[tuple[str, list[str], list[Any]]]:
    """What a module keeps outside of its parameters: attributes and hooks."""
    return [
        (
            name,
            sorted(vars(module)),
            [
                list(registered.values())
                for registered in (
                    module._forward_pre_hooks,
                    module._forward_hooks,
                    module._forward_hooks_with_kwargs,
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                    module._backward_hooks,
                    module._backward_pre_hooks,
                    module._state_dict_hooks,
                    module._state_dict_pre_hooks,
                    module._load_state_dict_pre_hooks,
                )
            ],
        )
        for name, module in model.named_modules()
    ]


def _undo(model: nn.Module) -> None:
    """Remove every annotation, the outermost module's first."""
    for module in model.modules():
        for verb in reversed([*registry(module)]):
            if verb in registry(module):
                remove(module, verb)


def _remove(name: str, scheme: str, steps_before: int) -> None:
    case = BATTERY[name]
    untouched = case.model(0, 0, current_device())
    model = case.model(0, 0, current_device())
    SCHEMES[scheme].annotate(model, case)
    reference = case.model(0, 0, current_device())
    for step in range(steps_before):
        _step(model, case, step)
        model.zero_grad()
    _undo(model)
    assert anatomy(model) == anatomy(untouched)
    assert _traces(model) == _traces(untouched)
    for (fqn, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(one) is nn.Parameter, fqn
        assert torch.equal(one, other), fqn
        assert one.is_leaf
        assert one.stride() == other.stride()
    # Gradients are of this rank's batch alone: nobody reduces them any more.
    _step(model, case, 7)
    _step(reference, case, 7)
    for (fqn, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), fqn
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad), fqn


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("case", "steps_before"), [*zip(_CASES, (2, 0, 2), strict=True)])
def test_removing_gives_a_model_equal_to_one_never_annotated(
    pool: Pool, case: str, scheme: str, steps_before: int, device: str
) -> None:
    ranks = SCHEMES[scheme].ranks[-1] if 2 not in SCHEMES[scheme].ranks else 2
    need_devices(device, ranks)
    pool.run(ranks, _remove, case, scheme, steps_before, device=device)


def _annotate_again(scheme: str) -> None:
    def twice(model: nn.Module, case: Case) -> None:
        SCHEMES[scheme].annotate(model, case)
        _step(model, case, 0)
        model.zero_grad()
        _undo(model)
        SCHEMES["fully_shard by policy"].annotate(model, case)

    assert_same_training(BATTERY["transformer with tied embedding"], twice)


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_model_can_be_annotated_anew_after_removing(pool: Pool, scheme: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _annotate_again, scheme, device=device)


def _remove_one_of_two() -> list[list[str]]:
    case = BATTERY["transformer with tied embedding"]
    model = case.model(0, 0, current_device())
    block = case.units[0]
    checkpoint(model, policy={block})
    fully_shard(model, policy={block})
    chosen = next(module for module in model.modules() if isinstance(module, block))
    seen = [list(registry(chosen))]
    remove(chosen, checkpoint)
    seen.append(list(registry(chosen)))
    remove(model, fully_shard)
    seen.append(list(registry(chosen)))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    replicate(model)
    seen.append(list(registry(model)))
    _step(model, case, 0)
    return seen


def test_one_annotation_can_be_removed_while_another_stays(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    expected = [["checkpoint", "fully_shard"], ["fully_shard"], [], ["replicate"]]
    assert pool.run(2, _remove_one_of_two, device=device) == [expected, expected]


def _remove_one_unit(between: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(current_device())
    reference = copy.deepcopy(model)
    fully_shard(model, policy={nn.Linear})
    x = torch.ones(2, 3, device=current_device())

    def train() -> None:
        for each in (reference, model):
            each.zero_grad()
            each(x).square().sum().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad, other.grad)

    train()
    loss = model(x).square().sum() if between else None
    remove(model[0], fully_shard)
    if loss is not None:  # what was removed would get no gradient
        with pytest.raises(PhaseError, match="removed from unit '0' between a forward and its backward"):
            loss.backward()
    assert type(model[0].weight) is nn.Parameter
    train()
    fully_shard(model[0])
    assert isinstance(model[0].weight, DTensor)
    train()
    train()


@pytest.mark.parametrize("between", [False, True], ids=["after a step", "between forward and backward"])
def test_one_unit_can_be_removed_and_annotated_anew_while_its_root_lives(pool: Pool, between: bool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _remove_one_unit, between, device=device)


class _Refusal(Exception):
    """Raised in a backward."""


def _leave_a_step_after_a_copy_ran() -> None:
    device = current_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).to(device)
    plain = copy.deepcopy(model)
    replicate(model[0])
    fully_shard(model, policy={nn.Linear})
    rows = torch.arange(8.0, device=device).view(2, 4)
    mine = rows[dist.get_rank()]
    model(mine).sum().backward()
    copy.deepcopy(model)(mine).sum().backward()

    def refuse(gradient: Tensor) -> None:
        if dist.get_rank() == 1:
            raise _Refusal

    for factor in (1.0, 2.0):
        hook = model[0].register_forward_hook(lambda module, args, output: output.register_hook(refuse) and None)
        with pytest.raises((_Refusal, CommunicationError)):
            model(mine).sum().backward()
        hook.remove()
        model.zero_grad()
        plain.zero_grad()
        model(factor * mine).square().sum().backward()
        plain(factor * rows).square().sum(1).mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.host
def test_a_step_that_one_rank_left_is_over_for_all_also_after_a_copy_ran(pool: Pool) -> None:
    """Sums of replicated units would go on in the copy's step otherwise, and meet those that were left over. On hosts only:
    an accelerator's group does not tell that a rank left."""
    pool.run(2, _leave_a_step_after_a_copy_ran, device="cpu")


def _interrupt_the_first_forward_of_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(current_device())
    plain = copy.deepcopy(model)
    replicate(model[0])
    fully_shard(model)
    twin = copy.deepcopy(model)
    rows = torch.arange(8.0, device=current_device()).view(2, 4)
    with patch.object(paired_places, "ShardedParam", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        twin(rows[dist.get_rank()])
    twin(rows[dist.get_rank()]).square().sum().backward()
    plain(rows).square().sum(1).mean().backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_copy_goes_on_after_an_interrupt_while_it_looks_at_its_parameters_for_the_first_time(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _interrupt_the_first_forward_of_a_copy, device=device)
