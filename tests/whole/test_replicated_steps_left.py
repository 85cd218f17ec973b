"""Steps that all ranks leave, and backwards that some leave out, of models with replicated modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, no_sync, replicate
from composable.errors import RanksDisagreeError
from tests.helpers.leaving import Layer, Layers, Planned, in_backward, in_the_third_layer
from tests.helpers.world import Pool


def _in_the_second_forward_of_a_step(model: nn.Module, x: Tensor) -> None:
    model(x)
    in_the_third_layer(model, x)


_WHERE: Final = (in_the_third_layer, _in_the_second_forward_of_a_step, in_backward)


def _all_in_one(model: nn.Module) -> None:
    replicate(model)


def _by_policy(model: nn.Module) -> None:
    replicate(model, policy={Layer})


def _side_by_side(model: nn.Module) -> None:
    for layer in model.children():
        replicate(layer)


def _among_shards(model: nn.Module) -> None:
    replicate(model.get_submodule("3"))
    replicate(model.get_submodule("1"))
    fully_shard(model, policy={Layer})


def _around_shards(model: nn.Module) -> None:
    fully_shard(model.get_submodule("2"))
    replicate(model)


_ANNOTATE: Final = {each.__name__: each for each in (_all_in_one, _by_policy, _side_by_side, _among_shards, _around_shards)}


def _train(model: nn.Module, fails: Callable[[nn.Module, Tensor], None] | None) -> list[float]:
    """The losses of seven steps without two, which all ranks fail in, or leave out if there is no `fails`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(7):
        x = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        if step in (1, 4):
            if fails is not None:
                with pytest.raises(Planned):
                    fails(model, x)
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _leave(annotate: str) -> None:
    for fails in _WHERE:
        torch.manual_seed(0)
        model = Layers()
        model.register_buffer("steps", torch.zeros(8))
        plain = copy.deepcopy(model)
        _ANNOTATE[annotate](model)
        assert _train(model, fails) == pytest.approx(_train(plain, None), rel=1e-5), fails.__name__


@pytest.mark.parametrize("annotate", _ANNOTATE)
def test_a_step_that_all_ranks_leave_is_as_if_it_had_not_been(pool: Pool, annotate: str) -> None:
    pool.run(2, _leave, annotate)


# --- a backward that is left out --------------------------------------------------------------------------------------


def _skip(annotate: str) -> list[str]:
    """What each of four steps ends with, of which rank 1 leaves the second out after its forward."""
    torch.manual_seed(0)
    model = Layers()
    _ANNOTATE[annotate](model)
    ended = []
    for step in range(4):
        try:
            loss = model(torch.ones(2, 8)).sum()
            if step == 1 and dist.get_rank() == 1:
                continue
            loss.backward()
            ended.append("well")
        except RanksDisagreeError as error:
            assert all(parameter.grad is None for parameter in model[0].parameters())
            ended.append(str(error))
            break
        model.zero_grad()
    return ended


@pytest.mark.parametrize(("ranks", "annotate", "unit"), [(2, "_all_in_one", "(root)"), (4, "_by_policy", "0")])
def test_a_rank_that_leaves_a_backward_out_is_named_on_all_ranks_before_any_steps(
    pool: Pool, ranks: int, annotate: str, unit: str
) -> None:
    seen = [f"rank {rank} accumulated 0 backwards and ran 1 forwards" for rank in range(ranks)]
    seen[1] = "rank 1 accumulated 0 backwards and ran 2 forwards, not all with a backward"
    for well, error in pool.run(ranks, _skip, annotate):
        assert well == "well"
        assert error.startswith(f"gradient all-reduce of unit '{unit}'")
        assert (
            f"the ranks brought gradients of different units or steps. Before it, {'; '.join(seen)}. Every rank must run"
            in error
        )


# --- what each rank may do for itself ---------------------------------------------------------------------------------


def _live_differently() -> Any:
    """Gradients of each step, where ranks run other forwards, and take losses from other outputs, than the others."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Layers()
    replicate(model, policy={Layer})
    x = torch.ones(2, 8)
    found = []
    for step in range(4):
        if rank == 0:
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)
            model.train()
        outputs = [model(x) for _ in range(1 + rank)]  # as many as a sequence is long
        (sum(output.sum() for output in outputs) / (1 + rank)).backward()
        outputs = [model(x), model(x * 2)]
        (outputs[step % 2 if rank else 0].sum()).backward()  # one of them, and on each rank another
        found.append(sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None))
        model.zero_grad()
    return found


def test_ranks_may_run_forwards_of_their_own(pool: Pool) -> None:
    first, second = pool.run(2, _live_differently)
    assert first == second


def _one_weight(scale: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, scale)
    return model


def _two_micro_batches(model: nn.Module, scale: float) -> None:
    for first in (True, False):
        with no_sync(model, enabled=first):
            model(torch.full((1, 1), scale)).sum().backward()


def _evaluate_with_a_scope_on_one_rank() -> list[float]:
    model, found = replicate(_one_weight(1.0)), []
    if dist.get_rank() == 0:
        with no_sync(model), torch.no_grad():
            model(torch.ones(1, 1))
    for step in range(4):
        if step < 2:
            model(torch.full((1, 1), 10.0**step)).sum().backward()
        else:
            _two_micro_batches(model, 10.0**step)
        assert model.weight.grad is not None
        found.append(model.weight.grad.item())
        model.zero_grad()
    return found


def test_a_scope_that_one_rank_opens_around_an_evaluation_changes_nothing(pool: Pool) -> None:
    assert pool.run(2, _evaluate_with_a_scope_on_one_rank) == [[1.0, 10.0, 200.0, 2000.0]] * 2
