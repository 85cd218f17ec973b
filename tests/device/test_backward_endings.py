"""What is done after a backward that raised is done whole, before the caller sees the error, wherever an interrupt comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from composable.device import private


def _backward(callback: Callable[[], None], otherwise: Callable[[], None]) -> None:
    def queue(gradient: Tensor) -> None:
        private.at_end_of_backward(callback, otherwise)

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(queue)
    y.sum().backward()


def _fail() -> None:
    raise ValueError("as planned")


def test_otherwise_is_called_when_the_callback_raises_and_only_then() -> None:
    done: list[str] = []
    _backward(lambda: done.append("end"), lambda: done.append("otherwise"))
    assert done == ["end"]
    with pytest.raises(ValueError, match="as planned"):
        _backward(_fail, lambda: done.append("otherwise"))
    assert done == ["end", "otherwise"]


class _InterruptedAt:
    """Raises at the n-th line of what ends a backward, given-up halves of it included."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        ours = frame.f_code.co_filename == private.__file__ and frame.f_code.co_name in ("__call__", "give_up")
        return self._line if ours or frame.f_code is _Halves.give_up.__code__ else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.where:
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


class _Halves:
    def __init__(self) -> None:
        self.done: list[str] = []

    def give_up(self) -> None:
        self.done.append("first")
        self.done.append("second")


def test_an_interrupt_at_any_line_leaves_nothing_half_given_up() -> None:
    places: list[str] = []
    while True:
        halves, interrupt = _Halves(), _InterruptedAt(len(places))
        with pytest.raises((ValueError, KeyboardInterrupt)), interrupt:
            _backward(_fail, halves.give_up)
        assert halves.done[-2:] == ["first", "second"], f"interrupted at {interrupt.where}: {halves.done}"
        if not interrupt.where:
            break
        places.append(interrupt.where)
    assert len([place for place in places if place.startswith("give_up")]) >= 4, f"lines of both were interrupted: {places}"
