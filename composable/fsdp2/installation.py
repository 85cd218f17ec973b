"""`install`: put composable in the place of FSDP2 in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from torch.distributed import fsdp

from composable.checked import checked
from composable.errors import ClashError
from composable.features.split_backwards import ON_SPLIT
from composable.fsdp2.module import FSDPModule
from composable.fsdp2.verb import fully_shard, register_fsdp_forward_method, share_comm_ctx
from composable.torch_private import classes_of_fsdp2, exchange_in_modules, modules_with

# torch's object, and ours
_PAIRS: Final[list[tuple[Any, Any]]] = [
    (getattr(fsdp, ours.__name__), ours)
    for ours in (fully_shard, FSDPModule, register_fsdp_forward_method, share_comm_ctx)
    if hasattr(fsdp, ours.__name__)  # share_comm_ctx came after the others
]
_PIPELINING: Final = (
    "torch.distributed.pipelining.stage",
    "torch.distributed.pipelining.schedules",
)
_USE_CPU: Final = "ACCELERATE_USE_CPU"  # accelerate, too, takes CPUs for ranks if it is "true"
# FSDP2's own code and what is built of it go on with their own classes.
_LEFT_ALONE: Final = (
    "composable.",
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed._composable.replicate_with_fsdp.",
)


class Installation:
    """What `install` returns. As a context manager it removes itself at the end of its body.

    Example:
        >>> with install():
        ...     trainer.train()
    """

    def __init__(self) -> None:
        # modules that import from composable.fsdp2 by themselves
        self._have_ours = set(_modules_with({id(ours): None for _, ours in _PAIRS}))
        self._of_accelerate: list[tuple[Any, Any]] = []
        self._used_cpu: str | None = None

    def _take_cpus(self) -> None:
        """Let accelerate shard on CPUs, too."""
        if not self._of_accelerate:
            self._used_cpu = os.environ.get(_USE_CPU)
        os.environ.update({_USE_CPU: "true"})
        self._of_accelerate = _pairs_of_accelerate()
        by_id = {id(theirs): ours for theirs, ours in self._of_accelerate}
        exchange_in_modules(modules_with(by_id), by_id)

    def remove(self) -> None:
        """Restore torch's objects, also in modules that were imported in the meantime.

        You may call it again. Annotated modules stay annotated.
        """
        global _installed
        if _installed is self:
            _installed = None
            back = {id(ours): torchs for torchs, ours in _PAIRS}
            names = [name for name in _modules_with(back) if name not in self._have_ours]
            exchange_in_modules(names, back)
            if self._of_accelerate:
                back = {id(ours): theirs for theirs, ours in self._of_accelerate}
                exchange_in_modules(modules_with(back), back)
                os.environ.pop(_USE_CPU, None)
                os.environ.update({} if self._used_cpu is None else {_USE_CPU: self._used_cpu})

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_installed: Installation | None = None


@checked
def install(*, cpu: bool = False) -> Installation:
    """Put composable in the place of FSDP2 for all that this process imports and has imported.

    It replaces `fully_shard`, `FSDPModule`, `register_fsdp_forward_method` and `share_comm_ctx` of
    `torch.distributed.fsdp` by those of this package. It does so in torch's modules, and in every
    imported module that has one of torch's objects as an attribute, under any name. Rank 0 prints
    one line on stderr that names these modules. Policies and handles stay torch's own classes, and
    FSDP2's own code does not change. If you call it again, it replaces what was imported in
    between, and returns the same handle. So a script and a library that it uses may both call it.

    Args:
        cpu: let accelerate, and trainers that use it, shard on CPUs, for which they offer no FSDP.
            Use this to try a script.

    Returns:
        A handle whose `remove()` puts torch's objects back.

    Raises:
        ClashError: torch's FSDP2 has already sharded modules of this process. Nothing is replaced.

    Example:
        >>> from composable.fsdp2 import install
        >>> install()
        >>> accelerator.prepare(model, optimizer)  # shards by composable
    """
    global _installed
    made = classes_of_fsdp2()
    if made:
        raise ClashError(
            f"composable.fsdp2.install: torch's FSDP2 has sharded modules of this process already"
            f" ({made[0]}), and the two do not work in one model. Call install() before anything is"
            " sharded; nothing was replaced"
        )
    installed = _installed = _installed or Installation()
    by_id = {id(torchs): ours for torchs, ours in _PAIRS}
    names = _modules_with(by_id)
    exchange_in_modules(names, by_id)
    if cpu:
        installed._take_cpus()
    if names and os.environ.get("RANK", "0") == "0":
        replaced = ", ".join(ours.__name__ for _, ours in _PAIRS)
        print(
            f"composable.fsdp2: {replaced} of torch.distributed.fsdp are composable's now, in"
            f" {len(names)} modules: {', '.join(names)}",
            file=sys.stderr,
        )
    return installed


def _modules_with(wanted: Mapping[int, Any]) -> list[str]:
    """Find the imported modules that have one of these, but for those that are left alone."""
    package = "torch.distributed.fsdp._fully_shard"  # not its code, but the names it offers
    return [
        name
        for name in modules_with(wanted)
        if name == package or not f"{name}.".startswith(_LEFT_ALONE)
    ]


# --- accelerate, on CPUs --------------------------------------------------------------------------


@cache
def _pairs_of_accelerate() -> list[tuple[Any, Any]]:
    """Return accelerate's class, and one that takes CPU ranks, too; none if it is missing."""
    if find_spec("accelerate") is None:
        return []
    state = import_module("accelerate.state")
    theirs = state.AcceleratorState
    kinds = import_module("accelerate.utils").DistributedType

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        theirs.__init__(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type != kinds.MULTI_CPU or not asks_for_fsdp() or fsdp_plugin is None:
            return
        # what AcceleratorState does on accelerators
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.distributed_type, self.fsdp_plugin = kinds.FSDP, fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = kinds.FSDP

    # a subclass: they share their state by an attribute of the class
    return [(theirs, type(theirs.__name__, (theirs,), {"__init__": __init__}))]


def asks_for_fsdp() -> bool:
    """Whether accelerate was asked for FSDP in this process; it says so in the environment."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


# --- pipelines, without `install` -----------------------------------------------------------------


def _show_stages() -> None:
    """Make annotated modules visible to torch's schedules that split backwards.

    Their stages check whether a module is an instance of FSDP2's class, and have no other way to
    know it. If it is, they call the methods of `FSDPModule` that accumulate or reduce gradients,
    and read `fully_shard.state`.
    """
    for name in _PIPELINING:
        # It is called in every forward, and looks at all attributes only once.
        if getattr(sys.modules.get(name), "FSDPModule", FSDPModule) is not FSDPModule:
            exchange_in_modules([name], {id(torchs): ours for torchs, ours in _PAIRS})


ON_SPLIT.append(_show_stages)
