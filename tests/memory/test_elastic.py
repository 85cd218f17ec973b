"""Elastic buffers: memory comes and goes inside a storage, all aliases see it, and idle host memory
is shared by size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.memory import elastic
from composable.memory.elastic import (
    ElasticBuffer,
    borrow,
    give_back,
    idle_bytes,
    is_elastic,
    keep_idle_memory,
    release_idle_memory,
    resizing_buffers,
    with_own_storage,
)
from composable.torch_private import CAN_SWAP

CPU = torch.device("cpu")


class Step:
    """Who uses idle memory."""


STEP = Step()


@pytest.fixture(autouse=True)
def _within_a_step() -> Iterator[None]:
    keep_idle_memory(STEP)
    yield
    release_idle_memory(STEP)
    assert idle_bytes() == 0


@pytest.fixture(params=["swapping", "resizing"])
def pooled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Once as this torch does it, once as a torch that cannot swap memory."""
    resizing = request.param == "resizing"
    with resizing_buffers() if resizing else nullcontext():
        yield not resizing and CAN_SWAP


needs_swap = pytest.mark.skipif(
    not CAN_SWAP, reason="this torch cannot swap memory; buffers are resized"
)


def _buffer(numel: int = 6, dtype: torch.dtype = torch.float32) -> ElasticBuffer:
    buffer = ElasticBuffer(numel, dtype, CPU)
    buffer.allocate()
    return buffer


def test_a_buffer_holds_memory_of_its_size(pooled: bool) -> None:
    buffer = _buffer(6, torch.float16)
    assert buffer.held
    assert buffer.nbytes == buffer.tensor.untyped_storage().nbytes() == 12
    assert buffer.tensor.shape == (6,)


def _parts_of_an_empty_buffer() -> tuple[ElasticBuffer, list[torch.Tensor]]:
    buffer = ElasticBuffer(6, torch.float32, CPU)
    assert not buffer.held
    parts = [
        buffer.tensor,
        buffer.stretch(1, 4),
        buffer.part(2, (2, 2), (1, 2)),
        buffer.stretch(6, 0),
    ]
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


def test_views_are_made_without_memory(pooled: bool) -> None:
    with mock.patch.object(ElasticBuffer, "allocate", side_effect=AssertionError):
        buffer, parts = _parts_of_an_empty_buffer()
    _assert_parts_see_the_memory(buffer, parts)


def test_views_are_made_on_devices_that_cannot_make_them_without_memory(
    pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "view_without_memory", lambda *_: None)
    _assert_parts_see_the_memory(*_parts_of_an_empty_buffer())


def test_all_aliases_see_memory_leave_and_come_back(pooled: bool) -> None:
    buffer = _buffer()
    aliases = [
        buffer.tensor[2:4],
        buffer.tensor.view(2, 3),
        buffer.tensor.data,
        buffer.tensor.detach().view(torch.int32),
    ]
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


def test_a_second_allocate_or_free_does_nothing(pooled: bool) -> None:
    buffer = _buffer()
    buffer.allocate()
    buffer.free()
    buffer.free()
    assert idle_bytes() == (buffer.nbytes if pooled else 0)
    buffer.allocate()
    buffer.allocate()
    assert buffer.tensor.untyped_storage().nbytes() == buffer.nbytes
    assert idle_bytes() == 0


def test_memory_that_comes_and_goes_is_not_a_write(pooled: bool) -> None:
    buffer = _buffer()
    alias = buffer.tensor[1:]
    versions = buffer.tensor._version, alias._version
    buffer.free()
    buffer.allocate()
    assert (buffer.tensor._version, alias._version) == versions


def test_parts_share_the_version_counter_of_the_buffer(pooled: bool) -> None:
    buffer = _buffer()
    part = buffer.stretch(1, 2)
    part.zero_()
    assert buffer.tensor._version == part._version == 1


def test_a_buffer_without_elements(pooled: bool) -> None:
    buffer = _buffer(0)
    buffer.free()
    buffer.allocate()
    assert buffer.nbytes == idle_bytes() == 0


def test_a_buffer_made_in_inference_mode_can_be_trained_with(pooled: bool) -> None:
    with torch.inference_mode():
        buffer = _buffer()
        part = buffer.stretch(0, 2)
    assert not buffer.tensor.is_inference()
    assert not part.is_inference()
    weight = torch.nn.Parameter(buffer.tensor.fill_(2.0))
    weight.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 6


def test_default_devices_and_dtypes_of_the_user_change_nothing(pooled: bool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            buffer, rows = _buffer(), borrow(3, torch.float16)
            made = [
                buffer.tensor,
                buffer.stretch(1, 2),
                rows,
                with_own_storage(buffer.stretch(2, 3)),
            ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [(str(each.device), each.dtype, each.is_inference()) for each in made] == [
        ("cpu", torch.float32, False),
        ("cpu", torch.float32, False),
        ("cpu", torch.float16, False),
        ("cpu", torch.float32, False),
    ]


def test_storages_of_buffers_are_known(pooled: bool) -> None:
    buffer = _buffer()
    view = buffer.stretch(1, 2).detach()
    assert is_elastic(view.untyped_storage())
    del buffer
    assert is_elastic(view.untyped_storage()), "a view keeps the storage"
    assert not is_elastic(torch.ones(2).untyped_storage())


# --- idle memory --------------------------------------------------------------------------------


@needs_swap
def test_buffers_of_one_size_share_a_block() -> None:
    one, other = _buffer(), _buffer(3, torch.float64)
    other.free()
    address = one.tensor.data_ptr()
    one.free()
    assert idle_bytes() == 2 * one.nbytes
    other.allocate()
    assert other.tensor.data_ptr() == address, "the block that was used last comes first"
    assert idle_bytes() == one.nbytes


@needs_swap
def test_a_block_never_serves_another_size() -> None:
    small = _buffer(4)
    small.free()
    large = _buffer(5)
    assert idle_bytes() == small.nbytes
    assert large.tensor.untyped_storage().nbytes() == 20


def test_borrowed_tensors_are_apart_and_their_memory_is_used_again() -> None:
    one, other = borrow(4, torch.float32), borrow(4, torch.float32)
    assert one.data_ptr() != other.data_ptr()
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.tolist() == [1.0] * 4
    address = one.data_ptr()
    give_back(one)
    again = borrow(2, torch.float64)
    assert again.data_ptr() == address, "the dtype does not matter"
    assert again.dtype is torch.float64
    assert again.shape == (2,)


def test_idle_memory_is_released_and_held_memory_is_not() -> None:
    buffer, freed = _buffer(), _buffer()
    buffer.tensor.fill_(7.0)
    freed.free()
    give_back(borrow(16, torch.float32))
    assert idle_bytes() == 64 + (freed.nbytes if CAN_SWAP else 0)
    release_idle_memory(STEP)
    assert idle_bytes() == 0
    assert buffer.tensor.tolist() == [7.0] * 6
    freed.allocate()
    freed.tensor.fill_(8.0)
    assert buffer.tensor.tolist() == [7.0] * 6


def test_memory_that_is_freed_outside_of_a_step_does_not_idle(pooled: bool) -> None:
    buffer, rows = _buffer(), borrow(16, torch.float32)
    release_idle_memory(STEP)
    buffer.free()
    give_back(rows)
    assert idle_bytes() == 0
    buffer.allocate()
    assert buffer.tensor.untyped_storage().nbytes() == buffer.nbytes


@needs_swap
def test_idle_memory_is_kept_until_the_last_of_several_steps_has_ended_or_is_gone() -> None:
    other, lost = Step(), Step()
    keep_idle_memory(other)
    keep_idle_memory(other)
    keep_idle_memory(lost)
    buffer = _buffer()
    buffer.free()
    release_idle_memory(STEP)
    del lost
    assert idle_bytes() == buffer.nbytes
    release_idle_memory(other)
    assert idle_bytes() == 0
    buffer.allocate()
    buffer.free()
    assert idle_bytes() == 0


_STEPS: dict[str, Callable[[ElasticBuffer], None]] = {
    "allocate": ElasticBuffer.allocate,
    "free": ElasticBuffer.free,
}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 2, 3]), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([*_STEPS, "release"])), max_size=20),
)
def test_held_buffers_never_share_memory(sizes: list[int], steps: list[tuple[int, str]]) -> None:
    buffers = [_buffer(size) for size in sizes]
    for mark, buffer in enumerate(buffers):
        buffer.tensor.fill_(mark)
    for number, step in steps:
        number %= len(buffers)
        was_held = buffers[number].held
        if step == "release":
            release_idle_memory(STEP)
            keep_idle_memory(STEP)
        else:
            _STEPS[step](buffers[number])
        if step == "allocate" and not was_held:
            buffers[number].tensor.fill_(number)
        for mark, buffer in enumerate(buffers):
            assert buffer.tensor.untyped_storage().nbytes() == (buffer.nbytes if buffer.held else 0)
            if buffer.held:
                assert buffer.tensor.tolist() == [mark] * buffer.tensor.numel()
        held = [b.tensor.data_ptr() for b in buffers if b.held]
        assert len(dict.fromkeys(held)) == len(held)


# --- storages of their own ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool]
)
def test_a_shard_with_its_own_storage_lies_in_the_buffer(dtype: torch.dtype) -> None:
    buffer = torch.zeros(8, dtype=dtype)
    own = with_own_storage(buffer[2:5])
    assert own.dtype is dtype
    assert own.data_ptr() == buffer[2:5].data_ptr()
    assert own.storage_offset() == 0
    assert own.untyped_storage().nbytes() == 3 * dtype.itemsize
    address = buffer.data_ptr() + 2 * dtype.itemsize
    del buffer
    assert own.data_ptr() == address, "it keeps the memory"
    assert own.view(torch.uint8).tolist() == [0] * (3 * dtype.itemsize)


def test_an_empty_shard_and_a_shard_on_meta_have_their_own_storage() -> None:
    assert with_own_storage(torch.zeros(4)[2:2]).shape == (0,)
    assert with_own_storage(torch.zeros(4, device="meta")[1:3]).untyped_storage().nbytes() == 8
