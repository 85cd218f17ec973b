"""Every communicator moves and adds what torch's own collectives do, keeps messages apart, and says by name what failed."""

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
    AcceleratorCommunicator,
    Communicator,
    GatherPart,
    GenericCommunicator,
    PointToPointCommunicator,
    ReducePart,
    TagSequence,
    accelerator,
    communicator_of,
    generic,
    world_group,
)
from composable.device.memory import MemoryPool
from composable.device.streams import streams_of
from composable.errors import CommunicationError
from tests.helpers import host
from tests.helpers.communicators import all_shared
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


def _shared(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    return all_shared(communicator_of(group, device))


def _apart(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    return all_shared(communicator_of(group, device, dedicated=True))


KINDS: dict[str, Callable[..., Communicator]] = {
    "pairs": PointToPointCommunicator,
    "tensors": GenericCommunicator,
}
if host.is_used():
    KINDS |= {"shared": _shared, "apart": _apart}
DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _communicator(kind: str) -> Communicator:
    return KINDS[kind](world_group(), CPU)


def _numbers(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


def _gather_by_torch(shard: Tensor, size: int) -> Tensor:
    pieces = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(pieces, shard)
    return torch.cat(pieces)


# --- gathering and reducing -------------------------------------------------------------------------------------------


def _gather(kind: str) -> None:
    communicator = _communicator(kind)
    size, rank = communicator.size, communicator.rank
    tags = communicator.tags.open()
    for dtype in DTYPES:
        # A full last chunk, one that is partly padding, and ranks that have nothing at all.
        sizes = [(4, 4 * size), (3, 3 * size - 2), (5, 6), (1, 1), (2, 0)]
        parts = []
        for index, (chunk, numel) in enumerate(sizes):
            whole = torch.full((chunk * size,), 99.0).to(dtype)
            parts.append(GatherPart(_numbers(chunk, 10 * index + rank, dtype), whole, numel))
        plan = communicator.prepare(parts)
        for step in range(2):
            for part in parts:
                part.shard.add_(step)
                part.whole.fill_(99.0)
            communicator.all_gather(plan, label="all-gather", tags=tags).wait()
            for part in parts:
                expected = _gather_by_torch(part.shard, size)
                assert torch.equal(part.whole[: part.numel], expected[: part.numel])


def _reduce(kind: str, early: bool = False) -> None:
    communicator = _communicator(kind)
    size, rank = communicator.size, communicator.rank
    tags, scratch = communicator.tags.open(), MemoryPool()
    for dtype in DTYPES:
        parts = []
        for index, (chunk, numel) in enumerate([(4, 4 * size), (3, 3 * size - 2), (2, 3)]):
            if communicator.capabilities.even_only:
                numel = chunk * size
            mine = max(0, min(chunk, numel - rank * chunk))
            out = torch.full((mine,), 99.0).to(dtype)
            source, scale = _numbers(numel, 10 * index + rank, dtype), (1.0, 0.5, 3.0)[index]
            parts.append(ReducePart(source, chunk, out, scale, early=early))
        expected = []
        for part in parts:
            total = part.source.clone()
            dist.all_reduce(total)
            expected.append(total[rank * part.chunk :][: part.out.numel()] * part.scale)
        communicator.reduce_scatter(parts, scratch=scratch, label="reduction", tags=tags).wait()
        for part, total in zip(parts, expected, strict=True):
            assert torch.equal(part.out, total)


def _reduce_early(kind: str) -> None:
    """A communicator may multiply the terms of a sum; small numbers come out the same."""
    _reduce(kind, early=True)


def _others(kind: str) -> None:
    communicator = _communicator(kind)
    size, rank = communicator.size, communicator.rank
    first, second = _numbers(5, rank), _numbers(7, 10 + rank)
    expected = [t.clone() for t in (first, second)]
    for tensor in expected:
        dist.all_reduce(tensor)
    works = [communicator.all_reduce(first, label="one"), communicator.all_reduce(second, label="other")]
    for work in reversed(works):
        work.wait()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    for factor in (1.0, 0.25, 1 / 3):
        mine, into = _numbers(7, 20 + rank), torch.full((7,), float("nan"))
        communicator.all_reduce(into, label="of terms", scaled_input=(mine, factor)).wait()
        terms = torch.stack([_numbers(7, 20 + r) * factor for r in range(size)])
        torch.testing.assert_close(into, terms.sum(0), rtol=0 if factor != 1 / 3 else 1e-6, atol=0)
        assert torch.equal(mine, _numbers(7, 20 + rank)), "a term is only read"
    tensor = torch.full((3,), float(rank))
    communicator.broadcast(tensor, label="broadcast")
    assert tensor.tolist() == [0.0] * 3
    across = (torch.arange(6.0).view(2, 3) + rank).t()
    communicator.broadcast(across, label="broadcast of what is not contiguous")
    assert across.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert communicator.min_max([rank, -rank, 2**60 + rank], label="") == (
        [0, 1 - size, 2**60],
        [size - 1, 0, 2**60 + size - 1],
    )
    assert communicator.all_gather_ints([rank, 2**40 + rank], label="exchange") == [[r, 2**40 + r] for r in range(size)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [_gather, _reduce, _reduce_early, _others], ids=["gather", "reduce", "reduce early", "others"])
def test_a_communicator_gives_what_torchs_own_collectives_give(
    pool: Pool, body: Callable[[str], None], kind: str, ranks: int
) -> None:
    pool.run(ranks, body, kind)


def _mean(kind: str) -> int:
    """Reduces to the mean, then to half of it; how often this side had to multiply."""
    streams = AcceleratorCommunicator(world_group(), CPU, streams_of(CPU))
    communicator = {"tensors": GenericCommunicator(world_group(), CPU), "streams": streams}[kind]
    communicator._averaging = True
    room = {"tensors": generic, "streams": accelerator}[kind]
    with mock.patch.object(room, "scale_sums", wraps=room.scale_sums) as scaling:
        for factor in (1.0, 0.5):
            source = _numbers(2 * 5, communicator.rank)
            total = source.clone()
            dist.all_reduce(total)
            out = torch.full((5,), float("nan"))
            part = ReducePart(source, 5, out, factor / communicator.size)
            communicator.reduce_scatter([part], scratch=MemoryPool(), label="", tags=communicator.tags.open()).wait()
            assert torch.equal(out, total[5 * communicator.rank :][:5] * factor / communicator.size)
    return scaling.call_count


@pytest.mark.parametrize("kind", ["tensors", "streams"])
def test_a_backend_that_averages_is_asked_for_means_and_for_nothing_else(pool: Pool, kind: str) -> None:
    assert pool.run(2, _mean, kind) == [1, 1]


# --- many at once -----------------------------------------------------------------------------------------------------


def _in_flight(kind: str) -> None:
    communicator = _communicator(kind)
    size, rank = communicator.size, communicator.rank
    tags = [communicator.tags.open() for _ in range(3)]
    shards = [_numbers(4, 10 * unit + rank) for unit in range(3)]
    wholes = [torch.zeros(4 * size) for _ in shards]
    plans = [communicator.prepare([GatherPart(s, w, 4 * size)]) for s, w in zip(shards, wholes, strict=True)]
    sources = [_numbers(4 * size, 50 + 10 * unit + rank) for unit in range(3)]
    outs = [torch.zeros(4) for _ in sources]
    scratch = MemoryPool()
    works = []
    for unit in range(3):
        works.append(communicator.all_gather(plans[unit], label=f"gather {unit}", tags=tags[unit]))
        part = ReducePart(sources[unit], 4, outs[unit])
        works.append(communicator.reduce_scatter([part], scratch=scratch, label=f"reduce {unit}", tags=tags[unit]))
    for work in reversed(works):
        work.wait()
    for unit in range(3):
        assert torch.equal(wholes[unit], torch.cat([_numbers(4, 10 * unit + r) for r in range(size)]))
        total = torch.stack([_numbers(4 * size, 50 + 10 * unit + r) for r in range(size)]).sum(0)
        assert torch.equal(outs[unit], total[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("kind", KINDS)
def test_many_collectives_can_be_in_flight_and_waited_for_in_any_order(pool: Pool, kind: str) -> None:
    pool.run(3, _in_flight, kind)


@spmd(ranks=[2, 3])
def test_pairs_of_units_that_ranks_launch_in_different_orders_are_not_mixed_up() -> None:
    """Tags name the unit and the step; so what arrives early waits for its own receiver."""
    communicator = _communicator("pairs")
    size, rank = communicator.size, communicator.rank
    tags = [communicator.tags.open() for _ in range(2)]
    wholes = [torch.zeros(2 * size) for _ in range(2)]
    plans = [
        communicator.prepare([GatherPart(torch.tensor([10.0 * unit + rank] * 2), wholes[unit], 2 * size)]) for unit in range(2)
    ]
    order = [0, 1] if rank == 0 else [1, 0]
    works = [communicator.all_gather(plans[unit], label=f"unit {unit}", tags=tags[unit]) for unit in order]
    for work in works:
        work.wait()
    for unit in range(2):
        assert wholes[unit].tolist() == [10.0 * unit + r for r in range(size) for _ in range(2)]


@spmd(ranks=3)
def test_pairs_are_added_in_the_order_of_ranks_so_that_every_run_rounds_alike() -> None:
    communicator = _communicator("pairs")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 300, generator=generator) * torch.tensor([[1.0], [1e4], [1e-4]])
    out = torch.empty(100)
    part = ReducePart(values[communicator.rank].clone(), 100, out)
    communicator.reduce_scatter([part], scratch=MemoryPool(), label="", tags=communicator.tags.open()).wait()
    mine = values[:, 100 * communicator.rank : 100 * communicator.rank + 100]
    assert torch.equal(out, (mine[0] + mine[1]) + mine[2])


@spmd(ranks=3)
def test_a_reduction_gives_back_the_scratch_that_it_borrowed_and_leaves_its_source() -> None:
    communicator, scratch = _communicator("pairs"), MemoryPool()
    tags = communicator.tags.open()
    idle = []
    for _ in range(3):
        source = _numbers(6, communicator.rank)
        before = source.clone()
        part = ReducePart(source, 2, torch.empty(2))
        work = communicator.reduce_scatter([part], scratch=scratch, label="", tags=tags)
        assert scratch.idle_bytes == 0
        work.wait()
        assert torch.equal(source, before)
        idle.append(scratch.idle_bytes)
    assert idle == [2 * 2 * 4] * 3, "two peers' rows of two elements, lent again and again"


@spmd(ranks=2)
def test_waiting_twice_is_as_good_as_waiting_once() -> None:
    for kind in KINDS:
        communicator = _communicator(kind)
        out = torch.zeros(2)
        part = ReducePart(torch.ones(4), 2, out)
        work = communicator.reduce_scatter([part], scratch=MemoryPool(), label="", tags=communicator.tags.open())
        work.wait()
        work.wait()
        assert out.tolist() == [2.0, 2.0]


# --- tags -------------------------------------------------------------------------------------------------------------


def test_tags_of_different_units_steps_and_parts_are_different_and_fit() -> None:
    seen: dict[int, tuple[int, int]] = {}
    for number in (0, 1, 2, 511, 1023):
        tags = TagSequence(number)
        for step in range((1 << 10) - 1):
            tag = tags.next_tag()
            assert tag not in seen, f"{(number, step)} and {seen[tag]}"
            seen[tag] = (number, step)
            assert tag % TagSequence.PARTS == 0, "room for the number of the part"
            assert tag >= (1 << 30), "apart from the tags that people choose"
            assert tag + TagSequence.PARTS - 1 <= TagSequence.LOWEST, "a tag is a C int"


def test_channels_whose_lowest_bits_are_alike_have_other_tags() -> None:
    one, other = TagSequence(5), TagSequence(5 + 1024)
    for _ in range(2500):
        tag, another = one.next_tag(), other.next_tag()
        assert tag != another
        assert tag & TagSequence.LOWEST == another & TagSequence.LOWEST
    assert TagSequence((1 << 20) - 1).next_tag() < 1 << 63


def test_tags_do_not_repeat_but_their_lowest_bits_may() -> None:
    sequence = TagSequence(1023)
    tags = [sequence.next_tag() for _ in range(5000)]
    assert len(dict.fromkeys(tags)) == 5000
    assert tags[-1] < 1 << 62, "a tag is one integer of eight bytes"
    lowest = [tag & TagSequence.LOWEST for tag in tags]
    assert lowest[:1024] == lowest[1024:2048]
    assert len(dict.fromkeys(lowest[:1024])) == 1024
    assert all((1 << 30) <= tag < (1 << 31) for tag in lowest)


@spmd(ranks=2)
def test_channels_of_a_group_are_numbered_alike_on_every_rank() -> None:
    group = dist.new_group([0, 1])
    communicators = [PointToPointCommunicator(group, CPU), PointToPointCommunicator(group, CPU)]
    tags = [communicators[i % 2].tags.open().next_tag() for i in range(4)]
    assert len(dict.fromkeys(tags)) == 4, "also when two communicators serve one group"
    assert communicators[0].all_gather_ints(tags, label="") == [tags, tags]


# --- failures ---------------------------------------------------------------------------------------------------------

_LABEL = "all-gather of unit 'layers.3'"


def _gather_alone(communicator: Communicator) -> None:
    plan = communicator.prepare([GatherPart(torch.ones(2), torch.empty(2 * communicator.size), 2 * communicator.size)])
    communicator.all_gather(plan, label=_LABEL, tags=communicator.tags.open()).wait()


def _reduce_alone(communicator: Communicator) -> None:
    part = ReducePart(torch.ones(2 * communicator.size), 2, torch.empty(2))
    communicator.reduce_scatter([part], scratch=MemoryPool(), label=_LABEL, tags=communicator.tags.open()).wait()


def _all_reduce_alone(communicator: Communicator) -> None:
    communicator.all_reduce(torch.ones(2), label=_LABEL).wait()


def _exchange_alone(communicator: Communicator) -> None:
    communicator.all_gather_ints([1], label=_LABEL)


ALONE: Final = (_gather_alone, _reduce_alone, _all_reduce_alone, _exchange_alone)


GROUP_TIMEOUT: Final = 3.0  # for collectives, and for connecting too, so not too short


def _told(act: Callable[[Communicator], None], communicator: Communicator) -> str:
    with pytest.raises(CommunicationError) as failed:
        act(communicator)
    assert isinstance(failed.value.__cause__, (RuntimeError, TimeoutError, EOFError, BrokenPipeError))
    return str(failed.value)


def _failures() -> dict[str, str]:
    """What rank 0 is told in groups of which rank 1 does not take part in a collective, or that it has left."""
    cases = [(kind, act, leaves) for kind in KINDS for act in ALONE for leaves in (False, True)]
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=GROUP_TIMEOUT)) for _ in cases]
    communicators = [KINDS[kind](group, CPU) for (kind, _, _), group in zip(cases, groups, strict=True)]
    told: dict[str, str] = {}
    if dist.get_rank() == 1:
        for (_, _, leaves), group in zip(cases, groups, strict=True):
            if leaves:
                dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(len(cases)) as threads:  # so that all of them wait at the same time
            texts = threads.map(lambda case, communicator: _told(case[1], communicator), cases, communicators)
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
