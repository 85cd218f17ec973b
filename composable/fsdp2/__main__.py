"""`python -m composable.fsdp2 script.py args`: run a script written for FSDP2 over composable."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from composable.api.annotate import UnitPlan, observe_annotations
from composable.contract.tree import SHARD
from composable.fsdp2.installation import asks_for_fsdp, install

_USAGE: Final = "python -m composable.fsdp2 [--cpu] script.py [args], or [--cpu] -m module [args]"
_PAGE: Final = "docs/guides/trainers.md"


def main(arguments: list[str]) -> int:
    """Run a script or a module as `__main__`, after `install()`.

    When it has ended or raised, rank 0 says on stderr what was sharded, or why nothing was.

    Args:
        arguments: as Python itself takes them: the script and its arguments, or "-m" and a module.
            Before them "--cpu", which stands for `install(cpu=True)`.

    Returns:
        2 if there is no such script or module; nothing is run then.
    """
    cpu, arguments = arguments[:1] == ["--cpu"], arguments[arguments[:1] == ["--cpu"] :]
    by_name, rest = arguments[:1] == ["-m"], arguments[arguments[:1] == ["-m"] :]
    if not rest or rest[0].startswith("-"):
        return _refuse(f"no script to run; call it as {_USAGE}")
    if by_name and not _is_module(rest[0]):
        return _refuse(f"there is no module named '{rest[0]}'")
    if not by_name and not os.path.exists(rest[0]):
        return _refuse(f"there is no script '{rest[0]}'")
    install(cpu=cpu)
    sys.argv = rest
    outcome = Outcome()
    end = observe_annotations(outcome.note)
    try:
        if by_name:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
            runpy.run_path(rest[0], run_name="__main__")
    finally:
        end()
        if os.environ.get("RANK", "0") == "0":
            print(f"composable.fsdp2: {outcome}", file=sys.stderr)
    return 0


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _refuse(why: str) -> int:
    print(f"composable.fsdp2: {why}", file=sys.stderr)
    return 2


# --- the last line --------------------------------------------------------------------------------


class Outcome:
    """What was sharded while the script ran, or why nothing was: the last line of the runner.

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
        plugin = state.AcceleratorState._shared_state.get("fsdp_plugin")
        if getattr(plugin, "fsdp_version", 2) != 2:
            return 'accelerate was asked for FSDP1. Ask for FSDP2: "version": 2, or fsdp_version=2'
    return (
        "nothing has called fully_shard of torch.distributed.fsdp, or of composable."
        f" {_PAGE} says how trainers are asked for FSDP2"
    )


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
