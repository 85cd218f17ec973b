"""Communication hooks that fail: no rank waits, and the next step is as good as any."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from composable import no_sync, register_comm_hook, replicate
from composable.errors import CommHookError, CommunicationError, PhaseError
from tests.helpers.compare import full
from tests.helpers.hooked_models import (
    BOTH,
    KINDS,
    Fails,
    assert_same,
    fail,
    loss_of,
)
from tests.helpers.world import Pool, spmd

# --- hooks that fail ----------------------------------------------------------------------------


def _spoiled(model: Any) -> Tensor:
    """A loss whose backward fails outside of hooks."""

    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    with model.second.register_forward_hook(spoil):
        return loss_of(model, 0, spare=True)


def _fails_and_goes_on(how: str, kind: str, failing: str | None) -> str:
    """The second model's first backward fails; then it trains on like the first, which did not.
    Returns what it raised.
    """
    models = [KINDS[kind]() for _ in range(2)]
    for stage in BOTH if kind == "hybrid" else (None,):
        register_comm_hook(models[0], None, allreduce_hook, stage=stage)
        hook = Fails(how) if stage == failing and how != "elsewhere" else allreduce_hook
        register_comm_hook(models[1], None, hook, stage=stage)
    before = [full(parameter) for parameter in models[1].parameters()]
    loss = _spoiled(models[1]) if how == "elsewhere" else loss_of(models[1], 0, spare=True)
    said = ""
    try:
        loss.backward()
    except (MemoryError, CommHookError, CommunicationError) as error:
        said = type(error).__name__
    assert all(
        torch.equal(full(parameter), old)
        for parameter, old in zip(models[1].parameters(), before, strict=True)
    )
    for step in range(1, 4):
        for model in models:
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        assert_same(models, step)
    return said


_OUTCOMES: Final = {
    "raises": "MemoryError",
    "raises afterwards": "CommunicationError",
    "wrong size": "CommHookError",
    "returns nothing": "CommHookError",
    "elsewhere": "MemoryError",
}


@pytest.mark.parametrize(
    ("ranks", "kind", "stage"),
    [(3, "replicated", None), (3, "sharded", None), *((4, "hybrid", stage) for stage in BOTH)],
)
@pytest.mark.parametrize("how", _OUTCOMES)
def test_after_a_hook_that_failed_on_all_ranks_the_next_step_works(
    pool: Pool, how: str, ranks: int, kind: str, stage: str | None
) -> None:
    assert (
        pool.run(ranks, _fails_and_goes_on, how, kind, stage, device="cpu")
        == [_OUTCOMES[how]] * ranks
    )


@spmd(ranks=2)
def test_a_part_gets_no_hook_while_another_part_whose_buckets_it_shares_accumulates() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (*model, model):
        replicate(part)
    x = torch.ones(2, 4)
    with no_sync(model[0]):
        model(x).sum().backward()
    with pytest.raises(PhaseError, match="unit '0' is in the middle of a step"):
        register_comm_hook(model[1], None, allreduce_hook)
    model(x).sum().backward()
    register_comm_hook(model[1], None, allreduce_hook)
    for parameter in model.parameters():  # all ranks had the same batch
        parameter.grad = None
    model(x).sum().backward()
    assert model[0].bias.grad is not None
