"""Refuses parametrizations of parameters that rest as DTensors, before they compute with these; parametrizes nothing.

Note [Late parametrizations]
Weight norm, spectral norm and other parametrizations put parameters of their own in the place of one, and begin with its value.
Where that is a DTensor some fail on the way, by an operator that DTensors do not have, and others leave parameters that no unit
knows. So torch asks here first, when nothing has changed yet. What comes by another way (`torch.nn.utils.weight_norm`, which
torch has deprecated) is refused at the next forward, as all parameters are that came after the annotation. A second one of a
parameter that has one already is added without being asked about.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from torch import nn

from composable.device.parameter_labels import label_of
from composable.device.private_operations import ask_before_parametrizing
from composable.errors import ShardedParameterError
from composable.runtime.optimizer_hooks import Form

_RESTS: Final = {
    Form.SHARDED.name: ("is sharded", "remove(module, fully_shard)"),
    Form.REPLICATED.name: (
        "is replicated, and rests as a DTensor because others are sharded",
        "remove(module, fully_shard), and remove(module, replicate) on the one that is replicated",
    ),
}


@cache
def refuse_late_parametrizations() -> None:
    """Have torch's parametrizations ask here."""
    ask_before_parametrizing(_refuse)


def _refuse(parameter: nn.Parameter) -> None:
    unit, fqn, form = label_of(parameter) or ("", "", "")
    if form in _RESTS:
        how, cure = _RESTS[form]
        raise ShardedParameterError(
            f"parameter '{fqn}' of unit '{unit}' {how}, and a parametrization (weight norm, spectral norm and the like) begins "
            f"with a plain one. Register parametrizations before annotating: call {cure}, register them, and annotate again. "
            "Nothing was registered"
        )
