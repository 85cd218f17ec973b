"""Why an optimizer must not step on gradients that were not averaged, in words; knows neither units nor how they average."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn
from torch.optim import Optimizer

from composable.errors import PhaseError

UNFINISHED: Final = "its gradients are still being averaged. Step when backward() has returned"
RAISED: Final = (
    "a backward before has raised, and its gradients were not averaged. Call zero_grad() and the module itself, model(x), to "
    "start anew"
)
REPLACED: Final = (
    "it was replaced or unfrozen after replicate, and then used without a call of the module, so its gradient was not "
    "averaged. Call the module itself, model(x), or annotate after the change"
)


def refuse_step(optimizer: Optimizer, unit: str, late: Iterable[tuple[nn.Parameter, str]], why: str) -> None:
    """Raise if `optimizer` holds one of the parameters in `late`, by name; see Note [Before an optimizer steps]."""
    names = {id(parameter): name for parameter, name in late}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                raise PhaseError(f"replicate(unit '{unit}'): parameter '{names[id(parameter)]}': {why}")
