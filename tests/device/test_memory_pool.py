"""Memory comes and goes inside a storage, and whoever looks at it by another way sees the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.device import elastic_buffer, memory, private
from composable.device.elastic_buffer import ElasticBuffer
from composable.device.memory import MemoryPool

CPU = torch.device("cpu")


@pytest.fixture(params=["swapping", "resizing"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MemoryPool:
    """A pool that exchanges memory, and one in a torch that cannot."""
    if request.param == "resizing":
        monkeypatch.setattr(memory, "CAN_SWAP", False)
    return MemoryPool()


def _buffer(pool: MemoryPool, numel: int = 6, dtype: torch.dtype = torch.float32) -> ElasticBuffer:
    buffer = ElasticBuffer(numel, dtype, CPU, pool)
    buffer.allocate()
    return buffer


def test_a_buffer_holds_memory_of_the_right_size(pool: MemoryPool) -> None:
    buffer = _buffer(pool, 6, torch.float16)
    assert buffer.held
    assert buffer.nbytes == buffer.tensor.untyped_storage().nbytes() == 12
    assert buffer.tensor.shape == (6,)


def _parts_of_an_empty_one(pool: MemoryPool) -> tuple[ElasticBuffer, list[torch.Tensor]]:
    buffer = ElasticBuffer(6, torch.float32, CPU, pool)
    assert not buffer.held
    parts = [buffer.tensor, buffer.stretch(1, 4), buffer.part(2, (2, 2), (1, 2)), buffer.stretch(6, 0)]
    assert not buffer.held
    assert buffer.tensor.untyped_storage().nbytes() == 0
    return buffer, parts


def _assert_parts_see_the_memory(buffer: ElasticBuffer, parts: list[torch.Tensor]) -> None:
    buffer.allocate()
    buffer.tensor.copy_(torch.arange(6.0))
    whole, stretch, part, nothing = (part.tolist() for part in parts)
    assert whole == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert stretch == [1.0, 2.0, 3.0, 4.0]
    assert part == [[2.0, 4.0], [3.0, 5.0]]
    assert nothing == []


def test_parts_are_cut_before_there_is_memory_and_without_any(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[object] = []
    for kind in (memory.FreeList, memory.Resizing):
        monkeypatch.setattr(
            kind, "allocate", lambda self, storage, real=kind.allocate: (filled.append(self), real(self, storage))
        )
    buffer, parts = _parts_of_an_empty_one(pool)
    assert not filled
    _assert_parts_see_the_memory(buffer, parts)


def test_parts_are_cut_on_devices_that_have_no_views_without_memory(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_buffer, "view_without_memory", lambda *_: None)
    _assert_parts_see_the_memory(*_parts_of_an_empty_one(pool))


def test_all_aliases_see_memory_leave_and_come_back(pool: MemoryPool) -> None:
    buffer = _buffer(pool)
    aliases = [buffer.tensor[2:4], buffer.tensor.view(2, 3), buffer.tensor.data, buffer.tensor.detach().view(torch.int32)]
    storage = buffer.tensor.untyped_storage()
    for _ in range(3):
        buffer.free()
        assert not buffer.held
        assert storage.nbytes() == 0
        assert all(alias.untyped_storage().nbytes() == 0 for alias in aliases)
        buffer.allocate()
        assert storage.nbytes() == buffer.nbytes
        aliases[1].copy_(torch.arange(6.0).view(2, 3))
        assert aliases[0].tolist() == [2.0, 3.0]
        assert aliases[2].tolist() == buffer.tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert aliases[3].view(torch.float32).tolist() == buffer.tensor.tolist()


def test_freeing_and_allocating_twice_is_as_good_as_once(pool: MemoryPool) -> None:
    buffer = _buffer(pool)
    buffer.allocate()
    buffer.free()
    buffer.free()
    assert pool.idle_bytes in (0, buffer.nbytes)
    buffer.allocate()
    buffer.allocate()
    assert buffer.tensor.untyped_storage().nbytes() == buffer.nbytes


def test_memory_that_comes_and_goes_does_not_count_as_a_write(pool: MemoryPool) -> None:
    buffer = _buffer(pool)
    alias = buffer.tensor[1:]
    versions = buffer.tensor._version, alias._version
    buffer.free()
    buffer.allocate()
    assert (buffer.tensor._version, alias._version) == versions


def test_an_empty_buffer_comes_and_goes_too(pool: MemoryPool) -> None:
    buffer = _buffer(pool, 0)
    buffer.free()
    buffer.allocate()
    assert buffer.nbytes == 0
    assert pool.idle_bytes == 0


def test_a_buffer_made_in_inference_mode_can_be_trained_with_later(pool: MemoryPool) -> None:
    with torch.inference_mode():
        buffer = _buffer(pool)
    assert not buffer.tensor.is_inference()
    weight = torch.nn.Parameter(buffer.tensor.fill_(2.0))
    weight.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 6


@pytest.fixture
def swapping() -> MemoryPool:
    if not private.CAN_SWAP:
        pytest.skip("this torch cannot exchange memory; the pool only resizes")
    return MemoryPool()


def test_buffers_of_one_size_take_turns_in_one_block(swapping: MemoryPool) -> None:
    one, other = _buffer(swapping), _buffer(swapping, 3, torch.float64)
    other.free()
    address = one.tensor.data_ptr()
    one.free()
    assert swapping.idle_bytes == 2 * one.nbytes
    other.allocate()
    assert other.tensor.data_ptr() == address, "the warmest block comes first"
    assert swapping.idle_bytes == one.nbytes


def test_idle_memory_goes_with_the_last_buffer_of_its_size(swapping: MemoryPool) -> None:
    one, other, larger = _buffer(swapping), _buffer(swapping), _buffer(swapping, 7)
    for buffer in (one, other, larger):
        buffer.free()
    assert swapping.idle_bytes == one.nbytes + other.nbytes + larger.nbytes
    del buffer, one
    assert swapping.idle_bytes == 2 * other.nbytes + larger.nbytes, "another one may still need it"
    del other
    assert swapping.idle_bytes == larger.nbytes


def test_a_block_is_never_lent_as_another_size(swapping: MemoryPool) -> None:
    small = _buffer(swapping, 4)
    small.free()
    large = _buffer(swapping, 5)
    assert swapping.idle_bytes == small.nbytes
    assert large.tensor.untyped_storage().nbytes() == 20


def test_blocks_that_are_lent_at_once_are_apart_and_come_back(swapping: MemoryPool) -> None:
    one, other = swapping.take(4, torch.float32), swapping.take(4, torch.float32)
    assert one.data_ptr() != other.data_ptr()
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.tolist() == [1.0] * 4
    address = one.data_ptr()
    swapping.give(one)
    again = swapping.take(2, torch.float64)
    assert again.data_ptr() == address, "bytes are bytes, whatever the dtype"
    assert again.dtype is torch.float64
    assert again.shape == (2,)


def test_idle_blocks_can_be_given_back_to_the_system(swapping: MemoryPool) -> None:
    buffer = _buffer(swapping)
    buffer.tensor.fill_(7.0)
    swapping.give(swapping.take(16, torch.float32))
    assert swapping.idle_bytes == 64
    swapping.clear()
    assert swapping.idle_bytes == 0
    assert buffer.tensor.tolist() == [7.0] * 6, "what is lent is not idle"


_STEPS: dict[str, Callable[[ElasticBuffer], None]] = {"allocate": ElasticBuffer.allocate, "free": ElasticBuffer.free}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 2, 3]), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(_STEPS))), max_size=20),
)
def test_whatever_comes_and_goes_nobody_writes_into_memory_of_somebody_else(
    sizes: list[int], steps: list[tuple[int, str]]
) -> None:
    pool = MemoryPool()
    buffers = [_buffer(pool, size) for size in sizes]
    for mark, buffer in enumerate(buffers):
        buffer.tensor.fill_(mark)
    for who, step in steps:
        who %= len(buffers)
        was_held = buffers[who].held
        _STEPS[step](buffers[who])
        if step == "allocate" and not was_held:
            buffers[who].tensor.fill_(who)
        for mark, buffer in enumerate(buffers):
            assert buffer.tensor.untyped_storage().nbytes() == (buffer.nbytes if buffer.held else 0)
            if buffer.held:
                assert buffer.tensor.tolist() == [mark] * buffer.tensor.numel()
        held = [b.tensor.data_ptr() for b in buffers if b.held]
        assert len(dict.fromkeys(held)) == len(held)
