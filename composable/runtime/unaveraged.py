"""Why an optimizer must not step on gradients that were not averaged, in words; knows no unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from torch import nn
from torch.optim import Optimizer

from composable.device.private import in_backward
from composable.errors import PhaseError
from composable.runtime.reducer import Reducer

UNFINISHED: Final = "its gradients are still being averaged. Step when backward() has returned"
RAISED: Final = (
    "a backward before has raised, and its gradients were not averaged. Call zero_grad() and the module itself, model(x), to "
    "start anew"
)
HELD: Final = (
    "its gradient is this rank's alone: it was made under no_sync, and no backward since has averaged it over the ranks. Run "
    "the last backward before a step outside of no_sync, or call reduce_gradients(model), on all ranks"
)
REPLACED: Final = (
    "it was replaced or unfrozen after replicate, and then used without a call of the module, so its gradient was not "
    "averaged. Call the module itself, model(x), or annotate after the change"
)


def refuse_unaveraged(
    optimizer: Optimizer,
    unit: str,
    reducer: Reducer,
    registered: Sequence[tuple[nn.Parameter, str]],
    has_backward: bool,
    at_rest: Callable[[nn.Parameter], nn.Parameter],
) -> None:
    """Raise when gradients that `optimizer` is about to use were not averaged; see Note [Before an optimizer steps].

    Args:
        registered: what the unit's modules compute with, and names.
        has_backward: one was opened and not closed.
        at_rest: what users see of such a parameter between steps.
    """
    if has_backward:
        late = [(at_rest(parameter), name) for parameter, name in reducer.parameters.trainable()]
        refuse_step(optimizer, unit, late, UNFINISHED if in_backward() else RAISED)
        return
    if not reducer.fits([parameter for parameter, _ in registered]):
        refuse_step(optimizer, unit, reducer.parameters.missed(registered), REPLACED)
    if reducer.local.accumulation.passes:
        refuse_step(optimizer, unit, reducer.local.named(), HELD)


def refuse_step(optimizer: Optimizer, unit: str, late: Iterable[tuple[nn.Parameter, str]], why: str) -> None:
    """Raise if `optimizer` holds one of the parameters in `late`, by name; see Note [Before an optimizer steps]."""
    names = {id(parameter): name for parameter, name in late}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                raise PhaseError(f"replicate(unit '{unit}'): parameter '{names[id(parameter)]}': {why}")
