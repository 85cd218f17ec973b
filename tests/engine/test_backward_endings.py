"""At the end of a backward all roots launch before any waits; a backward that raised is known
before the caller sees it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from composable.engine.step.root import _end_of_backward


class Root:
    """As much of a root as the end of a backward needs."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self._name, self._log, self._fails = name, log, fails

    def _note(self, what: str) -> None:
        self._log.append(f"{what} {self._name}")
        if what == self._fails:
            raise ValueError("as planned")

    def launch_remaining(self) -> None:
        self._note("launch")

    def finish_backward(self) -> None:
        self._note("finish")

    def on_failed_backward(self) -> None:
        self._note("restore")


def _backward(*roots: Any, inside: Any = None, raises: bool = False) -> None:
    """A backward that these roots take part in."""
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def enter(gradient: Tensor) -> None:
        for root in roots:
            _end_of_backward(root)
        if inside is not None:
            with torch.enable_grad():
                inside()
        if raises:
            raise KeyError("in backward")

    y.register_hook(enter)
    y.sum().backward()


def test_all_launch_before_any_waits() -> None:
    log: list[str] = []
    _backward(Root("a", log), Root("b", log))
    assert log == ["launch a", "launch b", "finish a", "finish b"]


def test_a_backward_inside_a_backward_has_an_end_of_its_own() -> None:
    log: list[str] = []
    _backward(Root("outer", log), inside=lambda: _backward(Root("inner", log)))
    assert log == ["launch inner", "finish inner", "launch outer", "finish outer"]


def test_a_backward_that_raised_restores_before_the_caller_sees_the_error() -> None:
    log: list[str] = []
    try:
        _backward(Root("a", log), Root("b", log), raises=True)
    except KeyError:
        assert log == ["restore a", "restore b"]
    _backward(Root("c", log))
    assert log[2:] == ["launch c", "finish c"]


@pytest.mark.parametrize(
    ("fails", "done"), [("launch", ["launch a"]), ("finish", ["launch a", "launch b", "finish a"])]
)
def test_an_end_that_raises_restores_all_roots_once(fails: str, done: list[str]) -> None:
    log: list[str] = []
    with pytest.raises(ValueError, match="as planned") as raised:
        _backward(Root("a", log, fails), Root("b", log))
    assert log == [*done, "restore a", "restore b"]
    del raised
    assert log == [*done, "restore a", "restore b"]
