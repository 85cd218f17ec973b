"""What is wrong with weights is named, on all ranks where all can know it; and what follows an error trains as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import fully_shard, no_sync, reduce_gradients, replicate, weighted_gradients
from composable.device.collectives import communicators_wrapped_by
from composable.errors import (
    AnnotationError,
    CommunicationError,
    ComposableError,
    NotAnnotatedError,
    OptimizerError,
    PhaseError,
    RanksDisagreeError,
)
from tests.helpers.communicators import all_accelerators
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool


def _model(verb: Any = fully_shard) -> nn.Module:
    torch.manual_seed(0)
    return verb(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))  # type: ignore[no-any-return]


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def _backward_and_raise(model: nn.Module) -> None:
    _backward(model)
    raise ZeroDivisionError


def test_a_model_without_annotation_is_refused() -> None:
    with pytest.raises(NotAnnotatedError, match="weighted_gradients: no fully sharded or replicated module in this Linear"):
        weighted_gradients(nn.Linear(1, 1), weight=1).__enter__()


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", None, True, torch.ones(2)])
def test_what_is_no_weight_is_refused(weight: Any) -> None:
    model = _model()
    with pytest.raises(AnnotationError, match="weight must be a number that is not negative") as caught:
        weighted_gradients(model, weight=weight).__enter__()
    assert repr(weight) in str(caught.value)


def test_another_scale_is_refused() -> None:
    with pytest.raises(AnnotationError) as caught:
        weighted_gradients(_model(), weight=1, scale="losses").__enter__()
    assert_text(
        str(caught.value), """weighted_gradients: scale must be 'gradients' or 'loss', got 'losses'; did you mean 'loss'?"""
    )


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_a_scope_inside_of_another_is_refused_and_the_outer_one_stays(verb: Any) -> None:
    model = _model(verb)
    with weighted_gradients(model, weight=3, more=True):
        pass
    with weighted_gradients(model, weight=0, more=True):
        with pytest.raises(PhaseError, match="a scope of these units is open already"):
            weighted_gradients(model, weight=1).__enter__()
        _backward(model)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_weights_of_zero_on_all_ranks_are_refused_at_the_end_of_a_step_only() -> None:
    model = _model()
    with weighted_gradients(model, weight=0, more=True):
        _backward(model)
    with pytest.raises(PhaseError, match="the weights of all ranks are zero"):
        weighted_gradients(model, weight=0).__enter__()


def test_a_scope_inside_a_backward_is_refused() -> None:
    model = _model()
    loss = model(torch.ones(1, 2)).sum()

    def enter(_: Tensor) -> None:
        weighted_gradients(model, weight=1).__enter__()

    loss.register_hook(enter)
    with pytest.raises(PhaseError, match="weighted_gradients was entered inside a backward"):
        loss.backward()


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_an_optimizer_does_not_step_before_the_last_micro_batch(verb: Any) -> None:
    model = _model(verb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with weighted_gradients(model, weight=1, more=True):
        _backward(model)
    with pytest.raises(OptimizerError, match=r"is not complete: weighted_gradients\(..., more=True\) said"):
        optimizer.step()
    with weighted_gradients(model, weight=1):
        _backward(model)
    optimizer.step()


def test_a_part_of_the_model_cannot_go_on_with_what_all_of_it_began() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for child in model:
        replicate(child)
    with weighted_gradients(model[0], weight=1, more=True):
        _backward(model)
    with pytest.raises(PhaseError, match="for some of these units and not for all"):
        weighted_gradients(model, weight=1).__enter__()


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_an_exception_ends_the_scope_and_the_step(verb: Any) -> None:
    model = _model(verb)
    with pytest.raises(ZeroDivisionError), weighted_gradients(model, weight=1, more=True):
        _backward_and_raise(model)
    model.zero_grad()
    _backward(model)
    alone = _model(lambda model: model)
    _backward(alone)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def _held_without_weights(verb: Any) -> str:
    model = _model(verb)
    with no_sync(model):
        _backward(model)
    with pytest.raises(PhaseError) as caught:
        weighted_gradients(model, weight=1).__enter__()
    reduce_gradients(model)
    with weighted_gradients(model, weight=1):
        _backward(model)
    return str(caught.value)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_gradients_that_were_held_without_weights_are_not_mixed_with_others(pool: Pool, verb: Any) -> None:
    for said in pool.run(2, _held_without_weights, verb):
        assert "units hold gradients of earlier backwards under no_sync that belong to no weights of this step" in said


def _refused_on_one_rank() -> tuple[str, str, list[float]]:
    model = _model()
    with pytest.raises(ComposableError) as caught, weighted_gradients(model, weight=-1.0 if dist.get_rank() else 2.0):
        _backward(model)
    with weighted_gradients(model, weight=1 + 2 * dist.get_rank()):
        (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
    (*_, last) = full_gradients(model).values()
    assert last is not None
    return type(caught.value).__name__, str(caught.value), last.flatten().tolist()


@pytest.mark.beyond_sim("ranks of accelerators do not read what others said of their weights")
def test_all_ranks_raise_where_one_weight_is_refused_and_go_on_together(pool: Pool) -> None:
    (first, said, gradient), (second, _, same) = pool.run(2, _refused_on_one_rank)
    assert (first, second) == (RanksDisagreeError.__name__, AnnotationError.__name__)
    assert "another rank passed a weight that was refused" in said
    assert gradient == same == [1.75]


def _refused_in_the_second_micro_batch(verb: Any, held: bool) -> list[float]:
    model = _model(verb)
    with no_sync(model, enabled=held), weighted_gradients(model, weight=1, more=True):
        _backward(model)
    loss = 5 * model(torch.ones(1, 2)).sum()
    refused = weighted_gradients(model, weight=float("nan") if dist.get_rank() else 3)
    with pytest.raises((AnnotationError, RanksDisagreeError)), refused:
        loss.backward()
    with pytest.raises(OptimizerError):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    with weighted_gradients(model, weight=3):
        loss.backward()
    (*_, last) = full_gradients(model).values()
    assert last is not None
    return last.flatten().tolist()


@pytest.mark.beyond_sim("ranks of accelerators do not read what others said of their weights")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_who_passes_another_weight_after_one_was_refused_goes_on_with_the_step(pool: Pool, verb: Any, held: bool) -> None:
    assert pool.run(2, _refused_in_the_second_micro_batch, verb, held) == [[4.0], [4.0]]


def _lost_step(verb: Any, where: str) -> tuple[list[float], str]:
    """One rank raises in one of two micro-batches; all meet in the next step, whose total is its own."""
    model, place = _model(verb), {"first": 0, "second": 1}.get(where.split(",")[0])
    said = ""
    for step in range(2):
        try:
            for number in range(2):
                raises = step == dist.get_rank() == 0 and number == place
                with weighted_gradients(model, weight=1 + 2 * dist.get_rank(), more=number == 0):
                    loss = model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())
                    if raises and "before" in where:
                        raise ZeroDivisionError
                    if raises:
                        loss.register_hook(_fail)
                    loss.backward()
        except (ZeroDivisionError, CommunicationError) as error:
            said = str(error)
        if step == 0:
            model.zero_grad()
    (*_, last) = full_gradients(model).values()
    assert last is not None
    return last.flatten().tolist(), said


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.beyond_sim("groups of accelerators do not tell of a rank that left a step, or did not come")
@pytest.mark.host
@pytest.mark.parametrize("verb", [fully_shard, replicate])
@pytest.mark.parametrize("where", ["first, before its backward", "second, before its backward", "second, inside its backward"])
def test_ranks_meet_in_the_next_step_after_one_of_them_lost_a_micro_batch(pool: Pool, verb: Any, where: str) -> None:
    (first, _), (second, said) = pool.run(2, _lost_step, verb, where)
    assert first == second == [1.75]
    assert "rank 0 has left this step" in said


def _one_leaves_a_scope_out() -> str:
    model = replicate(nn.Linear(1, 1))
    if dist.get_rank():
        return ""
    with pytest.raises(CommunicationError) as caught:
        weighted_gradients(model, weight=1).__enter__()
    return str(caught.value)


@pytest.mark.beyond_sim("groups of accelerators do not tell of a rank that left a step, or did not come")
def test_a_rank_that_is_alone_in_the_scope_says_where_it_waited(pool: Pool) -> None:
    said, _ = pool.run(2, _one_leaves_a_scope_out, group_timeout=1.0, spoils=True)
    assert "the sum of the weights for weighted_gradients, a scope that all ranks enter together, failed" in said


def _in_different_micro_batches() -> str:
    model = replicate(nn.Linear(1, 1))
    with weighted_gradients(model, weight=1, more=dist.get_rank() == 0):
        model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RanksDisagreeError) as caught:
        weighted_gradients(model, weight=1).__enter__()
    return str(caught.value)


@pytest.mark.beyond_sim("ranks of accelerators do not read what others said of their weights")
def test_ranks_that_count_other_micro_batches_are_told(pool: Pool) -> None:
    first, second = pool.run(2, _in_different_micro_batches)
    assert "the ranks are in different micro-batches of a step, this one in number 2" in first
    assert "the ranks are in different micro-batches of a step, this one in number 1" in second


def _in_different_micro_batches_unread(verb: Any) -> tuple[bool, bool]:
    with communicators_wrapped_by(all_accelerators):
        model = verb(nn.Linear(1, 1))
    found = []
    for more in (dist.get_rank() == 0, False):
        with weighted_gradients(model, weight=1, more=more):
            model(torch.ones(1, 1)).sum().backward()
        found.append(all(bool(gradient.isnan().all()) for gradient in full_gradients(model).values() if gradient is not None))
    return found[0], found[1]


@pytest.mark.beyond_sim("these tensors are of the host")
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_gradients_of_ranks_in_other_micro_batches_are_nan_where_nobody_can_be_told(pool: Pool, verb: Any) -> None:
    assert pool.run(2, _in_different_micro_batches_unread, verb) == [(False, True)] * 2
