"""What is refused while gradients are held, and what becomes of ranks that lose some of them, or hold others than the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from textwrap import fill
from typing import Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import clip_grad_norm_, fully_shard, no_sync, reduce_gradients, remove, replicate, step_on_shards
from composable.errors import CommunicationError, ComposableError, RanksDisagreeError
from tests.helpers.annotated import PATIENCE, next_to_shards, replicated, sharded
from tests.helpers.leaving import Layers, Planned, in_backward, in_the_third_layer, leave
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device

_SCHEMES: Final[dict[str, Callable[..., None]]] = {"sharded": sharded, "replicated": replicated, "mixed": next_to_shards}


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


# --- refusals ---------------------------------------------------------------------------------------------------------


def _use(scheme: str) -> dict[str, str]:
    device = current_device()
    model = Layers().to(device)
    _SCHEMES[scheme](model)
    x = torch.ones(2, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    with no_sync(model):
        _step(model, x)
    found["step"] = refusal(optimizer.step)
    step_on_shards(optimizer)
    assert refusal(optimizer.step) == found["step"]
    found["clip"] = refusal(lambda: clip_grad_norm_(model, 1.0))
    found["remove"] = refusal(lambda: remove(model, replicate if scheme == "replicated" else fully_shard))
    model.zero_grad()
    optimizer.step()  # of nothing
    clip_grad_norm_(model, 1.0)
    with model.register_forward_hook(lambda *_: reduce_gradients(model)):
        found["inside forward"] = refusal(lambda: model(x))
    y = model(x)
    y.register_hook(lambda _: reduce_gradients(model))
    found["inside backward"] = refusal(y.sum().backward)
    model.zero_grad()
    _step(model, x)
    optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return found


def test_what_is_held_is_refused_by_name(pool: Pool, device: str) -> None:
    found = {scheme: pool.run(2, _use, scheme, device=device)[0] for scheme in _SCHEMES}
    lines = [f"{scheme}, {what}: {error}" for scheme, errors in found.items() for what, error in errors.items()]
    assert_text(
        "\n".join(fill(line, 110) for line in lines),
        """\
sharded, step: OptimizerError: SGD.step: the gradient of parameter 'weight' of unit '0' is this rank's alone:
it was made under no_sync, and no backward since has averaged it over the ranks. Run the last backward before
a step outside of no_sync, or call reduce_gradients(model), on all ranks. No parameter was changed.
sharded, clip: ClippingError: clip_grad_norm_: the gradient of parameter 'weight' of unit '0' is this rank's
alone: it was made under no_sync, and no backward since has averaged it over the ranks. Run the last backward
before clipping outside of no_sync, or call reduce_gradients(model), on all ranks
sharded, remove: PhaseError: remove: fully_shard on unit '3' cannot be removed while it holds gradients that
were made under no_sync and not averaged. Call reduce_gradients(model) first, on all ranks; also after
zero_grad()
sharded, inside forward: PhaseError: reduce_gradients was called inside the forward of unit '(root)', where
gradients are still to come. Call it when backward() has returned; or leave it out, and run the last backward
outside of no_sync
sharded, inside backward: PhaseError: reduce_gradients was called inside a backward, where gradients are still
to come. Call it when backward() has returned; or leave it out, and run the last backward outside of no_sync
replicated, step: PhaseError: replicate(unit '(root)'): parameter '0.weight': its gradient is this rank's
alone: it was made under no_sync, and no backward since has averaged it over the ranks. Run the last backward
before a step outside of no_sync, or call reduce_gradients(model), on all ranks
replicated, clip: ClippingError: clip_grad_norm_: the gradient of parameter '0.weight' of unit '(root)' is
this rank's alone: it was made under no_sync, and no backward since has averaged it over the ranks. Run the
last backward before clipping outside of no_sync, or call reduce_gradients(model), on all ranks
replicated, remove: PhaseError: remove: replicate on unit '(root)' cannot be removed while it holds gradients
that were made under no_sync and not averaged. Call reduce_gradients(model) first, on all ranks; also after
zero_grad()
replicated, inside forward: PhaseError: reduce_gradients was called inside the forward of unit '(root)', where
gradients are still to come. Call it when backward() has returned; or leave it out, and run the last backward
outside of no_sync
replicated, inside backward: PhaseError: reduce_gradients was called inside a backward, where gradients are
still to come. Call it when backward() has returned; or leave it out, and run the last backward outside of
no_sync
mixed, step: OptimizerError: SGD.step: the gradient of parameter 'weight' of unit '0' is this rank's alone: it
was made under no_sync, and no backward since has averaged it over the ranks. Run the last backward before a
step outside of no_sync, or call reduce_gradients(model), on all ranks. No parameter was changed.
mixed, clip: ClippingError: clip_grad_norm_: the gradient of parameter 'weight' of unit '0' is this rank's
alone: it was made under no_sync, and no backward since has averaged it over the ranks. Run the last backward
before clipping outside of no_sync, or call reduce_gradients(model), on all ranks
mixed, remove: PhaseError: remove: fully_shard on unit '3' cannot be removed while it holds gradients that
were made under no_sync and not averaged. Call reduce_gradients(model) first, on all ranks; also after
zero_grad()
mixed, inside forward: PhaseError: reduce_gradients was called inside the forward of unit '(root)', where
gradients are still to come. Call it when backward() has returned; or leave it out, and run the last backward
outside of no_sync
mixed, inside backward: PhaseError: reduce_gradients was called inside a backward, where gradients are still
to come. Call it when backward() has returned; or leave it out, and run the last backward outside of no_sync""",
    )


def test_what_is_no_level_or_has_no_units_is_refused() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    lines = [
        refusal(lambda: no_sync(model, level="replicas").__enter__()),
        refusal(lambda: no_sync(nn.Linear(2, 2)).__enter__()),
        refusal(lambda: reduce_gradients(nn.Linear(2, 2))),
    ]
    assert_text(
        "\n".join(fill(line, 110) for line in lines),
        """\
AnnotationError: no_sync: level must be 'all' or 'replicate', got 'replicas'; did you mean 'replicate'?
NotAnnotatedError: no_sync: no fully sharded or replicated module in this Linear; call fully_shard(module) or
replicate(module) first
NotAnnotatedError: reduce_gradients: no fully sharded or replicated module in this Linear; call
fully_shard(module) or replicate(module) first""",
    )


# --- windows that some rank loses ---------------------------------------------------------------------------------------


def _late_in_backward(model: nn.Module, x: Tensor) -> None:
    """After all gradients have arrived: the other ranks notice nothing."""
    x = x.clone().requires_grad_()
    x.register_hook(leave)
    _step(model, x)


_WHERE: Final = (in_the_third_layer, in_backward, _late_in_backward)


def _train(
    model: nn.Module, fails: Callable[[nn.Module, Tensor], None] | None, lost: Callable[[int], bool]
) -> tuple[list[Tensor], dict[int, str]]:
    """Parameters after five steps of three micro-batches each, and what steps ended with.

    Args:
        fails: what rank 0 does in the second micro-batch of the second and the fourth step.
        lost: whether to leave a step out.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    errors = {}
    for step in range(5):
        batches = torch.randn(3, 4, 8, generator=generator)
        if lost(step):
            continue
        try:
            for number, x in enumerate(batches):
                with no_sync(model, enabled=number < 2) if fails is not None else nullcontext():
                    if fails is not None and dist.get_rank() == 0 and (step, number) in ((1, 1), (3, 1)):
                        fails(model, x)
                    _step(model, x)
            optimizer.step()
        except (Planned, CommunicationError, RanksDisagreeError) as error:
            errors[step] = f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], errors


def _lose(scheme: str) -> None:
    for where in _WHERE:
        torch.manual_seed(0)
        model = Layers()
        plain = copy.deepcopy(model)
        group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
        _SCHEMES[scheme](model, mesh=group)
        found, errors = _train(model, where, lambda _: False)
        case = f"{scheme}, {where.__name__}, rank {dist.get_rank()}: {errors}"
        assert [*errors] == [1, 3], case
        for error in errors.values():
            planned = "Planned: as planned" if dist.get_rank() == 0 else "CommunicationError: rank "
            assert error.startswith(planned), case
        expected, _ = _train(plain, None, [*errors].__contains__)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]
        torch.testing.assert_close(whole, expected, msg=case)
        dist.barrier(group)


@pytest.mark.host
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_rank_that_loses_what_it_holds_costs_all_ranks_one_step(pool: Pool, scheme: str) -> None:
    pool.run(2, _lose, scheme)


def _lose_before(scheme: str) -> None:
    model = Layers()
    _SCHEMES[scheme](model, mesh=dist.new_group(timeout=timedelta(seconds=PATIENCE)))
    x = torch.ones(2, 8)
    for _ in range(2):
        with pytest.raises((Planned, CommunicationError)):
            in_the_third_layer(model, x) if dist.get_rank() == 0 else _step(model, x)
        model.zero_grad()
        with no_sync(model):
            _step(model, x)
        _step(model, x)


@pytest.mark.host
@pytest.mark.parametrize("scheme", ["sharded", "mixed"])
def test_a_scope_has_no_say_in_a_step_that_was_lost_before_it(pool: Pool, scheme: str) -> None:
    pool.run(2, _lose_before, scheme)


def _hold_alone(scheme: str) -> list[str]:
    """How four windows of three micro-batches end, the first of which differs between the ranks."""
    model = Layers()
    _SCHEMES[scheme](model, mesh=dist.new_group(timeout=timedelta(seconds=PATIENCE)))
    x, ends = torch.ones(2, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(4):
        try:
            for number in range(3):
                alone = window == 0 and dist.get_rank() == 1
                with no_sync(model, enabled=alone or (number < 2 and window > 0)):
                    _step(model, x)
            optimizer.step()
            ends.append("well")
        except ComposableError as error:
            ends.append(str(error).partition("\n")[0])
        model.zero_grad()
    return ends


@pytest.mark.host
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_rank_that_alone_holds_gradients_is_named(pool: Pool, scheme: str) -> None:
    for rank, (first, *_, last) in enumerate(pool.run(2, _hold_alone, scheme)):
        told = f"rank {rank}: the " in first and f" failed: rank {1 - rank} has left this step" in first
        assert told or (rank == 1 and "is this rank's alone" in first), first
        assert last == "well"


def _hold_different_ones(scheme: str) -> str:
    model = Layers()
    _SCHEMES[scheme](model)
    x = torch.ones(2, 8)
    with no_sync(model):
        _step(model, x)
        with suppress(Planned):
            (_late_in_backward if dist.get_rank() == 0 else _step)(model, x)
    found = refusal(lambda: reduce_gradients(model))
    reduce_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    _step(model, x)
    return found


def test_ranks_that_hold_different_gradients_are_named(pool: Pool) -> None:
    texts = pool.run(2, _hold_different_ones, "mixed")
    assert texts[0] == texts[1]
    assert_text(
        fill(texts[0], 110),
        """\
RanksDisagreeError: reduce_gradients: the ranks hold gradients of different numbers of backwards under no_sync
of unit '0': rank 0: 0; rank 1: 2. Every rank must run the same backwards under no_sync. What was held is
dropped on all ranks; clear the gradients and go on""",
    )


def _run_more_than_others() -> str:
    model = Layers()
    replicate(model)
    x = torch.ones(2, 8)
    with no_sync(model):
        for _ in range(1 + dist.get_rank()):
            _step(model, x)
    found = refusal(lambda: reduce_gradients(model))
    _step(model, x)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return found


def test_ranks_that_ran_different_numbers_of_backwards_are_named(pool: Pool) -> None:
    for text in pool.run(2, _run_more_than_others):
        assert "of unit '(root)': rank 0: 1; rank 1: 2. Every rank must run the same backwards" in text


def _leave_scopes() -> None:
    for annotate in _SCHEMES.values():
        model = Layers()
        annotate(model)
        x = torch.ones(2, 8)
        for _ in range(2):
            with pytest.raises(Planned), no_sync(model), no_sync(model, enabled=False):
                leave()
            for _ in range(2):
                with no_sync(model):
                    break
            _step(model, x)
            torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_scopes_end_with_what_leaves_them(pool: Pool) -> None:
    pool.run(2, _leave_scopes)
