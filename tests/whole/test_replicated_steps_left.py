"""A rank that leaves a step of a replicated model costs the others that step, and never gives them another step's gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, no_sync, replicate
from composable.device.collectives import communicators_wrapped_by
from composable.errors import CommunicationError, RanksDisagreeError
from tests.helpers.communicators import all_ordered
from tests.helpers.leaving import Layer, Layers, Planned, in_backward, in_the_third_layer
from tests.helpers.world import Pool

# Nobody should wait for as long; a test that does takes all of it and fails.
_PATIENCE: Final = 60.0


def _in_the_second_forward_of_a_step(model: nn.Module, x: Tensor) -> None:
    model(x)
    in_the_third_layer(model, x)


_WHERE: Final[dict[str, Callable[[nn.Module, Tensor], None]]] = {
    "in the third layer": in_the_third_layer,
    "in the second forward of a step": _in_the_second_forward_of_a_step,
    "in backward": in_backward,
}


def _all_in_one(model: nn.Module, group: dist.ProcessGroup) -> None:
    replicate(model, mesh=group)


def _by_policy(model: nn.Module, group: dist.ProcessGroup) -> None:
    replicate(model, mesh=group, policy={Layer})


def _side_by_side(model: nn.Module, group: dist.ProcessGroup) -> None:
    for layer in model.children():
        replicate(layer, mesh=group)


def _among_shards(model: nn.Module, group: dist.ProcessGroup) -> None:
    replicate(model.get_submodule("3"), mesh=group)
    replicate(model.get_submodule("1"), mesh=group)
    fully_shard(model, mesh=group, policy={Layer})


def _around_shards(model: nn.Module, group: dist.ProcessGroup) -> None:
    fully_shard(model.get_submodule("2"), mesh=group)
    replicate(model, mesh=group)


_ANNOTATE: Final = {each.__name__: each for each in (_all_in_one, _by_policy, _side_by_side, _among_shards, _around_shards)}

Fails = Callable[[nn.Module, Tensor], None]


def _train(
    model: nn.Module, skip: list[int], fails: Fails | None, failing: Sequence[int] = (0,)
) -> tuple[list[float], dict[int, str]]:
    """The losses of the steps that went well, and what the others ended with, by step. The ranks `failing` fail in two."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses, errors = [], {}
    for step in range(7):
        x = torch.randn(4, 8, generator=generator)
        if step in skip:
            continue
        optimizer.zero_grad()
        try:
            if fails is not None and step in (1, 4) and dist.get_rank() in failing:
                fails(model, x)
            loss = model(x).square().mean()
            loss.backward()
        except (Planned, CommunicationError) as error:
            errors[step] = f"{type(error).__name__}: {error}"
            continue
        optimizer.step()
        losses.append(loss.item())
    return losses, errors


def _leave(annotate: str) -> dict[str, tuple[list[float], list[float], dict[int, str]]]:
    """By case: losses as in one process that left the same steps out, those seen, and what the lost steps ended with."""
    found = {}
    for where, fails in _WHERE.items():
        if fails is _in_the_second_forward_of_a_step and "shards" in annotate:
            continue  # the first one has opened a step for shards, which the others never see: see test_steps_left.py
        torch.manual_seed(0)
        model = Layers()
        plain = copy.deepcopy(model)
        _ANNOTATE[annotate](model, dist.new_group(timeout=timedelta(seconds=_PATIENCE)))
        losses, errors = _train(model, [], fails)
        found[where] = _train(plain, [*errors], None)[0], losses, errors
        dist.barrier()
    return found


_TOLD: Final = re.compile(
    r"CommunicationError: rank \d: the (all-gather|gradient reduction|gradient all-reduce) of unit "
    r"'(\w+|\(root\))'( \(.*\))? failed: "
    r"rank \d has left this step( and gone on to a later one|: its backward did not finish"
    r"|: unit '(\w+|\(root\))' raised (Planned: as planned|CommunicationError: .*))\n"
)


@pytest.mark.host
@pytest.mark.parametrize(("ranks", "annotate"), [*((2, name) for name in _ANNOTATE), (4, "_by_policy")])
def test_ranks_meet_in_the_step_after_one_that_a_rank_left(pool: Pool, ranks: int, annotate: str) -> None:
    for rank, found in enumerate(pool.run(ranks, _leave, annotate)):
        for where, (expected, losses, errors) in found.items():
            case = f"rank {rank}, {where}: {errors}"
            assert losses == pytest.approx(expected, rel=1e-5), case
            assert [*errors] == [1, 4], case
            for error in errors.values():
                assert error == "Planned: as planned" if rank == 0 else _TOLD.match(error), case


def _leave_with_buffers(failing: Sequence[int]) -> dict[str, tuple[list[float], list[float], dict[int, str]]]:
    """The same where each forward begins with a broadcast, in which all ranks wait for each other."""
    found = {}
    for where, fails in _WHERE.items():
        if fails is _in_the_second_forward_of_a_step and len(failing) < dist.get_world_size():
            continue  # the first one waits for ranks that do not run it
        torch.manual_seed(0)
        model = Layers()
        model.register_buffer("steps", torch.zeros(8))
        plain = copy.deepcopy(model)
        replicate(model, mesh=dist.new_group(timeout=timedelta(seconds=_PATIENCE)))
        losses, errors = _train(model, [], fails, failing)
        found[where] = _train(plain, [*errors], None)[0], losses, errors
        dist.barrier()
    return found


@pytest.mark.host
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("failing", ["one rank", "all ranks"])
def test_ranks_that_share_buffers_meet_in_the_step_after_one_that_some_or_all_left(
    pool: Pool, ranks: int, failing: str
) -> None:
    who = range(ranks) if failing == "all ranks" else (0,)
    for rank, found in enumerate(pool.run(ranks, _leave_with_buffers, who)):
        for where, (expected, losses, errors) in found.items():
            case = f"rank {rank}, {where}: {errors}"
            assert losses == pytest.approx(expected, rel=1e-5), case
            assert [*errors] == [1, 4], case
            for error in errors.values():
                assert error == "Planned: as planned" if rank in who else error.startswith("CommunicationError"), case


# --- a backward that is left out --------------------------------------------------------------------------------------


def _skip(ordered: bool, annotate: str) -> list[str]:
    """What each of five steps ends with, of which rank 1 leaves the second out after its forward."""
    torch.manual_seed(0)
    model = Layers()
    group = dist.new_group(timeout=timedelta(seconds=_PATIENCE))
    with communicators_wrapped_by(all_ordered if ordered else lambda communicator: communicator):
        _ANNOTATE[annotate](model, group)
    ended = []
    for step in range(5):
        try:
            loss = model(torch.ones(2, 8)).sum()
            if step == 1 and dist.get_rank() == 1:
                continue
            loss.backward()
            ended.append("well")
        except RanksDisagreeError as error:
            ended.append(str(error))
            break
    return ended


@pytest.mark.parametrize("ordered", [False, True], ids=["told apart by tags", "told apart by order"])
@pytest.mark.parametrize(("ranks", "annotate", "unit"), [(2, "_all_in_one", "(root)"), (4, "_by_policy", "3")])
def test_a_rank_that_leaves_a_backward_out_is_named_on_all_ranks_before_anybody_steps(
    pool: Pool, ranks: int, annotate: str, unit: str, ordered: bool
) -> None:
    seen = [f"rank {rank} ran 1 forward before its backward number 2" for rank in range(ranks)]
    seen[1] = "rank 1 ran 2 forwards before its backward number 2, which leaves some of them out"
    for ended in pool.run(ranks, _skip, ordered, annotate):
        assert ended == [
            "well",
            f"replicate(unit '{unit}'): this backward averaged gradients of different steps: {'; '.join(seen)}. Every rank "
            "must run the same backwards: leave a step out on all ranks, or on none. Forwards that are not trained on belong "
            "under torch.no_grad(), or in evaluation mode. Clear the gradients before going on.",
        ]


def _lose_a_forward_by_order() -> list[str]:
    torch.manual_seed(0)
    model = Layers()
    with communicators_wrapped_by(all_ordered):
        replicate(model, mesh=dist.new_group(timeout=timedelta(seconds=_PATIENCE)))
    ended = []
    for step in range(3):
        try:
            if step == 1 and dist.get_rank() == 1:
                in_the_third_layer(model, torch.ones(2, 8))
            model(torch.ones(2, 8)).sum().backward()
            ended.append("well")
        except Planned:
            ended.append("as planned")
        except RanksDisagreeError as error:
            ended.append(str(error).partition(". ")[0])
            break
    return ended


def test_a_rank_that_lost_a_forward_is_named_where_order_alone_tells_collectives_apart(pool: Pool) -> None:
    disagree = (
        "replicate(unit '(root)'): this backward averaged gradients of different steps: "
        "rank 0 ran 1 forward before its backward number 2; rank 1 ran 1 forward before its backward number 3"
    )
    assert pool.run(2, _lose_a_forward_by_order) == [["well", disagree], ["well", "as planned", disagree]]


# --- what each rank may do for itself ---------------------------------------------------------------------------------


def _live_differently() -> Any:
    """Gradients of each step, where ranks run other forwards, and take losses from other outputs, than the others."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Layers()
    replicate(model, mesh=dist.new_group(timeout=timedelta(seconds=_PATIENCE)), policy={Layer})
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


# --- what was lost before, and what was not -----------------------------------------------------------------------------


def _one_weight(scale: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, scale)
    return model


def _annotate_after_a_loss() -> list[float]:
    """Rank 0 alone loses a forward of a model that has used `no_sync`; then all ranks replicate another model, and train it."""
    former, found = replicate(_one_weight(1.0)), []
    _two_micro_batches(former, 1.0)
    if dist.get_rank() == 0:
        hook = former.register_forward_pre_hook(_refuse_the_batch)
        with pytest.raises(ValueError, match="not this one"):
            former(torch.ones(1, 1))
        hook.remove()
    dist.barrier()
    model = replicate(_one_weight(1.0))
    for step in range(4):
        _two_micro_batches(model, 10.0**step)
        assert model.weight.grad is not None
        found.append(model.weight.grad.item())
        model.zero_grad()
    return found


def _two_micro_batches(model: nn.Module, scale: float) -> None:
    for first in (True, False):
        with no_sync(model, enabled=first):
            model(torch.full((1, 1), scale)).sum().backward()


def _refuse_the_batch(*_: object) -> None:
    raise ValueError("not this one")


def test_a_module_annotated_after_one_rank_has_lost_a_step_averages_the_batches_of_one_step(pool: Pool) -> None:
    assert pool.run(2, _annotate_after_a_loss, spoils=True) == [[2.0, 20.0, 200.0, 2000.0]] * 2


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


def _fail_to_evaluate_while_a_backward_is_to_come() -> list[float]:
    model = nn.Sequential(_one_weight(2.0), _one_weight(3.0), nn.Identity())
    fully_shard(model[1])
    replicate(model)
    found = []
    for step in range(3):
        loss = model(torch.full((1, 1), 10.0**step)).sum()
        with torch.no_grad():
            if step == 1 and dist.get_rank() == 0:
                hook = model[2].register_forward_pre_hook(_refuse_the_batch)
                with pytest.raises(ValueError, match="not this one"):
                    model(torch.ones(1, 1))
                hook.remove()
            else:
                model(torch.ones(1, 1))
        loss.backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        found.append((gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).item())
        model.zero_grad()
    return found


def test_an_evaluation_that_raises_after_shards_leaves_a_backward_that_is_to_come_alone(pool: Pool) -> None:
    assert pool.run(2, _fail_to_evaluate_while_a_backward_is_to_come) == [[3.0, 30.0, 300.0]] * 2
