"""Parameters that train and that no annotation reaches, around annotated modules: named once in the
log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable import fully_shard, replicate
from tests.helpers.logged import logged
from tests.helpers.world import Pool, current_device

_VERBS: Final[dict[str, Callable[..., Any]]] = {"fully_shard": fully_shard, "replicate": replicate}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(4, 4, bias=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.second(self.first(self.emb(x)))))  # type: ignore[no-any-return]


def _model() -> Model:
    torch.manual_seed(0)
    return Model().to(current_device())


def _lines(model: nn.Module, *, forwards_before: int = 0) -> list[str]:
    x = torch.ones(2, 4, device=current_device())
    with logged() as lines:
        with torch.no_grad():
            for _ in range(forwards_before):
                model(x)
        assert not lines
        for _ in range(2):
            model(x).sum().backward()
    return lines


def _around_blocks(verb: str) -> list[str]:
    model = _model()
    for block in (model.first, model.second):
        _VERBS[verb](block)
    return _lines(model, forwards_before=1)


@pytest.mark.parametrize("verb", list(_VERBS))
def test_what_blocks_leave_out_is_named_once_in_the_first_forward_that_trains(
    pool: Pool, verb: str
) -> None:
    line = (
        f"WARNING: {verb}: 'emb.weight', 'head.weight', 'head.bias' of Model trains, and no"
        " annotation reaches it: every rank trains its own. Annotate the model around the"
        f" annotated modules as well, {verb}(model), or freeze it"
    )
    assert pool.run(2, _around_blocks, verb) == [[line], [line]]


def _held_from_before() -> list[str]:
    model = _model()
    model.second.weight = model.first.weight
    for block in (model.emb, model.first, model.head):
        fully_shard(block)
    model.second.bias.requires_grad_(False)
    return _lines(model)


def test_a_reference_from_before_the_annotation_is_named(pool: Pool) -> None:
    (line,) = pool.run(2, _held_from_before)[0]
    assert line.startswith("WARNING: fully_shard: 'second.weight' of Model trains")


def _covered(verb: str) -> list[str]:
    annotate = _VERBS[verb]
    whole = annotate(annotate(_model().first) and _model())
    ignored = _model()
    annotate(ignored, ignored_params=[ignored.emb.weight])
    apart = _model()
    for child in apart.children():
        annotate(child)
    wrapped = _model()
    replicate(wrapped.first)
    wrapped._ddp_params_and_buffers_to_ignore = ["first.weight", "first.bias"]  # type: ignore[assignment]
    lines = [_lines(model) for model in (whole, ignored, apart, DistributedDataParallel(wrapped))]
    return [line for each in lines for line in each]


@pytest.mark.parametrize("verb", list(_VERBS))
def test_nothing_is_said_of_what_is_annotated_ignored_or_averaged_by_ddp(
    pool: Pool, verb: str
) -> None:
    assert pool.run(2, _covered, verb) == [[], []]
