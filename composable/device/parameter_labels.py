"""What is noted on a parameter: which unit it belongs to, and as what; knows neither units nor why anybody asks."""

from __future__ import annotations

from typing import Final

from torch import nn

_LABEL: Final = "_composable_unit"


def label(parameter: nn.Parameter, unit: str, fqn: str, form: str) -> None:
    """Note on a parameter, sharded or not, which unit it belongs to, its FQN there, and what it is to the unit."""
    setattr(parameter, _LABEL, (unit, fqn, form))  # plain strings: copies and files may take them along


def unlabel(parameter: nn.Parameter) -> None:
    """Forget what `label` noted."""
    vars(parameter).pop(_LABEL, None)


def label_of(parameter: nn.Parameter) -> tuple[str, str, str] | None:
    """The unit, FQN and form that `label` noted, None for a parameter that nobody sharded."""
    found: tuple[str, str, str] | None = getattr(parameter, _LABEL, None)
    return found


def copy_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target` the Python attributes that users have set on `source`."""
    vars(target).update({name: value for name, value in vars(source).items() if name not in (_LABEL, "_is_param")})
