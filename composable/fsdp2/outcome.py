"""The last line of the runner: what was sharded while the script ran, or why nothing was."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from composable.api.annotate import UnitPlan
from composable.contract.tree import SHARD
from composable.fsdp2.on_cpus import asks_for_fsdp

_PAGE = "docs/guides/trainers.md"


class Outcome:
    """Counts what is annotated.

    Attributes:
        units, numel: of `fully_shard`.
        ranks: the most that one unit was sharded over.
        last: the class of the module that was sharded last, usually the model.
        replicated: whether `replicate` was called.
    """

    def __init__(self) -> None:
        self.units = self.numel = self.ranks = 0
        self.last = ""
        self.replicated = False

    def note(self, verb: str, plans: Sequence[UnitPlan]) -> None:
        """Note an annotation that has been made."""
        if verb != SHARD:
            self.replicated = True
            return
        self.units += len(plans)
        self.numel += sum(each.managed.tensor.numel() for plan in plans for each in plan.params)
        shards = (1 if plan.mesh_plan is None else plan.mesh_plan.num_shards for plan in plans)
        self.ranks = max(self.ranks, *shards)
        self.last = type(plans[0].modules[0]).__name__

    def __str__(self) -> str:
        if not self.units:
            return f"nothing was sharded: {_why_nothing(self.replicated)}"
        said = (
            f"{self.units} unit{'s' if self.units > 1 else ''} with {self.numel:,} parameters"
            f" sharded over {self.ranks} rank{'s' if self.ranks > 1 else ''}, last {self.last}"
        )
        if self.ranks == 1:
            world = _world()
            said += ". Over one rank nothing is sharded: " + (
                f"the world has {world}, and the mesh that the script or its trainer passed has one"
                if world > 1
                else "start more by torchrun"
            )
        return said


def _why_nothing(replicated: bool) -> str:
    """Say what kept the script from calling `fully_shard`, as far as this process can see."""
    if replicated:
        return "the script called replicate alone"
    state = sys.modules.get("accelerate.state")
    if state is not None and (kind := state.PartialState._shared_state.get("distributed_type")):
        name = str(getattr(kind, "value", kind))
        if not asks_for_fsdp():
            return f"accelerate was not asked for FSDP. {_PAGE} says how trainers are asked for it"
        world = _world()
        if name == "NO" and world == 1:
            return "there is one process. Start several by torchrun or accelerate launch"
        if name in ("NO", "MULTI_CPU"):
            alone = "and found none: each rank trained by itself"
            averaged = "and its ranks are on CPUs: they trained by DistributedDataParallel"
            found = alone if name == "NO" else averaged
            return (
                f"accelerate offers FSDP on accelerators only, {found}."
                " To try a script on CPUs, run it by -m composable.fsdp2 --cpu"
            )
        if getattr(_plugin(state), "fsdp_version", 2) != 2:
            return 'accelerate was asked for FSDP1. Ask for FSDP2: "version": 2, or fsdp_version=2'
    return (
        "nothing has called fully_shard of torch.distributed.fsdp, or of composable."
        f" {_PAGE} says how trainers are asked for FSDP2"
    )


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _plugin(state: object) -> object:
    return state.AcceleratorState._shared_state.get("fsdp_plugin")  # type: ignore[attr-defined]
