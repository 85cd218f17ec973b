"""Every wire moves and adds what torch's own collectives do, keeps messages apart, and says by name what failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives import (
    Channel,
    GatherPart,
    PairsWire,
    ReducePart,
    StreamsWire,
    TensorsWire,
    Wire,
    tensors,
    wire_of,
    world_group,
)
from composable.device.memory import MemoryPool
from composable.device.streams import streams_of
from composable.errors import CommunicationError
from tests.helpers import host
from tests.helpers.wires import all_shared
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


def _shared(group: dist.ProcessGroup, device: torch.device) -> Wire:
    return all_shared(wire_of(group, device))


def _apart(group: dist.ProcessGroup, device: torch.device) -> Wire:
    return all_shared(wire_of(group, device, apart=True))


KINDS: dict[str, Callable[..., Wire]] = {
    "pairs": PairsWire,
    "tensors": TensorsWire,
}
if host.is_used():
    KINDS |= {"shared": _shared, "apart": _apart}
DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _wire(kind: str) -> Wire:
    return KINDS[kind](world_group(), CPU)


def _numbers(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


def _gather_by_torch(shard: Tensor, ways: int) -> Tensor:
    pieces = [torch.empty_like(shard) for _ in range(ways)]
    dist.all_gather(pieces, shard)
    return torch.cat(pieces)


# --- gathering and reducing -------------------------------------------------------------------------------------------


def _gather(kind: str) -> None:
    wire = _wire(kind)
    ways, rank = wire.ways, wire.rank
    channel = wire.open_channel()
    for dtype in DTYPES:
        # A full last chunk, one that is partly padding, and ranks that have nothing at all.
        sizes = [(4, 4 * ways), (3, 3 * ways - 2), (5, 6), (1, 1), (2, 0)]
        parts = []
        for index, (chunk, numel) in enumerate(sizes):
            whole = torch.full((chunk * ways,), 99.0).to(dtype)
            parts.append(GatherPart(_numbers(chunk, 10 * index + rank, dtype), whole, numel))
        plan = wire.prepare(parts)
        for step in range(2):
            for part in parts:
                part.shard.add_(step)
                part.whole.fill_(99.0)
            wire.all_gather(plan, label="all-gather", channel=channel).wait()
            for part in parts:
                expected = _gather_by_torch(part.shard, ways)
                assert torch.equal(part.whole[: part.numel], expected[: part.numel])


def _reduce(kind: str, early: bool = False) -> None:
    wire = _wire(kind)
    ways, rank = wire.ways, wire.rank
    channel, scratch = wire.open_channel(), MemoryPool()
    for dtype in DTYPES:
        parts = []
        for index, (chunk, numel) in enumerate([(4, 4 * ways), (3, 3 * ways - 2), (2, 3)]):
            if wire.capabilities.even_only:
                numel = chunk * ways
            mine = max(0, min(chunk, numel - rank * chunk))
            out = torch.full((mine,), 99.0).to(dtype)
            source, scale = _numbers(numel, 10 * index + rank, dtype), (1.0, 0.5, 3.0)[index]
            parts.append(ReducePart(source, chunk, out, scale, early=early))
        expected = []
        for part in parts:
            total = part.source.clone()
            dist.all_reduce(total)
            expected.append(total[rank * part.chunk :][: part.out.numel()] * part.scale)
        wire.reduce_scatter(parts, scratch=scratch, label="reduction", channel=channel).wait()
        for part, total in zip(parts, expected, strict=True):
            assert torch.equal(part.out, total)


def _reduce_early(kind: str) -> None:
    """A wire may multiply the terms of a sum; small numbers come out the same."""
    _reduce(kind, early=True)


def _others(kind: str) -> None:
    wire = _wire(kind)
    ways, rank = wire.ways, wire.rank
    first, second = _numbers(5, rank), _numbers(7, 10 + rank)
    expected = [t.clone() for t in (first, second)]
    for tensor in expected:
        dist.all_reduce(tensor)
    arrivals = [wire.all_reduce(first, label="one"), wire.all_reduce(second, label="other")]
    for arrival in reversed(arrivals):
        arrival.wait()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    for factor in (1.0, 0.25, 1 / 3):
        mine, into = _numbers(7, 20 + rank), torch.full((7,), float("nan"))
        wire.all_reduce(into, label="of terms", term=(mine, factor)).wait()
        terms = torch.stack([_numbers(7, 20 + r) * factor for r in range(ways)])
        torch.testing.assert_close(into, terms.sum(0), rtol=0 if factor != 1 / 3 else 1e-6, atol=0)
        assert torch.equal(mine, _numbers(7, 20 + rank)), "a term is only read"
    tensor = torch.full((3,), float(rank))
    wire.broadcast(tensor, label="broadcast")
    assert tensor.tolist() == [0.0] * 3
    assert wire.extremes([rank, -rank, 2**60 + rank], label="") == (
        [0, 1 - ways, 2**60],
        [ways - 1, 0, 2**60 + ways - 1],
    )
    assert wire.exchange([rank, 2**40 + rank], label="exchange") == [[r, 2**40 + r] for r in range(ways)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [_gather, _reduce, _reduce_early, _others], ids=["gather", "reduce", "reduce early", "others"])
def test_a_wire_gives_what_torchs_own_collectives_give(pool: Pool, body: Callable[[str], None], kind: str, ranks: int) -> None:
    pool.run(ranks, body, kind)


def _mean(kind: str) -> int:
    """Reduces to the mean, then to half of it; how often this side had to multiply."""
    streams = StreamsWire(world_group(), CPU, streams_of(CPU))
    wire = {"tensors": TensorsWire(world_group(), CPU), "streams": streams}[kind]
    wire._averaging = True
    with mock.patch.object(tensors, "scale_sums", wraps=tensors.scale_sums) as scaling:
        for factor in (1.0, 0.5):
            source = _numbers(2 * 5, wire.rank)
            total = source.clone()
            dist.all_reduce(total)
            out = torch.full((5,), float("nan"))
            part = ReducePart(source, 5, out, factor / wire.ways)
            wire.reduce_scatter([part], scratch=MemoryPool(), label="", channel=wire.open_channel()).wait()
            assert torch.equal(out, total[5 * wire.rank :][:5] * factor / wire.ways)
    return scaling.call_count


@pytest.mark.parametrize("kind", ["tensors", "streams"])
def test_a_backend_that_averages_is_asked_for_means_and_for_nothing_else(pool: Pool, kind: str) -> None:
    assert pool.run(2, _mean, kind) == [1, 1]


# --- many at once -----------------------------------------------------------------------------------------------------


def _in_flight(kind: str) -> None:
    wire = _wire(kind)
    ways, rank = wire.ways, wire.rank
    channels = [wire.open_channel() for _ in range(3)]
    shards = [_numbers(4, 10 * unit + rank) for unit in range(3)]
    wholes = [torch.zeros(4 * ways) for _ in shards]
    plans = [wire.prepare([GatherPart(s, w, 4 * ways)]) for s, w in zip(shards, wholes, strict=True)]
    sources = [_numbers(4 * ways, 50 + 10 * unit + rank) for unit in range(3)]
    outs = [torch.zeros(4) for _ in sources]
    scratch = MemoryPool()
    arrivals = []
    for unit in range(3):
        arrivals.append(wire.all_gather(plans[unit], label=f"gather {unit}", channel=channels[unit]))
        part = ReducePart(sources[unit], 4, outs[unit])
        arrivals.append(wire.reduce_scatter([part], scratch=scratch, label=f"reduce {unit}", channel=channels[unit]))
    for arrival in reversed(arrivals):
        arrival.wait()
    for unit in range(3):
        assert torch.equal(wholes[unit], torch.cat([_numbers(4, 10 * unit + r) for r in range(ways)]))
        total = torch.stack([_numbers(4 * ways, 50 + 10 * unit + r) for r in range(ways)]).sum(0)
        assert torch.equal(outs[unit], total[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("kind", KINDS)
def test_many_collectives_can_be_in_flight_and_waited_for_in_any_order(pool: Pool, kind: str) -> None:
    pool.run(3, _in_flight, kind)


@spmd(ranks=[2, 3])
def test_pairs_of_units_that_ranks_launch_in_different_orders_are_not_mixed_up() -> None:
    """Tags name the unit and the step; so what arrives early waits for its own receiver."""
    wire = _wire("pairs")
    ways, rank = wire.ways, wire.rank
    channels = [wire.open_channel() for _ in range(2)]
    wholes = [torch.zeros(2 * ways) for _ in range(2)]
    plans = [wire.prepare([GatherPart(torch.tensor([10.0 * unit + rank] * 2), wholes[unit], 2 * ways)]) for unit in range(2)]
    order = [0, 1] if rank == 0 else [1, 0]
    arrivals = [wire.all_gather(plans[unit], label=f"unit {unit}", channel=channels[unit]) for unit in order]
    for arrival in arrivals:
        arrival.wait()
    for unit in range(2):
        assert wholes[unit].tolist() == [10.0 * unit + r for r in range(ways) for _ in range(2)]


@spmd(ranks=3)
def test_pairs_are_added_in_the_order_of_ranks_so_that_every_run_rounds_alike() -> None:
    wire = _wire("pairs")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 300, generator=generator) * torch.tensor([[1.0], [1e4], [1e-4]])
    out = torch.empty(100)
    part = ReducePart(values[wire.rank].clone(), 100, out)
    wire.reduce_scatter([part], scratch=MemoryPool(), label="", channel=wire.open_channel()).wait()
    mine = values[:, 100 * wire.rank : 100 * wire.rank + 100]
    assert torch.equal(out, (mine[0] + mine[1]) + mine[2])


@spmd(ranks=3)
def test_a_reduction_gives_back_the_scratch_that_it_borrowed_and_leaves_its_source() -> None:
    wire, scratch = _wire("pairs"), MemoryPool()
    channel = wire.open_channel()
    idle = []
    for _ in range(3):
        source = _numbers(6, wire.rank)
        before = source.clone()
        part = ReducePart(source, 2, torch.empty(2))
        arrival = wire.reduce_scatter([part], scratch=scratch, label="", channel=channel)
        assert scratch.idle_bytes == 0
        arrival.wait()
        assert torch.equal(source, before)
        idle.append(scratch.idle_bytes)
    assert idle == [2 * 2 * 4] * 3, "two peers' rows of two elements, lent again and again"


@spmd(ranks=2)
def test_waiting_twice_is_as_good_as_waiting_once() -> None:
    for kind in KINDS:
        wire = _wire(kind)
        out = torch.zeros(2)
        part = ReducePart(torch.ones(4), 2, out)
        arrival = wire.reduce_scatter([part], scratch=MemoryPool(), label="", channel=wire.open_channel())
        arrival.wait()
        arrival.wait()
        assert out.tolist() == [2.0, 2.0]


# --- tags -------------------------------------------------------------------------------------------------------------


def test_tags_of_different_units_steps_and_parts_are_different_and_fit() -> None:
    seen: dict[int, tuple[int, int]] = {}
    for number in (0, 1, 2, 511, 1023):
        channel = Channel(number)
        for step in range((1 << 10) - 1):
            tag = channel.next_tag()
            assert tag not in seen, f"{(number, step)} and {seen[tag]}"
            seen[tag] = (number, step)
            assert tag % Channel.PARTS == 0, "room for the number of the part"
            assert tag >= (1 << 30), "apart from the tags that people choose"
            assert tag + Channel.PARTS - 1 <= Channel.LOWEST, "a tag is a C int"


def test_channels_whose_lowest_bits_are_alike_have_other_tags() -> None:
    one, other = Channel(5), Channel(5 + 1024)
    for _ in range(2500):
        tag, another = one.next_tag(), other.next_tag()
        assert tag != another
        assert tag & Channel.LOWEST == another & Channel.LOWEST
    assert Channel((1 << 20) - 1).next_tag() < 1 << 63


def test_tags_do_not_repeat_but_their_lowest_bits_may() -> None:
    channel = Channel(1023)
    tags = [channel.next_tag() for _ in range(5000)]
    assert len(dict.fromkeys(tags)) == 5000
    assert tags[-1] < 1 << 62, "a tag is one integer of eight bytes"
    lowest = [tag & Channel.LOWEST for tag in tags]
    assert lowest[:1024] == lowest[1024:2048]
    assert len(dict.fromkeys(lowest[:1024])) == 1024
    assert all((1 << 30) <= tag < (1 << 31) for tag in lowest)


@spmd(ranks=2)
def test_channels_of_a_group_are_numbered_alike_on_every_rank() -> None:
    group = dist.new_group([0, 1])
    wires = [PairsWire(group, CPU), PairsWire(group, CPU)]
    tags = [wires[i % 2].open_channel().next_tag() for i in range(4)]
    assert len(dict.fromkeys(tags)) == 4, "also when two wires serve one group"
    assert wires[0].exchange(tags, label="") == [tags, tags]


# --- failures ---------------------------------------------------------------------------------------------------------

_LABEL = "all-gather of unit 'layers.3'"


def _gather_alone(wire: Wire) -> None:
    plan = wire.prepare([GatherPart(torch.ones(2), torch.empty(2 * wire.ways), 2 * wire.ways)])
    wire.all_gather(plan, label=_LABEL, channel=wire.open_channel()).wait()


def _reduce_alone(wire: Wire) -> None:
    part = ReducePart(torch.ones(2 * wire.ways), 2, torch.empty(2))
    wire.reduce_scatter([part], scratch=MemoryPool(), label=_LABEL, channel=wire.open_channel()).wait()


def _all_reduce_alone(wire: Wire) -> None:
    wire.all_reduce(torch.ones(2), label=_LABEL).wait()


def _exchange_alone(wire: Wire) -> None:
    wire.exchange([1], label=_LABEL)


ALONE: Final = (_gather_alone, _reduce_alone, _all_reduce_alone, _exchange_alone)


GROUP_TIMEOUT: Final = 3.0  # for collectives, and for connecting too, so not too short


def _told(act: Callable[[Wire], None], wire: Wire) -> str:
    with pytest.raises(CommunicationError) as failed:
        act(wire)
    assert isinstance(failed.value.__cause__, (RuntimeError, TimeoutError, EOFError, BrokenPipeError))
    return str(failed.value)


def _failures() -> dict[str, str]:
    """What rank 0 is told in groups of which rank 1 does not take part in a collective, or that it has left."""
    cases = [(kind, act, leaves) for kind in KINDS for act in ALONE for leaves in (False, True)]
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=GROUP_TIMEOUT)) for _ in cases]
    wires = [KINDS[kind](group, CPU) for (kind, _, _), group in zip(cases, groups, strict=True)]
    told: dict[str, str] = {}
    if dist.get_rank() == 1:
        for (_, _, leaves), group in zip(cases, groups, strict=True):
            if leaves:
                dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(len(cases)) as threads:  # so that all of them wait at the same time
            texts = threads.map(lambda case, wire: _told(case[1], wire), cases, wires)
            told = {f"{kind} {act.__name__} {leaves}": text for (kind, act, leaves), text in zip(cases, texts, strict=True)}
    dist.barrier()
    return told


def test_a_collective_that_another_rank_does_not_join_ends_with_its_name_and_the_rank(pool: Pool) -> None:
    told, _ = pool.run(2, _failures, spoils=True)
    assert len(told) == len(KINDS) * len(ALONE) * 2
    for case, text in told.items():
        assert re.fullmatch(
            r"rank 0: the all-gather of unit 'layers\.3' failed: \S.*\n"
            r"Another rank raised, ended or took another path through the model; look for the first error among all ranks\.",
            text,
        ), f"{case}: {text}"
