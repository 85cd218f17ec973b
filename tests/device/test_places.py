"""Memory that ranks of one host gather into together: who may use it when, and that nobody's numbers are ever mixed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, reshard, unshard
from composable.device.collectives import Channel, GatherPart, Room, SharedWire, Wire, shared_wire, wires_wrapped_by
from composable.device.collectives.places import TURNS, Place, Places
from composable.device.memory import ElasticBuffer, MemoryPool
from composable.device.shared_memory import GRAIN, Common, my_identity
from composable.errors import PhaseError
from tests.helpers.wires import all_in_common
from tests.helpers.world import spmd

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(my_identity() is None, reason="this system has no memory without a name (memfd_create)")


# --- memory in common -------------------------------------------------------------------------------------------------


def test_what_one_has_made_the_other_opens_and_both_see_the_same() -> None:
    made = Common.make(1000)
    opened = Common.open(os.getpid(), made.descriptor, 1000, made.mark)
    assert made.memory.numel() == opened.memory.numel() == 1000
    assert made.storage.nbytes() == opened.storage.nbytes() == 1000
    made.memory[999] = 7
    assert opened.memory[999].item() == 7
    assert torch.empty(0, dtype=torch.uint8).set_(opened.storage, 0, (1000,), (1,))[999].item() == 7


def test_what_is_something_else_by_now_is_not_opened() -> None:
    made = Common.make(1000)
    with pytest.raises(OSError, match="is something else now"):
        Common.open(os.getpid(), made.descriptor, 1000, made.mark + 1)
    with pytest.raises(OSError, match="has another size"):
        Common.open(os.getpid(), made.descriptor, GRAIN, made.mark)
    descriptor = made.descriptor
    del made
    with pytest.raises(OSError, match="No such file"):
        Common.open(os.getpid(), descriptor, 1000, 1)


def test_a_buffer_lives_in_memory_that_is_lent_to_it_and_its_views_with_it() -> None:
    common, left = Common.make(400), []
    buffer = ElasticBuffer(100, torch.float32, CPU, MemoryPool())
    view = buffer.tensor[10:20]
    assert not buffer.lodge(common.storage, lambda: left.append(1)), "it has memory already"
    buffer.free()
    assert buffer.lodge(common.storage, lambda: left.append(1))
    assert buffer.lodged
    view.fill_(3.0)
    assert common.memory.view(torch.float32)[10:20].tolist() == [3.0] * 10
    assert not left
    buffer.free()
    assert left == [1]
    assert not buffer.lodged
    assert buffer.tensor.untyped_storage().nbytes() == 0
    assert common.storage.nbytes() == 400, "given back"


def test_a_buffer_that_moves_out_leaves_what_is_there_alone() -> None:
    common, left = Common.make(400), []
    common.memory.view(torch.float32).fill_(1.0)
    buffer = ElasticBuffer(100, torch.float32, CPU, MemoryPool())
    buffer.free()
    assert buffer.lodge(common.storage, lambda: left.append(1))
    buffer.move_out()
    buffer.tensor.fill_(2.0)
    assert common.memory.view(torch.float32).eq(1.0).all()
    buffer.free()
    assert not left, "who moves out says itself what that means"


# --- turns ------------------------------------------------------------------------------------------------------------


class _Users:
    def __init__(self, *, finished: bool) -> None:
        self.are_finished = finished

    def finished(self) -> bool:
        return self.are_finished


def test_a_place_is_entered_once_and_only_after_all_earlier_gathers_have_ended_everywhere() -> None:
    place = Place(0, 8)
    assert place.enter()
    assert not place.enter(), "used here"
    early, late = _Users(finished=False), _Users(finished=False)
    place.note(early)
    place.leave()
    place.note(late)
    assert not place.enter()
    late.are_finished = True
    assert not place.enter(), "an earlier one may last longer than a later one"
    early.are_finished = True
    assert place.enter()


def test_a_place_whose_users_never_finish_is_given_up_and_does_not_grow() -> None:
    place = Place(0, 8)
    for _ in range(1000):
        place.note(_Users(finished=False))
    assert not place.enter()
    assert len(place._earlier) < 100


def test_buffers_that_are_laid_out_alike_take_turns_and_others_do_not() -> None:
    announced: list[int] = []
    places = Places(lambda place: announced.append(place.number))
    alike = [places.place_for(Room(8, "block", stays=False)) for _ in range(2 * TURNS)]
    assert alike[:TURNS] == alike[TURNS:]
    assert len({id(place) for place in alike}) == TURNS
    others = [places.place_for(Room(8, "root", stays=False)), *(places.place_for(Room(8, "block", stays=True)) for _ in "ab")]
    assert len({id(place) for place in (*alike, *others)}) == TURNS + 3
    assert announced == list(range(TURNS + 3)), "numbered in the order in which they are asked for"
    told = Places(None)
    assert [told.place_for(Room(8, "block", stays=False)).number for _ in range(TURNS)] == [0, 1, 2]
    assert told.place_for(Room(8, "root", stays=False)).common is None, "to be opened when the other rank has told of it"


# --- between ranks ----------------------------------------------------------------------------------------------------


class _Gathers:
    """One unit's gathers: `numel` elements per rank, all equal to its rank and the number of the gather."""

    def __init__(self, wire: SharedWire, numel: int, *, stays: bool = False) -> None:
        self.wire = wire
        self.channel: Channel = wire.open_channel()
        self.shard = torch.empty(numel)
        self.buffer = ElasticBuffer(wire.ways * numel, torch.float32, CPU, MemoryPool())
        whole = self.buffer.tensor
        self.plan = wire.prepare([GatherPart(self.shard, whole, whole.numel())], Room(self.buffer.nbytes, f"{numel}", stays))
        self.buffer.free()

    def launch(self, value: float, *, private: bool = False) -> Callable[[], None]:
        self.shard.fill_(value + self.wire.rank)
        if private:
            self.buffer.allocate()
        else:
            self.wire.make_room(self.plan, self.buffer)
        arrival = self.wire.all_gather(self.plan, label="gather", channel=self.channel)
        return arrival.wait

    def expect(self, value: float) -> None:
        rows = self.buffer.tensor.view(self.wire.ways, -1)
        for rank, row in enumerate(rows):
            assert row.eq(value + rank).all(), f"rank {self.wire.rank} sees {row.unique().tolist()} of rank {rank}"


def _wire() -> SharedWire:
    wire = shared_wire(dist.new_group(), CPU)
    assert wire is not None
    wire.common_bytes = 0
    return wire


@spmd(ranks=[2, 3])
def test_all_compute_with_the_same_memory_and_each_writes_its_part() -> None:
    unit = _Gathers(_wire(), 50_000)
    for step in range(5):
        unit.launch(step)()
        unit.expect(step)
        assert unit.buffer.lodged
        dist.barrier()
        if unit.wire.rank == 0:
            unit.buffer.tensor[7] = -1.0
        dist.barrier()
        assert unit.buffer.tensor[7].item() == -1.0, "the very same memory"
        dist.barrier()
        unit.buffer.free()
        dist.barrier()  # so that everybody has finished when the next one is launched


@spmd(ranks=[2, 3])
def test_a_rank_that_gathers_privately_makes_all_of_them_do_so_and_nothing_is_mixed_up() -> None:
    unit = _Gathers(_wire(), 50_000)
    for step in range(12):
        unit.launch(step, private=step % 3 == 1 and unit.wire.rank == step % unit.wire.ways)()
        unit.expect(step)
        assert unit.buffer.lodged == (step % 3 != 1) or step % 3 == 2
        unit.buffer.free()
        if step % 3 == 2:
            dist.barrier()


@spmd(ranks=[2, 3])
def test_units_that_take_turns_never_see_each_others_numbers_however_they_overlap() -> None:
    """More units than places, several unsharded at a time, no barrier: sometimes together, sometimes privately."""
    wire = _wire()
    units = [_Gathers(wire, 30_000) for _ in range(TURNS + 2)]
    held: list[tuple[_Gathers, float]] = []
    for turn in range(60):
        unit, value = units[(turn * 7) % len(units)], 10.0 * turn
        for other, expected in held:
            other.expect(expected)
        if len(held) > turn % 4:
            for other, _ in held:
                other.buffer.free()
            held = []
        if not unit.buffer.held:
            unit.launch(value)()
            held.append((unit, value))


@spmd(ranks=2)
def test_ranks_that_launch_in_different_orders_do_not_see_each_others_numbers() -> None:
    """Units 0 and TURNS have a right to the same place, and each rank writes another one's part to it."""
    wire = _wire()
    units = [_Gathers(wire, 30_000) for _ in range(TURNS + 1)]
    for step in range(4):
        order = [0, TURNS] if (wire.rank + step) % 2 else [TURNS, 0]
        waits = {index: units[index].launch(100.0 * step + index) for index in order}
        for index in (0, TURNS):
            waits[index]()
            units[index].expect(100.0 * step + index)
        for index in order:
            units[index].buffer.free()


@spmd(ranks=2)
def test_units_that_stay_have_places_of_their_own() -> None:
    units = [_Gathers(wire, 30_000, stays=True) for wire in [_wire()] for _ in range(TURNS + 2)]
    for index, unit in enumerate(units):
        unit.launch(10 * index)()
    for index, unit in enumerate(units):
        assert unit.buffer.lodged
        unit.expect(10 * index)


# --- whole units ------------------------------------------------------------------------------------------------------


class _Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.weight)
        return x @ self.weight


def _common(module: nn.Module, wrapper: Callable[[Wire], Wire] = all_in_common) -> nn.Module:
    with wires_wrapped_by(wrapper):
        return fully_shard(module)


@spmd(ranks=2)
def test_writing_to_what_other_ranks_compute_with_is_an_error_that_names_the_parameter() -> None:
    model = nn.Sequential(_Writes(lambda weight: weight.mul_(2.0)))
    _common(model[0])
    _common(model)
    with pytest.raises(PhaseError) as refused:
        model(torch.ones(2, 4)).sum().backward()
    assert str(refused.value).startswith("parameter 'weight' of unit '0' was written to in place while it was unsharded. ")


@spmd(ranks=2)
def test_an_embedding_that_scales_its_rows_down_is_left_alone() -> None:
    model = nn.Embedding(8, 4, max_norm=0.5)
    _common(model)
    out = model(torch.arange(8))
    assert out.norm(dim=1).max() <= 0.5 + 1e-5
    out.sum().backward()


@spmd(ranks=2)
def test_explicitly_unsharded_parameters_are_this_ranks_own() -> None:
    model = nn.Linear(8, 8)
    _common(model)
    unshard(model).wait()
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank()))
    dist.barrier()
    assert model.weight.eq(float(dist.get_rank())).all()
    dist.barrier()
    reshard(model)
