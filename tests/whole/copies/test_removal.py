"""Removing annotations gives a plain model back."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import registry, remove
from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import anatomy, assert_same_training
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, current_device, need_devices, spmd

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


# --- remove -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("scheme", _SCHEMES)
@spmd(ranks=2)
def test_a_model_can_be_annotated_anew_after_removing(scheme: str) -> None:
    def twice(model: nn.Module, case: Case) -> None:
        SCHEMES[scheme].annotate(model, case)
        _step(model, case, 0)
        model.zero_grad()
        _undo(model)
        SCHEMES["fully_shard by policy"].annotate(model, case)

    assert_same_training(BATTERY["transformer with tied embedding"], twice)
