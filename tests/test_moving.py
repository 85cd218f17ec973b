"""The guide for moving from other libraries has an answer for each of their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from composable import fully_shard, replicate
from composable.errors import UnknownArgumentError
from docs.generate import ROOT

GUIDE: Final = (ROOT / "docs" / "guides" / "moving.md").read_text()
_OF_ALL_MODULES: Final = {
    "self",
    "module",
    "apply",
    "forward",
    "named_buffers",
    "named_parameters",
    "train",
}


def _arguments(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _methods(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def _left_column(heading: str) -> str:
    """The left column of the table below a heading."""
    (text,) = [
        part for part in re.split(r"^## ", GUIDE, flags=re.M) if part.startswith(heading + "\n")
    ]
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("FSDP2", _arguments(fsdp2) + _methods(FSDPModule)),
        (
            "FSDP1",
            _arguments(FullyShardedDataParallel.__init__)
            + _methods(FullyShardedDataParallel)
            + _arguments(MixedPrecision),
        ),
        ("DDP", _arguments(DistributedDataParallel.__init__) + _methods(DistributedDataParallel)),
    ],
    ids=["FSDP2", "FSDP1", "DDP"],
)
def test_every_name_of_the_other_library_has_an_answer(heading: str, names: Iterable[str]) -> None:
    table = _left_column(heading)
    missing = [
        name
        for name in names
        if name not in _OF_ALL_MODULES and not re.search(rf"\b{name}\b", table)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        (fully_shard, _arguments(FullyShardedDataParallel.__init__)),
        (fully_shard, _arguments(fsdp2)),
        (replicate, _arguments(DistributedDataParallel.__init__)),
    ],
    ids=["FSDP1", "FSDP2", "DDP"],
)
def test_a_keyword_of_another_library_is_taken_or_answered(
    verb: Callable[..., Any], names: Iterable[str]
) -> None:
    """A message of its own, in place of a guess by spelling."""
    unanswered = []
    for name in names:
        if name in _OF_ALL_MODULES or name in _arguments(verb):
            continue
        with pytest.raises(UnknownArgumentError) as refused:
            verb(nn.Linear(2, 2), **{name: None})
        if "it takes: " in str(refused.value).lower():  # the message for an unknown word
            unanswered.append(f"{name}: {refused.value}")
    assert unanswered == []
