"""What the user may pass as `offload_policy`, what it becomes, and where it means nothing; knows no parameter."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed import fsdp

from composable.config import CPUOffloadPolicy
from composable.device.streams import has_streams
from composable.errors import AnnotationError
from composable.runtime.mesh_info import MeshInfo

logger = logging.getLogger("composable")

Offload = CPUOffloadPolicy | fsdp.OffloadPolicy | None


def offload_policy_of(verb: str, value: Any) -> CPUOffloadPolicy | None:
    """The policy that an argument stands for; None for parameters that rest on the mesh's device.

    Raises:
        AnnotationError: it is none.
    """
    if isinstance(value, fsdp.CPUOffloadPolicy):
        return CPUOffloadPolicy(pin_memory=value.pin_memory)
    if value is None or type(value) is fsdp.OffloadPolicy:  # torch's way to say that nothing is offloaded
        return None
    if not isinstance(value, CPUOffloadPolicy):
        raise AnnotationError(
            f"{verb}: offload_policy must be a CPUOffloadPolicy (composable's or torch's), or None for parameters that rest on "
            f"the mesh's device; got {value!r}"
        )
    return value


def offload_policies(
    verb: str, options: Iterable[Mapping[str, Any]], alone_on: torch.device | None
) -> list[CPUOffloadPolicy | None]:
    """What each of these means.

    Args:
        alone_on: where parameters are and stay, of one process without a process group.

    Raises:
        AnnotationError: one of them is no policy; or such a process would leave parameters on an accelerator without a word.
    """
    found = [offload_policy_of(verb, each["offload_policy"]) for each in options]
    if any(found) and alone_on is not None and has_streams(alone_on):
        raise AnnotationError(
            f"{verb}: offload_policy needs a process group. Without one nothing is sharded, and parameters stay where they "
            f"are, on {alone_on}. Call torch.distributed.init_process_group first, for one process alone, too; or leave "
            "offload_policy out"
        )
    return found


def note_no_effect(verb: str, policies: Iterable[CPUOffloadPolicy | None], mesh_info: MeshInfo) -> None:
    """Say, once per call of a verb, that there is nothing to offload."""
    if any(policies) and not has_streams(mesh_info.device):
        logger.warning(
            "%s: offload_policy has no effect where ranks compute on the CPU: parameters are in the host's memory anyway. To "
            "compute on an accelerator, pass a mesh of it",
            verb,
        )
