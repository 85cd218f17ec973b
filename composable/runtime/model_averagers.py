"""What torch's model averagers average of annotated modules: replicated parameters, with a gradient or not; averages nothing.

Note [Model averagers]
`torch.distributed.algorithms.model_averaging` takes the parameters that have a gradient: before the first backward, and after
`zero_grad()`, none, which ends in an error about an empty list; and where ranks differ in who has one, parameters are added to
others. Of a sharded parameter there is one copy; an averager would flatten its shards, and fail somewhere on the way. All
averagers ask one public function of torch's for the parameters to average, and it asks here first. Replicated parameters that
train are averaged all, sharded ones are refused by name before anything has happened, and the others are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, Final

import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.utils as averaging_utils
from torch import nn

from composable.device.parameter_labels import label_of
from composable.errors import ShardedParameterError
from composable.runtime.optimizer_hooks import Form
from composable.runtime.ownership import units

_ASKED: Final = "get_params_to_average"
_PLAIN: Final = "Pass those that are plain tensors: [p for p in model.parameters() if not isinstance(p, DTensor)]"
_WHY: Final = {
    Form.SHARDED.name: f"is sharded: there is one copy of it, and nothing to average. {_PLAIN}",
    Form.REPLICATED.name: "is replicated, and rests as a DTensor because others are sharded, which averagers cannot take. "
    f"{_PLAIN}; average p.to_local() of the others yourself, under torch.no_grad() and on all ranks",
}


@cache
def take_replicated_parameters() -> None:
    """Let averagers ask here. Nothing happens where this torch has no such function."""
    asked = getattr(averaging_utils, _ASKED, None)
    if asked is not None:
        setattr(averaging_utils, _ASKED, _asking_here_first(asked))


def _asking_here_first(asked: Callable[[Any], list[nn.Parameter]]) -> Callable[[Any], list[nn.Parameter]]:
    @wraps(asked)
    def to_average(params: Any) -> list[nn.Parameter]:
        given = list(params)
        parameters = list(_each_of(given))
        for parameter in parameters:
            _refuse_spread(parameter)
        replicated = frozenset().union(*(unit.held for unit in units()))
        left = dict.fromkeys(map(id, asked(given)))
        return [each for each in parameters if id(each) in left or (id(each) in replicated and each.requires_grad)]

    return to_average


def _each_of(given: Iterable[Any]) -> Iterable[nn.Parameter]:
    """Of parameters, or of an optimizer's groups."""
    for each in given:
        if isinstance(each, nn.Parameter):
            yield each
        elif isinstance(each, dict):
            yield from each["params"]


def _refuse_spread(parameter: nn.Parameter) -> None:
    unit, fqn, form = label_of(parameter) or ("", "", "")
    if form in _WHY:
        raise ShardedParameterError(
            f"a model averager on rank {dist.get_rank()} was given parameter '{fqn}' of unit '{unit}', which {_WHY[form]}. No "
            "parameter was changed"
        )
