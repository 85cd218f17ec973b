"""Refuses a forward that gave its module other parameters, or other memory to those that were unsharded; knows no phase."""

from __future__ import annotations

from typing import Final

from torch import nn

from composable.errors import ForeignParameterError
from composable.runtime.parameters import UnitParameters

_HOW_TO_CAST: Final = (
    "Cast the module before fully_shard, so that the forward has nothing to do, or let fully_shard cast what it computes with "
    "(mp_policy=); or cast a copy of the weight for the computation alone; or compute under torch.autocast"
)


def refuse_recast(parameters: UnitParameters) -> None:
    """After a call: raise if its module gave itself other parameters, or other memory to the unsharded ones."""
    if parameters.swap.strays:
        _refuse_strays(parameters)
    for group in parameters.groups:
        if group.moved():
            _refuse_moved(parameters)


def _refuse_strays(parameters: UnitParameters) -> None:
    """A forward registered parameters in place of ours: ours come back, and it is refused."""
    replaced = ""
    for param in parameters.params:
        strays = [held for held in param.held if isinstance(held, nn.Parameter) and held is not param.sharded]
        if strays:
            param.replace(param.sharded)
            replaced = replaced or f"'{param.info.fqn}' ({param.sharded.dtype}) by another one ({strays[0].dtype})"
    parameters.swap.strays = False
    if replaced:
        raise ForeignParameterError(
            f"the forward of unit '{parameters.unit}' replaced its parameter {replaced}, which would get this rank's gradient "
            f"alone. The parameter from before is there again. {_HOW_TO_CAST}"
        )


def _refuse_moved(parameters: UnitParameters) -> None:
    """A forward gave unsharded parameters other memory: they get ours again, and it is refused."""
    moved = [(name, dtype, group.flat.compute_dtype) for group in parameters.groups for name, dtype in group.move_back()]
    if moved:
        name, dtype, kept = moved[0]
        raise ForeignParameterError(
            f"the forward of unit '{parameters.unit}' gave its parameter '{name}' other memory ({dtype}, where the unit keeps "
            f"{kept}), as `.data = ...` and a module's `.to()` do; what is gathered would not reach it any more. "
            f"The parameter is as before. {_HOW_TO_CAST}"
        )
