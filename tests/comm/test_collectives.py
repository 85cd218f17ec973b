"""Every comm moves and adds what torch's own collectives do, also with many collectives in
flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from composable.comm import backends, base
from composable.comm.backends import (
    AcceleratorComm,
    GenericComm,
    LocalComm,
    PointToPointComm,
    reduce_numbers,
    world_group,
)
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.comm.supplied import SuppliedComm
from composable.memory.elastic import idle_bytes, keep_idle_memory, release_idle_memory
from composable.memory.streams import Streams
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")
DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def _accelerator(group: dist.ProcessGroup, device: torch.device) -> Comm:
    return AcceleratorComm(group, device, Streams())


KINDS: Final[dict[str, Callable[[dist.ProcessGroup, torch.device], Comm]]] = {
    "pairs": PointToPointComm,
    "tensors": GenericComm,
    "streams": _accelerator,
}

SUPPLIED: Final = "in memory of others"


def _comm(kind: str) -> Comm:
    if kind == SUPPLIED:
        return SuppliedComm(PointToPointComm(world_group(), CPU))
    return KINDS[kind](world_group(), CPU)


def _numbers(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


def _scales(kind: str, dtype: torch.dtype, size: int) -> list[float]:
    """Where a host stands for an accelerator, `_foreach_mul_` rounds factors to half precision."""
    return [1.0, 0.5, 0.25 if kind == "streams" and dtype.itemsize == 2 else 1.0 / size]


# --- gathering and reducing ---------------------------------------------------------------------


def _gather(kind: str) -> None:
    comm = _comm(kind)
    for dtype in DTYPES:
        pairs, expected = [], []
        for index, chunk in enumerate((4, 0, 3, 1)):
            pairs.append(
                (
                    torch.full((chunk * comm.size,), 99.0).to(dtype),
                    _numbers(chunk, 10 * index + comm.rank, dtype),
                )
            )
            expected.append(
                torch.cat([_numbers(chunk, 10 * index + rank, dtype) for rank in range(comm.size)])
            )
        comm.all_gather(pairs, Launch("all-gather")).wait()
        for (whole, _), values in zip(pairs, expected, strict=True):
            assert torch.equal(whole, values)


def _reduce(kind: str) -> None:
    comm = _comm(kind)
    for dtype in DTYPES:
        for scale in _scales(kind, dtype, comm.size):
            pairs, expected = [], []
            for index, chunk in enumerate((4, 0, 3)):
                terms = [
                    _numbers(chunk * comm.size, 10 * index + rank, dtype)
                    for rank in range(comm.size)
                ]
                pairs.append((torch.full((chunk,), 99.0).to(dtype), terms[comm.rank].clone()))
                expected.append(torch.stack(terms).sum(0)[comm.rank * chunk :][:chunk] * scale)
            comm.reduce_scatter(pairs, Launch("reduction"), scale).wait()
            for (out, _), values in zip(pairs, expected, strict=True):
                assert torch.equal(out, values)


def _all_reduce(kind: str) -> None:
    comm = _comm(kind)
    for scale in (1.0, 0.5, 0.25):
        terms = [
            [_numbers(5, 10 * n + rank, dtype) for rank in range(comm.size)]
            for n, dtype in enumerate(DTYPES)
        ]
        tensors = [of_ranks[comm.rank].clone() for of_ranks in terms]
        comm.all_reduce(tensors, Launch("sum"), scale).wait()
        for tensor, of_ranks in zip(tensors, terms, strict=True):
            assert torch.equal(tensor, torch.stack(of_ranks).sum(0) * scale)


def _to_all(kind: str) -> None:
    """Parts of other sizes for each pair of ranks, some of them empty."""
    comm = _comm(kind)

    def part(source: int, target: int, dtype: torch.dtype) -> Tensor:
        return _numbers((source + 2 * target) % 4, 10 * source + target, dtype)

    for dtype in DTYPES:
        sent = [part(comm.rank, rank, dtype) for rank in range(comm.size)]
        expected = [part(rank, comm.rank, dtype) for rank in range(comm.size)]
        sizes, out_sizes = ([each.numel() for each in parts] for parts in (sent, expected))
        out = torch.full((sum(out_sizes),), 99.0).to(dtype)
        comm.all_to_all(out, out_sizes, torch.cat(sent), sizes, Launch("all-to-all")).wait()
        assert torch.equal(out, torch.cat(expected))


def _exchange(kind: str) -> None:
    comm = _comm(kind)
    size, rank = comm.size, comm.rank
    assert comm.min_max([rank, -rank, 2**60 + rank], Launch("")) == (
        [0, 1 - size, 2**60],
        [size - 1, 0, 2**60 + size - 1],
    )
    assert comm.all_gather_ints([rank, 2**40 + rank], Launch("")) == [
        [r, 2**40 + r] for r in range(size)
    ]
    assert comm.all_gather_objects("x" * rank, Launch("")) == ["x" * r for r in range(size)]
    assert reduce_numbers(
        torch.tensor([rank, 1.0]), world_group(), largest=False, text=""
    ).tolist() == [
        sum(range(size)),
        size,
    ]
    numbers = torch.tensor([-1.0 - rank, float("nan") if rank == 0 else 7.0])
    largest = reduce_numbers(numbers, world_group(), largest=True, text="")
    assert largest[0] == -1.0
    assert largest[1].isnan()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "body",
    [_gather, _reduce, _all_reduce, _to_all, _exchange],
    ids=["gather", "reduce", "all-reduce", "to-all", "others"],
)
def test_a_comm_gives_what_the_definition_of_its_collectives_says(
    pool: Pool, body: Callable[[str], None], kind: str, ranks: int
) -> None:
    pool.run(ranks, body, kind)


@spmd(ranks=3)
def test_messages_in_memory_of_others_give_the_same() -> None:
    for body in (_gather, _reduce, _all_reduce, _to_all, _exchange, _broadcast):
        body(SUPPLIED)


def _broadcast(kind: str) -> None:
    comm = _comm(kind)
    for message_bytes in (64 << 20, 16):
        with mock.patch.object(base, "MESSAGE_BYTES", message_bytes):
            for src in range(comm.size):
                tensors = [
                    torch.full((3,), comm.rank + 1.0),
                    (torch.arange(6.0).view(2, 3) + comm.rank).t(),
                    torch.tensor(comm.rank == src),
                    torch.full((4, 3), comm.rank + 1j),
                    torch.empty(0),
                    torch.full((2,), comm.rank, dtype=torch.int16),
                ]
                comm.broadcast(tensors, Launch("broadcast"), src)
                assert tensors[0].tolist() == [src + 1.0] * 3
                assert torch.equal(tensors[1], (torch.arange(6.0).view(2, 3) + src).t())
                assert tensors[2].item()
                assert torch.equal(tensors[3], torch.full((4, 3), src + 1j))
                assert tensors[5].tolist() == [src] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_broadcast_takes_tensors_of_all_dtypes_and_strides_in_messages_of_any_size(
    pool: Pool, kind: str
) -> None:
    pool.run(3, _broadcast, kind)


def _mean(kind: str) -> int:
    """Reduces to the mean, then to half of it; how often this side had to multiply."""
    comm = _comm(kind)
    comm._averages = True  # type: ignore[attr-defined]
    in_streams, on_host = torch._foreach_mul_, backends.scale_sums
    with (
        mock.patch.object(torch, "_foreach_mul_", wraps=in_streams) as of_streams,
        mock.patch.object(backends, "scale_sums", wraps=on_host) as of_host,
    ):
        for factor in (1.0, 0.5):
            terms = [_numbers(2 * 5, rank) for rank in range(2)]
            total, out, whole = (
                terms[0] + terms[1],
                torch.full((5,), float("nan")),
                terms[comm.rank].clone(),
            )
            comm.reduce_scatter([(out, whole)], Launch(""), factor / comm.size).wait()
            assert torch.equal(out, total[5 * comm.rank :][:5] * factor / comm.size)
            comm.all_reduce([whole], Launch(""), factor / comm.size).wait()
            assert torch.equal(whole, total * factor / comm.size)
    return of_streams.call_count + of_host.call_count


@pytest.mark.parametrize("kind", ["tensors", "streams"])
def test_a_backend_that_averages_is_asked_for_means_and_for_nothing_else(
    pool: Pool, kind: str
) -> None:
    assert pool.run(2, _mean, kind) == [2, 2]


def test_one_rank_alone_copies_and_scales() -> None:
    comm = LocalComm(CPU)
    assert (comm.group, comm.rank, comm.size) == (None, 0, 1)
    shard, whole, out = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
    comm.all_gather([(whole, shard)], Launch("")).wait()
    comm.reduce_scatter([(out, shard)], Launch(""), 2.0).wait()
    assert whole.tolist() == [0.0, 1.0, 2.0]
    assert out.tolist() == [0.0, 2.0, 4.0]
    comm.all_reduce([out], Launch(""), 0.5).wait()
    comm.broadcast([out], Launch(""))
    comm.all_to_all(whole, [3], shard, [3], Launch("")).wait()
    assert whole.tolist() == [0.0, 1.0, 2.0]
    assert out.tolist() == [0.0, 1.0, 2.0]
    assert comm.all_gather_ints([4, 5], Launch("")) == [[4, 5]]
    assert comm.all_gather_objects("a", Launch("")) == ["a"]
    assert comm.min_max([4, 5], Launch("")) == ([4, 5], [4, 5])


# --- many at once -------------------------------------------------------------------------------


def _in_flight(kind: str) -> None:
    comm = _comm(kind)
    size, rank = comm.size, comm.rank
    wholes, outs, works = [], [], []
    for unit in range(3):
        wholes.append(torch.zeros(4 * size))
        outs.append(torch.zeros(4))
        works.append(
            comm.all_gather([(wholes[-1], _numbers(4, 10 * unit + rank))], Launch(f"gather {unit}"))
        )
        works.append(
            comm.reduce_scatter(
                [(outs[-1], _numbers(4 * size, 50 + 10 * unit + rank))], Launch(f"reduce {unit}")
            )
        )
    for work in reversed(works):
        work.wait()
    for unit in range(3):
        assert torch.equal(
            wholes[unit], torch.cat([_numbers(4, 10 * unit + r) for r in range(size)])
        )
        total = torch.stack([_numbers(4 * size, 50 + 10 * unit + r) for r in range(size)]).sum(0)
        assert torch.equal(outs[unit], total[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("kind", KINDS)
def test_many_collectives_can_be_in_flight_and_waited_for_in_any_order(
    pool: Pool, kind: str
) -> None:
    pool.run(3, _in_flight, kind)


@spmd(ranks=3)
def test_pairs_are_added_in_the_order_of_ranks_so_that_every_run_rounds_alike() -> None:
    comm = _comm("pairs")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 300, generator=generator) * torch.tensor([[1.0], [1e4], [1e-4]])
    out = torch.empty(100)
    comm.reduce_scatter([(out, values[comm.rank].clone())], Launch("")).wait()
    mine = values[:, 100 * comm.rank : 100 * comm.rank + 100]
    assert torch.equal(out, (mine[0] + mine[1]) + mine[2])


@spmd(ranks=3)
def test_a_reduction_gives_back_the_memory_that_it_borrowed_and_leaves_its_source() -> None:
    comm = _comm("pairs")
    keep_idle_memory(comm)  # as within a step
    for _ in range(3):
        source = _numbers(6, comm.rank)
        before = source.clone()
        work = comm.reduce_scatter([(torch.empty(2), source)], Launch(""))
        assert idle_bytes() == 0
        work.wait()
        assert torch.equal(source, before)
        assert idle_bytes() == 2 * 2 * 4, (
            "two peers' rows of two elements, borrowed again and again"
        )
    release_idle_memory(comm)
    assert idle_bytes() == 0


@spmd(ranks=2)
def test_waiting_twice_is_as_good_as_waiting_once() -> None:
    for kind in KINDS:
        out = torch.zeros(2)
        work = _comm(kind).reduce_scatter([(out, torch.ones(4))], Launch(""), 2.0)
        work.wait()
        work.wait()
        assert out.tolist() == [4.0, 4.0]


@spmd(ranks=2)
def test_nothing_to_move_launches_nothing() -> None:
    for kind in KINDS:
        comm = _comm(kind)
        with mock.patch.object(type(comm), "_launch", side_effect=AssertionError):
            for work in (
                comm.all_gather([], Launch("")),
                comm.reduce_scatter([], Launch("")),
                comm.all_reduce([], Launch("")),
            ):
                work.wait()


@spmd(ranks=2)
def test_launches_and_waits_have_names_in_a_profile() -> None:
    for kind in KINDS:
        comm = _comm(kind)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            comm.all_gather(
                [(torch.zeros(4), torch.ones(2))], Launch("all-gather of unit 'x'")
            ).wait()
        names = [event.name for event in profiler.events()]
        for label in ("all-gather of unit 'x'", "wait for the all-gather of unit 'x'"):
            assert names.count(f"composable: {label}") == 1


@spmd(ranks=2)
def test_tensors_that_are_made_name_their_device() -> None:
    for kind in KINDS:
        comm = _comm(kind)
        with torch.device("meta"):
            assert comm.all_gather_objects(comm.rank, Launch("")) == [0, 1]
            assert comm.min_max([comm.rank], Launch("")) == ([0], [1])
            out, whole = torch.zeros(2, device=CPU), torch.ones(4, device=CPU)
            comm.reduce_scatter([(out, whole)], Launch("")).wait()
            comm.broadcast([out], Launch(""))
        assert out.tolist() == [2.0, 2.0]
