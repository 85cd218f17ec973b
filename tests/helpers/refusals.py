"""What a refused call says, and that it changed nothing; knows the root of the library's errors,
and the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from composable import registry
from composable.errors import ComposableError
from tests.helpers.compare import anatomy

_PLACE = re.compile(r"\w+\.py:\d+")


def refusal(act: Callable[[], object]) -> str:
    """The type and the message of the error that `act` must raise; places in files as FILE:LINE."""
    try:
        act()
    except ComposableError as error:
        return f"{type(error).__name__}: {_PLACE.sub('FILE:LINE', str(error))}"
    raise AssertionError("nothing was refused")


def same_on_all(texts: list[str]) -> str:
    assert len(dict.fromkeys(texts)) == 1
    return texts[0]


def refused(model: nn.Module, act: Callable[[], object]) -> str:
    """The refusal's text; the model must be as it was."""
    before = (
        anatomy(model),
        [list(registry(module)) for module in model.modules()],
        list(map(id, model.parameters())),
    )
    text = refusal(act)
    assert before == (
        anatomy(model),
        [list(registry(module)) for module in model.modules()],
        list(map(id, model.parameters())),
    )
    return text
