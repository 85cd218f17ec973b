"""Backwards that some ranks leave out, and forwards of their own, of models with replicated
modules.
"""

from __future__ import annotations

from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import no_sync, replicate
from composable.engine.step import root
from composable.errors import RanksDisagreeError
from tests.helpers.layers import Layer, Layers
from tests.helpers.world import Pool


def _all_in_one(model: nn.Module) -> None:
    replicate(model)


def _by_policy(model: nn.Module) -> None:
    replicate(model, policy={Layer})


_ANNOTATE: Final = {each.__name__: each for each in (_all_in_one, _by_policy)}


# --- a backward that is left out ----------------------------------------------------------------


def _skip(annotate: str) -> list[str]:
    """What each of four steps ends with, of which rank 1 leaves the second out after its
    forward.
    """
    torch.manual_seed(0)
    model = Layers()
    _ANNOTATE[annotate](model)
    ended = []
    for step in range(4):
        loss = model(torch.ones(2, 8)).sum()
        if step == 1 and dist.get_rank() == 1:
            continue
        try:
            with mock.patch.object(root, "debug_enabled", return_value=True):
                loss.backward()
            ended.append("well")
        except RanksDisagreeError as error:
            ended.append(str(error))
            break
        model.zero_grad()
    return ended


@pytest.mark.parametrize(("ranks", "annotate"), [(2, "_all_in_one"), (4, "_by_policy")])
def test_debug_mode_names_a_rank_that_leaves_a_backward_out_before_any_steps(
    pool: Pool, ranks: int, annotate: str
) -> None:
    ran = ", ".join(f"rank {rank} {2 if rank == 1 else 1}" for rank in range(ranks))
    for well, error in pool.run(ranks, _skip, annotate):
        assert well == "well"
        assert error.startswith(
            "unit '(root)': before this backward the ranks ran other numbers of forwards in"
            f" training mode, not all of them with a backward: {ran}. Every rank must run"
        )


# --- what each rank may do for itself -----------------------------------------------------------


@mock.patch.object(root, "debug_enabled", return_value=True)
def _live_differently(_: object) -> Any:
    """Gradients of each step, where ranks run other forwards, and take losses from other outputs,
    than the others.
    """
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Layers()
    replicate(model, policy={Layer})
    x = torch.ones(2, 8)
    found = []
    for step in range(4):
        if rank == 0:
            with no_sync(model), torch.no_grad():  # a scope in which nothing is accumulated
                model(x)
            model.eval()
            model(x)
            model.train()
        outputs = [model(x) for _ in range(1 + rank)]  # as many as a sequence is long
        (sum(output.sum() for output in outputs) / (1 + rank)).backward()
        outputs = [model(x), model(x * 2)]
        (outputs[step % 2 if rank else 0].sum()).backward()  # one of them, and on each rank another
        found.append(
            sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None)
        )
        model.zero_grad()
    return found


def test_ranks_may_run_forwards_of_their_own(pool: Pool) -> None:
    first, second = pool.run(2, _live_differently)
    assert first == second
