"""Gradients live in buckets from step to step; what somebody kept, or put there himself, is treated as his."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable.device.gradient_buckets import GradientBucket, gradient_strides
from composable.plan.scaling import Scaling, scaling_of


class Unit:
    """Two parameters in a bucket, and backwards that give them gradients; one rank's sum is the other ranks' too."""

    def __init__(self, **options: object) -> None:
        self.parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
        self.bucket = GradientBucket(self.parameters, [None, None], **options)  # type: ignore[arg-type]

    def step(self, *values: float | None, used: tuple[bool, bool] = (True, True)) -> Tensor:
        """A backward in which autograd gives each parameter this number, or None, as its gradient."""
        terms = [p.sum() * v for p, v in zip(self.parameters, values, strict=True) if v is not None]
        with torch.no_grad():
            self.bucket.open()
        if terms:
            torch.autograd.backward(sum(terms))  # type: ignore[arg-type]
        with torch.no_grad():
            message = self.bucket.collect([k for k, v in enumerate(values) if v is None])
            self.bucket.finish()
            self.bucket.resolve_unused(used)
        return message

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def values(self) -> list[float | None]:
        grads = [parameter.grad for parameter in self.parameters]
        assert all(bool((g == g.view(-1)[0]).all()) for g in grads if g is not None)
        return [None if g is None else float(g.view(-1)[0]) for g in grads]

    @property
    def first(self) -> Tensor:
        gradient = self.parameters[0].grad
        assert gradient is not None
        return gradient

    @property
    def inside(self) -> list[bool]:
        """Which gradients lie in the bucket."""
        return [p.grad is view for p, view in zip(self.parameters, self.bucket.views, strict=True)]


def test_new_gradients_become_views_of_the_bucket_and_memory_is_used_again() -> None:
    unit, addresses = Unit(), []
    for step in range(3):
        addresses.append(unit.step(1.0 + step, 2.0).data_ptr())
        assert unit.values == [1.0 + step, 2.0]
        assert unit.inside == [True, True]
        unit.zero_grad()
    assert addresses == [addresses[0]] * 3


def test_gradients_that_were_given_other_memory_are_in_the_message() -> None:
    """The very tensors, as `module.to` does it: to another device and back, say."""
    unit = Unit()
    unit.step(1.0, 2.0)
    for parameter in unit.parameters:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.clone()
    assert unit.step(3.0, 4.0).tolist() == [4.0] * 12 + [6.0] * 5
    assert unit.values == [4.0, 6.0]


@pytest.mark.parametrize("zero", [True, False], ids=["zeroed in place", "accumulated"])
def test_autograd_adds_to_gradients_that_are_in_the_bucket(zero: bool) -> None:
    unit = Unit()
    address = unit.step(1.0, 2.0).data_ptr()
    gradient = unit.first
    if zero:
        for parameter in unit.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
    assert unit.step(3.0, 4.0).data_ptr() == address
    assert unit.values == ([3.0, 4.0] if zero else [4.0, 6.0])
    assert unit.first is gradient


def _object(unit: Unit) -> Tensor:
    return unit.first


def _detached(unit: Unit) -> Tensor:
    return unit.first.detach()


def _piece(unit: Unit) -> Tensor:
    return unit.first[1:]


def _grad_of_another(unit: Unit) -> Tensor:
    other = nn.Parameter(torch.zeros(4, 3))
    other.grad = unit.first
    return other


KEPT: Final[dict[str, Callable[[Unit], Tensor]]] = {
    keep.__name__.strip("_"): keep for keep in (_object, _detached, _piece, _grad_of_another)
}


@pytest.mark.parametrize("keep", KEPT)
def test_a_gradient_that_somebody_kept_does_not_change(keep: str) -> None:
    unit = Unit()
    address = unit.step(1.0, 2.0).data_ptr()
    kept = KEPT[keep](unit)
    unit.zero_grad()
    assert unit.step(3.0, 4.0).data_ptr() != address
    value = kept.grad if isinstance(kept, nn.Parameter) else kept
    assert value is not None
    assert bool((value == 1.0).all())
    assert unit.values == [3.0, 4.0]
    unit.zero_grad()
    again = unit.step(5.0, 6.0).data_ptr()
    unit.zero_grad()
    assert unit.step(5.0, 6.0).data_ptr() == again, "what nobody kept is used again"


def test_a_neighbour_that_accumulates_keeps_its_tensor_when_the_bucket_is_replaced() -> None:
    unit = Unit()
    unit.step(1.0, 2.0)
    kept, accumulating = unit.first, unit.parameters[1].grad
    unit.parameters[0].grad = None
    unit.step(3.0, 4.0)
    assert bool((kept == 1.0).all())
    assert unit.values == [3.0, 6.0]
    assert unit.parameters[1].grad is accumulating


def test_every_bucket_is_new_where_torch_cannot_count_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composable.device.kept_gradients.CAN_COUNT_USERS", False)
    unit = Unit()
    unit.step(1.0, 2.0)
    kept = unit.first
    unit.zero_grad()
    unit.step(3.0, 4.0)
    assert bool((kept == 1.0).all())
    assert unit.values == [3.0, 4.0]


def test_gradients_that_were_somewhere_else_stay_there_and_get_the_result() -> None:
    unit = Unit(scaling=Scaling(2.0))
    flat = torch.full((12,), 10.0)
    mine = flat.view(4, 3)
    unit.parameters[0].grad = mine
    unit.step(2.0, 2.0)
    assert unit.first is mine
    assert flat.tolist() == [6.0] * 12
    assert unit.inside == [False, True]


@pytest.mark.parametrize("factors", [(2.0, 1.0), (1.0, 2.0), (4.0, 0.5)])
def test_gradients_are_divided_once(factors: tuple[float, float]) -> None:
    unit = Unit(scaling=Scaling(*factors))
    unit.step(2.0, 4.0)
    assert unit.values == [1.0, 2.0]
    alone = GradientBucket(unit.parameters[:1], [None], scaling=Scaling(*factors))
    unit.zero_grad()
    unit.parameters[0].grad = torch.full((4, 3), 6.0)
    alone.collect([])
    alone.finish()
    assert unit.values == [3.0, None]


def test_flags_lie_behind_the_gradients() -> None:
    unit = Unit(flags=3, scaling=Scaling(2.0))
    unit.bucket.open()
    message = unit.bucket.collect([0, 1])
    unit.bucket.flags.fill_(7.0)
    assert message.tolist() == [0.0] * 17 + [7.0] * 3


# --- sums of what is not copied -----------------------------------------------------------------------------------------


def _alone(ranks: int = 2) -> GradientBucket:
    return GradientBucket([nn.Parameter(torch.zeros(4, 3))], [None], scaling=scaling_of("float32", ranks, on_the_way_in=True))


def test_a_gradient_alone_is_summed_where_it_lies_and_becomes_a_view_with_the_sum() -> None:
    bucket = _alone()
    (parameter,) = bucket.parameters
    for step in range(2):
        bucket.open()
        gradient = parameter.grad = torch.full((4, 3), 6.0 + step)
        message = bucket.collect([])
        assert bucket.scaled_input is not None
        assert bucket.scaled_input[0] is gradient is parameter.grad
        assert bucket.scaled_input[1] == 0.5
        message.fill_(1.0 + step)  # the sum
        bucket.finish()
        assert bucket.scaled_input is None
        assert parameter.grad is bucket.views[0]
        assert bool((parameter.grad == 1.0 + step).all())
        assert bool((gradient == 6.0 + step).all())
        parameter.grad = None


def test_a_gradient_that_its_owner_took_away_before_the_sum_was_there_stays_away() -> None:
    bucket = _alone()
    (parameter,) = bucket.parameters
    bucket.open()
    parameter.grad = torch.ones(4, 3)
    bucket.collect([])
    assert bucket.scaled_input is not None
    parameter.grad = None
    bucket.finish()
    assert parameter.grad is None


def _transposed(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(3, 4).t()


def _expanded(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(1, 1).expand(4, 3)


def _sparse(parameter: nn.Parameter) -> None:
    ones = torch.ones(4, 3)
    parameter.grad = ones.to_sparse(1)


def _with_a_graph(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(4, 3, requires_grad=True) * 1.0


@pytest.mark.parametrize("give", [_transposed, _expanded, _sparse, _with_a_graph])
def test_a_gradient_of_another_form_is_copied(give: Callable[[nn.Parameter], None]) -> None:
    bucket = _alone()
    (parameter,) = bucket.parameters
    bucket.open()
    give(parameter)
    with torch.no_grad():
        message = bucket.collect([])
    assert bucket.scaled_input is None
    assert message.tolist() == [0.5] * 12


def test_a_gradient_that_was_there_before_is_copied() -> None:
    bucket = _alone()
    (parameter,) = bucket.parameters
    mine = parameter.grad = torch.ones(4, 3)
    bucket.open()
    assert bucket.collect([]).tolist() == [0.5] * 12
    assert bucket.scaled_input is None
    bucket.finish()
    assert parameter.grad is mine


def test_a_gradient_that_is_not_divided_exactly_is_divided_as_it_would_be_elsewhere() -> None:
    """The communicator multiplies; dividing by three and multiplying by a third round differently."""
    bucket = _alone(ranks=3)
    (parameter,) = bucket.parameters
    bucket.open()
    parameter.grad = torch.full((4, 3), 7.0)
    assert torch.equal(bucket.collect([]), torch.full((12,), 7.0) / 3.0)
    assert bucket.scaled_input is None


# --- missing ones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "expected"), [(True, [1.0, 0.0]), (False, [1.0, None])], ids=["used elsewhere", "used nowhere"]
)
def test_a_missing_gradient_counts_as_zero_and_comes_only_if_somebody_had_one(used: bool, expected: list[float | None]) -> None:
    unit = Unit()
    unit.step(1.0, None, used=(True, used))
    assert unit.values == expected


@pytest.mark.parametrize("inside", [True, False], ids=["in the bucket", "elsewhere"])
@pytest.mark.parametrize("used", [True, False], ids=["used elsewhere", "used nowhere"])
def test_an_old_gradient_counts_when_others_had_a_new_one_and_stays_as_it_was_when_nobody_had(inside: bool, used: bool) -> None:
    unit = Unit(scaling=Scaling(2.0))  # with no other ranks, the mean is half
    unit.step(2.0, 2.0)
    if not inside:
        unit.parameters[1].grad = torch.ones(5)
    gradient = unit.parameters[1].grad
    unit.parameters[0].grad = None
    unit.step(8.0, None, used=(True, used))
    assert unit.values == [4.0, 0.5 if used else 1.0]
    assert unit.parameters[1].grad is gradient


# --- forms of gradients -----------------------------------------------------------------------------------------------


def test_a_sparse_gradient_becomes_a_dense_view() -> None:
    unit = Unit()
    unit.bucket.open()
    with torch.sparse.check_sparse_tensor_invariants(enable=True):  # torch 2.11 warns where nobody has said
        unit.parameters[0].grad = torch.sparse_coo_tensor([[2]], [[1.0, 2.0, 3.0]], (4, 3))
    unit.parameters[1].grad = torch.ones(5)
    unit.bucket.collect([])
    unit.bucket.finish()
    assert unit.first.tolist() == [[0.0] * 3, [0.0] * 3, [1.0, 2.0, 3.0], [0.0] * 3]
    assert unit.inside == [True, True]


def test_a_gradient_with_a_graph_keeps_it_and_gets_the_mean_as_its_value() -> None:
    parameter = nn.Parameter(torch.tensor([3.0]))
    bucket = GradientBucket([parameter], [None], scaling=Scaling(2.0))
    bucket.open()
    (parameter.grad,) = torch.autograd.grad(parameter.pow(2).sum(), parameter, create_graph=True)
    with torch.no_grad():
        bucket.collect([])
        bucket.finish()
    gradient = parameter.grad
    assert gradient is not None
    assert gradient.tolist() == [3.0]
    (second,) = torch.autograd.grad(gradient.sum(), parameter)
    assert second.tolist() == [2.0]


@pytest.mark.parametrize("agreed", [True, False], ids=["agreed", "not agreed"])
def test_a_gradient_is_laid_out_as_autograd_does_it(agreed: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    strides = gradient_strides(parameter)
    assert strides == parameter.stride()
    bucket = GradientBucket([parameter], [strides if agreed else None])
    weights = torch.arange(120.0).view(2, 3, 4, 5)
    for _ in range(2):
        parameter.grad = None
        bucket.open()
        (parameter * weights).sum().backward()
        bucket.collect([])
        bucket.finish()
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.stride() == parameter.stride()
        assert torch.equal(gradient, weights)
        assert (gradient is bucket.views[0]) == agreed
        del gradient


def test_strides_of_what_is_not_dense_are_those_that_autograd_gives() -> None:
    assert gradient_strides(torch.zeros(3, 1).expand(3, 4)) is None
    assert gradient_strides(torch.zeros(4, 3).t()) == (1, 3)
    assert gradient_strides(torch.zeros(4, 3)) is None


# --- another order ----------------------------------------------------------------------------------------------------


def test_gradients_move_to_another_bucket_as_the_tensors_that_they_are() -> None:
    unit = Unit()
    unit.step(1.0, 2.0)
    first, second = unit.parameters
    held, stranger = unit.first, torch.ones(5)
    second.grad = stranger
    other = GradientBucket([second, first], [None, None])
    with torch.no_grad():
        other.adopt_from(dict(zip(unit.parameters, unit.bucket.views, strict=True)))
    assert unit.first is held is other.views[1]
    assert bool((held == 1.0).all())
    assert second.grad is stranger, "what was not in a bucket does not move"
    unit.bucket = other
    unit.parameters = [second, first]
    unit.step(3.0, 4.0)
    assert first.grad is held
    assert bool((held == 5.0).all()), "autograd accumulates in the new place"
    assert stranger.tolist() == [4.0] * 5


def test_a_gradient_that_was_kept_over_a_move_does_not_change() -> None:
    unit = Unit()
    unit.step(1.0, 2.0)
    kept = unit.first
    other = GradientBucket(unit.parameters, [None, None])
    with torch.no_grad():
        other.adopt_from(dict(zip(unit.parameters, unit.bucket.views, strict=True)))
    unit.bucket = other
    unit.zero_grad()
    unit.step(3.0, 4.0)
    assert bool((kept == 1.0).all())
    assert unit.values == [3.0, 4.0]
