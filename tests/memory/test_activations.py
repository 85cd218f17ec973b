"""The bracket of offloaded modules: which forwards it changes, and what it leaves behind. Values:
tests/whole/offload/.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composable.errors import SavedTensorError
from composable.features import activations
from composable.features.activations import (
    OffloadBracket,
    close_interrupted,
    copies_of,
    is_recomputed,
    recomputing,
)
from composable.memory.elastic import ElasticBuffer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _a_cpu_that_tensors_leave() -> Iterator[None]:
    with (
        mock.patch.object(activations, "has_streams", return_value=True),
        mock.patch.object(activations, "any_has_streams", return_value=True),
    ):
        yield
    assert not activations._of_thread.open


@contextmanager
def _forward(bracket: OffloadBracket, module: nn.Module) -> Iterator[None]:
    """As forward hooks call a bracket: a KeyboardInterrupt does not reach them."""
    bracket.pre_forward(module, (), {})
    try:
        yield
    except Exception:
        bracket.on_error(module)
        raise
    bracket.post_forward(module, None)


def _saves() -> bool:
    """Whether a tensor that autograd saves now is offloaded."""
    x = torch.ones(4, requires_grad=True)
    before = copies_of(CPU).alive
    y = x.sin().sin()
    return copies_of(CPU).alive > before and y is not None


def _bracket() -> OffloadBracket:
    return OffloadBracket(0, False, "Linear")


def test_tensors_that_a_forward_saves_are_offloaded_and_later_ones_are_not() -> None:
    bracket, module = _bracket(), nn.Linear(2, 2)
    with _forward(bracket, module):
        assert _saves()
        with _forward(bracket, module):  # a module may call itself
            assert _saves()
        assert _saves()
    assert not _saves()


def test_a_forward_that_raises_ends_its_own_hooks_only() -> None:
    outer, inner, module = _bracket(), _bracket(), nn.Linear(2, 2)
    with _forward(outer, module):
        with pytest.raises(ValueError, match="planned"), _forward(inner, module):
            raise ValueError("planned")
        assert _saves()
    assert not _saves()


def test_an_enter_that_raises_leaves_nothing() -> None:
    outer, inner, module = _bracket(), _bracket(), nn.Linear(2, 2)
    with _forward(outer, module):
        failing = mock.patch.object(activations, "saved_tensors_hooks", side_effect=ValueError)
        with failing, pytest.raises(ValueError), _forward(inner, module):
            pass
        assert _saves()
    assert not _saves()


def test_an_interrupted_forward_ends_with_the_one_around_it() -> None:
    outer, inner, module = _bracket(), _bracket(), nn.Linear(2, 2)
    with _forward(outer, module):
        with pytest.raises(KeyboardInterrupt), _forward(inner, module):
            raise KeyboardInterrupt
        assert _saves()
    assert not _saves()


def test_interrupted_forwards_are_closed_together() -> None:
    outer, inner, module = _bracket(), _bracket(), nn.Linear(2, 2)
    with pytest.raises(KeyboardInterrupt), _forward(outer, module), _forward(inner, module):
        raise KeyboardInterrupt
    assert _saves()
    close_interrupted()
    close_interrupted()
    assert not _saves()


def test_the_recomputation_of_a_module_saves_for_its_checkpointing() -> None:
    bracket, module, other = _bracket(), nn.Linear(2, 2), nn.Linear(2, 2)
    with recomputing(module):
        assert is_recomputed(module)
        with _forward(bracket, module):
            assert not _saves()
        with _forward(bracket, other):
            assert _saves(), "a module inside of a recomputed one"
    assert not is_recomputed(module)


def test_memory_that_comes_and_goes_stays_with_its_buffer() -> None:
    buffer = ElasticBuffer(4, torch.float32, CPU)
    buffer.allocate()
    weight = buffer.stretch(0, 4).data.fill_(3.0).requires_grad_()
    before = copies_of(CPU).alive
    with _forward(_bracket(), nn.Linear(2, 2)):
        y = weight.view(2, 2)[0] * weight.detach()[:2].requires_grad_()
    assert copies_of(CPU).alive == before
    buffer.free()
    buffer.allocate()
    buffer.tensor.data.fill_(5.0)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 5.0, 0.0, 0.0]


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * x


@pytest.mark.parametrize(
    ("min_bytes", "name"), [(0, "Square 'layers.0'"), (1 << 20, "Square 'layers.1'")]
)
def test_a_write_to_a_saved_tensor_raises_with_the_name_of_the_module(
    min_bytes: int, name: str
) -> None:
    x = torch.ones(4, requires_grad=True) * 1
    with _forward(OffloadBracket(min_bytes, False, name), _Square()):
        y = _Square()(x)
    x.data.add_(1)  # not seen by versions
    x.detach().mul_(2)
    with pytest.raises(
        SavedTensorError, match=rf"\[4\]\], which {name} saved for backward, is at version 1"
    ):
        y.sum().backward()


def test_a_bracket_can_be_pickled() -> None:
    clone = pickle.loads(pickle.dumps(OffloadBracket(5, True, "Block 'layers.0'")))
    assert (clone.min_bytes, clone.pin_memory, clone.name) == (5, True, "Block 'layers.0'")
