"""What annotating does to a model besides training it: nothing that a user can see, and the same by hand and by policy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from composable import (
    describe,
    fully_shard,
    keep_unsharded,
    remove,
    replicate,
    reshard,
    unshard,
)
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import assert_same_training, full_parameters
from tests.helpers.logged import logged
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd


@spmd(ranks=[2, 3])
def test_another_dimension_can_be_sharded() -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), shard_placement_fn=_last_dimension)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.placements == (Shard(parameter.ndim - 1),)

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


def _last_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@spmd(ranks=2)
def test_ignored_parameters_stay_plain_and_are_not_reduced() -> None:
    case = BATTERY["a unit used several times"]
    model = case.model(0, 0, current_device())
    fully_shard(model, policy=set(case.units), ignored_params=["head.*", model.shared.up])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) != name.startswith(("head.", "shared.up.")), name
    case.loss(model, *case.inputs(0, 0, dist.get_rank(), current_device())).backward()
    gradient = model.head.weight.grad
    assert gradient is not None
    other = gradient.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(gradient, other) == (dist.get_rank() == 0)


@spmd(ranks=2)
def test_rank_0s_weights_can_be_everybodys() -> None:
    case = BATTERY["a unit used several times"]
    for verb in (fully_shard, replicate):
        expected = dict(case.model(0, 0, current_device()).named_parameters())
        model = case.model(dist.get_rank(), 0, current_device())
        verb(model, sync_module_states="broadcast")
        for name, value in full_parameters(model).items():
            assert torch.equal(value, expected[name]), name


@spmd(ranks=2)
def test_explicit_unshard_and_reshard_can_be_called_at_any_time() -> None:
    case = BATTERY["nested"]

    def annotate(model: nn.Module, case: Case) -> None:
        SCHEMES["fully_shard by policy"].annotate(model, case)
        inputs = case.inputs(0, 0, dist.get_rank(), current_device())
        unshard(model)
        unshard(model)
        pending = unshard(model, async_op=True)
        pending.wait()
        pending.wait()
        reshard(model)
        reshard(model)
        unshard(model, async_op=True)
        case.loss(model, *inputs).backward()
        loss = case.loss(model, *inputs)
        reshard(model)  # between forward and backward
        loss.backward()
        model.zero_grad()
        with keep_unsharded(model), torch.no_grad():
            first = model(*inputs)
            assert torch.equal(first, model(*inputs))
        assert {unit["state"] for unit in describe(model).to_dict()["units"]} == {"SHARDED"}

    assert_same_training(case, annotate)


@spmd(ranks=2)
def test_gradients_from_before_the_annotation_are_told_of_when_they_go() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(current_device())
    x = torch.ones(2, 3, device=current_device())
    model(x).sum().backward()
    with logged() as lines:
        fully_shard(model, policy={nn.Linear}, sync_module_states="broadcast")
        assert lines == [
            "WARNING: fully_shard: '0.weight', '0.bias', '1.weight', '1.bias' had gradients from before the annotation, which are "
            "dropped: nothing tells whether they were averaged over the ranks. Run backward after annotating"
        ]
        model(x).sum().backward()
        assert len(lines) == 1


class Outer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.own(x)))


def _two_with_one_inside() -> nn.Module:
    shared = nn.Sequential(nn.LayerNorm(6), Layer())
    return nn.Sequential(Outer(shared), nn.Linear(6, 6), Outer(shared), nn.Linear(6, 2))


@spmd(ranks=2)
@pytest.mark.parametrize("inner", [(), (Layer,), (Layer, nn.Sequential)])
def test_a_module_inside_two_units_belongs_to_what_holds_both_places(inner: tuple[type[nn.Module], ...]) -> None:
    case = Case("a module in two units", _two_with_one_inside, rows(4, 6), mean_square, (Outer, *inner))
    assert_same_training(case, SCHEMES["fully_shard by policy"].annotate)


class Flattened(nn.LSTM):
    """Moves its weights to memory of its own wherever torch's RNNs do so on CUDA."""

    def flatten_parameters(self) -> None:
        for weight in self._flat_weights:
            weight.data = weight.data.clone()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.flatten_parameters()  # as many models do
        output: Tensor = super().forward(x)[0]
        return output


@spmd(ranks=2)
def test_rnns_leave_their_weights_where_they_are_gathered() -> None:
    case = Case(
        "flattened",
        lambda: nn.Sequential(Flattened(5, 3, batch_first=True), nn.Linear(3, 2)),
        rows(3, 4, 5),
        mean_square,
        (Flattened,),
    )
    assert_same_training(case, SCHEMES["fully_shard by policy"].annotate)
    model = case.model(0, 0, current_device())
    fully_shard(model)
    remove(model, fully_shard)
    before = model[0].weight_ih_l0.data_ptr()  # type: ignore[union-attr, operator]
    model[0].flatten_parameters()  # type: ignore[operator]
    assert model[0].weight_ih_l0.data_ptr() != before  # type: ignore[union-attr, operator]
