"""Gradients that somebody kept never change under them; those that nobody kept are made no second time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable.device.flat_parameters import FlatParameters
from composable.device.memory import MemoryPool
from composable.device.parameter_forms import adopt_local, make_sharded
from composable.device.sharded_gradients import GradientShards
from composable.plan.layout import ParamSpec, plan_layout, plan_reduction
from composable.plan.precision import resolve
from tests.device.in_process import Seat
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


class Unit:
    """Parameters of one unit, and how their gradients come about: plain ones, or DTensors where there is a group."""

    def __init__(self, packed_align: int = 16) -> None:
        specs = [ParamSpec("w", (4, 3)), ParamSpec("b", (4,)), ParamSpec("v", (5, 2), 1)]
        layout = plan_layout(specs, num_shards=2, direct_numel=6, packed_align=packed_align)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.flat = FlatParameters(
            layout, precision=resolve("float32"), device=CPU, communicator=Seat(rank, 2), pool=MemoryPool()
        )  # type: ignore[arg-type]
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (2,))
            self.parameters = [
                make_sharded(self.flat.shard_view(i), slot, mesh, 0, requires_grad=True) for i, slot in enumerate(layout.slots)
            ]
        else:
            self.parameters = [nn.Parameter(self.flat.shard_view(i)) for i in range(len(specs))]
        self.plan = plan_reduction(layout, trainable=[True] * len(specs), even_only=False)
        self.shards = GradientShards(self.flat, self.parameters, self.plan)

    def step(self, value: float) -> int:
        """One backward whose reduced gradients are `value` everywhere; the address of the buffer they came through."""
        self.shards.refresh()
        self.shards.buffer.fill_(value)
        self.shards.deliver(range(len(self.parameters)))
        return self.shards.buffer.data_ptr()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.parameters]
        return [gradient for gradient in found if gradient is not None]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- what a user may keep ---------------------------------------------------------------------------------------------


def _in_a_list(unit: Unit) -> Callable[[], float]:
    kept = unit.gradients
    return lambda: float(_local(kept[0])[0, 0])


def _one_of_them(unit: Unit) -> Callable[[], float]:
    kept = unit.parameters[1].grad
    return lambda: float(_local(kept)[0])


def _detached(unit: Unit) -> Callable[[], float]:
    kept = unit.gradients[0].detach()
    return lambda: float(_local(kept)[0, 0])


def _a_row_of_its_local_part(unit: Unit) -> Callable[[], float]:
    kept = _local(unit.gradients[0])[1:]
    return lambda: float(kept[0, 0])


def _as_numpy(unit: Unit) -> Callable[[], float]:
    kept = _local(unit.gradients[2]).numpy()
    return lambda: float(kept[0, 0])


def _as_a_view_on_the_whole_storage(unit: Unit) -> Callable[[], float]:
    gradient = _local(unit.gradients[0])
    kept = torch.empty(0).set_(gradient.untyped_storage())
    offset = gradient.storage_offset()
    return lambda: float(kept[offset])


def _in_a_graph(unit: Unit) -> Callable[[], float]:
    """Only autograd holds it: it is needed for the gradient of what was multiplied with it."""
    gradient = _local(unit.gradients[0])
    factor = torch.ones((), device=gradient.device, requires_grad=True)
    product = (gradient * factor)[0, 0]
    del gradient

    def value() -> float:
        (kept,) = torch.autograd.grad(product, factor, retain_graph=True)
        return float(kept)

    return value


def _on_another_parameter(unit: Unit) -> Callable[[], float]:
    """As an exponential average of gradients may start."""
    other = copy.deepcopy(unit.parameters[0])
    other.grad = unit.parameters[0].grad

    def value() -> float:
        assert other.grad is not None
        return float(_local(other.grad)[0, 0])

    return value


WAYS_TO_KEEP: Final = {
    keep.__name__.strip("_"): keep
    for keep in (
        _in_a_list,
        _one_of_them,
        _detached,
        _a_row_of_its_local_part,
        _as_numpy,
        _as_a_view_on_the_whole_storage,
        _in_a_graph,
        _on_another_parameter,
    )
}


def _keep_over_three_steps(how: str) -> None:
    unit = Unit()
    unit.step(1.0)
    unit.zero_grad()
    before = unit.step(2.0)
    value = WAYS_TO_KEEP[how](unit)
    unit.zero_grad()
    assert unit.step(3.0) != before, "the buffer is still being read"
    assert value() == 2.0
    unit.zero_grad()
    unit.step(4.0)
    assert value() == 2.0
    assert [float(_local(g).flatten()[0]) for g in unit.gradients if _local(g).numel()] == [4.0] * len(unit.gradients)


@pytest.mark.parametrize("how", WAYS_TO_KEEP)
def test_a_kept_gradient_does_not_change(how: str) -> None:
    _keep_over_three_steps(how)


def _keep_each() -> list[str]:
    failed = []
    for how in WAYS_TO_KEEP:
        try:
            _keep_over_three_steps(how)
        except AssertionError as error:
            failed.append(f"{how}: {error}")
    return failed


def test_a_kept_gradient_that_is_a_dtensor_does_not_change(pool: Pool) -> None:
    assert pool.run(2, _keep_each) == [[], []]


def _nothing_kept(unit: Unit) -> list[int]:
    addresses = []
    for value in (1.0, 2.0, 3.0):
        addresses.append(unit.step(value))
        assert all(torch.equal(_local(g), torch.full_like(_local(g), value)) for g in unit.gradients)
        norm = torch.stack([_local(g).norm() for g in unit.gradients]).norm()
        for gradient in unit.gradients:
            _local(gradient).mul_(1.0 / (norm + 1.0))
        unit.zero_grad()
        del gradient
    return addresses


def _assert_reused() -> None:
    assert len(dict.fromkeys(_nothing_kept(Unit()))) == 1


def test_gradients_that_nobody_kept_are_made_once() -> None:
    _assert_reused()


@spmd(ranks=2)
def test_gradients_that_are_dtensors_and_that_nobody_kept_are_made_once() -> None:
    _assert_reused()


def _assert_reused_after_letting_go(how: str) -> None:
    unit = Unit()
    unit.step(1.0)
    value = WAYS_TO_KEEP[how](unit)
    unit.zero_grad()
    fresh = unit.step(2.0)
    unit.zero_grad()
    del value
    assert unit.step(3.0) == fresh


@pytest.mark.parametrize("how", WAYS_TO_KEEP)
def test_one_kept_gradient_costs_one_new_buffer_and_no_more(how: str) -> None:
    _assert_reused_after_letting_go(how)


@pytest.mark.parametrize("how", WAYS_TO_KEEP)
def test_where_torch_cannot_count_users_every_gradient_passes_for_kept(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composable.device.kept_gradients.CAN_COUNT_USERS", False)
    _keep_over_three_steps(how)


def test_knowing_of_a_gradient_is_not_keeping_it() -> None:
    unit = Unit()
    before = unit.step(1.0)
    reference = weakref.ref(unit.gradients[0])
    unit.zero_grad()
    assert unit.step(2.0) == before
    assert reference() is unit.gradients[0]


def _assert_added() -> None:
    unit = Unit()
    unit.step(1.0)
    held = [parameter.grad for parameter in unit.parameters]
    unit.step(2.0)
    for parameter, gradient in zip(unit.parameters, held, strict=True):
        assert parameter.grad is gradient, "an optimizer that holds the gradient sees the sum"
        assert gradient is not None
        assert torch.equal(_local(gradient), torch.full_like(_local(gradient), 3.0))


def test_a_gradient_that_is_there_already_is_added_to_in_place() -> None:
    _assert_added()


@spmd(ranks=2)
def test_a_dtensor_gradient_that_is_there_already_is_added_to_in_place() -> None:
    _assert_added()


def _assert_partial_delivery() -> None:
    unit = Unit()
    unit.shards.refresh()
    unit.shards.buffer.fill_(1.0)
    unit.shards.deliver([0, 2])
    assert [parameter.grad is None for parameter in unit.parameters] == [False, True, False]


def test_a_parameter_that_no_rank_used_keeps_no_gradient() -> None:
    _assert_partial_delivery()


def test_some_kept_gradients_of_zero_set_to_zeros_are_added_to() -> None:
    """`zero_grad(set_to_none=False)`: the gradient object stays, and counts from zero again."""
    unit = Unit()
    for value in (1.0, 2.0, 3.0):
        unit.step(value)
        assert all(torch.equal(g, torch.full_like(g, value)) for g in unit.gradients)
        for gradient in unit.gradients:
            gradient.zero_()


@pytest.mark.parametrize(("packed_align", "straight"), [(1, True), (16, False)], ids=["without gaps", "aligned"])
def test_gradients_lie_where_the_reduction_puts_them(packed_align: int, straight: bool) -> None:
    """Direct gradients always; the others if they lie in the buffer as in a row, and are copied there otherwise."""
    unit = Unit(packed_align)
    assert (unit.plan.straight is not None) is straight
    unit.step(0.0)
    for column in unit.plan.columns:
        unit.shards.row[column.start : column.start + column.numel] = column.slot + 1.0
    for index, place in zip(unit.plan.direct, unit.shards.direct, strict=True):
        place.fill_(index + 1.0)
    unit.shards.take_from_row()
    for index, slot in enumerate(unit.flat.layout.slots):
        assert torch.equal(unit.gradients[index], torch.full(slot.local_shape(0), index + 1.0))
    row, buffer = (tensor.untyped_storage().data_ptr() for tensor in (unit.shards.row, unit.shards.buffer))
    assert (row == buffer) is straight


@pytest.mark.parametrize("reduce", ["float32", "float64"])
@pytest.mark.parametrize("frozen", [[], ["large"], ["large", "small"], ["last"]])
def test_the_second_hop_gets_all_sums_and_flags_and_nothing_that_is_frozen(frozen: list[str], reduce: str) -> None:
    specs = [ParamSpec(name, shape) for name, shape in (("one", (40, 8)), ("large", (60, 8)), ("two", (41, 8)))]
    specs += [ParamSpec("small", (5,)), ParamSpec("last", (3, 2), 1)]
    layout = plan_layout(specs, num_shards=2, direct_numel=100, packed_align=1)
    flat = FlatParameters(
        layout,
        precision=resolve("float32", reduce=reduce),
        device=CPU,
        communicator=Seat(0, 2),  # type: ignore[arg-type]
        pool=MemoryPool(),
    )
    plan = plan_reduction(layout, trainable=[spec.name not in frozen for spec in specs], even_only=False)
    shards = GradientShards(flat, [nn.Parameter(flat.shard_view(i)) for i in range(len(specs))], plan)
    shards.refresh()
    if reduce == "float32":
        shards.buffer.fill_(0.0)
    for tensor in shards.reduced:
        tensor.fill_(1.0)
    assert all(part.eq(1.0).all() for part in (*shards.direct, shards.row))
    assert list(shards.slots) == [index for index in (0, 1, 2, 3, 4) if specs[index].name not in frozen]
    trained = sum(slot.chunk_numel for slot in shards.slots.values())
    assert shards.buffer.numel() < trained + 3 * 16 + 8, "what is frozen takes no room, but for gaps and flags"
    if reduce == "float32":
        assert len(shards.reduced) == 1 + (plan.straight is None)


@spmd(ranks=2)
def test_gradients_are_spread_as_their_parameters_are() -> None:
    unit = Unit()
    unit.step(1.0)
    for parameter, gradient in zip(unit.parameters, unit.gradients, strict=True):
        assert isinstance(parameter, DTensor)
        assert isinstance(gradient, DTensor)
        assert gradient.placements == parameter.placements
        assert gradient.device_mesh == parameter.device_mesh
        assert gradient.shape == parameter.shape
        assert gradient.to_local().shape == parameter.to_local().shape
    assert unit.parameters[2].placements == (Shard(1),)


# --- parameters at rest -----------------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_a_sharded_parameter_is_a_dtensor_over_the_shard_buffer() -> None:
    unit = Unit()
    with torch.no_grad():
        for index, parameter in enumerate(unit.parameters):
            parameter.fill_(index + 1.0)
    for index, slot in enumerate(unit.flat.layout.slots):
        shard = unit.flat.shard_view(index)
        assert torch.equal(shard, torch.full_like(shard, index + 1.0))
        assert unit.parameters[index].full_tensor().tolist() == torch.full(slot.shape, index + 1.0).tolist()


@spmd(ranks=2)
def test_a_write_is_noticed_on_the_parameter_or_on_the_buffer() -> None:
    """On one of the two: operations on a DTensor count on the DTensor only, those on its local tensor on the buffer only."""
    unit = Unit()
    unit.step(1.0)
    parameter = unit.parameters[0]
    assert isinstance(parameter, DTensor)
    before = parameter._version, unit.flat.shard._version
    torch.optim.SGD(unit.parameters, lr=0.1).step()
    assert parameter._version > before[0]
    before = parameter._version, unit.flat.shard._version
    with torch.no_grad():
        parameter.to_local().add_(1.0)
    assert unit.flat.shard._version > before[1]


@spmd(ranks=2)
def test_a_sharded_parameter_and_its_gradient_can_be_copied() -> None:
    unit = Unit()
    unit.step(1.0)
    for parameter in unit.parameters:
        twin = copy.deepcopy(parameter)
        assert torch.equal(twin.to_local(), parameter.to_local())
        twin.data.fill_(9.0)
        assert not torch.equal(twin.to_local(), parameter.to_local())
        assert copy.deepcopy(parameter.grad) is not parameter.grad


@spmd(ranks=2)
def test_a_dtensor_moves_into_a_buffer_and_stays_the_same_object() -> None:
    unit = Unit()
    parameter = unit.parameters[0]
    with torch.no_grad():
        parameter.fill_(7.0)
    elsewhere = torch.zeros(unit.flat.layout.slots[0].local_shape(dist.get_rank()))
    adopt_local(parameter, elsewhere)
    assert elsewhere.flatten()[0] == 7.0
    with torch.no_grad():
        parameter.add_(1.0)
    assert elsewhere.flatten()[0] == 8.0
    assert unit.flat.shard_view(0).flatten()[0] == 7.0
