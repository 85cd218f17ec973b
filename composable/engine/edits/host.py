"""Units that rest on the host between two phases of training."""

from __future__ import annotations

import torch

from composable.engine.step.unit import Unit
from composable.errors import AnnotationError, PhaseError
from composable.memory.offload import HostHome
from composable.memory.torch_private import can_take_data


def refuse_extended(what: str, unit: Unit) -> None:
    """Raise if parameters are gathered in a form of their own, and have no shard buffer."""
    for group in unit.groups:
        if group.extended:
            raise AnnotationError(
                f"{what}: unit '{unit.name}' gathers parameters in a form of their own"
                f" (fsdp_pre_all_gather), '{group.params[0].fqn}' among them; {what} takes"
                " plain parameters only. Leave it out for this model"
            )


def refuse_sleep(unit: Unit) -> None:
    """Raise where `sleep` may not be called."""
    refuse_extended("offload_to_host", unit)
    if unit.shown_by or unit.gradients.has_unreduced:
        what = (
            f"inside of {unit.shown_by}"
            if unit.shown_by
            else "with accumulated gradients; call reduce_gradients(model) first, or zero_grad()"
        )
        raise PhaseError(
            f"offload_to_host was called on unit '{unit.name}' {what}. Call it between two steps"
        )
    if unit.is_sharded or unit.mesh_info.device.type == "cpu":
        return
    for param in unit.params:
        own = param.own
        if own is not None and not can_take_data(own, torch.empty(0, device="cpu")):
            raise AnnotationError(
                f"offload_to_host: parameter '{param.fqn}' of unit '{unit.name}' is replicated"
                f" on {own.device}, whose tensors torch cannot move in place. Shard it, or"
                " leave the model where it is"
            )


def sleep(unit: Unit, home: HostHome | None) -> None:
    """Let parameters and gradients rest on the host, and give up what the device holds, until
    `Unit.wake`.

    Args:
        home: None: they are on the host already.
    """
    unit.give_up_step()
    unit.forget_root()  # it holds shards
    unit.hide()
    unit.reshard()
    unit.sleep(home)
