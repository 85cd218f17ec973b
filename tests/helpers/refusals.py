"""What a refused call says, and that it changed nothing; knows the root of the library's errors,
and the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from composable import registry
from composable.errors import ComposableError
from tests.helpers.compare import anatomy

_PLACE = re.compile(r"\w+\.py:\d+")


def text_of(error: Exception) -> str:
    """The type and the message; places in files as FILE:LINE."""
    return f"{type(error).__name__}: {_PLACE.sub('FILE:LINE', str(error))}"


def refusal(act: Callable[[], object]) -> str:
    """The text of the error that `act` must raise."""
    try:
        act()
    except ComposableError as error:
        return text_of(error)
    raise AssertionError("nothing was refused")


def same_on_all(texts: list[str]) -> str:
    assert len(dict.fromkeys(texts)) == 1
    return texts[0]


def _state_of(model: nn.Module) -> list[Any]:
    return [
        anatomy(model),
        [list(registry(module)) for module in model.modules()],
        list(map(id, model.parameters())),
    ]


def unchanged(model: nn.Module, act: Callable[[], object]) -> None:
    """Let `act` raise; the model must be as it was."""
    before = _state_of(model)
    try:
        act()
    finally:
        assert before == _state_of(model), "the call that was refused has changed the model"


def refused(model: nn.Module, act: Callable[[], object]) -> str:
    """The refusal's text; the model must be as it was."""
    return refusal(lambda: unchanged(model, act))
