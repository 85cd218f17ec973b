"""Who competes: from a name to a model that is scaled that way; must not know what is measured.

Every contender gets the same units: each block of the model, and the root for what is left.
Libraries are imported when their contender is built, so that none pays for another's import.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from options import BEFORE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def _local(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    return model


def _composable(
    reshard: bool | None,
) -> Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]:
    def scale(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
        from composable import fully_shard

        fully_shard(
            model,
            mesh=mesh,
            policy={units},
            **({} if reshard is None else {"reshard_after_forward": reshard}),
        )
        return model

    return scale


def _composable_replicate(
    views: bool,
) -> Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]:
    def scale(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
        from composable import replicate

        # earlier code has no such option
        options = {"gradient_as_bucket_view": True} if views else {}
        replicate(model, mesh=mesh, **options)
        return model

    return scale


def _fsdp2(reshard: bool) -> Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]:
    def scale(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, units):
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        # The root at FSDP2's own default (kept until backward): the setting that its authors
        # advise.
        fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
        return model

    return scale


def _fsdp1(
    strategy: str, original: bool
) -> Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]:
    def scale(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({units}),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
            device_id=(
                torch.device("cuda", torch.cuda.current_device())
                if mesh.device_type == "cuda"
                else torch.device("cpu")
            ),
        )

    return scale


def _ddp(views: bool) -> Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]:
    def scale(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        from torch.nn.parallel import DistributedDataParallel

        devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=views)
        if dist.get_backend() in ("fake", "hollow"):
            # The reducer asks the collective for its result, which a faked one does not have.
            wrapped.register_comm_hook(None, noop_hook)
        return wrapped

    return scale


LOCAL: Final = "un-annotated"
# for those who time clipping, where the library has a function of its own
ON_SHARDS: Final = "composable-on-shards"
# for those who time steps in the scope `together`
TOGETHER: Final = "composable-together"
# for those who time the host: what torch's own calls take
PLAIN_CALLS: Final = "plain-calls"

CONTENDERS: Final[dict[str, Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]]] = {
    LOCAL: _local,
    "composable": _composable(reshard=None),
    "fsdp2": _fsdp2(reshard=True),
    "fsdp1": _fsdp1("FULL_SHARD", original=True),
    "composable-keep": _composable(reshard=False),
    "fsdp2-keep": _fsdp2(reshard=False),
    "fsdp1-keep": _fsdp1("SHARD_GRAD_OP", original=True),
    "composable-replicate": _composable_replicate(views=False),
    "composable-replicate-views": _composable_replicate(views=True),
    "ddp": _ddp(views=False),
    "ddp-views": _ddp(views=True),
    "fsdp1-flat": _fsdp1("FULL_SHARD", original=False),
    TOGETHER: _composable(reshard=None),
}

MEANING: Final = {
    LOCAL: "the model as it is: each rank computes alone, nothing is communicated",
    "composable": (
        "composable `fully_shard(model, policy={Block})`, as it comes: root and last block stay"
        " until backward"
    ),
    "composable-keep": "the same with `reshard_after_forward=False`",
    ON_SHARDS: (
        "composable that clips with `composable.clip_grad_norm_`, which works on local shards as"
        " its optimizers do"
    ),
    "composable-replicate": "composable `replicate(model)`",
    "composable-replicate-views": "the same with `gradient_as_bucket_view=True`",
    "fsdp2": (
        "`torch.distributed.fsdp.fully_shard` on each block and the root, as it comes: the root"
        " stays until backward"
    ),
    "fsdp2-keep": "the same with `reshard_after_forward=False`",
    PLAIN_CALLS: (
        "`plain_calls.py`: torch's own calls that a sharded unit needs, from bare hooks; cannot"
        " train"
    ),
    "fsdp1": "`FullyShardedDataParallel`, `FULL_SHARD`, `use_orig_params=True`",
    "fsdp1-keep": "the same with `SHARD_GRAD_OP`",
    "fsdp1-flat": "`FullyShardedDataParallel`, `FULL_SHARD`, `use_orig_params=False`",
    "ddp": (
        "`DistributedDataParallel` (with a communication hook that does nothing where the process"
        " group is a fake)"
    ),
    "ddp-views": "the same with `gradient_as_bucket_view=True`",
    TOGETHER: "composable, each step in the scope `together`",
}


def scale(
    name: str, model: nn.Module, units: type[nn.Module], *, device: torch.device, world: int
) -> nn.Module:
    """`model` scaled by contender `name` over all ranks: the model itself, or the wrapper that the
    contender makes.
    """
    return CONTENDERS[name.removeprefix(BEFORE)](
        model, units, init_device_mesh(device.type, (world,))
    )


def with_before(names: Sequence[str], before: Path | None) -> list[str]:
    """`names`, each of composable's followed by the one of the checkout `before`, if there is
    one.
    """
    each = [
        [name, BEFORE + name] if before is not None and name.startswith("composable") else [name]
        for name in names
    ]
    return [name for several in each for name in several]


def against_before(names: Sequence[str]) -> list[tuple[str, str, float | None]]:
    """Which pairs to compare: this code and that of the other checkout."""
    return [(name.removeprefix(BEFORE), name, None) for name in names if name.startswith(BEFORE)]


def add_choice(
    options: argparse.ArgumentParser, default: Sequence[str], also: Sequence[str] = ()
) -> None:
    """Add `--contenders`; `also`: contenders that only the caller can build."""
    known = ", ".join([*CONTENDERS, *also])
    options.add_argument(
        "--contenders",
        default=",".join(default),
        metavar="NAMES",
        help=f"names or globs, separated by commas; of: {known}",
    )


def chosen(options: argparse.ArgumentParser, patterns: str, also: Sequence[str] = ()) -> list[str]:
    """The contenders that `--contenders` names, each once, in the order of `CONTENDERS` and `also`
    for a glob.
    """
    names: list[str] = []
    known = [*CONTENDERS, *also]
    for pattern in patterns.split(","):
        matching = [name for name in known if fnmatchcase(name, pattern.strip())]
        if not matching:
            options.error(f"--contenders: {pattern!r} matches none of {', '.join(known)}")
        names += [name for name in matching if name not in names]
    return names
